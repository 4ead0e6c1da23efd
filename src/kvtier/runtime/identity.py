"""What makes the bytes of two engines interchangeable: the namespace of persisted and shared tiers.

A namespace is a digest of named fields. Two engines with the same digest may read each other's blocks; any difference
in what a field says keeps them apart. Nothing here depends on the process: no `hash()`, no order of a set.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigurationError

SCHEME = 1
"""Part of every digest. Raised whenever the same fields would no longer mean the same bytes."""
SAMPLE_BYTES = 1 << 20
"""Of each weight file, read at fixed offsets, its header besides."""
NUM_SAMPLES = 16
MAX_HEADER_BYTES = 100 << 20
"""As the safetensors format has it."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
ADAPTER_SETTINGS = "adapter_config.json"
"""Of a LoRA adapter: its rank and scale are in there."""
_MAX_KNOWN = 4096
"""Adapters whose digests are remembered."""
_SETTLED_NS = 2_000_000_000
"""The coarsest times that filesystems keep."""


def namespace_of(fields: Mapping[str, Any]) -> bytes:
    """The 32-byte digest of these fields: names to what JSON can say. Their order does not matter.

    Raises ConfigurationError, naming the field, for a value that JSON cannot say.
    """
    for name, value in fields.items():
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the identity's field {name!r} is {value!r}: {error}") from None
    text = json.dumps({"scheme": SCHEME, "fields": dict(fields)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def element_bytes_of(cache_dtype: str, model_dtype: str) -> int:
    """Bytes of an element of the KV cache, by the names that an engine has for its type ("auto": the model's). 1 for a
    type that is not known: then blocks are whole bytes."""
    name = model_dtype if cache_dtype == "auto" else cache_dtype
    if "16" in name:
        return 2
    return 4 if "float32" in name else 1


def weights_identity(folder: str | Path) -> str | None:
    """Which weights lie in `folder`, as hexadecimal digits; None if there are no weight files.

    sha256 over the sorted (file name, size, safetensors header, samples of 1 MiB in all at fixed offsets). Reads a few
    MiB a file, whatever its size: a change that keeps all sizes and headers and spares every sample is not seen.
    Raises OSError if a file cannot be read.
    """
    paths = _weight_files(folder)
    return _digest_of(paths).hex() if paths else None


FilesState = tuple[tuple[str, int, int, int, int, int], ...]
"""What changes whenever a file is another, or has been written to: even back to what it was."""


class FilesChangingError(Exception):
    """The files were written to while they were read: nobody can tell what they are."""


class AdapterContent(NamedTuple):
    """A LoRA adapter as its files have it."""

    state: FilesState
    digest: bytes
    """32 bytes that name its weights and settings."""


class AdapterFiles:
    """The LoRA adapters in folders of this machine. Remembers what it has read while the files stay the same.

    Not for several threads at a time. `now_ns` is Unix time, as the filesystem's.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._known: dict[Path, AdapterContent] = {}

    def read(self, folder: Path) -> AdapterContent | None:
        """The adapter's files and their digest, made as `weights_identity` is; None if there are no weights.

        Raises OSError if a file cannot be read, FilesChangingError.
        """
        weights = _weight_files(folder)
        if not weights:
            return None
        paths = [*weights, *(path for path in [folder / ADAPTER_SETTINGS] if path.is_file())]
        state = _state_of(paths)
        known = self._known.get(folder)
        if known is not None and known.state == state:
            return known
        content = AdapterContent(state, _digest_of(paths))
        if _state_of(paths) != state:
            raise FilesChangingError(f"the files in {folder} are being written")
        if self._now_ns() - max(changed_ns for *_, changed_ns in state) > _SETTLED_NS:
            # until then another write may leave the same times
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[folder] = content
        return content


def _state_of(paths: list[Path]) -> FilesState:
    found = [(path, path.stat()) for path in paths]
    return tuple(
        (str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in found
    )


def _weight_files(folder: str | Path) -> list[Path]:
    return sorted(path for path in Path(folder).iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())


def _digest_of(paths: list[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(json.dumps([path.name, size]).encode())
            if path.suffix == ".safetensors":
                header_bytes = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES, max(0, size - 8))
                digest.update(file.read(header_bytes))
            for offset, length in _samples(size):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.digest()


def _samples(size: int) -> list[tuple[int, int]]:
    """(offset, length), evenly spread over a file of `size` bytes, its first and last byte included."""
    if size <= SAMPLE_BYTES:
        return [(0, size)]
    length = SAMPLE_BYTES // NUM_SAMPLES
    return [(i * (size - length) // (NUM_SAMPLES - 1), length) for i in range(NUM_SAMPLES)]
