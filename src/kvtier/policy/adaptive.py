"""Keeps what is expected to yield the most hits for its room, learned from the traffic itself.

Blocks are handled in segments (`kvtier.policy.segments`): a segment that others continue leaves after them, so a hit
never ends at a hole. Among the ends of all prompts, the one of least worth (`kvtier.policy.survival`) goes first.
Worth depends on how often a block was used, whether it was the last of its request (where engines hash partial blocks,
those never match again; where they do not, the policy learns that they do), and its age in requests. What was evicted
is remembered for a while, by key only: its return teaches, and its count of uses goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise, takewhile

from kvtier.interfaces import CachePolicy
from kvtier.keys import OffloadKey
from kvtier.policy.segments import AgeQueue, Segment
from kvtier.policy.survival import SurvivalModel, age_class

_TAIL = 0
"""Kind of the last block of the one request that used it. Other kinds: 1 to 4 or more uses."""
_MAX_USES = 4
_NUM_KINDS = _MAX_USES + 1
_GHOSTS_PER_BLOCK = 4
_REFRESH_TICKS = 50
_FADE = 0.97


class AdaptiveCachePolicy(CachePolicy):
    """See the module. Time is counted in ticks, one for each request that ends.

    Per block of capacity it remembers one resident key and up to four evicted ones: some 200 bytes each where segments
    are ten blocks long, some 600 where every request has one block.
    """

    name = "adaptive"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._start()

    def _start(self) -> None:
        self._now = 0
        self._refresh_at = _REFRESH_TICKS
        self._segment_of: dict[OffloadKey, Segment] = {}
        """Of resident and evicted keys."""
        self._num_resident = 0
        self._ends = [AgeQueue() for _ in range(_NUM_KINDS)]
        """By kind, the resident segments that no resident one continues."""
        self._ghosts: OrderedDict[Segment, None] = OrderedDict()
        """Evicted segments, the first to be forgotten first."""
        self._model = SurvivalModel(_NUM_KINDS)

    # -- accesses --------------------------------------------------------------------------------------------

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        self._num_resident += len(keys)
        for segment in self._adopt(keys):
            segment.resident = True
            self._ends[segment.kind].add(segment)
        self._forget_ghosts()

    def _adopt(self, keys: Sequence[OffloadKey]) -> list[Segment]:
        """Segments, not resident and in no queue, of keys that are not resident; what returns is noted as used."""
        segment_of = self._segment_of
        if not any(map(segment_of.get, keys)):
            segments = [Segment(list(keys[::-1]), 1, 1, self._now)]
            segment_of.update(dict.fromkeys(keys, segments[0]))
            return segments
        segments = []
        for ghost, group in groupby(keys[::-1], segment_of.get):
            part = list(group)
            if ghost is None:
                segment = Segment(part, 1, 1, self._now)
                segment_of.update(dict.fromkeys(part, segment))
            else:
                segment = self._recall(ghost, part)
            segments.append(segment)
        return segments

    def _recall(self, ghost: Segment, part: list[OffloadKey]) -> Segment:
        """Keys of an evicted segment return."""
        if len(part) == len(ghost.keys):
            del self._ghosts[ghost]
            segment = ghost
            segment.keys = part
        else:
            returned = set(part)
            ghost.keys = [key for key in ghost.keys if key not in returned]
            segment = Segment(part, ghost.kind, ghost.uses, ghost.last_use)
            self._segment_of.update(dict.fromkeys(part, segment))
        self._count_use(segment)
        segment.last_use = self._now
        return segment

    def _count_use(self, segment: Segment) -> None:
        """A segment that is in no queue was used again."""
        self._model.note_use(segment.kind, self._now - segment.last_use, len(segment.keys))
        segment.uses += 1
        segment.kind = min(segment.uses, _MAX_USES)

    def touch(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey] = ()) -> None:
        self._access(list(keys), first_use)

    def settle(self, keys: Iterable[OffloadKey], first_use: Container[OffloadKey]) -> None:
        keys = list(keys)
        path = self._access(keys, first_use)
        if path:
            deepest = path[0]
            is_new_end = deepest.uses == 1 and not deepest.children and deepest.kind != _TAIL
            if is_new_end and deepest.keys[0] == keys[0] and keys[0] in first_use:
                self._mark_tail(deepest)
        self._now += 1
        if self._now >= self._refresh_at:
            self._refresh()

    def _refresh(self) -> None:
        now = self._now
        segments = set(self._segment_of.values())
        self._model.refresh((segment.kind, now - segment.last_use, len(segment.keys)) for segment in segments)
        self._model.fade(_FADE)
        self._refresh_at = now + max(_REFRESH_TICKS, len(segments) // 16)

    def _access(self, keys: list[OffloadKey], first_use: Container[OffloadKey]) -> list[Segment]:
        """One use of the resident ones of `keys`, deepest first. Their segments, in that order."""
        path: list[Segment] = []
        position = 0
        while position < len(keys):
            segment = self._segment_of.get(keys[position])
            if segment is None or not segment.resident:
                position += 1
                continue
            part = keys[position : position + len(segment.keys)]
            if part != segment.keys:
                part = list(takewhile(lambda key: self._segment_of.get(key) is segment, keys[position:]))  # noqa: B023
                if len(part) < len(segment.keys):
                    segment = self._split(segment, part)
            position += len(part)
            if segment.period >= 0:
                self._ends[segment.kind].discard(segment)
            if part[0] not in first_use:
                self._count_use(segment)
            segment.last_use = self._now
            path.append(segment)
        for segment, parent in pairwise(path):
            self._attach(segment, parent)
        for segment in path:
            if not segment.children:
                self._ends[segment.kind].add(segment)
        return path

    def _split(self, segment: Segment, part: list[OffloadKey]) -> Segment:
        """Parts `part` from a resident segment, and becomes what it continues. The new segment, in no queue."""
        taken = set(part)
        segment.keys = [key for key in segment.keys if key not in taken]
        new = Segment(part, segment.kind, segment.uses, segment.last_use)
        self._segment_of.update(dict.fromkeys(part, new))
        if segment.parent is not None:
            self._attach(new, segment.parent)
        self._attach(segment, new)
        return new

    def _mark_tail(self, segment: Segment) -> None:
        """The deepest key of this end of a prompt was the last of its request."""
        self._ends[segment.kind].discard(segment)
        if len(segment.keys) > 1:
            tail = Segment([segment.keys.pop(0)], _TAIL, 1, segment.last_use)
            self._segment_of[tail.keys[0]] = tail
            self._attach(tail, segment)
            segment = tail
        segment.kind = _TAIL
        self._ends[_TAIL].add(segment)

    @staticmethod
    def _attach(segment: Segment, parent: Segment) -> None:
        if segment.parent is parent:
            return
        if segment.parent is not None:
            segment.parent.children -= 1
        segment.parent = parent
        parent.children += 1

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, count: int, protected: Sequence[Container[OffloadKey]] = ()) -> list[OffloadKey] | None:
        if not self._can_evict(count, protected):
            return None
        return self._evict(count, protected, None)

    def evict_for(
        self, newcomers: Sequence[OffloadKey], count: int, protected: Sequence[Container[OffloadKey]] = ()
    ) -> list[OffloadKey] | None:
        if not self._can_evict(count, protected):
            return None
        return self._evict(count, protected, self._worth_of(newcomers[len(newcomers) - count :]))

    def decline(self, keys: Sequence[OffloadKey]) -> None:
        # as if they had been evicted at once
        for segment in self._adopt(keys):
            segment.resident = False
            self._ghosts[segment] = None
        self._forget_ghosts()

    def _can_evict(self, count: int, protected: Sequence[Container[OffloadKey]]) -> bool:
        if count > self._num_resident:
            return False
        try:
            if count + sum(map(len, protected)) <= self._num_resident:  # type: ignore[arg-type]
                return True
        except TypeError:  # a container that cannot tell its length
            pass
        evictable = (key for key in self if not any(key in container for container in protected))
        return sum(1 for _, _ in zip(range(count), evictable, strict=False)) == count

    def _worth_of(self, newcomers: Sequence[OffloadKey]) -> list[float]:
        """The worth of each newcomer, or of a deeper one if that is more."""
        worths = [kind_worth[0] for kind_worth in self._model.worth]
        if not any(map(self._segment_of.get, newcomers)):
            return [worths[1]] * len(newcomers)
        result = []
        best = 0.0
        for key in reversed(newcomers):
            ghost = self._segment_of.get(key)
            best = max(best, worths[1] if ghost is None else worths[min(ghost.uses + 1, _MAX_USES)])
            result.append(best)
        result.reverse()
        return result

    def _evict(
        self, count: int, protected: Sequence[Container[OffloadKey]], worths: list[float] | None
    ) -> list[OffloadKey]:
        """Evicts `count` keys, of which there are enough, or fewer if what the next makes room for is worth less."""
        victims: list[OffloadKey] = []
        passed_over: list[Segment] = []
        while len(victims) < count:
            worth, segment = self._least_worth()
            if segment is None:
                break
            if worths is not None and worths[len(victims)] < worth:
                break
            part = self._evictable(segment, protected)[: count - len(victims)]
            if len(part) < len(segment.keys):
                self._ends[segment.kind].discard(segment)
                passed_over.append(segment)
            victims += part
            self._leave(segment, part)
        for segment in passed_over:
            if not segment.children and segment.period < 0:
                self._ends[segment.kind].add(segment)
        if len(victims) < count and worths is None:
            victims += self._evict_anything(count - len(victims), protected)
        self._forget_ghosts()
        return victims

    def _least_worth(self) -> tuple[float, Segment | None]:
        least, found = float("inf"), None
        for queue, worths in zip(self._ends, self._model.worth, strict=True):
            if queue:
                for segment in (queue.oldest(), queue.newest()):
                    worth = worths[age_class(self._now - segment.last_use)]
                    if worth < least:
                        least, found = worth, segment
        return least, found

    @staticmethod
    def _evictable(segment: Segment, protected: Sequence[Container[OffloadKey]]) -> list[OffloadKey]:
        """The deepest keys of a segment, up to the first that is protected."""
        keys = segment.keys
        for container in protected:
            keys = list(takewhile(lambda key: key not in container, keys))  # noqa: B023
        return keys

    def _leave(self, segment: Segment, part: list[OffloadKey]) -> None:
        """The deepest keys of an end, or all, become ghosts."""
        if not part:
            return
        self._num_resident -= len(part)
        if len(part) < len(segment.keys):
            del segment.keys[: len(part)]
            ghost = Segment(part, segment.kind, segment.uses, segment.last_use)
            self._segment_of.update(dict.fromkeys(part, ghost))
            if segment.kind == _TAIL:
                segment.kind = 1
        else:
            ghost = segment
            if segment.period >= 0:
                self._ends[segment.kind].discard(segment)
            parent, segment.parent = segment.parent, None
            if parent is not None:
                parent.children -= 1
                if not parent.children and parent.resident:
                    self._ends[parent.kind].add(parent)
        ghost.resident = False
        self._ghosts[ghost] = None

    def _evict_anything(self, count: int, protected: Sequence[Container[OffloadKey]]) -> list[OffloadKey]:
        """What is left to be evicted has protected keys behind it, or beside it in its segment."""
        victims: list[OffloadKey] = []
        for key in self:
            if len(victims) < count and not any(key in container for container in protected):
                victims.append(key)
        self.remove(victims)
        return victims

    def _forget_ghosts(self) -> None:
        limit = (1 + _GHOSTS_PER_BLOCK) * self.cache_capacity
        while self._ghosts and len(self._segment_of) > limit:
            ghost, _ = self._ghosts.popitem(last=False)
            self._model.note_loss(ghost.kind, self._now - ghost.last_use, len(ghost.keys))
            for key in ghost.keys:
                del self._segment_of[key]

    # -- the rest --------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for segment, group in groupby(keys, self._segment_of.get):
            if segment is None or not segment.resident:
                continue
            removed = set(group)
            segment.keys = [key for key in segment.keys if key not in removed]
            self._num_resident -= len(removed)
            for key in removed:
                del self._segment_of[key]
            if not segment.keys:
                if segment.period >= 0:
                    self._ends[segment.kind].discard(segment)
                segment.resident = False
                parent, segment.parent = segment.parent, None
                if parent is not None:
                    parent.children -= 1
                    if not parent.children and parent.resident and parent.period < 0:
                        self._ends[parent.kind].add(parent)

    def clear(self) -> None:
        self._start()

    def __contains__(self, key: object) -> bool:
        segment = self._segment_of.get(key)  # type: ignore[call-overload]
        return segment is not None and segment.resident

    def __len__(self) -> int:
        return self._num_resident

    def __iter__(self) -> Iterator[OffloadKey]:
        segments = dict.fromkeys(segment for segment in self._segment_of.values() if segment.resident)
        return chain.from_iterable([list(segment.keys) for segment in segments])
