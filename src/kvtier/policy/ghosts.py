"""Evicted segments, by key only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvtier.keys import OffloadKey
from kvtier.policy.segments import Segment


class Ghosts:
    """Evicted segments by their shallowest key, the first to be forgotten first. O(1), or O(keys of the segment)."""

    def __init__(self) -> None:
        self._by_head: OrderedDict[OffloadKey, Segment] = OrderedDict()
        self.num_keys = 0

    def get(self, head: OffloadKey) -> Segment | None:
        """The ghost that begins with this key."""
        return self._by_head.get(head)

    def add(self, segment: Segment) -> None:
        """What is no longer resident becomes a ghost, and one with its deeper part if that has the same history."""
        deeper, segment.ghost = segment.ghost, None
        self.num_keys += len(segment.keys)
        # it may have returned meanwhile, and have been removed
        if deeper is not None and deeper.keys and deeper.last_use == segment.last_use and deeper.kind == segment.kind:
            head = deeper.keys[-1]
            if self._by_head.get(head) is deeper:
                del self._by_head[head]
                segment.keys = deeper.keys + segment.keys
        self._file(segment)

    def take(self, ghost: Segment, size: int) -> None:
        """The `size` shallowest keys of a ghost are no ghosts any more; what is left is forgotten last."""
        del self._by_head[ghost.keys[-1]]
        self.num_keys -= size
        if size < len(ghost.keys):
            del ghost.keys[-size:]
            self._file(ghost)

    def pop_first(self) -> Segment:
        """Forgets one. There is one."""
        _, ghost = self._by_head.popitem(last=False)
        self.num_keys -= len(ghost.keys)
        return ghost

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_head.values())

    def __len__(self) -> int:
        return len(self._by_head)

    def _file(self, segment: Segment) -> None:
        head = segment.keys[-1]
        former = self._by_head.pop(head, None)
        if former is not None:
            self.num_keys -= len(former.keys)
        self._by_head[head] = segment
