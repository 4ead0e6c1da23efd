"""The recorder: what it writes, and that nobody can read a prompt out of it."""

import hashlib
import json

import pytest

from kvtier.errors import ConfigurationError
from kvtier.runtime.recorder import TraceRecorder
from kvtier.sim.traces import read_trace

SALT = bytes(range(32))


def chained(tokens, block):
    """An engine's chained hashes of the full blocks of `tokens`."""
    hashes, above = [], b""
    for end in range(block, len(tokens) + 1, block):
        above = hashlib.sha256(above + repr(tokens[end - block : end]).encode()).digest()
        hashes.append(above)
    return hashes


def record(recorder, *prompts, block=16, output=5):
    lines = []
    for number in range(len(prompts)):
        recorder.arrived(str(number), 10.0 + number)
    for number, tokens in enumerate(prompts):
        # engines hash what they generate too
        hashes = chained([*tokens, *range(9000, 9000 + 3 * block)], block)
        lines.append(recorder.finished(str(number), hashes, len(tokens), output))
    return lines


def test_what_is_written_can_be_read_back(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(record(TraceRecorder(SALT, 16), list(range(1300)), list(range(700)))))
    trace = read_trace(path)
    assert [request.timestamp_ms for request in trace.requests] == [0, 1000]
    assert [request.input_length for request in trace.requests] == [1300, 700]
    assert [request.output_length for request in trace.requests] == [5, 5]
    assert [len(request.hash_ids) for request in trace.requests] == [3, 2]


@pytest.mark.parametrize("block", [16, 32, 512, 48])
def test_ids_are_equal_exactly_for_equal_prefixes(block):
    recorder = TraceRecorder(SALT, block)
    size = recorder.block_tokens
    assert size == 512 - 512 % block
    base = list(range(4 * size))
    prompts = [base, base[: 3 * size], base[:size] + [7] * (3 * size), [9, *base]]
    ids = [json.loads(line)["hash_ids"] for line in record(recorder, *prompts, block=block)]
    for one, one_ids in zip(prompts, ids, strict=True):
        assert len(one_ids) == -(-len(one) // size)
        for other, other_ids in zip(prompts, ids, strict=True):
            for depth in range(min(len(one) // size, len(other) // size)):
                same = one[: (depth + 1) * size] == other[: (depth + 1) * size]
                assert (one_ids[depth] == other_ids[depth]) is same


def test_a_partial_block_is_known_by_its_last_full_engine_block():
    one, two, three, tiny, tiny_too = (
        json.loads(line)["hash_ids"]
        for line in record(
            TraceRecorder(SALT, 16), list(range(1000)), list(range(1000)), list(range(900)), [1, 2], [1, 2]
        )
    )
    assert one == two
    assert one[0] == three[0]
    assert one[1] != three[1]
    assert tiny != tiny_too  # the engine cannot share less than a block either


def test_the_salt_changes_every_id_and_no_hash_is_visible():
    tokens = list(range(2048))
    [line] = record(TraceRecorder(SALT, 16), tokens)
    [other] = record(TraceRecorder(bytes(32), 16), tokens)
    assert not set(json.loads(line)["hash_ids"]) & set(json.loads(other)["hash_ids"])
    for block_hash in chained(tokens, 16):
        assert str(int.from_bytes(block_hash[:8], "big")).encode() not in line
        assert block_hash.hex()[:16].encode() not in line


def test_a_request_is_written_once_and_only_if_it_arrived():
    recorder = TraceRecorder(SALT, 16)
    recorder.arrived("a", 1.0)
    recorder.arrived("a", 2.0)
    recorder.arrived("b", 3.5)
    assert len(recorder) == 2
    assert recorder.finished("unknown", [], 10, 1) is None
    assert json.loads(recorder.finished("b", [], 10, 1))["timestamp"] == 2500
    assert json.loads(recorder.finished("a", [], 10, 1))["timestamp"] == 0
    assert recorder.finished("a", [], 10, 1) is None
    assert len(recorder) == 0


def test_bad_settings_are_named():
    with pytest.raises(ConfigurationError, match="salt of 3 bytes"):
        TraceRecorder(b"abc", 16)
    with pytest.raises(ConfigurationError, match="engine_block_tokens is 0"):
        TraceRecorder(SALT, 0)
