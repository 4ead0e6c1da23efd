"""Buckets of S3, and of what speaks S3, as a store of shared blocks. Needs obstore (the extra `s3`).

An object a block. obstore's calls are awaited on a loop of the connection's own, so that each of them can be given up
at its deadline, and broken off from another thread; its own retries are off. It gets to see no RAM slot: what it
still holds after a call was given up is memory of this module.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.own_loop import OwnLoop, each, on_a_thread
from kvtier.tiers.shared.s3_config import S3Config
from kvtier.tiers.shared.s3_errors import DeniedError, ExistsError, MissingError, ServerError, meaning_of
from kvtier.tiers.shared.store import BlockTransfer, StoreRefusedError, StoreTimeoutError, StoreUnreachableError
from kvtier.tiers.shared.values import OutgoingValue, may_be_block, refuse_size
from kvtier.tiers.shared.whole_values import seal, unseal
from kvtier.transfers.affinity import use_every_core_of_this_process

T = TypeVar("T")
PARALLEL_LOOKUPS = 64
"""HEAD requests of one connection at a time."""
PARALLEL_BLOCKS = 16
"""GET or PUT requests of one connection at a time."""
LOOKUP_SHARE = 0.7
"""No look-up begins after this share of its time: an answer that comes too late is of no use to anybody."""
LAST_RESORT_S = 60.0
"""obstore's own limit on a request, which should never be what ends one."""
IDLE_S = 15.0
"""Connections that were not used for so long are closed: many servers do it after 20 s."""
NO_BLOCK = "v1/ping"
"""An object that is never there."""


class S3Store:
    """One bucket. Raises ConfigurationError where obstore is missing."""

    medium = "S3"
    supports_compression = True

    def __init__(self, config: S3Config) -> None:
        try:
            import obstore  # noqa: F401, PLC0415
        except ImportError:
            raise ConfigurationError("an S3 tier needs obstore; install it with: pip install 'kvtier[s3]'") from None
        self.config = config
        self._state = _State()

    @property
    def place(self) -> str:
        return self.config.place

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Values come and go in buffers of their own."""

    def detach(self, deadline_s: float) -> bool:
        return True

    def connect(self, deadline_s: float) -> S3Connection:
        """Asks the server nothing if it has answered to another connection, and failed none since: what then runs over
        this one can be broken off, connecting cannot."""
        if deadline_s <= time.monotonic():
            raise StoreTimeoutError("there was no time left to connect")

        def connect() -> S3Connection:
            use_every_core_of_this_process()  # obstore's threads, which the first of its calls makes, inherit this
            connection = S3Connection(self.config, self._client(deadline_s - time.monotonic()), self._state)
            try:
                if not self._state.is_up:
                    connection.ping(deadline_s)
            except BaseException:
                connection.close()
                raise
            return connection

        try:
            return on_a_thread(connect)
        except ConfigurationError as error:
            raise StoreRefusedError(str(error)) from None
        except StoreTimeoutError as error:
            if self.config.names_credentials or os.environ.get("AWS_ACCESS_KEY_ID"):
                raise
            raise StoreTimeoutError(f"{error}; for want of credentials a role of this machine was asked for") from None

    def _client(self, left_s: float) -> Any:
        import obstore.exceptions as errors  # noqa: PLC0415
        import obstore.store  # noqa: PLC0415

        config = self.config
        settings: dict[str, Any] = {"unsigned_payload": True}  # the envelope has a checksum
        if config.region:
            settings["region"] = config.region
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=LAST_RESORT_S),
            "connect_timeout": timedelta(seconds=max(left_s, 0.001)),
            "pool_idle_timeout": timedelta(seconds=IDLE_S),
        }
        if config.endpoint:
            # the second is what the environment's AWS_ENDPOINT_URL_S3 would win with
            settings["endpoint"] = settings["aws_endpoint_url_s3"] = config.endpoint
            client["allow_http"] = config.endpoint.startswith("http:")
        if certificates := config.certificates():
            client["root_certificate"] = certificates
        try:
            return obstore.store.S3Store(
                config.bucket,
                prefix=config.prefix,
                config=settings,
                client_options=client,
                retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
                credential_provider=_provider(config),
            )
        except (errors.BaseError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigurationError(f"obstore does not take these settings: {reason}") from None


def _provider(config: S3Config) -> Callable[[], dict[str, Any]] | None:
    """Credentials as settings would be mixed with a session token of the environment's."""
    credentials = config.credentials()
    if credentials is None:
        return None
    signed_with = {
        "access_key_id": credentials.access_key,
        "secret_access_key": credentials.secret_key,
        "token": credentials.session_token,
        "expires_at": None,
    }
    return lambda: signed_with


@dataclass(slots=True)
class _State:
    """What the connections of a store know together."""

    is_up: bool = False
    """It has answered, and failed no connection since."""
    can_create: bool = True
    """It knows how to put what is absent only."""


