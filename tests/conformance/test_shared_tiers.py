"""The shipped suite, over shared tiers against real servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.testing import UnboundedTierConformance
from kvtier.tier_interfaces import Tier
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import (
    FolderConfig,
    FolderStore,
    MooncakeConfig,
    MooncakeStore,
    S3Store,
    SharedConfig,
    SharedTier,
    ValkeyConfig,
    ValkeyStore,
)
from mooncake_harness import MooncakeMaster, SegmentOwner
from s3_harness import S3Server, unique_prefix
from valkey_cluster_harness import PASSWORD, PASSWORD_VARIABLE, ClusterServers
from valkey_harness import NAMESPACE, ValkeyServer


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


class TestValkeyTier(UnboundedTierConformance):
    durable = True
    answers_at_once = False
    num_connections = 4
    ttl_s = 0
    compression = "off"

    @pytest.fixture(autouse=True)
    def _server(self, server: ValkeyServer) -> None:
        self.server = server
        self.epochs = MemoryEpochStore()
        with server.client() as client:
            client.flushall()

    def make_tier(self, capacity_blocks: int) -> Tier:
        store = ValkeyStore(ValkeyConfig("127.0.0.1", self.server.port, ttl_s=self.ttl_s))
        config = SharedConfig(NAMESPACE, num_connections=self.num_connections, compression=self.compression)
        # in one test everything is one process: equal epochs are of equal weights
        return SharedTier(config, store, self.epochs, make_salt=lambda: bytes(8))

    def advance_epoch(self) -> int:
        return self.epochs.advance()


class TestValkeyTierOddSize(TestValkeyTier):
    """Blocks of no particular size, over one connection, that expire."""

    slot_bytes = 5003
    num_connections = 1
    ttl_s = 3600


class TestValkeyTierCompressed(TestValkeyTier):
    compression = "on"

    @pytest.fixture(autouse=True)
    def _compresses(self, _server: None) -> Iterator[None]:
        yield
        with self.server.client() as client:
            sizes = {client.strlen(key) for key in client.scan_iter()}
        assert all(size < self.slot_bytes for size in sizes)


class TestValkeyTierOddSizeCompressed(TestValkeyTierCompressed, TestValkeyTierOddSize):
    """The last element of a block is not whole."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    cluster = ClusterServers()
    yield cluster
    cluster.stop()


class TestValkeyClusterTier(UnboundedTierConformance):
    durable = True
    answers_at_once = False
    prefix = "kvtier:"
    compression = "off"

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
        self.cluster = cluster
        self.epochs = MemoryEpochStore()
        cluster.flush()

    def make_tier(self, capacity_blocks: int) -> Tier:
        # a busy machine's answers take their time
        times = {"lookup_timeout_s": 10.0, "transfer_timeout_s": 10.0}
        config = SharedConfig(NAMESPACE, compression=self.compression, **times)
        store = ValkeyStore(self.cluster.config(prefix=self.prefix))
        return SharedTier(config, store, self.epochs, make_salt=lambda: bytes(8))

    def advance_epoch(self) -> int:
        return self.epochs.advance()


class TestValkeyClusterTierOneSlot(TestValkeyClusterTier):
    """Blocks of no particular size, compressed, all of them in one slot."""

    slot_bytes = 5003
    prefix = "{kvtier}:"
    compression = "on"


class TestS3Tier(UnboundedTierConformance):
    durable = True
    answers_at_once = False
    num_connections = 4
    compression = "off"

    @pytest.fixture(autouse=True)
    def _bucket(self, s3_server: S3Server) -> None:
        self.s3_config = s3_server.config(unique_prefix())
        self.epochs = MemoryEpochStore()

    def make_tier(self, capacity_blocks: int) -> Tier:
        # a busy machine's answers take their time
        settings = {"num_connections": self.num_connections, "compression": self.compression}
        config = SharedConfig(NAMESPACE, lookup_timeout_s=10.0, **settings)
        return SharedTier(config, S3Store(self.s3_config), self.epochs, make_salt=lambda: bytes(8))

    def advance_epoch(self) -> int:
        return self.epochs.advance()


class TestS3TierOddSize(TestS3Tier):
    """Blocks of no particular size, over one connection."""

    slot_bytes = 5003
    num_connections = 1


class TestS3TierCompressed(TestS3Tier):
    compression = "on"


@pytest.fixture(scope="module")
def mooncake_port() -> Iterator[int]:
    """Of a master, to which a process of its own lends RAM."""
    master = MooncakeMaster()
    owner = SegmentOwner(master)
    yield master.port
    owner.kill()
    master.stop()


class TestMooncakeTier(UnboundedTierConformance):
    durable = True
    answers_at_once = False
    num_connections = 4

    @pytest.fixture(autouse=True)
    def _master(self, mooncake_port: int) -> None:
        self.port = mooncake_port
        self.namespace = os.urandom(32)  # the store is empty for it
        self.epochs = MemoryEpochStore()

    def make_tier(self, capacity_blocks: int) -> Tier:
        return self._make_tier(MooncakeStore(MooncakeConfig("127.0.0.1", self.port)))

    def _make_tier(self, store: MooncakeStore) -> Tier:
        # a busy machine's answers take their time
        limits = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), 30.0)
        config = SharedConfig(self.namespace, num_connections=self.num_connections, **limits)
        return SharedTier(config, store, self.epochs, make_salt=lambda: bytes(8))

    def advance_epoch(self) -> int:
        return self.epochs.advance()


class _KeptClient(MooncakeStore):
    """A client takes a second to close: this one is kept, as if this were one process more."""

    def __init__(self, config: MooncakeConfig, clients: list[Any]) -> None:
        super().__init__(config)
        self._clients = clients

    def _set_up(self, address: str) -> Any:
        if not self._clients:
            self._clients.append(super()._set_up(address))
        elif self._clients[0].register_buffer(self._pool.ctypes.data, self._pool.nbytes) != 0:
            raise AssertionError("the pool cannot be registered")
        return self._clients[0]

    def _tear_down(self) -> None:
        for memory in (self._pool, *self._seals):
            assert self._client.unregister_buffer(memory.ctypes.data) == 0


class TestMooncakeTierOddSize(TestMooncakeTier):
    """Blocks of no particular size, over one connection, and a client that stays."""

    slot_bytes = 5003
    num_connections = 1

    clients: ClassVar[list[Any]] = []

    def make_tier(self, capacity_blocks: int) -> Tier:
        return self._make_tier(_KeptClient(MooncakeConfig("127.0.0.1", self.port), self.clients))


class TestFolderTier(UnboundedTierConformance):
    durable = True
    answers_at_once = False
    num_connections = 4

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "blocks"
        self.epochs = MemoryEpochStore()

    def make_tier(self, capacity_blocks: int) -> Tier:
        store = FolderStore(FolderConfig(str(self.path), 1 << 30, 0))
        # a busy machine's answers take their time
        limits = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), 30.0)
        config = SharedConfig(NAMESPACE, num_connections=self.num_connections, **limits)
        return SharedTier(config, store, self.epochs, make_salt=lambda: bytes(8))

    def advance_epoch(self) -> int:
        return self.epochs.advance()


class TestFolderTierOddSize(TestFolderTier):
    """Blocks of no particular size, over one connection."""

    slot_bytes = 5003
    num_connections = 1
