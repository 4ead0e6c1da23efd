"""LoRA in the real vLLM: an adapter's blocks are found by requests with the very same weights, and by nobody else."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import BLOCK, PATIENCE_S, Engine, Prompts, prepare_process
from vllm_models import make_adapter

from kvtier import ReqContext, make_offload_key

LENGTH = 6 * BLOCK + 10
IN_BLOCKS = 6 * BLOCK

new_prompt = Prompts(seed=21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture
def engine(dense: Path, folder: Path, start_engine: Callable[..., Engine]) -> Engine:
    """One for the module: LoRA is on, and a disk lies behind the RAM."""
    engine = start_engine(dense, **engine_options(folder))
    engine.manager.adapters._calls._timeout_s = PATIENCE_S  # other tests may have all the cores
    return engine


@pytest.fixture
def next_engine(_shelf: Any, dense: Path, folder: Path) -> Callable[[], Engine]:
    """Stops the engine and starts another on the same disk."""

    def start() -> Engine:
        _shelf.discard()
        engine: Engine = _shelf.get(dense, **engine_options(folder))
        return engine

    return start


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What kvtier has said of adapters."""
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.WARNING, logger="kvtier"):
        yield lambda: sorted({record.getMessage() for record in caplog.records if "LoRA" in record.getMessage()})


def engine_options(folder: Path) -> dict[str, Any]:
    prepare_process()
    from vllm.config import KVEventsConfig

    settings = {
        "self_describing_kv_events": True,
        "ram": "64MiB",
        "deadline_s": 60,
        "prefill_tokens_per_s": 0,
        "disk": {"path": str(folder), "capacity": "64MiB", "min_free": 0},
    }
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 8}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return {"settings": settings, "kv_events_config": events, **lora}


_numbers = iter(range(1, 1000))


