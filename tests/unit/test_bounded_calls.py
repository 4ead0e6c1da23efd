"""Calls that may hang: whoever makes them does not."""

from __future__ import annotations

import threading

import pytest

from kvtier.transfers.bounded import BoundedCalls

PATIENCE_S = 60.0


def test_answers_and_errors_come_through_and_a_hanging_call_is_given_up() -> None:
    calls: BoundedCalls[object] = BoundedCalls("test-calls", PATIENCE_S)
    assert calls(lambda: 7) == 7
    with pytest.raises(KeyError):
        calls(lambda: {}["nothing"])
    calls._timeout_s = 0.01
    answers, ended = threading.Event(), threading.Event()

    def hang() -> None:
        answers.wait(PATIENCE_S)
        ended.set()

    with pytest.raises(TimeoutError):
        calls(hang)
    made = []
    with pytest.raises(TimeoutError, match="earlier"):
        calls(lambda: made.append(1))
    answers.set()
    assert ended.wait(PATIENCE_S)
    calls._timeout_s = PATIENCE_S
    while calls._given_up is not None and not calls._given_up.ended.is_set():
        assert ended.wait(PATIENCE_S)
    assert calls(threading.current_thread) is not threading.current_thread()
    assert made == []
    thread = calls._thread
    assert thread is not None
    calls.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
