"""When compression pays, decided from measurements that the test makes up."""

from __future__ import annotations

import random

import pytest

from kvtier.tiers.shared import payoff
from kvtier.tiers.shared.payoff import CompressionSwitch

BLOCK = 1 << 20
RATIO = 1.45
ENCODE, DECODE = 1.6e9, 2.0e9
"""Bytes of blocks per second."""
BREAK_EVEN = 2 * (1 - 1 / RATIO) / (1 / ENCODE + 1 / DECODE)
"""Bytes per second of a link, the same in both directions, on which it makes no difference."""


class Link:
    """A link, its ends, and what they tell the switch: a store and a load of one block at a time."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0, jitter: float = 0.0) -> None:
        self.switch = CompressionSwitch()
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.ratio = RATIO
        self.now_s = 0.0
        self.num_compressed = 0
        self._jitter = jitter
        self._chance = random.Random(3)

    def move(self, num_blocks: int, is_loaded: bool = True) -> None:
        for _ in range(num_blocks):
            is_compressed = self.switch.wants(self.now_s)
            payload = BLOCK / self.ratio if is_compressed else BLOCK
            if is_compressed:
                self.num_compressed += 1
                self.switch.note_encoded(BLOCK, int(payload), self._takes(BLOCK / ENCODE))
            self._transfer(True, payload)
            if is_loaded:
                self._transfer(False, payload)
                if is_compressed:
                    self.switch.note_decoded(BLOCK, self._takes(BLOCK / DECODE))

    def _transfer(self, is_store: bool, num_bytes: float) -> None:
        self.switch.note_round_trip(self._takes(self.latency_s) + 1e-6)
        seconds = self._takes(self.latency_s + num_bytes / self.bytes_per_s)
        self.now_s += seconds
        self.switch.note_transfer(is_store, int(num_bytes), seconds, self.now_s)

    def _takes(self, seconds: float) -> float:
        return seconds * self._chance.uniform(1 - self._jitter, 1 + self._jitter)


@pytest.mark.parametrize("latency_s", [0.0, 100e-6, 0.02])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_on_where_the_link_is_slower_than_break_even(share: float, latency_s: float) -> None:
    link = Link(share * BREAK_EVEN, latency_s)
    link.move(40)
    assert link.switch.is_on
    assert link.switch.num_changes == 1
    assert link.switch.wants(link.now_s)


@pytest.mark.parametrize("latency_s", [0.0, 100e-6])
@pytest.mark.parametrize("share", [1.3, 3.0, 50.0])
def test_off_where_it_is_faster(share: float, latency_s: float) -> None:
    link = Link(share * BREAK_EVEN, latency_s)
    link.move(400)
    assert not link.switch.is_on
    assert link.switch.num_changes == 0


def test_latency_is_not_taken_for_a_slow_link() -> None:
    """20 ms a round trip: a block takes as long as over a link of a twentieth of the speed."""
    link = Link(4 * BREAK_EVEN, latency_s=0.02)
    link.move(100)
    assert not link.switch.is_on


def test_nothing_is_decided_from_a_few_transfers() -> None:
    link = Link(0.1 * BREAK_EVEN)
    link.move(payoff.MIN_SAMPLES - 1)
    assert link.switch.gain is None
    assert not link.switch.is_on
    link.move(1)
    assert link.switch.is_on


def test_small_transfers_say_nothing_of_a_link() -> None:
    switch = CompressionSwitch()
    for _ in range(100):
        switch.note_encoded(BLOCK, BLOCK // 2, 1e-3)
        switch.note_transfer(True, payoff.MIN_SAMPLE_BYTES - 1, 1.0, 0.0)
    assert switch.gain is None


@pytest.mark.parametrize("gain", [payoff.OFF_GAIN, 1.12, payoff.ON_GAIN])
def test_it_does_not_flap_about_break_even(gain: float) -> None:
    """Minutes of noise about the point where it makes no difference, and about the others that matter."""
    link = Link(BREAK_EVEN / gain, jitter=0.3)
    for _ in range(200):
        link.move(30)
        link.now_s += 1.0
    assert link.switch.num_changes <= 2


def test_one_transfer_that_stalls_changes_nothing() -> None:
    link = Link(2 * BREAK_EVEN)
    link.move(100)
    for _ in range(10):
        link.now_s += 20.0
        link.switch.note_transfer(False, BLOCK, 5.0, link.now_s)
        link.move(100)
    assert link.switch.num_changes == 0


def test_a_link_that_changes_is_followed_both_ways_and_not_too_often() -> None:
    link = Link(10 * BREAK_EVEN)
    link.move(200)
    assert not link.switch.is_on
    link.bytes_per_s = 0.1 * BREAK_EVEN
    link.move(100)
    assert link.switch.is_on
    link.bytes_per_s = 10 * BREAK_EVEN
    on_s = link.now_s
    while link.switch.is_on:
        link.move(10)
        link.now_s += 0.1
        assert link.now_s < on_s + 60
    link.bytes_per_s = 0.1 * BREAK_EVEN
    off_s = link.now_s
    while not link.switch.is_on:
        link.move(10)
        link.now_s += 0.1
        assert link.now_s < off_s + 60
    assert link.now_s >= off_s + payoff.DWELL_S
    assert link.switch.num_changes == 3


def test_blocks_that_do_not_shrink_are_left_alone() -> None:
    link = Link(0.01 * BREAK_EVEN)
    link.ratio = 1.0
    link.move(500)
    assert not link.switch.is_on
    # and are looked at again now and then: they may be others by now
    assert link.num_compressed <= payoff.MIN_PROBES + link.now_s / payoff.PROBE_S + 1
    link.ratio = RATIO
    while not link.switch.is_on:
        link.now_s += payoff.PROBE_S
        link.move(1)
        assert link.now_s < 10_000


def test_probes_are_few_while_it_is_off() -> None:
    link = Link(100 * BREAK_EVEN)
    link.move(1000)
    link.now_s += 35.0
    link.move(1000)
    assert payoff.MIN_PROBES <= link.num_compressed <= payoff.MIN_PROBES + 4


def test_one_direction_alone_is_enough() -> None:
    link = Link(0.1 * BREAK_EVEN)
    link.move(20, is_loaded=False)
    assert link.switch.is_on


def test_a_slow_way_in_counts_though_the_way_out_is_fast() -> None:
    switch = CompressionSwitch()
    for _ in range(20):
        switch.note_encoded(BLOCK, int(BLOCK / RATIO), BLOCK / ENCODE)
        switch.note_transfer(True, BLOCK, BLOCK / 100e9, 0.0)
        switch.note_transfer(False, BLOCK, BLOCK / (0.2 * BREAK_EVEN), 0.0)
    assert switch.is_on
