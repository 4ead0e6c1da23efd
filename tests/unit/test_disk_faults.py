"""The disk tier when its device fails: at every call of a life, every way of failing."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from disk_harness import CAP_BYTES, KEYS, ROOT, Machine, check_no_slot_is_lost, check_serves_only_what_was_stored
from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver

ERRORS = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EROFS": errno.EROFS,
    "EACCES": errno.EACCES,
    "ENOENT": errno.ENOENT,
}


class Killed(BaseException):
    """The process is gone: nothing catches this for long, as every later call fails."""


class Life:
    """A tier from open to close, with everything that it does, and what must be there after each step."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.versions: dict[OffloadKey, set[int]] = {}
        """What may be handed out for each key."""
        self.must_be_there: set[OffloadKey] = set()
        """Durable, and neither evicted nor reset since."""
        self.version = 0
        self.reset_failed = False

    def run(self) -> None:
        """Opens twice and does all there is. Raises nothing but what the contract allows; checks every load."""
        for _ in range(2):
            try:
                driver = self.machine.open()
            except TierError:
                continue
            try:
                self._live(driver)
            finally:
                self._check_removed(driver)

    def _live(self, driver: TierDriver) -> None:
        self.store(driver, KEYS[:4])
        check_serves_only_what_was_stored(driver, self.versions)
        self.flush(driver)
        driver.tier.touch(KEYS[1:3])
        self.store(driver, KEYS[4:8])  # evicts
        driver.tier.drop(KEYS[5:6])
        self._check_removed(driver)
        self.flush(driver)
        self.must_be_there.clear()
        if not self.machine.reset(driver):
            self.reset_failed = True
        self._go_on_if_alive()
        self.versions.clear()
        self.version += 1
        self.store(driver, KEYS[6:10])
        check_serves_only_what_was_stored(driver, self.versions)
        self.flush(driver)
        self._check_removed(driver)
        driver.tier.check_invariants()
        driver.close(1.0)
        self._check_removed(driver)

    def store(self, driver: TierDriver, keys: list[OffloadKey]) -> None:
        new = [key for key in keys if key not in driver.ready(keys)]
        self._go_on_if_alive()
        for key in new:  # what was stored before may still be there if this store fails
            self.versions.setdefault(key, set()).add(self.version)
        driver.store(keys, self.version)
        self._check_removed(driver)

    def flush(self, driver: TierDriver) -> None:
        ready = set(driver.ready(KEYS))
        if driver.tier.flush(1.0):
            self.must_be_there = ready

    def _go_on_if_alive(self) -> None:
        if self.machine.files.is_dead:
            raise Killed

    def _check_removed(self, driver: TierDriver) -> None:
        self.must_be_there -= set(driver.tier.take_removed())
        if driver.tier.get_stats().closed_reason not in ("", "closed"):
            self.must_be_there.clear()


def num_calls(prepare: Callable[[Machine], None] = lambda machine: None) -> int:
    machine = Machine()
    prepare(machine)
    Life(machine).run()
    return len(machine.files.calls)


def fail_at(machine: Machine, index: int, code: int, persistent: bool) -> None:
    """From the call of this number on, or for this one alone, the system answers with an error."""

    def before_call(name: str, path: str) -> None:
        at = len(machine.files.calls) - 1
        if at == index or (persistent and at > index and name != "close"):
            raise OSError(code, errno.errorcode[code])

    machine.files.before_call = before_call


def watch_the_cap(machine: Machine) -> None:
    def after_call() -> None:
        assert machine.used_in_root() <= CAP_BYTES

    machine.files.after_call = after_call


def check_afterwards(machine: Machine, life: Life, *, strict: bool, whole: bool) -> None:
    """Whatever happened: another process opens the cache, and it is sound."""
    machine.files.kill()
    machine.files.restart()
    machine.clock.now_s += 100
    watch_the_cap(machine)
    driver = machine.open()
    ready = driver.ready(KEYS)
    came_back = check_serves_only_what_was_stored(driver, life.versions)
    if strict:
        assert life.must_be_there <= set(came_back)
    if whole:
        assert came_back == ready
    check_no_slot_is_lost(driver)
    driver.close(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_any_call(error: str, persistent: bool) -> None:
    for index in range(num_calls()):
        machine = Machine()
        fail_at(machine, index, ERRORS[error], persistent)
        life = Life(machine)
        life.run()
        # a reset that could not be made durable and whose cache could not be emptied either is said, not hidden
        if not (life.reset_failed and persistent):
            check_afterwards(machine, life, strict=False, whole=True)


def test_short_transfers_everywhere() -> None:
    machine = Machine()
    machine.files.short_transfers = True
    life = Life(machine)
    life.run()
    assert life.must_be_there
    check_afterwards(machine, life, strict=True, whole=True)


def die_at(machine: Machine, index: int, chance: random.Random | None) -> None:
    def before_call(name: str, path: str) -> None:
        if len(machine.files.calls) - 1 == index:
            if chance is None:
                machine.files.kill()
            else:
                machine.files.lose_power(chance)
            raise Killed

    machine.files.before_call = before_call


def run_until_dead(machine: Machine, life: Life) -> None:
    try:
        life.run()
    except Killed:
        assert machine.files.is_dead


@pytest.mark.slow
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power loss"])
def test_death_at_any_call(power_loss: bool) -> None:
    for index in range(num_calls()):
        for seed in range(4 if power_loss else 1):
            machine = Machine()
            die_at(machine, index, random.Random(seed) if power_loss else None)
            life = Life(machine)
            run_until_dead(machine, life)
            check_afterwards(machine, life, strict=True, whole=not power_loss)


@pytest.mark.slow
def test_the_folder_vanishes_at_any_call() -> None:
    for index in range(num_calls()):
        machine = Machine()

        def before_call(name: str, path: str, machine: Machine = machine, index: int = index) -> None:
            if len(machine.files.calls) - 1 == index:
                machine.files.delete_folder(ROOT)

        machine.files.before_call = before_call
        life = Life(machine)
        life.run()
        check_afterwards(machine, life, strict=False, whole=True)


def test_a_vanished_folder_turns_the_tier_off() -> None:
    machine = Machine()
    driver = machine.open()
    driver.store(KEYS[:3])
    machine.files.delete_folder(ROOT)
    driver.store(KEYS[3:4])
    driver.poll()
    assert driver.ready(KEYS) == []
    assert "deleted" in driver.tier.get_stats().closed_reason
    driver.close(1.0)
    assert machine.files.used() == 0


def test_a_device_without_room_keeps_what_it_has() -> None:
    machine = Machine()
    driver = machine.open()
    driver.store(KEYS[:3])
    driver.tier.flush(1.0)

    def full(name: str, path: str) -> None:
        if name == "pwritev":
            raise OSError(errno.ENOSPC, "No space left on device")

    machine.files.before_call = full
    outcome = driver.store(KEYS[3:6])
    assert outcome is not None
    assert not any(outcome.succeeded)
    assert "ENOSPC" in outcome.reason
    assert driver.ready(KEYS) == KEYS[:3]
    assert driver.load(KEYS[:3]).success
    machine.files.before_call = None
    machine.clock.now_s += 100
    assert driver.store(KEYS[3:6]) is not None
    assert driver.ready(KEYS) == KEYS[:6]
    driver.close(1.0)
