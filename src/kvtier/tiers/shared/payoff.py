"""`CompressionSwitch`: whether blocks are worth compressing on their way over a link. No I/O, no clock, no threads.

The simulator uses the same object.
"""

from __future__ import annotations

import math

MIN_SAMPLES = 8
"""Transfers of a direction before its speed is believed."""
MIN_SAMPLE_BYTES = 64 << 10
"""Transfers of less say more of the latency than of the link."""
MIN_PROBES = 4
"""Blocks that were compressed before ratio and speed are believed."""
ON_GAIN = 1.25
OFF_GAIN = 1.0
"""The time saved on the wire over the time that compression takes: on from the one, off below the other."""
DWELL_S = 10.0
"""From one change to the next at least."""
PROBE_S = 10.0
PROBE_BLOCKS = 100
"""While it is off, a block is compressed after so long and so many, to see how well that goes."""
MAX_WAITED = 15 / 16
"""Of the time of a transfer, what may have been the round trip."""
SMOOTHING = 1 / 32
"""Weight of the newest sample."""
MAX_OUTLIER = 8.0
"""A sample that is slower than this many times the estimate counts as this many times: something else went wrong."""


class Speed:
    """Bytes and seconds, smoothed each: so a sample weighs by its size."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self.num_samples = 0

    def add(self, num_bytes: float, seconds: float) -> None:
        """One sample, both above 0."""
        if self.num_samples >= MIN_SAMPLES:
            seconds = min(seconds, MAX_OUTLIER * num_bytes * self.s_per_byte)
        weight = max(SMOOTHING, 1 / (self.num_samples + 1))
        self._bytes += weight * (num_bytes - self._bytes)
        self._seconds += weight * (seconds - self._seconds)
        self.num_samples += 1

    @property
    def s_per_byte(self) -> float:
        """0 before the first sample."""
        return self._seconds / self._bytes if self._bytes else 0.0


class CompressionSwitch:
    """Off at first. A block is written once and, if it is of any use, read at least once: so what counts is the time
    that compression saves on the wire in both directions, beside what compressing and decompressing take.

    Speeds are of one connection, as its thread sees them while others share the link and the cores.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.num_changes = 0
        self._links = {True: Speed(), False: Speed()}
        """By whether stores go over it."""
        self._encoding = Speed()
        self._decoding = Speed()
        self._shrinking = Speed()
        """Payload bytes, in place of seconds, by block bytes."""
        self._round_trip_s = math.inf
        self._changed_s = -math.inf
        self._probed_s = -math.inf
        self._num_unprobed = 0

    # -- measurements ----------------------------------------------------------------------------------------

    def note_transfer(self, is_store: bool, num_bytes: int, seconds: float, now_s: float) -> bool:
        """`num_bytes` went over the link in `seconds`, one round trip included, without the time that compression took.
        True if that changed `is_on`. O(1)."""
        if num_bytes < MIN_SAMPLE_BYTES or seconds <= 0:
            return False
        waited_s = min(self._round_trip_s, MAX_WAITED * seconds) if self._round_trip_s < math.inf else 0.0
        self._links[is_store].add(num_bytes, seconds - waited_s)
        return self._decide(now_s)

    def note_round_trip(self, seconds: float) -> None:
        """The store answered something small. The shortest counts, which is forgotten little by little. O(1)."""
        longer_s = seconds - self._round_trip_s
        self._round_trip_s = seconds if not longer_s > 0 else self._round_trip_s + SMOOTHING / 8 * longer_s

    def note_encoded(self, block_bytes: int, payload_bytes: int, seconds: float) -> None:
        """A block became a payload, of its own size where it would not shrink. O(1)."""
        if seconds > 0:
            self._encoding.add(block_bytes, seconds)
            self._shrinking.add(block_bytes, payload_bytes)

    def note_decoded(self, block_bytes: int, seconds: float) -> None:
        """A payload became a block. O(1)."""
        if seconds > 0:
            self._decoding.add(block_bytes, seconds)

    # -- what follows from them ------------------------------------------------------------------------------

    def wants(self, now_s: float) -> bool:
        """Whether the next block is to be compressed: because that pays, or to see whether it would. O(1)."""
        if self.is_on:
            return True
        self._num_unprobed += 1
        is_early = now_s < self._probed_s + PROBE_S or self._num_unprobed < PROBE_BLOCKS
        if is_early and self._encoding.num_samples >= MIN_PROBES:
            return False
        self._probed_s = now_s
        self._num_unprobed = 0
        return True

    @property
    def gain(self) -> float | None:
        """The time saved on the wire over the time that compression takes; None while too little is known."""
        known = [link for link in self._links.values() if link.num_samples >= MIN_SAMPLES]
        if not known or self._encoding.num_samples < MIN_PROBES:
            return None
        # one direction may be idle: the other is what is known of the link
        wire_s = sum(link.s_per_byte for link in known) * 2 / len(known)
        encode_s = self._encoding.s_per_byte
        # until a block was decompressed: decompressing is not slower than compressing
        decode_s = self._decoding.s_per_byte or encode_s
        return max(0.0, 1 - self._shrinking.s_per_byte) * wire_s / (encode_s + decode_s)

    def describe(self) -> str:
        """What is known, for people."""
        store, load = (
            f"{1e-9 / link.s_per_byte:.3g} GB/s" if link.num_samples else "unknown"
            for link in (self._links[True], self._links[False])
        )
        encode, decode = (
            f"{1e-9 / speed.s_per_byte:.2g} GB/s" if speed.num_samples else "unknown"
            for speed in (self._encoding, self._decoding)
        )
        ratio = 1 / self._shrinking.s_per_byte if self._shrinking.num_samples else 1.0
        return (
            f"a connection moves {store} out and {load} in; compression {ratio:.2f} times, {encode} out and {decode} in"
        )

    def _decide(self, now_s: float) -> bool:
        gain = self.gain
        if gain is None or now_s < self._changed_s + DWELL_S:
            return False
        if gain >= OFF_GAIN if self.is_on else gain < ON_GAIN:
            return False
        self.is_on = not self.is_on
        self.num_changes += 1
        self._changed_s = now_s
        return True
