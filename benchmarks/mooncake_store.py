"""The Mooncake tier beside Mooncake's own client, on a master of its own and a second process that lends the RAM.

    python benchmarks/mooncake_store.py [--block-kib 2048] [--blocks 64] [--repetitions 7] [--json FILE]

Every repetition times all variants one after the other, in random order; a ratio is of one repetition, and what is
printed are medians, ratios with their quartiles. `raw`: Mooncake's `batch_put_from` and `batch_get_into`, all blocks in
one call, no header, no checksum. `pieces`: its `batch_put_from_multi_buffers` and `batch_get_into_multi_buffers`, two
pieces a block, as the tier has them. `connection`: the tier's own connection in this thread, two blocks at a time,
headers and checksums included. `tier`: from `submit_*` to the outcome of `poll`, over the tier's threads. `lookup`:
4,096 keys in one round trip, over the tier's connection and by `batch_is_exist`.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.keys import OffloadKey, make_offload_key
from kvtier.tiers.jobs import OpenJob
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import MooncakeConfig, MooncakeStore, SharedConfig, SharedTier
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.store import BlockTransfer

NAMESPACE = b"benchmark of the Mooncake tier".ljust(32)
IDENTITY = Identity(NAMESPACE, 0)
NUM_LOOKUPS = 4096
PIECE_BYTES = 128
TIMEOUT_S = 120.0
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", "127.0.0.1:" + sys.argv[1])
print("ready", code, flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def mooncake_master(segment_bytes: int) -> Iterator[int]:
    """The port of a master to which another process lends RAM; both live as long as the block."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the benchmark needs Mooncake: pip install mooncake-transfer-engine-non-cuda")
    binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    port = free_port()
    command = [str(binary), "--rpc_address", "127.0.0.1", "--rpc_port", str(port), "--metrics_port", str(free_port())]
    with tempfile.TemporaryFile() as log:
        master = subprocess.Popen(command, stdout=log, stderr=log)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.01)
        command = [sys.executable, "-c", _OWNER, str(port), str(segment_bytes)]
        owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        try:
            assert owner.stdout is not None
            while not (line := owner.stdout.readline()).startswith(b"ready"):
                assert line, "nobody lends RAM"
            yield port
        finally:
            for process in (owner, master):
                process.kill()
                process.wait()


