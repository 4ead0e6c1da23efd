"""What is known of a cluster: slots of names, the nodes' own map, redirections, nodes that are away."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvtier.tiers.shared.resp import ErrorReply
from kvtier.tiers.shared.store import StoreUnreachableError
from kvtier.tiers.shared.valkey_slots import (
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    NUM_SLOTS,
    ClusterMap,
    parse_slots,
    redirection,
    slots_of,
)

A, B, C = ("a", 1), ("b", 2), ("::1", 3)
NAMES = st.lists(st.sampled_from([b"{", b"}", b"a", b"\xff", b":", b"kvtier"]), max_size=8).map(b"".join)


@given(prefix=NAMES, keys=st.lists(NAMES, max_size=5))
def test_slots_are_those_of_an_ordinary_client(prefix: bytes, keys: list[bytes]) -> None:
    assert slots_of(prefix, keys) == [key_slot(prefix + key) for key in keys]  # type: ignore[arg-type]


def test_the_map_is_what_the_node_says() -> None:
    reply = [
        [0, 5, [b"a", 1, b"id", []], [b"b", 2, b"id", []]],
        [6, 6, [b"::1", 3, b"id"]],
        [8, NUM_SLOTS - 1, [None, 1], [b"", 7]],
    ]
    owners, addresses = parse_slots(reply, A)
    assert owners == [A] * 6 + [C] + [None] + [A] * (NUM_SLOTS - 8)
    assert addresses == {A, B, C, ("a", 7)}


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"",
        7,
        [],
        [[]],
        [[0, 1]],
        [[0, NUM_SLOTS, [b"a", 1]]],
        [[5, 4, [b"a", 1]]],
        [[-1, 4, [b"a", 1]]],
        [[0, 4, [b"a"]]],
        [[0, 4, [b"a", b"x"]]],
        [[0, 4, [b"\xff", 1]]],
        [[0, 4, b"a:1"]],
        [[b"0", 4, [b"a", 1]]],
        ErrorReply("NOPERM no"),
    ],
)
def test_what_is_no_map_is_no_map(reply: object) -> None:
    with pytest.raises(StoreUnreachableError, match="a:1"):
        parse_slots(reply, A)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("MOVED 3999 127.0.0.1:6381", ("127.0.0.1", 6381)),
        ("ASK 3999 ::1:6381", ("::1", 6381)),
        ("MOVED 3999 :6381", ("a", 6381)),
        ("MOVED 3999 cache.example:6381", ("cache.example", 6381)),
        ("MOVED 3999", None),
        ("MOVED", None),
        ("MOVED 3999 a:x", None),
        ("CLUSTERDOWN a:1", None),
    ],
)
def test_where_a_node_sends_one(text: str, target: tuple[str, int] | None) -> None:
    assert redirection(ErrorReply(text), A) == target


def test_the_map_is_asked_for_by_one_and_ever_more_rarely_until_it_is_right() -> None:
    cluster_map = ClusterMap("valkey://a:1/0", [A])
    assert [cluster_map.take_turn_to_ask(0.0) for _ in range(3)] == [True, False, False]
    cluster_map.update([A] * NUM_SLOTS, {A, B}, 0.0)
    assert not cluster_map.take_turn_to_ask(100.0), "it is right as far as anybody knows"
    cluster_map.note_away(A, "it is gone", 100.0)
    asked_at = []
    for tenth in range(100):
        now_s = 100.0 + tenth / 10
        if cluster_map.take_turn_to_ask(now_s):
            asked_at.append(now_s)
            cluster_map.update([A] * NUM_SLOTS, {A, B}, now_s)
    pauses = [later - before for before, later in pairwise(asked_at)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S)
    cluster_map.update([B] * NUM_SLOTS, {A, B}, 200.0)
    assert not cluster_map.take_turn_to_ask(300.0)
    cluster_map.note_moved(7, A)
    assert cluster_map.owners[6:9] == [B, A, B]
    assert cluster_map.take_turn_to_ask(300.0)


def test_a_node_that_is_away_is_tried_by_one_at_a_time_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster_map = ClusterMap("valkey://a:1/0", [A])
    with caplog.at_level(logging.INFO, "kvtier"):
        for _ in range(3):
            cluster_map.note_away(B, "it is gone", 0.0)
        assert cluster_map.absence(B) == "it is gone"
        assert cluster_map.absence(A) == ""
        assert not cluster_map.take_turn_to_try(B, 0.0)
        assert [cluster_map.take_turn_to_try(B, MIN_PAUSE_S) for _ in range(3)] == [True, False, False]
        cluster_map.note_back(B)
        assert cluster_map.absence(B) == ""
        cluster_map.note_away(B, "again", 1.0)
        cluster_map.note_back(B)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "b:2" in messages[0]
    assert "it is gone" in messages[0]
    assert "there again" in messages[1]


def test_a_node_that_has_left_is_forgotten() -> None:
    cluster_map = ClusterMap("valkey://a:1/0", [A])
    cluster_map.note_away(B, "it is gone", 0.0)
    cluster_map.update([C] * NUM_SLOTS, {C}, 0.0)
    assert cluster_map.absence(B) == ""
    assert set(cluster_map.addresses) == {A, C}, "what the configuration names stays"