class S3Connection:
    """A `StoreConnection`. `client` is an `obstore.store.S3Store` that sees nothing outside the prefix."""

    def __init__(self, config: S3Config, client: Any, state: _State) -> None:
        self._config = config
        self._state = state
        self._client = client
        self._loop = OwnLoop()
        self._spare: list[npt.NDArray[np.uint8]] = []
        """Values to be filled again, all of one size."""

    def ping(self, deadline_s: float) -> None:
        async def ping() -> None:
            # not HEAD, whose replies do not say why
            with contextlib.suppress(MissingError):
                await self._call(self._client.get_async, NO_BLOCK)

        self._run(ping, deadline_s)

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        """By the sizes of the objects: one that is not whole is not there. Those that there was no time to ask for, and
        those that the server is too busy for, are not there either, if it has answered at all."""
        found: dict[OffloadKey, bool] = {}
        begun_s = time.monotonic()
        last_s = begun_s + LOOKUP_SHARE * (deadline_s - begun_s)
        failure: Exception = StoreTimeoutError("the server did not answer in time")

        async def ask(key: OffloadKey) -> None:
            nonlocal failure
            if found and time.monotonic() > last_s:
                return
            try:
                size = await self._size(_name(identity, key))
                found[key] = size is not None and may_be_block(size, len(key), block_bytes)
            except ServerError as error:
                failure = StoreUnreachableError(str(error))

        try:
            self._run(lambda: each(ask, keys, PARALLEL_LOOKUPS), deadline_s)
        except StoreTimeoutError as error:
            failure = error
        if not found:
            raise failure
        return [found.get(key, False) for key in keys]

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        self._run(lambda: each(self._load_one, blocks, PARALLEL_BLOCKS), deadline_s)

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        self._run(lambda: each(lambda block: self._store_one(block, overwrite), blocks, PARALLEL_BLOCKS), deadline_s)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        names = [_name(identity, key) for key in keys]

        async def remove() -> None:
            with contextlib.suppress(MissingError):
                await self._call(self._client.delete_async, names)

        self._run(remove, deadline_s)

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        """S3 has no such thing: its lifecycle rules go by when an object was written."""

    def abort(self) -> None:
        self._loop.abort()

    def close(self) -> None:
        self._loop.close()

    # -- private ---------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]], deadline_s: float) -> None:
        """As a connection's methods have to raise."""
        try:
            self._loop.run(work, deadline_s)
        except BaseException as error:
            self._state.is_up = False
            if isinstance(error, ServerError):
                raise StoreUnreachableError(str(error)) from None
            raise
        self._state.is_up = True

    async def _call(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any) -> T:
        """A call of obstore's. Raises what its errors mean."""
        import obstore.exceptions as errors  # noqa: PLC0415

        try:
            return await call(*arguments, **options)
        except (FileNotFoundError, errors.BaseError) as error:
            raise meaning_of(error, self._config.bucket) from None

    async def _size(self, name: str) -> int | None:
        """Bytes of an object; None: there is none."""
        try:
            meta: Any = await self._call(self._client.head_async, name)
        except MissingError:
            return None
        return int(meta["size"])

    async def _load_one(self, block: BlockTransfer) -> None:
        try:
            reply: Any = await self._call(self._client.get_async, _name(block.identity, block.key))
            if not _may_be(block, size := int(reply.meta["size"])):
                refuse_size(block, size)  # and is not read
                return
            value = await self._call(reply.bytes_async)
        except MissingError:
            block.miss()
        except ServerError as error:
            block.fail(str(error))
        else:
            unseal(np.frombuffer(value, np.uint8), block)

    async def _store_one(self, block: BlockTransfer, overwrite: bool) -> None:
        name = _name(block.identity, block.key)
        try:
            size = None if overwrite else await self._size(name)
            if _may_be(block, size):
                block.succeed(0)
                return
            await self._put(name, block, is_new=size is None and not overwrite)
        except (DeniedError, ServerError) as error:  # whoever may only read goes on reading
            block.fail(str(error))
        except ExistsError:
            if _may_be(block, await self._size(name)):
                block.succeed(0)
            else:
                block.fail("another engine is storing it")
        else:
            block.succeed(block.buffer.nbytes)

    async def _put(self, name: str, block: BlockTransfer, is_new: bool) -> None:
        outgoing = OutgoingValue(block)
        size = outgoing.num_bytes
        if self._spare and self._spare[-1].nbytes != size:
            self._spare.clear()
        value = self._spare.pop() if self._spare else np.empty(size, np.uint8)
        seal(outgoing, value)
        if is_new and self._state.can_create:
            try:
                await self._call(self._client.put_async, name, value.data, mode="create", use_multipart=False)
            except ServerError as error:
                if error.reply.status != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                self._state.can_create = is_new = False
        if not (is_new and self._state.can_create):
            await self._call(self._client.put_async, name, value.data, mode="overwrite", use_multipart=False)
        self._spare.append(value)  # not after an error: obstore may be sending it still


def _name(identity: Identity, key: OffloadKey) -> str:
    """`v1/NAMESPACE/EPOCH-SALT/KEY`, for lifecycle rules to go by; the header is what counts."""
    return identity.path.decode().replace(":", "/") + key.hex()


def _may_be(block: BlockTransfer, size: int | None) -> bool:
    """Whether an object of `size` bytes, None where there is none, may be that of the block."""
    return size is not None and may_be_block(size, len(block.key), block.buffer.nbytes)
