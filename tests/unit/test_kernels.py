"""Copiers: exactly the named bytes, whatever the alignment, size and number of fragments."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.transfers import kernels
from kvtier.transfers.kernels import CompiledCopier, Copier, PlainCopier, copy_fragments, default_copier

try:
    COPIERS: list[Copier] = [PlainCopier(), CompiledCopier()]
except ImportError:
    COPIERS = [PlainCopier()]

each_copier = pytest.mark.parametrize("copier", COPIERS, ids=lambda copier: copier.name)


def addresses(array: np.ndarray, offsets: list[int]) -> np.ndarray:
    return np.array([array.ctypes.data + offset for offset in offsets], dtype=np.uint64)


@each_copier
@settings(max_examples=60, deadline=None)
@given(
    fragments=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 300)), max_size=20),
    seed=st.integers(0, 999),
    pad_bytes=st.sampled_from([0, 4 << 20]),
)
def test_fragments_of_any_alignment(
    copier: Copier, fragments: list[tuple[int, int, int]], seed: int, pad_bytes: int
) -> None:
    """(gap before target, gap before source, size); `pad_bytes` makes the call one that streams past the caches."""
    if pad_bytes:
        fragments = [*fragments, (13, 5, pad_bytes)]
    total = sum(sum(fragment) for fragment in fragments) + 64
    source = np.random.default_rng(seed).integers(0, 256, total, dtype=np.uint8)
    target = np.full(total, 170, dtype=np.uint8)
    want = target.copy()
    dst, src = [], []
    dst_end = src_end = 0
    for dst_gap, src_gap, size in fragments:
        dst.append(dst_end + dst_gap)
        src.append(src_end + src_gap)
        dst_end, src_end = dst[-1] + size, src[-1] + size
        want[dst[-1] : dst_end] = source[src[-1] : src_end]
    sizes = np.array([size for _, _, size in fragments], dtype=np.int64)
    copier.copy(addresses(target, dst), addresses(source, src), sizes)
    np.testing.assert_array_equal(target, want)


@each_copier
def test_two_threads_copy_at_once(copier: Copier) -> None:
    source = np.random.default_rng(0).integers(0, 256, (64, 1 << 18), dtype=np.uint8)
    target = np.zeros_like(source)
    offsets = [i << 18 for i in range(64)]

    def half(part: slice) -> None:
        count = len(offsets[part])
        copier.copy(
            addresses(target, offsets[part]), addresses(source, offsets[part]), np.full(count, 1 << 18, dtype=np.int64)
        )

    threads = [threading.Thread(target=half, args=(part,)) for part in (slice(0, 32), slice(32, 64))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(target, source)


def test_copy_fragments_uses_the_default() -> None:
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, dtype=np.uint8)
    copy_fragments(addresses(target, [1]), addresses(source, [2]), np.array([3], dtype=np.int64))
    assert target.tolist() == [0, 2, 3, 4, 0, 0, 0, 0, 0]
    assert default_copier() is default_copier()


def test_without_numba_the_default_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_numba(name: str, *args: object, **kwargs: object) -> object:
        if name == "numba" or name.startswith("numba."):
            raise ImportError("No module named 'numba'")
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "kvtier.transfers._numba_kernel", raising=False)
    monkeypatch.delattr("kvtier.transfers._numba_kernel", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_numba)
    assert kernels.default_copier.__wrapped__().name == "plain"


def test_a_kernel_that_copies_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(CompiledCopier, "copy", lambda *args: None)
    assert kernels.default_copier.__wrapped__().name == "plain"


def test_importing_does_not_import_numba() -> None:
    code = "import sys, kvtier.transfers.worker; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiles_without_any_folder_to_cache_in(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from kvtier.transfers import _numba_kernel

    real = _numba_kernel.compile_kernel
    asked: list[bool] = []

    def no_cache(use_cache: bool):
        asked.append(use_cache)
        if use_cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(use_cache=False)

    monkeypatch.setattr(_numba_kernel, "compile_kernel", no_cache)
    copier = CompiledCopier()
    assert asked == [True, False]
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, dtype=np.uint8)
    copier.copy(addresses(target, [0]), addresses(source, [0]), np.array([9], dtype=np.int64))
    assert target.tolist() == source.tolist()


@pytest.mark.parametrize("content", ["a file, not a folder", None])
def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    pytest.importorskip("numba")
    folder = tmp_path / "cache"
    if content is not None:
        folder.write_text(content)
    code = "from kvtier.transfers.kernels import default_copier; print(default_copier().name)"
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder if content is not None else "/proc/kvtier")}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled"
