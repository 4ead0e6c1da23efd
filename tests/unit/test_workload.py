"""Made-up traffic: the same for the same seed, readable, and with prefixes that are shared as they should be."""

import math

import pytest

from kvtier.errors import ConfigurationError
from kvtier.sim.hits import best_possible_hits
from kvtier.sim.trace_files import write_trace
from kvtier.sim.traces import read_trace
from kvtier.sim.workload import KINDS, Segment, _BlockIds, generate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_the_same_bytes_for_the_same_seed(tmp_path, kind, suffix):
    one, two, other = (tmp_path / f"{name}.jsonl{suffix}" for name in ("one", "two", "other"))
    write_trace(generate(kind, 100, seed=1).requests, one)
    write_trace(generate(kind, 100, seed=1).requests, two)
    write_trace(generate(kind, 100, seed=2).requests, other)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    assert list(read_trace(one).requests) == list(generate(kind, 100, seed=1).requests)


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_has_one_parent(kind):
    trace = generate(kind, 400)
    assert len(trace.requests) == 400
    parent_of = {}
    for request in trace.requests:
        for above, block in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert parent_of.setdefault(block, above) == above
    times = [request.timestamp_ms for request in trace.requests]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_something_to_share_and_something_new(kind):
    trace = generate(kind, 500)
    share = best_possible_hits([request.hash_ids for request in trace.requests]).sum() / trace.num_blocks
    assert 0.3 < share < 0.98


def test_a_longer_trace_begins_as_the_shorter_one():
    short, long = generate("mixed", 50), generate("mixed", 200)
    assert [request.timestamp_ms for request in long.requests[:50]] == [
        request.timestamp_ms for request in short.requests
    ]
    assert [request.input_length for request in long.requests[:50]] == [
        request.input_length for request in short.requests
    ]


def test_the_rate_is_about_what_was_asked_for():
    trace = generate("system", 2000, requests_per_s=5)
    assert math.isclose(len(trace.requests) / trace.duration_s, 5, rel_tol=0.1)


def test_blocks_are_cut_from_the_joined_segments():
    ids = _BlockIds(10)
    first = ids.ids_of([Segment("a", 8), Segment("b", 7)])
    assert len(first) == 2
    assert ids.ids_of([Segment("a", 8), Segment("b", 7)]) == first
    assert ids.ids_of([Segment("a", 8), Segment("b", 7), Segment("c", 5)])[0] == first[0]
    assert ids.ids_of([Segment("a", 8), Segment("b", 7), Segment("c", 5)])[1] != first[1]
    assert ids.ids_of([Segment("a", 8), Segment("c", 7)])[0] != first[0]
    assert len(ids.ids_of([Segment("d", 30)])) == 3
    behind_a, behind_c = (
        ids.ids_of([Segment("a", 10), Segment("b", 10)]),
        ids.ids_of([Segment("c", 10), Segment("b", 10)]),
    )
    assert behind_a[1] != behind_c[1]  # the same tokens behind others are another block


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "poem"}, "'poem' is unknown; allowed: chat"),
        ({"num_requests": 0}, "0 requests"),
        ({"requests_per_s": 0}, "at 0 a second"),
        ({"requests_per_s": math.nan}, "at nan a second"),
    ],
)
def test_bad_settings_are_named(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        generate(**{"kind": "chat", "num_requests": 10, **arguments})
