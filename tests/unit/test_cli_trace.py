"""Request traces of the demo: what the engine is asked."""

import json

import pytest

from kvtier.cli import demo_trace
from kvtier.errors import ConfigurationError
from kvtier.sim.traces import TraceRequest


def request(at_s, ids, input_length=None, output_length=100):
    return TraceRequest(
        timestamp_ms=at_s * 1000,
        input_length=input_length or 512 * len(ids),
        output_length=output_length,
        hash_ids=tuple(ids),
    )


def test_a_trace_in_small_blocks_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    fields = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "type": "text", "turn": 1, "hash_ids": [1]}
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigurationError, match="blocks of 16 tokens; the demo needs 512"):
        demo_trace.read_demo_trace(path)


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
