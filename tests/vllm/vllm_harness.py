"""A real vLLM engine with kvtier, driven step by step in this process, and plain vLLM to compare with.

Nothing here sleeps to let something happen: a test steps the engine until a condition holds, holds and fails copies
at `TransferWorker.before_copy`, and moves the clock by hand. `PATIENCE_S` only ends a test that hangs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.transfers.jobs import TransferJob

PATIENCE_S = 120.0
BLOCK = 32
"""Tokens in an engine block: the least that vLLM accepts on CPUs."""
CORES = sorted(os.sched_getaffinity(0))
HERE = Path(__file__).parent


def engine_environment(multiprocess: bool = False, ranks: int = 1) -> dict[str, str]:
    """What vLLM reads from the environment: offline, quiet, one core a rank."""
    cores = [str(CORES[i % len(CORES)]) for i in range(ranks)]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # faults are put into worker processes as functions
        "HF_HUB_OFFLINE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process that has computed may hang
        "OMP_NUM_THREADS": "1",
    }


@functools.cache
def prepare_process() -> None:
    """Lets one process start several engines one after the other. Before the first import of vLLM."""
    os.environ.update(engine_environment())
    import torch

    torch.set_num_threads(1)
    from vllm.platforms import current_platform

    # vLLM replaces its Triton kernels at every start and fails where that is done already
    platform = type(current_platform)
    platform.register_triton_kernel_overrides = staticmethod(functools.cache(platform.register_triton_kernel_overrides))


def engine_arguments(model: Path, num_blocks: int, **changes: Any) -> dict[str, Any]:
    """Arguments of plain vLLM; float32, since there a prompt continued from cached blocks gives the same tokens."""
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "block_size": BLOCK,
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": min(1216, (num_blocks - 1) * BLOCK),
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    return {**arguments, **changes}


def connector_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


class Prompts:
    """Random token ids, never the same twice."""

    def __init__(self, seed: int, vocabulary: int = 512) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def __call__(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(num_tokens)]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self._now_s = time.monotonic()

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class Held:
    """Copies that do not begin until `release`."""

    def __init__(self) -> None:
        self.jobs: list[TransferJob] = []
        self._go = threading.Event()

    def __len__(self) -> int:
        return len(self.jobs)

    def hold(self, job: TransferJob) -> None:
        self.jobs.append(job)
        assert self._go.wait(PATIENCE_S), "a held copy was never released"

    def release(self) -> None:
        self._go.set()


@dataclass
class Failing:
    """Copies that fail instead of beginning: the next `times`, or all (None)."""

    times: int | None
    num_failed: int = 0

    def strike(self) -> None:
        if self.times is None or self.num_failed < self.times:
            self.num_failed += 1
            raise OSError("injected fault")


@dataclass
class Ask:
    """One request and what has come of it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Prompt tokens that were not computed: found in the engine or loaded, as vLLM counts them."""
    finished: bool = False

    @property
    def num_computed(self) -> int:
        return len(self.prompt) - self.num_cached


class Engine:
    """vLLM with kvtier in this process. The clock stands still unless a test moves it."""

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int = 40,
        settings: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        prepare_process()
        ranks = changes.get("tensor_parallel_size", 1)
        os.environ.update(engine_environment(ranks=ranks))
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings = {"copy_threads": 4, "debug": True, **(settings or {})}
        if "cpu_bytes_to_use" not in settings:
            settings.setdefault("ram", "64MiB")
        config = KVTransferConfig(**connector_arguments(settings))
        arguments = EngineArgs(**engine_arguments(model, num_blocks, kv_transfer_config=config, **changes))
        self.llm = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self.scheduler = self.llm.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.manager = self.connector._manager
        self.core = self.manager.core
        self.clock = Clock()
        if ranks == 1:  # other processes have the real time only
            self.manager._clock = self.clock
        self._counted_before: Counter[str] = Counter()
        self.num_steps = 0
        self._asks: dict[str, Ask] = {}
        self._num_asks = 0
        self._rules: list[tuple[str, Held | Failing]] = []
        if ranks == 1:
            self.transfers.before_copy = self._before_copy
            self.transfers._clock = self.clock

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Any:
        """kvtier's worker of the only rank."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def transfers(self) -> Any:
        return self.worker.transfers

    @property
    def counters(self) -> Counter[str]:
        """The manager's and the adapter's counters since the test began."""
        return self._counted() - self._counted_before

    def _counted(self) -> Counter[str]:
        return Counter({**self.core.get_stats().counters, **self.manager.counters})

    # -- requests --------------------------------------------------------------------------------------------

    def submit(
        self, prompt: list[int], max_tokens: int = 4, salt: str | None = None, adapter: Any = None, **sampling: Any
    ) -> Ask:
        """Hands a request in; nothing is computed before the next step."""
        from vllm import SamplingParams

        self._num_asks += 1
        request_id = f"ask-{self._num_asks}"
        self._asks[request_id] = ask = Ask(prompt)
        engine_prompt: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            engine_prompt["cache_salt"] = salt
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling)
        self.llm.add_request(request_id, engine_prompt, parameters, lora_request=adapter)
        return ask

    def abort(self, ask: Ask) -> None:
        request_id = next(request_id for request_id, known in self._asks.items() if known is ask)
        self.llm.abort_request([request_id])

    def ask(self, prompt: list[int], max_tokens: int = 4, salt: str | None = None, adapter: Any = None) -> Ask:
        """One request from its submission to the end of everything that it caused. `adapter` is vLLM's LoRARequest."""
        ask = self.submit(prompt, max_tokens, salt, adapter)
        self.finish(ask)
        self.drain()
        return ask

    def ask_afresh(self, prompt: list[int], max_tokens: int = 4, salt: str | None = None, adapter: Any = None) -> Ask:
        """As `ask`, after the engine has lost its own cache: what is not computed comes from kvtier."""
        self.forget()
        return self.ask(prompt, max_tokens, salt, adapter)

    def step(self) -> None:
        outputs = self.llm.step()
        self.num_steps += 1
        for output in outputs:
            ask = self._asks[output.request_id]
            ask.tokens = list(output.outputs[0].token_ids)
            ask.num_cached = output.num_cached_tokens or 0
            ask.finished = output.finished
        if not outputs:
            time.sleep(0.0005)  # this loop would not let the copy threads have the GIL

    def until(self, done: Callable[[], object], what: str) -> None:
        """Steps until `done()`."""
        give_up_at_s = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < give_up_at_s, f"after {PATIENCE_S} s still not: {what}; {self.core.get_stats()}"
            assert self.scheduler.has_requests(), f"nothing left to do, and still not: {what}"
            self.step()

    def finish(self, *asks: Ask) -> None:
        self.until(lambda: all(ask.finished for ask in asks), "all requests answered")

    def steps_without_answer(self, *asks: Ask, count: int = 50) -> None:
        """The requests wait: no token in `count` steps."""
        for _ in range(count):
            self.step()
        assert not any(ask.tokens for ask in asks)

    def drain(self) -> None:
        """Steps until neither vLLM nor kvtier has anything left to do."""
        self.until(lambda: not self.scheduler.has_requests(), "everything drained")
        stack = self.manager.stack
        give_up_at_s = time.monotonic() + PATIENCE_S
        while stack.tiered is not None:
            # writes to a lower tier do not keep an engine going: its next steps would see to the rest
            self.core.on_schedule_end()
            if not stack.tiered.num_cascading + stack.tiered.num_promoting:
                break
            assert time.monotonic() < give_up_at_s, f"still {stack.tiered.num_to_flush} blocks on their way down"
            stack.tiers[0].wait_for_outcome(1.0)
            self.manager.advance()

    def forget(self) -> None:
        """The engine loses its own prefix cache; kvtier's blocks stay."""
        assert self.llm.reset_prefix_cache(), "blocks are still in use"

    def start_over(self) -> None:
        """Both caches empty, every counter as at the start, and no failure of the test before held against the tier."""
        self.drain()
        self.clock.advance(120.0)
        assert self.reset()
        self.drain()
        self._counted_before = self._counted()
        self.num_steps = 0

    def reset(self, running_requests: bool = False) -> bool:
        """The user's reset, connector included."""
        return bool(self.llm.reset_prefix_cache(reset_running_requests=running_requests, reset_connector=True))

    # -- faults ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def holding(self, kind: str) -> Iterator[Held]:
        """Loads ("load") or stores ("store") that are submitted inside do not begin before `release` (or the end)."""
        held = Held()
        with self._rule(kind, held):
            try:
                yield held
            finally:
                held.release()

    @contextlib.contextmanager
    def failing(self, kind: str, times: int | None = None) -> Iterator[Failing]:
        """Loads ("load") or stores ("store") that are submitted inside fail: the first `times`, or all."""
        failing = Failing(times)
        with self._rule(kind, failing):
            yield failing

    @contextlib.contextmanager
    def stuck_copies(self) -> Iterator[Held]:
        """Copies that begin inside stand still in the middle, with the memory in their hands, until `release`.

        `jobs` has one entry (None) for each slice that is stuck.
        """
        held = Held()
        transfers = self.transfers
        real = transfers._copier

        class StuckCopier:
            name = "stuck"

            def copy(self, *fragments: Any) -> None:
                held.hold(None)  # type: ignore[arg-type]
                real.copy(*fragments)

        transfers._copier = StuckCopier()
        try:
            yield held
        finally:
            held.release()
            transfers._copier = real

    @contextlib.contextmanager
    def silent_worker(self) -> Iterator[None]:
        """The worker goes on, but reports nothing: no transfer has an end that the scheduler knows of."""
        worker = self.worker
        worker.get_finished = list
        try:
            yield
        finally:
            del worker.get_finished

    @contextlib.contextmanager
    def _rule(self, kind: str, rule: Held | Failing) -> Iterator[None]:
        assert kind in ("load", "store")
        self._rules.append((kind, rule))
        try:
            yield
        finally:
            self._rules.remove((kind, rule))

    def _before_copy(self, job: TransferJob) -> None:
        for kind, rule in list(self._rules):
            if (kind == "store") == job.is_store:
                rule.hold(job) if isinstance(rule, Held) else rule.strike()

    # -- the end ---------------------------------------------------------------------------------------------

    def check_nothing_leaked(self) -> None:
        """After a drain: no pin, no slot and no engine block is left over, and no error was swallowed."""
        self.drain()
        self.core.check_invariants()
        stats = self.core.get_stats()
        left = (stats.pinned_blocks, stats.in_flight_blocks, stats.condemned_blocks)
        assert left == (0, 0, 0), f"pinned, in flight, condemned: {left}"
        assert len(self.connector._jobs) == 0
        assert not self.scheduler.requests
        assert not self.connector.scheduler._req_status
        assert not self.connector._behind
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block
        assert self.manager.counters["errors"] == 0

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        self.__dict__.clear()
        cleanup_dist_env_and_memory()
        gc.collect()


class PlainVLLM:
    """Plain vLLM in a process of its own, without a connector and without any cache: what the answers should be."""

    def __init__(self, model: Path) -> None:
        environment = {**os.environ, **engine_environment()}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "plain_engine.py"), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answers(self, prompts: Sequence[list[int]], max_tokens: int = 4) -> list[list[int]]:
        """The greedy answer to each prompt. Asked once, kept."""
        wanted = [(max_tokens, *prompt) for prompt in prompts]
        new = [key for key in dict.fromkeys(wanted) if key not in self._known]
        if new:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps([[key[0], list(key[1:])] for key in new]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, f"plain vLLM ended with {self._process.wait()}"
            self._known.update(zip(new, json.loads(line), strict=True))
        return [self._known[key] for key in wanted]

    def answer(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        return self.answers([prompt], max_tokens)[0]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
