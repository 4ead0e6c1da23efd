"""Tiny random models, made on the spot: big enough random weights that the answer depends on every cached token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model = model_class(config).to(torch.float32)
    # else the last token's own embedding outweighs all that attention says, and every answer repeats that token
    model.get_input_embeddings().weight.data.mul_(0.03)
    model.save_pretrained(folder)
    return folder


def make_dense_model(folder: Path) -> Path:
    """Llama-shaped: full attention in every layer, two KV heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _save(LlamaForCausalLM, config, folder)


def make_hybrid_model(folder: Path) -> Path:
    """Gemma-3-shaped: four sliding-window layers (64 tokens) beside two of full attention, so several KV groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sliding, full = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=4096,
        sliding_window=64,
        layer_types=[sliding, sliding, full, sliding, sliding, full],
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return _save(Gemma3ForCausalLM, config, folder)


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the dense model, in `folder` (made, or overwritten), that changes every K and V."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    modules = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors = {}
    for layer in range(3):
        for module, size in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 128, generator=random) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