class Bench:
    """Blocks in a pool, a master, and every way to move them."""

    def __init__(self, port: int, num_blocks: int, block_bytes: int) -> None:
        self.pool = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        self.pieces = np.zeros((num_blocks, PIECE_BYTES), np.uint8)
        self.keys = [make_offload_key(os.urandom(32), 0) for _ in range(num_blocks)]
        self.unknown = [make_offload_key(os.urandom(32), 0) for _ in range(NUM_LOOKUPS)]
        self.names = [f"raw:{number}" for number in range(num_blocks)]
        store = MooncakeStore(MooncakeConfig("127.0.0.1", port))
        settings = SharedConfig(
            NAMESPACE,
            num_connections=2,  # Mooncake's client polls while it waits: a call costs a core
            connect_timeout_s=TIMEOUT_S,
            transfer_timeout_s=TIMEOUT_S,
            lookup_timeout_s=TIMEOUT_S,
            queue_timeout_s=TIMEOUT_S,
            max_storing_bytes=1 << 40,
        )
        self.tier = SharedTier(settings, store, MemoryEpochStore())
        self.tier.attach(self.pool)
        self.connection = store.connect(time.monotonic() + TIMEOUT_S)
        self.client = store._client
        assert self.client.register_buffer(self.pieces.ctypes.data, self.pieces.nbytes) == 0
        self._next_job = 1

    def remove(self) -> None:
        """What is there already is not stored again: before whatever stores, untimed."""
        self.client.batch_remove(self.names, True)
        self.connection.remove(IDENTITY, self.keys, time.monotonic() + TIMEOUT_S)
        self.tier.drop(self.keys)
        self.tier.flush(TIMEOUT_S)

    # -- Mooncake's own --------------------------------------------------------------------------------------

    def raw_put(self) -> None:
        pointers, sizes = [block.ctypes.data for block in self.pool], [self.pool.shape[1]] * len(self.pool)
        assert not any(self.client.batch_put_from(self.names, pointers, sizes))

    def raw_get(self) -> None:
        pointers, sizes = [block.ctypes.data for block in self.pool], [self.pool.shape[1]] * len(self.pool)
        assert min(self.client.batch_get_into(self.names, pointers, sizes)) == self.pool.shape[1]

    def pieces_put(self) -> None:
        assert not any(self.client.batch_put_from_multi_buffers(self.names, *self._pieces()))

    def pieces_get(self) -> None:
        assert min(self.client.batch_get_into_multi_buffers(self.names, *self._pieces())) > self.pool.shape[1]

    def _pieces(self) -> tuple[list[list[int]], list[list[int]]]:
        pointers = [[block.ctypes.data, piece.ctypes.data] for block, piece in zip(self.pool, self.pieces, strict=True)]
        return pointers, [[self.pool.shape[1], PIECE_BYTES]] * len(self.pool)

    # -- ours ------------------------------------------------------------------------------------------------

    def _transfers(self, is_store: bool) -> list[BlockTransfer]:
        job = OpenJob(0, is_store, self.keys)
        return [BlockTransfer(job, i, key, IDENTITY, self.pool[i]) for i, key in enumerate(self.keys)]

    def connection_put(self) -> None:
        blocks = self._transfers(True)
        for at in range(0, len(blocks), 2):
            self.connection.store(blocks[at : at + 2], False, time.monotonic() + TIMEOUT_S)
        assert all(block.success for block in blocks)

    def connection_get(self) -> None:
        blocks = self._transfers(False)
        for at in range(0, len(blocks), 2):
            self.connection.load(blocks[at : at + 2], time.monotonic() + TIMEOUT_S)
        assert all(block.success for block in blocks)

    def tier_put(self) -> None:
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

    def lookup(self) -> None:
        asked: list[OffloadKey] = self.unknown
        there = self.connection.lookup(IDENTITY, asked, self.pool.shape[1], time.monotonic() + TIMEOUT_S)
        assert not any(there)

    def raw_lookup(self) -> None:
        assert not any(self.client.batch_is_exist([key.hex() for key in self.unknown]))


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def measure(bench: Bench, repetitions: int) -> dict[str, list[float]]:
    """Seconds by variant."""
    puts = {
        "raw": bench.raw_put,
        "pieces": bench.pieces_put,
        "connection": bench.connection_put,
        "tier": bench.tier_put,
    }
    gets = {
        "raw": bench.raw_get,
        "pieces": bench.pieces_get,
        "connection": bench.connection_get,
        "tier": bench.tier_get,
    }
    lookups = {"lookup": bench.lookup, "raw lookup": bench.raw_lookup}
    seconds: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):  # the first one warms up
        for who in random.sample(list(puts), len(puts)):
            bench.remove()
            put_s = timed(puts[who])
            if who == "connection":  # the tier has not heard of what it does not store itself
                bench.remove()
                bench.tier_put()
            get_s = timed(gets[who])
            if repetition:
                seconds.setdefault(f"{who} put", []).append(put_s)
                seconds.setdefault(f"{who} get", []).append(get_s)
        for name, run in lookups.items():
            lookup_s = timed(run)
            if repetition:
                seconds.setdefault(name, []).append(lookup_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    block_bytes = options.block_kib << 10
    total = options.blocks * block_bytes
    with mooncake_master(3 * total + (64 << 20)) as port:
        bench = Bench(port, options.blocks, block_bytes)
        seconds = measure(bench, options.repetitions)
        bench.tier.close()
    print(
        f"{options.blocks} blocks of {options.block_kib} KiB, {options.repetitions} repetitions, {os.cpu_count()} cores"
    )
    for kind in ("put", "get"):
        for who in ("raw", "pieces", "connection", "tier"):
            mine = seconds[f"{who} {kind}"]
            ratios = [raw / own for raw, own in zip(seconds[f"raw {kind}"], mine, strict=True)]
            rate = total / statistics.median(mine) / 1e9
            print(f"{kind} {who:>10}: {rate:5.2f} GB/s, {spread(ratios)} of raw")
    for name in ("lookup", "raw lookup"):
        print(f"{name:>15} of {NUM_LOOKUPS} keys: {1000 * statistics.median(seconds[name]):.2f} ms")
    if options.json:
        options.json.write_text(json.dumps({"block_bytes": block_bytes, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
