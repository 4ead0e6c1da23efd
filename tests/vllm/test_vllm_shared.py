"""Shared tiers behind the RAM in the real vLLM: what one engine has computed, another one loads, whatever becomes of
the store meanwhile. Against real stores: a new kind is one entry of `STORES`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from driven_process import DrivenProcess, wait_until
from vllm_harness import BLOCK, PATIENCE_S, Engine, Prompts

from mooncake_harness import MooncakeMaster, SegmentOwner
from s3_harness import BUCKET, S3Server
from valkey_harness import ValkeyServer

BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # of the dense model: layers, K and V, heads, head size, float32
IN_BLOCKS = 6
LENGTH = IN_BLOCKS * BLOCK + 10
SEEN_WITHIN_S = 2.0
"""What one engine has stored is found by others that ask so much later, with `absent_s` as it is by default."""
UNHURRIED = "&".join(f"{name}_timeout_s=20" for name in ("connect", "lookup", "transfer", "queue"))
"""A busy machine is no reason for a miss. What is dead says so at once."""

new_prompt = Prompts(seed=21)


class SharedStore(Protocol):
    """A store of this test's own, empty at first."""

    name: str
    """In metrics."""
    url: str

    def num_blocks(self) -> int: ...

    def kill(self) -> None:
        """kill -9."""

    def start(self) -> None:
        """Again, at the same place; it may have lost everything."""

    def stop(self) -> None:
        """For good."""


class Valkey:
    name = "valkey"

    def __init__(self, folder: Path) -> None:
        self._server = ValkeyServer()
        self.url = f"valkey://127.0.0.1:{self._server.port}?ttl=1h&{UNHURRIED}"
        self.kill, self.start, self.stop = self._server.kill, self._server.start, self._server.stop

    def num_blocks(self) -> int:
        with self._server.client() as client:
            return len(client.keys("kvtier:*"))


class S3:
    name = "s3"

    def __init__(self, folder: Path) -> None:
        self._server = S3Server()
        where = f"endpoint=http://127.0.0.1:{self._server.port}&credentials_file={self._server.credentials_file}"
        self.url = f"s3://{BUCKET}/shared?{where}&profile=engine&{UNHURRIED}"
        self.kill, self.start, self.stop = self._server.kill, self._server.start, self._server.stop

    def num_blocks(self) -> int:
        return len(self._server.names("shared"))


class Mooncake:
    name = "mooncake"

    def __init__(self, folder: Path) -> None:
        self._master = MooncakeMaster()
        self._owner = SegmentOwner(self._master)
        self.url = f"mooncake://127.0.0.1:{self._master.port}?{UNHURRIED}"
        self.kill, self.start, self.num_blocks = self._master.kill, self._master.start, self._master.num_objects

    def stop(self) -> None:
        self._owner.kill()
        self._master.stop()


