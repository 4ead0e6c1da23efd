"""Compressed blocks: the codec and its values, against bytes that were put together by hand, damaged and made up."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard

from kvtier.errors import ConfigurationError
from kvtier.testing import make_keys
from kvtier.testing.tier_driver import block_bytes
from kvtier.tiers.jobs import OpenJob
from kvtier.tiers.shared import SharedConfig, codec
from kvtier.tiers.shared.codec import CodecError, decode, encode
from kvtier.tiers.shared.compressor import Compressor
from kvtier.tiers.shared.envelope import EnvelopeError, Identity, Rejection, header_bytes, header_of, value_bytes
from kvtier.tiers.shared.store import BlockTransfer, StoreConnection
from kvtier.tiers.shared.values import IncomingValue, OutgoingValue, may_be_block, refuse_size

Bytes = npt.NDArray[np.uint8]
KEY = make_keys(1)[0]
IDENTITY = Identity(bytes(range(32)), 5, b"saltsalt")
BLOCK_BYTES = 4096
HEADER_BYTES = header_bytes(len(KEY))
CODEC_AT, ELEMENT_BYTES_AT = 10, 11


def kv_block(num_bytes: int = BLOCK_BYTES) -> Bytes:
    return block_bytes(KEY, num_bytes).copy()


def transfer(block: Bytes, element_bytes: int = 0) -> BlockTransfer:
    job = OpenJob(1, bool(element_bytes), [KEY])
    return BlockTransfer(job, 0, KEY, IDENTITY, block, encode_element_bytes=element_bytes)


def sealed(block: Bytes, element_bytes: int = 2) -> bytes:
    """The whole value, as a store sends it."""
    value = OutgoingValue(transfer(block, element_bytes))
    value.checksum.update(value.payload)
    whole = value.header + bytes(value.payload) + value.checksum.value()
    assert value.num_bytes == len(whole)
    return whole


def received(value: bytes, num_bytes: int = BLOCK_BYTES) -> Bytes:
    """The RAM slot after such a value has come, as a store makes that of it. Raises EnvelopeError."""
    # a slot between others, which nothing may touch
    pool = np.full((3, num_bytes), 0xA5, np.uint8)
    try:
        if not may_be_block(len(value), len(KEY), num_bytes):
            raise EnvelopeError(Rejection.SIZE)
        incoming = IncomingValue(transfer(pool[1]), value[:HEADER_BYTES], len(value))
        incoming.payload[:] = value[HEADER_BYTES:-8]
        incoming.checksum.update(incoming.payload)
        incoming.finish(value[-8:])
    finally:
        assert (pool[[0, 2]] == 0xA5).all()
    return pool[1]


def resealed(value: bytes) -> bytes:
    """With the checksum over the payload that it ought to have: what somebody who means harm would send."""
    seed = xxhash.xxh3_64_intdigest(value[:HEADER_BYTES])
    return value[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(value[HEADER_BYTES:-8], seed))


def outcome(value: bytes) -> Bytes | Rejection:
    try:
        return received(value)
    except EnvelopeError as error:
        return error.rejection


def rejection(value: bytes) -> Rejection:
    rejected = outcome(value)
    assert isinstance(rejected, Rejection)
    return rejected


# -- the codec -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element_bytes", codec.ELEMENT_BYTES)
@pytest.mark.parametrize("num_bytes", [4096, 5003, 300_001, 1 << 20])
def test_what_was_encoded_comes_back(element_bytes: int, num_bytes: int) -> None:
    numbers = np.random.default_rng(7).standard_normal(num_bytes)
    types = {1: np.int8, 2: np.float16, 4: np.float32, 8: np.float64}
    block = numbers.astype(types[element_bytes]).view(np.uint8)[:num_bytes].copy()
    payload = encode(block, element_bytes, margin_bytes=3)
    assert payload is not None
    assert len(payload) < 0.96 * num_bytes
    decoded = np.full(num_bytes, 0xA5, np.uint8)
    decode(payload[3:], decoded, element_bytes)
    assert (decoded == block).all()


def test_the_format_is_what_it_is() -> None:
    """Another version of kvtier reads these bytes."""
    block = kv_block(5003)
    payload = encode(block, 2)
    assert payload is not None
    elements = block[:5002].reshape(-1, 2)
    assert payload[:2501].tobytes() == elements[:, 0].tobytes()
    assert payload[2501] == block[5002]
    frame = payload[2502:].tobytes()
    assert zstandard.ZstdDecompressor().decompress(frame) == elements[:, 1].tobytes()

    value = sealed(block)
    expected = b"kvtier\x00\xb1" + b"\x01\x00" + b"\x01" + b"\x02" + IDENTITY.namespace
    expected += struct.pack("<Q", 5) + b"saltsalt" + struct.pack("<HQ", len(KEY), 5003) + KEY
    assert value[:HEADER_BYTES] == expected
    of_block = xxhash.xxh3_64_intdigest(block.tobytes(), xxhash.xxh3_64_intdigest(expected))
    assert value[HEADER_BYTES:-8] == struct.pack("<Q", of_block) + payload.tobytes()
    assert resealed(value) == value


def test_bf16_shrinks_by_what_its_exponents_leave() -> None:
    """The mantissa is noise, and the entropy of the other byte a bound."""
    block = kv_block(1 << 20)
    counts = np.bincount(block[1::2], minlength=256)
    shares = counts[counts > 0] / counts.sum()
    entropy_bytes = -(shares * np.log2(shares)).sum() / 8 * len(block) / 2
    payload = encode(block, 2)
    assert payload is not None
    assert len(payload) < len(block) / 2 + 1.05 * entropy_bytes


def test_what_does_not_shrink_goes_as_it_is() -> None:
    noise = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    assert encode(noise, 2) is None
    assert sealed(noise) == sealed(noise, element_bytes=0)
    assert (received(sealed(noise)) == noise).all()
    assert encode(np.zeros(3, np.uint8), 4) is None
    assert encode(np.zeros(0, np.uint8), 1) is None


# -- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element_bytes", [0, *codec.ELEMENT_BYTES])
def test_a_reader_needs_to_know_nothing_of_the_writer(element_bytes: int) -> None:
    block = kv_block()
    value = sealed(block, element_bytes)
    assert (len(value) < value_bytes(len(KEY), BLOCK_BYTES)) is (element_bytes != 0)
    assert (received(value) == block).all()


def test_the_raw_path_copies_nothing() -> None:
    block = kv_block()
    outgoing = OutgoingValue(transfer(block))
    assert np.shares_memory(np.asarray(outgoing.payload), block)
    incoming = IncomingValue(transfer(block), outgoing.header, outgoing.num_bytes)
    assert np.shares_memory(np.asarray(incoming.payload), block)


def test_sizes_that_may_be_a_block() -> None:
    whole = value_bytes(len(KEY), BLOCK_BYTES)
    for size in (0, 1, HEADER_BYTES, HEADER_BYTES + 16, whole - 1, whole + 1, 2 * whole):
        assert not may_be_block(size, len(KEY), BLOCK_BYTES)
    assert may_be_block(whole, len(KEY), BLOCK_BYTES)
    assert may_be_block(len(sealed(kv_block())), len(KEY), BLOCK_BYTES)


def test_every_difference_of_the_header_has_its_name() -> None:
    value = sealed(kv_block())

    def with_byte(at: int, byte: int) -> bytes:
        return value[:at] + bytes([byte]) + value[at + 1 :]

    assert rejection(with_byte(0, 0)) is Rejection.MAGIC
    assert rejection(with_byte(8, 2)) is Rejection.VERSION
    for byte in (0, 2, 255):
        assert rejection(with_byte(CODEC_AT, byte)) is Rejection.CODEC
    for byte in (0, 3, 16, 255):
        assert rejection(with_byte(ELEMENT_BYTES_AT, byte)) is Rejection.CODEC
    # a number that could be, and is not what was stored
    assert rejection(with_byte(ELEMENT_BYTES_AT, 4)) is Rejection.CHECKSUM
    assert rejection(resealed(with_byte(ELEMENT_BYTES_AT, 4))) in (Rejection.STREAM, Rejection.CHECKSUM)
    another = header_of(IDENTITY, KEY, BLOCK_BYTES + 1, (1, 2))
    assert rejection(resealed(another + value[HEADER_BYTES:])) is Rejection.LENGTH
    # raw in the header, and of a length that raw values do not have; and the other way round
    assert rejection(resealed(header_of(IDENTITY, KEY, BLOCK_BYTES) + value[HEADER_BYTES:])) is Rejection.CODEC
    raw = sealed(kv_block(), element_bytes=0)
    assert rejection(resealed(value[:HEADER_BYTES] + raw[HEADER_BYTES:])) is Rejection.CODEC


def test_no_flipped_bit_gives_a_block() -> None:
    value = sealed(kv_block())
    for at in range(8 * HEADER_BYTES):
        rejection(_flipped(value, at))
    chance = random.Random(2)
    for at in chance.sample(range(8 * HEADER_BYTES, 8 * len(value)), 3000):
        assert rejection(_flipped(value, at)) is Rejection.CHECKSUM


def _flipped(value: bytes, at: int) -> bytes:
    changed = bytearray(value)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


@pytest.mark.parametrize("element_bytes", codec.ELEMENT_BYTES)
def test_damage_under_a_good_checksum_gives_no_other_block(element_bytes: int) -> None:
    """Then the decompressor sees it. The block itself, or nothing: no other exception, no other bytes."""
    block = kv_block()
    value = sealed(block, element_bytes)
    chance = random.Random(element_bytes)
    frame_at = 8 * (HEADER_BYTES + 8 + BLOCK_BYTES - BLOCK_BYTES // element_bytes)
    anywhere = chance.sample(range(8 * HEADER_BYTES, 8 * (len(value) - 8)), 500)
    for at in [*range(frame_at, frame_at + 8 * 40), *anywhere]:
        found = outcome(resealed(_flipped(value, at)))
        if isinstance(found, Rejection):
            assert found in (Rejection.STREAM, Rejection.CHECKSUM)
        else:
            assert (found == block).all()
    for _ in range(300):
        begin = chance.randrange(HEADER_BYTES, len(value) - 8)
        junk = chance.randbytes(chance.randrange(1, 200))
        rejection(resealed(value[:begin] + junk + value[begin:]))
        cut = chance.randrange(begin, len(value) - 8)
        if cut > begin:
            rejection(resealed(value[:begin] + value[cut:]))


def _with_window(data: bytes, window_log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(data) + stream.flush()


FRAMES: dict[str, Callable[[int], bytes]] = {
    "a bomb": lambda size: zstandard.ZstdCompressor().compress(bytes(100 * size)),
    "a bomb that does not say so": lambda size: zstandard.ZstdCompressor(write_content_size=False).compress(
        bytes(100 * size)
    ),
    "a byte too many": lambda size: zstandard.ZstdCompressor().compress(bytes(size + 1)),
    "a byte too few": lambda size: zstandard.ZstdCompressor().compress(bytes(size - 1)),
    "nothing": lambda size: zstandard.ZstdCompressor().compress(b""),
    "no frame": lambda size: bytes(50),
    "a skippable frame": lambda size: struct.pack("<II", 0x184D2A50, 20) + bytes(20),
    "a frame that wants 1 GiB of window": lambda size: b"\x28\xb5\x2f\xfd" + b"\x00" + b"\xa0" + bytes(40),
    "a frame that wants 64 MiB of window": lambda size: _with_window(bytes(size), 26),
    "a content size of 2**63": lambda size: b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", 2**63) + bytes(40),
    "a dictionary that nobody has": lambda size: b"\x28\xb5\x2f\xfd" + b"\x23" + b"\x01\x02\x03\x04" + bytes(40),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_somebody_who_means_harm(name: str) -> None:
    block = kv_block()
    value = sealed(block)
    frame_at = HEADER_BYTES + 8 + BLOCK_BYTES // 2
    forged = resealed(value[:frame_at] + FRAMES[name](BLOCK_BYTES // 2) + bytes(8))
    assert rejection(forged) is Rejection.STREAM


def test_payloads_that_are_too_short() -> None:
    for size in (0, 1, 2048):
        with pytest.raises(CodecError):
            decode(np.zeros(size, np.uint8), np.zeros(4096, np.uint8), 2)
    with pytest.raises(CodecError):
        decode(np.zeros(10, np.uint8), np.zeros(1, np.uint8), 2)


# -- what is measured ------------------------------------------------------------------------------------------


class _Store:
    medium, place, supports_compression = "FAKE", "fake://", True

    def connect(self, deadline_s: float) -> StoreConnection:
        raise NotImplementedError


@pytest.mark.parametrize("link_bytes_per_s", [10e6, 100e9])
def test_time_in_the_codec_is_not_time_on_the_wire(link_bytes_per_s: float) -> None:
    """A codec of 1 GB/s, on a link that is much slower, and one that is much faster."""
    compressor = Compressor("auto", 2, _Store())
    block, now_s = kv_block(1 << 20), 0.0
    for _ in range(50):
        for element_bytes in (2, 0):
            moved = transfer(block, element_bytes)
            moved.succeed(block.nbytes)
            moved.payload_bytes = block.nbytes // 4
            moved.codec_s = block.nbytes / 1e9
            wire_s = moved.payload_bytes / link_bytes_per_s
            compressor.after_moves([moved], now_s, now_s + wire_s + moved.codec_s)
            now_s += wire_s + moved.codec_s
    is_slow = link_bytes_per_s < 1e9
    assert compressor.counters["compression_on"] == is_slow
    assert compressor.counters["compressed_blocks"] == compressor.counters["decompressed_blocks"] == 50
    assert compressor.counters["compression_saved_bytes"] == 100 * (block.nbytes - block.nbytes // 4)


def test_blocks_that_did_not_move_count_for_nothing() -> None:
    compressor = Compressor("auto", 2, _Store())
    there, failed = transfer(kv_block(), 2), transfer(kv_block(), 2)
    there.succeed(0)
    failed.fail("no")
    compressor.after_moves([there, failed], 0.0, 1.0)
    assert not any(compressor.counters.values())


# -- without the library ---------------------------------------------------------------------------------------


def test_without_the_library_compressed_blocks_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(sealed(kv_block()))
    monkeypatch.setattr(codec, "zstandard", None)
    assert not may_be_block(size, len(KEY), BLOCK_BYTES)
    assert may_be_block(value_bytes(len(KEY), BLOCK_BYTES), len(KEY), BLOCK_BYTES)
    block = transfer(kv_block())
    refuse_size(block, size)
    # and not corrupt: others can read it, so it is not to be removed
    assert (block.is_missing, block.is_corrupt) == (True, False)
    block = transfer(kv_block())
    refuse_size(block, 5)
    assert (block.is_missing, block.is_corrupt) == (False, True)


@pytest.mark.parametrize("settings", [{"compression": "yes"}, {"compression": ""}, {"element_bytes": 3}])
def test_settings_that_cannot_be(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"(compression|element_bytes) is .*; allowed: (off|1)"):
        SharedConfig(bytes(32), **settings)  # type: ignore[arg-type]
