"""The event log of one seed: what a replay must repeat byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property

from kvtier.keys import OffloadKey


class EventLog:
    """Lines of one seed, digested as they come, and handed to `write`, each with its newline, where there is one."""

    def __init__(self, seed: int, write: Callable[[str], object] | None = None) -> None:
        self._seed = seed
        self._write = write
        self._digest = hashlib.blake2b(digest_size=16)
        self._names: dict[OffloadKey, str] = {}
        self.step = 0
        self.now_s = 0.0

    def say(self, text: str) -> None:
        """One line, with the seed, the step and the simulated time before it."""
        line = f"{self._seed} {self.step} {self.now_s:.6f} {text}\n"
        self._digest.update(line.encode())
        if self._write is not None:
            self._write(line)

    def names(self, keys: Iterable[OffloadKey]) -> str:
        """Short names of blocks, by first mention."""
        names = self._names
        return ",".join([names.setdefault(key, f"k{len(names)}") for key in keys])

    @cached_property
    def digest(self) -> bytes:
        """Of everything that was said. Nothing is said afterwards."""
        return self._digest.digest()
