"""The resident segments of a policy: which continues which, and which are ends."""

from __future__ import annotations

from kvtier.keys import OffloadKey
from kvtier.policy.segments import AgeQueue, Segment


class SegmentTree:
    """Part of a policy. Between calls the segments that nothing continues, and no others, are in the queue of their
    kind, and no segment is among those that it continues."""

    def _plant(self, num_kinds: int) -> None:
        """Nothing is resident."""
        self._segment_of: dict[OffloadKey, Segment] = {}
        """Of resident keys."""
        self._segments: dict[Segment, None] = {}
        """All of these."""
        self._ends = [AgeQueue() for _ in range(num_kinds)]
        """By kind, the segments that no other continues."""

    def _queue_ends(self, path: list[Segment]) -> None:
        """Those of `path` that nothing continues are ends, the others are not."""
        for segment in path:
            if segment.children:
                if segment.period >= 0:
                    self._ends[segment.kind].discard(segment)
            elif segment.period < 0:
                self._ends[segment.kind].add(segment)

    def _part_of(self, segment: Segment, keys: list[OffloadKey], position: int) -> tuple[Segment, int]:
        """The segment of those keys from `position` on that are in this one, and how many they are."""
        end = position + 1
        while end < len(keys) and self._segment_of.get(keys[end]) is segment:
            end += 1
        part = keys[position:end]
        if len(part) < len(segment.keys):
            segment = self._split(segment, part)
        return segment, len(part)

    def _split(self, segment: Segment, part: list[OffloadKey]) -> Segment:
        """Parts `part` from a segment, and becomes what it continues. The new segment, in no queue."""
        taken = set(part)
        segment.keys = [key for key in segment.keys if key not in taken]
        new = Segment(part, segment.kind, segment.uses, segment.last_use)
        self._segments[new] = None
        self._segment_of.update(dict.fromkeys(part, new))
        if segment.parent is not None:
            self._attach(new, segment.parent)
        self._attach(segment, new)
        return new

    def _join(self, segment: Segment, child: Segment, deeper: list[Segment]) -> Segment:
        """Makes one of a segment and its only child, which have the same history from now on; `deeper` lead to them."""
        for either in (segment, child):
            if either.period >= 0:
                self._ends[either.kind].discard(either)
        keys = child.keys + segment.keys
        if child.children > (1 if deeper and deeper[-1].parent is child else 0):
            # others have it as parent
            self._segment_of.update(dict.fromkeys(segment.keys, child))
            del self._segments[segment]
            child.parent = segment.parent
            segment.parent = None
            segment = child
        else:
            self._segment_of.update(dict.fromkeys(child.keys, segment))
            del self._segments[child]
            child.parent = None
            segment.children = child.children
            segment.ghost = child.ghost
            if child.children:
                deeper[-1].parent = segment
        segment.keys = keys
        return segment

    def _attach(self, segment: Segment, parent: Segment) -> None:
        """Has a segment, which continues another or none, continue `parent`."""
        if segment.parent is not None:
            self._detach(segment)
        if segment.children:  # who is used in one order and then in another must not continue itself
            ancestor = parent.parent
            while ancestor is not None and ancestor is not segment:
                ancestor = ancestor.parent
            if ancestor is segment:
                self._detach(parent)
        segment.parent = parent
        parent.children += 1

    def _detach(self, segment: Segment) -> None:
        """The parent of this segment, if it has one, may be an end from now on."""
        parent, segment.parent = segment.parent, None
        if parent is not None:
            parent.children -= 1
            if not parent.children and parent.period < 0 and parent in self._segments:
                self._ends[parent.kind].add(parent)
