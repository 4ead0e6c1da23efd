#!/usr/bin/env python3
"""Time to first token of prompts that another engine has computed: loaded from a shared tier, beside computing them.

  benchmarks/shared_ttft.py [MODEL] [--stores valkey,s3,mooncake] [--tier NAME=URL ...] [--lengths 2010,4010]
                            [--rounds 5] [--json out.json]

--stores are servers of its own on loopback, --tier names one that is there. One engine with all tiers computes every
prompt and stops when the stores have them. Then a fresh engine for each tier, with nothing but that tier behind an
empty RAM, and plain vLLM, which has seen none of the prompts; all are asked each prompt once, in turn, the order
another one each time, and plain vLLM a second time at once (`hit`: its own prefix cache). `new` are as many prompts
that nobody has: what asking the store in vain costs, beside plain vLLM. One output token, so the wall time of
generate() is the time to first token; every ratio is of one prompt, and what is printed are medians. float32, blocks of
32 tokens, every engine core in a process of its own, on the same cores. `found`: prompt tokens that were not computed,
the least of all prompts. Ratios on a busy machine are noise: run it on an idle one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 32
BLOCKS_IN_ENGINE = 300
WARM_UP_TOKENS = 1400
WARM_UPS = 4
PATIENCE_S = 300.0
STORED = "vllm:kvtier_tier_stored_bytes"
HARNESSES = Path(__file__).parents[1] / "tests"
DEFAULT_MODEL = Path.home() / ".cache/kvtier/models/smollm2-135m-f32"


def own_server(kind: str) -> tuple[str, Callable[[], object]]:
    """A server in this benchmark's hands, as the tests start it: its URL, and what stops it."""
    if kind == "valkey":
        from valkey_harness import ValkeyServer

        valkey = ValkeyServer()
        return f"valkey://127.0.0.1:{valkey.port}", valkey.stop
    if kind == "s3":
        from s3_harness import BUCKET, S3Server

        s3 = S3Server()
        where = f"endpoint=http://127.0.0.1:{s3.port}&credentials_file={s3.credentials_file}&profile=engine"
        return f"s3://{BUCKET}/benchmark?{where}", s3.stop
    if kind == "mooncake":
        from mooncake_harness import MooncakeMaster, SegmentOwner

        master = MooncakeMaster()
        owner = SegmentOwner(master, 4 << 30)
        return f"mooncake://127.0.0.1:{master.port}", lambda: (owner.kill(), master.stop())
    sys.exit(f"--stores: there is no server for {kind!r} here; allowed: valkey, s3, mooncake, or --tier NAME=URL")


