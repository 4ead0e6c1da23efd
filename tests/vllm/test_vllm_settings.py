"""What the user sets: events, what is stored, vLLM's own names for it; and settings that cannot work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import (
    BLOCK,
    PATIENCE_S,
    Engine,
    Prompts,
    connector_arguments,
    engine_arguments,
    engine_environment,
    prepare_process,
)

from kvtier.errors import ConfigurationError

LENGTH = 6 * BLOCK + 10
IN_BLOCKS = 6 * BLOCK
BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # of the dense model: layers, K and V, heads, head size, float32

new_prompt = Prompts(seed=8)


# -- events --------------------------------------------------------------------------------------------------


@pytest.fixture
def published(dense, start_engine, monkeypatch) -> tuple[Engine, list[Any]]:
    """An engine whose KV events are on, with room for 8 blocks, and what it publishes about the RAM."""
    prepare_process()
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    settings = {"ram": 8 * BLOCK_BYTES, "policy": "lru", "self_describing_kv_events": True}
    engine = start_engine(dense, settings=settings, kv_events_config=events)
    seen: list[Any] = []

    def publish(batch: Any) -> None:
        seen.extend(event for event in batch.events if getattr(event, "medium", None) == "CPU")

    monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", publish)
    return engine, seen


def test_events_tell_what_is_stored_and_removed(published):
    engine, seen = published
    one, two = new_prompt(LENGTH), new_prompt(LENGTH)
    engine.ask(one)
    assert [type(event).__name__ for event in seen] == ["BlockStored"] * 6
    first_hashes = [block_hash for event in seen for block_hash in event.block_hashes]
    assert len(set(first_hashes)) == 6
    assert [token for event in seen for token in event.token_ids] == one[:IN_BLOCKS]

    seen.clear()
    engine.ask(two)
    removed = [
        block_hash for event in seen if type(event).__name__ == "BlockRemoved" for block_hash in event.block_hashes
    ]
    stored = [
        block_hash for event in seen if type(event).__name__ == "BlockStored" for block_hash in event.block_hashes
    ]
    assert len(stored) == 6
    assert sorted(map(str, removed)) == sorted(map(str, first_hashes[2:]))  # the deepest go first, and only 4 must

    seen.clear()
    assert engine.reset()
    engine.submit(new_prompt(5))
    engine.drain()
    gone = {str(block_hash) for event in seen for block_hash in getattr(event, "block_hashes", ())}
    assert engine.core.get_stats().ready_blocks == 0
    assert gone == {str(block_hash) for block_hash in [*first_hashes[:2], *stored]} or any(
        type(event).__name__ == "AllBlocksCleared" for event in seen
    )


def test_a_failed_store_is_not_announced(published):
    engine, seen = published
    with engine.failing("store"):
        engine.ask(new_prompt(LENGTH))
    assert seen == []


# -- what is stored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_only", [True, False])
def test_generated_blocks_are_stored_if_asked_for(dense, plain, start_engine, prompt_only):
    engine = start_engine(dense, settings={"offload_prompt_only": prompt_only})
    prompt = new_prompt(2 * BLOCK + 10)
    first = engine.ask(prompt, max_tokens=3 * BLOCK)
    assert first.tokens == plain(dense).answer(prompt, 3 * BLOCK)
    second_prompt = prompt + first.tokens + new_prompt(7)
    second = engine.ask_afresh(second_prompt)
    assert second.tokens == plain(dense).answer(second_prompt)
    # the last generated token's own keys and values were never computed
    all_blocks = (len(prompt) + len(first.tokens) - 1) // BLOCK
    assert second.num_cached == (2 if prompt_only else all_blocks) * BLOCK


def test_with_a_threshold_of_two_the_third_request_finds_the_whole_prompt(dense, plain, start_engine):
    engine = start_engine(dense, settings={"store_threshold": 2})
    prompt = new_prompt(20 * BLOCK + 3)
    asks = [engine.ask_afresh(prompt) for _ in range(3)]
    assert [ask.num_cached for ask in asks] == [0, 0, 20 * BLOCK]
    assert [ask.tokens for ask in asks] == [plain(dense).answer(prompt)] * 3
    assert engine.counters["stored_blocks"] == 20
    assert engine.counters["filtered_blocks"] == 20


def test_vllms_own_names_mean_what_they_mean_there(dense, plain, start_engine):
    settings = {
        "cpu_bytes_to_use": 5 * 4 * BLOCK_BYTES + 1000,
        "eviction_policy": "lru",
        "block_size": 4 * BLOCK,
        "store_threshold": 0,
        "max_tracker_size": 1000,
        "offload_prompt_only": True,
    }
    engine = start_engine(dense, settings=settings)
    assert engine.core.get_stats().capacity_blocks == 5
    prompt = new_prompt(9 * BLOCK)
    engine.ask(prompt)
    assert engine.core.get_stats().ready_blocks == 2
    ask = engine.ask_afresh(prompt)
    assert ask.num_cached == 8 * BLOCK
    assert ask.tokens == plain(dense).answer(prompt)


# -- settings that cannot work -------------------------------------------------------------------------------

BAD_SETTINGS = {
    "an unknown key": ({"ram": "1GiB", "polcy": "lru"}, ["polcy", "policy"]),
    "an unknown key that resembles none": ({"ram": "1GiB", "zzz": 1}, ["zzz", "ram", "deadline_s"]),
    "no size": ({}, ["ram"]),
    "a size that is no size": ({"ram": "plenty"}, ["ram", "plenty", "GiB"]),
    "a size of nothing": ({"ram": 0}, ["ram", "0"]),
    "a negative size": ({"ram": -5}, ["ram", "-5"]),
    "two sizes": ({"ram": "1GiB", "cpu_bytes_to_use": 1}, ["ram", "cpu_bytes_to_use"]),
    "more than the machine has": ({"ram": "900TB"}, ["ram is '900TB'", "leaves"]),
    "more than the machine has, vLLM's key": ({"cpu_bytes_to_use": 9 * 10**14}, [f"cpu_bytes_to_use is {9 * 10**14}"]),
    "too little for one block": ({"ram": 1000}, ["ram", "1000", str(BLOCK_BYTES)]),
    "too little for one chunk": ({"ram": 3 * BLOCK_BYTES, "blocks_per_chunk": 4}, ["ram", str(4 * BLOCK_BYTES)]),
    "an unknown policy": ({"ram": "1MiB", "policy": "magic"}, ["policy", "magic", "arc", "lru"]),
    "an unknown policy, vLLM's key": ({"ram": "1MiB", "eviction_policy": "magic"}, ["eviction_policy", "arc"]),
    "a negative deadline": ({"ram": "1MiB", "deadline_s": -1}, ["deadline_s", "-1", "0"]),
    "a deadline that is no number": ({"ram": "1MiB", "deadline_s": "soon"}, ["deadline_s", "soon"]),
    "a chunk of nothing": ({"ram": "1MiB", "blocks_per_chunk": 0}, ["blocks_per_chunk", "0"]),
    "a chunk that is not whole blocks": ({"ram": "1MiB", "block_size": BLOCK + 1}, ["block_size", str(BLOCK + 1)]),
    "a folder that is not there": ({"ram": "1MiB", "pool_dir": "/nowhere/at/all"}, ["pool_dir", "/nowhere/at/all"]),
    "a folder that is a file": ({"ram": "1MiB", "pool_dir": __file__}, ["pool_dir", __file__]),
    "a disk that is none": ({"ram": "1MiB", "disk": "/tmp"}, ["disk is '/tmp'", "capacity"]),
    "a disk in a file": ({"ram": "1MiB", "disk": {"path": __file__, "capacity": "1GiB"}}, ["disk.path", __file__]),
    "a disk for no block": (
        {"ram": "1MiB", "disk": {"path": "/tmp/kvtier-test-settings", "capacity": 20_000}},
        ["disk capacity is 20000 bytes", str(BLOCK_BYTES)],
    ),
    "a tier of a kind that there is not": ({"ram": "1MiB", "tiers": ["vlkey://host"]}, ["tiers[0]", "valkey://"]),
    "an unknown option of a tier": (
        {"ram": "1MiB", "tiers": ["valkey://host?conections=3"]},
        ["tiers[0]", "'conections'", "'connections'"],
    ),
    "a disk in two places": (
        {"ram": "1MiB", "disk": {"path": "/tmp", "capacity": "1GiB"}, "tiers": ["disk:///tmp/b?capacity=1GiB"]},
        ["'disk'", "'tiers'"],
    ),
    "a folder without room": ({"ram": "1MiB", "pool_dir": "/proc"}, ["ram is '1MiB'", "/proc", "leaves 0"]),
}


def build_connector(model: Path, settings: dict[str, Any], **changes: Any) -> None:
    """What an engine does with the settings before anything of ours is started."""
    prepare_process()
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    transfer = KVTransferConfig(**connector_arguments(dict(settings)))
    config = EngineArgs(**engine_arguments(model, 40, kv_transfer_config=transfer, **changes)).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    kv_cache = KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache).shutdown()


def test_good_settings_build_a_connector(dense):
    build_connector(dense, {"ram": "1MiB"})


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused_in_one_line(dense, settings, words):
    with pytest.raises((ConfigurationError, ValueError)) as refusal:
        build_connector(dense, settings)
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(dense, tmp_path, monkeypatch):
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o555)
    if os.geteuid() == 0:  # who may write anywhere
        may = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and may(path, mode))
    with pytest.raises(ConfigurationError) as refusal:
        build_connector(dense, {"ram": "1MiB", "pool_dir": str(folder)})
    assert "\n" not in str(refusal.value)
    assert f"pool_dir '{folder}'" in str(refusal.value)
    assert list(folder.iterdir()) == []


def test_pipeline_parallel_is_refused_in_one_line(dense):
    with pytest.raises(ConfigurationError) as refusal:
        build_connector(dense, {"ram": "1MiB"}, pipeline_parallel_size=2, distributed_executor_backend="mp")
    message = str(refusal.value)
    assert "\n" not in message
    assert "pipeline" in message
    assert "2" in message


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.1", "1.32.0"])
def test_another_vllm_is_refused_in_one_line(monkeypatch, version):
    prepare_process()
    import vllm
    from kvtier.adapters.vllm.version import check_vllm_version

    check_vllm_version()
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigurationError) as refusal:
        check_vllm_version()
    assert version in str(refusal.value)
    assert "0.32" in str(refusal.value)


def test_an_engine_with_bad_settings_does_not_start(dense):
    """The whole of it, as a user sees it: a server in processes of its own."""
    settings = connector_arguments({"ram": "1GiB", "polcy": "lru"})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(dense)]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--kv-transfer-config", json.dumps(settings)]
    environment = {**os.environ, **engine_environment(multiprocess=True)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode != 0
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "polcy" in line and "Error" in line]
    assert said
    assert "did you mean 'policy'?" in said[-1]
