"""Calls that may never return: given up in time, and known to go on until they do not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.tiers.shared.native_calls import CallThread, LeftCalls
from kvtier.tiers.shared.store import StoreTimeoutError, StoreUnreachableError

GIVE_UP_S = 30.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def later(seconds: float = GIVE_UP_S) -> float:
    return time.monotonic() + seconds


def test_results_and_errors_come_back() -> None:
    left = LeftCalls()
    thread = CallThread("test", left)
    assert thread.call(lambda: 7, later()) == 7
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0, later())
    assert thread.call(lambda: 8, later(), lambda result, took_s: True) == 8
    assert len(left) == 0
    thread.close()


def test_given_up_at_its_deadline_and_stuck_until_it_returns(gate: threading.Event) -> None:
    left = LeftCalls()
    thread = CallThread("test", left)
    with pytest.raises(StoreTimeoutError) as caught:
        thread.call(gate.wait, later(0.01))
    stuck = caught.value.stuck
    assert stuck is not None
    ended = threading.Event()
    stuck.when_ended(ended.set)
    assert not ended.is_set()
    assert len(left) == 1
    gate.set()
    assert ended.wait(GIVE_UP_S)
    stuck.when_ended(ended.clear)
    assert not ended.is_set(), "whoever comes late hears of it at once"
    assert len(left) == 0


def test_aborted_from_another_thread(gate: threading.Event) -> None:
    left = LeftCalls()
    thread = CallThread("test", left)
    begun = threading.Event()

    def call() -> bool:
        begun.set()
        return gate.wait(GIVE_UP_S)

    aborter = threading.Thread(target=lambda: (begun.wait(GIVE_UP_S), thread.abort()))
    aborter.start()
    with pytest.raises(StoreUnreachableError) as caught:
        thread.call(call, later())
    assert caught.value.stuck is not None
    assert len(left) == 1
    aborter.join()
    with pytest.raises(StoreUnreachableError) as caught:
        thread.call(call, later())
    assert caught.value.stuck is None, "this one has not begun"


def test_returned_and_not_ended_is_stuck_for_ever() -> None:
    left = LeftCalls()
    thread = CallThread("test", left)
    with pytest.raises(StoreTimeoutError) as caught:
        thread.call(lambda: "given up", later(), lambda result, took_s: result != "given up")
    assert caught.value.stuck is not None
    caught.value.stuck.when_ended(lambda: pytest.fail("nobody can tell when it ends"))
    assert len(left) == 1


def test_the_wall_clock_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    thread = CallThread("test", LeftCalls())
    monkeypatch.setattr(time, "time", lambda: 1000.0 * len(times))
    thread.call(lambda: times.append(0), later(), lambda result, took_s: times.append(took_s) is None)
    assert times[1] >= 1000
    thread.close()


def test_an_interpreter_that_exits_waits_for_a_call() -> None:
    script = """
import time
from kvtier.tiers.shared.native_calls import CallThread, LeftCalls
from kvtier.tiers.shared.store import StoreTimeoutError
try:
    CallThread("test", LeftCalls()).call(lambda: (time.sleep(0.5), print("ended", flush=True)), time.monotonic() + 0.1)
except StoreTimeoutError:
    print("given up", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["given up", "ended"]
