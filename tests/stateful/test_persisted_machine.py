"""Everything that can happen to a persisted RAM pool, in any order, beside books of what may and must be there."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.interfaces import CPULoadStoreSpec, ReqContext
from kvtier.keys import OffloadKey
from persist_harness import KEYS, NUM_SLOTS, SLOT_BYTES, Process, content

key_lists = st.lists(st.sampled_from(KEYS[:14]), min_size=1, max_size=NUM_SLOTS, unique=True)


class PersistedMachine(RuleBasedStateMachine):
    """`may_be` has, for each key, the versions that may be handed out; `must_be` what the next process must have."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.names = itertools.count()
        self.versions = itertools.count()
        self.may_be: dict[OffloadKey, set[bytes]] = {}
        self.must_be: set[OffloadKey] = set()
        self.was_reset = False
        self.writing: list[tuple[CPULoadStoreSpec, ReqContext, int]] = []

    @initialize(policy=st.sampled_from(["lru", "arc", "adaptive"]))
    def start(self, policy: str) -> None:
        self.policy = policy
        self._open(self.folder / "first")

    def _open(self, path: Path, num_slots: int = NUM_SLOTS) -> None:
        self.process = Process(path, policy=self.policy, num_slots=num_slots)
        self.num_slots = num_slots
        self.writing.clear()

    # -- what an engine does ---------------------------------------------------------------------------------

    @rule(keys=key_lists, success=st.booleans())
    def store(self, keys: list[OffloadKey], success: bool) -> None:
        self.begin(keys)
        self.end(len(self.writing) - 1, success)

    @rule(keys=key_lists)
    def begin(self, keys: list[OffloadKey]) -> None:
        context, version = self.process.context(), next(self.versions)
        spec = self.process.begin_store(keys, context)
        self.must_be = {key for key in self.must_be if self.process.ram._index.state_of(key) is not None}
        self.process.write(spec, version)
        self.writing.append((spec, context, version))

    @rule(which=st.integers(0, 5), success=st.booleans())
    def end(self, which: int, success: bool) -> None:
        if which < len(self.writing):
            spec, context, version = self.writing.pop(which)
            ready = set(self.process.ram._ready)
            self.process.core.complete_store(spec.keys, context, success, spec)
            self.process.core.on_request_finished(context)
            for key in spec.keys:
                if success and key not in ready and key in self.process.ram._ready:
                    self.may_be.setdefault(key, set()).add(content(key, version).tobytes())

    @rule(keys=key_lists)
    def load(self, keys: list[OffloadKey]) -> None:
        coming = {key for spec, _, _ in self.writing for key in spec.keys}
        for key, found in self.process.load([key for key in keys if key not in coming]).items():
            assert found in self.may_be[key], "wrong bytes were handed out"

    @rule(keys=key_lists)
    def lose(self, keys: list[OffloadKey]) -> None:
        """A load fails: its blocks are not to be trusted."""
        process, context = self.process, self.process.context()
        ready = [key for key in keys if key in process.ram._ready]
        spec = process.core.prepare_load(ready, context)
        process.core.complete_load(ready, context, success=False, spec=spec)
        self.must_be -= set(ready)

    @rule()
    def flush(self) -> None:
        self.process.flush()
        if not self.was_reset:
            self.must_be = set(self.process.ram._ready) | self.process.restored

    @rule()
    def reset(self) -> None:
        self.process.core.reset_cache()
        self.was_reset = True
        self.may_be.clear()
        self.must_be.clear()

    # -- the end of a process ----------------------------------------------------------------------------------

    def _next_process(self, path: Path, num_slots: int = NUM_SLOTS) -> None:
        if self.was_reset or num_slots != self.num_slots:
            self.may_be.clear()
            self.must_be.clear()
        self.was_reset = False
        self._open(path, num_slots)
        restored = self.process.restored
        assert restored >= self.must_be
        assert restored <= self.may_be.keys()

    @rule()
    def kill(self) -> None:
        image = self.process.image(self.folder / str(next(self.names)))
        self.process.abandon()
        self._next_process(image)

    @rule(num_slots=st.sampled_from([NUM_SLOTS, NUM_SLOTS, NUM_SLOTS - 1]))
    def stop(self, num_slots: int) -> None:
        if not self.was_reset:
            self.must_be |= set(self.process.ram._ready)
        self.process.stop()
        self._next_process(self.process.path, num_slots)

    @rule(at=st.integers(0, SLOT_BYTES - 1), slot=st.integers(0, NUM_SLOTS - 1), bit=st.integers(0, 7))
    def kill_and_flip_a_bit(self, at: int, slot: int, bit: int) -> None:
        image = self.process.image(self.folder / str(next(self.names)))
        offset = self.process.persisted.pool.handle.offset_bytes
        self.process.abandon()
        with image.open("r+b") as file:
            file.seek(offset + (slot % self.num_slots) * SLOT_BYTES + at)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1 << bit]))
        self._next_process(image, self.num_slots)
        self.load(sorted(self.process.restored))
        self.must_be &= set(self.process.ram._ready)
        assert self.process.counters.get("corrupt_blocks", 0) <= 1

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "process"):
            self.process.core.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self.process.abandon()
        shutil.rmtree(self.folder)


def test_persisted_pool_beside_dictionaries() -> None:
    run_state_machine_as_test(PersistedMachine, settings=settings(max_examples=100, stateful_step_count=50))
