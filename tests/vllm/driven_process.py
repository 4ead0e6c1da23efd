"""The other end of `driven_engine.py`'s pipe, and what /proc and the folders show of its processes, dead or alive."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_harness import CORES, HERE, PATIENCE_S, connector_arguments, engine_arguments, engine_environment

POLL_S = 0.05
START_PATIENCE_S = 4 * PATIENCE_S
SHARED_MEMORY = Path("/dev/shm")


def wait_until(done: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    give_up_at_s = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < give_up_at_s, f"after {patience_s} s still not: {what}"
        time.sleep(POLL_S)  # between two questions to /proc


class DrivenProcess:
    """An engine in a process (and session) of its own. Starts at once; `wait_until_ready` before the first request."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        num_blocks: int,
        settings: dict[str, Any] | None,
        connector: str = "kvtier.adapters.vllm:KVTierConnector",
        multiprocess: bool = False,
        core: int = 0,
        temporary: Path | None = None,
        **changes: Any,
    ) -> None:
        """`settings` None: plain vLLM. `connector` is module:class; modules next to the tests are found too.

        `temporary` is where its processes put temporary files (sockets too: a short name).
        """
        if settings is not None:
            module, _, name = connector.partition(":")
            names = {"kv_connector": name, "kv_connector_module_path": module}
            changes["kv_transfer_config"] = connector_arguments(settings) | names
        ranks = changes.get("tensor_parallel_size", 1)
        environment = engine_environment(multiprocess, ranks)
        if ranks == 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(CORES[core % len(CORES)])
        # vLLM kills what has not ended by then, and here other engines may spin on the same cores
        environment["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = f"{PATIENCE_S:.0f}"
        if temporary is not None:
            environment["TMPDIR"] = str(temporary)
        arguments = {
            "engine": engine_arguments(model, num_blocks, **changes),
            "multiprocess": multiprocess,
            "environment": environment,
        }
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "driven_engine.py"), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
                text=True,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                if line.endswith("\n"):  # else it was killed in the middle of it
                    self._lines.put(line)
        self._lines.put("")

    # -- talk ------------------------------------------------------------------------------------------------

    def send(self, *command: Any) -> None:
        """Hands a command in. A dead engine does not mind."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def read(self, patience_s: float = PATIENCE_S) -> list[Any] | None:
        """The next answer; None when there are no more, since the process has ended."""
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            raise AssertionError(f"no answer in {patience_s} s\n{self.log_tail()}") from None
        if not line:
            self._lines.put("")
            return None
        answer: list[Any] = json.loads(line)
        return answer

    def expect(self, kind: str, patience_s: float = PATIENCE_S) -> list[Any]:
        """The next answer, which must be of this kind."""
        answer = self.read(patience_s)
        assert answer is not None, f"the engine has ended with {self.process.wait()}\n{self.log_tail()}"
        assert answer[0] == kind, answer
        return answer[1:]

    def wait_until_ready(self) -> None:
        self.expect("ready", START_PATIENCE_S)

    def probe(self, side: str, function: str, *arguments: Any) -> Any:
        """The value of a function of the connector's module. Not while there are requests."""
        self.send("probe", side, function, arguments)
        return self.expect("probe")[0]

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    # -- processes -------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """The living processes of the session, oldest first."""
        return [pid for pid in living_pids() if session_of(pid) == self.process.pid]

    def kill(self, pids: Sequence[int]) -> None:
        """kill -9."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until_gone(self) -> None:
        """Until no process of the session is left."""
        self.process.wait(PATIENCE_S)
        wait_until(lambda: not self.pids(), f"every process of session {self.process.pid} is gone")

    def close(self) -> int:
        """Ends the engine in good order. Returns the exit status."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def discard(self) -> None:
        """Whatever state it is in: nothing of it runs afterwards."""
        self.kill(self.pids())
        self.process.wait(PATIENCE_S)
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def living_pids() -> list[int]:
    """Every process that is not a zombie."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    pids.append(int(entry.name))
    return sorted(pids)


def session_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def pools_of(pid: int, pool_dir: Path | None = None) -> set[tuple[int, int]]:
    """(device, inode) of every RAM pool that the process has mapped or has open. Pools have no name in any folder."""
    prefixes = ("/memfd:kvtier", *([f"{pool_dir}/"] if pool_dir else []))
    pools = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefixes):
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                pools.add((os.makedev(major, minor), int(fields[4])))
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith(prefixes):
                    status = descriptor.stat()
                    pools.add((status.st_dev, status.st_ino))
    return pools


def shared_memory_bytes() -> int:
    """Shmem: what all RAM pools of the machine take, and other files in memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")