class Folder:
    """Killed: somebody removes the folder under the engines."""

    name = "file"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "kv"
        self.url = f"file://{self._folder}?capacity=64MiB&min_free=0&{UNHURRIED}"

    def num_blocks(self) -> int:
        return sum(path.is_file() and path.stat().st_size >= BLOCK_BYTES for path in self._folder.rglob("*"))

    def kill(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None: ...

    def stop(self) -> None: ...


STORES: dict[str, Callable[[Path], SharedStore]] = {"valkey": Valkey, "s3": S3, "mooncake": Mooncake, "file": Folder}
COMPRESSING = ("valkey", "s3")
"""The others take blocks as they are."""


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    store = STORES[request.param](tmp_path_factory.mktemp(request.param))
    yield store
    store.stop()


def settings_of(store: SharedStore, options: str = "") -> dict[str, Any]:
    """A tiny model computes faster than any store answers: what waiting costs is not compared."""
    return {"ram": 64 * BLOCK_BYTES, "deadline_s": 60, "prefill_tokens_per_s": 0, "tiers": [store.url + options]}


class FirstEngine:
    """An engine in this process, where there can be one at a time. It compresses what it stores where the store has
    that; the other does not."""

    def __init__(self, shelf: Any, model: Path, settings: dict[str, Any], num_blocks: int = 40) -> None:
        self._shelf = shelf
        self._model = model
        self._options = {"settings": settings, "num_blocks": num_blocks}

    def start(self) -> Engine:
        """With everything empty but the store."""
        self._shelf.discard()
        return self._shelf.get(self._model, **self._options)

    def stop(self) -> None:
        """In good order: what had no turn yet goes down."""
        if self._shelf.engine is not None:
            self._shelf.engine.check_nothing_leaked()
            self._shelf.discard()


@pytest.fixture
def first(_shelf: Any, dense: Path, store: SharedStore) -> Iterator[FirstEngine]:
    options = "&compression=on" if store.name in COMPRESSING else ""
    yield (engine := FirstEngine(_shelf, dense, settings_of(store, options)))
    engine.stop()


class OtherEngine:
    """An engine in a process of its own."""

    def __init__(self, model: Path, store: SharedStore, log: Path) -> None:
        self._process = DrivenProcess(model, log, num_blocks=40, settings=settings_of(store), core=1)
        self._process.wait_until_ready()
        self._num_asks = 0
        self._name = store.name

    def send(self, prompt: list[int], params: dict[str, Any] | None = None) -> str:
        self._num_asks += 1
        self._process.send("ask", f"ask-{self._num_asks}", prompt, 4, None, params)
        return f"ask-{self._num_asks}"

    def answers(self, count: int) -> dict[str, tuple[list[int], int]]:
        """Of the next so many requests that end: tokens, and how many blocks were not computed."""
        answers: dict[str, tuple[list[int], int]] = {}
        while len(answers) < count:
            name, tokens, num_cached, finished = self._process.expect("tokens")
            if finished:
                answers[name] = tokens, num_cached // BLOCK
        return answers

    def ask(self, prompt: list[int], params: dict[str, Any] | None = None) -> tuple[list[int], int]:
        asked = self.send(prompt, params)
        return self.answers(1)[asked]

    def forget(self) -> None:
        """Its own cache; kvtier's RAM stays."""
        self._process.send("forget")
        assert self._process.expect("forget") == [True]

    def counter(self, name: str) -> int:
        self._process.send("tiers")
        return self._process.expect("tiers")[0][self._name].get(name, 0)

    def discard(self) -> None:
        self._process.discard()


@pytest.fixture(scope="module")
def start_other(
    dense: Path, store: SharedStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], OtherEngine]]:
    """`start_other()`: the other engine, whose process begins with the first call and lives as long as the store."""
    started: list[OtherEngine] = []

    def start() -> OtherEngine:
        if not started:
            started.append(OtherEngine(dense, store, tmp_path_factory.mktemp("other") / "log"))
        return started[0]

    yield start
    for engine in started:
        engine.discard()


@pytest.fixture
def expected(dense: Path, plain: Any) -> Callable[..., list[list[int]]]:
    """Plain vLLM's answers."""
    return plain(dense).answers


def test_a_fresh_process_finds_what_an_engine_that_has_stopped_computed(expected, store, first, start_other):
    prompts = [new_prompt(LENGTH) for _ in range(10)]
    prompts += [prompts[0][: 3 * BLOCK] + new_prompt(LENGTH - 3 * BLOCK) for _ in range(2)]
    engine = first.start()
    assert [engine.ask(prompt).tokens for prompt in prompts] == expected(prompts)
    first.stop()
    num_blocks = 10 * IN_BLOCKS + 2 * (IN_BLOCKS - 3)
    assert store.num_blocks() == num_blocks

    other = start_other()
    found = [other.ask(prompt) for prompt in prompts]
    assert [tokens for tokens, _ in found] == expected(prompts)
    assert [num_cached for _, num_cached in found] == [IN_BLOCKS] * len(prompts)
    assert other.counter("loaded_blocks") == num_blocks
    assert other.counter("decompressed_blocks") == (num_blocks if store.name in COMPRESSING else 0)
    assert other.counter("stored_blocks") == 0


UNSEEN = {"kvtier.no_store": True}
"""Of a request that is to leave nothing in its engine's RAM."""


def find_soon(ask: Callable[[], tuple[list[int], int]], right: list[int]) -> None:
    """What has just been stored elsewhere is found by whoever asks `SEEN_WITHIN_S` later, at the latest."""
    stored_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        tokens, num_found = ask()
        assert tokens == right
        if num_found == IN_BLOCKS:
            return
        assert asked_s - stored_s < SEEN_WITHIN_S


