"""One run of the demo: a real vLLM engine, in a process of its own, asked what a file says.

`python -m kvtier.cli.demo_engine --spec SPEC.json --out RESULT.json` (run by `kvtier demo`). Progress goes to
stdout, one JSON object a line; vLLM's own words go to stderr. Every request is streamed, so that the time to its
first token is what a user would see.

The engine core runs in its own process, as in a server: an engine in this process would spin without yielding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 700
_SETTLE_S = 0.5
"""Waited before counters are read: the engine reports the last transfers with its next steps."""
_COUNTERS = ("vllm:kv_offload_", "vllm:kvtier_", "vllm:prefix_cache_", "vllm:external_prefix_cache_")


def set_environment() -> None:
    """Has to happen before vLLM is imported. The same in every run, or the runs cannot be compared."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_NO_USAGE_STATS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # left to itself vLLM on CPU reserves one core more where a connector is configured: on two cores that alone
    # halves or doubles the prefill rate
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)


class Run:
    """Asks one engine and notes what every request saw."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.records: list[dict[str, Any]] = []
        self.phases: list[dict[str, float]] = []
        self.start_seconds: list[float] = []
        """One for each start."""
        self._counted_before: dict[str, float] = {}
        """What to add to the counters of an engine that was started again."""
        self._prefills: dict[str, Any] = {}
        self._engine: Any = None

    async def start(self) -> None:
        from vllm.config import KVTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from vllm import AsyncEngineArgs

        began = time.monotonic()
        connector = self.spec["connector"]
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self.spec["model"],
                kv_transfer_config=KVTransferConfig(**connector) if connector else None,
                dtype="float32",
                enforce_eager=True,
                enable_prefix_caching=True,
                **self.spec["engine"],
            )
        )
        self._watch_prefills()
        # other tokens at each start: a disk may know the last ones
        first = 1000 + len(self.start_seconds) * WARM_UP_TOKENS
        warm_up = [first + i for i in range(WARM_UP_TOKENS)]
        for _ in range(2):
            await self._stream("warm-up", warm_up, {"max_tokens": 4, "ignore_eos": True})
        self.start_seconds.append(time.monotonic() - began)
        tell("ready", seconds=self.start_seconds[-1])

    async def restart(self) -> None:
        """Ends the engine with all its processes, and starts another. The counters go on where they were."""
        self.stop()
        tell("restart")
        await self.start()
        await asyncio.sleep(_SETTLE_S)
        self._counted_before = {}
        now = self._counters()
        self._counted_before = {name: value - now.get(name, 0) for name, value in self.phases[-1].items()}

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _watch_prefills(self) -> None:
        """Notes how vLLM split each prompt: its public outputs only carry the sum of both kinds of cache hit."""
        processor = self._engine.output_processor
        process_outputs = processor.process_outputs

        def watching(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                state = processor.request_states.get(output.request_id)
                if output.prefill_stats is not None and state is not None:
                    self._prefills[state.external_req_id] = output.prefill_stats
            return process_outputs(outputs, *args, **kwargs)

        processor.process_outputs = watching

    async def _stream(self, req_id: str, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Streams one answer. Times in seconds, from sending the prompt."""
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        params = SamplingParams(temperature=0, output_kind=RequestOutputKind.DELTA, **sampling)
        tokens: list[int] = []
        text = ""
        first_s = None
        began = time.perf_counter()
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, req_id):
            if first_s is None and output.outputs[0].token_ids:
                first_s = time.perf_counter() - began
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
        split = self._prefills.pop(req_id, None)
        engine_tokens = split.num_local_cached_tokens if split else 0
        loaded_tokens = split.num_external_cached_tokens if split else 0
        return {
            "ttft_s": first_s,
            "total_s": time.perf_counter() - began,
            "prompt_tokens": len(prompt),
            "engine_tokens": engine_tokens,
            "loaded_tokens": loaded_tokens,
            "computed_tokens": len(prompt) - engine_tokens - loaded_tokens,
            "output": tokens,
            "text": text,
        }

    async def ask(self, req_id: str, phase: int, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """One request of the demo, recorded."""
        record = await self._stream(req_id, prompt, sampling)
        record |= {"id": req_id, "phase": phase}
        self.records.append(record)
        tell("request", phase=phase, ttft_s=record["ttft_s"])
        return record

    async def end_phase(self) -> None:
        """Notes the engine's counters, as they stand now."""
        await asyncio.sleep(_SETTLE_S)
        self.phases.append(self._counters())

    def _counters(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

        totals: dict[str, float] = {}
        for metric in get_metrics_snapshot():
            if metric.name.startswith(_COUNTERS) and isinstance(metric, Counter | Gauge):
                before = self._counted_before.get(metric.name, 0) if isinstance(metric, Counter) else 0
                totals[metric.name] = totals.get(metric.name, before) + metric.value
        return totals


async def chat(run: Run) -> None:
    """Turn by turn: every user asks the next question, at most `concurrency` users at a time, in a fixed order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.spec["model"])
    seats = asyncio.Semaphore(run.spec["concurrency"])
    users = run.spec["users"]
    messages = [list(user["opening"]) for user in users]

    async def turn_of(number: int, turn: int) -> None:
        async with seats:
            user, said = users[number], messages[number]
            said.append({"role": "user", "content": user["questions"][turn]})
            prompt = tokenizer.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=False)
            record = await run.ask(f"{user['name']}-{turn + 1}", turn, prompt, max_tokens=run.spec["max_tokens"])
            said.append({"role": "assistant", "content": record["text"]})
            record |= {"user": user["name"], "question": user["questions"][turn]}

    await run.end_phase()
    for turn in range(run.spec["phases"]):
        if turn == run.spec["restart_before"]:
            await run.restart()
        await asyncio.gather(*(turn_of(number, turn) for number in range(len(users))))
        await run.end_phase()
        tell("phase", phase=turn)


async def trace(run: Run) -> None:
    """Requests arrive when the trace says, whatever the engine is doing."""
    await run.end_phase()
    began = time.monotonic()

    async def one(number: int, request: dict[str, Any]) -> None:
        await asyncio.sleep(max(0.0, began + request["at_s"] - time.monotonic()))
        await run.ask(f"{number}", request["phase"], request["prompt"], max_tokens=request["output"], ignore_eos=True)

    await asyncio.gather(*(one(number, request) for number, request in enumerate(run.spec["requests"])))
    await run.end_phase()


def end_with_parent() -> None:
    """Kills this process and the engine's when stdin ends: whoever asked is gone, however that came about."""

    def watch() -> None:
        # not through sys.stdin: a thread inside its lock is fatal when the interpreter ends
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGKILL)

    if os.getpgid(0) == os.getpid():  # a group of its own, as `kvtier demo` makes it
        threading.Thread(target=watch, name="kvtier-demo-parent", daemon=True).start()


def tell(event: str, **what: Any) -> None:
    """One line for the process that shows the progress."""
    print(json.dumps({"event": event, **what}), flush=True)


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    run = Run(spec)
    try:
        await run.start()
        began = time.monotonic()
        await (chat if spec["mode"] == "chat" else trace)(run)
        seconds = time.monotonic() - began
        tell("done", seconds=seconds)
    finally:
        run.stop()
    return {
        "seconds": seconds,
        "start_seconds": run.start_seconds,
        "requests": sorted(run.records, key=lambda record: record["id"]),
        "counters": run.phases,
        "cores": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    set_environment()
    end_with_parent()
    result = asyncio.run(_run(json.loads(arguments.spec.read_text())))
    arguments.out.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
