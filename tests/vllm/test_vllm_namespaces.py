"""Engines in different processes find each other's blocks if, and only if, these are made of the very same things.

The oracle is the table: what changes the bytes of a block or its key, and what does not. Each variant stores blocks of
its own content for one and the same prompt, in one process; another process looks each up. Two variants that share
anything would find the content of the first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespace_process import look
from vllm_harness import BLOCK, HERE, engine_environment

from valkey_harness import ValkeyServer

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]


IN_KEYS = (
    *("salt", "another salt", "adapter", "other weights of that adapter", "that adapter by another name"),
    *("adapter and salt", "another epoch"),
)
"""Of one namespace with others: what differs is in the keys, or in the epoch."""
DISKS = {
    "usual": ("the usual", "salt", "another salt", "in another folder", "other limits", "with more RAM"),
    "lora": ("LoRA, none used", "adapter", "other weights of that adapter", "the adapter written anew"),
}
"""What is looked for on disks too. One disk for each namespace: the cache of another one would have to make room."""


def rope(theta: float, rope_type: str = "default", **changes: Any) -> dict[str, Any]:
    settings = {"rope_type": rope_type, "rope_theta": theta, "factor": 2.0}
    return {"vllm": {"hf_overrides": {"rope_parameters": settings}, **changes}}


def lora(**changes: Any) -> dict[str, Any]:
    return {"vllm": {"enable_lora": True, "max_lora_rank": 8, **changes}}


def different(folder: Path, retrained: Path) -> dict[str, dict[str, Any]]:
    """Any two of these differ in what makes a block, or in whom it is for."""
    adapter = str(folder / "adapter")
    return {
        "the usual": {},
        "other weights": {"model": str(retrained)},
        "weights by a name": {"ours": {"weights_id": "a"}},
        "weights by another name": {"ours": {"weights_id": "b"}},
        "dtype": {"vllm": {"dtype": "bfloat16"}, "layout": {"dtype": "bfloat16"}},
        "dtype of the cache alone": {"layout": {"dtype": "bfloat16"}},
        "dtype of the cache by its option": {"vllm": {"kv_cache_dtype": "fp8"}},
        "prefill that shares KV": {"vllm": {"kv_sharing_fast_prefill": True}},
        "attention": {"vllm": {"attention_backend": "CPU_ATTN"}},
        "rope": rope(5e5),
        "another rope": rope(5e6),
        "a rope that depends on the length": rope(1e4, "dynamic", max_model_len=640),
        "another length with that": rope(1e4, "dynamic", max_model_len=960),
        "the model's own settings": {"vllm": {"hf_overrides": {"rms_norm_eps": 1e-3}}},
        "block size": {"vllm": {"block_size": 2 * BLOCK}, "layout": {"block_size": 2 * BLOCK}},
        "chunks of two blocks": {"ours": {"blocks_per_chunk": 2}},
        "KV heads": {"layout": {"num_kv_heads": 4}},
        "head size": {"layout": {"head_size": 64}},
        "the same bytes in another shape": {"layout": {"num_kv_heads": 4, "head_size": 16}},
        "layers in another order": {"layers": LAYERS[::-1]},
        "page layout": {"page_layout": "NHD"},
        "another page layout": {"page_layout": "HND"},
        "another vLLM": {"elsewhere": {"vllm.__version__": "0.32.1"}},
        "another processor": {"elsewhere": {"torch.cpu._is_avx512_supported()": "perhaps"}},
        "ranks": {
            "vllm": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            "layout": {"num_kv_heads": 1},  # each: a block has as many bytes as with one rank
        },
        "hash": {"vllm": {"prefix_caching_hash_algo": "sha256_cbor"}},
        "seed of the hash": {"hash_seed": "1"},
        "another seed": {"hash_seed": "2"},
        "a hash that is random without a seed": {
            "vllm": {"prefix_caching_hash_algo": "xxhash"},
            "hash_seed": "1",
        },
        "salt": {"salt": "a"},
        "another salt": {"salt": "b"},
        "LoRA, none used": lora(),
        "LoRA of another rank": lora(max_lora_rank=16),
        "adapter": {**lora(), "adapter": ("name", adapter, 1)},
        "other weights of that adapter": {**lora(), "adapter": ("name", adapter, 2)},
        "that adapter by another name": {**lora(), "adapter": ("other name", adapter, 1)},
        "another epoch": {"epoch": 1},
        "adapter and salt": {**lora(), "adapter": ("name", adapter, 1), "salt": "a"},
    }


def same(copy: Path, folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Which variant each of these is, in other words."""
    adapter = ("name", str(folder / "adapter"), 1)
    return {
        "in another folder": ("the usual", {"model": str(copy)}),
        "other limits": ("the usual", {"vllm": {"max_num_seqs": 4, "max_model_len": 640, "seed": 5}}),
        "with more RAM": ("the usual", {"ours": {"ram": "5MiB", "policy": "lru", "deadline_s": 30}}),
        "the seed that is the default": ("the usual", {"hash_seed": "vllm-none-hash"}),
        "the adapter written anew": ("adapter", {**lora(max_loras=2), "adapter": adapter}),
    }


