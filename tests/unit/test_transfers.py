"""Transfer worker: what is copied where, against plain Python; and when, without a clock of the wall."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigurationError, InvariantError, TransferError
from kvtier.transfers.jobs import JOB_TRANSITIONS, GroupCopy, JobState, TransferJob, TransferOutcome, next_state
from kvtier.transfers.kernels import Copier, PlainCopier, default_copier
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.worker import TransferWorker

PATIENCE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Gate:
    """A `before_copy` that holds chosen jobs until it is told to let them go."""

    def __init__(self, *held: int) -> None:
        self.held = held
        self.entered = {job_id: threading.Event() for job_id in held}
        self.go = {job_id: threading.Event() for job_id in held}
        self.order: list[int] = []

    def __call__(self, job: TransferJob) -> None:
        self.order.append(job.job_id)
        if job.job_id in self.held:
            self.entered[job.job_id].set()
            assert self.go[job.job_id].wait(PATIENCE_S)

    def open(self) -> None:
        for event in self.go.values():
            event.set()


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make_tensors(rng: np.random.Generator, shapes: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """(blocks, row_bytes, gap_bytes between rows) -> tensors; a gap makes the rows strided."""
    return [rng.integers(1, 256, (blocks, row + gap), dtype=np.uint8)[:, :row] for blocks, row, gap in shapes]


def expected_bytes(
    tensors: list[np.ndarray],
    refs: list[list[PageRef]],
    layout: SlotLayout,
    rank: int,
    groups: tuple[GroupCopy, ...],
) -> Iterator[tuple[int, int, int, int, int]]:
    """The oracle: (tensor, block, byte in row, slot, byte in slot) of every byte that a job copies."""
    for group in groups:
        for i, block in enumerate(group.engine_blocks.tolist()):
            place = group.first_sub_block + i
            slot = int(group.slots[place // layout.blocks_per_chunk])
            sub = place % layout.blocks_per_chunk
            for ref in refs[group.group_idx]:
                start = rank * sum(layout.page_bytes) * layout.blocks_per_chunk
                start += sum(layout.page_bytes[: ref.tensor_idx]) * layout.blocks_per_chunk
                start += sub * layout.page_bytes[ref.tensor_idx]
                for byte in range(ref.page_bytes):
                    yield ref.tensor_idx, block, byte, slot, start + byte


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[TransferWorker, list[np.ndarray], np.ndarray]]]:
    """Workers on small tensors: 8 blocks of 96 bytes, pool of 6 slots, one group, all shut down at the end."""
    workers = []

    def start(gate: Gate | None = None, attach: bool = True, **kwargs: object):
        tensors = make_tensors(np.random.default_rng(3), [(8, 96, 0), (8, 96, 32)])
        layout = SlotLayout((96, 96), 1, 1)
        worker = TransferWorker(tensors, [[PageRef(0, 96), PageRef(1, 96)]], layout, 0, **kwargs)
        worker.before_copy = gate
        pool = np.zeros((6, layout.slot_bytes), dtype=np.uint8)
        if attach:
            worker.attach(pool)
        workers.append((worker, gate))
        return worker, tensors, pool

    yield start
    for worker, gate in workers:
        if gate is not None:
            gate.open()
        worker.shutdown()


def store(job_id: int, block: int = 0, slot: int = 0, **kwargs: float) -> TransferJob:
    return TransferJob(job_id, True, (GroupCopy(0, ids(block), ids(slot), 0),), **kwargs)


def load(job_id: int, block: int = 0, slot: int = 0, **kwargs: float) -> TransferJob:
    return TransferJob(job_id, False, (GroupCopy(0, ids(block), ids(slot), 0),), **kwargs)


def drain(worker: TransferWorker, count: int) -> dict[int, TransferOutcome]:
    """`count` outcomes by job id, each job having exactly one."""
    outcomes: list[TransferOutcome] = []
    finished = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        outcomes += worker.poll()
        if len(outcomes) >= count:
            break
        finished.wait(0.001)
    assert len(outcomes) == count
    assert len({outcome.job_id for outcome in outcomes}) == count
    return {outcome.job_id: outcome for outcome in outcomes}


def run_one(worker: TransferWorker, job: TransferJob) -> TransferOutcome:
    worker.submit(job)
    return drain(worker, 1)[job.job_id]


# Which bytes.


@pytest.mark.parametrize("copier", [PlainCopier(), default_copier()], ids=lambda copier: copier.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_exactly_the_described_bytes_are_copied(copier: Copier, data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    num_tensors = draw(st.integers(1, 4))
    shapes = [
        (draw(st.integers(4, 12)), draw(st.integers(1, 200)), draw(st.sampled_from([0, 1, 64])))
        for _ in range(num_tensors)
    ]
    layout = SlotLayout(tuple(row for _, row, _ in shapes), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)))
    rank = draw(st.integers(0, layout.num_ranks - 1))
    tensors = make_tensors(rng, shapes)
    refs = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.integers(0, num_tensors - 1), min_size=1, unique=True))
        refs.append([PageRef(t, draw(st.integers(1, layout.page_bytes[t]))) for t in used])
    num_blocks = min(blocks for blocks, _, _ in shapes)
    free_slots = rng.permutation(16).tolist()
    free_blocks = rng.permutation(num_blocks).tolist()  # shared tensors, but a block is one group's
    groups = []
    for group_idx in range(len(refs)):
        first = draw(st.integers(0, layout.blocks_per_chunk - 1))
        count = draw(st.integers(0, max(0, min(len(free_blocks), layout.blocks_per_chunk * 4 - first))))
        blocks = ids(*(free_blocks.pop() for _ in range(count)))
        slots = ids(*(free_slots.pop() for _ in range(-(-(first + count) // layout.blocks_per_chunk))))
        groups.append(GroupCopy(group_idx, blocks, slots, first))
    is_store = draw(st.booleans())
    pool = rng.integers(1, 256, (16, layout.slot_bytes), dtype=np.uint8)

    want_tensors, want_pool = [tensor.copy() for tensor in tensors], pool.copy()
    num_bytes = 0
    for tensor_idx, block, byte, slot, place in expected_bytes(tensors, refs, layout, rank, tuple(groups)):
        num_bytes += 1
        if is_store:
            want_pool[slot, place] = tensors[tensor_idx][block, byte]
        else:
            want_tensors[tensor_idx][block, byte] = pool[slot, place]

    worker = TransferWorker(tensors, refs, layout, rank, copier=copier)
    worker.attach(pool)
    try:
        outcome = run_one(worker, TransferJob(5, is_store, tuple(groups)))
    finally:
        worker.shutdown()
    assert (outcome.success, outcome.reason, outcome.num_bytes) == (True, "", num_bytes)
    assert outcome.is_store is is_store
    np.testing.assert_array_equal(pool, want_pool)
    for tensor, want in zip(tensors, want_tensors, strict=True):
        np.testing.assert_array_equal(tensor, want)


def test_gaps_between_rows_are_not_written() -> None:
    base = np.full((4, 96), 7, dtype=np.uint8)
    layout = SlotLayout((64,), 1, 1)
    worker = TransferWorker([base[:, :64]], [[PageRef(0, 64)]], layout, 0)
    worker.attach(np.full((4, layout.slot_bytes), 9, dtype=np.uint8))
    assert run_one(worker, TransferJob(1, False, (GroupCopy(0, ids(0, 1, 2, 3), ids(3, 2, 1, 0), 0),))).success
    worker.shutdown()
    assert (base[:, :64] == 9).all()
    assert (base[:, 64:] == 7).all()


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_job_of_many_slices_round_trips(is_store: bool, blocks_per_chunk: int) -> None:
    rng = np.random.default_rng(0)
    row, num_blocks = 48_000, 512  # 49 MB in two tensors: several slices, streamed past the caches
    tensors = make_tensors(rng, [(num_blocks, row, 64), (num_blocks, row, 0)])
    layout = SlotLayout((row, row), blocks_per_chunk, 1)
    num_slots = num_blocks // blocks_per_chunk
    pool = rng.integers(0, 256, (num_slots, layout.slot_bytes), dtype=np.uint8)
    blocks, slots = rng.permutation(num_blocks), rng.permutation(num_slots)
    worker = TransferWorker(tensors, [[PageRef(0, row), PageRef(1, row - 5)]], layout, 0)
    worker.attach(pool)
    before = pool.copy(), [tensor.copy() for tensor in tensors]
    outcome = run_one(worker, TransferJob(1, is_store, (GroupCopy(0, blocks, slots, 0),)))
    worker.shutdown()
    assert outcome.num_bytes == num_blocks * (2 * row - 5)
    for i, block in enumerate(blocks.tolist()):
        slot = pool[slots[i // blocks_per_chunk]]
        for t, size in ((0, row), (1, row - 5)):
            start = t * row * blocks_per_chunk + i % blocks_per_chunk * row
            np.testing.assert_array_equal(slot[start : start + size], tensors[t][block, :size])
    unchanged = zip(before[1], tensors, strict=True) if is_store else [(before[0], pool)]
    for old, new in unchanged:
        np.testing.assert_array_equal(old, new)


# Bad descriptions.


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (GroupCopy(1, ids(0), ids(0), 0), "group_idx 1"),
        (GroupCopy(-1, ids(0), ids(0), 0), "group_idx -1"),
        (GroupCopy(0, ids(8), ids(0), 0), "engine block"),
        (GroupCopy(0, ids(-1), ids(0), 0), "engine block"),
        (GroupCopy(0, ids(0), ids(6), 0), "slot"),
        (GroupCopy(0, ids(0), ids(-1), 0), "slot"),
        (GroupCopy(0, ids(0, 1), ids(0), 0), "2 blocks"),
        (GroupCopy(0, ids(0), ids(0, 1), 0), "1 blocks"),
        (GroupCopy(0, ids(0), ids(0), 1), "first_sub_block"),
        (GroupCopy(0, ids(0), ids(0), -1), "first_sub_block"),
        (GroupCopy(0, np.array([0.5]), ids(0), 0), "integers"),
        (GroupCopy(0, ids(0).reshape(1, 1), ids(0), 0), "integers"),
        (GroupCopy(0, None, ids(0), 0), "engine block"),
        (None, ""),
    ],
)
@pytest.mark.parametrize("is_store", [True, False])
def test_a_badly_described_job_is_a_failed_outcome(started, group, words: str, is_store: bool) -> None:
    worker, tensors, pool = started()
    before = [tensor.copy() for tensor in tensors]
    outcome = run_one(worker, TransferJob(1, is_store, (group,)))
    assert not outcome.success
    assert words in outcome.reason
    assert outcome.num_bytes == 0
    assert not pool.any()
    assert all((old == new).all() for old, new in zip(before, tensors, strict=True))
    assert run_one(worker, store(2)).success


def test_without_a_pool_jobs_fail(started) -> None:
    worker, _, _ = started(attach=False)
    assert "no pool" in run_one(worker, store(1)).reason


def test_a_job_without_blocks_succeeds(started) -> None:
    worker, _, pool = started()
    for job in (TransferJob(1, True, ()), TransferJob(2, False, (GroupCopy(0, ids(), ids(), 0),))):
        outcome = run_one(worker, job)
        assert (outcome.success, outcome.num_bytes) == (True, 0)
    assert not pool.any()


def good_tensor() -> np.ndarray:
    return np.zeros((4, 64), dtype=np.uint8)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"tensors": [np.zeros((4, 64), dtype=np.int8)]},
        {"tensors": [np.zeros(64, dtype=np.uint8)]},
        {"tensors": [np.zeros((0, 64), dtype=np.uint8)]},
        {"tensors": [np.zeros((64, 4), dtype=np.uint8).T]},
        {"tensors": [np.lib.stride_tricks.as_strided(np.zeros(256, np.uint8), (4, 64), (32, 1))]},
        {"tensors": [np.frombuffer(bytes(256), dtype=np.uint8).reshape(4, 64)]},
        {"refs": [[PageRef(1, 64)]]},
        {"refs": [[PageRef(-1, 64)]]},
        {"refs": [[PageRef(0, 65)]]},
        {"refs": [[PageRef(0, 0)]]},
        {"rank": 1},
        {"rank": -1},
        {"num_threads": 0},
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict) -> None:
    kwargs = {"tensors": [good_tensor()], "refs": [[PageRef(0, 64)]], "rank": 0, "num_threads": 2} | change
    with pytest.raises((TransferError, ConfigurationError)):
        TransferWorker(
            kwargs["tensors"],
            kwargs["refs"],
            SlotLayout((64,), 1, 1),
            kwargs["rank"],
            num_threads=kwargs["num_threads"],
        )


@pytest.mark.parametrize(
    "pool",
    [
        np.zeros((2, 64), dtype=np.uint8),
        np.zeros((2, 4096), dtype=np.int8),
        np.zeros((2, 8192), dtype=np.uint8)[:, :4096],
        np.frombuffer(bytes(8192), dtype=np.uint8).reshape(2, 4096),
        np.zeros(4096, dtype=np.uint8),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(pool: np.ndarray) -> None:
    worker = TransferWorker([good_tensor()], [[PageRef(0, 64)]], SlotLayout((64,), 1, 1), 0)
    with pytest.raises(TransferError):
        worker.attach(pool)


def test_a_pool_is_attached_once(started) -> None:
    worker, _, pool = started()
    with pytest.raises(TransferError, match="already"):
        worker.attach(pool)
    worker.shutdown()
    with pytest.raises(TransferError, match="shut down"):
        worker.attach(pool)


def test_constructors_start_no_thread(started) -> None:
    before = threading.active_count()
    worker, _, _ = started(attach=False)
    assert threading.active_count() == before
    worker.attach(np.zeros((1, 4096), dtype=np.uint8))
    assert threading.active_count() == before + 2
    worker.shutdown()
    assert threading.active_count() == before


# Order, deadlines, faults.


def test_loads_go_before_stores(started) -> None:
    gate = Gate(0)
    worker, _, _ = started(gate, num_threads=1)
    worker.submit(store(0))
    assert gate.entered[0].wait(PATIENCE_S)
    for job in (store(1, 1, 1), load(2, 2, 2), store(3, 3, 3), load(4, 4, 4)):
        worker.submit(job)
    gate.open()
    assert all(outcome.success for outcome in drain(worker, 5).values())
    assert gate.order == [0, 2, 4, 1, 3]


def test_a_load_goes_before_the_rest_of_a_running_store() -> None:
    row = 1 << 20
    tensor = np.ones((70, row), dtype=np.uint8)
    layout = SlotLayout((row,), 1, 1)
    copied: list[int] = []
    first_slice, go_on = threading.Event(), threading.Event()

    class Watched(PlainCopier):
        def copy(self, dst_addresses, src_addresses, sizes) -> None:
            copied.append(int(sizes.sum()))
            first_slice.set()
            assert go_on.wait(PATIENCE_S)

    worker = TransferWorker([tensor], [[PageRef(0, row)]], layout, 0, num_threads=1, copier=Watched())
    worker.attach(np.zeros((70, row), dtype=np.uint8))
    everything = np.arange(64)
    worker.submit(TransferJob(1, True, (GroupCopy(0, everything, everything, 0),)))
    assert first_slice.wait(PATIENCE_S)
    worker.submit(TransferJob(2, False, (GroupCopy(0, ids(65), ids(65), 0),)))
    go_on.set()
    outcomes = drain(worker, 2)
    worker.shutdown()
    assert outcomes[1].num_bytes == 64 * row
    assert copied[1] == row, "the load is the second thing copied, after one slice of the store"
    assert sum(copied) == 65 * row
    assert max(copied) <= 33 * row


def test_one_load_uses_both_threads() -> None:
    row = 1 << 20
    together = threading.Barrier(2, timeout=PATIENCE_S)
    names = set()

    class Meeting(PlainCopier):
        def copy(self, dst_addresses, src_addresses, sizes) -> None:
            if threading.current_thread().name not in names:
                names.add(threading.current_thread().name)
                together.wait()  # breaks, and fails the job, if the other thread does not come
            super().copy(dst_addresses, src_addresses, sizes)

    layout = SlotLayout((row,), 1, 1)
    worker = TransferWorker([np.zeros((32, row), np.uint8)], [[PageRef(0, row)]], layout, 0, copier=Meeting())
    worker.attach(np.ones((32, row), dtype=np.uint8))
    outcome = run_one(worker, TransferJob(1, False, (GroupCopy(0, np.arange(32), np.arange(32), 0),)))
    worker.shutdown()
    assert outcome.success
    assert len(names) == 2


@pytest.mark.parametrize("exc", [OSError("disk on fire"), ValueError(), SystemExit(3), KeyboardInterrupt()])
def test_a_raising_hook_fails_its_job_only(started, exc: BaseException) -> None:
    worker, _, pool = started()

    def hook(job: TransferJob) -> None:
        if job.job_id == 1:
            raise exc

    worker.before_copy = hook
    worker.submit(store(1))
    worker.submit(store(2, 2, 2))
    outcomes = drain(worker, 2)
    assert not outcomes[1].success
    assert type(exc).__name__ in outcomes[1].reason
    assert outcomes[2].success
    assert not pool[0].any()
    assert pool[2].any()
    assert run_one(worker, store(3)).success


def test_a_raising_copy_fails_its_job_only() -> None:
    row = 1 << 20

    class Broken(PlainCopier):
        def copy(self, dst_addresses, src_addresses, sizes) -> None:
            if sizes.sum() > row:
                raise MemoryError("no")
            super().copy(dst_addresses, src_addresses, sizes)

    worker = TransferWorker(
        [np.ones((32, row), np.uint8)], [[PageRef(0, row)]], SlotLayout((row,), 1, 1), 0, copier=Broken()
    )
    worker.attach(np.zeros((32, row), dtype=np.uint8))
    worker.submit(TransferJob(1, True, (GroupCopy(0, np.arange(31), np.arange(31), 0),)))
    worker.submit(TransferJob(2, True, (GroupCopy(0, ids(31), ids(31), 0),)))
    outcomes = drain(worker, 2)
    worker.shutdown()
    assert (outcomes[1].success, outcomes[1].num_bytes, outcomes[1].reason) == (False, 0, "MemoryError: no")
    assert outcomes[2].success


def test_a_deadline_that_passes_in_the_queue_or_in_the_hook_cancels(started) -> None:
    clock, gate = Clock(), Gate(1, 2)
    worker, tensors, pool = started(gate, clock=clock)
    pool[:] = 1
    before = [tensor.copy() for tensor in tensors]
    worker.submit(load(1, 1, 1, begin_by_s=101.0))
    worker.submit(load(2, 2, 2, begin_by_s=103.0))
    assert gate.entered[1].wait(PATIENCE_S)
    assert gate.entered[2].wait(PATIENCE_S)
    worker.submit(load(3, 3, 3, begin_by_s=101.0))
    worker.submit(load(4, 4, 4))
    clock.now_s = 101.0
    assert worker.poll() == []
    clock.now_s = 102.0
    outcomes = {outcome.job_id: outcome for outcome in worker.poll()}
    assert sorted(outcomes) == [1, 3]
    assert all(not o.success and o.reason == "deadline" and o.duration_s == 0.0 for o in outcomes.values())
    gate.open()
    outcomes = drain(worker, 2)
    assert outcomes[2].success
    assert outcomes[4].success
    worker.shutdown()
    for block in (1, 3):  # never touched, although a thread came back from the hook with job 1
        assert all((old[block] == new[block]).all() for old, new in zip(before, tensors, strict=True))
    assert (tensors[0][2] == 1).all()


def test_a_deadline_is_checked_after_the_hook_even_if_nobody_polls(started) -> None:
    clock = Clock()
    worker, tensors, pool = started(clock=clock)
    pool[:] = 1
    before = tensors[0].copy()

    def slow(job: TransferJob) -> None:
        clock.now_s += 10.0

    worker.before_copy = slow
    worker.submit(load(1, begin_by_s=105.0))
    worker.submit(load(2, 1, 1))
    assert drain(worker, 2)[1].reason == "deadline"
    assert (tensors[0][0] == before[0]).all()


def test_durations_are_of_the_copy(started) -> None:
    clock = Clock()
    worker, _, _ = started(clock=clock)
    worker.before_copy = lambda job: setattr(clock, "now_s", clock.now_s + 5.0)
    assert run_one(worker, store(1)).duration_s == 0.0


# wait and shutdown.


def test_wait_returns_after_running_copies() -> None:
    row = 4096
    inside, go_on = threading.Event(), threading.Event()

    class Slow(PlainCopier):
        def copy(self, dst_addresses, src_addresses, sizes) -> None:
            inside.set()
            assert go_on.wait(PATIENCE_S)
            super().copy(dst_addresses, src_addresses, sizes)

    pool = np.zeros((2, row), dtype=np.uint8)
    worker = TransferWorker(
        [np.ones((2, row), np.uint8)], [[PageRef(0, row)]], SlotLayout((row,), 1, 1), 0, copier=Slow()
    )
    worker.attach(pool)
    worker.submit(store(1))
    assert inside.wait(PATIENCE_S)
    waiter = threading.Thread(target=worker.wait, args=([1],), kwargs={"give_up_after_s": 0.0})
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "a running copy is waited for, whatever the patience for those that have not begun"
    assert not pool.any()
    go_on.set()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()
    assert pool[0].all()
    assert drain(worker, 1)[1].success
    worker.shutdown()


def test_wait_cancels_loads_and_gives_stores_a_chance(started) -> None:
    gate = Gate(1)
    worker, _, pool = started(gate, num_threads=1)
    worker.submit(store(1))
    assert gate.entered[1].wait(PATIENCE_S)
    for job in (load(2, 2, 2), load(3, 3, 3), store(4, 4, 4), store(5, 5, 5)):
        worker.submit(job)
    waiter = threading.Thread(target=worker.wait, args=([3, 5],), kwargs={"give_up_after_s": PATIENCE_S})
    waiter.start()
    while not (first := worker.poll()):  # the load in the set is cancelled at once, with the thread still stuck
        pass
    assert [(o.job_id, o.reason) for o in first] == [(3, "flushed")]
    gate.open()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()
    assert pool[5].any(), "when wait returns, the store it waited for has been copied"
    assert all(outcome.success for outcome in drain(worker, 4).values())
    assert gate.order == [1, 5, 2, 4]


def test_wait_gives_up_on_stores_that_do_not_begin(started) -> None:
    gate = Gate(1)
    worker, _, pool = started(gate, num_threads=1)
    for job in (store(1, 1, 1), store(2, 2, 2), store(3, 3, 3)):
        worker.submit(job)
    assert gate.entered[1].wait(PATIENCE_S)
    worker.wait([1, 2], give_up_after_s=0.0)
    outcomes = {outcome.job_id: outcome for outcome in worker.poll()}
    assert sorted(outcomes) == [1, 2]
    assert all(not o.success and o.reason == "flushed" for o in outcomes.values())
    gate.open()
    assert drain(worker, 1)[3].success
    assert not pool[1].any(), "its thread came back from the hook after wait had returned"
    assert not pool[2].any()


def test_lingering_ends_with_the_first_outcome_with_the_last_job_or_with_its_time(started) -> None:
    gate = Gate(1, 2)
    worker, _, _ = started(gate)
    worker.wait_for_outcome(PATIENCE_S)  # nothing is open: at once
    worker.submit(load(1, 1, 1))
    worker.submit(load(2, 2, 2))
    assert gate.entered[1].wait(PATIENCE_S)
    worker.wait_for_outcome(0.0)
    assert not worker.poll(), "its time was over before anything ended"
    lingerer = threading.Thread(target=worker.wait_for_outcome, args=(PATIENCE_S,))
    lingerer.start()
    gate.go[1].set()
    lingerer.join(PATIENCE_S / 2)
    assert not lingerer.is_alive(), "the other load is still held"
    assert [outcome.job_id for outcome in worker.poll()] == [1]
    gate.open()
    assert drain(worker, 1)[2].success


def test_wait_tolerates_unknown_and_repeated_ids(started) -> None:
    worker, _, _ = started()
    worker.wait([])
    worker.wait([99, 99])
    worker.submit(store(1))
    worker.wait([1, 1, 77], give_up_after_s=PATIENCE_S)
    assert [outcome.job_id for outcome in worker.poll()] == [1]
    worker.wait([1])


def test_jobs_that_share_an_id_each_have_an_outcome(started) -> None:
    worker, _, pool = started()
    worker.submit(store(1, 1, 1))
    worker.submit(store(1, 2, 2))
    worker.wait([1], give_up_after_s=PATIENCE_S)
    assert [outcome.job_id for outcome in worker.poll()] == [1, 1]
    assert pool[1].any()
    assert pool[2].any()


def test_shutdown_cancels_what_is_queued(started) -> None:
    gate = Gate(1)
    worker, _, pool = started(gate, num_threads=1)
    worker.submit(store(1, 1, 1))
    assert gate.entered[1].wait(PATIENCE_S)
    for job in (store(2, 2, 2), load(3, 3, 3)):
        worker.submit(job)
    releaser = threading.Timer(0.05, gate.open)  # returns with or without: only how fast differs
    releaser.start()
    worker.shutdown()
    worker.shutdown()
    releaser.join()
    outcomes = drain(worker, 3)
    assert all(not o.success and o.reason == "shutdown" for o in outcomes.values())
    assert not pool.any()
    assert "shut down" in run_one(worker, store(4)).reason
    worker.wait([4])


def test_a_hook_that_raises_after_the_job_was_cancelled(started) -> None:
    inside, go_on = threading.Event(), threading.Event()
    worker, _, _ = started(num_threads=1)

    def hook(job: TransferJob) -> None:
        if job.job_id == 1:
            inside.set()
            assert go_on.wait(PATIENCE_S)
            raise OSError("too late to matter")

    worker.before_copy = hook
    worker.submit(store(1))
    assert inside.wait(PATIENCE_S)
    worker.wait([1], give_up_after_s=0.0)
    go_on.set()
    worker.submit(store(2, 2, 2))
    outcomes = drain(worker, 2)
    assert outcomes[1].reason == "flushed"
    assert outcomes[2].success, "the thread lives on"


def test_shutdown_waits_for_running_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.transfers.worker.JOIN_S", 0.0)  # that patience is for hooks, not for copies
    row = 4096
    inside, go_on = threading.Event(), threading.Event()

    class Slow(PlainCopier):
        def copy(self, dst_addresses, src_addresses, sizes) -> None:
            inside.set()
            assert go_on.wait(PATIENCE_S)
            super().copy(dst_addresses, src_addresses, sizes)

    pool = np.zeros((2, row), dtype=np.uint8)
    worker = TransferWorker(
        [np.ones((2, row), np.uint8)], [[PageRef(0, row)]], SlotLayout((row,), 1, 1), 0, copier=Slow()
    )
    worker.attach(pool)
    worker.submit(store(1))
    assert inside.wait(PATIENCE_S)
    stopper = threading.Thread(target=worker.shutdown)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive()
    go_on.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert pool[0].all()
    assert drain(worker, 1)[1].success


def test_shutdown_before_attach(started) -> None:
    worker, _, _ = started(attach=False)
    worker.shutdown()
    worker.shutdown()
    assert not run_one(worker, store(1)).success


def test_many_jobs_under_load_each_have_one_outcome(started) -> None:
    worker, _, _ = started()
    rng = np.random.default_rng(1)
    outcomes: list[TransferOutcome] = []
    for job_id in range(2000):
        make = store if rng.random() < 0.5 else load
        slot = int(rng.integers(0, 7))  # 6 is out of range
        worker.submit(make(job_id, int(rng.integers(0, 8)), slot))
        if job_id % 7 == 0:
            outcomes += worker.poll()
        if job_id % 50 == 0:
            worker.wait(range(job_id - 20, job_id + 20), give_up_after_s=0.0)
    worker.shutdown()
    outcomes += worker.poll()
    assert sorted(outcome.job_id for outcome in outcomes) == list(range(2000))


# The states.


def test_no_job_leaves_a_final_state() -> None:
    for state, targets in JOB_TRANSITIONS.items():
        for target in JobState:
            if target in targets:
                assert next_state(state, target) is target
            else:
                with pytest.raises(InvariantError):
                    next_state(state, target)
    assert JobState.CANCELLED not in JOB_TRANSITIONS[JobState.RUNNING]


@pytest.mark.parametrize("args", [((), 1, 1), ((0,), 1, 1), ((8,), 0, 1), ((8,), 1, 0)])
def test_a_layout_without_bytes_is_refused(args: tuple) -> None:
    with pytest.raises(ConfigurationError):
        SlotLayout(*args)


def test_layout_arithmetic() -> None:
    layout = SlotLayout((100, 200), 4, 3)
    assert layout.stripe_bytes == 1200
    assert layout.slot_bytes == 4096
    assert [layout.tensor_offset(i) for i in range(2)] == [0, 400]
    assert SlotLayout((4096,), 1, 1).slot_bytes == 4096
    assert SlotLayout((4097,), 1, 1).slot_bytes == 8192
    with pytest.raises(IndexError):
        layout.tensor_offset(2)
    with pytest.raises(IndexError):
        layout.tensor_offset(-1)
