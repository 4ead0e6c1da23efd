"""Whose KV blocks an engine makes: what must be the same for another process to read them from a disk."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import KVCacheConfig

import vllm
from kvtier.runtime.identity import weights_identity

READS_MODEL_FOLDER = frozenset(
    ("auto", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt", "safetensors", "sharded_state")
)
"""Load formats whose weights are the files in the model's folder."""
SEEDED_HASHES = frozenset(("sha256", "sha256_cbor"))
"""Block hashes that are the same in every process; the others begin with random bytes unless PYTHONHASHSEED is set."""
KV_FREE_SPECULATION = frozenset(("ngram", "ngram_gpu", "suffix"))
LENGTH_FREE_ROPES = frozenset((None, "default", "linear", "llama3", "mrope", "yarn"))
"""Position encodings that do not depend on how long a sequence may become."""

LORA_COUNTS = frozenset(("max_loras", "max_cpu_loras"))
"""How many adapters there may be, not what they do."""


class NoIdentityError(Exception):
    """Nobody could tell later whose blocks these are. The message says why, and what helps."""


def identity_fields(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights_id: str | None) -> dict[str, Any]:
    """Everything that makes this engine's blocks what they are, as JSON can say it.

    `weights_id` is the user's word for the weights, instead of a look at their files. Reads some MiB of these. Raises
    NoIdentityError.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in KV_FREE_SPECULATION:
        raise NoIdentityError(f"speculative decoding by {speculation.method!r} keeps KV blocks of another model")
    algorithm = cache.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm not in SEEDED_HASHES:
        raise NoIdentityError(
            f"prefix_caching_hash_algo {algorithm!r} begins with random bytes in every process; set PYTHONHASHSEED, or "
            "use sha256"
        )
    return {
        "weights": {"id": weights_id} if weights_id is not None else {"files": weights_of(vllm_config)},
        "model": _model_settings(model.hf_config),
        "max_model_len": None if _has_length_free_rope(model) else model.max_model_len,
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "cache_dtype": cache.cache_dtype,
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "layout": {"kv_cache": cache.kv_cache_layout, "attention": str(vllm_config.attention_config.backend)},
        "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
        "ranks": {"all": parallel.world_size, "tensor_parallel": parallel.tensor_parallel_size},
        "lora": _lora_settings(vllm_config.lora_config),
        "hash": {"algorithm": algorithm, "seed": DEFAULT_NONE_HASH_SEED if seed is None else seed},
        "engine": {"vllm": str(vllm.__version__)},
        "device": device_layout(),
    }


def _group(group: Any) -> dict[str, Any]:
    """Layers of a KV group, and how their blocks are laid out."""
    spec = group.kv_cache_spec
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    plain = {name: value if isinstance(value, int | str | None) else repr(value) for name, value in values.items()}
    return {"layers": list(group.layer_names), "kind": type(spec).__name__, **plain}


def weights_of(vllm_config: VllmConfig, find_snapshot: Callable[..., str] | None = None) -> str:
    """Digest of the files that the weights come from. Raises NoIdentityError where they come from no file here.

    `find_snapshot` is huggingface_hub's `snapshot_download`, for tests.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in READS_MODEL_FOLDER:
        raise NoIdentityError(f"load_format {load.load_format!r} takes the weights from elsewhere; set weights_id")
    try:
        folder = Path(model.model)
        if not folder.is_dir():
            if find_snapshot is None:
                import huggingface_hub  # noqa: PLC0415

                find_snapshot = huggingface_hub.snapshot_download
            found = find_snapshot(
                model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
            )
            folder = Path(found)
        digest = weights_identity(folder)
    except Exception as error:  # what a hub may raise is not ours to know
        raise NoIdentityError(f"the weights of {model.model} cannot be read ({error}); set weights_id") from error
    if digest is None:
        raise NoIdentityError(f"there are no weight files in {folder}; set weights_id")
    return digest


def _model_settings(hf_config: Any) -> Any:
    """The model's own settings, wherever its folder lies."""
    settings = json.loads(hf_config.to_json_string(use_diff=False))
    return _without(settings, ("_name_or_path", "transformers_version"))


def _lora_settings(config: Any) -> dict[str, str] | None:
    """How adapters are applied. Which ones is in the keys of their blocks."""
    if config is None:
        return None
    names = sorted(field.name for field in dataclasses.fields(config))
    return {name: str(getattr(config, name)) for name in names if name not in LORA_COUNTS}


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, names) for key, inner in value.items() if key not in names}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


def _has_length_free_rope(model: Any) -> bool:
    """Whether keys are rotated the same whatever `max_model_len` is."""
    config = model.hf_text_config
    settings = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    kinds = [kind for setting in settings for kind in _rope_kinds(setting)]
    return all(kind in LENGTH_FREE_ROPES for kind in kinds)


def _rope_kinds(setting: Any) -> list[Any]:
    if not isinstance(setting, dict):
        return []
    kinds = [setting[name] for name in ("rope_type", "type") if name in setting]
    return kinds + [kind for inner in setting.values() for kind in _rope_kinds(inner)]


def device_layout() -> list[Any]:
    """What decides how a backend lays out a block, beyond its own settings."""
    if current_platform.is_cpu():
        features = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported())
        return ["cpu", platform.machine(), *features]
    return [str(current_platform.device_name), str(current_platform.get_device_capability())]
