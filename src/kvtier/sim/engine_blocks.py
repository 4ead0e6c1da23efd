"""The simulated engine's own blocks: reference counts and a prefix cache, as vLLM's block pool has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtier.errors import InvariantError
from kvtier.keys import OffloadKey


class EngineBlocks:
    """Blocks 0..num_blocks-1. One that nobody holds keeps its contents until it is taken: least recently held first."""

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks
        self._idle = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[OffloadKey, int] = {}
        self._key_of: dict[int, OffloadKey] = {}

    @property
    def num_idle(self) -> int:
        """Blocks that can be taken."""
        return len(self._idle)

    def prefix(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The blocks of the longest leading run of `keys` that is here. Holds nothing."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        """`count` blocks, held once each. The caller has seen that they are idle; their contents are gone."""
        taken = []
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each; deeper blocks are taken first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] < 0:
                raise InvariantError(f"engine block {block} was released more often than held")
            if not self._holders[block]:
                self._idle[block] = None

    def fill(self, block: int, key: OffloadKey) -> None:
        """The block, which somebody holds, now has this key's contents. Where two have, the older one is found."""
        if key not in self._block_of:
            self._forget(block)
            self._block_of[key] = block
            self._key_of[block] = key

    def forget_all(self) -> None:
        """Nothing is found any more; who holds what stays."""
        self._block_of.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
