"""Live traffic as a trace in the Mooncake format: lengths, times and salted ids. No token and no text.

An id is a keyed hash (BLAKE2b, 63 bits) of the block's chained hash under a random key that is written nowhere: equal
prefixes get equal ids within one recording, and nobody can tell from an id which prompt it stands for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kvtier.errors import ConfigurationError

RECORD_BLOCK_TOKENS = 512
"""What one id stands for in the Mooncake format."""
SALT_BYTES = 32
_ID_MASK = (1 << 63) - 1


class TraceLine(msgspec.Struct):
    """One line of a trace. `timestamp` in milliseconds after the recording began."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


_encode = msgspec.json.Encoder().encode


def encode_line(line: TraceLine) -> bytes:
    """The line as JSON, with its line end."""
    return _encode(line) + b"\n"


class TraceRecorder:
    """Turns the requests of one engine into lines. Pure: the caller tells the time and writes.

    `engine_block_tokens` is what one of the engine's block hashes stands for. Ids stand for `block_tokens`: 512, or
    the most below that the engine's blocks add up to. Holds one small record for each request that runs.
    """

    def __init__(self, salt: bytes, engine_block_tokens: int) -> None:
        """`salt`: SALT_BYTES random bytes. Raises ConfigurationError for a salt or block size that cannot work."""
        if len(salt) != SALT_BYTES:
            raise ConfigurationError(f"a salt of {len(salt)} bytes; expected {SALT_BYTES}")
        if engine_block_tokens < 1:
            raise ConfigurationError(f"engine_block_tokens is {engine_block_tokens}; allowed: 1 or more")
        self._hashes_per_block = max(1, RECORD_BLOCK_TOKENS // engine_block_tokens)
        self.block_tokens = self._hashes_per_block * engine_block_tokens
        self._salt = salt
        self._began_s: float | None = None
        self._arrivals: dict[str, int] = {}
        self._num_unnamed = 0

    def arrived(self, req_id: str, now_s: float) -> None:
        """A request is there. A second arrival of the same one changes nothing. O(1)."""
        if self._began_s is None:
            self._began_s = now_s
        self._arrivals.setdefault(req_id, max(0, round((now_s - self._began_s) * 1000)))

    def finished(
        self, req_id: str, block_hashes: Sequence[bytes], input_tokens: int, output_tokens: int
    ) -> bytes | None:
        """The request's line, or None for one that never arrived or has no prompt. O(prompt blocks).

        `block_hashes`: the engine's chained hashes of its full blocks, shallowest first; those behind the prompt are
        not looked at.
        """
        timestamp = self._arrivals.pop(req_id, None)
        if timestamp is None or input_tokens < 1:
            return None
        num_ids = -(-input_tokens // self.block_tokens)
        step = self._hashes_per_block
        full_prompt_hashes = input_tokens * step // self.block_tokens
        hashes = block_hashes[:full_prompt_hashes]
        # the chained hash of a block's last part stands for the whole block and all before it
        ids = [self._id(block_hash) for block_hash in hashes[step - 1 :: step]]
        if len(ids) < num_ids:
            rest = len(hashes) - len(ids) * step
            ids += [self._id(hashes[-1]) if rest and len(ids) == num_ids - 1 else self._new_id()]
            ids += [self._new_id() for _ in range(num_ids - len(ids))]
        return encode_line(TraceLine(timestamp, input_tokens, output_tokens, ids))

    def __len__(self) -> int:
        """Requests that have arrived and not finished."""
        return len(self._arrivals)

    def _id(self, block_hash: bytes) -> int:
        digest = hashlib.blake2b(block_hash, digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest, "big") & _ID_MASK

    def _new_id(self) -> int:
        """For tokens of which the engine has no hash: nobody else's block."""
        self._num_unnamed += 1
        return self._id(b"unnamed %d" % self._num_unnamed)
