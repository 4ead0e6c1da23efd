"""Settings of a disk tier."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvtier.errors import ConfigurationError
from kvtier.policy import POLICIES
from kvtier.tiers.disk.layout import EPOCH_NAME, cache_folder

NAMESPACE_BYTES = 32


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where a disk tier keeps its blocks and what it may take. Checked when made: raises ConfigurationError."""

    paths: tuple[str, ...]
    """Folders, best on a device each; blocks are spread over them evenly. They are made where they are missing."""
    capacity_bytes: int
    """All that the tier may take in `paths` together, its books and the caches of other namespaces included."""
    namespace: bytes
    """32 bytes: digest of everything that makes two engines' bytes interchangeable."""
    rank: int = 0
    """Which of `num_ranks` this is: each has a cache of its own in `paths`."""
    num_ranks: int = 1
    """Engines that share `capacity_bytes` evenly, for example the data-parallel ranks of one server."""
    label: str = ""
    """For people who look at the folder: the model's name, say. Of 128 bytes at most the rest is cut off."""
    policy: str = "arc"
    min_free_bytes: int = 1 << 30
    """Nothing new is written while the filesystem has less than this free."""
    max_storing_bytes: int = 256 << 20
    """Blocks that wait to be written hold RAM slots; beyond this, further stores are refused."""
    grow_bytes: int = 256 << 20
    """Space is taken in steps of this size, as it is needed."""
    keep_other_namespaces: bool = False
    """False: caches of other namespaces in `paths` that nobody owns are removed, oldest first, as this one needs
    their space. True: this one takes what they leave."""
    direct: bool = True
    """Past the page cache, where the filesystem has that."""
    num_threads: int | None = None
    """I/O threads; None: 8, or 12 for blocks below 1 MiB. 0: none, everything happens in `poll` (for tests)."""
    commit_s: float = 0.5
    """A block survives a power loss about this long after its store has ended."""

    def __post_init__(self) -> None:
        if not self.paths or len(set(map(os.path.realpath, self.paths))) < len(self.paths):
            raise ConfigurationError(f"disk paths are {list(self.paths)}; allowed: one or more different folders")
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ConfigurationError(f"the namespace has {len(self.namespace)} bytes; allowed: {NAMESPACE_BYTES}")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigurationError(f"disk rank is {self.rank} of {self.num_ranks}; allowed: 0 or more, below that")
        if self.policy not in POLICIES:
            raise ConfigurationError(f"disk policy {self.policy!r} is unknown; allowed: {', '.join(sorted(POLICIES))}")
        for name in ("capacity_bytes", "max_storing_bytes", "grow_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; allowed: 1 or more bytes")
        if self.min_free_bytes < 0:
            raise ConfigurationError(f"min_free_bytes is {self.min_free_bytes}; allowed: 0 or more bytes")
        if self.num_threads is not None and self.num_threads < 0:
            raise ConfigurationError(f"disk num_threads is {self.num_threads}; allowed: 0 or more")
        if not self.commit_s >= 0:
            raise ConfigurationError(f"commit_s is {self.commit_s}; allowed: 0 or more seconds")

    @property
    def folder(self) -> str:
        """Name of this rank's cache in each of `paths`."""
        return cache_folder(self.namespace, self.rank)

    @property
    def epoch_path(self) -> str:
        """Where the weight epoch belongs: the path for a `FileEpochStore`. One for all ranks: what a server with fewer
        ranks has reset does not come back in one with more."""
        return os.path.join(os.path.abspath(self.paths[0]), cache_folder(self.namespace), EPOCH_NAME)
