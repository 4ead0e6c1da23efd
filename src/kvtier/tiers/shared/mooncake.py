"""Mooncake Store as a store of shared blocks. Needs Mooncake's client (see docs/decisions/mooncake.md).

One client a store, shared by all of its connections: it is heavy, and safe to use from several threads. What its calls
do not promise (to return at all) their threads do: see `native_calls`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import (
    CHECKSUM_BYTES,
    MAX_KEY_BYTES,
    BlockChecksum,
    EnvelopeError,
    Identity,
    Rejection,
    check_header,
    header_of,
    value_bytes,
)
from kvtier.tiers.shared.mooncake_config import MooncakeConfig
from kvtier.tiers.shared.mooncake_master import check_master
from kvtier.tiers.shared.native_calls import CLOSE_S, CallThread, LeftCalls, NativeCall, Result
from kvtier.tiers.shared.store import BlockTransfer, StoreTimeoutError, StoreUnreachableError

PREFIX = "kvtier:"
"""What the names of all objects begin with."""
SEAL_BYTES = value_bytes(MAX_KEY_BYTES, 0)
"""Room for what stands beside a block: header and checksum."""
MAX_RUN = 8
"""Blocks moved by one call. A machine that is frozen costs `MC_TCP_STATUS_TIMEOUT_SEC` for each piece of a block, two a
block, over `MC_TCP_LANES_PER_PEER` connections at once: all calls together have to be through before `GIVES_UP_S`."""
MAX_LEFT_CALLS = 8
"""So many calls that hang, and what they hold, are borne; then the store is down until some of them end."""
GIVES_UP_S = 50.0
"""Mooncake gives a transfer up after 60 s, returns, and lets it go on. A call that failed later than this may have."""
LIMITS = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_LANES_PER_PEER": "8",
}
"""Of Mooncake's client, which knows them as environment variables alone. Those that are set already stay."""

_Move = Callable[[Sequence[BlockTransfer]], list[int]]
_IS_THERE = 1
_NO_ROOM, _NO_SEGMENT_ROOM = -10, -200
_SIZE_DIFFERS = (-600, -800)
"""Among other things: the value has another size than the buffers."""
_NOT_FOUND = -704
_MISSING = (_NOT_FOUND, -703, -710, -712)
"""Not there, not complete yet, or no replica is left."""
_MASTER_GONE = (-900, -901)


