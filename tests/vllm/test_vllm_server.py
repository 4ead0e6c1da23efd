"""vLLM's own server in processes of its own: what /metrics shows, and what is left when it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_harness import BLOCK, PATIENCE_S, Prompts, connector_arguments, engine_environment

from valkey_harness import ValkeyServer

POLL_S = 0.2


class Server:
    """vLLM's OpenAI server on a port of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self._port = port
        self._log = log

    def request(self, path: str, body: dict[str, Any] | None = None, post: bool = False) -> str:
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.read().decode()

    def complete(self, model: Path, prompt: list[int]) -> dict[str, Any]:
        body = {"model": str(model), "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return json.loads(self.request("/v1/completions", {**body, "return_token_ids": True}))

    def metrics(self) -> Counter[str]:
        """Every sample of /metrics by its name, summed up over the labels; 0 where there is none yet. Those of tiers
        also by name and medium, with a space between."""
        samples: Counter[str] = Counter()
        for line in self.request("/metrics").splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                samples[name] += float(value)
                for medium in re.findall(r'medium="([^"]*)"', labels):
                    samples[f"{name} {medium}"] += float(value)
        return samples

    def wait_until(self, done: Callable[[], object], what: str, patience_s: float = 2 * PATIENCE_S) -> None:
        give_up_at_s = time.monotonic() + patience_s
        while not done():
            assert time.monotonic() < give_up_at_s, f"still not: {what}\n{self._log.read_text()[-3000:]}"
            time.sleep(POLL_S)  # between two questions over HTTP or to /proc

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        return self._log.read_text()

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-6000:]
        with contextlib.suppress(OSError, urllib.error.URLError):
            self.request("/health")
            return True
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving(model: Path, folder: Path, settings: dict[str, Any], *arguments: str, ranks: int = 1) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", str(BLOCK)]
    command += ["--enforce-eager", "--max-num-seqs", "8", "--kv-transfer-config"]
    command += [json.dumps(connector_arguments(settings)), *arguments]
    environment = {**os.environ, **engine_environment(multiprocess=True, ranks=ranks), "VLLM_SERVER_DEV_MODE": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    server = Server(process, port, log)
    try:
        server.wait_until(server.is_healthy, "the server is healthy")
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session holds nothing else
        process.wait()


def test_metrics_of_a_served_engine(smollm2, plain, tmp_path, request):
    prompts = [Prompts(seed)(9 * BLOCK + 12) for seed in (11, 12, 13)]
    expected = plain(smollm2).answers(prompts)
    num_blocks = 9 * len(prompts)
    block_bytes = 30 * 2 * 3 * 64 * 4 * BLOCK  # layers, K and V, heads, head size, float32
    num_slots = 64
    store = ValkeyServer()
    request.addfinalizer(store.stop)
    # a store that can be used, and one that is not there
    tiers = [f"valkey://127.0.0.1:{store.port}", f"valkey://127.0.0.1:{free_port()}"]
    settings = {"ram": num_slots * block_bytes + 1000, "tiers": tiers}
    arguments = ["--num-gpu-blocks-override", "40", "--max-model-len", "640", "--max-num-batched-tokens", "640"]
    with serving(smollm2, tmp_path, settings, *arguments) as server:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert server.complete(smollm2, prompt)["choices"][0]["token_ids"] == answer
        server.wait_until(
            lambda: server.metrics()["vllm:kvtier_stored_blocks_total"] == num_blocks, "all prompts are stored"
        )
        server.request("/reset_prefix_cache", post=True)
        for prompt, answer in zip(prompts, expected, strict=True):
            assert server.complete(smollm2, prompt)["choices"][0]["token_ids"] == answer
        server.wait_until(
            lambda: server.metrics()["vllm:kvtier_loaded_blocks_total"] == num_blocks, "all prompts are loaded"
        )

        assert "kvtier: RAM pool of" in server.log
        metrics = server.metrics()
        assert metrics["vllm:kv_offload_load_bytes_total"] == num_blocks * block_bytes
        assert metrics["vllm:kv_offload_store_bytes_total"] == num_blocks * block_bytes
        assert metrics["vllm:kv_offload_load_time_total"] > 0
        assert metrics["vllm:kv_offload_load_size_count"] == len(prompts)
        assert metrics["vllm:kvtier_capacity_blocks"] == num_slots
        assert metrics["vllm:kvtier_ready_blocks"] == num_blocks
        idle = ["in_flight_blocks", "pinned_blocks", "condemned_blocks", "evicted_blocks_total", "errors_total"]
        idle += ["failed_jobs_total", "breaker_openings_total", "breaker_state"]
        for name in idle:
            assert metrics[f"vllm:kvtier_{name}"] == 0
        assert metrics["vllm:external_prefix_cache_hits_total"] == num_blocks * BLOCK
        with store.client() as client:
            num_shared = client.dbsize()
        assert metrics["vllm:kvtier_tier_stored_bytes_total valkey"] == num_shared * block_bytes > 0
        assert metrics["vllm:kvtier_tier_in_use valkey"] == 1
        assert metrics["vllm:kvtier_tier_in_use valkey-2"] == 0
        assert metrics["vllm:kvtier_tier_stored_bytes_total valkey-2"] == 0
        assert metrics["vllm:kvtier_tier_corrupt_blocks_total"] == 0


def pool_files(pid: int) -> set[tuple[str, str]]:
    """(device, inode) of every RAM pool that the process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {tuple(line.split()[3:5]) for line in lines if "kvtier-pool" in line}
    return set()


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that one of these processes uses."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    names.add(line.rpartition("/dev/shm/")[2].split(" ")[0])
    return names


def test_a_killed_engine_leaves_nothing_behind(dense, tmp_path):
    before = set(os.listdir("/dev/shm"))
    arguments = ["--num-gpu-blocks-override", "40", "--max-model-len", "640", "--skip-tokenizer-init"]
    settings = {"ram": "256MiB"}
    with serving(dense, tmp_path, settings, *arguments, "--tensor-parallel-size", "2", ranks=2) as server:
        server.complete(dense, Prompts(14)(9 * BLOCK))
        session = [pid for pid in all_pids() if in_session(pid, server.process.pid)]
        users = {pid: pool_files(pid) for pid in session if pool_files(pid)}
        pools = set().union(*users.values())
        assert len(users) == 3, "the engine core and two workers have the pool mapped"
        assert len(pools) == 1
        assert not [name for name in os.listdir("/dev/shm") if "kvtier" in name]

        shared = mapped_shared_memory(session)  # vLLM's own; others on this machine may have theirs
        engine_core = [pid for pid in users if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(engine_core) == 1
        os.kill(engine_core[0], signal.SIGKILL)
        server.wait_until(lambda: server.process.poll() is not None, "the server has noticed")
        server.wait_until(
            lambda: not any(pools & pool_files(pid) for pid in all_pids()), "no process holds the pool's memory"
        )
        left = set(os.listdir("/dev/shm")) - before
        assert not [name for name in left if "kvtier" in name]
        server.wait_until(
            lambda: not shared.intersection(os.listdir("/dev/shm")) - mapped_shared_memory(all_pids()),
            "nothing is left in /dev/shm",
        )


def test_two_data_parallel_ranks_have_a_pool_each_and_leave_nothing_behind(dense, tmp_path):
    pools_folder = tmp_path / "pools"
    pools_folder.mkdir()
    arguments = ["--num-gpu-blocks-override", "40", "--max-model-len", "640", "--skip-tokenizer-init"]
    settings = {"ram": "64MiB", "pool_dir": str(pools_folder)}
    with serving(dense, tmp_path, settings, *arguments, "--data-parallel-size", "2", ranks=2) as server:
        for seed in range(4):
            server.complete(dense, Prompts(20 + seed)(9 * BLOCK))
        session = [pid for pid in all_pids() if in_session(pid, server.process.pid)]
        users = {pid: files for pid in session if (files := unnamed_files(pid, pools_folder))}
        assert len(set().union(*users.values())) == 2, "one pool for each rank"
        assert all(len(files) == 1 for files in users.values()), "nobody has the pool of the other rank"
        assert server.log.count("kvtier: RAM pool of") == 2
        assert list(pools_folder.iterdir()) == []
        for pid in users:
            os.kill(pid, signal.SIGKILL)
        server.wait_until(lambda: not any(map(is_alive, users)), "all that had a pool are dead")
    assert list(pools_folder.iterdir()) == []


def unnamed_files(pid: int, folder: Path) -> set[tuple[str, str]]:
    """(device, inode) of every file without a name in `folder` that the process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {tuple(line.split()[3:5]) for line in lines if f"{folder}/" in line and "(deleted)" in line}
    return set()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def in_session(pid: int, session: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == session
    return False
