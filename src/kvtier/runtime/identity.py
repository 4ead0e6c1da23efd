"""What makes the bytes of two engines interchangeable: the namespace of persisted and shared tiers.

A namespace is a digest of named fields. Two engines with the same digest may read each other's blocks; any difference
in what a field says keeps them apart. Nothing here depends on the process: no `hash()`, no order of a set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigurationError

SCHEME = 1
"""Part of every digest. Raised whenever the same fields would no longer mean the same bytes."""
SAMPLE_BYTES = 1 << 20
"""Of each weight file, read at fixed offsets, its header besides."""
NUM_SAMPLES = 16
MAX_HEADER_BYTES = 100 << 20
"""As the safetensors format has it."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


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
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not paths:
        return None
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
    return digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """(offset, length), evenly spread over a file of `size` bytes, its first and last byte included."""
    if size <= SAMPLE_BYTES:
        return [(0, size)]
    length = SAMPLE_BYTES // NUM_SAMPLES
    return [(i * (size - length) // (NUM_SAMPLES - 1), length) for i in range(NUM_SAMPLES)]
