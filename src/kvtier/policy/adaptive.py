"""Keeps what is expected to yield the most hits for its room, learned from the traffic itself.

Blocks are handled in segments (`kvtier.policy.segments`): a segment that others continue leaves after them, so a hit
never ends at a hole. Among the ends of all prompts, the one of least worth (`kvtier.policy.survival`) goes first.
Worth depends on a block's kind and its age in requests. The kind says how often a block was used; of blocks used once,
whether they continue a prompt that was known; and whether it was the last of its request (where engines hash partial
blocks, those never match again; where they do not, the policy learns that they do). What was evicted is remembered for
a while, by key only: its return teaches, and its count of uses goes on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.recency import consume, has_evictable
from kvtier.policy.segment_tree import SegmentTree
from kvtier.policy.segments import Segment
from kvtier.policy.survival import SurvivalModel

_TAIL = 0
"""Kind of the last block of the one request that used it."""
_FIRST = 1
"""Kind of blocks used once. Those used twice, or more often, have their uses as kind."""
_MAX_USES = 3
_BEHIND = _MAX_USES + 1
"""Kind of blocks used once whose request found the blocks before them."""
_NUM_KINDS = _MAX_USES + 2
_GHOSTS_PER_BLOCK = 8
_MIN_REFRESH_TICKS = 50
_SEGMENTS_PER_TICK = 16
"""How many segments a refresh may look at, for every tick since the one before."""
_MAX_SAMPLED_LIVES = 2048
"""Of more lives than that, which have not ended, every n-th stands for n when the model is renewed."""
_FADE = 0.97
_INFINITE = float("inf")
_PRICE_TICKS = 4
"""Worths that are known are good for so many ticks."""


class AdaptiveCachePolicy(SegmentTree, CachePolicy):
    """See the module. Time is counted in ticks, one for each request that ends.

    Per block of capacity it remembers one resident key and up to eight evicted ones: see docs/decisions/eviction.md.
    """

    name = "adaptive"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._start()

    def _start(self) -> None:
        self._now = 0
        self._refresh_at = _MIN_REFRESH_TICKS
        self._plant(_NUM_KINDS)
        self._ghosts = Ghosts()
        self._model = SurvivalModel(_NUM_KINDS, new_kinds=(_FIRST, _BEHIND))

    # -- accesses --------------------------------------------------------------------------------------------

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for segment in self._adopt(keys):
            self._segments[segment] = None
            self._segment_of.update(dict.fromkeys(segment.keys, segment))
            self._ends[segment.kind].add(segment)

    def _adopt(self, keys: Sequence[OffloadKey]) -> list[Segment]:
        """Segments, in no queue, of keys that are not resident; what returns is noted as used, and no ghost any more.

        Ghosts are found by their shallowest keys only: a prompt whose beginning is not known is new.
        """
        segments: list[Segment] = []
        begin = 0
        while begin < len(keys):
            ghost = self._ghosts.get(keys[begin])
            if ghost is None:
                segments.append(Segment(list(keys[begin:][::-1]), _FIRST, 1, self._now))
                break
            segment = self._recall(ghost, keys, begin)
            segments.append(segment)
            begin += len(segment.keys)
        return segments

    def _recall(self, ghost: Segment, keys: Sequence[OffloadKey], begin: int) -> Segment:
        """The shallowest keys of an evicted segment return: as many as agree with `keys` from `begin` on."""
        size = len(ghost.keys)
        returned = list(keys[begin : begin + size][::-1])
        if returned == ghost.keys:
            segment = ghost
        else:
            size = 1
            while size < len(returned) and returned[-size - 1] == ghost.keys[-size - 1]:
                size += 1
            segment = Segment(returned[-size:], ghost.kind, ghost.uses, ghost.last_use)
        self._ghosts.take(ghost, size)
        segment.ghost = None
        self._count_use(segment)
        segment.last_use = self._now
        return segment

    def _count_use(self, segment: Segment) -> None:
        """A segment that is in no queue was used again."""
        self._model.note_use(segment.kind, self._now - segment.last_use, len(segment.keys))
        if segment.uses < _MAX_USES:
            segment.uses += 1
        segment.kind = segment.uses

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        self._access(list(dict.fromkeys(keys)), first_use)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        keys = list(keys)
        path = self._access(keys, first_use)
        if path:
            deepest = path[0]
            if deepest.uses == 1 and deepest.kind != _TAIL:
                if path[-1].uses > 1:
                    self._mark_behind(path)
                if not deepest.children and deepest.keys[0] == keys[0] and keys[0] in first_use:
                    self._mark_tail(deepest)
        self._now += 1
        if not self._now % _PRICE_TICKS:
            for queue in self._ends:
                queue.cheapest = None
        if self._now >= self._refresh_at:
            self._refresh()

    def _refresh(self) -> None:
        now = self._now
        num_running = len(self._segments) + len(self._ghosts)
        step = 1 + num_running // _MAX_SAMPLED_LIVES
        running = islice(chain(self._segments, self._ghosts), self._now % step, None, step)
        self._model.refresh(now, running, step)
        self._model.fade(_FADE)
        for queue in self._ends:
            queue.cheapest = None
        self._refresh_at = now + max(_MIN_REFRESH_TICKS, num_running // _SEGMENTS_PER_TICK)

    def _access(self, keys: list[OffloadKey], first_use: Container[OffloadKey]) -> list[Segment]:
        """One use of the resident ones of `keys`, deepest first. Their segments, in that order."""
        path: list[Segment] = []
        segment_of, ends, now = self._segment_of, self._ends, self._now
        position, num_keys = 0, len(keys)
        while position < num_keys:
            key = keys[position]
            segment = segment_of.get(key)
            if segment is None:
                position += 1
                continue
            size = len(segment.keys)
            if keys[position : position + size] != segment.keys:
                segment, size = self._part_of(segment, keys, position)
            position += size
            is_reuse = key not in first_use
            if is_reuse or segment.last_use != now:
                if segment.period >= 0:
                    ends[segment.kind].discard(segment)
                if is_reuse:
                    self._count_use(segment)
                segment.last_use = now
            if path:
                deeper = path[-1]
                if deeper.parent is not segment:
                    self._attach(deeper, segment)
                if segment.children == 1 and segment.uses == deeper.uses and segment.kind == deeper.kind:
                    path.pop()
                    segment = self._join(segment, deeper, path)
            path.append(segment)
        self._queue_ends(path)
        return path

    def _mark_behind(self, path: list[Segment]) -> None:
        """The new ones among these continue what was known."""
        for segment in path:
            if segment.uses > 1:
                break
            if segment.period >= 0:
                self._ends[segment.kind].discard(segment)
            segment.kind = _BEHIND
            if not segment.children:
                self._ends[_BEHIND].add(segment)

    def _mark_tail(self, segment: Segment) -> None:
        """The deepest key of this end of a prompt was the last of its request."""
        self._ends[segment.kind].discard(segment)
        if len(segment.keys) > 1:
            tail = Segment([segment.keys.pop(0)], _TAIL, 1, segment.last_use)
            self._segments[tail] = None
            self._segment_of[tail.keys[0]] = tail
            self._attach(tail, segment)
            segment = tail
        segment.kind = _TAIL
        self._ends[_TAIL].add(segment)

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        if not has_evictable(self._segment_of, count, protected):
            return None
        return self._evict(count, protected, None)

    def evict_for(
        self, newcomers: Sequence[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]] = ()
    ) -> list[OffloadKey] | None:
        if not has_evictable(self._segment_of, count, protected):
            return None
        return self._evict(count, protected, self._worth_of(newcomers)[len(newcomers) - count :])

    def decline(self, keys: Sequence[OffloadKey]) -> None:
        # as if they had been evicted at once
        for segment in self._adopt(keys):
            self._ghosts.add(segment)
        self._forget_ghosts()

    def _worth_of(self, newcomers: Sequence[OffloadKey]) -> list[float]:
        """The worth of each newcomer, or of a deeper one if that is more."""
        worth, ghosts = self._model.worth, self._ghosts
        worths: list[float] = []
        begin = 0
        while begin < len(newcomers):
            ghost = ghosts.get(newcomers[begin])
            size = len(newcomers) - begin
            if ghost is None:
                worths += [self._model.worth_of_new] * size
                break
            size = min(size, len(ghost.keys))
            worths += [worth[min(ghost.uses + 1, _MAX_USES)][0]] * size
            begin += size
        if begin:
            best = 0.0
            for i in range(len(worths) - 1, -1, -1):
                best = worths[i] = max(best, worths[i])
        return worths

    def _evict(
        self, count: int, protected: Sequence[Container[OffloadKey]], worths: list[float] | None
    ) -> list[OffloadKey]:
        """Evicts `count` keys, of which there are enough, or fewer if what the next makes room for is worth less."""
        victims: list[OffloadKey] = []
        passed_over: list[Segment] = []
        missing = count
        while missing:
            worth, segment = self._least_worth()
            if segment is None or (worths is not None and worths[count - missing] < worth):
                break
            part = self._evictable(segment, protected) if protected else segment.keys
            if len(part) > missing:
                part = part[:missing]
            if len(part) == len(segment.keys):
                self._leave(segment)
            else:
                self._ends[segment.kind].discard(segment)
                passed_over.append(segment)
                if part:
                    self._shorten(segment, part)
            victims += part
            missing -= len(part)
        consume(map(self._segment_of.__delitem__, victims))
        for segment in passed_over:
            if not segment.children and segment.period < 0:
                self._ends[segment.kind].add(segment)
        if missing and worths is None:
            victims += self._evict_inside(missing, protected, passed_over)
        if self._ghosts.num_keys > _GHOSTS_PER_BLOCK * self.cache_capacity:
            self._forget_ghosts()
        return victims

    def _least_worth(self) -> tuple[float, Segment | None]:
        least, found = _INFINITE, None
        for kind, queue in enumerate(self._ends):
            worth, segment = queue.cheapest or queue.find_cheapest(self._model.worth[kind], self._now)
            if worth < least:
                least, found = worth, segment
        return least, found

    @staticmethod
    def _evictable(segment: Segment, protected: Sequence[Container[OffloadKey]]) -> list[OffloadKey]:
        """The deepest keys of a segment, up to the first that is protected."""
        keys = segment.keys
        for container in protected:
            if any(map(container.__contains__, keys)):
                keys = keys[: next(i for i, key in enumerate(keys) if key in container)]
        return keys

    def _leave(self, segment: Segment) -> None:
        """A whole end becomes a ghost."""
        self._ends[segment.kind].discard(segment)
        del self._segments[segment]
        self._detach(segment)
        self._ghosts.add(segment)

    def _shorten(self, segment: Segment, part: list[OffloadKey]) -> None:
        """The deepest keys of an end, not all, become a ghost."""
        del segment.keys[: len(part)]
        ghost = Segment(part, segment.kind, segment.uses, segment.last_use)
        ghost.ghost = segment.ghost
        self._ghosts.add(ghost)
        segment.ghost = ghost

    def _evict_inside(
        self, count: int, protected: Sequence[Container[OffloadKey]], ends: list[Segment]
    ) -> list[OffloadKey]:
        """What is left to be evicted has protected keys behind it, or beside it in its segment."""
        victims: list[OffloadKey] = []
        seen: set[Segment] = set()
        for end in ends:
            segment: Segment | None = end
            while segment is not None and segment not in seen and len(victims) < count:
                seen.add(segment)
                free = [key for key in segment.keys if not any(key in container for container in protected)]
                victims += free[: count - len(victims)]
                segment = segment.parent
        self.remove(victims)
        return victims

    def _forget_ghosts(self) -> None:
        limit = _GHOSTS_PER_BLOCK * self.cache_capacity
        while self._ghosts.num_keys > limit:
            ghost = self._ghosts.pop_first()
            self._model.note_loss(ghost.kind, self._now - ghost.last_use, len(ghost.keys))

    # -- the rest --------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for segment, group in groupby(list(keys), self._segment_of.get):
            if segment is None:
                continue
            removed = set(group)
            segment.keys = [key for key in segment.keys if key not in removed]
            for key in removed:
                del self._segment_of[key]
            if not segment.keys:
                if segment.period >= 0:
                    self._ends[segment.kind].discard(segment)
                del self._segments[segment]
                self._detach(segment)

    def clear(self) -> None:
        self._start()

    def __contains__(self, key: object) -> bool:
        return key in self._segment_of

    def __len__(self) -> int:
        return len(self._segment_of)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._segment_of)
