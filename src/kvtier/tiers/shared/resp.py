"""The wire protocol of Valkey and Redis (RESP2) over a connected socket, without copies of what is large.

https://valkey.io/topics/protocol/
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.tiers.shared.store import StoreTimeoutError, StoreUnreachableError

Buffer = bytes | bytearray | memoryview
BUFFER_BYTES = 16 << 10
"""Replies are read in pieces of this size; a little of what follows a header is copied, the rest is not."""
PIECE_BYTES = 256 << 10
"""Blocks are received in pieces up to this size."""
MAX_LINE_BYTES = 8 << 10
MAX_REPLY_BYTES = 1 << 20
"""Of a reply that is not a block."""

RENEW_S = 0.02
"""A call may last so much longer than its deadline."""
_TIMEVAL = struct.Struct("@ll")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What the server said instead of a result, for example `OOM command not allowed ...`."""

    text: str

    @staticmethod
    def of(line: bytes) -> ErrorReply:
        """From the whole line that came."""
        return ErrorReply(line[1:].decode(errors="replace"))

    @property
    def code(self) -> str:
        """The first word."""
        return self.text.partition(" ")[0]


Reply = int | bytes | str | list[Any] | ErrorReply | None
"""Of any kind. A list holds replies."""


class RespStream:
    """Commands out, replies in. Raises StoreTimeoutError past `deadline_s` (`time.monotonic`), StoreUnreachableError
    where the connection ends or what comes is not the protocol."""

    def __init__(self, sock: socket.socket) -> None:
        self.deadline_s = 0.0
        self._socket = sock
        # without TLS the kernel itself ends a wait; a timeout of Python's would be a poll before every call. And TLS
        # has no sendmsg.
        self._is_plain = type(sock) is socket.socket
        if self._is_plain:
            sock.settimeout(None)
        self._limited_for_s = self._limited_until_s = 0.0
        self._buffer = bytearray(BUFFER_BYTES)
        self._begin = 0
        self._end = 0

    # -- out -------------------------------------------------------------------------------------------------

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Sends all of `pieces`, in order. They are not copied (over TLS: encrypted)."""
        if not self._is_plain:
            for piece in pieces:
                self._send_piece(memoryview(piece))
            return
        views = [memoryview(piece) for piece in pieces]
        while views:
            sent = self._call(self._socket.sendmsg, views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    # -- in --------------------------------------------------------------------------------------------------

    def read_line(self) -> bytes:
        """Up to the next line end, which is left out."""
        while (found := self._buffer.find(b"\r\n", self._begin, self._end)) < 0:
            if self._end - self._begin > MAX_LINE_BYTES:
                raise StoreUnreachableError("the server's reply is not RESP: a line without an end")
            self._fill()
        line = bytes(self._buffer[self._begin : found])
        self._begin = found + 2
        return line

    def read_lines(self, count: int) -> list[bytes]:
        """The next `count` lines: replies without a body, one each. O(bytes) at C speed."""
        pieces = [bytes(self._buffer[self._begin : self._end])]
        seen = pieces[0].count(b"\n")
        self._begin = self._end = 0
        while seen < count:
            size = self._receive(memoryview(self._buffer))
            pieces.append(bytes(self._buffer[:size]))
            seen += pieces[-1].count(b"\n")
        *lines, rest = b"".join(pieces).split(b"\r\n")
        if len(lines) != count or rest:
            raise StoreUnreachableError(f"the server sent {len(lines)} replies to {count} commands")
        return lines

    def read_reply(self) -> Reply:
        """A reply that is not large. An ErrorReply is returned, not raised."""
        line = self.read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode(errors="replace")
        if kind == b"-":
            return ErrorReply.of(line)
        size = _integer(line)
        if kind == b":":
            return size
        if size < 0:
            return None
        if size > MAX_REPLY_BYTES or kind not in (b"$", b"*"):
            raise StoreUnreachableError(f"the server's reply is not RESP, or too large: {line[:40]!r}")
        if kind == b"*":
            return [self.read_reply() for _ in range(size)]
        body = bytearray(size)
        self.read_into(memoryview(body))
        self.end_body()
        return bytes(body)

    def read_size(self) -> int | ErrorReply | None:
        """The size of the body that follows (read it, and `end_body`); None: there is no such key."""
        line = self.read_line()
        if line[:1] == b"-":
            return ErrorReply.of(line)
        if line[:1] != b"$":
            raise StoreUnreachableError(f"the server's reply is not RESP: {line[:40]!r}")
        size = _integer(line)
        return None if size < 0 else size

    def read_into(self, target: memoryview, each: Callable[[memoryview], None] | None = None) -> None:
        """Fills `target` from the body, received right into it. `each` gets every piece of it as it is there."""
        done = 0
        while done < len(target):
            piece = target[done : done + PIECE_BYTES]
            if self._begin < self._end:
                piece = piece[: self._end - self._begin]
                piece[:] = self._buffer[self._begin : self._begin + len(piece)]
                self._begin += len(piece)
            else:
                piece = piece[: self._receive(piece)]
            if each is not None:
                each(piece)
            done += len(piece)

    def skip(self, size: int) -> None:
        """Reads `size` bytes of a body, and forgets them."""
        while size:
            if self._begin == self._end:
                self._fill()
            step = min(size, self._end - self._begin)
            self._begin += step
            size -= step

    def end_body(self) -> None:
        """Reads what stands after every body."""
        ending = bytearray(2)
        self.read_into(memoryview(ending))
        if ending != b"\r\n":
            raise StoreUnreachableError("the server's reply is not RESP: a body without an end")

    # -- private ---------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        if self._begin:
            left = self._buffer[self._begin : self._end]
            self._buffer[: len(left)] = left
            self._begin, self._end = 0, len(left)
        self._end += self._receive(memoryview(self._buffer)[self._end :])

    def _receive(self, target: memoryview) -> int:
        received = self._call(self._socket.recv_into, target)
        if not received:
            raise StoreUnreachableError("the server has closed the connection")
        return received

    def _send_piece(self, view: memoryview) -> None:
        while view:
            view = view[self._call(self._socket.send, view) :]

    def _call(self, call: Callable[[Any], int], argument: object) -> int:
        try:
            self._limit_waiting()
            return call(argument)
        except (TimeoutError, BlockingIOError):
            raise StoreTimeoutError("the server did not answer in time") from None
        except OSError as error:
            raise StoreUnreachableError(f"the connection broke: {error.strerror or error}") from None

    def _limit_waiting(self) -> None:
        """No call from now on waits much beyond the deadline. Renewed now and then: a call a piece would show."""
        now_s = time.monotonic()
        if now_s >= self.deadline_s:
            raise TimeoutError
        if now_s < self._limited_until_s and self.deadline_s == self._limited_for_s:
            return
        left_s = self.deadline_s - now_s
        if self._is_plain:
            left = _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6) + 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, left)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, left)
        else:
            self._socket.settimeout(left_s)
        self._limited_for_s, self._limited_until_s = self.deadline_s, now_s + RENEW_S


def _integer(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise StoreUnreachableError(f"the server's reply is not RESP: {line[:40]!r}") from None
