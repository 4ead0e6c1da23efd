"""RAM with shared tiers behind it, put together from URLs, over real Valkey servers: who finds what, and when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import ConfigurationError, CPUOffloadingManager, KVTierError
from kvtier.runtime import Identity, build_stack, parse_config
from kvtier.tiers.disk import FileEpochStore
from stack_harness import NAMESPACE, SLOT_BYTES, Process, keys_of
from valkey_harness import GIVE_UP_S, ValkeyServer, free_port

A, B, C, D = keys_of("a", 8), keys_of("b", 12), keys_of("c", 12), keys_of("d", 8)
QUICK = f"absent_s=0.05&lookup_timeout_s={GIVE_UP_S}&transfer_timeout_s={GIVE_UP_S}&queue_timeout_s={GIVE_UP_S}"
"""Nothing times out on a busy machine, and what was not there is soon asked for again."""


@pytest.fixture(scope="module")
def module_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


@pytest.fixture
def server(module_server: ValkeyServer) -> ValkeyServer:
    """Empty."""
    with module_server.client() as client:
        client.flushall()
    return module_server


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """To be killed."""
    server = ValkeyServer()
    yield server
    server.stop()


@pytest.fixture
def start() -> Iterator[Any]:
    """`start(urls..., identity=..., **settings)`: a process with these tiers."""
    processes: list[Process] = []

    def start_one(*urls: str, identity: Identity | None = None, **settings: Any) -> Process:
        processes.append(Process({"tiers": list(urls), **settings}, identity))
        return processes[-1]

    yield start_one
    for process in processes:
        process.die()


def url_of(server: ValkeyServer, options: str = "") -> str:
    return f"valkey://127.0.0.1:{server.port}?{QUICK}" + (f"&{options}" if options else "")


def num_stored(server: ValkeyServer) -> int:
    with server.client() as client:
        return int(client.dbsize())


def test_what_one_process_computes_others_find(start: Any, server: ValkeyServer) -> None:
    one = start(url_of(server))
    one.store(A)
    two = start(url_of(server))
    assert two.load(A) == len(A)
    assert two.counters("valkey")["loaded_blocks"] == len(A)
    two.store(D)
    assert one.load(D) == len(D)
    media = {(event.medium, event.removed) for event in one.stack.core.take_events()}
    assert ("VALKEY", False) in media
    one.stop()
    assert start(url_of(server)).load(A) == len(A)


def test_who_does_not_share(start: Any, server: ValkeyServer) -> None:
    start(url_of(server)).store(A)
    others = {
        "other weights": start(url_of(server), identity=Identity(bytes(32))),
        "another epoch": start(url_of(server, "epoch=1")),
        "weights that may change": start(url_of(server), identity=Identity(NAMESPACE, weights_may_change=True)),
    }
    assert {why: other.load(A) for why, other in others.items()} == dict.fromkeys(others, 0)
    for other in others.values():
        other.store(D)
    found = {why: other.load(D) for why, other in others.items()}
    assert found == dict.fromkeys(others, len(D))
    assert start(url_of(server)).load(D) == 0
    assert start(url_of(server, "epoch=1")).load(D) == len(D)


def test_data_parallel_ranks_share(start: Any, server: ValkeyServer) -> None:
    ranks = [start(url_of(server), identity=Identity(NAMESPACE, rank=rank, num_ranks=2)) for rank in (0, 1)]
    ranks[0].store(A)
    assert ranks[1].load(A) == len(A)
    assert start(url_of(server), identity=Identity(NAMESPACE, rank=2, num_ranks=4)).load(A) == len(A)


def test_after_a_reset_a_process_shares_with_nobody_and_its_next_start_shares_again(
    start: Any, server: ValkeyServer
) -> None:
    one, two = start(url_of(server)), start(url_of(server))
    one.store(A)
    for process in (one, two):
        process.stack.core.reset_cache()
        assert process.load(A) == 0, "the weights may be others now"
        process.store(D if process is one else B)
    assert two.load(D) == 0, "reset as often, with other weights perhaps"
    one.store(B)
    one.store(C)
    assert one.load(D) == len(D), "its own"
    one.stack.core.reset_cache()
    assert one.load(D) == 0
    one.stop()
    again = start(url_of(server))
    assert again.load(A) == len(A), "of the files' weights"
    assert again.load(D) == 0
    assert again.load(B) == 0


def test_an_engine_whose_weights_change_without_a_reset_keeps_them_to_itself(start: Any, server: ValkeyServer) -> None:
    trained = start(url_of(server), identity=Identity(NAMESPACE, weights_may_change=True))
    trained.store(A)
    for keys in (B, C):
        trained.store(keys)
    assert trained.load(A) == len(A)
    assert start(url_of(server)).load(A) == 0


def test_what_comes_from_afar_goes_to_the_nearer_tier_too(start: Any, own_server: ValkeyServer, tmp_path: Path) -> None:
    start(url_of(own_server)).store(A)
    disk = f"disk://{tmp_path}/kv?capacity=4MiB&min_free=0&direct=false&threads=1"
    process = start(disk, url_of(own_server))
    assert process.stack.tier_names == ["disk", "valkey"]
    assert process.load(A) == len(A)
    assert process.counters("disk")["stored_blocks"] == len(A)
    for keys in (B, C):
        process.store(keys)
    assert process.load(A) == len(A)
    assert process.counters("disk")["loaded_blocks"] == len(A)
    assert process.counters("valkey")["loaded_blocks"] == len(A)
    process.stop()
    own_server.kill()
    assert start(disk, url_of(own_server)).load(A) == len(A)


def test_every_tier_has_its_own_admission(start: Any, server: ValkeyServer, tmp_path: Path) -> None:
    disk = f"disk://{tmp_path}/kv?capacity=4MiB&min_free=0&direct=false&threads=1&admission=reuse&stop_flush_s=0"
    process = start(url_of(server), disk)
    process.store(A)
    assert process.counters("valkey")["stored_blocks"] == len(A)
    assert process.counters("disk")["stored_blocks"] == 0
    assert process.load(A[:3]) == 3
    assert process.counters("disk")["stored_blocks"] == 3
    process.stop()
    assert process.counters("disk")["stored_blocks"] == 3, "it is to write nothing at a stop"


def test_a_stop_writes_what_is_only_in_ram(start: Any, server: ValkeyServer) -> None:
    process = start(url_of(server, f"admission=reuse&stop_flush_s={GIVE_UP_S}"))
    process.store(A)
    assert num_stored(server) == 0
    process.stop()
    assert num_stored(server) == len(A)


def test_a_reset_that_the_disk_cannot_keep_closes_the_disk_alone(
    start: Any, server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(f"disk://{tmp_path}/kv?capacity=4MiB&min_free=0&direct=false&threads=1", url_of(server))
    process.store(A)

    def fail(self: object) -> int:
        raise KVTierError("no room")

    monkeypatch.setattr(FileEpochStore, "advance", fail)
    process.stack.core.reset_cache()
    disk, valkey = process.stack.tiered.tier_stats()
    assert "no room" in disk.closed_reason
    assert valkey.closed_reason == ""
    assert process.load(A) == 0
    process.store(A)
    process.until(lambda: process.counters("valkey")["stored_blocks"] == 2 * len(A))
    for keys in (B, C):
        process.store(keys)
    assert process.load(A) == len(A)


def test_two_stores_of_a_kind(start: Any, server: ValkeyServer, own_server: ValkeyServer) -> None:
    process = start(url_of(server), url_of(own_server))
    process.store(A)
    assert process.stack.tier_names == ["valkey", "valkey-2"]
    assert (num_stored(server), num_stored(own_server)) == (len(A), len(A))
    assert [name for name, _ in process.stack.breakers] == ["RAM", "VALKEY", "VALKEY-2"]
    other = start(url_of(server), url_of(own_server))
    with server.client() as client:
        client.flushall()
    assert other.load(A) == len(A)
    assert other.counters("valkey-2")["loaded_blocks"] == len(A)
    assert other.counters("valkey")["stored_blocks"] == len(A), "it is nearer, and had lost them"


def test_a_store_that_is_not_there_at_the_start(
    start: Any, own_server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.kill()
    with caplog.at_level(logging.INFO, "kvtier"):
        process = start(url_of(own_server))
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"valkey://127.0.0.1:{own_server.port}" in line
    process.store(A)
    assert process.load(A) == len(A), "from RAM"
    own_server.start()
    wait_until_up(process)
    process.store(D)
    assert start(url_of(own_server)).load(D) == len(D)


def stop_in_time(process: Process) -> None:
    stopping = threading.Thread(target=process.stop)
    stopping.start()
    stopping.join(GIVE_UP_S)
    assert not stopping.is_alive()


def test_a_stop_does_not_wait_for_a_store_that_is_not_there(start: Any, tmp_path: Path) -> None:
    disk = f"disk://{tmp_path}/kv?capacity=4MiB&min_free=0&direct=false&threads=1&admission=reuse"
    process = start(f"valkey://127.0.0.1:{free_port()}?stop_flush_s=1000", disk)
    process.store(A)
    stop_in_time(process)
    assert process.counters("disk")["stored_blocks"] == len(A)


def test_a_stop_does_not_wait_for_a_store_that_freezes_meanwhile(start: Any, own_server: ValkeyServer) -> None:
    quick = "admission=reuse&stop_flush_s=1000&lookup_timeout_s=0.2&transfer_timeout_s=0.2&connect_timeout_s=0.2"
    process = start(f"valkey://127.0.0.1:{own_server.port}?{quick}")
    process.store(A)
    own_server.freeze()
    stop_in_time(process)
    own_server.thaw()


def test_a_reset_while_the_store_is_away_holds_when_it_is_back(start: Any, own_server: ValkeyServer) -> None:
    process = start(url_of(own_server))
    own_server.kill()
    assert process.load(A) == 0
    assert process.stack.tiered.tier_stats()[0].down_reason
    process.stack.core.reset_cache()
    own_server.start()
    wait_until_up(process)
    process.store(A)
    assert num_stored(own_server) == len(A)
    assert start(url_of(own_server)).load(A) == 0


def test_an_engine_with_nothing_else_to_do_waits_for_the_answer(start: Any, server: ValkeyServer) -> None:
    process = start(url_of(server))
    assert process.stack.tiered.awaited_tiers == []
    process.driver.add_request("asks", A)
    assert process.driver.match("asks") is None
    process.stack.core.on_schedule_end()
    assert process.stack.tiered.awaited_tiers == process.stack.tiers
    process.stack.linger(GIVE_UP_S)
    process.driver.advance(process.now_s)
    assert process.driver.match("asks") == 0
    process.stack.core.on_schedule_end()
    assert process.stack.tiered.awaited_tiers == []


def test_a_store_that_dies_is_misses_until_it_is_back(start: Any, own_server: ValkeyServer) -> None:
    process = start(url_of(own_server))
    process.store(A)
    for keys in (B, C):
        process.store(keys)
    own_server.kill()
    assert process.load(A) == 0
    own_server.start()
    wait_until_up(process)
    assert process.load(A) == 0, "it has come back empty"
    process.store(A)
    assert start(url_of(own_server)).load(A) == len(A)


def wait_until_up(process: Process) -> None:
    until_s = time.monotonic() + GIVE_UP_S
    while any(stats.down_reason for stats in process.stack.tiered.tier_stats()):
        assert time.monotonic() < until_s, "the store is not found again"
        process.step()
        process.now_s += 1.0  # breakers cool down


def test_without_an_identity_there_is_no_shared_tier(own_server: ValkeyServer) -> None:
    config = parse_config({"ram": 1, "tiers": [url_of(own_server)]})
    stack = build_stack(config, np.zeros((2, SLOT_BYTES), np.uint8), None)
    assert isinstance(stack.core, CPUOffloadingManager)
    assert stack.stop()
    with own_server.client() as client:
        assert [each["name"] for each in client.client_list()] == [""]


def test_a_tier_that_is_refused_leaves_no_other_open(server: ValkeyServer, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    config = parse_config({"ram": 1, "tiers": [url_of(server), f"disk://{tmp_path}/kv?capacity=5000"]})
    with pytest.raises(ConfigurationError, match="the disk capacity is 5000 bytes"):
        build_stack(config, np.zeros((2, SLOT_BYTES), np.uint8), Identity(NAMESPACE))
    for thread in set(threading.enumerate()) - before:
        thread.join(GIVE_UP_S)
        assert not thread.is_alive(), thread.name
