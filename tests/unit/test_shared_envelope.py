"""The envelope of shared blocks and the wire protocol, against bytes that were put together by hand."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import (
    BlockChecksum,
    EnvelopeError,
    Identity,
    Rejection,
    check_header,
    header_of,
    value_bytes,
)
from kvtier.tiers.shared.resp import ErrorReply, RespStream
from kvtier.tiers.shared.store import StoreTimeoutError, StoreUnreachableError

NAMESPACE = bytes(range(32))
KEY = OffloadKey(b"\xfe\x00\r\nkey")
BLOCK = np.arange(1000, dtype=np.uint8)
IDENTITY = Identity(NAMESPACE, 5, b"saltsalt")


HEADER = header_of(IDENTITY, KEY, 1000)


def test_the_format_is_what_it_is() -> None:
    """Another version of kvtier reads these bytes: they change with the format version alone."""
    header = b"kvtier\x00\xb1" + b"\x01\x00" + b"\x00" + b"\x00" + NAMESPACE
    header += struct.pack("<Q", 5) + b"saltsalt" + struct.pack("<HQ", len(KEY), 1000) + KEY
    assert header == HEADER
    expected = xxhash.xxh3_64_intdigest(BLOCK.tobytes(), xxhash.xxh3_64_intdigest(header))
    assert _checksum_of(BLOCK).value() == struct.pack("<Q", expected)
    assert value_bytes(len(KEY), 1000) == len(header) + 1000 + 8
    assert IDENTITY.path == b"v1:000102030405060708090a0b0c0d0e0f:5-73616c7473616c74:"


def _checksum_of(block: npt.NDArray[np.uint8], header: bytes = HEADER) -> BlockChecksum:
    checksum = BlockChecksum(header)
    for begin in range(0, len(block), 300):
        checksum.update(block[begin : begin + 300].data)
    return checksum


def test_what_was_sealed_is_accepted() -> None:
    check_header(HEADER, IDENTITY, KEY, 1000)
    _checksum_of(BLOCK).check(_checksum_of(BLOCK).value())


def _rejection(header: bytes, identity: Identity = IDENTITY, key: OffloadKey = KEY, size: int = 1000) -> Rejection:
    with pytest.raises(EnvelopeError) as caught:
        check_header(header, identity, key, size)
    return caught.value.rejection


def test_every_difference_has_its_name() -> None:
    header = HEADER
    assert _rejection(b"X" + header[1:]) is Rejection.MAGIC
    assert _rejection(header[:8] + b"\x02" + header[9:]) is Rejection.VERSION
    assert _rejection(header[:10] + b"\x01" + header[11:]) is Rejection.CODEC
    assert _rejection(header, Identity(bytes(32), 5, b"saltsalt")) is Rejection.IDENTITY
    assert _rejection(header, Identity(NAMESPACE, 6, b"saltsalt")) is Rejection.IDENTITY
    assert _rejection(header, Identity(NAMESPACE, 5)) is Rejection.IDENTITY
    assert _rejection(header, key=OffloadKey(KEY[:-1] + b"z")) is Rejection.KEY
    assert _rejection(header, size=999) is Rejection.LENGTH
    assert _rejection(header[:20]) is Rejection.SIZE
    assert _rejection(b"") is Rejection.SIZE


def test_no_single_bit_of_header_or_block_can_change_unnoticed() -> None:
    value = _checksum_of(BLOCK).value()
    for at in range(8 * len(HEADER)):
        changed = bytearray(HEADER)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(EnvelopeError):
            check_header(changed, IDENTITY, KEY, 1000)
    for at in range(8 * len(BLOCK)):
        block = BLOCK.copy()
        block[at // 8] ^= 1 << at % 8
        with pytest.raises(EnvelopeError):
            _checksum_of(block).check(value)
    for header in (header_of(Identity(NAMESPACE, 6), KEY, 1000), header_of(IDENTITY, OffloadKey(b"another"), 1000)):
        with pytest.raises(EnvelopeError):
            _checksum_of(BLOCK, header).check(value)


def test_identities_that_cannot_be() -> None:
    for namespace, epoch, salt in ((b"short", 0, bytes(8)), (NAMESPACE, -1, bytes(8)), (NAMESPACE, 0, b"")):
        with pytest.raises(ConfigurationError):
            Identity(namespace, epoch, salt)


# -- the protocol ----------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[RespStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = RespStream(ours)
    stream.deadline_s = time.monotonic() + 30
    yield stream, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 100_000])
def test_replies_in_pieces_of_any_size(pair: tuple[RespStream, socket.socket], piece_bytes: int) -> None:
    stream, theirs = pair
    body = bytes(range(256)) * 100
    wire = b"+OK\r\n:12\r\n-ERR no\r\n$-1\r\n$3\r\na\r\n\r\n*2\r\n:1\r\n$1\r\nx\r\n$%d\r\n%s\r\n:7\r\n" % (
        len(body),
        body,
    )

    def send() -> None:
        for at in range(0, len(wire), piece_bytes):
            theirs.sendall(wire[at : at + piece_bytes])

    sender = threading.Thread(target=send)
    sender.start()
    assert stream.read_reply() == "OK"
    assert stream.read_reply() == 12
    assert stream.read_reply() == ErrorReply("ERR no")
    assert stream.read_reply() is None
    assert stream.read_reply() == b"a\r\n"
    assert stream.read_reply() == [1, b"x"]
    assert stream.read_size() == len(body)
    target = bytearray(len(body))
    stream.read_into(memoryview(target))
    stream.end_body()
    assert target == body
    assert stream.read_lines(1) == [b":7"]
    sender.join()


def test_everything_is_sent_in_order_through_a_narrow_socket(pair: tuple[RespStream, socket.socket]) -> None:
    stream, theirs = pair
    pieces = [b"head", memoryview(np.arange(3_000_000, dtype=np.uint32)).cast("B"), b"", b"tail"]
    expected = b"".join(bytes(piece) for piece in pieces)
    received = bytearray()

    def receive() -> None:
        while len(received) < len(expected) and (data := theirs.recv(50_000)):
            received.extend(data)

    receiver = threading.Thread(target=receive)
    receiver.start()
    stream.send(pieces)
    receiver.join()
    assert received == expected


@pytest.mark.parametrize(
    "wire", [b"what?\r\n", b"$x\r\n", b"*9999999\r\n", b"$2\r\nabcd", b"x" * 50_000, b"$99999999999\r\n"]
)
def test_what_is_no_reply_breaks_the_connection(pair: tuple[RespStream, socket.socket], wire: bytes) -> None:
    stream, theirs = pair
    theirs.sendall(wire)
    theirs.close()
    with pytest.raises(StoreUnreachableError):
        stream.read_reply()


def test_more_replies_than_commands_break_the_connection(pair: tuple[RespStream, socket.socket]) -> None:
    stream, theirs = pair
    theirs.sendall(b":1\r\n:1\r\n:1\r\n")
    with pytest.raises(StoreUnreachableError):
        stream.read_lines(2)


def test_silence_ends_at_the_deadline(pair: tuple[RespStream, socket.socket]) -> None:
    stream, theirs = pair
    stream.deadline_s = time.monotonic() + 0.05
    with pytest.raises(StoreTimeoutError):
        stream.read_line()
    theirs.close()


def test_a_trickle_ends_at_the_deadline_too(pair: tuple[RespStream, socket.socket]) -> None:
    stream, theirs = pair
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.005):
            theirs.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    stream.deadline_s = time.monotonic() + 0.1
    with pytest.raises(StoreTimeoutError):
        stream.read_into(memoryview(bytearray(1 << 20)))
    over.set()
    sender.join()
