"""kvtier's disk tier and policies inside vLLM's own `TieringOffloadingSpec`.

Its copy worker refuses this platform, so `get_worker` is never called: the test writes and reads the RAM as a worker
would, and drives vLLM's manager as its scheduler does.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_harness import PATIENCE_S, prepare_process

from kvtier.errors import ConfigurationError

CHUNK_BYTES = 3 * 4096
NUM_CHUNKS = 12
MODULE = "kvtier.adapters.vllm.parts"
PATIENCE_STEPS = 10_000


class Manager:
    """vLLM's tiering manager with our parts, driven step by step."""

    def __init__(self, folder: Path, policy: str | None = None, **settings: Any) -> None:
        prepare_process()
        from vllm.v1.kv_offload.base import ScheduleEndContext
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        tier = {"type": "KVTierDisk", "module_path": MODULE, "path": str(folder), "capacity": "4MiB", "min_free": 0}
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [{**tier, "weights_id": "these", **settings}],
        }
        if policy is not None:
            extra |= {"eviction_policy": policy, "cache_policy_module_path": MODULE}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(32, ("layer",), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=f"test-{uuid.uuid4()}",
            model=OffloadingModelConfig("model", "float32"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self._spec = TieringOffloadingSpec(config)
        self.manager = self._spec.get_manager()
        self._nothing = ScheduleEndContext((), ())
        self._num_requests = 0

    @property
    def _ram(self) -> np.ndarray:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def step(self) -> None:
        self.manager.on_schedule_end(self._nothing)
        for tier in self.manager.secondary_tiers:
            tier._disk.wait_for_outcome(PATIENCE_S)

    def store(self, keys: Sequence[bytes]) -> None:
        context = self._request()
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self._ram[chunk] = bytes_of(key)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        self._finish(context)

    def load(self, keys: Sequence[bytes]) -> int:
        """How many leading `keys` come back, with the right bytes."""
        from vllm.v1.kv_offload.base import LookupResult

        context = self._request()
        for _ in range(PATIENCE_STEPS):
            found = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            self.step()
        hits = [result is LookupResult.HIT for result in found]
        count = hits.index(False) if False in hits else len(hits)
        if count:
            spec = self.manager.prepare_load(keys[:count], context)
            for key, chunk in zip(keys, spec.chunk_ids, strict=False):
                assert (self._ram[chunk] == bytes_of(key)).all()
            self.manager.complete_load(keys[:count], context)
        self._finish(context)
        return count

    def stop(self) -> None:
        self.manager.shutdown()

    def _request(self) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self._num_requests += 1
        context = ReqContext(req_id=f"r{self._num_requests}")
        self.manager.on_new_request(context)
        return context

    def _finish(self, context: Any) -> None:
        self.manager.on_request_finished(context)
        for _ in range(PATIENCE_STEPS):
            self.step()
            if not self.manager._jobs:
                return
        raise AssertionError("jobs that do not end")


def bytes_of(key: bytes) -> np.ndarray:
    return np.frombuffer(key.ljust(CHUNK_BYTES, b"#"), np.uint8).view(np.int8)


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name}-{i}".encode().ljust(32, b".") + bytes(4) for i in range(count)]


A, B = keys_of("a", 8), keys_of("b", 10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Manager]]:
    running: list[Manager] = []

    def start_one(policy: str | None = None, **settings: Any) -> Manager:
        while running:
            running.pop().stop()
        running.append(Manager(tmp_path / "kv", policy, **settings))
        return running[-1]

    yield start_one
    while running:
        running.pop().stop()


@pytest.mark.parametrize("policy", [None, "KVTierARCPolicy", "KVTierLRUPolicy", "KVTierAdaptivePolicy"])
def test_what_left_ram_comes_back_and_is_there_after_a_restart(start, policy):
    manager = start(policy)
    for keys in (A, B):
        manager.store(keys)
    assert manager.load(A) == len(A)
    assert manager.load(keys_of("c", 3)) == 0
    again = start(policy)
    assert again.load(A) == len(A)
    assert start(policy, weights_id="others").load(A) == 0


def test_a_reset_of_vllms_manager_empties_the_disk_too(start):
    manager = start()
    manager.store(A)
    manager.manager.reset_cache()
    assert manager.load(A) == 0
    manager.store(A)
    assert manager.load(A) == len(A)
    assert start().load(A) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights_id": None}, "weights_id"),
        ({"capcity": 1}, "did you mean"),
        ({"capacity": 20_000}, "the disk capacity is 20000 bytes"),
        ({"path": __file__}, "is not a folder"),
    ],
)
def test_bad_settings_are_refused_in_one_line(start, settings, words):
    with pytest.raises(ConfigurationError, match=words) as refusal:
        start(**settings)
    assert "\n" not in str(refusal.value)


def test_random_block_hashes_turn_the_tier_off(start, monkeypatch, caplog):
    prepare_process()
    from vllm.v1.core import kv_cache_utils

    manager = start()
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "ab" * 32)
    with caplog.at_level(logging.WARNING):
        manager.manager.on_new_request(manager._request())
    assert manager.manager.secondary_tiers[0]._disk is None


def test_the_policies_evict_what_ours_do_and_nothing_pinned(start):
    prepare_process()
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

    from kvtier.adapters.vllm.parts import KVTierARCPolicy

    policy = KVTierARCPolicy(4)
    keys = keys_of("k", 4)
    for i, key in enumerate(keys):
        policy.insert(key, ChunkStatus(i))
    assert policy.evict(1, set()) is None, "all are being written"
    for key in keys:
        policy.get(key).ref_cnt = 0
        policy.mark_evictable(key)
    policy.touch([keys[0]], ReqContext(req_id="r"))
    policy.mark_non_evictable(keys[1])
    assert [key for key, _ in policy.evict(2, set())] == keys[2:]
    assert policy.evict(1, {keys[0]}) is None
    assert [(key, chunk.chunk_id) for key, chunk in policy.evict(1, set())] == [(keys[0], 0)]
    policy.remove(keys[1])
    assert all(policy.get(key) is None for key in keys)
