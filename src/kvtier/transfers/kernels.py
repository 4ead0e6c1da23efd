"""Copying many fragments of memory by address, as few and as long GIL-free calls as can be had.

Two implementations of one small interface: compiled (needs numba: one GIL-free call whatever the number of
fragments) and plain (the C library's memmove, one GIL-free call a fragment).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

AddressArray = npt.NDArray[np.uint64]
SizeArray = npt.NDArray[np.int64]


class Copier(Protocol):
    """Copies fragments: `sizes[i]` bytes from `src_addresses[i]` to `dst_addresses[i]`, for every i.

    All three arrays are (n,) and C-contiguous, and stay the caller's. The caller guarantees that every fragment
    is mapped, writable at its target, alive during the call, and overlaps no other fragment. Thread-safe.
    """

    name: str

    def copy(self, dst_addresses: AddressArray, src_addresses: AddressArray, sizes: SizeArray) -> None: ...


class PlainCopier:
    """Without numba. One memmove a fragment; the GIL is given up inside each and taken between them."""

    name = "plain"

    def copy(self, dst_addresses: AddressArray, src_addresses: AddressArray, sizes: SizeArray) -> None:
        memmove = ctypes.memmove
        for dst, src, size in zip(dst_addresses.tolist(), src_addresses.tolist(), sizes.tolist(), strict=True):
            memmove(dst, src, size)


class CompiledCopier:
    """With numba. One GIL-free call; what exceeds the caches is written past them."""

    name = "compiled"

    def __init__(self) -> None:
        from kvtier.transfers import _numba_kernel  # noqa: PLC0415  numba is optional, and slow to import

        self._kernel: Callable[[Any, Any, Any], None]
        try:
            self._kernel = _numba_kernel.compile_kernel(use_cache=True)
        except Exception as exc:  # no writable folder, a broken or foreign cache: anything, and none of it matters
            logger.debug("the compiled copy kernel is not cached (%s)", exc)
            self._kernel = _numba_kernel.compile_kernel(use_cache=False)

    def copy(self, dst_addresses: AddressArray, src_addresses: AddressArray, sizes: SizeArray) -> None:
        self._kernel(dst_addresses, src_addresses, sizes)


@functools.cache
def default_copier() -> Copier:
    """The best copier that works here, ready for use: compiled, called once, the same one for the process.

    The first call may take a second (importing numba; compiling if its cache cannot be written), so it belongs
    where things are constructed.
    """
    copier: Copier
    try:
        copier = CompiledCopier()
        _try_out(copier)
    except Exception as exc:  # not installed, or not working on this machine
        logger.info("copies run without numba (%s): fragments below 64 KiB will be slow", exc)
        copier = PlainCopier()
    return copier


def copy_fragments(dst_addresses: AddressArray, src_addresses: AddressArray, sizes: SizeArray) -> None:
    """Copies fragments with `default_copier()`; see `Copier` for what the caller guarantees."""
    default_copier().copy(dst_addresses, src_addresses, sizes)


def _try_out(copier: Copier) -> None:
    source = np.arange(256, dtype=np.uint8)
    target = np.zeros(256, dtype=np.uint8)
    address = functools.partial(np.array, dtype=np.uint64)
    copier.copy(address([target.ctypes.data]), address([source.ctypes.data]), np.array([source.nbytes], dtype=np.int64))
    if not np.array_equal(source, target):
        raise RuntimeError("the compiled copy kernel copies wrongly")
