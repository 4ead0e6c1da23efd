"""Request traces: what is read, what is refused, and what the engine is asked."""

import gzip
import json
import math

import pytest

from kvtier.cli import demo_trace
from kvtier.errors import ConfigurationError

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 100, "hash_ids": [0, 1]}


def line(**changes):
    fields = {**GOOD, **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not ...})


def request(at_s, ids, input_length=None, output_length=100):
    return demo_trace.TraceRequest(at_s * 1000, input_length or 512 * len(ids), output_length, tuple(ids))


def test_reads_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line(timestamp=5.5)}\n\n{line(timestamp=3, hash_ids=[7, 8])}\n")
    first, second = demo_trace.read_trace(path)
    assert first == demo_trace.TraceRequest(3, 1000, 100, (7, 8))
    assert second.timestamp_ms == 5.5


def test_reads_gzip(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.write(line())
    assert len(demo_trace.read_trace(path)) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "'[1]' is not an object"),
        (line(timestamp=...), "timestamp is missing"),
        (line(input_length=...), "input_length is missing"),
        (line(output_length=...), "output_length is missing"),
        (line(hash_ids=...), "hash_ids is missing"),
        (line(timestamp="0"), 'timestamp is "0", expected a number of at least 0'),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=math.nan), "timestamp is NaN"),
        (line(timestamp=True), "timestamp is true"),
        (line(input_length=0, hash_ids=[1]), "input_length is 0, expected an integer of at least 1"),
        (line(input_length=1.5), "input_length is 1.5"),
        (line(output_length=None), "output_length is null"),
        (line(hash_ids=[]), "hash_ids is [], expected a list"),
        (line(hash_ids=["a", "b"]), 'hash_ids is ["a", "b"], expected a list'),
        (line(hash_ids=list(range(40))), "40 hash_ids for input_length 1000, expected 2"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, bad, said):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line()}\n\n{bad}\n{line()}\n")
    with pytest.raises(ConfigurationError, match="line 3: ") as caught:
        demo_trace.read_trace(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 150


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", b"\n\n", "holds no request"),
        ("bytes.jsonl", b"\xff\xfe\x00", "cannot be read"),
        ("not.gz", b"plain", "cannot be read"),
        ("not.xz", b"plain", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        demo_trace.read_trace(tmp_path / name)


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        demo_trace.read_trace(tmp_path)


def test_tokens_depend_on_the_id_alone():
    assert demo_trace.block_tokens(7, 32) == demo_trace.block_tokens(7, 32)
    assert demo_trace.block_tokens(7, 32) != demo_trace.block_tokens(8, 32)
    assert len(demo_trace.block_tokens(7, 32)) == 32
    # the same on every machine: a change here changes what earlier results meant
    assert demo_trace.block_tokens(0, 32)[:3] == [26247, 28562, 3653]


def test_shared_ids_become_shared_prefixes():
    requests = [request(0, [0, 1, 2]), request(2, [0, 1, 3]), request(4, [0])]
    one, two, three = demo_trace.scale(requests, block_size=32, speed=2, max_prompt=10_000)
    assert [scaled.at_s for scaled in (one, two, three)] == [0, 1, 2]
    assert one.prompt[:64] == two.prompt[:64]
    assert one.prompt[64:] != two.prompt[64:]
    assert three.prompt == one.prompt[:32]
    assert [len(scaled.prompt) for scaled in (one, two, three)] == [96, 96, 32]
    assert not one.cut


def test_lengths_are_a_sixteenth():
    requests = [
        request(0, [0, 1], input_length=513, output_length=100),
        request(0, [0, 1], input_length=1023, output_length=0),
        request(0, [0], input_length=1, output_length=10**6),
    ]
    scaled = demo_trace.scale(requests, block_size=32, speed=1, max_prompt=10_000)
    assert [len(one.prompt) for one in scaled] == [33, 64, 1]
    assert [one.output_tokens for one in scaled] == [6, 1, demo_trace.MAX_OUTPUT_TOKENS]


def test_long_prompts_lose_their_end():
    [scaled] = demo_trace.scale([request(0, range(100))], block_size=32, speed=1, max_prompt=320)
    assert scaled.cut
    assert scaled.prompt == [token for block in range(10) for token in demo_trace.block_tokens(block, 32)]


def conversations(count, turns, system=(0,)):
    requests = []
    for turn in range(turns):
        for number in range(count):
            own = [1000 * (number + 1) + block for block in range(turn + 1)]
            requests.append(request(turn * count + number, [*system, *own]))
    return requests


def test_whole_conversations_are_taken():
    requests = conversations(count=50, turns=3)
    chosen = demo_trace.sample_conversations(requests, 12)
    assert chosen == demo_trace.sample_conversations(requests, 12)
    assert [one.timestamp_ms for one in chosen] == sorted(one.timestamp_ms for one in chosen)
    assert len({one.hash_ids[1] for one in chosen}) == 4
    assert len(chosen) == 12


def test_never_more_requests_than_asked_for_and_all_where_there_are_fewer():
    requests = conversations(count=50, turns=3)
    assert len(demo_trace.sample_conversations(requests, 11)) == 11
    assert demo_trace.sample_conversations(requests, 1000) == requests


def test_a_window_takes_the_first_seconds_only():
    requests = conversations(count=50, turns=3)
    chosen = demo_trace.sample_conversations(requests, 1000, window_s=20)
    assert chosen == requests[:21]
