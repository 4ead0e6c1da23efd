"""A real cluster that loses masters and moves slots: no wrong byte, no waiting for ever, hits again by itself.

Where a node never answers, that a test ends at all shows that the operation was given up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest
from redis.crc import key_slot

from kvtier.keys import OffloadKey
from kvtier.testing import TierDriver, make_keys
from kvtier.tiers.shared import SharedTier, ValkeyConfig
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.resp import RespStream
from kvtier.tiers.shared.store import StoreConnection
from valkey_cluster_harness import PASSWORD, PASSWORD_VARIABLE, ClusterServers, ask, name_of, wait_for
from valkey_harness import NAMESPACE, ValkeyServer, drive, make_tier_of, wait_until

SLOT_BYTES = 64 << 10
BIG_BYTES = 16 << 20
"""More than the sockets of a connection hold."""
TIMES = ("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s", "queue_timeout_s")
PATIENT = dict.fromkeys(TIMES, 30.0)
"""Where nothing stalls: this machine may be busy."""
QUICK = {**dict.fromkeys(TIMES, 3.0), "absent_s": 0.1, "present_s": 0.2}


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[ClusterServers]:
    cluster = ClusterServers()
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(shared_cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterServers]:
    """Whole and empty; whoever was killed is there again afterwards."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    shared_cluster.flush()
    yield shared_cluster
    for node in shared_cluster.nodes:
        node.thaw()
        if not node.is_running:
            node.start()
    shared_cluster.wait_until_whole()


def open_driver(
    cluster: ClusterServers, settings: dict[str, float] = PATIENT, slot_bytes: int = SLOT_BYTES, **config: object
) -> TierDriver:
    return drive(make_tier_of(cluster.config(**config), dict(settings)), 64, slot_bytes)


def tier_of(driver: TierDriver) -> SharedTier:
    assert isinstance(driver.tier, SharedTier)
    return driver.tier


def check_loads(driver: TierDriver, keys: list[OffloadKey]) -> list[bool]:
    """Loads; what succeeded has the right bytes."""
    outcome = driver.load(keys)
    for slot, (key, success) in enumerate(zip(keys, outcome.succeeded, strict=True)):
        assert not success or driver.loaded_version(key, slot) == 0
    return list(outcome.succeeded)


def store_all(driver: TierDriver, keys: list[OffloadKey]) -> None:
    outcome = driver.store(keys)
    assert outcome is not None
    assert outcome.success, outcome.reason


# -- a cluster in which nothing happens ------------------------------------------------------------------------


def test_every_block_lies_where_an_ordinary_client_finds_it(cluster: ClusterServers) -> None:
    with cluster.client() as client:
        client.set("somebody's", "own")
        driver = open_driver(cluster)
        keys = make_keys(60)
        store_all(driver, keys)
        assert driver.ready(keys) == keys
        assert check_loads(driver, keys) == [True] * 60
        placed = cluster.keys()
        assert placed.keys() == {b"somebody's", *map(name_of, keys)}
        assert set(placed.values()) == {master.port for master in cluster.masters}, "all of them have some"
        for slot, key in enumerate(keys):
            value = client.get(name_of(key))
            assert driver.pool[slot].tobytes() in value
        driver.tier.touch(keys)
        driver.tier.drop(keys[:30])
        assert driver.tier.flush(10.0)
        assert cluster.keys().keys() == {b"somebody's", *map(name_of, keys[30:])}
        assert client.get("somebody's") == b"own"
        driver.close()


def test_a_hash_tag_keeps_all_blocks_on_one_node(cluster: ClusterServers) -> None:
    driver = open_driver(cluster, prefix="{team-a}:")
    keys = make_keys(20)
    store_all(driver, keys)
    assert check_loads(driver, keys) == [True] * 20
    assert set(cluster.keys().values()) == {cluster.owner(b"team-a").port}
    driver.close()


