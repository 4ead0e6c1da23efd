"""What S3-FIFO and LRU-2 evict, and what they remember, on cases worked out by hand."""

import pytest

from kvtier.policy import LRU2CachePolicy, S3FIFOCachePolicy
from kvtier.testing import ReferenceLRU2, ReferenceS3FIFO, eviction_order, make_keys

K = make_keys(60)


@pytest.fixture(params=[S3FIFOCachePolicy, ReferenceS3FIFO])
def s3fifo(request):
    """Twenty places, two of them small."""
    return request.param(20)


@pytest.fixture(params=[LRU2CachePolicy, ReferenceLRU2])
def lru2(request):
    return request.param(4)


def queues(s3fifo):
    return [list(s3fifo.small), list(s3fifo.main), list(s3fifo.ghosts)]


# -- S3-FIFO


def test_s3fifo_fills_the_main_queue_first_and_never_again(s3fifo):
    s3fifo.insert(K[:20])
    assert queues(s3fifo) == [K[:2], K[2:20], []]
    assert s3fifo.evict(1) == [K[0]]
    s3fifo.insert(K[20:21])
    assert queues(s3fifo) == [[K[1], K[20]], K[2:20], [K[0]]]


def test_s3fifo_new_keys_leave_first(s3fifo):
    s3fifo.insert(K[:20])
    for key in K[20:30]:
        s3fifo.evict(1)
        s3fifo.insert([key])
    assert queues(s3fifo) == [K[28:30], K[2:20], [K[0], K[1], *K[20:28]]]


def test_s3fifo_two_uses_move_a_key_and_one_does_not(s3fifo):
    s3fifo.insert(K[:20])
    s3fifo.touch([K[0], K[0], K[1]])
    assert s3fifo.evict(1) == [K[1]]
    assert queues(s3fifo) == [[], [*K[2:20], K[0]], [K[1]]]


def test_s3fifo_what_returns_soon_enters_the_main_queue(s3fifo):
    s3fifo.insert(K[:20])
    s3fifo.evict(2)
    s3fifo.insert([K[0], K[20]])
    assert queues(s3fifo) == [[K[20]], [*K[2:20], K[0]], [K[1]]]


def test_s3fifo_main_is_a_clock_with_up_to_three_turns(s3fifo):
    s3fifo.insert(K[:20])
    s3fifo.touch([K[2]] * 9 + [K[3]])
    s3fifo.evict(2)
    assert s3fifo.evict(17) == [*K[4:20], K[3]]
    assert s3fifo.evict(1) == [K[2]]


def test_s3fifo_a_full_main_queue_gives_the_victim(s3fifo):
    s3fifo.insert(K[:20])
    s3fifo.evict(2)
    s3fifo.insert(K[:2])
    assert queues(s3fifo) == [[], [*K[2:20], *K[:2]], []]
    s3fifo.evict(1)
    s3fifo.insert(K[20:21])
    assert queues(s3fifo) == [[K[20]], [*K[3:20], *K[:2]], []]
    assert s3fifo.evict(2) == [K[3], K[20]]


def test_s3fifo_ghosts_are_bounded_by_the_main_queue(s3fifo):
    s3fifo.insert(K[:20])
    for key in K[20:60]:
        s3fifo.evict(1)
        s3fifo.insert([key])
    assert list(s3fifo.ghosts) == K[40:58]


def test_s3fifo_lines_up_own_blocks_anew_and_counts_no_use(s3fifo):
    s3fifo.insert(K[:20])
    s3fifo.settle(reversed(K[:20]), set(K[:20]))
    assert queues(s3fifo) == [[K[1], K[0]], K[19:1:-1], []]
    assert s3fifo.evict(3) == [K[1], K[0], K[19]]


def test_s3fifo_protected_keys_keep_place_and_uses(s3fifo):
    s3fifo.insert(K[:20])
    s3fifo.touch([K[0], K[0], K[2]])
    protected = [{K[0], K[2]}, [K[4]]]
    assert s3fifo.evict(3, protected) == [K[1], K[3], K[5]]
    assert queues(s3fifo) == [[K[0]], [K[2], K[4], *K[6:20]], [K[1]]]
    assert s3fifo.evict(1) == [K[4]]


# -- LRU-2


def test_lru2_used_once_goes_before_used_again(lru2):
    lru2.insert(K[:4])
    lru2.touch([K[0], K[1]])
    assert eviction_order(lru2) == [K[2], K[3], K[0], K[1]]


def test_lru2_goes_by_the_last_use_but_one(lru2):
    lru2.insert(K[:3])
    lru2.touch([K[2], K[1], K[0], K[0]])
    assert eviction_order(lru2) == [K[1], K[2], K[0]]
    lru2.touch([K[1]])
    assert eviction_order(lru2) == [K[2], K[1], K[0]]


def test_lru2_remembers_uses_over_an_eviction(lru2):
    lru2.insert(K[:4])
    lru2.evict(1)
    lru2.insert([K[0]])
    assert eviction_order(lru2) == [*K[1:4], K[0]]
    lru2.remove([K[0]])
    lru2.insert([K[0]])
    assert eviction_order(lru2) == [*K[1:4], K[0]]
    lru2.touch(K[1:2])
    assert eviction_order(lru2) == [K[2], K[3], K[0], K[1]]


def test_lru2_history_is_bounded_by_twice_the_capacity(lru2):
    for key in K[:20]:
        if len(lru2) == 4:
            lru2.evict(1)
        lru2.insert([key])
    assert list(lru2) == K[16:20]
    lru2.evict(2)
    lru2.insert([K[8], K[7]])
    # eight were remembered: the ninth is new
    assert eviction_order(lru2) == [K[18], K[19], K[7], K[8]]


def test_lru2_own_blocks_only_move(lru2):
    lru2.insert(K[:4])
    lru2.touch([K[3]])
    lru2.settle([K[2], K[1], K[3], K[0]], {K[0], K[1], K[2], K[3]})
    assert eviction_order(lru2) == [K[2], K[1], K[0], K[3]]


def test_lru2_protected_keys_keep_their_place(lru2):
    lru2.insert(K[:4])
    lru2.touch(K[:3])
    assert lru2.evict(2, [{K[0]}]) == [K[3], K[1]]
    assert eviction_order(lru2) == [K[0], K[2]]


def test_lru2_order_survives_many_uses(lru2):
    lru2.insert(K[:4])
    for _ in range(500):
        lru2.touch(K[:4])
    lru2.touch([K[1]])
    assert eviction_order(lru2) == [K[0], K[2], K[3], K[1]]
