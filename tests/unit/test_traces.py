"""Traces: what is read, in which formats, and what is refused with which words."""

import gzip
import json
import lzma
import sys

import pytest

from kvtier.errors import ConfigurationError
from kvtier.sim.traces import TraceRequest, read_trace

MOONCAKE = {"timestamp": 0, "input_length": 1000, "output_length": 100, "hash_ids": [0, 1]}
BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "type": "text", "turn": 1, "hash_ids": [7, 8]}


def line(base=MOONCAKE, **changes):
    fields = {**base, **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not ...})


def read(tmp_path, *lines, **options):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return read_trace(path, **options)


def test_reads_in_order_of_arrival(tmp_path):
    trace = read(tmp_path, line(timestamp=5.5), "", line(timestamp=3, hash_ids=[7, 8]))
    first, second = trace.requests
    assert first == TraceRequest(timestamp_ms=3, input_length=1000, output_length=100, hash_ids=(7, 8))
    assert second.timestamp_ms == 5.5
    assert (trace.block_tokens, trace.num_blocks, trace.num_unique_blocks, trace.num_tokens) == (512, 4, 4, 2000)
    assert trace.duration_s == 0.0025


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_reads_compressed(tmp_path, suffix, opener):
    path = tmp_path / f"trace.jsonl{suffix}"
    with opener(path, "wt") as out:
        out.write(line())
    assert len(read_trace(path).requests) == 1


def test_reads_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="the optional package zstandard is not installed")
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(zstandard.compress(line().encode()))
    assert len(read_trace(path).requests) == 1
    path.write_bytes(b"plain")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(path)


def test_names_the_package_that_zstandard_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"needs the package zstandard: pip install 'kvtier"):
        read_trace(tmp_path / "trace.jsonl.zst")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "expected object, got array"),
        (line(timestamp=...), "timestamp is missing"),
        (line(input_length=...), "input_length is missing"),
        (line(output_length=...), "output_length is missing"),
        (line(hash_ids=...), "hash_ids is missing"),
        (line(timestamp="0"), "timestamp: expected float, got str"),
        (line(timestamp=-1), "timestamp: expected float >= 0.0"),
        ('{"timestamp": NaN}', "not JSON"),
        ('{"timestamp": 1e999}', "timestamp: number out of range"),
        (line(timestamp=True), "timestamp: expected float, got bool"),
        (line(input_length=0, hash_ids=[1]), "input_length: expected int >= 1"),
        (line(input_length=1.5), "input_length: expected int, got float"),
        (line(output_length=None), "output_length: expected int, got null"),
        (line(hash_ids=[]), "hash_ids: expected array of length >= 1"),
        (line(hash_ids=[1, "b"]), "hash_ids[1]: expected int, got str"),
        (line(hash_ids=list(range(40))), "40 hash_ids for input_length 1000, expected 2"),
    ],
)
def test_a_malformed_line_is_named_or_counted(tmp_path, bad, said):
    lines = (line(), "", bad, line())
    with pytest.raises(ConfigurationError, match=r"trace\.jsonl, line 3: ") as caught:
        read(tmp_path, *lines)
    assert said in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 150
    trace = read(tmp_path, *lines, skip_bad=True)
    assert (len(trace.requests), trace.num_skipped) == (2, 1)
    assert trace.first_skipped == str(caught.value).partition(", ")[2]


@pytest.mark.parametrize("first", ["[1]", "{", '"text"', "\xff"])
def test_a_bad_first_line_does_not_hide_the_format(tmp_path, first):
    with pytest.raises(ConfigurationError, match="line 1: "):
        read(tmp_path, first, line(BAILIAN))
    assert read(tmp_path, first, line(BAILIAN), skip_bad=True).block_tokens == 16


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", b"\n\n", "holds no request"),
        ("bytes.jsonl", b"\xff\xfe\x00", "line 1: not JSON"),
        ("not.gz", b"plain", "cannot be read"),
        ("not.xz", b"plain", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        read_trace(tmp_path / name)


def test_a_folder_or_nothing_is_no_trace(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(tmp_path)
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_trace(tmp_path / "absent.jsonl")


def test_nothing_but_bad_lines(tmp_path):
    with pytest.raises(ConfigurationError, match=r"holds no request \(2 bad lines; line 1: not JSON"):
        read(tmp_path, "{", "{", skip_bad=True)


def test_a_partial_last_block_may_have_no_id(tmp_path):
    assert read(tmp_path, line(hash_ids=[1])).num_blocks == 1


def test_other_block_sizes(tmp_path):
    trace = read(tmp_path, line(hash_ids=list(range(4))), block_tokens=256)
    assert trace.block_tokens == 256


def test_full_blocks_only(tmp_path):
    trace = read(tmp_path, line(), line(input_length=1024, hash_ids=[2, 3]), line(input_length=5, hash_ids=[9]))
    assert [request.hash_ids for request in trace.full_blocks_only().requests] == [(0,), (2, 3), ()]
    assert [request.input_length for request in trace.full_blocks_only().requests] == [1000, 1024, 5]


def test_bailian_lines(tmp_path):
    trace = read(
        tmp_path, line(BAILIAN), line(BAILIAN, input_length=20, output_length=3), line(BAILIAN, input_length=39)
    )
    one, two, three = trace.requests
    assert trace.block_tokens == 16
    assert (one.timestamp_ms, one.input_length, one.output_length) == (1500, 32, 0)
    assert (two.input_length, two.output_length, three.input_length) == (20, 3, 39)
    assert one.hash_ids == two.hash_ids == three.hash_ids


def test_bailian_ids_are_made_to_stand_for_their_prefix(tmp_path):
    prompts = [[7, 8, 9], [7, 8], [6, 8, 9], [8, 9]]
    trace = read(tmp_path, *(line(BAILIAN, hash_ids=ids) for ids in prompts))
    ids = [request.hash_ids for request in trace.requests]
    for i, one in enumerate(prompts):
        for j, other in enumerate(prompts):
            for depth in range(min(len(one), len(other))):
                same_prefix = one[: depth + 1] == other[: depth + 1]
                assert (ids[i][depth] == ids[j][depth]) is same_prefix


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line(BAILIAN, turn="1"), "turn: expected int, got str"),
        (line(BAILIAN, parent_chat_id=...), "parent_chat_id is missing"),
        (line(BAILIAN, input_length=200), "2 hash_ids for input_length 200, expected 13"),
        (line(BAILIAN, hash_ids=[]), "an empty prompt"),
    ],
)
def test_bad_bailian_lines(tmp_path, bad, said):
    with pytest.raises(ConfigurationError, match="line 2: ") as caught:
        read(tmp_path, line(BAILIAN), bad)
    assert said in str(caught.value)


def test_equal_blocks_have_equal_keys_and_others_do_not(tmp_path):
    trace = read(tmp_path, line(hash_ids=[0, 2**70]), line(hash_ids=[0, -1]))
    (a, b), (c, d) = trace.keys
    assert a is c
    assert len({a, b, d}) == 3
