"""A connection to one Valkey or Redis server, which may be all of a store or a node of a cluster.

redis-py makes the connection: addresses, TLS, logging in, choosing the database. From there on this module speaks the
protocol over its socket, for blocks go straight from and into RAM slots that way.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import (
    CHECKSUM_BYTES,
    EnvelopeError,
    Identity,
    Rejection,
    header_bytes,
    value_bytes,
)
from kvtier.tiers.shared.resp import Buffer, ErrorReply, Reply, RespStream
from kvtier.tiers.shared.store import BlockTransfer, StoreRefusedError, StoreTimeoutError, StoreUnreachableError
from kvtier.tiers.shared.valkey_config import Address, ValkeyConfig
from kvtier.tiers.shared.values import IncomingValue, OutgoingValue, may_be_block, refuse_size

_GONE = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY")
"""Errors of a server that cannot be used now."""
_REFUSED = ("NOAUTH", "NOPERM", "WRONGPASS")
"""Errors of a server that will not be used as it is configured."""
SENT_BYTES = 1 << 20
"""Blocks are hashed and sent in pieces up to this size: still in the processor's cache for the second of the two, and
few calls."""
MAX_SKIPPED_BYTES = 64 << 20
"""A value of another size up to this is read and thrown away; for a larger one the connection is closed."""


def connect_node(config: ValkeyConfig, address: Address, deadline_s: float) -> ValkeyConnection:
    """A new connection to the server at `address`, which has answered. Raises as the methods of a connection do."""
    import redis.exceptions as errors  # noqa: PLC0415

    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise StoreTimeoutError("there was no time left to connect")
    try:
        client = _client(config, address, left_s)
        client.connect()
    except ConfigurationError as error:
        raise StoreRefusedError(str(error)) from None
    except (errors.AuthenticationError, errors.AuthorizationError) as error:
        raise StoreRefusedError(f"the server refuses the login: {error}") from None
    except errors.TimeoutError:
        raise StoreTimeoutError("the server did not answer in time") from None
    except errors.ResponseError as error:
        raise refusal(ErrorReply(str(error))) from None
    except (errors.RedisError, OSError) as error:
        raise StoreUnreachableError(_one_line(error)) from None
    sock = getattr(client, "_sock", None)
    if not isinstance(sock, socket.socket):
        raise StoreRefusedError("this version of redis-py has no socket for us; known to work: 5 to 8")
    connection = ValkeyConnection(config, client, sock)
    try:
        connection.ask_mode(deadline_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _client(config: ValkeyConfig, address: Address, timeout_s: float) -> Any:
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.connection import Connection, SSLConnection  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    settings: dict[str, Any] = {
        "host": address[0],
        "port": address[1],
        "db": config.database,
        "username": config.username or None,
        "password": config.password(),
        "client_name": "kvtier",
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if not config.tls:
        return Connection(**settings)  # type: ignore[no-untyped-call, unused-ignore]
    return SSLConnection(
        **settings,
        ssl_ca_certs=config.ca_file or None,
        ssl_certfile=config.cert_file or None,
        ssl_keyfile=config.key_file or None,
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
    )


class ValkeyConnection:
    """A `StoreConnection`. `client` is the redis-py connection that `sock` belongs to."""

    def __init__(self, config: ValkeyConfig, client: Any, sock: socket.socket) -> None:
        self._config = config
        self._client = client
        self._socket = sock
        self._stream = RespStream(sock)
        self._prefix = config.prefix.encode()
        self._expiry = _arguments(b"EX", b"%d" % config.ttl_s) if config.ttl_s else b""
        self.is_clustered = False
        """The server is a node of a cluster."""

    def ask_mode(self, deadline_s: float) -> None:
        """Asks the server whether it `is_clustered`."""
        self.limit(deadline_s)
        reply = self.call(b"HELLO")
        if isinstance(reply, ErrorReply):
            if is_about_server(reply):
                raise refusal(reply)
            return  # before version 6 there is no HELLO
        if isinstance(reply, list) and b"mode" in reply:
            self.is_clustered = reply[reply.index(b"mode") + 1] == b"cluster"

    def ping(self, deadline_s: float) -> None:
        self.limit(deadline_s)
        _expect(self.call(b"PING"), "PONG")

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        """By the sizes of the values: one that is not whole is not there."""
        return are_whole(self._pipeline(b"STRLEN", identity, keys, (), deadline_s), keys, block_bytes)

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        self.limit(deadline_s)
        self.send_gets(blocks)
        for block in blocks:
            if error := self.read_get(block):
                raise refusal(error)

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        if not overwrite:
            keys = [block.key for block in blocks]
            there = self.lookup(blocks[0].identity, keys, blocks[0].buffer.nbytes, deadline_s)
            blocks = without(blocks, there)
        self.limit(deadline_s)
        for block in blocks:
            self.send_set(block)
        for block in blocks:
            if error := self.read_set(block):
                raise refusal(error)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        self._pipeline(b"UNLINK", identity, keys, (), deadline_s)

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        verb, more = touching(self._config)
        self._pipeline(verb, identity, keys, more, deadline_s)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.disconnect()

    # -- out and in, for those who talk to several nodes at once -------------------------------------------------

    def limit(self, deadline_s: float) -> None:
        """What follows has to end by then."""
        self._stream.deadline_s = deadline_s

    def call(self, *arguments: bytes) -> Reply:
        """Any command whose reply is not large."""
        self._stream.send([command(*arguments)])
        return self._stream.read_reply()

    def send_asking(self) -> None:
        """The next command may be about a slot that is just moving to this node. Has a reply of its own."""
        self._stream.send([command(b"ASKING")])

    def read_asked(self) -> None:
        """The reply to that."""
        _expect(self._stream.read_reply(), "OK")

    def send_each(
        self, verb: bytes, identity: Identity, keys: Sequence[OffloadKey], more: Sequence[bytes]
    ) -> Sequence[OffloadKey]:
        """Sends the same command for every key, all at once. The keys in the order of the replies: `keys` itself
        where all are of one length."""
        prefix = self._prefix + identity.path
        tail = b"\r\n" + _arguments(*more)
        sizes = dict.fromkeys(map(len, keys))
        if len(sizes) > 1:
            keys = [key for size in sizes for key in keys if len(key) == size]
        commands = []
        # what stands between two keys of one length is always the same
        for size in sizes:
            head = b"*%d\r\n%s$%d\r\n%s" % (2 + len(more), _arguments(verb), len(prefix) + size, prefix)
            same = keys if len(sizes) == 1 else [key for key in keys if len(key) == size]
            commands.append(head + (tail + head).join(same) + tail)
        self._stream.send(commands)
        return keys

    def read_each(self, count: int) -> list[bytes]:
        """The lines of the next `count` replies, none of which has a body. Several are the last that were asked for."""
        return self._stream.read_lines(count) if count != 1 else [self._stream.read_line()]

    def send_gets(self, blocks: Sequence[BlockTransfer]) -> None:
        prefix = self._prefix + blocks[0].identity.path
        self._stream.send([b"".join(command(b"GET", prefix + block.key) for block in blocks)])

    def read_get(self, block: BlockTransfer) -> ErrorReply | None:
        """The block, into its buffer. What is returned says something of the server, and nothing of the block."""
        stream = self._stream
        size = stream.read_size()
        if size is None:
            block.miss()
            return None
        if isinstance(size, ErrorReply):
            if is_about_server(size):
                return size
            if size.code == "WRONGTYPE":
                block.reject(Rejection.MAGIC)
            else:
                block.fail(f"the server says: {size.text}")
            return None
        if not may_be_block(size, len(block.key), block.buffer.nbytes):
            refuse_size(block, size)
            if size > MAX_SKIPPED_BYTES:
                raise StoreUnreachableError(f"a value has {size} bytes, and is not read")
            stream.skip(size)
        else:
            self._read_value(block, size)
        stream.end_body()
        return None

    def send_set(self, block: BlockTransfer) -> None:
        """The block, from its buffer."""
        name = self._prefix + block.identity.path + block.key
        value = OutgoingValue(block)
        before: list[Buffer] = [
            b"*%d\r\n%s$%d\r\n" % (5 if self._expiry else 3, _arguments(b"SET", name), value.num_bytes),
            value.header,
        ]
        for begin in range(0, len(value.payload), SENT_BYTES):
            piece = value.payload[begin : begin + SENT_BYTES]
            value.checksum.update(piece)
            self._stream.send([*before, piece])
            before = []
        self._stream.send([*before, value.checksum.value(), b"\r\n", self._expiry])

    def read_set(self, block: BlockTransfer) -> ErrorReply | None:
        """How that went. As of `read_get`."""
        reply = self._stream.read_reply()
        if reply == "OK":
            block.succeed(block.buffer.nbytes)
        elif not isinstance(reply, ErrorReply):
            raise refusal(reply)
        elif is_about_server(reply):
            return reply
        else:
            block.fail(f"the server says: {reply.text}")
        return None

    # -- private ---------------------------------------------------------------------------------------------

    def _pipeline(
        self, verb: bytes, identity: Identity, keys: Sequence[OffloadKey], more: Sequence[bytes], deadline_s: float
    ) -> list[bytes]:
        """The lines of the replies to the same command for every key, in one round trip."""
        self.limit(deadline_s)
        sent = self.send_each(verb, identity, keys, more)
        lines = self.read_each(len(keys))
        if sent is keys:
            return lines
        answer = dict(zip(sent, lines, strict=True))
        return [answer[key] for key in keys]

    def _read_value(self, block: BlockTransfer, size: int) -> None:
        stream = self._stream
        block.done = block.success = False  # whatever was said of the buffer before is not so from here on
        header = bytearray(header_bytes(len(block.key)))
        stream.read_into(memoryview(header))
        try:
            value = IncomingValue(block, header, size)
        except EnvelopeError as error:
            block.reject(error.rejection)
            stream.skip(size - len(header))
            return
        stream.read_into(value.payload, value.checksum.update)
        stored = bytearray(CHECKSUM_BYTES)
        stream.read_into(memoryview(stored))
        try:
            value.finish(stored)
        except EnvelopeError as error:
            block.reject(error.rejection)
        else:
            block.succeed(block.buffer.nbytes)


def are_whole(lines: Sequence[bytes], keys: Sequence[OffloadKey], block_bytes: int) -> list[bool]:
    """Whether each reply to `STRLEN` is the size of a value of a block of `block_bytes`. Raises StoreRefusedError for
    an error that says nothing of a value."""
    for line in set(lines):
        if line[:1] == b"-" and not line.startswith(b"-WRONGTYPE"):
            raise refusal(ErrorReply.of(line))
    whole = {size: b":%d" % value_bytes(size, block_bytes) for size in set(map(len, keys))}
    return [
        line == whole[len(key)] or (line != b":0" and _may_be_block(line, key, block_bytes))
        for line, key in zip(lines, keys, strict=True)
    ]


def _may_be_block(line: bytes, key: OffloadKey, block_bytes: int) -> bool:
    return line[:1] == b":" and line[1:].isdigit() and may_be_block(int(line[1:]), len(key), block_bytes)


def without(blocks: Sequence[BlockTransfer], there: Sequence[bool]) -> list[BlockTransfer]:
    """Those blocks that are not there yet; the others have succeeded, with nothing moved."""
    for block, is_there in zip(blocks, there, strict=True):
        if is_there:
            block.succeed(0)
    return [block for block in blocks if not block.done]


def touching(config: ValkeyConfig) -> tuple[bytes, tuple[bytes, ...]]:
    """The command that is a use of a block, and what stands behind the key."""
    return (b"EXPIRE", (b"%d" % config.ttl_s,)) if config.ttl_s else (b"TOUCH", ())


def command(*values: bytes) -> bytes:
    return b"*%d\r\n" % len(values) + _arguments(*values)


def is_gone(error: ErrorReply) -> bool:
    """Whether the server cannot be used now."""
    return error.code in _GONE


def is_about_server(error: ErrorReply) -> bool:
    """Whether it says something of the server, and not of one block."""
    return error.code in _GONE or error.code in _REFUSED or error.code in ("MOVED", "ASK")


def refusal(reply: object) -> StoreRefusedError | StoreUnreachableError:
    """What to raise for an error that is not about one block."""
    if not isinstance(reply, ErrorReply):
        return StoreUnreachableError("the server's reply is not what it should be")
    return StoreRefusedError(f"the server says: {reply.text}")


def _arguments(*values: bytes) -> bytes:
    return b"".join(b"$%d\r\n%s\r\n" % (len(value), value) for value in values)


def _expect(reply: object, expected: str) -> None:
    if reply != expected:
        raise refusal(reply)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
