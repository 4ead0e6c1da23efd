"""What the tests of a persisted RAM pool share: an engine's scheduler side over a named file, without an engine."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier import make_offload_key
from kvtier.interfaces import CPULoadStoreSpec, ReqContext
from kvtier.keys import OffloadKey
from kvtier.manager import PersistedOffloadingManager
from kvtier.runtime import Identity, build_stack, parse_config
from kvtier.tiers.ram_keeper import RamKeeper
from kvtier.tiers.ram_persist import open_persisted

NAMESPACE = b"the namespace of the tests".ljust(32)
NUM_SLOTS = 8
SLOT_BYTES = 4096
PATIENCE_S = 60.0
KEYS = [make_offload_key(hashlib.sha256(b"%d" % i).digest(), 0) for i in range(24)]


def content(key: OffloadKey, version: int = 0, num_bytes: int = SLOT_BYTES) -> npt.NDArray[np.uint8]:
    """(num_bytes,) uint8: bytes that no other key or version has."""
    seed = int.from_bytes(hashlib.sha256(key + version.to_bytes(8, "little")).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


class Process:
    """One life of an engine: opens the file, stores and loads, ends in good order (`stop`) or leaves an image."""

    def __init__(
        self,
        path: Path | str,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
        namespace: bytes = NAMESPACE,
        enable_events: bool = False,
        **settings: Any,
    ) -> None:
        self.path = Path(path)
        self.persisted = open_persisted(str(path), num_slots, slot_bytes, namespace)
        self.keeper = RamKeeper(self.persisted)
        self.slots = self.persisted.pool.slots()
        config = parse_config({"ram": num_slots * slot_bytes, "policy": "lru", "deadline_s": 60, **settings})
        identity = Identity(namespace)
        self.stack = build_stack(config, self.slots, identity, enable_events, self.keeper)
        self.core = self.stack.core
        assert isinstance(self.stack.ram, PersistedOffloadingManager)
        self.ram = self.stack.ram
        self.now_s = 0.0
        self.core.advance(self.now_s)
        self._num_requests = 0

    @property
    def restored(self) -> set[OffloadKey]:
        """What nobody has asked for yet."""
        return set(self.ram._index.restored)

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.core.get_stats().counters)

    def context(self) -> ReqContext:
        self._num_requests += 1
        return ReqContext(f"request {self._num_requests}")

    def begin_store(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> CPULoadStoreSpec:
        output = self.core.prepare_store_prefix(keys, context or self.context())
        return cast(CPULoadStoreSpec, output.store_spec)

    def write(self, spec: CPULoadStoreSpec, version: int = 0) -> None:
        """What the workers do."""
        for key, slot in zip(spec.keys, spec.slots, strict=True):
            self.slots[slot] = content(key, version, self.slots.shape[1])

    def store(self, keys: Sequence[OffloadKey], version: int = 0, success: bool = True) -> list[OffloadKey]:
        """Stores those of `keys` that are not there. Returns them."""
        context = self.context()
        spec = self.begin_store(keys, context)
        self.write(spec, version)
        self.core.complete_store(spec.keys, context, success, spec)
        self.core.on_request_finished(context)
        return list(spec.keys)

    def find(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> list[OffloadKey]:
        """Those of `keys` that can be loaded, whatever has to be checked before."""
        context = context or self.context()
        for _ in range(1000):
            answers = [self.core.lookup(key, context) for key in keys]
            if None not in answers:
                return [key for key, answer in zip(keys, answers, strict=True) if answer]
            self.stack.linger(PATIENCE_S)
            self.now_s += 0.001
            self.core.advance(self.now_s)
            self.core.on_schedule_end()
        raise AssertionError("the blocks are being checked for ever")

    def load(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, bytes]:
        """The bytes of those of `keys` that are there."""
        context = self.context()
        found = self.find(keys, context)
        spec = cast(CPULoadStoreSpec, self.core.prepare_load(found, context))
        loaded = {key: self.slots[slot].tobytes() for key, slot in zip(spec.keys, spec.slots, strict=True)}
        self.core.complete_load(found, context, spec=spec)
        self.core.on_request_finished(context)
        return loaded

    def flush(self) -> None:
        assert self.keeper.flush(PATIENCE_S)

    def image(self, path: Path) -> Path:
        """What a kill at this moment leaves."""
        shutil.copyfile(self.path, path)
        path.chmod(0o600)
        return path

    def stop(self) -> None:
        assert self.stack.stop(lambda: self.now_s)
        self.slots = np.zeros((0, 0), np.uint8)
        self.persisted.pool.close()

    def abandon(self) -> None:
        """Lets go of the file, and does nothing more."""
        self.keeper.close(0.0)
        self.slots = np.zeros((0, 0), np.uint8)
        self.persisted.pool.close()
