"""`Compressor`: which blocks of a shared tier are compressed, and what came of it. Used by all of its threads."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared import codec
from kvtier.tiers.shared.payoff import CompressionSwitch
from kvtier.tiers.shared.store import BlockTransfer, Store

logger = logging.getLogger(__name__)

MODES = ("off", "auto", "on")


def check_compression(mode: str, store: Store) -> None:
    """Raises ConfigurationError where `store` moves blocks only as they are, or the library is missing."""
    if mode != "off" and not store.supports_compression:
        raise ConfigurationError(f"compression is {mode!r}; allowed: off, for {store.place} takes blocks as they are")
    if mode != "off" and not codec.is_available():
        raise ConfigurationError(
            f"compression is {mode!r} and needs zstandard; install it with: pip install 'kvtier[compression]'"
        )


class Compressor:
    """Says how blocks go out, in any of `MODES`; what comes in is read in any case. Raises ConfigurationError as
    `check_compression` does."""

    def __init__(self, mode: str, element_bytes: int, store: Store) -> None:
        check_compression(mode, store)
        self._mode = mode
        self._element_bytes = element_bytes
        self._place = store.place
        self._lock = threading.Lock()
        self._switch = CompressionSwitch()
        self._counters = Counter({"compressed_blocks": 0, "decompressed_blocks": 0, "compression_saved_bytes": 0})

    @property
    def counters(self) -> dict[str, int]:
        """What was done so far, and whether blocks are compressed now."""
        is_on = self._mode == "on" or self._switch.is_on
        changes = {"compression_on": int(is_on), "compression_changes": self._switch.num_changes}
        with self._lock:
            return {**self._counters, **changes}

    def before_stores(self, blocks: Sequence[BlockTransfer], now_s: float) -> None:
        """Says in each block how it goes out."""
        if self._mode == "off":
            return
        with self._lock:
            for block in blocks:
                wanted = self._mode == "on" or self._switch.wants(now_s)
                block.encode_element_bytes = self._element_bytes if wanted else 0

    def after_moves(self, blocks: Sequence[BlockTransfer], begun_s: float, ended_s: float) -> None:
        """These blocks were moved, one after the other, stores or loads."""
        is_store = blocks[0].job.is_store
        moved = [block for block in blocks if block.success and block.payload_bytes]
        wire_bytes = sum(block.payload_bytes for block in moved)
        codec_s = sum(block.codec_s for block in blocks)
        with self._lock:
            for block in moved:
                self._note(block, is_store)
            if self._mode == "auto" and self._switch.note_transfer(
                is_store, wire_bytes, ended_s - begun_s - codec_s, ended_s
            ):
                logger.info(
                    "kvtier: blocks for %s are %s from now on: %s",
                    self._place,
                    "compressed" if self._switch.is_on else "not compressed any more",
                    self._switch.describe(),
                )

    def note_round_trip(self, seconds: float) -> None:
        """The store has answered a question."""
        if self._mode == "auto":
            with self._lock:
                self._switch.note_round_trip(seconds)

    def _note(self, block: BlockTransfer, is_store: bool) -> None:
        block_bytes = block.buffer.nbytes
        if block.payload_bytes < block_bytes:
            self._counters["compressed_blocks" if is_store else "decompressed_blocks"] += 1
            self._counters["compression_saved_bytes"] += block_bytes - block.payload_bytes
        if block.codec_s and is_store:
            self._switch.note_encoded(block_bytes, block.payload_bytes, block.codec_s)
        elif block.codec_s:
            self._switch.note_decoded(block_bytes, block.codec_s)
