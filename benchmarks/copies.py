"""Copies between engine tensors and the pool, against one long memcpy of the same bytes by as many threads.

    python benchmarks/copies.py [--json FILE]

Every repetition times all variants one after the other, in random order; a ratio is of one repetition, and what is
printed are medians of ratios with their quartiles (1.00: as fast as memcpy; higher is better). `kernel` is the
copier alone, `worker` the whole way from `submit` to the outcome of `poll`. Blocks and slots are scattered at random.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.tiers.ram import RamPool
from kvtier.transfers.jobs import GroupCopy, TransferJob
from kvtier.transfers.kernels import CompiledCopier, Copier, PlainCopier
from kvtier.transfers.layout import PageRef, SlotLayout
from kvtier.transfers.plan import Planner
from kvtier.transfers.worker import TransferWorker

NUM_TENSORS = 8
KIB = 1024


class Case:
    """Tensors, a pool and one job over all of their blocks, for one size of fragment."""

    def __init__(self, fragment_bytes: int, total_bytes: int, private: bool) -> None:
        self.num_blocks = total_bytes // NUM_TENSORS // fragment_bytes
        self.layout = SlotLayout((fragment_bytes,) * NUM_TENSORS, 1, 1)
        self.refs = [[PageRef(i, fragment_bytes) for i in range(NUM_TENSORS)]]
        # the engine's memory and the pool in pages of the same kind
        self.engine = RamPool.create(NUM_TENSORS * self.num_blocks, fragment_bytes, private=private)
        rows = self.engine.slots().reshape(NUM_TENSORS, self.num_blocks, fragment_bytes)
        self.tensors = list(rows)
        self.pool = RamPool.create(self.num_blocks, self.layout.slot_bytes, private=private)
        self.total_bytes = NUM_TENSORS * self.num_blocks * fragment_bytes
        rng = np.random.default_rng(0)
        self.blocks, self.slots = rng.permutation(self.num_blocks), rng.permutation(self.num_blocks)

    def job(self, is_store: bool) -> TransferJob:
        return TransferJob(0, is_store, (GroupCopy(0, self.blocks, self.slots, 0),))

    def memcpy(self, is_store: bool, num_threads: int, threads: ThreadPoolExecutor) -> Callable[[], None]:
        addresses = self.pool.slots().ctypes.data, self.engine.slots().ctypes.data
        dst, src = addresses if is_store else addresses[::-1]
        share = self.total_bytes // num_threads

        def run() -> None:
            list(threads.map(lambda i: ctypes.memmove(dst + i * share, src + i * share, share), range(num_threads)))

        return run

    def kernel(
        self, copier: Copier, is_store: bool, num_threads: int, threads: ThreadPoolExecutor
    ) -> Callable[[], None]:
        fragments = Planner(self.tensors, self.refs, self.layout, 0).plan(self.job(is_store), self.pool.slots())
        pieces = fragments.cut(-(-self.total_bytes // num_threads))

        def run() -> None:
            list(threads.map(lambda piece: copier.copy(*piece), pieces))

        return run

    def worker(self, worker: TransferWorker, is_store: bool) -> Callable[[], None]:
        job = self.job(is_store)

        def run() -> None:
            worker.submit(job)
            while not (outcomes := worker.poll()):
                time.sleep(1e-3)  # as an engine's step does; polling all the time takes a fifth from the copies
            assert outcomes[0].success, outcomes[0].reason

        return run

    def close(self) -> None:
        self.tensors = []
        self.engine.close()
        self.pool.close()


def measure(variants: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of every repetition, by variant; interleaved, in random order."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for repetition in range(repetitions + 1):
        random.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            variants[name]()
            if repetition:  # the first is to warm up
                times[name].append(time.perf_counter() - begin)
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def run_case(case: Case, fragment_bytes: int, copiers: list[Copier], args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for num_threads in args.threads:
        workers = []
        variants: dict[str, Callable[[], None]] = {}
        with ThreadPoolExecutor(num_threads) as threads:
            for copier in copiers:
                worker = TransferWorker(case.tensors, case.refs, case.layout, 0, num_threads=num_threads, copier=copier)
                worker.attach(case.pool.slots())
                workers.append(worker)
                for is_store in (True, False):
                    way = "store" if is_store else "load"
                    variants[f"{way} memcpy"] = case.memcpy(is_store, num_threads, threads)
                    variants[f"{way} kernel {copier.name}"] = case.kernel(copier, is_store, num_threads, threads)
                    variants[f"{way} worker {copier.name}"] = case.worker(worker, is_store)
            times = measure(variants, args.repetitions)
        for worker in workers:
            worker.shutdown()
        for way in ("store", "load"):
            reference = times[f"{way} memcpy"]
            row: dict[str, Any] = {
                "fragment_bytes": fragment_bytes,
                "way": way,
                "threads": num_threads,
                "total_bytes": case.total_bytes,
                "memcpy_bytes_per_s": case.total_bytes / statistics.median(reference),
                "ratios": {},
            }
            for name, values in times.items():
                if name.startswith(way) and not name.endswith("memcpy"):
                    ratios = [ref / value for ref, value in zip(reference, values, strict=True)]
                    row["ratios"][name.removeprefix(f"{way} ")] = quartiles(ratios)
            results.append(row)
    return results


def print_rows(rows: list[dict[str, Any]], header: bool) -> None:
    if header:
        names = "".join(f"{name:>24}" for name in rows[0]["ratios"])
        print(f"{'fragment':>9} {'way':>6} {'threads':>7} {'memcpy GB/s':>11}{names}")
    for row in rows:
        cells = "".join(f"{f'{mid:.2f} ({low:.2f}-{high:.2f})':>24}" for low, mid, high in row["ratios"].values())
        print(
            f"{row['fragment_bytes'] // KIB:>5} KiB {row['way']:>6} {row['threads']:>7} "
            f"{row['memcpy_bytes_per_s'] / 1e9:>11.1f}{cells}",
            flush=True,
        )


def make_copiers() -> list[Copier]:
    copiers: list[Copier] = []
    begin = time.perf_counter()
    try:
        copiers.append(CompiledCopier())
        took_s = time.perf_counter() - begin
        print(f"preparing the compiled kernel (import, and compiling or its cache): {took_s:.2f} s")
    except ImportError as exc:
        print(f"without the compiled kernel: {exc}")
    return [*copiers, PlainCopier()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fragments-kib", type=int, nargs="+", default=[16, 48, 64, 128, 256, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--total-mib", type=int, default=256, help="bytes of one copy")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--pages", choices=["memfd", "private", "both"], default="both")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    copiers = make_copiers()
    everything = []
    for private in {"memfd": [False], "private": [True], "both": [False, True]}[args.pages]:
        for i, fragment_kib in enumerate(args.fragments_kib):
            case = Case(fragment_kib * KIB, args.total_mib << 20, private)
            if not i:
                print(case.pool.describe())
            rows = run_case(case, fragment_kib * KIB, copiers, args)
            case.close()
            print_rows(rows, header=not i)
            everything += [{"private": private, **row} for row in rows]
    if args.json is not None:
        args.json.write_text(json.dumps({"python": sys.version, "rows": everything}, indent=1) + "\n")


if __name__ == "__main__":
    main()
