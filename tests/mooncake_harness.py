"""A real Mooncake master, and processes of their own that lend it RAM: both are in Mooncake's wheel."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import TierDriver
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import MooncakeConfig, MooncakeStore, SharedConfig, SharedTier
from valkey_harness import GIVE_UP_S, free_port

NAMESPACE = b"tests of the Mooncake tier".ljust(32)
CLIENT_TTL_S = 2
"""After so long without a word from it, a process that lends RAM is given up."""
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", "127.0.0.1:" + sys.argv[1])
print("ready", code, flush=True)
sys.stdin.read()
"""


def master_binary() -> str:
    """Skips where there is none for this machine."""
    spec = importlib.util.find_spec("mooncake")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / "mooncake_master").exists():
            return str(path)
    pytest.skip("there is no Mooncake for this machine")


class Process:
    """What masters and owners have in common."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until_s = time.monotonic() + GIVE_UP_S
        for status in Path(f"/proc/{self.process.pid}/task").glob("*/status"):
            while "State:\tT" not in status.read_text():
                assert time.monotonic() < until_s, "it does not freeze"
                time.sleep(0.001)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class MooncakeMaster(Process):
    """Started by `start`; the port stays the same over restarts, what was stored does not."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-mooncake-")
        self.start()

    def start(self) -> None:
        self.metrics_port = free_port()
        command = [
            *(master_binary(), "--rpc_address", "127.0.0.1", "--rpc_port", str(self.port), "--rpc_thread_num", "2"),
            *(
                "--metrics_port",
                str(self.metrics_port),
                "--metrics_host",
                "127.0.0.1",
                "--client_ttl",
                str(CLIENT_TTL_S),
            ),
            *self._options,
        ]
        log = os.path.join(self._folder.name, "log")
        with open(log, "ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        until_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert self.process.poll() is None, Path(log).read_text()
                assert time.monotonic() < until_s, "the master does not start"
                time.sleep(0.01)

    def stop(self) -> None:
        self.kill()
        self._folder.cleanup()

    def num_objects(self) -> int:
        """As the master counts them: those that are just being written as well."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=GIVE_UP_S) as answer:
            lines = answer.read().decode().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("master_key_count "))

    def client(self) -> Any:
        """An ordinary client, as others use one."""
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{self.port}")
        assert code == 0
        return client


class SegmentOwner(Process):
    """A process that lends RAM to a master, until it is killed."""

    def __init__(self, master: MooncakeMaster, segment_bytes: int = 64 << 20) -> None:
        command = [sys.executable, "-c", _OWNER, str(master.port), str(segment_bytes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, b"")
        assert next((line for line in lines if line.startswith(b"ready")), b"").split() == [b"ready", b"0"]

    def kill(self) -> None:
        super().kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def make_tier(master_port: int, settings: dict[str, object] | None = None, **config: object) -> SharedTier:
    """A tier on a master; `settings` are of the tier, `config` of the store."""
    store = MooncakeStore(MooncakeConfig("127.0.0.1", master_port, **config))  # type: ignore[arg-type]
    shared = SharedConfig(NAMESPACE, **(settings or {}))  # type: ignore[arg-type]
    return SharedTier(shared, store, MemoryEpochStore())


def drive(tier: SharedTier, num_slots: int = 32, slot_bytes: int = 4096) -> TierDriver:
    return TierDriver(tier, num_slots, slot_bytes, answers_at_once=False)
