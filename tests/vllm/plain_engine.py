"""Plain vLLM behind a pipe: a JSON list of [max_tokens, prompt] a line in, the list of answers a line out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vllm_harness import engine_arguments, prepare_process


def main() -> None:
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is not an answer
    prepare_process()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm import SamplingParams

    arguments = engine_arguments(Path(sys.argv[1]), num_blocks=130, enable_prefix_caching=False)
    llm = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
    for line in sys.stdin:
        answers = []
        for max_tokens, prompt in json.loads(line):
            parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            llm.add_request("ask", {"prompt_token_ids": prompt}, parameters)
            outputs = []
            while not (outputs and outputs[0].finished):
                outputs = llm.step()
            answers.append(list(outputs[0].outputs[0].token_ids))
        print(json.dumps(answers), file=answers_to, flush=True)


if __name__ == "__main__":
    main()
