"""RAM with a disk behind it, put together from a configuration: stopping, starting again, resets, ranks, refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import (
    ConfigurationError,
    CPUOffloadingManager,
    FilterReusedOffloadingManager,
    Residency,
    TieredOffloadingManager,
)
from kvtier.runtime import Identity, build_stack, parse_config
from kvtier.tiers.disk import FileEpochStore, WeightEpochs
from stack_harness import NAMESPACE, SLOT_BYTES, Process, keys_of


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    processes: list[Process] = []

    def start_one(identity: Identity | None = None, store_threshold: int = 0, **disk: Any) -> Process:
        settings = {"capacity": "4MiB", "min_free": 0, "direct": False, "threads": 1, **disk}
        settings = {"store_threshold": store_threshold, "disk": {"path": str(tmp_path / "kv"), **settings}}
        processes.append(Process(settings, identity))
        return processes[-1]

    yield start_one
    for process in processes:
        process.die()


A, D, B, C = keys_of("a", 8), keys_of("d", 8), keys_of("b", 12), keys_of("c", 12)


def test_what_left_ram_comes_back_from_the_disk(start: Any) -> None:
    process = start()
    for keys in (A, B, C):
        process.store(keys)
    assert isinstance(process.stack.core, TieredOffloadingManager)
    assert [process.stack.ram.residency(key) for key in A] == [Residency.ABSENT] * len(A)
    assert process.load(A) == len(A)
    assert process.stack.core.get_stats().counters["promoted_blocks"] == len(A)
    media = {(event.medium, event.removed) for event in process.stack.core.take_events()}
    assert media == {("CPU", False), ("CPU", True), ("DISK", False)}


def test_a_stop_writes_what_is_only_in_ram_and_the_next_start_finds_it(start: Any) -> None:
    process = start(admission="reuse")
    process.store(A)
    assert process.on_disk(A) == 0
    process.stop()
    assert start().load(A) == len(A)


def test_what_weights_that_may_change_have_made_is_for_that_process_alone(start: Any) -> None:
    files, pushed = Identity(NAMESPACE), Identity(NAMESPACE, weights_may_change=True)
    process = start(files)
    process.store(A)
    process.stop()
    process = start(pushed)
    assert process.load(A) == 0
    for keys in (D, B, C):
        process.store(keys)
    assert process.load(D) == len(D), "it has a disk of its own"
    process.stop()
    for identity in (pushed, files):
        process = start(identity)
        assert [process.load(keys) for keys in (A, B, C, D)] == [0] * 4
        process.stop()


def test_no_time_to_flush(start: Any) -> None:
    process = start(admission="reuse", stop_flush_s=0)
    process.store(A)
    process.stop()
    assert start().load(A) == 0


def test_with_admission_on_reuse_a_block_goes_down_when_it_is_loaded(start: Any) -> None:
    process = start(admission="reuse")
    process.store(A)
    assert process.load(A[:3]) == 3
    assert process.on_disk(A) == 3


def test_with_admission_on_ram_eviction_a_block_goes_down_when_it_leaves(start: Any) -> None:
    process = start(admission="ram_eviction")
    process.store(A)
    assert process.on_disk(A) == 0
    for keys in (B, C):
        for i in range(len(keys)):  # more at once than what is kept free would be lost
            process.store(keys[: i + 1])
    assert process.load(A) == len(A)


def test_stopping_twice_is_as_good_as_once(start: Any) -> None:
    process = start()
    process.store(A)
    process.stop()
    process.stop()


def test_after_a_reset_nothing_comes_back_now_or_later(start: Any) -> None:
    process = start()
    process.store(A)
    process.stack.core.reset_cache()
    assert process.load(A) == 0
    process.stop()
    assert start().load(A) == 0


def test_what_was_stored_after_a_reset_is_of_weights_that_no_later_process_has(start: Any) -> None:
    process = start()
    process.stack.core.reset_cache()
    process.store(A)
    for keys in (B, C):
        process.store(keys)
    assert process.load(A) == len(A)
    process.stop()
    later = start()
    assert later.load(A) == 0
    later.store(A)
    later.stop()
    assert start().load(A) == len(A)


def test_other_weights_find_nothing(start: Any) -> None:
    process = start()
    process.store(A)
    process.stop()
    assert start(Identity(bytes(32))).load(A) == 0


def test_two_ranks_share_the_folder_and_the_capacity_and_nothing_else(start: Any, tmp_path: Path) -> None:
    ranks = [start(Identity(NAMESPACE, rank=rank, num_ranks=2)) for rank in (0, 1)]
    for rank, keys in zip(ranks, (A, D), strict=True):
        rank.store(keys)
    assert [rank.load(A) for rank in ranks] == [len(A), 0]
    assert sum(rank.stack.tiers[0].get_stats().capacity_bytes for rank in ranks) <= 4 << 20
    assert len(list((tmp_path / "kv").glob("cache-*"))) == 2
    for rank in ranks:
        rank.stop()
    again = [start(Identity(NAMESPACE, rank=rank, num_ranks=2)) for rank in (0, 1)]
    assert [rank.load(D) for rank in again] == [0, len(D)]


def test_a_reset_of_one_rank_alone_holds_for_more_ranks_later(start: Any) -> None:
    ranks = [start(Identity(NAMESPACE, rank=rank, num_ranks=2)) for rank in (0, 1)]
    ranks[1].store(B)
    for rank in ranks:
        rank.stop()
    alone = start()
    alone.stack.core.reset_cache()
    alone.stop()
    assert start(Identity(NAMESPACE, rank=1, num_ranks=2)).load(B) == 0


def test_a_disk_that_another_process_uses_is_an_error_in_the_log_and_ram_alone(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    with caplog.at_level(logging.ERROR, "kvtier"):
        second = start()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in use by another process" in line
    assert second.stack.tiers == []
    second.store(A)
    assert second.load(A) == len(A)
    assert second.stack.stop()


def test_a_capacity_for_no_block_is_refused_and_nothing_stays_open(start: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the disk capacity is 5000 bytes"):
        start(capacity=5000)
    start().store(A)


def test_a_capacity_for_no_block_of_two_ranks_is_refused(start: Any) -> None:
    with pytest.raises(ConfigurationError, match="for 2 ranks"):
        start(Identity(NAMESPACE, rank=0, num_ranks=2), capacity=40_000)


def test_without_an_identity_there_is_no_disk(tmp_path: Path) -> None:
    config = parse_config({"ram": 1, "disk": {"path": str(tmp_path / "kv"), "capacity": "1GiB"}})
    stack = build_stack(config, np.zeros((2, SLOT_BYTES), np.uint8), None)
    assert isinstance(stack.core, CPUOffloadingManager)
    assert list(tmp_path.iterdir()) == []
    assert stack.stop()


def test_the_reuse_filter_stands_before_both(start: Any) -> None:
    process = start(store_threshold=2)
    assert isinstance(process.stack.core, FilterReusedOffloadingManager)
    process.store(A)
    assert process.on_disk(A) == 0
    assert process.stack.core.get_stats().counters["filtered_blocks"] == len(A)
    process.store(A)
    assert process.on_disk(A) == len(A)


def test_a_tier_that_takes_nothing_any_more_does_not_hold_up_the_stop(start: Any) -> None:
    process = start(admission="reuse", stop_flush_s=1000)
    process.store(A)
    process.stack.tiers[0].disable("for the test")
    process.stop()


class MemoryEpochs:
    """An epoch store whose medium is a list."""

    def __init__(self, epoch: int) -> None:
        self.epochs = [epoch]

    def current(self) -> int:
        return self.epochs[-1]

    def advance(self) -> int:
        self.epochs.append(self.epochs[-1] + 1)
        return self.epochs[-1]


@pytest.mark.parametrize("found", [10, 11])
def test_epochs_at_the_opening_are_even_and_after_a_reset_odd(found: int) -> None:
    store = MemoryEpochs(found)
    epochs = WeightEpochs(store)
    seen = [epochs.current(), epochs.current(), epochs.advance(), epochs.current(), epochs.advance(), epochs.current()]
    assert [epoch % 2 for epoch in seen] == [0, 0, 1, 1, 1, 1]
    assert seen == sorted(seen)
    assert seen[2] < seen[4], "an epoch that was current before"
    next_process = WeightEpochs(store)
    assert next_process.current() > seen[-1]


def test_a_rank_that_has_slept_through_resets_does_not_take_the_epoch_back(tmp_path: Path) -> None:
    path = str(tmp_path / "epoch")
    first, second = FileEpochStore(path), FileEpochStore(path, rank=1)
    assert first.current() == second.current()
    seen = {first.current()}
    for store in (first, first, second, first, second, second):
        epoch = store.advance()
        assert epoch > max(seen)
        seen.add(epoch)
    assert FileEpochStore(path).current() == max(seen)
