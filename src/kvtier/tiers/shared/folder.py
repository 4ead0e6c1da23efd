"""A folder of a shared filesystem (NFS, Lustre, JuiceFS, ...) as a store of shared blocks, a file a block.

See `shards` for what lies there. A filesystem may stall for as long as it likes, so whatever touches it runs on threads
that can be left behind (`native_calls`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import (
    CHECKSUM_BYTES,
    BlockChecksum,
    EnvelopeError,
    Identity,
    Rejection,
    check_header,
    header_of,
    value_bytes,
)
from kvtier.tiers.shared.folder_config import FolderConfig
from kvtier.tiers.shared.native_calls import CLOSE_S, CallThread, LeftCalls, Result
from kvtier.tiers.shared.shards import FolderGoneError, Shards
from kvtier.tiers.shared.store import BlockTransfer, StoreUnreachableError

MAX_LEFT_CALLS = 8
"""So many calls that hang, and what they hold, are borne; then the store is down until some of them end."""
_GONE = (errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN, errno.EBADF)
"""What a filesystem says that is not there any more."""
_NO_FILE = (FileNotFoundError, NotADirectoryError)


class FolderStore:
    """One folder."""

    medium = "FILE"
    supports_compression = False

    def __init__(self, config: FolderConfig) -> None:
        self.config = config
        self._shards = Shards(config.path, config.capacity_bytes)
        self._left = LeftCalls()

    @property
    def place(self) -> str:
        return self.config.place

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Files take any memory."""

    def detach(self, deadline_s: float) -> bool:
        while len(self._left) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return not len(self._left)

    def connect(self, deadline_s: float) -> FolderConnection:
        if len(self._left) >= MAX_LEFT_CALLS:
            raise StoreUnreachableError(f"{len(self._left)} calls into the filesystem hang")
        thread = CallThread("kvtier-folder", self._left)
        opened = _Opening(self._shards)
        try:
            root = _calling(thread, opened.open, deadline_s)
        except BaseException:
            thread.start(opened.close)  # after the call, which may have been given up
            thread.close()
            raise
        return FolderConnection(self.config, self._shards, thread, root)


