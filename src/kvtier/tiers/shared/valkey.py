"""Valkey and Redis as a store of shared blocks. Needs redis-py (the extra `valkey`).

redis-py makes the connection: addresses, TLS, logging in, choosing the database. From there on this module speaks the
protocol over its socket, for blocks go straight from and into RAM slots that way.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
from kvtier.tiers.shared.resp import PIECE_BYTES, Buffer, ErrorReply, RespStream
from kvtier.tiers.shared.store import BlockTransfer, StoreRefusedError, StoreTimeoutError, StoreUnreachableError
from kvtier.tiers.shared.valkey_config import ValkeyConfig
from kvtier.tiers.shared.values import IncomingValue, OutgoingValue, may_be_block, refuse_size

_GONE = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY")
"""Errors of a server that cannot be used now."""
_REFUSED = ("NOAUTH", "NOPERM", "WRONGPASS", "MOVED", "ASK", "CROSSSLOT")
"""Errors of a server that will not be used as it is configured."""
MAX_SKIPPED_BYTES = 64 << 20
"""A value of another size up to this is read and thrown away; for a larger one the connection is closed."""


class ValkeyStore:
    """One server. Raises ConfigurationError where redis-py is missing."""

    medium = "VALKEY"
    supports_compression = True

    def __init__(self, config: ValkeyConfig) -> None:
        try:
            import redis  # noqa: F401, PLC0415
        except ImportError:
            raise ConfigurationError(
                "a Valkey tier needs redis-py; install it with: pip install 'kvtier[valkey]'"
            ) from None
        self.config = config

    @property
    def place(self) -> str:
        return self.config.place

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Sockets take any memory."""

    def detach(self, deadline_s: float) -> bool:
        return True

    def connect(self, deadline_s: float) -> ValkeyConnection:
        import redis.exceptions as errors  # noqa: PLC0415

        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise StoreTimeoutError("there was no time left to connect")
        try:
            client = self._client(left_s)
            client.connect()
        except ConfigurationError as error:
            raise StoreRefusedError(str(error)) from None
        except (errors.AuthenticationError, errors.AuthorizationError) as error:
            raise StoreRefusedError(f"the server refuses the login: {error}") from None
        except errors.TimeoutError:
            raise StoreTimeoutError("the server did not answer in time") from None
        except errors.ResponseError as error:
            raise _refusal(ErrorReply(str(error))) from None
        except (errors.RedisError, OSError) as error:
            raise StoreUnreachableError(_one_line(error)) from None
        sock = getattr(client, "_sock", None)
        if not isinstance(sock, socket.socket):
            raise StoreRefusedError("this version of redis-py has no socket for us; known to work: 5 to 8")
        connection = ValkeyConnection(self.config, client, sock)
        try:
            connection.check_mode(deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _client(self, timeout_s: float) -> Any:
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.connection import Connection, SSLConnection  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415

        config = self.config
        settings: dict[str, Any] = {
            "host": config.host,
            "port": config.port,
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

    def check_mode(self, deadline_s: float) -> None:
        """Raises StoreRefusedError for a server that is part of a cluster."""
        self._stream.deadline_s = deadline_s
        self._stream.send([_command(b"HELLO")])
        reply = self._stream.read_reply()
        if isinstance(reply, ErrorReply):
            if reply.code in (*_GONE, *_REFUSED):
                raise _refusal(reply)
            return  # before version 6 there is no HELLO
        if isinstance(reply, list) and b"mode" in reply and reply[reply.index(b"mode") + 1] == b"cluster":
            raise StoreRefusedError("the server is part of a cluster; allowed: a single server, or one behind a proxy")

    def ping(self, deadline_s: float) -> None:
        self._stream.deadline_s = deadline_s
        self._stream.send([_command(b"PING")])
        _expect(self._stream.read_reply(), "PONG")

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        """By the sizes of the values: one that is not whole is not there."""
        lines = self._pipeline(b"STRLEN", identity, keys, (), deadline_s)
        whole = {size: b":%d" % value_bytes(size, block_bytes) for size in set(map(len, keys))}
        for line in set(lines):
            if line[:1] == b"-" and not line.startswith(b"-WRONGTYPE"):
                raise _refusal(ErrorReply(line[1:].decode(errors="replace")))
        return [
            line == whole[len(key)] or (line != b":0" and _may_be_block(line, key, block_bytes))
            for line, key in zip(lines, keys, strict=True)
        ]

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        self._stream.deadline_s = deadline_s
        names = self._names(blocks[0].identity, [block.key for block in blocks])
        self._stream.send([b"".join(_command(b"GET", name) for name in names)])
        for block in blocks:
            self._load_one(block)

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        identity = blocks[0].identity
        if not overwrite:
            keys = [block.key for block in blocks]
            there = self.lookup(identity, keys, blocks[0].buffer.nbytes, deadline_s)
            for block, is_there in zip(blocks, there, strict=True):
                if is_there:
                    block.succeed(0)
            blocks = [block for block in blocks if not block.done]
        self._stream.deadline_s = deadline_s
        names = self._names(identity, [block.key for block in blocks])
        for block, name in zip(blocks, names, strict=True):
            self._send_set(name, block)
        for block in blocks:
            reply = self._stream.read_reply()
            if reply == "OK":
                block.succeed(block.buffer.nbytes)
            elif isinstance(reply, ErrorReply) and reply.code not in (*_GONE, *_REFUSED):
                block.fail(f"the server says: {reply.text}")
            else:
                raise _refusal(reply)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        self._pipeline(b"UNLINK", identity, keys, (), deadline_s)

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        if self._config.ttl_s:
            self._pipeline(b"EXPIRE", identity, keys, (b"%d" % self._config.ttl_s,), deadline_s)
        else:
            self._pipeline(b"TOUCH", identity, keys, (), deadline_s)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.disconnect()

    # -- private ---------------------------------------------------------------------------------------------

    def _names(self, identity: Identity, keys: Sequence[OffloadKey]) -> list[bytes]:
        prefix = self._prefix + identity.path
        return [prefix + key for key in keys]

    def _pipeline(
        self, verb: bytes, identity: Identity, keys: Sequence[OffloadKey], more: Sequence[bytes], deadline_s: float
    ) -> list[bytes]:
        """The same command for every key, all sent at once; the lines of the replies, one each."""
        self._stream.deadline_s = deadline_s
        prefix = self._prefix + identity.path
        tail = b"\r\n" + _arguments(*more)
        commands = []
        # keys are of one length nearly always: what stands between two of them is the same then
        for size in dict.fromkeys(map(len, keys)):
            head = b"*%d\r\n%s$%d\r\n%s" % (2 + len(more), _arguments(verb), len(prefix) + size, prefix)
            same = [key for key in keys if len(key) == size]
            commands.append(head + (tail + head).join(same) + tail)
        self._stream.send(commands)
        lines = self._stream.read_lines(len(keys))
        if len(commands) == 1:
            return lines
        by_size = [key for size in dict.fromkeys(map(len, keys)) for key in keys if len(key) == size]
        answer = dict(zip(by_size, lines, strict=True))
        return [answer[key] for key in keys]

    def _send_set(self, name: bytes, block: BlockTransfer) -> None:
        value = OutgoingValue(block)
        before: list[Buffer] = [
            b"*%d\r\n%s$%d\r\n" % (5 if self._expiry else 3, _arguments(b"SET", name), value.num_bytes),
            value.header,
        ]
        for begin in range(0, len(value.payload), PIECE_BYTES):
            piece = value.payload[begin : begin + PIECE_BYTES]
            value.checksum.update(piece)
            self._stream.send([*before, piece])
            before = []
        self._stream.send([*before, value.checksum.value(), b"\r\n", self._expiry])

    def _load_one(self, block: BlockTransfer) -> None:
        stream = self._stream
        size = stream.read_size()
        if size is None:
            block.miss()
            return
        if isinstance(size, ErrorReply):
            if size.code in (*_GONE, *_REFUSED):
                raise _refusal(size)
            if size.code == "WRONGTYPE":
                block.reject(Rejection.MAGIC)
            else:
                block.fail(f"the server says: {size.text}")
            return
        if not may_be_block(size, len(block.key), block.buffer.nbytes):
            refuse_size(block, size)
            if size > MAX_SKIPPED_BYTES:
                raise StoreUnreachableError(f"a value has {size} bytes, and is not read")
            stream.skip(size)
        else:
            self._read_value(block, size)
        stream.end_body()

    def _read_value(self, block: BlockTransfer, size: int) -> None:
        stream = self._stream
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


def _may_be_block(line: bytes, key: OffloadKey, block_bytes: int) -> bool:
    return line[:1] == b":" and line[1:].isdigit() and may_be_block(int(line[1:]), len(key), block_bytes)


def _arguments(*values: bytes) -> bytes:
    return b"".join(b"$%d\r\n%s\r\n" % (len(value), value) for value in values)


def _command(*values: bytes) -> bytes:
    return b"*%d\r\n" % len(values) + _arguments(*values)


def _expect(reply: object, expected: str) -> None:
    if reply != expected:
        raise _refusal(reply)


def _refusal(reply: object) -> StoreRefusedError | StoreUnreachableError:
    """What to raise for an error that is not about one block."""
    if not isinstance(reply, ErrorReply):
        return StoreUnreachableError("the server's reply is not what it should be")
    if reply.code in ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN"):
        return StoreRefusedError("the server is part of a cluster; allowed: a single server, or one behind a proxy")
    return StoreRefusedError(f"the server says: {reply.text}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