def test_keys_of_two_lengths_are_told_apart(cluster: ClusterServers) -> None:
    driver = open_driver(cluster)
    keys = [key + b"longer" if number % 3 else key for number, key in enumerate(make_keys(30))]
    store_all(driver, keys[:20])
    check_all_there(driver, keys[:20], keys[20:])
    driver.close()


def test_a_use_counts_at_the_node_that_has_the_block(cluster: ClusterServers) -> None:
    driver = open_driver(cluster, ttl_s=3600)
    keys = make_keys(20)
    store_all(driver, keys)
    with cluster.client() as client:
        for key in keys:
            client.expire(name_of(key), 100)
        driver.tier.touch(keys)
        wait_until(driver, lambda: all(client.ttl(name_of(key)) > 100 for key in keys), "a use does not count")
    driver.close()


def test_any_node_that_is_there_will_do(cluster: ClusterServers) -> None:
    nobody = ("127.0.0.1", 1)
    for seed in cluster.seeds[2:4]:  # a master and a replica
        config = ValkeyConfig(*nobody, password_env=PASSWORD_VARIABLE, more_addresses=(seed, nobody))
        driver = drive(make_tier_of(config, dict(PATIENT)), 32, SLOT_BYTES)
        assert not tier_of(driver).down_reason
        store_all(driver, make_keys(10, str(seed)))
        driver.close()


def test_several_servers_that_are_no_cluster_are_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    servers = [ValkeyServer(), ValkeyServer()]
    config = ValkeyConfig("127.0.0.1", servers[0].port, more_addresses=(("127.0.0.1", servers[1].port),))
    driver = drive(make_tier_of(config), 32, SLOT_BYTES)
    assert "no part of a cluster" in tier_of(driver).down_reason
    assert driver.ready(make_keys(2)) == []
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    driver.close()
    for server in servers:
        server.stop()


def test_a_cluster_without_slots_is_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = ValkeyServer(is_node=True)
    driver = drive(make_tier_of(ValkeyConfig("127.0.0.1", server.port)), 32, SLOT_BYTES)
    assert "no slot has an owner" in tier_of(driver).down_reason
    assert driver.ready(make_keys(2)) == []
    assert driver.submit_store(make_keys(2)) == 0
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    driver.close()
    server.stop()


