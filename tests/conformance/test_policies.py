"""The shipped suite, over the policies that kvtier has."""

from __future__ import annotations

from kvtier.interfaces import CachePolicy
from kvtier.policy import POLICIES, make_policy
from kvtier.testing import PolicyConformance


class TestAdaptive(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        return make_policy("adaptive", capacity)


class TestARC(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        return make_policy("arc", capacity)


class TestLRU(PolicyConformance):
    bytes_per_block = 512

    def make_policy(self, capacity: int) -> CachePolicy:
        return make_policy("lru", capacity)


class TestLRU2(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        return make_policy("lru2", capacity)


class TestS3FIFO(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        return make_policy("s3fifo", capacity)


def test_every_policy_is_held_to_it():
    suites = [value for value in globals().values() if isinstance(value, type) and value.__name__.startswith("Test")]
    assert {suite().make_policy(3).name for suite in suites} == set(POLICIES)
