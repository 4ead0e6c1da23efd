"""Valkey and Redis as a store of shared blocks: a server, or a cluster. Needs redis-py (the extra `valkey`)."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared.store import StoreConnection, StoreRefusedError, StoreUnreachableError
from kvtier.tiers.shared.valkey_cluster import ValkeyCluster
from kvtier.tiers.shared.valkey_config import Address, ValkeyConfig, shown
from kvtier.tiers.shared.valkey_node import ValkeyConnection, connect_node


class ValkeyStore:
    """One server, or a cluster: which, the server says. Raises ConfigurationError where redis-py is missing."""

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
        self._cluster: ValkeyCluster | None = None
        """Once it is known to be one."""
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        return self.config.place

    def attach(self, pool: npt.NDArray[np.uint8]) -> None:
        """Sockets take any memory."""

    def detach(self, deadline_s: float) -> bool:
        return True

    def connect(self, deadline_s: float) -> StoreConnection:
        if self._cluster is not None:
            return self._cluster.connect(deadline_s)
        address, connection = self._connect_first(deadline_s)
        if not connection.is_clustered:
            if self.config.more_addresses:
                connection.close()
                raise StoreRefusedError(
                    f"{shown(address)} is no part of a cluster; allowed: one server, or nodes of one cluster"
                )
            return connection
        with self._lock:
            if self._cluster is None:
                self._cluster = ValkeyCluster(self.config)
        return self._cluster.connect(deadline_s, (address, connection))

    def _connect_first(self, deadline_s: float) -> tuple[Address, ValkeyConnection]:
        """To the first of the addresses at which there is somebody."""
        addresses = self.config.addresses
        for left, address in zip(range(len(addresses), 1, -1), addresses, strict=False):
            now_s = time.monotonic()
            try:
                return address, connect_node(self.config, address, now_s + (deadline_s - now_s) / left)
            except (StoreUnreachableError, StoreRefusedError):
                continue
        return addresses[-1], connect_node(self.config, addresses[-1], deadline_s)