@pytest.fixture(scope="module")
def places(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("namespaces")
    places = {"folder": folder, "copy": folder / "elsewhere", "retrained": folder / "retrained"}
    for name in ("copy", "retrained"):
        shutil.copytree(dense, places[name])
    (weights,) = places["retrained"].glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return places


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.stop()


def look_elsewhere(order: dict[str, Any]) -> dict[str, Any]:
    """In another process: without a seed Python's own hashes are others there."""
    environment = {**os.environ, **engine_environment()}
    environment.pop("PYTHONHASHSEED", None)
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(HERE)])
    answer = subprocess.run(
        [sys.executable, str(HERE / "namespace_process.py")],
        input=json.dumps(order),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    results: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return results


def with_tiers(variants: dict[str, dict[str, Any]], port: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Each variant with a store that all of them share, and some of them again with a disk."""
    result = {}
    for name, changes in variants.items():
        valkey = f"valkey://127.0.0.1:{port}?lookup_timeout_s=30&epoch={changes.get('epoch', 0)}"
        result[name] = {**changes, "ours": {"tiers": [valkey], **changes.get("ours", {})}}
    for disk, names in DISKS.items():
        for name in set(names) & variants.keys():
            url = f"disk://{folder / disk}?capacity=32MiB&min_free=0"
            result[f"{name}, disk"] = {**variants[name], "ours": {"tiers": [url], **variants[name].get("ours", {})}}
    return result


def test_blocks_are_found_by_the_same_and_by_nobody_else(dense, places, server, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # to have it restored; each variant has its own, or none
    originals = different(places["folder"], places["retrained"])
    variants = with_tiers(originals, server.port, tmp_path)
    reset = f"disk://{tmp_path / 'reset'}?capacity=32MiB&min_free=0"
    variants["reset"] = {"ours": {"tiers": [reset]}, "reset": True}
    first = look({"store": True, "model": str(dense), "variants": variants})
    assert {name: found["found"] for name, found in first.items() if found["found"]} == {}, "another one's was found"
    namespaces = {name: first[name]["namespace"] for name in originals if name not in IN_KEYS}
    assert len(set(namespaces.values())) == len(namespaces), "told apart by the keys alone, or by luck"

    aliases = same(places["copy"], places["folder"])
    again = with_tiers({name: changes for name, (_, changes) in aliases.items()}, server.port, tmp_path)
    found = look_elsewhere({"store": False, "model": str(dense), "variants": variants | again})
    content = {name: number for number, name in enumerate(variants, 1)}
    for name, (original, _) in aliases.items():
        content |= {f"{name}{where}": content[original + where] for where in ("", ", disk") if name + where in again}
    assert {name: what["found"] for name, what in found.items()} == content | {"reset": None}
