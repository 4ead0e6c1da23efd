"""Values of a shared store that are not the block that was asked for: none of them may be taken for it."""

from __future__ import annotations

import numpy as np

from kvtier.keys import OffloadKey
from kvtier.testing import make_keys
from kvtier.tiers.shared.envelope import BlockChecksum, Identity, header_of
from valkey_harness import NAMESPACE

SLOT_BYTES = 256 << 10


def sealed(key: OffloadKey, namespace: bytes = NAMESPACE, epoch: int = 0, size: int = SLOT_BYTES) -> bytes:
    block = np.full(size, 7, np.uint8)
    header = header_of(Identity(namespace, epoch), key, size)
    checksum = BlockChecksum(header)
    checksum.update(block.data)
    return header + block.tobytes() + checksum.value()


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


KEY = make_keys(1)[0]
LIES = {
    "first byte": flipped(sealed(KEY), 0),
    "version": flipped(sealed(KEY), 8),
    "codec": flipped(sealed(KEY), 10),
    "reserved": flipped(sealed(KEY), 11),
    "namespace": sealed(KEY, namespace=bytes(32)),
    "epoch": sealed(KEY, epoch=1),
    "another key": sealed(make_keys(2)[1]),
    "length": sealed(KEY, size=SLOT_BYTES - 1) + b"x",
    "checksum": flipped(sealed(KEY), len(sealed(KEY)) - 1),
    "first byte of the block": flipped(sealed(KEY), len(sealed(KEY)) - SLOT_BYTES - 8),
    "last byte of the block": flipped(sealed(KEY), len(sealed(KEY)) - 9),
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.".ljust(len(sealed(KEY))),
    "truncated": sealed(KEY)[:-1],
    "a header alone": sealed(KEY)[: -SLOT_BYTES - 8],
    "empty": b"",
    "longer": sealed(KEY) + b"x",
    "huge": b"x" * (5 << 20),
}
