"""An exchange with nodes that break off in the middle: no reply is taken for another's, none is asked for twice."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.testing import make_keys
from kvtier.tiers.jobs import OpenJob
from kvtier.tiers.shared import ValkeyConfig
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.resp import ErrorReply
from kvtier.tiers.shared.store import BlockTransfer, StoreUnreachableError
from kvtier.tiers.shared.valkey_cluster import ClusterConnection
from kvtier.tiers.shared.valkey_node import ValkeyConnection
from kvtier.tiers.shared.valkey_slots import ClusterMap
from kvtier.tiers.shared.valkey_turns import Each, Gets, Turns
from kvtier.tiers.shared.values import OutgoingValue

A, B = ("a", 1), ("b", 2)
IDENTITY = Identity(bytes(32), 0)
KEYS = make_keys(3)
SLOT_BYTES = 4096


def blocks_of(count: int) -> list[BlockTransfer]:
    job = OpenJob(1, False, KEYS)
    return [BlockTransfer(job, i, KEYS[i], IDENTITY, np.full(SLOT_BYTES, i, np.uint8)) for i in range(count)]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


class BrokenNode:
    """Sends the first block elsewhere, then breaks off."""

    def __init__(self) -> None:
        self.num_read = 0

    def limit(self, deadline_s: float) -> None: ...

    def read_asked(self) -> None: ...

    def close(self) -> None: ...

    def read_get(self, block: BlockTransfer) -> ErrorReply:
        self.num_read += 1
        if self.num_read > 1:
            raise StoreUnreachableError("the connection broke")
        return ErrorReply("MOVED 1 b:2")


def test_what_was_sent_elsewhere_before_the_connection_broke_is_asked_for_once() -> None:
    config, node = ValkeyConfig("a"), BrokenNode()
    nodes: dict[tuple[str, int], ValkeyConnection] = {A: node}  # type: ignore[dict-item]
    connection = ClusterConnection(config, ClusterMap("valkey://a", [A]), nodes, 1.0)
    turns = Turns(Gets(blocks_of(3)), [1, 2, 3])
    for position in range(3):
        turns.add(A, True, position)
    (turn,) = turns.take()
    turn.node = nodes[A]
    connection._read(turn, turns, time.monotonic() + 30)
    again = [(turn.address, position) for turn in turns.take() for position in turn.positions]
    assert sorted(again) == [(A, 1), (A, 2), (B, 0)]


def test_what_is_read_all_at_once_is_read_last() -> None:
    turns = Turns(Each(b"STRLEN", IDENTITY, KEYS, ()), [1, 2, 3])
    for position in range(2):
        turns.add(A, False, position)
    turns.add(A, True, 2)
    assert [turn.is_asking for turn in turns.take()] == [True, False]


def test_a_block_that_is_read_again_is_not_there_before_it_is_there_again(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    connection = ValkeyConnection(ValkeyConfig("a"), None, ours)
    connection.limit(time.monotonic() + 30)
    (stored,), (block,) = blocks_of(1), blocks_of(1)
    value = OutgoingValue(stored)
    value.checksum.update(value.payload)
    reply = b"$%d\r\n" % value.num_bytes + value.header + bytes(value.payload) + value.checksum.value() + b"\r\n"
    theirs.sendall(reply)
    assert connection.read_get(block) is None
    assert block.success
    theirs.sendall(reply[: len(reply) // 2])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(StoreUnreachableError):
        connection.read_get(block)
    assert not block.success, "its buffer has a half of something"
    assert not block.done