class MooncakeStore:
    """One master and its segments. Raises ConfigurationError where Mooncake's client is missing."""

    medium = "MOONCAKE"
    supports_compression = False  # its client moves RAM slots as they are

    def __init__(self, config: MooncakeConfig) -> None:
        try:
            import mooncake.store  # noqa: F401, PLC0415
        except ImportError:
            raise ConfigurationError(
                "a Mooncake tier needs Mooncake's client; install it with: pip install mooncake-transfer-engine (on "
                "machines with CUDA), or mooncake-transfer-engine-non-cuda"
            ) from None
        self.config = config
        self._left = LeftCalls()
        self._lock = threading.Lock()
        self._pool: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._client: Any = None
        self._setting_up: NativeCall[Any] | None = None
        self._tearing_down: NativeCall[None] | None = None
        self._is_detached = False
        self._seals: list[npt.NDArray[np.uint8]] = []
        """Every one that was registered."""
        self._free_seals: list[npt.NDArray[np.uint8]] = []

    @property
    def place(self) -> str:
        return self.config.place

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """The pool is registered with the client, when there is one."""
        self._pool = pool
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)

    def detach(self, deadline_s: float) -> bool:
        with self._lock:
            self._is_detached = True
            setting_up = self._setting_up
        if setting_up is not None and setting_up.wait(deadline_s):
            with contextlib.suppress(Exception):  # there is no client then
                self._take_client(setting_up)
        with self._lock:
            if self._setting_up is not None or len(self._left):
                return False
            if self._client is None:
                return True
            if self._tearing_down is None:
                self._tearing_down = self._call_apart("tears-down", self._tear_down)
            tearing_down = self._tearing_down
        if not tearing_down.wait(deadline_s):
            return False
        with self._lock:
            self._client = None
            self._pool = np.empty((0, 0), np.uint8)
        return True

    def connect(self, deadline_s: float) -> MooncakeConnection:
        if len(self._left) >= MAX_LEFT_CALLS:
            raise StoreUnreachableError(f"{len(self._left)} calls into Mooncake's client hang")
        address = check_master(self.config.host, self.config.port, deadline_s)
        client = self._set_up_client(address, deadline_s)
        with self._lock:
            seals = self._free_seals.pop() if self._free_seals else None
        connection = MooncakeConnection(self, client, CallThread("kvtier-mooncake", self._left), seals)
        try:
            connection.open(deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def take_seals(self) -> npt.NDArray[np.uint8]:
        """(MAX_RUN, SEAL_BYTES) uint8, not registered yet; kept as long as the client."""
        seals = np.zeros((MAX_RUN, SEAL_BYTES), np.uint8)
        with self._lock:
            self._seals.append(seals)
        return seals

    def give_back_seals(self, seals: npt.NDArray[np.uint8]) -> None:
        """Registered, and nothing touches them any more. For the next connection."""
        with self._lock:
            self._free_seals.append(seals)

    # -- private ---------------------------------------------------------------------------------------------

    def _set_up_client(self, address: str, deadline_s: float) -> Any:
        """The client, once it is set up; whoever comes first begins with that, and others wait for it too."""
        with self._lock:
            if self._is_detached:
                raise StoreUnreachableError("the store was detached")
            if self._client is not None:
                return self._client
            if self._setting_up is None:
                self._setting_up = self._call_apart("sets-up", lambda: self._set_up(address))
            setting_up = self._setting_up
        if not setting_up.wait(deadline_s):
            raise StoreTimeoutError("the client was not set up in time")
        return self._take_client(setting_up)

    def _take_client(self, setting_up: NativeCall[Any]) -> Any:
        """Of a call that is over. Raises what it has raised: the next one to ask begins anew."""
        with self._lock:
            if self._setting_up is setting_up:
                self._setting_up = None
            client = setting_up.result()
            if self._client is None:
                self._client = client
            return client

    def _set_up(self, address: str) -> Any:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

        config = self.config
        client = MooncakeDistributedStore()
        code = client.setup(
            config.local_host or address,
            config.metadata,
            config.segment_bytes,
            config.buffer_bytes,
            config.protocol,
            config.device,
            config.place.removeprefix("mooncake://"),
        )
        if code == 0 and (code := client.register_buffer(self._pool.ctypes.data, self._pool.nbytes)) == 0:
            return client
        client.close()
        raise StoreUnreachableError(f"Mooncake's client could not be set up: {code}")

    def _tear_down(self) -> None:
        for memory in (self._pool, *self._seals):
            self._client.unregister_buffer(memory.ctypes.data)
        self._client.close()

    def _call_apart(self, name: str, function: Any) -> NativeCall[Any]:
        thread = CallThread(f"kvtier-mooncake-{name}", self._left)
        call = thread.start(function)
        thread.close()
        return call


class MooncakeConnection:
    """A `StoreConnection`: a thread for calls into the client, and memory for what stands beside blocks.

    An object is the block, its header, and its checksum, in this order: two pieces of memory, the slot and the seal.
    """

    def __init__(
        self, store: MooncakeStore, client: Any, thread: CallThread, seals: npt.NDArray[np.uint8] | None
    ) -> None:
        self._store = store
        self._client = client
        self._thread = thread
        self._seals = seals

    def open(self, deadline_s: float) -> None:
        """Registers memory where it has to, and pings."""
        if self._seals is None:
            seals = self._store.take_seals()
            code = self._call(lambda: self._client.register_buffer(seals.ctypes.data, seals.nbytes), deadline_s)
            if code != 0:
                raise StoreUnreachableError(f"Mooncake's client registers no memory: {code}")
            self._seals = seals
        self.ping(deadline_s)

    def ping(self, deadline_s: float) -> None:
        self._exist([PREFIX], deadline_s)

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        return self._exist(_names(identity, keys), deadline_s)

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        for begin in range(0, len(blocks), MAX_RUN):
            self._load_run(blocks[begin : begin + MAX_RUN], deadline_s)

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        if overwrite:
            self.remove(blocks[0].identity, [block.key for block in blocks], deadline_s)
        for begin in range(0, len(blocks), MAX_RUN):
            self._store_run(blocks[begin : begin + MAX_RUN], deadline_s)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        names = _names(identity, keys)
        # by force: else what was looked for in the last seconds stays. Who reads it now sees that by the checksum
        _check_master_answers(self._call(lambda: self._client.batch_remove(names, True), deadline_s))

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        """To be looked for is a use."""
        self._exist(_names(identity, keys), deadline_s)

    def abort(self) -> None:
        self._thread.abort()

    def close(self) -> None:
        self._thread.close(CLOSE_S)
        seals, self._seals = self._seals, None
        if seals is not None:
            self._store.give_back_seals(seals)

    # -- private ---------------------------------------------------------------------------------------------

    def _call(
        self,
        function: Callable[[], Result],
        deadline_s: float,
        ended: Callable[[Result, float], bool] | None = None,
    ) -> Result:
        try:
            return self._thread.call(function, deadline_s, ended)
        except StoreUnreachableError as error:
            seals = self._seals
            if error.stuck is not None and seals is not None:
                self._seals = None
                error.stuck.when_ended(lambda: self._store.give_back_seals(seals))
            raise

    def _exist(self, names: list[str], deadline_s: float) -> list[bool]:
        codes: list[int] = self._call(lambda: self._client.batch_is_exist(names), deadline_s)
        _check_master_answers(codes)
        return [code == 1 for code in codes]

    def _move(self, move: _Move, blocks: Sequence[BlockTransfer], deadline_s: float) -> list[int]:
        """What `move` says of each block. One call, for a thread more is involved in each."""
        codes = self._call(lambda: move(blocks), deadline_s, _has_ended)
        if len(codes) != len(blocks):
            raise StoreUnreachableError("Mooncake's client is of no use any more")
        _check_master_answers(codes)
        return codes

    def _pieces(self, blocks: Sequence[BlockTransfer]) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Names, addresses, sizes: a slot and a seal each."""
        assert self._seals is not None
        seal, pointers, sizes = self._seals.ctypes.data, [], []
        for row, block in enumerate(blocks):
            pointers.append([block.buffer.ctypes.data, seal + row * SEAL_BYTES])
            sizes.append([block.buffer.nbytes, value_bytes(len(block.key), 0)])
        return _names(blocks[0].identity, [block.key for block in blocks]), pointers, sizes

    def _get(self, blocks: Sequence[BlockTransfer]) -> list[int]:
        """On the thread of the calls."""
        assert self._seals is not None
        self._seals[: len(blocks)] = 0
        codes: list[int] = self._client.batch_get_into_multi_buffers(*self._pieces(blocks))
        return codes

    def _put(self, blocks: Sequence[BlockTransfer]) -> list[int]:
        """On the thread of the calls. Leaves alone what is there."""
        assert self._seals is not None
        names = _names(blocks[0].identity, [block.key for block in blocks])
        codes: list[int] = self._client.batch_is_exist(names)
        missing = [block for block, code in zip(blocks, codes, strict=False) if code == 0]
        for row, block in enumerate(missing):
            header = header_of(block.identity, block.key, block.buffer.nbytes)
            checksum = BlockChecksum(header)
            checksum.update(block.buffer.data)
            seal = header + checksum.value()
            self._seals[row, : len(seal)] = np.frombuffer(seal, np.uint8)
        put = iter(self._client.batch_put_from_multi_buffers(*self._pieces(missing)) if missing else [])
        return [next(put) if code == 0 else code for code in codes]

    def _load_run(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        assert self._seals is not None
        codes = self._move(self._get, blocks, deadline_s)
        for row, (block, code) in enumerate(zip(blocks, codes, strict=True)):
            if code == value_bytes(len(block.key), block.buffer.nbytes):
                _verify(block, self._seals[row].tobytes())
            elif code >= 0:
                block.reject(Rejection.SIZE)
            elif code in _MISSING:
                block.miss()
            elif code in _SIZE_DIFFERS and self._has_another_size(block, deadline_s):
                block.reject(Rejection.SIZE)
            else:
                block.fail(_reason(code))

    def _has_another_size(self, block: BlockTransfer, deadline_s: float) -> bool:
        (name,) = _names(block.identity, [block.key])
        size = int(self._call(lambda: self._client.get_size(name), deadline_s))
        return size >= 0 and size != value_bytes(len(block.key), block.buffer.nbytes)

    def _store_run(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        codes = self._move(self._put, blocks, deadline_s)
        for block, code in zip(blocks, codes, strict=True):
            if code == _IS_THERE:
                block.succeed(0)
            elif code == 0:
                block.succeed(block.buffer.nbytes)
            else:
                block.fail(_reason(code))


def _verify(block: BlockTransfer, seal: bytes) -> None:
    """The block, in its slot, against what stands beside it."""
    size = value_bytes(len(block.key), 0)
    header, stored = seal[: size - CHECKSUM_BYTES], seal[size - CHECKSUM_BYTES : size]
    try:
        check_header(header, block.identity, block.key, block.buffer.nbytes)
        checksum = BlockChecksum(header)
        checksum.update(block.buffer.data)
        checksum.check(stored)
    except EnvelopeError as error:
        block.reject(error.rejection)
    else:
        block.succeed(block.buffer.nbytes)


def _has_ended(codes: list[int], took_s: float) -> bool:
    """Whether all transfers of a call that has returned are over."""
    return took_s < GIVES_UP_S or all(code >= 0 for code in codes)


def _check_master_answers(codes: Sequence[int]) -> None:
    if any(code in _MASTER_GONE for code in codes):
        raise StoreUnreachableError("the master does not answer")


def _reason(code: int) -> str:
    if code in (_NO_ROOM, _NO_SEGMENT_ROOM):
        return "no segment has room"
    return f"Mooncake's client says {code}"


def _names(identity: Identity, keys: Sequence[OffloadKey]) -> list[str]:
    prefix = PREFIX + identity.path.decode()
    return [prefix + key.hex() for key in keys]
