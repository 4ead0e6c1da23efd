"""The weight epochs of a shared tier: equal on every machine whose weights are those of the files, kept nowhere."""

from __future__ import annotations


class SharedEpochs:
    """An `EpochStore` without a medium.

    A process begins with weights that it has read from files, and the namespace is a digest of these files: whoever has
    the same namespace has the same weights, so all begin with one epoch, which an operator may set to expire everything
    at once. After a reset the weights may be others, which no file and no other process has. What a `SharedTier` stores
    from then on goes under a random salt besides the epoch, so nobody else finds it: not another process that has been
    reset as often, and not this machine's next one, which reads the files again and begins anew. So there is nothing
    that would have to be durable.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch

    def current(self) -> int:
        """See `EpochStore`. Never raises."""
        return self._epoch

    def advance(self) -> int:
        """See `EpochStore`. Never raises."""
        self._epoch += 1
        return self._epoch
