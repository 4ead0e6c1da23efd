"""The namespace: equal where the bytes are interchangeable, different where anything differs, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigurationError
from kvtier.keys import extend_key, make_offload_key
from kvtier.runtime.identity import (
    AdapterFiles,
    FilesChangingError,
    element_bytes_of,
    namespace_of,
    weights_identity,
)

FIELDS = {
    "weights": "abc",
    "dtype": "float32",
    "block_tokens": 32,
    "rope": {"theta": 1e4, "scaling": None},
    "layers": ["a", "b"],
    "hash": "sha256",
    "seed": "",
}
OTHERS = {
    "weights": "abd",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "rope": {"theta": 1e6, "scaling": None},
    "layers": ["b", "a"],
    "hash": "xxhash",
    "seed": "0",
}


def test_every_single_difference_is_another_namespace() -> None:
    digests = [namespace_of(FIELDS)] + [namespace_of({**FIELDS, name: OTHERS[name]}) for name in FIELDS]
    digests += [namespace_of({k: v for k, v in FIELDS.items() if k != name}) for name in FIELDS]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}


def test_order_does_not_matter() -> None:
    assert namespace_of(dict(reversed(FIELDS.items()))) == namespace_of(FIELDS)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_other_processes_agree(tmp_path: Path, seed: str) -> None:
    code = """
import json, pathlib, sys
from kvtier.keys import extend_key, make_offload_key
from kvtier.runtime.identity import AdapterFiles, namespace_of, weights_identity
folder = pathlib.Path(sys.argv[1])
digest = AdapterFiles().read(folder).digest
key = extend_key(make_offload_key(b"hash", 3), digest)
print(namespace_of(json.load(sys.stdin)).hex(), weights_identity(folder), digest.hex(), key.hex())
"""
    folder = make_adapter(tmp_path / "a")
    write_weights(folder, {"b": 1}, b"more", "model.safetensors")
    content = AdapterFiles().read(folder)
    assert content is not None
    key = extend_key(make_offload_key(b"hash", 3), content.digest)
    answer = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        input=json.dumps(FIELDS),
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [namespace_of(FIELDS).hex(), weights_identity(folder), content.digest.hex(), key.hex()]
    assert answer.stdout.split() == expected


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), b"bytes"])
def test_what_json_cannot_say_is_named(value: object) -> None:
    with pytest.raises(ConfigurationError, match="'bad'"):
        namespace_of({**FIELDS, "bad": value})


def write_weights(folder: Path, header: dict[str, object], body: bytes, name: str = "model.safetensors") -> None:
    text = json.dumps(header).encode()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_weights_are_told_apart_by_name_size_header_and_content(tmp_path: Path) -> None:
    body = bytearray(os.urandom(3 << 20))
    write_weights(tmp_path, {"w": 1}, bytes(body))
    seen = [weights_identity(tmp_path)]
    assert weights_identity(tmp_path) == seen[0]
    (tmp_path / "config.json").write_text("{}")
    assert weights_identity(tmp_path) == seen[0], "not a weight file"
    write_weights(tmp_path, {"w": 2}, bytes(body))
    seen.append(weights_identity(tmp_path))
    for change in (0, len(body) - 1):
        changed = bytearray(body)
        changed[change] ^= 1
        write_weights(tmp_path, {"w": 1}, bytes(changed))
        seen.append(weights_identity(tmp_path))
    write_weights(tmp_path, {"w": 1}, bytes(body) + b"x")
    seen.append(weights_identity(tmp_path))
    write_weights(tmp_path, {"w": 1}, bytes(body))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    seen.append(weights_identity(tmp_path))
    write_weights(tmp_path, {"w": 3}, b"", "more.safetensors")
    seen.append(weights_identity(tmp_path))
    assert len(set(seen)) == len(seen)
    assert None not in seen


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 8, b"\xff" * 40])
def test_broken_weight_files_have_an_identity_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_identity(tmp_path)


def test_without_weights_there_is_no_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_identity(tmp_path) is None


def make_adapter(folder: Path, rank: int = 8, body: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    write_weights(folder, {"a": 1}, body, "adapter_model.safetensors")
    return folder


def test_adapters_are_told_apart_by_weights_and_settings_wherever_they_lie(tmp_path: Path) -> None:
    files = AdapterFiles()
    first = files.read(make_adapter(tmp_path / "a"))
    copy = files.read(make_adapter(tmp_path / "b"))
    assert first is not None
    assert copy is not None
    assert first.digest == copy.digest
    (tmp_path / "a" / "README.md").write_text("no part of what an engine loads")
    assert files.read(tmp_path / "a") == first
    digests = {first.digest}
    for change in ({"rank": 16}, {"body": b"others!"}):
        changed = files.read(make_adapter(tmp_path / "a", **change))  # type: ignore[arg-type]
        assert changed is not None
        digests.add(changed.digest)
    assert len(digests) == 3
    back = files.read(make_adapter(tmp_path / "a"))
    assert back is not None
    assert back.digest == first.digest


def test_an_adapter_is_read_once_while_its_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_adapter(tmp_path / "a")
    files = AdapterFiles(lambda: time.time_ns() + 3_000_000_000)
    first, just_written = files.read(folder), AdapterFiles()
    assert just_written.read(folder) == first

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(Path, "open", refuse)
    assert files.read(folder) is first
    with pytest.raises(AssertionError):
        just_written.read(folder)  # a second write within the filesystem's own clock would leave no trace


def test_an_adapter_that_is_being_written_is_nothing_that_could_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real_open = make_adapter(tmp_path / "a"), Path.open

    def open_while_written(path: Path, *args: object) -> object:
        monkeypatch.setattr(Path, "open", real_open)
        make_adapter(folder, body=b"others!")
        return real_open(path, *args)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", open_while_written)
    with pytest.raises(FilesChangingError):
        AdapterFiles().read(folder)


def test_what_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert AdapterFiles().read(tmp_path) is None
    with pytest.raises(OSError, match="nowhere"):
        AdapterFiles().read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("cache_dtype", "model_dtype", "expected"),
    [
        ("auto", "torch.bfloat16", 2),
        ("auto", "torch.float16", 2),
        ("auto", "torch.float32", 4),
        ("bfloat16", "torch.float32", 2),
        ("fp8", "torch.bfloat16", 1),
        ("fp8_e4m3", "torch.float16", 1),
        ("fp8_ds_mla", "torch.bfloat16", 1),
        ("something new", "torch.bfloat16", 1),
    ],
)
def test_the_size_of_an_element_by_the_names_of_its_type(cache_dtype: str, model_dtype: str, expected: int) -> None:
    assert element_bytes_of(cache_dtype, model_dtype) == expected
