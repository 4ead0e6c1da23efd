"""Cache sizes as people write them, and how many bytes a model's blocks have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvtier.errors import ConfigurationError
from kvtier.runtime import parse_size

DEFAULT_BYTES_PER_TOKEN = 131_072
"""An 8B model with grouped-query attention in bf16: 32 layers, 8 KV heads of 128, keys and values."""

_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_BLOCKS = re.compile(r"\s*(\d+)\s*blocks?\s*")


def parse_capacity(text: str, unique_blocks: int, block_bytes: int, key: str = "--ram") -> int:
    """Blocks in one cache size: "5%" of the trace's distinct blocks, "2000blocks", or bytes such as "8GiB".

    Raises ConfigurationError, naming `key`, for anything else and for sizes below one block.
    """
    if match := _SHARE.fullmatch(text):
        blocks = int(float(match[1]) / 100 * unique_blocks)
    elif match := _BLOCKS.fullmatch(text):
        blocks = int(match[1])
    else:
        try:
            blocks = parse_size(text, key) // block_bytes
        except ConfigurationError:
            raise ConfigurationError(
                f'{key} is {text!r}; allowed: a share of the trace\'s blocks ("5%"), a number of them '
                '("2000blocks"), or a size ("64GiB")'
            ) from None
    if blocks < 1:
        raise ConfigurationError(f"{key} is {text!r}: not even one block of {block_bytes} bytes")
    return blocks


def format_bytes(num_bytes: float) -> str:
    """For people: "12.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} TiB" if num_bytes < 999.5 else f"{num_bytes:,.0f} TiB"


def kv_bytes_per_token(config: Mapping[str, Any], kv_dtype: str | None = None) -> int:
    """Bytes of keys and values that one token takes in a model with this Hugging Face `config.json`.

    Latent attention (MLA: `kv_lora_rank`) keeps one vector a layer, others keys and values of every KV head. Layers
    named as linear or recurrent keep nothing a token. `kv_dtype` overrides the model's own type. Raises
    ConfigurationError that names the field which is missing or makes no sense.
    """
    config = {**config, **_nested(config)}
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and layer_types:
        num_layers = sum(1 for kind in layer_types if "linear" not in str(kind) and "mamba" not in str(kind))
    else:
        num_layers = _number(config, "num_hidden_layers", "n_layer", "num_layers")
    element_bytes = _element_bytes(config, kv_dtype)
    if config.get("kv_lora_rank"):
        width = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        return num_layers * width * element_bytes
    num_heads = _number(config, "num_attention_heads", "n_head")
    if config.get("head_dim"):
        head_dim = _number(config, "head_dim")
    else:
        head_dim = _number(config, "hidden_size", "n_embd") // num_heads
    num_kv_heads = num_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = _number(config, "num_key_value_heads")
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return nested
    return {}


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"--model: {name} is {value!r}; expected a whole number of 1 or more")
        return value
    raise ConfigurationError(f"--model: {names[0]} is missing; use --bytes-per-token instead")


def _element_bytes(config: Mapping[str, Any], kv_dtype: str | None) -> int:
    name = kv_dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    short = str(name).removeprefix("torch.")
    if short not in _DTYPE_BYTES:
        raise ConfigurationError(f"the type {name!r} is unknown; allowed: {', '.join(sorted(_DTYPE_BYTES))}")
    return _DTYPE_BYTES[short]
