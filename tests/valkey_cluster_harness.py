"""A real Valkey cluster on loopback for tests: three masters, a replica each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import redis
from redis.crc import key_slot

from kvtier.keys import OffloadKey
from kvtier.tiers.shared import ValkeyConfig
from kvtier.tiers.shared.envelope import Identity
from valkey_harness import GIVE_UP_S, NAMESPACE, ValkeyServer

PASSWORD = "secret-of-the-cluster"
PASSWORD_VARIABLE = "KVTIER_TEST_CLUSTER_PASSWORD"
NUM_MASTERS = 3
NUM_SLOTS = 16384


def wait_for(condition: Any, why: str) -> None:
    """Polls until `condition()` holds."""
    until_s = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < until_s, why
        time.sleep(0.01)


def start_node() -> ValkeyServer:
    return ValkeyServer(
        *("--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"),
        *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", "--masterauth", PASSWORD),
        password=PASSWORD,
        is_node=True,
    )


class ClusterServers:
    """Started when made; `PASSWORD_VARIABLE` has to hold `PASSWORD` for those who connect."""

    def __init__(self) -> None:
        self.nodes = [start_node() for _ in range(2 * NUM_MASTERS)]
        first, *others = self.nodes
        for number, node in enumerate(self.nodes[:NUM_MASTERS]):
            begin, end = (NUM_SLOTS * n // NUM_MASTERS for n in (number, number + 1))
            ask(node, "CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in others:
            ask(first, "CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        for master, replica in zip(self.nodes, self.nodes[NUM_MASTERS:], strict=False):
            wait_for(lambda m=master, r=replica: _replicates(r, m), "the nodes do not meet")
        self.wait_until_whole()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def config(self, **more: Any) -> ValkeyConfig:
        """Names two of the nodes."""
        return ValkeyConfig("127.0.0.1", self.nodes[0].port, password_env=PASSWORD_VARIABLE, **more)

    @property
    def seeds(self) -> tuple[tuple[str, int], ...]:
        return tuple(("127.0.0.1", node.port) for node in self.nodes)

    # -- who is who ------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[ValkeyServer]:
        return [node for node in self.nodes if node.is_running]

    @property
    def masters(self) -> list[ValkeyServer]:
        """Of those that live, in the order of `nodes`."""
        return [node for node in self.living if b"role:master" in ask(node, "INFO", "replication")]

    def owner(self, name: bytes) -> ValkeyServer:
        """By what the nodes themselves say."""
        slot = key_slot(name)
        for first, last, (_, port, *_), *_ in ask(self.masters[0], "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"slot {slot} has no owner")

    def owned(self, keys: list[OffloadKey], node: ValkeyServer, prefix: str = "kvtier:") -> list[OffloadKey]:
        return [key for key in keys if self.owner(name_of(key, prefix)) is node]

    # -- what is done with it --------------------------------------------------------------------------------

    def wait_until_whole(self) -> None:
        """Every node knows all of them, and every replica follows."""
        for node in self.nodes:
            wait_for(lambda n=node: _knows_all(n, len(self.nodes)), "the cluster does not come together")

    def flush(self) -> None:
        for master in self.masters:
            ask(master, "FLUSHALL")

    def keys(self) -> dict[bytes, int]:
        """Port of the node of each key."""
        return {name: master.port for master in self.masters for name in ask(master, "KEYS", "*")}

    @contextlib.contextmanager
    def client(self) -> Iterator[redis.RedisCluster]:
        """An ordinary client, as others use one."""
        client = redis.RedisCluster("127.0.0.1", self.living[0].port, password=PASSWORD)
        yield client
        client.close()

    def wait_for_replicas(self) -> None:
        """What was stored until now is not lost with a master."""
        for master in self.masters:
            with master.client() as client:
                client.set(f"harness:marker{{{next(_tags(self, master))}}}", b"")
                assert client.wait(1, int(1000 * GIVE_UP_S)) == 1


def name_of(key: OffloadKey, prefix: str = "kvtier:") -> bytes:
    return prefix.encode() + Identity(NAMESPACE, 0).path + key


def ask(node: ValkeyServer, *command: Any) -> Any:
    """What the node itself replies, parsed no further."""
    connection = redis.Connection(host="127.0.0.1", port=node.port, password=node.password, protocol=2)
    try:
        connection.send_command(*command)
        return connection.read_response()
    finally:
        connection.disconnect()


def _tags(cluster: ClusterServers, node: ValkeyServer) -> Iterator[int]:
    return (tag for tag in range(1000) if cluster.owner(b"%d" % tag) is node)


def _replicates(replica: ValkeyServer, master: ValkeyServer) -> bool:
    try:
        ask(replica, "CLUSTER", "REPLICATE", ask(master, "CLUSTER", "MYID"))
    except redis.ResponseError:  # it does not know the master yet
        return False
    return True


def _knows_all(node: ValkeyServer, count: int) -> bool:
    replication, info = ask(node, "INFO", "replication"), ask(node, "CLUSTER", "INFO")
    is_linked = b"role:master" in replication or b"master_link_status:up" in replication
    known = {other[1] for _, _, *nodes in ask(node, "CLUSTER", "SLOTS") for other in nodes}
    return is_linked and b"cluster_state:ok" in info and len(known) == count
