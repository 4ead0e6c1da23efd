"""A vLLM engine with kvtier behind a pipe, in a process that may be killed: one JSON list a line, in and out.

In: `["ask", id, prompt, max_tokens, abort_after, params]`, `["reset"]`, `["forget"]`, `["tiers"]`,
`["probe", side, function, arguments]`.
Out: `["ready"]`, `["tokens", id, tokens, num_cached, finished]`, `["aborted", id]`, `["reset", done]`,
`["forget", done]`, `["tiers", {name: counters}]`, `["probe", value]`.
A request is aborted once the engine has answered `abort_after` times since it was handed in (null: never); `params`
(may be left out) are its `kv_transfer_params`. A reset includes the connector; to forget is to lose the engine's own
cache alone. `tiers` are those below RAM, where the engine core is in this process. A probe
calls a function of the connector's module on one side: in the "scheduler" (only where the engine core has a process of
its own), or in every "worker", and then the value is a list. The process ends in good order when
there is nothing more to read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from queue import Empty, SimpleQueue
from typing import Any

from vllm_harness import PATIENCE_S, prepare_process


class DrivenEngine:
    """The engine, and the requests that it works on."""

    def __init__(self, arguments: dict[str, Any], multiprocess: bool, answers_to: Any) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        transfer_config = arguments.pop("kv_transfer_config", None)
        if transfer_config is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer_config)
            self._module = importlib.import_module(transfer_config["kv_connector_module_path"])
        engine_args = EngineArgs(**arguments)
        self._llm = LLMEngine.from_engine_args(engine_args, enable_multiprocessing=multiprocess)
        self._multiprocess = multiprocess
        self._answers_to = answers_to
        self._num_steps = 0
        self._abort_at: dict[str, int] = {}
        """Request -> the step after which it is aborted."""

    def say(self, *answer: object) -> None:
        print(json.dumps(answer), file=self._answers_to, flush=True)

    @property
    def is_idle(self) -> bool:
        return not self._llm.has_unfinished_requests()

    def has_outputs(self) -> bool:
        """A step would give something (at once, where the engine core has a process of its own).

        Raises EngineDeadError where that process was killed: vLLM's client would wait for its outputs for ever.
        """
        if not self._multiprocess:
            return not self.is_idle
        core = self._llm.engine_core
        if core.outputs_queue.empty():
            core.ensure_alive()
            return False
        return True

    def obey(self, command: str, *arguments: Any) -> None:
        getattr(self, command)(*arguments)

    def ask(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        abort_after: int | None,
        params: dict[str, Any] | None = None,
    ) -> None:
        from vllm import SamplingParams

        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **extra)
        self._llm.add_request(request_id, {"prompt_token_ids": prompt}, parameters)
        if abort_after is not None:
            self._abort_at[request_id] = self._num_steps + abort_after
            self._abort_those_due()

    def reset(self) -> None:
        self.say("reset", self._llm.reset_prefix_cache(reset_connector=True))

    def forget(self) -> None:
        self.say("forget", self._llm.reset_prefix_cache())

    def tiers(self) -> None:
        stack = self._llm.engine_core.engine_core.scheduler.connector._manager.stack
        figures = zip(stack.tier_names, stack.tiered.tier_stats(), strict=True) if stack.tiered else ()
        self.say("tiers", {name: dict(stats.counters) for name, stats in figures})

    def probe(self, side: str, function: str, arguments: list[Any]) -> None:
        if side == "scheduler":
            value = self._llm.engine_core.call_utility("call_in_scheduler", function, arguments)
        else:
            value = self._llm.collective_rpc(self._module.call_in_worker, args=(function, arguments))
        self.say("probe", value)

    def step(self) -> None:
        for output in self._llm.step():
            tokens = list(output.outputs[0].token_ids)
            self.say("tokens", output.request_id, tokens, output.num_cached_tokens or 0, output.finished)
            if output.finished:
                self._abort_at.pop(output.request_id, None)
        self._num_steps += 1
        self._abort_those_due()

    def _abort_those_due(self) -> None:
        for request_id in [request_id for request_id, step in self._abort_at.items() if step <= self._num_steps]:
            del self._abort_at[request_id]
            self._llm.abort_request([request_id])
            self.say("aborted", request_id)

    def shutdown(self) -> None:
        self._llm.engine_core.shutdown(timeout=PATIENCE_S)


def read_commands(commands: SimpleQueue[list[Any] | None]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)


def main() -> None:
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is not an answer
    arguments = json.loads(sys.argv[1])
    prepare_process()
    os.environ.update(arguments.pop("environment"))
    engine = DrivenEngine(arguments["engine"], arguments["multiprocess"], answers_to)
    engine.say("ready")
    commands: SimpleQueue[list[Any] | None] = SimpleQueue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    while True:
        if engine.has_outputs():
            engine.step()
        with contextlib.suppress(Empty):
            # a step that waited for outputs would not hear of an abort
            command = commands.get(timeout=0.001)
            if command is None:
                break
            engine.obey(*command)
    engine.shutdown()


if __name__ == "__main__":
    main()
