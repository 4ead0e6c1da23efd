"""Where time comes from, for those who drive a manager. The core itself never asks: it is told."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds. `time.monotonic` is one; the simulator has another."""

    def __call__(self) -> float:
        """Seconds since some fixed moment; never smaller than the answer before."""
        ...