class Engine:
    """vLLM, with these tiers behind 2 GiB of RAM, or plain (None)."""

    def __init__(self, model: str, tiers: list[str] | None) -> None:
        from vllm.config import KVTransferConfig

        from kvtier.cli.serve import connector_config
        from vllm import LLM

        connector = None
        if tiers is not None:
            connector = KVTransferConfig(**connector_config({"ram": "2GiB", "tiers": tiers}))
        self._llm = LLM(
            model,
            dtype="float32",
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS_IN_ENGINE,
            enforce_eager=True,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=connector,
        )

    def ask(self, prompt: list[int]) -> tuple[float, int, int]:
        """Seconds, prompt tokens that were not computed, the first token of the answer."""
        from vllm import SamplingParams

        began_s = time.perf_counter()
        parameters = SamplingParams(temperature=0, max_tokens=1)
        (output,) = self._llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
        return time.perf_counter() - began_s, output.num_cached_tokens or 0, output.outputs[0].token_ids[0]

    def stored_bytes(self) -> dict[str, int]:
        """By tier."""
        metrics = [metric for metric in self._llm.get_metrics() if metric.name == STORED]
        return {metric.labels["medium"]: int(metric.value) for metric in metrics}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def compute_for_others(model: str, tiers: dict[str, str], prompts: list[list[int]], rng: random.Random) -> None:
    """Every prompt into every tier."""
    engine = Engine(model, list(tiers.values()))
    for prompt in prompts:
        engine.ask(prompt)
    wanted_bytes = sum(len(prompt) // BLOCK for prompt in prompts) * block_bytes_of(model)
    give_up_at_s = time.monotonic() + PATIENCE_S
    while min(engine.stored_bytes().values(), default=0) < wanted_bytes:
        if time.monotonic() > give_up_at_s:
            sys.exit(f"not everything was stored: {engine.stored_bytes()} of {wanted_bytes} bytes")
        time.sleep(0.1)
        engine.ask(new_prompt(rng, BLOCK // 2))  # an idle engine looks at nothing
    engine.close()


def block_bytes_of(model: str) -> int:
    from kvtier.sim.sizes import kv_bytes_per_token

    config = json.loads((Path(model) / "config.json").read_text())
    return BLOCK * kv_bytes_per_token(config, "float32")


def new_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(length)]


Answer = tuple[float, int, int]


def measure(engines: dict[str, Engine], prompts: list[list[int]], rng: random.Random) -> dict[str, list[Answer]]:
    """Every engine's answers to every prompt, and plain vLLM's second ones as `hit`."""
    answers: dict[str, list[Answer]] = {name: [] for name in [*engines, "hit"]}
    order = list(engines)
    for prompt in prompts:
        rng.shuffle(order)
        for name in order:
            answers[name].append(engines[name].ask(prompt))
            if name == "plain":
                answers["hit"].append(engines[name].ask(prompt))
    return answers


def report(title: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    same = all(len({token for _, _, token in each}) == 1 for each in zip(*answers.values(), strict=True))
    rows: dict[str, Any] = {"same_token": same}
    for name, each in answers.items():
        seconds = [row[0] for row in each]
        rows[name] = row = {
            "ttft_s": statistics.median(seconds),
            "ttft_all_s": seconds,
            "found_tokens": min(found for _, found, _ in each),
            "over_computing": median_ratio(each, answers["plain"]),
            "over_an_engine_hit": median_ratio(each, answers["hit"]),
        }
        print(
            f"{title:>12} {name:>10} {row['ttft_s']:8.3f} {row['found_tokens']:7,} "
            f"{row['over_computing']:15.3f} {row['over_an_engine_hit']:10.2f}",
            flush=True,
        )
    print(f"{title:>12} {'the same token from all' if same else 'NOT THE SAME TOKEN FROM ALL'}", flush=True)
    return rows


def median_ratio(ours: list[Answer], theirs: list[Answer]) -> float:
    """Of the times of one prompt each."""
    return statistics.median(mine[0] / other[0] for mine, other in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEFAULT_MODEL))
    parser.add_argument("--stores", default="valkey")
    parser.add_argument("--tier", action="append", metavar="NAME=URL", default=[])
    parser.add_argument("--lengths", default="2010,4010")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.append(str(HARNESSES))
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # left to itself vLLM reserves one core more where a connector is configured
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    lengths = [int(text) for text in options.lengths.split(",")]
    rng = random.Random(options.seed)
    prompts = {length: [new_prompt(rng, length) for _ in range(options.rounds)] for length in lengths}
    warm_ups = [new_prompt(rng, WARM_UP_TOKENS) for _ in range(WARM_UPS)]
    with contextlib.ExitStack() as stack:
        tiers = dict(each.split("=", 1) for each in options.tier)
        for kind in options.stores.split(",") if options.stores else ():
            tiers[kind], stop = own_server(kind)
            stack.callback(stop)
        compute_for_others(
            options.model, tiers, [*warm_ups, *(each for some in prompts.values() for each in some)], rng
        )
        engines = {"plain": Engine(options.model, None)}
        engines |= {name: Engine(options.model, [url]) for name, url in tiers.items()}
        stack.callback(lambda: [engine.close() for engine in engines.values()])
        for name, engine in engines.items():
            found = [
                engine.ask(prompt)[1] for prompt in warm_ups
            ]  # how quick the tier is, and computing, is known then
            print(f"warm-up of {name}: found {found} of {WARM_UP_TOKENS} tokens", flush=True)
        print("      tokens       from   TTFT s   found  over computing   over hit (medians of pairs)")
        rows = {}
        for length in lengths:
            rows[f"{length}"] = report(f"{length:,}", measure(engines, prompts[length], rng))
            new = [new_prompt(rng, length) for _ in range(options.rounds)]
            rows[f"{length} new"] = report(f"{length:,} new", measure(engines, new, rng))
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