class _Opening:
    """The folder's descriptor, which somebody has to close though whoever asked for it waits no longer."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._root: int | None = None

    def open(self) -> int:
        self._root = self._shards.open()
        return self._root

    def close(self) -> None:
        if self._root is not None:
            os.close(self._root)


class FolderConnection:
    """A `StoreConnection`: a thread, and a descriptor of the folder."""

    def __init__(self, config: FolderConfig, shards: Shards, thread: CallThread, root: int) -> None:
        self._config = config
        self._shards = shards
        self._thread = thread
        self._root = root

    def ping(self, deadline_s: float) -> None:
        self._call(lambda: self._shards.check(self._root), deadline_s)

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        """One question a key: filesystems have none for many."""
        return self._call(lambda: [self._is_there(identity, key, block_bytes) for key in keys], deadline_s)

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        self._each(blocks, self._load_one, deadline_s)

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        self._each(blocks, lambda block: self._store_one(block, overwrite), deadline_s)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        def remove() -> None:
            for key in keys:
                with contextlib.suppress(*_NO_FILE, IsADirectoryError, PermissionError):
                    os.unlink(self._path(identity, key), dir_fd=self._root)

        self._call(remove, deadline_s)

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        def touch() -> None:
            for key in keys:
                with contextlib.suppress(*_NO_FILE, PermissionError):
                    os.utime(self._path(identity, key), dir_fd=self._root, follow_symlinks=False)

        self._call(touch, deadline_s)

    def abort(self) -> None:
        self._thread.abort()

    def close(self) -> None:
        """The descriptor is closed on the thread, after what it may be stuck in."""
        root = self._root
        self._thread.start(lambda: os.close(root))
        self._thread.close(CLOSE_S)

    # -- private ---------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], Result], deadline_s: float) -> Result:
        return _calling(self._thread, function, deadline_s)

    def _path(self, identity: Identity, key: OffloadKey) -> str:
        return self._shards.path_of(self._root, _name(identity, key))

    def _is_there(self, identity: Identity, key: OffloadKey, block_bytes: int) -> bool:
        try:
            status = os.stat(self._path(identity, key), dir_fd=self._root, follow_symlinks=False)
        except _NO_FILE:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == value_bytes(len(key), block_bytes)

    def _each(
        self, blocks: Sequence[BlockTransfer], move: Callable[[BlockTransfer], Callable[[], None]], deadline_s: float
    ) -> None:
        """What `move` says of a block, said in it here: a call that is given up says nothing of blocks any more."""
        said: list[Callable[[], None]] = self._call(lambda: [move(block) for block in blocks], deadline_s)
        for say in said:
            say()

    def _load_one(self, block: BlockTransfer) -> Callable[[], None]:
        try:
            file = os.open(
                self._path(block.identity, block.key),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
                dir_fd=self._root,
            )
        except _NO_FILE:
            self._shards.check(self._root)
            return block.miss
        except OSError as error:
            return _failing(block, error)
        try:
            return self._read(file, block)
        except EnvelopeError as error:
            rejection = error.rejection
            return lambda: block.reject(rejection)
        except OSError as error:
            return _failing(block, error)
        finally:
            os.close(file)

    def _read(self, file: int, block: BlockTransfer) -> Callable[[], None]:
        status = os.fstat(file)
        size = value_bytes(len(block.key), block.buffer.nbytes)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise EnvelopeError(Rejection.SIZE)
        header = bytearray(size - block.buffer.nbytes - CHECKSUM_BYTES)
        stored = bytearray(CHECKSUM_BYTES)
        _move_all(os.preadv, file, [memoryview(header), block.buffer.data, memoryview(stored)])
        check_header(header, block.identity, block.key, block.buffer.nbytes)
        checksum = BlockChecksum(bytes(header))
        checksum.update(block.buffer.data)
        checksum.check(stored)
        return lambda: block.succeed(block.buffer.nbytes)

    def _store_one(self, block: BlockTransfer, overwrite: bool) -> Callable[[], None]:
        size = value_bytes(len(block.key), block.buffer.nbytes)
        try:
            if not overwrite and self._is_there(block.identity, block.key, block.buffer.nbytes):
                return lambda: block.succeed(0)
            if self._shards.free_bytes(self._root) - size < self._config.min_free_bytes:
                return lambda: block.fail(f"less than {self._config.min_free_bytes} bytes are free")
            header = header_of(block.identity, block.key, block.buffer.nbytes)
            checksum = BlockChecksum(header)
            checksum.update(block.buffer.data)
            with self._shards.writing(self._root, _name(block.identity, block.key), size) as file:
                _move_all(os.pwritev, file, [memoryview(header), block.buffer.data, memoryview(checksum.value())])
        except OSError as error:
            return _failing(block, error)
        return lambda: block.succeed(block.buffer.nbytes)


def _name(identity: Identity, key: OffloadKey) -> str:
    return identity.path.decode().replace(":", ".") + key.hex()


def _move_all(move: Callable[[int, list[memoryview], int], int], file: int, pieces: list[memoryview]) -> None:
    """Until all of it has been moved. Raises EnvelopeError where a file ends before."""
    offset = 0
    while pieces:
        moved = move(file, pieces, offset)
        if moved == 0:
            raise EnvelopeError(Rejection.SIZE)
        offset += moved
        while pieces and moved >= len(pieces[0]):
            moved -= len(pieces.pop(0))
        if moved:
            pieces[0] = pieces[0][moved:]


def _failing(block: BlockTransfer, error: OSError) -> Callable[[], None]:
    if error.errno in _GONE:
        raise error
    reason = _reason(error)
    return lambda: block.fail(reason)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _calling(thread: CallThread, function: Callable[[], Result], deadline_s: float) -> Result:
    try:
        return thread.call(function, deadline_s)
    except FolderGoneError as error:
        raise StoreUnreachableError(str(error)) from None
    except OSError as error:
        raise StoreUnreachableError(f"the filesystem says: {_reason(error)}") from None
