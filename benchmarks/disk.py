"""The disk tier beside the limits of its device and vLLM's filesystem tier, in one run, on the same blocks.

    python benchmarks/disk.py --dir FOLDER [--total-mib 512] [--repetitions 5] [--json FILE]

Every repetition times all variants one after the other, in random order; a ratio is of one repetition, and what is
printed are medians, ratios with their quartiles. Everything goes past the page cache (O_DIRECT), from and to the same
RAM pool (huge pages where there are any), in jobs of 32 MiB.

`fio`: one job a thread, psync, direct=1, on a preallocated file of the same size. `preadv`: the same number of threads
of this process, each a loop of preadv or pwritev over its share of the slots, no checksums: what Python can reach.
`kvtier`: from `submit_*` to the outcome of `poll`, loads verified; `no checksum` leaves only the hashing out; `to
engine` until the copies of all blocks from their RAM slots to an engine's tensors have ended as well;
`durable` until `flush` has returned. `vllm`: the thread pool and the block I/O of its tier (its C extension where it
has one); `durable` with an fdatasync of every file. CPU seconds are of the whole process, for a GB of blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from disk_peers import JOB_BYTES, Engine, Timed, VllmTier, timed, vllm_is_here
from kvtier.keys import make_offload_key
from kvtier.tiers.disk import DiskConfig, DiskTier, FileEpochStore, operations
from kvtier.tiers.disk.layout import (
    RECORD,
    Header,
    cache_bytes,
    cache_folder,
    namespace_tag,
    seal,
    table_bytes,
)
from kvtier.tiers.ram import RamPool

KIB, MIB = 1 << 10, 1 << 20
NAMESPACE = b"benchmark of the disk tier".ljust(32)


class Case:
    """Blocks of one size in a RAM pool, and everybody who stores and loads them."""

    def __init__(self, folder: Path, block_bytes: int, total_bytes: int) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.num_blocks = total_bytes // block_bytes
        self.total_bytes = self.num_blocks * block_bytes
        self.num_threads = 4 if block_bytes >= MIB else 8
        self.pool = RamPool.create(self.num_blocks, block_bytes, private=True)
        self.slots = self.pool.slots()
        rng = np.random.default_rng(0)
        for slot in self.slots:
            slot[:] = rng.integers(0, 256, block_bytes, dtype=np.uint8)
        self.order = rng.permutation(self.num_blocks).tolist()
        self.round = 0
        self.next_job = 0
        self.keys: list[Any] = []
        self.tier = self._open_tier()
        self.plain = folder / "plain"
        self._write_plain()
        self.vllm = VllmTier(folder / "vllm", self.slots, self.order) if vllm_is_here() else None
        self.engine = Engine(self.slots)

    # kvtier

    def _open_tier(self) -> DiskTier:
        config = DiskConfig(
            (str(self.folder / "kvtier"),),
            cache_bytes(self.num_blocks, self.block_bytes),
            NAMESPACE,
            policy="lru",
            min_free_bytes=0,
            max_storing_bytes=self.total_bytes,
        )
        tier = DiskTier(config, FileEpochStore(config.epoch_path))
        tier.attach(self.slots)
        print(tier.describe())
        return tier

    def _jobs(
        self,
        submit: Callable[[int, list[Any], list[int]], Any],
        then: Callable[[int, list[int]], None] = lambda job_id, slots: None,
    ) -> None:
        per_job = max(1, JOB_BYTES // self.block_bytes)
        slots: dict[int, list[int]] = {}
        for start in range(0, self.num_blocks, per_job):
            slots[self.next_job] = self.order[start : start + per_job]
            submit(self.next_job, self.keys[start : start + per_job], slots[self.next_job])
            self.next_job += 1
        while slots:
            self.tier.wait_for_outcome(1.0)
            for outcome in self.tier.poll():
                assert outcome.success, outcome.reason
                then(outcome.job_id, slots.pop(outcome.job_id))

    def new_keys(self) -> None:
        self.round += 1
        self.keys = [make_offload_key(f"{self.round:08}-{i:08}".encode().ljust(32), 0) for i in range(self.num_blocks)]

    def kvtier_store(self, durable: bool) -> tuple[float, float]:
        self.new_keys()

        def run() -> None:
            self._jobs(self.tier.submit_store)
            assert not durable or self.tier.flush(60)

        result = timed(run)
        self.tier.flush(60)
        return result

    def kvtier_load(self, checked: bool) -> tuple[float, float]:
        whole = operations.data_checksum
        if not checked:
            places = {}
            for key in self.keys:
                (place,) = self.tier._catalog.places_of((key,))
                places[key] = self.tier._volumes[0].table.expected(place)[1]
            operations.data_checksum = lambda block, key, namespace, epoch: places[key]
        try:
            return timed(lambda: self._jobs(self.tier.submit_load))
        finally:
            operations.data_checksum = whole

    def kvtier_load_to_engine(self) -> tuple[float, float]:
        def run() -> None:
            self._jobs(self.tier.submit_load, self.engine.submit)
            self.engine.finish()

        return timed(run)

    def kvtier_store_unchecked(self) -> tuple[float, float]:
        whole = operations.data_checksum
        operations.data_checksum = lambda block, key, namespace, epoch: 0
        try:
            return self.kvtier_store(durable=False)
        finally:
            operations.data_checksum = whole
            self.kvtier_store(durable=False)  # so that what is there can be verified

    # limits

    def _write_plain(self) -> None:
        fd = os.open(self.plain, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, self.total_bytes)
        os.close(fd)
        self.loop(write=True)

    def loop(self, write: bool) -> tuple[float, float]:
        fd = os.open(self.plain, os.O_RDWR | os.O_DIRECT)
        move = os.pwritev if write else os.preadv

        def share(thread: int) -> None:
            for i in range(thread, self.num_blocks, self.num_threads):
                assert move(fd, [self.slots[self.order[i]]], i * self.block_bytes) == self.block_bytes

        with ThreadPoolExecutor(self.num_threads) as threads:
            result = timed(lambda: [None for _ in threads.map(share, range(self.num_threads))] and None)
        os.close(fd)
        return result

    def fio(self, write: bool) -> tuple[float, float]:
        size = self.total_bytes // self.num_threads // self.block_bytes * self.block_bytes
        command = [
            "fio", "--name=limit", f"--filename={self.plain}", f"--rw={'write' if write else 'read'}",
            f"--bs={self.block_bytes}", "--direct=1", "--ioengine=psync", "--thread", f"--numjobs={self.num_threads}",
            f"--size={size}", f"--offset_increment={size}", "--group_reporting",
            "--output-format=json", "--overwrite=1",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        side = job["write" if write else "read"]
        # as if it had moved all bytes at its rate
        seconds = self.total_bytes / side["bw_bytes"]
        return seconds, seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100 * self.num_threads

    def variants(self) -> dict[str, Timed]:
        found: dict[str, Timed] = {
            "write preadv": lambda: self.loop(True),
            "write kvtier": lambda: self.kvtier_store(False),
            "write kvtier durable": lambda: self.kvtier_store(True),
            "write kvtier no checksum": self.kvtier_store_unchecked,
            "read preadv": lambda: self.loop(False),
            "read kvtier": lambda: self.kvtier_load(True),
            "read kvtier to engine": self.kvtier_load_to_engine,
            "read kvtier no checksum": lambda: self.kvtier_load(False),
        }
        if shutil.which("fio"):
            found |= {"write fio": lambda: self.fio(True), "read fio": lambda: self.fio(False)}
        if self.vllm is not None:
            found |= {
                "write vllm": lambda: self.vllm.store(False),
                "write vllm durable": lambda: self.vllm.store(True),
                "read vllm": self.vllm.load,
            }
        return found

    def close(self) -> None:
        self.tier.close()
        self.engine.close()
        if self.vllm is not None:
            self.vllm.close()
        self.pool.close()
        shutil.rmtree(self.folder)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def run_case(case: Case, repetitions: int) -> list[dict[str, Any]]:
    variants = case.variants()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    case.kvtier_store(False)
    order = list(variants)
    for repetition in range(repetitions + 1):
        random.shuffle(order)
        for name in order:
            result = variants[name]()
            if repetition:  # the first is to warm up
                results[name].append(result)
    rows = []
    for name, values in results.items():
        way = name.split()[0]
        row: dict[str, Any] = {
            "block_bytes": case.block_bytes,
            "variant": name,
            "bytes_per_s": case.total_bytes / statistics.median(seconds for seconds, _ in values),
            "cpu_s_per_gb": statistics.median(cpu for _, cpu in values) / (case.total_bytes / 1e9),
            "ratios": {},
        }
        for reference in (f"{way} fio", f"{way} preadv", f"{way} kvtier", f"{way} vllm"):
            if reference in results and reference != name:
                ratios = [r[0] / v[0] for r, v in zip(results[reference], values, strict=True)]
                row["ratios"][reference.split()[1]] = quartiles(ratios)
        rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'block':>8}  {'variant':<26}{'MB/s':>7} {'CPU s/GB':>9}  times as fast as")
    for row in rows:
        ratios = "  ".join(f"{name} {m:.2f} ({a:.2f}-{b:.2f})" for name, (a, m, b) in row["ratios"].items())
        print(
            f"{row['block_bytes'] // KIB:>4} KiB  {row['variant']:<26}{row['bytes_per_s'] / 1e6:>7.0f} "
            f"{row['cpu_s_per_gb']:>9.3f}  {ratios}",
            flush=True,
        )


def index_case(folder: Path, num_entries: int, repetitions: int) -> dict[str, Any]:
    """Opening a cache of so many blocks, against listing as many files in one folder."""
    config = DiskConfig(
        (str(folder / "index"),), cache_bytes(num_entries, 4096), NAMESPACE, min_free_bytes=0, policy="lru"
    )
    epochs = FileEpochStore(config.epoch_path)
    records = np.zeros(num_entries, RECORD)
    records["state"] = 1
    records["key_bytes"] = 36
    records["key"] = [os.urandom(36).ljust(64, b"\0") for _ in range(num_entries)]
    records["epoch"] = epochs.current()
    records["namespace"] = namespace_tag(NAMESPACE)
    records["use_order"] = np.random.default_rng(0).permutation(num_entries)
    records["generation"] = np.arange(num_entries)
    seal(records, np.arange(num_entries))
    path = folder / "index" / cache_folder(NAMESPACE)
    header = Header(4096, NAMESPACE, epochs.current(), int(time.time()))
    (path / "table").write_bytes((header.pack() + records.tobytes()).ljust(table_bytes(num_entries), b"\0"))
    with open(path / "slab", "wb") as slab:
        slab.truncate(num_entries * 4096)
    files = folder / "files"
    files.mkdir()
    for name in records["key"].tolist():
        (files / name[:36].hex()).touch()
    pool = RamPool.create(1, 4096, private=True)
    opened, listed = [], []
    for _ in range(repetitions + 1):
        tier = DiskTier(config, FileEpochStore(config.epoch_path))
        begin = time.perf_counter()
        tier.attach(pool.slots())
        opened.append(time.perf_counter() - begin)
        assert tier.get_stats().ready_blocks == num_entries
        tier.close()
        begin = time.perf_counter()
        found = {entry.name: entry.stat().st_size for entry in os.scandir(files)}
        listed.append(time.perf_counter() - begin)
        assert len(found) == num_entries
    pool.close()
    result = {
        "entries": num_entries,
        "open_s": statistics.median(opened[1:]),
        "list_s": statistics.median(listed[1:]),
    }
    print(
        f"{num_entries} entries: open a cache {result['open_s'] * 1e3:.0f} ms, "
        f"list (with sizes) as many files in one folder {result['list_s'] * 1e3:.0f} ms"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the device; everything in it is removed")
    parser.add_argument("--blocks-kib", type=int, nargs="+", default=[2048, 256])
    parser.add_argument("--total-mib", type=int, default=512, help="bytes of one pass; three times as much is on disk")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    folder = args.dir / "kvtier-benchmark"
    if folder.exists():
        sys.exit(f"{folder} exists")
    if not shutil.which("fio"):
        print("fio is not installed: the loop of preadv and pwritev is the only limit here")
    rows = []
    try:
        for block_kib in args.blocks_kib:
            folder.mkdir(parents=True)
            case = Case(folder, block_kib * KIB, args.total_mib * MIB)
            print(case.pool.describe())
            case_rows = run_case(case, args.repetitions)
            case.close()
            print_rows(case_rows)
            rows += case_rows
        folder.mkdir(parents=True)
        index = index_case(folder, args.entries, args.repetitions) if args.entries else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"python": sys.version, "rows": rows, "index": index}, indent=1) + "\n")


if __name__ == "__main__":
    main()
