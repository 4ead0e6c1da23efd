"""What waiting costs and what it saves: whether a request should wait for blocks in flight or recompute them.

Sans-I/O: time and progress are arguments. Both sides are rates that somebody has seen: how fast stores complete, and
how fast the engine computes. While one of them is unknown nothing is compared, and a request waits until its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import compress, count, islice, takewhile
from operator import or_

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey

HALF_LIFE_S = 10.0
"""What was seen this long ago (of time in which there was something to see) weighs half."""
MIN_PREFILL_TOKENS = 64
MIN_PREFILL_TOKENS_PER_REQUEST = 8
"""Steps of fewer tokens are decoding, or too small to say anything about a prefill."""


class Rate:
    """Things a second, recent ones counting most. O(1) a call."""

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0

    def note(self, count: float, seconds: float) -> None:
        """`count` more things have happened in `seconds` more seconds."""
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        self._count = self._count * kept + count
        self._seconds = self._seconds * kept + seconds

    @property
    def per_s(self) -> float | None:
        """None before the first thing has taken some time."""
        if self._count <= 0.0 or self._seconds <= 0.0:
            return None
        return self._count / self._seconds


class WaitingCost:
    """Compares the expected wait for blocks in flight with the time that computing them again would take.

    `recompute_blocks_per_s` is how many blocks the engine computes a second; None: not known, nothing is compared.
    """

    def __init__(self, recompute_blocks_per_s: float | None = None) -> None:
        self._stores = Rate()
        self._seen_s = -math.inf
        self._num_seen = 0
        self.recompute_blocks_per_s: float | None = None
        self.tell(recompute_blocks_per_s)

    def tell(self, recompute_blocks_per_s: float | None) -> None:
        """What is known of the engine now. Raises ConfigurationError unless it is more than 0 (or None)."""
        if recompute_blocks_per_s is not None and not 0 < recompute_blocks_per_s < math.inf:
            raise ConfigurationError(f"recompute_blocks_per_s is {recompute_blocks_per_s}; allowed: more than 0, None")
        self.recompute_blocks_per_s = recompute_blocks_per_s
        if recompute_blocks_per_s is None:
            self._seen_s = -math.inf

    def observe(self, now_s: float, num_stored: int, is_storing: bool) -> None:
        """Whenever time is told, before what has completed by then is reported; again at the same time at will. O(1).

        `num_stored` is how many blocks were ever stored; `is_storing` whether some are in flight, and so have been
        (nearly) since the call before.
        """
        num_new = num_stored - self._num_seen
        if self._seen_s > -math.inf and (is_storing or num_new):
            self._stores.note(num_new, now_s - self._seen_s if is_storing else 0.0)
        self._num_seen = num_stored
        self._seen_s = now_s

    def patience_s(
        self, keys: Sequence[OffloadKey], ready: Container[OffloadKey], in_flight: Collection[OffloadKey]
    ) -> float:
        """How long waiting for those of `keys` that are in flight may take before computing is cheaper.

        0: longer than is to be expected, so it is not worth waiting at all. inf: nobody knows. `keys` are what the
        request would use, shallowest first; `in_flight` is in the order in which the stores began, and complete.
        Counted as saved is the run of ready and arriving blocks from the first arriving one on: it is all lost to a
        request that does not wait. O(keys + in flight), at C speed.
        """
        blocks_per_s = self._stores.per_s
        if self.recompute_blocks_per_s is None or blocks_per_s is None:
            return math.inf
        arriving = list(map(in_flight.__contains__, keys))
        present = list(takewhile(bool, map(or_, arriving, map(ready.__contains__, keys))))
        pending = set(compress(keys, arriving[: len(present)]))
        if not pending:
            return math.inf
        saved_s = (len(present) - arriving.index(True)) / self.recompute_blocks_per_s
        expected_s = _num_until_all(pending, in_flight) / blocks_per_s
        return saved_s if expected_s <= saved_s else 0.0


def _num_until_all(pending: set[OffloadKey], in_flight: Iterable[OffloadKey]) -> int:
    """How many of `in_flight` come before the last of `pending`, which are all among them; that one included."""
    positions = compress(count(1), map(pending.__contains__, in_flight))
    return next(islice(positions, len(pending) - 1, None))


class PrefillRate:
    """Measures how many prompt tokens an engine computes a second, from the steps that it schedules.

    A step that is mostly prefill counts with the time until the next step, if a request takes part in both: then the
    engine was busy all the while.
    """

    def __init__(self) -> None:
        self._rate = Rate()
        self._begun_s = 0.0
        self._num_tokens = 0
        self._requests: Collection[str] = ()

    def note_step(self, now_s: float, num_tokens: int, requests: Collection[str]) -> bool:
        """A step of `num_tokens` tokens of `requests` begins. True if that has told something. O(requests).

        `requests` is kept until the next call; the caller does not change it.
        """
        learnt = False
        if self._num_tokens and now_s > self._begun_s and any(request in requests for request in self._requests):
            self._rate.note(self._num_tokens, now_s - self._begun_s)
            learnt = True
        least = max(MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS_PER_REQUEST * len(requests))
        self._num_tokens = num_tokens if num_tokens >= least else 0
        self._begun_s = now_s
        self._requests = requests
        return learnt

    @property
    def tokens_per_s(self) -> float | None:
        """None before anything was measured."""
        return self._rate.per_s