def test_two_engines_at_once_find_each_others_blocks(expected, store, first, start_other):
    one, two = first.start(), start_other()

    def ask_one(prompt: list[int]) -> tuple[list[int], int]:
        one.forget()
        ask = one.submit(prompt, extra_args={"kv_transfer_params": UNSEEN})
        one.finish(ask)
        one.drain()
        return ask.tokens, ask.num_cached // BLOCK

    def ask_two(prompt: list[int]) -> tuple[list[int], int]:
        two.forget()
        return two.ask(prompt, UNSEEN)

    prompts = [new_prompt(LENGTH) for _ in range(2)]
    right = expected(prompts)
    for _ in range(2):
        assert [ask_one(prompts[0]), ask_two(prompts[1])] == [(right[0], 0), (right[1], 0)]
    assert one.ask_afresh(prompts[1]).tokens == right[1]
    find_soon(lambda: ask_two(prompts[1]), right[1])

    num_blocks = store.num_blocks()
    two.forget()
    assert two.ask(prompts[0]) == (right[0], 0)
    wait_until(lambda: store.num_blocks() == num_blocks + IN_BLOCKS, "the other engine stores it")
    find_soon(lambda: ask_one(prompts[0]), right[0])


def test_a_store_that_is_killed_under_an_engine_costs_hits_and_nothing_else(expected, store, first, start_other):
    engine, other = first.start(), start_other()
    known, new = [new_prompt(LENGTH) for _ in range(16)], [new_prompt(LENGTH) for _ in range(4)]
    right = dict(zip(map(tuple, known + new), expected(known + new), strict=True))
    for prompt in known:
        engine.ask(prompt)
    first.stop()

    loaded = other.counter("loaded_blocks")
    asked = {other.send(prompt): prompt for prompt in known[:8]}
    answers = other.answers(1)
    store.kill()  # the rest is being loaded, or waits for that
    asked |= {other.send(prompt): prompt for prompt in known[8:] + new}
    answers |= other.answers(len(asked) - 1)
    for name, prompt in asked.items():
        assert answers[name][0] == right[tuple(prompt)], "with a dead store too every answer is right"
    assert sum(num_found for _, num_found in answers.values()) < IN_BLOCKS * len(known)
    assert other.counter("loaded_blocks") - loaded <= IN_BLOCKS * 8
    other.forget()
    assert other.ask(new[0]) == (right[tuple(new[0])], IN_BLOCKS), "from its RAM"

    store.start()
    engine = first.start()
    give_up_at_s = time.monotonic() + PATIENCE_S
    while True:
        latest, after_it = new_prompt(LENGTH), new_prompt(LENGTH)
        assert [other.ask(prompt)[0] for prompt in (latest, after_it)] == expected([latest, after_it])
        ask = engine.ask(latest)
        assert ask.tokens == expected([latest])[0]
        if ask.num_cached == IN_BLOCKS * BLOCK:
            break
        assert time.monotonic() < give_up_at_s, "what is stored after the store is back is not found"


def test_a_model_with_several_kv_groups(hybrid, plain, tmp_path, request):
    shelf = request.getfixturevalue("_shelf")
    store = Valkey(tmp_path)
    request.addfinalizer(store.stop)
    engines = FirstEngine(shelf, hybrid, {**settings_of(store), "ram": "16MiB"}, num_blocks=130)
    request.addfinalizer(engines.stop)
    prompts = [new_prompt(LENGTH) for _ in range(4)]
    right = plain(hybrid).answers(prompts)
    engine = engines.start()
    assert [engine.ask(prompt).tokens for prompt in prompts] == right
    engines.stop()
    engine = engines.start()
    asks = [engine.ask(prompt) for prompt in prompts]
    assert [ask.tokens for ask in asks] == right
    assert [ask.num_cached for ask in asks] == [IN_BLOCKS * BLOCK] * 4
    (stats,) = engine.core.tier_stats()
    assert stats.counters["loaded_blocks"] >= 4 * IN_BLOCKS


def test_vllm_hears_where_blocks_are():
    from vllm.v1.kv_offload.base import Locality, Medium

    from kvtier.adapters.vllm.manager import _to_vllm
    from kvtier.events import OffloadingEvent

    events = [_to_vllm(OffloadingEvent([b"key"], medium, False)) for medium in ("CPU", "DISK", "VALKEY")]
    assert [event.medium for event in events] == [Medium.CPU, Medium.STORAGE, Medium.STORAGE]
    assert [event.locality for event in events] == [None, Locality.LOCAL, Locality.REMOTE]
    assert [event.ownership for event in events] == [None, "DISK", "VALKEY"]
