"""Compression of KV blocks: how much smaller, how quickly, and below which link that pays.

    python benchmarks/compression.py [--tokens 2048] [--block-tokens 128] [--repetitions 5] [--text FILE] [--json FILE]

The blocks are real: the KV cache of the demo's model, computed in each type from a text (the documentation of this
repository). `kvtier` is the codec of the shared tiers. `blosc2` is its byte shuffle with Zstandard at level 1, every
byte plane by itself, and `zstd` Zstandard alone at level 1, each where its package is installed. Speeds are in bytes of
blocks a second of CPU time of one thread, the best of the repetitions: what else runs shows little in them. `bound`:
the ratio that the entropy of each byte plane allows. `break-even`: the link, of one connection, the same in both
directions, on which a block that is stored and loaded once takes as long either way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.cli.model import prepare_demo_model
from kvtier.tiers.shared import codec

Bytes = npt.NDArray[np.uint8]
Codec = tuple[Callable[[Bytes], Any], Callable[[Any, Bytes], Any]]
"""(block -> payload), (payload, slot): fills the slot."""
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def kv_blocks(text: str, num_tokens: int, block_tokens: int) -> dict[str, Bytes]:
    """By type: (blocks, block bytes) uint8, each block of all layers as (layer, K or V, token, head, element)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(prepare_demo_model())
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :num_tokens]
    num_blocks = ids.shape[1] // block_tokens
    blocks = {}
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
        with torch.no_grad():
            cache = model.model(ids, use_cache=True).past_key_values
        layers = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        whole = layers[:, :, :, : num_blocks * block_tokens]
        split = whole.unflatten(3, (num_blocks, block_tokens)).permute(3, 0, 1, 4, 2, 5).contiguous()
        blocks[name] = split.view(torch.uint8).reshape(num_blocks, -1).numpy()
        if name == "bf16":
            blocks["fp8"] = split.to(torch.float8_e4m3fn).view(torch.uint8).reshape(num_blocks, -1).numpy()
    return blocks


def codecs(element_bytes: int) -> dict[str, Codec]:
    """By name."""
    import zstandard

    def fill(frame: bytes, slot: Bytes) -> None:
        slot[:] = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)

    found: dict[str, Codec] = {
        "kvtier": (
            lambda block: codec.encode(block, element_bytes),
            lambda payload, slot: codec.decode(payload, slot, element_bytes),
        ),
        "zstd": (lambda block: zstandard.ZstdCompressor(level=1).compress(block.data), fill),
    }
    try:
        import blosc2
    except ImportError:
        return found
    settings = {
        "typesize": element_bytes,
        "clevel": 1,
        "codec": blosc2.Codec.ZSTD,
        "filters": [blosc2.Filter.SHUFFLE],
        "nthreads": 1,
        "splitmode": blosc2.SplitMode.ALWAYS_SPLIT,
    }
    found["blosc2"] = (
        lambda block: blosc2.compress2(block, **settings),
        lambda payload, slot: blosc2.decompress2(payload, dst=slot, nthreads=1),
    )
    return found


def measure(blocks: Bytes, one: Codec, repetitions: int) -> dict[str, float]:
    """Ratio over all blocks, bytes per second as the median over the blocks of the best of the repetitions."""
    encode, decode = one
    slot = np.empty(blocks.shape[1], np.uint8)
    sizes, encode_s, decode_s = [], [], []
    for block in blocks:
        payload = encode(block)
        payload = block if payload is None else payload
        sizes.append(len(payload))
        encode_s.append(_best(lambda: encode(block), repetitions))  # noqa: B023
        if payload is not block:
            decode_s.append(_best(lambda: decode(payload, slot), repetitions))  # noqa: B023
            assert (slot == block).all()
    ratio = blocks.size / sum(sizes)
    encoding = blocks.shape[1] / float(np.median(encode_s))
    decoding = blocks.shape[1] / float(np.median(decode_s)) if decode_s else float("inf")
    break_even = 2 * (1 - 1 / ratio) / (1 / encoding + 1 / decoding)
    return {"ratio": ratio, "encode": encoding, "decode": decoding, "break_even": break_even}


def entropy_bound(blocks: Bytes, element_bytes: int) -> float:
    """The ratio that byte planes allow, each coded by itself with the frequencies of its bytes over all blocks."""
    bits = 0.0
    for plane in blocks.reshape(-1, element_bytes).T:
        shares = np.bincount(plane, minlength=256) / plane.size
        bits -= float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return 8 * element_bytes / bits


def _best(call: Callable[[], object], repetitions: int) -> float:
    best_s = float("inf")
    for _ in range(repetitions):
        begun_s = time.thread_time()
        call()
        best_s = min(best_s, time.thread_time() - begun_s)
    return best_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    docs = Path(__file__).parent.parent / "docs"
    paths = [options.text] if options.text else sorted(docs.rglob("*.md"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    results = []
    print("type  MiB/block  bound  codec    ratio  encode GB/s  decode GB/s  break-even Gb/s")
    for name, blocks in kv_blocks(text, options.tokens, options.block_tokens).items():
        bound = entropy_bound(blocks, ELEMENT_BYTES[name])
        for codec_name, one in codecs(ELEMENT_BYTES[name]).items():
            row = measure(blocks, one, options.repetitions)
            results.append({"type": name, "codec": codec_name, "bound": bound, "block_bytes": blocks.shape[1], **row})
            print(
                f"{name:<5} {blocks.shape[1] / 2**20:9.2f} {bound:6.3f}  {codec_name:<7} {row['ratio']:6.3f} "
                f"{row['encode'] / 1e9:12.2f} {row['decode'] / 1e9:12.2f} {8 * row['break_even'] / 1e9:16.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
