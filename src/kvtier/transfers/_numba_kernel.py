"""The compiled copy loop. Imported only where numba is installed (see `kvtier.transfers.kernels`).

Fragments that together exceed the caches are written with non-temporal stores: a plain store first reads the
cache line that it is about to overwrite, and that third memory access makes scattered memcpys of up to a few
MB (for which the C library does not do this) half as fast as one long memcpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ir = cgutils.ir  # llvmlite's, of the version that numba uses

LINE_BYTES = 64
STREAM_FROM_BYTES = 4 << 20
"""Calls that copy less than this go through the caches: the reader may find the bytes there."""

SIGNATURE = "void(uint64[::1], uint64[::1], int64[::1])"


def _memcpy_intrinsic(_typing_context: Any, _dst: Any, _src: Any, _size: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        dst, src, size = args
        byte_pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(dst, byte_pointer), builder.inttoptr(src, byte_pointer), size, 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate


def _stream_line_intrinsic(_typing_context: Any, _dst: Any, _src: Any) -> tuple[Any, Callable[..., Any]]:
    """Copies one cache line; the target is aligned to it, the source need not be."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        dst, src = args
        line_pointer = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()
        line = builder.load(builder.inttoptr(src, line_pointer), align=1)
        store = builder.store(line, builder.inttoptr(dst, line_pointer), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _fence_intrinsic(_typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Non-temporal stores are weakly ordered: nobody may be told of the copy before this."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_memcpy = intrinsic(_memcpy_intrinsic)
_stream_line = intrinsic(_stream_line_intrinsic)
_fence = intrinsic(_fence_intrinsic)


def _copy_fragments(dst_addresses: Any, src_addresses: Any, sizes: Any) -> None:
    total = np.int64(0)
    for i in range(sizes.shape[0]):
        total += sizes[i]
    if total < STREAM_FROM_BYTES:
        for i in range(sizes.shape[0]):
            _memcpy(dst_addresses[i], src_addresses[i], sizes[i])
        return
    for i in range(sizes.shape[0]):
        dst = dst_addresses[i]
        src = src_addresses[i]
        size = sizes[i]
        misaligned = np.int64(dst & np.uint64(LINE_BYTES - 1))
        head = min(size, (LINE_BYTES - misaligned) % LINE_BYTES)
        if head > 0:
            _memcpy(dst, src, head)
        dst += np.uint64(head)
        src += np.uint64(head)
        num_lines = (size - head) // LINE_BYTES
        for line in range(num_lines):
            offset = np.uint64(line * LINE_BYTES)
            _stream_line(dst + offset, src + offset)
        tail = size - head - num_lines * LINE_BYTES
        if tail > 0:
            offset = np.uint64(num_lines * LINE_BYTES)
            _memcpy(dst + offset, src + offset, tail)
    _fence()


def compile_kernel(use_cache: bool) -> Callable[[Any, Any, Any], None]:
    """The compiled `copy_fragments`: one call without the GIL. Raises whatever numba raises."""
    kernel: Callable[[Any, Any, Any], None] = njit(SIGNATURE, nogil=True, cache=use_cache)(_copy_fragments)
    return kernel
