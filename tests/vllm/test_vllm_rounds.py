"""A conversation of many users that does not fit the engine's cache: the same answers, and little is computed twice."""

from __future__ import annotations

from vllm_harness import BLOCK, Prompts

NUM_USERS = 20
NUM_ROUNDS = 3
FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = 160, 56, 6
AT_ONCE = 4
NUM_BLOCKS = 50


def test_sixty_prompts_in_three_rounds(smollm2, plain, start_engine):
    new_tokens = Prompts(seed=4, vocabulary=40_000)
    histories: list[list[int]] = [[] for _ in range(NUM_USERS)]
    rounds: list[list[list[int]]] = []
    expected: list[list[list[int]]] = []
    for i in range(NUM_ROUNDS):
        prompts = [history + new_tokens(MORE_TOKENS if i else FIRST_TOKENS) for history in histories]
        rounds.append(prompts)
        expected.append(plain(smollm2).answers(prompts, ANSWER_TOKENS))
        histories = [prompt + answer for prompt, answer in zip(prompts, expected[i], strict=True)]
    assert sum(map(len, rounds)) >= 60
    needed_blocks = sum(len(history) // BLOCK for history in histories)
    assert needed_blocks > 3 * NUM_BLOCKS

    engine = start_engine(smollm2, num_blocks=NUM_BLOCKS, settings={"ram": "512MiB"})
    num_came_back = num_cached = num_loaded = 0
    for i, prompts in enumerate(rounds):
        loaded_before = engine.counters["loaded_blocks"]
        for first in range(0, NUM_USERS, AT_ONCE):
            batch = range(first, first + AT_ONCE)
            asks = [engine.submit(prompts[user], ANSWER_TOKENS) for user in batch]
            engine.finish(*asks)
            assert [ask.tokens for ask in asks] == [expected[i][user] for user in batch]
            if i:
                # what a cache of prompts can know of this one: the whole blocks of the prompt before
                num_came_back += sum(len(rounds[i - 1][user]) // BLOCK * BLOCK for user in batch)
                num_cached += sum(ask.num_cached for ask in asks)
        if i:
            num_loaded += (engine.counters["loaded_blocks"] - loaded_before) * BLOCK
    engine.drain()

    num_found_in_engine = num_cached - num_loaded
    num_evicted = num_came_back - num_found_in_engine
    assert num_evicted > 0.9 * num_came_back  # else the engine's cache was too large for this test
    assert num_loaded > 0.8 * num_evicted
    assert engine.counters["shed_blocks"] == 0
    stats = engine.core.get_stats()
    assert 0 < stats.ready_blocks <= stats.capacity_blocks


def test_another_cache_salt_never_hits(smollm2, plain, start_engine):
    engine = start_engine(smollm2, num_blocks=NUM_BLOCKS, settings={"ram": "512MiB"})
    prompt = Prompts(seed=5)(4 * BLOCK + 5)
    expected = plain(smollm2).answer(prompt)
    salts = ["pepper", "thyme", None]
    for salt in salts:
        ask = engine.ask_afresh(prompt, salt=salt)
        assert ask.num_cached == 0
        assert ask.tokens == expected
    for salt in salts:
        ask = engine.ask_afresh(prompt, salt=salt)
        assert ask.num_cached == 4 * BLOCK
        assert ask.tokens == expected