def adapter(path: Path, name: str | None = None, **options: Any) -> Any:
    """As vLLM's server makes it of a name and a path, under a number of its own."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name or path.name, options.pop("number", None) or next(_numbers), str(path), **options)


def blocks_on_disk(engine: Engine) -> int:
    (tier,) = engine.core.tier_stats()
    return tier.ready_blocks


def cold(engine: Engine, prompt: list[int], path: Path, tmp_path: Path) -> list[int]:
    """What these weights answer, computed: a copy under a name that nobody has ever used."""
    copy = tmp_path / f"copy-{next(_numbers)}"
    shutil.copytree(path, copy)
    ask = engine.ask_afresh(prompt, adapter=adapter(copy))
    assert ask.num_cached == 0
    return ask.tokens


def empty_ram(engine: Engine) -> None:
    """Every block leaves RAM: what comes back comes from the disk."""
    ram, context = engine.core.ram, ReqContext("room")
    spec = ram.evict_early(len(ram.ready_keys()), context)
    ram.complete_load(spec.keys, context, spec=spec)
    assert not ram.ready_keys()


def test_the_next_engine_finds_an_adapter_by_its_weights(engine, next_engine, tmp_path):
    """The first test: after a reset nothing is left to the next engine."""
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "a", 11)
    first = engine.ask_afresh(prompt, adapter=adapter(path))
    engine = next_engine()
    for seed, num_cached in ((12, 0), (11, IN_BLOCKS)):
        make_adapter(path, seed)
        ask = engine.ask_afresh(prompt, adapter=adapter(path))
        assert ask.num_cached == num_cached
        assert (ask.tokens == first.tokens) == (seed == 11)


def test_an_adapter_is_found_again_and_only_that_one(engine, tmp_path):
    prompt, one, other = new_prompt(LENGTH), make_adapter(tmp_path / "one", 1), make_adapter(tmp_path / "other", 2)

    def uses() -> dict[str, Any]:
        return {"none": None, "one": adapter(one), "other": adapter(other)}

    first = {name: engine.ask_afresh(prompt, adapter=use) for name, use in uses().items()}
    assert [ask.num_cached for ask in first.values()] == [0, 0, 0]
    assert len({tuple(ask.tokens) for ask in first.values()}) == 3, "adapters that change nothing would prove nothing"
    assert blocks_on_disk(engine) == 18
    for prepare in (lambda: None, lambda: empty_ram(engine)):
        prepare()
        for name, use in uses().items():
            again = engine.ask_afresh(prompt, adapter=use)
            assert (again.tokens, again.num_cached) == (first[name].tokens, IN_BLOCKS)


def test_a_name_loaded_again_with_other_weights(engine, lines, tmp_path):
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "a", 3)
    old = adapter(path)
    engine.llm.add_lora(old)
    before = engine.ask_afresh(prompt, adapter=old)
    assert engine.ask_afresh(prompt, adapter=old).num_cached == IN_BLOCKS

    expected = cold(engine, prompt, make_adapter(tmp_path / "b", 4), tmp_path)
    assert expected != before.tokens
    make_adapter(path, 4)
    new = adapter(path, number=old.lora_int_id, load_inplace=True)
    engine.llm.add_lora(new)
    for num_cached in (0, IN_BLOCKS):
        again = engine.ask_afresh(prompt, adapter=new)
        assert (again.tokens, again.num_cached) == (expected, num_cached)
    # unloaded and loaded: a number of its own; and the first weights again
    make_adapter(path, 3)
    back = engine.ask_afresh(prompt, adapter=adapter(path))
    assert (back.tokens, back.num_cached) == (before.tokens, IN_BLOCKS)
    (line,) = [line for line in lines() if f"'{path.name}'" in line]
    assert "new path" in line


def test_blocks_on_a_prefix_of_other_weights_are_not_stored(engine, tmp_path):
    """vLLM itself goes on using the prefix that the old weights have left in its cache."""
    prompt, path = new_prompt(LENGTH + 4 * BLOCK), make_adapter(tmp_path / "a", 3)
    engine.ask_afresh(prompt[:LENGTH], adapter=adapter(path))
    make_adapter(path, 4)
    num_blocks = blocks_on_disk(engine)
    mixed = engine.ask(prompt, adapter=adapter(path))
    assert mixed.num_cached == IN_BLOCKS, "vLLM has stopped mixing them: the rule can go"
    assert blocks_on_disk(engine) == num_blocks
    assert engine.ask_afresh(prompt, adapter=adapter(path)).num_cached == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["by a request", "ahead"])
def test_files_that_changed_since_they_were_loaded(engine, lines, tmp_path, ahead):
    """The engine goes on with the weights that it has: nothing of that is stored under the name of the new files."""
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / f"a{ahead}", 5)
    old = adapter(path)
    expected = cold(engine, prompt, path, tmp_path)
    engine.llm.add_lora(old) if ahead else engine.ask(new_prompt(LENGTH), adapter=old)
    make_adapter(path, 6)
    num_blocks = blocks_on_disk(engine)
    for _ in range(2):
        ask = engine.ask_afresh(prompt, adapter=old)
        assert (ask.tokens, ask.num_cached) == (expected, 0)
    assert blocks_on_disk(engine) == num_blocks
    assert len([line for line in lines() if f"'{path.name}'" in line]) == 1


def test_a_load_that_fails_leaves_nobody_knows_what(engine, tmp_path):
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "a", 5)
    old = adapter(path)
    engine.llm.add_lora(old)
    assert engine.ask_afresh(prompt, adapter=old).num_cached == 0
    (path / "adapter_model.safetensors").write_bytes(b"torn")
    again = adapter(path, number=old.lora_int_id, load_inplace=True)
    with pytest.raises(Exception, match=r"header|safetensors|Error"):
        engine.llm.add_lora(again)
    make_adapter(path, 5)
    assert engine.ask_afresh(prompt, adapter=old).num_cached == 0
    engine.llm.add_lora(again)
    assert engine.ask_afresh(prompt, adapter=again).num_cached == IN_BLOCKS


def test_files_that_change_while_a_request_runs(engine, tmp_path):
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "a", 7)
    ask = engine.submit(prompt, adapter=adapter(path))
    make_adapter(path, 8)
    num_blocks = blocks_on_disk(engine)
    engine.finish(ask)
    engine.drain()
    assert blocks_on_disk(engine) == num_blocks


def test_files_that_change_after_a_store_was_planned(engine, tmp_path):
    """vLLM plans it before the worker loads the adapter."""
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "a", 7)
    with engine.holding("store") as held:
        ask = engine.submit(prompt, adapter=adapter(path))
        engine.until(lambda: held.jobs, "a store is planned")
        make_adapter(path, 8)
    engine.finish(ask)
    engine.drain()
    assert engine.core.get_stats().ready_blocks == blocks_on_disk(engine) == 0


def test_an_adapter_that_is_loaded_again_for_each_request(engine, tmp_path):
    prompt, path, number = new_prompt(LENGTH), make_adapter(tmp_path / "a", 7), next(_numbers)
    old = engine.ask_afresh(prompt, adapter=adapter(path, number=number, load_inplace=True))
    expected = cold(engine, prompt, make_adapter(tmp_path / "b", 8), tmp_path)
    make_adapter(path, 8)
    for num_cached in (0, IN_BLOCKS):
        ask = engine.ask_afresh(prompt, adapter=adapter(path, number=number, load_inplace=True))
        assert (ask.tokens, ask.num_cached) == (expected, num_cached)
    assert old.tokens != expected


def test_files_that_cannot_be_read_here(engine, lines, monkeypatch, tmp_path):
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "secret", 9)
    monkeypatch.setattr(engine.manager.adapters, "_read", lambda path: None)
    num_blocks, use = blocks_on_disk(engine), adapter(path)
    first = engine.ask_afresh(prompt, adapter=use)
    again = engine.ask_afresh(prompt, adapter=use)
    assert (again.tokens, again.num_cached) == (first.tokens, IN_BLOCKS)
    assert engine.core.flush_down() == 0
    assert blocks_on_disk(engine) == num_blocks
    (line,) = [line for line in lines() if "'secret'" in line]
    assert "stay in RAM" in line


def test_a_folder_that_does_not_answer_holds_up_nobody(engine, monkeypatch, tmp_path):
    prompt, path = new_prompt(LENGTH), make_adapter(tmp_path / "far", 10)
    answers, adapters = threading.Event(), engine.manager.adapters
    monkeypatch.setattr(adapters, "_read", lambda path: answers.wait(PATIENCE_S))
    monkeypatch.setattr(adapters._calls, "_timeout_s", 0.01)
    use = adapter(path)
    asks = [engine.ask_afresh(prompt, adapter=use) for _ in range(2)]
    answers.set()
    assert adapters._calls._given_up.ended.wait(PATIENCE_S)
    assert [ask.num_cached for ask in asks] == [0, 0]
    assert engine.core.get_stats().ready_blocks == 0


def test_events_and_answers_to_vllm_have_its_own_keys(engine, monkeypatch, tmp_path):
    seen: list[Any] = []
    monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", lambda batch: seen.extend(batch.events))
    prompt, use = new_prompt(LENGTH), adapter(make_adapter(tmp_path / "a", 1))
    engine.ask_afresh(prompt, adapter=use)
    engine.submit(new_prompt(5))
    engine.drain()
    for medium in ("GPU", "CPU"):
        stored = [event for event in seen if type(event).__name__ == "BlockStored" and event.medium == medium]
        assert [token for event in stored for token in event.token_ids] == prompt[:IN_BLOCKS]
        hashes = [block_hash for event in stored for block_hash in event.block_hashes]
        assert len(set(hashes)) == 6
        seen.append(hashes)
    assert seen[-1] == seen[-2], "the block hashes that the engine itself publishes"
    below = [event for event in seen if getattr(event, "medium", None) not in ("GPU", "CPU", None)]
    assert {block_hash for event in below for block_hash in event.block_hashes} == set(seen[-1])


def test_the_groups_of_a_hybrid_model_stay_in_the_order_of_the_offer(engine, tmp_path):
    from vllm.v1.kv_offload.base import ReqContext as VLLMReqContext

    manager, context = engine.manager, VLLMReqContext("by hand")
    manager.begin_with_adapter(context, adapter(make_adapter(tmp_path / "a", 1)))
    keys = [make_offload_key(bytes([i]) * 32, group) for group in (0, 1) for i in range(4)]
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, i % 4 * BLOCK)
    output = manager.prepare_store(keys, context)
    assert output.keys_to_store == keys
    assert [key[:32] + key[-4:] for key in output.store_spec.keys] == keys
    assert {len(key) for key in output.store_spec.keys} == {60}
    engine.core.complete_store(output.store_spec.keys, manager.context_of(context), False, output.store_spec)
    manager.on_request_finished(context)


def _content(number):
    from kvtier.runtime.identity import AdapterContent

    return AdapterContent((("file", number, 0, 0, 0, 0),), bytes([number]) * 32)


def _reading(found):
    """Adapters whose files are what `found` has by path: content, or what reading them raises."""
    from kvtier.adapters.vllm.lora import Adapters

    def read(path):
        if isinstance(found[path], Exception):
            raise found[path]
        return found[path]

    adapters = Adapters(read)
    adapters._calls._timeout_s = PATIENCE_S
    return adapters


def test_what_was_loaded_while_nobody_could_tell_is_not_taken_for_what_is_there_later():
    from kvtier.runtime.identity import FilesChangingError

    found = {"/a": FilesChangingError("the files are being written")}
    adapters, use = _reading(found), adapter(Path("/a"), number=1)
    assert adapters.enter(use).loaded is None
    found["/a"] = _content(2)
    adapters.forget_looks()
    assert adapters.enter(use).loaded is None, "the engine goes on with what it has loaded for the first"
    assert adapters.enter(adapter(Path("/a"), number=2)).loaded is not None
    adapters.close()


def test_two_adapters_of_one_number_are_told_apart_from_neither():
    adapters = _reading({"/a": _content(1), "/b": _content(2)})
    first = adapters.enter(adapter(Path("/a"), number=1))
    assert first.loaded is not None
    assert adapters.enter(adapter(Path("/b"), number=1)).loaded is None
    assert adapters.enter(adapter(Path("/a"), number=1)).loaded is None, "the engine may have the other now"
    assert not adapters.check(first)
    adapters.close()


def test_loads_are_told_of_though_somebody_else_wraps_them_too(monkeypatch):
    import functools

    from vllm.v1.engine.core import EngineCore

    from kvtier.adapters.vllm.lora import watch_loads

    loads: list[Any] = []

    @functools.wraps(getattr(EngineCore.add_lora, "__wrapped__", EngineCore.add_lora))
    def traced(self, lora_request):
        loads.append(lora_request)
        return True

    monkeypatch.setattr(EngineCore, "add_lora", traced)
    found = {"/a": _content(1)}
    adapters, use = _reading(found), adapter(Path("/a"), number=1)
    watch_loads(adapters)
    watch_loads(adapters)
    EngineCore.add_lora(None, use)
    found["/a"] = _content(2)
    adapters.forget_looks()
    assert loads == [use]
    assert adapters.enter(use).loaded is None, "the files are not what was loaded"
    adapters.close()
