"""Engines in a process of its own, one configuration after the other, as far as stores ask: no weights are loaded.

Everything is the real one: vLLM's configuration, its block hashes of a request, the connector, the tiers. Reads one
JSON from the standard input, the argument of `look`, and prints what that returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_harness import BLOCK, PATIENCE_S, connector_arguments, engine_arguments, prepare_process
from vllm_models import make_adapter

NUM_TOKENS = 8 * BLOCK + 5
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]


class Lines(logging.Handler):
    """The identity lines of engines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def kv_cache_config(changes: dict[str, Any]) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    layout = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": "float32", **changes.get("layout", {})}
    layout["dtype"] = getattr(torch, layout["dtype"])
    spec = SlidingWindowSpec(**layout) if "sliding_window" in layout else FullAttentionSpec(**layout)
    layers = changes.get("layers", LAYERS)
    return KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])


@contextlib.contextmanager
def elsewhere(values: dict[str, Any]) -> Iterator[None]:
    """As on another machine: what vLLM or torch say there."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            new = (lambda value=value: value) if name.endswith("()") else value
            stack.enter_context(mock.patch(name.removesuffix("()"), new))
        yield


def start(model: str, changes: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """The connector of an engine with these settings, the context of a request, and vLLM's keys of its blocks."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from vllm import SamplingParams

    os.environ.pop("PYTHONHASHSEED", None)
    if "hash_seed" in changes:
        os.environ["PYTHONHASHSEED"] = changes["hash_seed"]
    settings = {"ram": "4MiB", "deadline_s": 60, "prefill_tokens_per_s": 0, **changes["ours"]}
    transfer = KVTransferConfig(**connector_arguments(settings))
    arguments = engine_arguments(Path(model), 40, kv_transfer_config=transfer, **changes.get("vllm", {}))
    config = EngineArgs(**arguments).create_engine_config()
    if "page_layout" in changes:
        config.cache_config.kv_cache_layout = changes["page_layout"]  # as the engine's core works it out
    kv_cache = kv_cache_config(changes)
    with elsewhere(changes.get("elsewhere", {})):
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    adapter = None
    if "adapter" in changes:
        name, path, seed = changes["adapter"]
        adapter = LoRARequest(name, 1, str(make_adapter(Path(path), seed)))
    block_size = kv_cache.kv_cache_groups[0].kv_cache_spec.block_size
    request = Request(
        "request",
        list(range(NUM_TOKENS)),
        SamplingParams(max_tokens=1),
        None,
        cache_salt=changes.get("salt"),
        lora_request=adapter,
        block_hasher=get_request_block_hasher(block_size, hash_function),
    )
    connector.on_new_request(request)
    state = connector.scheduler._req_status["request"]
    state.update_offload_keys()
    return connector, state.req_context, state.group_states[0].offload_keys


def find(manager: Any, context: Any, keys: Sequence[Any]) -> int | None:
    """What the blocks are full of that a tier has under these keys."""
    from vllm.v1.kv_offload.base import LookupResult

    give_up_at_s = time.monotonic() + PATIENCE_S
    while True:
        manager.advance()
        answers = {manager.lookup(key, context) for key in keys}
        if answers <= {LookupResult.HIT, LookupResult.MISS}:
            break
        assert time.monotonic() < give_up_at_s, answers
        manager.core.on_schedule_end()
        manager.linger(0.1)
    if LookupResult.MISS in answers:
        assert len(answers) == 1, "a part of the prompt is there"
        return None
    spec = manager.prepare_load(keys, context)
    (content,) = {int(byte) for slot in spec.slots for byte in set(manager.pool.slots()[slot].tobytes())}
    manager.core.complete_load(spec.keys, manager.context_of(context), spec=spec)
    return content


def store(manager: Any, context: Any, keys: Sequence[Any], content: int) -> None:
    """Blocks full of `content` go to the tier below RAM."""
    spec = manager.prepare_store(keys, context).store_spec
    assert len(spec.keys) == len(keys)
    manager.pool.slots()[list(spec.slots)] = content
    manager.core.complete_store(spec.keys, manager.context_of(context), spec=spec)
    give_up_at_s = time.monotonic() + PATIENCE_S
    while manager.stack.tiered.num_to_flush:
        assert time.monotonic() < give_up_at_s
        manager.core.on_schedule_end()
        manager.stack.tiers[0].wait_for_outcome(0.1)
        manager.advance()
    assert manager.core.get_stats().counters["cascaded_blocks"] == len(keys)


def look(order: dict[str, Any]) -> dict[str, Any]:
    """`order` is `{"store": bool, "model": folder, "variants": {name: changes}}`.

    For each variant: its namespace, and what is found of its prompt: the byte that the blocks are full of, or None.
    Then, with `store`, blocks full of its number (from 1) are stored, where there were none.
    """
    prepare_process()
    from kvtier.runtime.identity_record import read_record

    logger, level = logging.getLogger("kvtier"), logging.getLogger("kvtier").level
    results = {}
    for content, (name, changes) in enumerate(order["variants"].items(), 1):
        lines = Lines()
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
        connector, context, keys = start(changes.get("model", order["model"]), changes)
        logger.removeHandler(lines)
        logger.setLevel(level)
        manager = connector._manager
        found = find(manager, context, keys)
        if order["store"] and found is None:
            store(manager, context, keys, content)
            if changes.get("reset"):
                connector.reset_cache()
        connector.shutdown()
        results[name] = {"found": found, "namespace": read_record(lines.text, "log").namespace}
    return results


if __name__ == "__main__":
    import kvtier.adapters.vllm  # noqa: F401 - else it would set its own log level later

    print(json.dumps(look(json.load(sys.stdin))))
