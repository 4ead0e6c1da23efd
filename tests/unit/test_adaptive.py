"""The adaptive policy: its own bookkeeping, and what it is there for."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import CPUOffloadingManager, ReqContext
from kvtier.policy import POLICIES
from kvtier.policy.adaptive import AdaptiveCachePolicy
from kvtier.testing import make_keys

GHOSTS_PER_BLOCK = 8
KEYS = make_keys(24)

prompts = st.builds(lambda start, size: KEYS[start : start + size], st.sampled_from((0, 6, 12)), st.integers(0, 12))
any_keys = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)
key_lists = st.one_of(prompts, any_keys)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), key_lists, any_keys),
        st.tuples(st.just("prompt"), key_lists, st.integers(1, 12)),
        st.tuples(st.just("evict"), st.integers(0, 10), any_keys),
        st.tuples(st.just("touch"), key_lists, any_keys),
        st.tuples(st.just("settle"), key_lists, any_keys),
        st.tuples(st.just("remove"), key_lists, st.none()),
        st.tuples(st.just("decline"), key_lists, st.none()),
    ),
    max_size=40,
)


def recount(policy):
    """Every count and link of the policy, found again from its segments."""
    segments = list(policy._segments)
    assert Counter(key for segment in segments for key in segment.keys) == Counter(policy._segment_of.keys())
    assert all(policy._segment_of[key] is segment for segment in segments for key in segment.keys)
    children = Counter(segment.parent for segment in segments)
    assert all(segment.children == children[segment] for segment in segments)
    for segment in segments:
        chain = [segment]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
            assert len(chain) <= len(segments) + 1, "a segment continues itself"
    queued = {
        segment: kind for kind, queue in enumerate(policy._ends) for held in queue._periods.values() for segment in held
    }
    assert queued.keys() == {segment for segment in segments if not segment.children}
    assert all(segment.kind == kind for segment, kind in queued.items())
    assert all((segment.period >= 0) == (segment in queued) for segment in segments)
    ghosts = policy._ghosts._by_head
    assert all(ghost.keys[-1] == head for head, ghost in ghosts.items())
    assert policy._ghosts.num_keys == sum(len(ghost.keys) for ghost in ghosts.values())
    assert policy._ghosts.num_keys <= GHOSTS_PER_BLOCK * policy.cache_capacity
    assert all(segment.keys for segment in [*segments, *ghosts.values()])


def evict(policy, resident, count, protected, newcomers=None):
    """Evicts, and holds what it does against what it may do. What left; None: nothing could."""
    before = list(policy)
    possible = len(resident - set(protected)) >= count
    protected_from = [protected]
    victims = (
        policy.evict(count, protected_from) if newcomers is None else policy.evict_for(newcomers, count, protected_from)
    )
    assert (victims is not None) == possible
    if victims is None:
        assert list(policy) == before
        return None
    assert len(victims) <= count if newcomers is not None else len(victims) == count
    assert len(set(victims)) == len(victims)
    assert set(victims) <= resident - set(protected)
    resident -= set(victims)
    return victims


def store(policy, resident, offered, protected):
    new = [key for key in offered if key not in resident][: policy.cache_capacity]
    needed = max(0, len(resident) + len(new) - policy.cache_capacity)
    victims = evict(policy, resident, needed, protected, new)
    if victims is None:
        return
    fitting = len(new) - needed + len(victims)
    policy.decline(new[fitting:])
    policy.insert(new[:fitting])
    resident |= set(new[:fitting])


@given(st.integers(1, 12), operations)
@settings(deadline=None, max_examples=200)
def test_keeps_its_books_in_any_order_of_calls(capacity, calls):
    policy = AdaptiveCachePolicy(capacity)
    resident = set()
    for name, what, more in calls:
        if name == "store":
            store(policy, resident, what, more)
        elif name == "prompt":  # as a manager does it, in chunks
            known = [key for key in what if key in resident]
            for begin in range(0, len(what), more):
                store(policy, resident, what[begin : begin + more], known)
            policy.settle(reversed(what), set(what) - set(known))
        elif name == "evict":
            evict(policy, resident, what, more)
        elif name == "remove":
            policy.remove([key for key in what if key in resident])
            resident -= set(what)
        elif name == "decline":
            policy.decline([key for key in what if key not in resident])
        else:
            getattr(policy, name)(iter(what), set(more))
        assert set(policy) == resident
        assert len(policy) == len(resident)
        recount(policy)


@pytest.mark.timeout(10)
def test_storing_nothing_leaves_nothing_to_evict():
    policy = AdaptiveCachePolicy(1)
    policy.insert([])
    policy.decline([])
    assert policy.evict(1) is None
    policy.insert(KEYS[:1])
    policy.insert([])
    assert policy.evict(1) == KEYS[:1]


def test_evicts_around_protected_ends():
    """The shallow blocks of prompts whose ends are protected, before it gives up."""
    policy = AdaptiveCachePolicy(12)
    for begin in (0, 6):
        policy.insert(KEYS[begin : begin + 6])
        policy.settle(reversed(KEYS[begin : begin + 6]), set(KEYS))
    protected = {KEYS[5], KEYS[4], KEYS[11]}
    victims = policy.evict(9, [protected])
    assert sorted(victims) == sorted(set(KEYS[:12]) - protected)
    assert set(policy) == protected
    recount(policy)


def hit_ratio(policy, capacity, requests, chunk=1000):
    manager = CPUOffloadingManager(capacity, policy)
    hits = 0
    for number, keys in enumerate(requests):
        request = ReqContext(str(number))
        manager.on_new_request(request)
        ready = manager.lookup_prefix(keys, request).num_ready
        manager.prepare_load(keys[:ready], request)
        manager.complete_load(keys[:ready], request)
        for begin in range(ready, len(keys), chunk):
            output = manager.prepare_store(keys[begin : begin + chunk], request)
            if output is not None:
                manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
        hits += ready
    return hits / sum(map(len, requests))


def test_a_loop_longer_than_the_cache_does_not_empty_it():
    prompts = [KEYS_OF_LOOP[begin : begin + 4] for begin in range(0, len(KEYS_OF_LOOP), 4)]
    requests = prompts * 12
    assert hit_ratio("lru", 200, requests) == 0
    assert hit_ratio("adaptive", 200, requests) > 0.3


KEYS_OF_LOOP = make_keys(400)


@pytest.mark.parametrize("chunk", [1000, 2])
def test_a_scan_does_not_displace_what_is_used_again(chunk):
    hot = [KEYS_OF_LOOP[i * 4 : i * 4 + 4] for i in range(20)]
    cold = make_keys(8000)[400:]
    requests = []
    for i in range(900):
        requests.append(hot[i * 7 % 20])
        requests.append(cold[i * 8 : i * 8 + 8])
    best = 900 * 4 / sum(map(len, requests))
    assert hit_ratio("lru", 120, requests, chunk) < 0.1 * best
    assert hit_ratio("adaptive", 120, requests, chunk) > 0.8 * best


def test_is_offered_by_name():
    assert POLICIES["adaptive"] is AdaptiveCachePolicy