def test_connections_that_a_node_has_closed_cost_nothing(
    cluster: ClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    driver = open_driver(cluster, {**PATIENT, "num_connections": 1})
    keys = make_keys(20)
    store_all(driver, keys)
    for node in cluster.nodes:
        ask(node, "CLIENT", "KILL", "TYPE", "normal")
    assert check_loads(driver, keys) == [True] * 20
    for node in cluster.nodes:
        ask(node, "CLIENT", "KILL", "TYPE", "normal")
    assert driver.ready(make_keys(20, "unknown")) == []
    assert not tier_of(driver).down_reason
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    driver.close()


@pytest.mark.slow
def test_slots_without_an_owner_are_misses_until_they_have_one(caplog: pytest.LogCaptureFixture) -> None:
    """And with them all others, where the cluster is set to refuse everything then, as it is unless told otherwise."""
    node = ValkeyServer(is_node=True)
    ask(node, "CLUSTER", "ADDSLOTSRANGE", 0, 8000)
    driver = drive(make_tier_of(ValkeyConfig("127.0.0.1", node.port), dict(QUICK)), 32, SLOT_BYTES)
    keys = make_keys(20)
    assert driver.ready(keys) == []
    outcome = driver.store(keys)
    assert outcome is not None
    assert not any(outcome.succeeded)
    with node.client() as client:
        errors = client.info("errorstats")
        assert errors["errorstat_CLUSTERDOWN"]["count"]
    assert not tier_of(driver).down_reason
    ask(node, "CLUSTER", "ADDSLOTSRANGE", 8001, 16383)
    wait_until(driver, lambda: all(driver.store(keys).succeeded), "new owners are not noticed")
    assert check_loads(driver, keys) == [True] * 20
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "nobody is away"
    driver.close()
    node.stop()


# -- slots move ------------------------------------------------------------------------------------------------


def test_a_slot_that_moves_is_followed(cluster: ClusterServers) -> None:
    """Some blocks of it are at the old node still, some at the new one; those unknown to the old are asked there."""
    driver = open_driver(cluster, QUICK, prefix="{moves}:")
    keys, more, unknown = make_keys(20), make_keys(6, "more"), make_keys(40, "unknown")
    store_all(driver, keys)
    slot = key_slot(b"moves")
    source = cluster.owner(b"moves")
    target = next(master for master in cluster.masters if master is not source)
    source_id, target_id = (ask(node, "CLUSTER", "MYID") for node in (source, target))
    ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    moving = [name_of(key, "{moves}:") for key in keys[:10]]
    assert ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *moving) == b"OK"
    check_all_there(driver, keys, unknown)
    store_all(driver, more)
    assert all(cluster.keys()[name_of(key, "{moves}:")] == target.port for key in more), "not at the old one"
    check_all_there(driver, [*keys, *more], unknown)
    assert b"errorstat_ASK" in ask(source, "INFO", "errorstats")
    left = [name_of(key, "{moves}:") for key in keys[10:]]
    ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *left)
    for node in (target, source):
        ask(node, "CLUSTER", "SETSLOT", slot, "NODE", target_id)
    wait_for(lambda: all(_owner_by(node, slot) == target.port for node in cluster.nodes), "the move does not get round")
    check_all_there(driver, [*keys, *more], unknown)
    assert b"errorstat_MOVED" in ask(source, "INFO", "errorstats"), "nobody was sent on"
    ask(source, "CONFIG", "RESETSTAT")
    check_all_there(driver, [*keys, *more], unknown)
    assert b"errorstat_MOVED" not in ask(source, "INFO", "errorstats"), "it does not learn from being sent on"
    driver.tier.drop([*keys, *more])
    assert driver.tier.flush(10.0)
    assert cluster.keys() == {}
    driver.close()


def _owner_by(node: ValkeyServer, slot: int) -> int:
    """The port of the owner by what this node believes."""
    ranges = ask(node, "CLUSTER", "SLOTS")
    return next(int(owner[1]) for first, last, owner, *_ in ranges if first <= slot <= last)


def check_all_there(driver: TierDriver, keys: list[OffloadKey], unknown: list[OffloadKey]) -> None:
    """Asked for anew: what is believed is forgotten."""
    tier_of(driver)._book.doubt_everything(0.0)
    assert driver.ready([*keys, *unknown]) == keys
    assert check_loads(driver, keys) == [True] * len(keys)


# -- masters are lost ------------------------------------------------------------------------------------------


def split_by_victim(cluster: ClusterServers, keys: list[OffloadKey]) -> tuple[ValkeyServer, list[OffloadKey]]:
    """A master to be lost, and which of `keys` it has."""
    victim = cluster.masters[1]
    return victim, cluster.owned(keys, victim)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["killed", "frozen"])
