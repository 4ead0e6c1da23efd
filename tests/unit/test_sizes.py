"""How many bytes a model's tokens take, and sizes as people write them."""

import pytest

from kvtier.errors import ConfigurationError
from kvtier.sim.sizes import format_bytes, kv_bytes_per_token, parse_capacity

LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA_8B, None, 128 * 1024),
        (LLAMA_8B, "fp8", 64 * 1024),
        (QWEN3_8B, None, 144 * 1024),
        (DEEPSEEK_V3, None, 61 * 576 * 2),
        (GPT2, None, 2 * 12 * 768 * 4),
        ({"text_config": QWEN3_8B, "hidden_size": 1}, None, 144 * 1024),
        ({**QWEN3_8B, "layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9}, None, 36 * 1024),
        ({**LLAMA_8B, "torch_dtype": None}, None, 128 * 1024),
    ],
)
def test_bytes_of_a_token(config, dtype, expected):
    assert kv_bytes_per_token(config, dtype) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "num_hidden_layers is missing; use --bytes-per-token"),
        ({**LLAMA_8B, "num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({**LLAMA_8B, "torch_dtype": "float12"}, "the type 'float12' is unknown; allowed: bfloat16"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
    ],
)
def test_a_config_that_does_not_say(config, said):
    with pytest.raises(ConfigurationError, match=said):
        kv_bytes_per_token(config)


@pytest.mark.parametrize(
    ("text", "blocks"), [("5%", 50), ("0.1 %", 1), ("7blocks", 7), ("1 block", 1), ("1MiB", 1024), ("2000000", 1953)]
)
def test_capacities(text, blocks):
    assert parse_capacity(text, 1000, 1024) == blocks


@pytest.mark.parametrize("text", ["0.01%", "0blocks", "100B"])
def test_capacities_below_one_block(text):
    with pytest.raises(ConfigurationError, match=r"--ram is .*not even one block of 1024 bytes"):
        parse_capacity(text, 1000, 1024)


@pytest.mark.parametrize("text", ["", "much", "-5%", "5 %%", "1XiB"])
def test_capacities_that_make_no_sense(text):
    with pytest.raises(ConfigurationError, match=r"--ram is .*allowed: a share of the trace's blocks"):
        parse_capacity(text, 1000, 1024)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**30, "1 GiB"),
        (1000 * 2**30, "1000 GiB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_bytes_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text
