"""Whether the other tests can fail: wrong bytes make another answer, in every model that they use."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_harness import BLOCK, Prompts

new_prompt = Prompts(seed=9)


@pytest.mark.parametrize("model_name", ["smollm2", "dense", "hybrid"])
def test_wrong_bytes_are_noticed(model_name, request, plain, start_engine):
    model = request.getfixturevalue(model_name)
    engine = start_engine(model, num_blocks=130, settings={"ram": "96MiB"})
    prompts = [new_prompt(6 * BLOCK + 10) for _ in range(3)]
    expected = plain(model).answers(prompts)
    for prompt in prompts:
        engine.ask(prompt)
    # every prompt gets the bytes of another one (not its own in another order: attention would not mind)
    slots = engine.manager.pool.slots()
    num_slots = engine.core.get_stats().ready_blocks
    slots[:num_slots] = np.roll(slots[:num_slots], num_slots // 3, axis=0)
    answers = [engine.ask_afresh(prompt) for prompt in prompts]
    assert [ask.num_cached for ask in answers] == [6 * BLOCK] * 3
    assert all(ask.tokens != tokens for ask, tokens in zip(answers, expected, strict=True))
    assert len({tuple(tokens) for tokens in expected}) == 3