def test_a_lost_master_costs_its_slots_until_its_replica_takes_over(
    cluster: ClusterServers, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    with caplog.at_level(logging.DEBUG):
        driver = open_driver(cluster, QUICK)
        keys, more = make_keys(30), make_keys(40, "more")
        store_all(driver, keys)
        cluster.wait_for_replicas()
        victim, lost = split_by_victim(cluster, keys)
        kept = [key for key in keys if key not in lost]
        lost_more = cluster.owned(more, victim)
        kept_more = [key for key in more if key not in lost_more]
        assert lost
        assert len(lost_more) > 3
        if loss == "killed":
            victim.kill()
        else:
            victim.freeze()
        successes = dict(zip(keys, check_loads(driver, keys), strict=True))
        assert successes == {key: key in kept for key in keys}
        wait_until(driver, lambda: driver.ready(kept) == kept, "the others are not served")
        rounds = 0
        while driver.ready(keys) != keys:
            assert check_loads(driver, kept) == [True] * len(kept), "the others are served all the while"
            assert not tier_of(driver).down_reason
            driver.store(lost_more)
            store_all(driver, [kept_more[rounds % 10]])  # however many of the others failed in a row
            driver.tier.drop([kept_more[rounds % 10]])
            driver.tier.check_invariants()
            rounds += 1
        assert check_loads(driver, lost) == [True] * len(lost)
        store_all(driver, make_keys(30, "afterwards"))
        assert rounds, "nothing was ever lost"
        driver.close()
    about = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert len(about) == 1
    assert f"node 127.0.0.1:{victim.port}" in about[0]
    assert PASSWORD not in caplog.text + repr(driver.tier) + str(driver.tier.get_stats()) + repr(cluster.config())


@pytest.mark.slow
def test_a_master_killed_in_mid_block(cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first piece of a block has come, while the rest is more than all sockets hold."""
    driver = drive(make_tier_of(cluster.config(), {**QUICK, "num_connections": 1}), 4, BIG_BYTES)
    candidates = make_keys(40)
    victim, owned = split_by_victim(cluster, candidates)
    keys = [owned[0], *[key for key in candidates if key not in owned][:2]]
    store_all(driver, keys)
    cluster.wait_for_replicas()
    connection = tier_of(driver)._store.connect(time.monotonic() + 30.0)

    def look_up(connection: StoreConnection, keys: list[OffloadKey]) -> list[bool]:
        return connection.lookup(Identity(NAMESPACE, 0), keys, BIG_BYTES, time.monotonic() + 30.0)

    assert all(look_up(connection, keys))
    received: list[int] = []

    def read_into(stream: RespStream, target: memoryview, each: Callable[[memoryview], None] | None = None) -> None:
        def note(piece: memoryview) -> None:
            if stream._socket.getpeername()[1] == victim.port and not received:
                victim.kill()
            received.append(len(piece))
            assert each is not None
            each(piece)

        original(stream, target, note if each is not None else None)

    original = RespStream.read_into
    monkeypatch.setattr(RespStream, "read_into", read_into)
    assert check_loads(driver, keys) == [False, True, True]
    assert 2 * BIG_BYTES < sum(received) < 3 * BIG_BYTES, "it was no partial block"
    monkeypatch.undo()
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    wait_for(lambda: all(look_up(connection, keys)), "who asks for all of them at once never hears of the new master")
    wait_until(driver, lambda: driver.ready(keys) == keys, "it does not come back")
    assert check_loads(driver, keys) == [True] * 3
    connection.close()
    driver.close()


@pytest.mark.slow
def test_down_is_where_nobody_is_left(cluster: ClusterServers, caplog: pytest.LogCaptureFixture) -> None:
    driver = open_driver(cluster, {**QUICK, "num_connections": 1})
    keys = make_keys(20)
    check_all_there(driver, [], keys)
    store_all(driver, keys)
    for node in cluster.nodes:
        node.kill()
    assert check_loads(driver, keys) == [False] * 20
    wait_until(driver, lambda: tier_of(driver).down_reason, "the tier does not notice")
    assert driver.submit_store(keys) == 0
    for node in cluster.nodes:
        node.start()
    wait_until(driver, lambda: driver.store(keys) and driver.ready(keys) == keys, "it does not come back")
    assert check_loads(driver, keys) == [True] * 20
    driver.close()


@pytest.mark.slow
def test_closes_while_a_master_is_frozen(cluster: ClusterServers) -> None:
    driver = open_driver(cluster, {**PATIENT, "transfer_timeout_s": 1000.0, "num_connections": 1})
    keys = make_keys(30)
    victim, lost = split_by_victim(cluster, keys)
    keys = [key for key in keys if key not in lost] + lost
    store_all(driver, keys)
    victim.freeze()
    driver.submit_load(keys)
    last = len(keys) - len(lost) - 1
    wait_until(driver, lambda: driver.loaded_version(keys[last], last) == 0, "the others' blocks do not come")
    assert driver.tier.close(), "nothing may keep the pool mapped: what runs is broken off"
    driver.finish_all()
    assert not driver.tier.get_stats().loading_blocks
