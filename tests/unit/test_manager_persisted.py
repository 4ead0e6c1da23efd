"""The manager of a RAM pool that outlives its process: nobody has a block of an earlier one before it was checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.errors import BlockNotReadyError
from kvtier.events import OffloadingEvent
from kvtier.interfaces import ReqContext, Residency
from kvtier.keys import OffloadKey
from kvtier.manager import CircuitBreaker, PersistedOffloadingManager, TieredOffloadingManager
from kvtier.tier_interfaces import CheckedBlock
from persist_harness import KEYS, NUM_SLOTS, Process, content


class Keeper:
    """Checks when it is told to. Notes what it hears."""

    def __init__(self) -> None:
        self.asked: list[tuple[OffloadKey, int, int]] = []
        self.checked: list[CheckedBlock] = []
        self.forgotten: list[int] = []
        self.kept: list[OffloadKey] = []
        self.num_resets = 0

    def forget(self, slots: Sequence[int]) -> None:
        self.forgotten += list(slots)

    def keep(self, keys: Sequence[OffloadKey], slots: Sequence[int], generations: Sequence[int]) -> None:
        assert len(keys) == len(slots) == len(generations)
        self.kept += keys

    def note_use(self, slots: Sequence[int]) -> None:
        pass

    def check(self, keys: Sequence[OffloadKey], slots: Sequence[int], generation: int) -> None:
        self.asked += [(key, slot, generation) for key, slot in zip(keys, slots, strict=True)]

    def poll(self) -> list[CheckedBlock]:
        checked, self.checked = self.checked, []
        return checked

    def reset(self) -> None:
        self.num_resets += 1

    def finish(self, bad: Sequence[OffloadKey] = ()) -> None:
        """Ends every check that was asked for."""
        self.checked += [CheckedBlock(*task, task[0] not in bad) for task in self.asked]
        self.asked.clear()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def manager(keeper: Keeper) -> PersistedOffloadingManager:
    """Eight slots; an earlier process left blocks 0..3 in the slots 4, 6, 1, 7, the last two being used last."""
    manager = PersistedOffloadingManager(keeper, NUM_SLOTS, "lru", enable_events=True, deadline_s=5.0)
    manager.recall([{KEYS[0]: 4, KEYS[1]: 6}, {KEYS[2]: 1, KEYS[3]: 7}])
    manager.advance(0.0)
    return manager


def store(manager: PersistedOffloadingManager, keys: list[OffloadKey]) -> list[OffloadKey]:
    context = ReqContext("store")
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(keys, context, spec=output.store_spec)
    manager.on_request_finished(context)
    manager.check_invariants()
    return output.evicted_keys


def test_the_first_look_up_waits_for_the_check(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    request = ReqContext("first")
    assert manager.residency(KEYS[0]) is Residency.ARRIVING
    assert manager.lookup(KEYS[0], request) is None
    assert manager.still_waiting(request)
    assert [(key, slot) for key, slot, _ in keeper.asked] == [(KEYS[0], 4)]
    assert manager.lookup(KEYS[0], ReqContext("second")) is None
    assert len(keeper.asked) == 1, "one check, whoever asks"
    with pytest.raises(BlockNotReadyError):
        manager.prepare_load([KEYS[0]], request)
    manager.check_invariants()
    keeper.finish()
    manager.advance(0.0)  # no time has passed, and still
    assert not manager.still_waiting(request)
    assert manager.lookup(KEYS[0], request) is True
    assert list(manager.prepare_load([KEYS[0]], request).block_ids) == [4]
    assert manager.get_stats().counters["verified_blocks"] == 1
    manager.check_invariants()


def test_a_block_that_fails_its_check_is_absent_and_its_slot_free(
    manager: PersistedOffloadingManager, keeper: Keeper
) -> None:
    request = ReqContext("first")
    assert manager.lookup_prefix(KEYS[:4], request) == (0, Residency.ARRIVING)
    assert len(keeper.asked) == 4, "all that may become the prefix, at once"
    manager.take_events()
    keeper.finish(bad=[KEYS[2]])
    manager.advance(1.0)
    assert manager.lookup_prefix(KEYS[:4], request) == (2, Residency.ABSENT)
    assert manager.residency(KEYS[3]) is Residency.READY
    assert keeper.forgotten == [1]
    assert manager.take_events() == [OffloadingEvent([KEYS[2]], "CPU", True)]
    assert manager.get_stats().counters["corrupt_blocks"] == 1
    assert store(manager, KEYS[2:7]) == [], "five slots are free"


def test_nobody_waits_past_the_deadline(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    request = ReqContext("first")
    assert manager.lookup(KEYS[0], request) is None
    manager.advance(5.5)
    assert not manager.still_waiting(request)
    assert manager.lookup(KEYS[0], request) is False
    output = manager.prepare_store(KEYS[:1], request)
    assert output is not None
    assert output.keys_to_store == [], "it is there, for others"
    keeper.finish()
    manager.advance(6.0)
    assert manager.lookup(KEYS[0], ReqContext("second")) is True


def test_a_check_that_never_ends_is_given_up(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    manager.lookup(KEYS[0], ReqContext("first"))
    manager.advance(1.0)
    manager.advance(40.0)
    assert manager.residency(KEYS[0]) is Residency.ABSENT
    assert manager.get_stats().condemned_blocks == 1, "its slot is being read"
    store(manager, KEYS[:1])
    keeper.finish()
    manager.advance(41.0)
    assert manager.get_stats().condemned_blocks == 0
    assert manager.residency(KEYS[0]) is Residency.READY
    manager.check_invariants()


def test_a_check_that_ends_when_its_slot_is_somebody_elses(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    manager.lookup(KEYS[0], ReqContext("first"))
    manager.reset_cache()
    manager.writers_died()
    store(manager, KEYS[8:16])
    keeper.forgotten.clear()
    keeper.finish(bad=[KEYS[0]])
    manager.advance(1.0)
    assert keeper.forgotten == []
    assert manager.get_stats().counters["late_completions"] == 1
    assert manager.lookup_prefix(KEYS[8:16], ReqContext("second")) == (8, Residency.READY)
    manager.check_invariants()


def test_eviction_takes_what_nobody_has_checked_too(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    store(manager, KEYS[8:12])
    assert keeper.kept == KEYS[8:12]
    keeper.forgotten.clear()
    assert store(manager, KEYS[12:14]) == [KEYS[1], KEYS[0]], "of the run that was used first, the deepest first"
    assert sorted(keeper.forgotten) == [4, 6]
    manager.lookup(KEYS[3], ReqContext("asks"))
    assert store(manager, KEYS[14:16]) == [KEYS[2], KEYS[11]], "what is being checked stays"
    assert manager.lookup(KEYS[0], ReqContext("late")) is False


def test_what_is_there_is_not_stored_again(manager: PersistedOffloadingManager) -> None:
    output = manager.prepare_store(KEYS[:6], ReqContext("first"))
    assert output is not None
    assert output.keys_to_store == KEYS[4:6]
    assert output.evicted_keys == []


def test_a_reset_reaches_what_nobody_has_checked(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    manager.lookup(KEYS[0], ReqContext("first"))
    store(manager, KEYS[8:9])
    manager.take_events()
    manager.reset_cache()
    manager.check_invariants()
    assert keeper.num_resets == 1
    (event,) = manager.take_events()
    assert event.removed
    assert set(event.keys) == {KEYS[1], KEYS[2], KEYS[3], KEYS[8]}, "what was in flight was never announced as ready"
    assert not any(manager.lookup(key, ReqContext("later")) for key in KEYS[:9])
    keeper.finish()
    manager.advance(1.0)
    assert manager.lookup(KEYS[0], ReqContext("later")) is False
    assert manager.get_stats().condemned_blocks == 0
    assert store(manager, KEYS[:8]) == []


def test_what_came_back_is_announced(keeper: Keeper) -> None:
    manager = PersistedOffloadingManager(keeper, NUM_SLOTS, "lru", enable_events=True)
    manager.recall([{KEYS[0]: 4}, {KEYS[2]: 1, KEYS[3]: 7}])
    assert manager.take_events() == [OffloadingEvent([KEYS[0], KEYS[2], KEYS[3]], "CPU", False)]


def test_a_tier_that_is_shut_off_gives_nothing(keeper: Keeper) -> None:
    breaker = CircuitBreaker(1, 10.0)
    manager = PersistedOffloadingManager(keeper, NUM_SLOTS, "lru", breaker=breaker)
    manager.recall([{KEYS[0]: 4}])
    manager.advance(0.0)
    context = ReqContext("fails")
    output = manager.prepare_store(KEYS[5:6], context)
    assert output is not None
    manager.complete_store(KEYS[5:6], context, success=False, spec=output.store_spec)
    assert manager.residency(KEYS[0]) is Residency.ABSENT
    assert manager.lookup(KEYS[0], context) is False


def test_what_nobody_has_checked_goes_to_no_other_tier(manager: PersistedOffloadingManager) -> None:
    store(manager, KEYS[8:10])
    manager.take_events()
    spec = manager.evict_early(5, ReqContext("down"))
    assert spec.keys == [KEYS[9]], "the others are gone: nobody may read their bytes"
    removed = [event.keys for event in manager.take_events() if event.removed]
    assert removed == [[KEYS[1], KEYS[0], KEYS[3], KEYS[2]], [KEYS[9]]]
    manager.check_invariants()


def test_an_ended_conversation_keeps_what_others_may_share(manager: PersistedOffloadingManager, keeper: Keeper) -> None:
    """Of what an earlier process left, nobody knows who shares it."""
    store(manager, KEYS[8:12])
    context = ReqContext("ends", {"kvtier.ended": True})
    manager.on_new_request(context)
    manager.lookup_prefix(KEYS[:2], context)
    keeper.finish()
    manager.advance(1.0)
    spec = manager.prepare_load(KEYS[:2], context)
    manager.complete_load(KEYS[:2], context, spec=spec)
    manager.on_request_finished(context)
    assert set(store(manager, KEYS[12:14])) == {KEYS[2], KEYS[3]}
    manager.check_invariants()


# -- with a disk below ---------------------------------------------------------------------------------------


def settings_of(folder: Path) -> dict[str, object]:
    return {"disk": {"path": str(folder), "capacity": "1MiB", "min_free": 0, "stop_flush_s": 5}}


def test_a_disk_has_what_failed_its_check(tmp_path: Path) -> None:
    path = tmp_path / "kvtier-ram-test"
    first = Process(path, **settings_of(tmp_path / "disk"))
    first.store(KEYS[:6])
    first.stop()
    data = bytearray(path.read_bytes())
    data[-5 * 4096 - 100] ^= 1  # in slot 3
    path.write_bytes(data)
    second = Process(path, **settings_of(tmp_path / "disk"))
    assert isinstance(second.core, TieredOffloadingManager)
    assert second.restored == set(KEYS[:6])
    assert second.load(KEYS[:6]) == {key: content(key).tobytes() for key in KEYS[:6]}
    (tier,) = second.core.tier_stats()
    assert tier.counters["loaded_blocks"] == second.counters["corrupt_blocks"] == 1
    second.flush()
    second.core.check_invariants()
    second.stop()
    third = Process(path, **settings_of(tmp_path / "disk"))
    assert third.restored == set(KEYS[:6]), "what came up from the disk is written down too"
    third.stop()


def test_a_reset_empties_both(tmp_path: Path) -> None:
    path = tmp_path / "kvtier-ram-test"
    first = Process(path, **settings_of(tmp_path / "disk"))
    first.store(KEYS[:6])
    first.stop()
    second = Process(path, **settings_of(tmp_path / "disk"))
    second.core.reset_cache()
    assert second.find(KEYS) == []
    image = second.image(tmp_path / "image")
    second.stop()
    third = Process(image, **settings_of(tmp_path / "disk"))
    assert third.find(KEYS) == []
    third.stop()


def test_a_reuse_filter_sees_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "kvtier-ram-test"
    first = Process(path)
    first.store(KEYS[:2])
    first.stop()
    second = Process(path, store_threshold=2)
    assert second.store(KEYS[2:4]) == []
    assert second.find(KEYS[:4]) == KEYS[:2]
    assert second.find(KEYS[:4]) == KEYS[:2]
    assert second.store(KEYS[:4]) == KEYS[2:4]
    second.core.check_invariants()
    second.stop()
