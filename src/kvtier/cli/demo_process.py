"""Runs the demo's engine in a process of its own and shows how far it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvtier.errors import ConfigurationError, KVTierError

ENGINE = ("-m", "kvtier.cli.demo_engine")
"""What this Python runs as the engine's process."""
_STOP_S = 10.0
"""How long an interrupted engine has to stop before it is killed."""
_ERROR = re.compile(r"(?:^|\s)(?:[\w.]+\.)?(\w+Error): (.+)$")
_WRAPPERS = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineCore encountered")


class RunError(KVTierError):
    """A run of the demo did not finish."""


class Progress:
    """A bar for each run on a terminal; elsewhere one line for each start and each finished phase."""

    def __init__(self, console: Console, phases: list[str], requests: int) -> None:
        self._console = console
        self._phases = phases
        self._requests = requests
        self._label = ""
        self._done: dict[int, int] = {}
        self._task: TaskID | None = None
        self._bars = Bars(
            TextColumn("{task.description:<42}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, label: str) -> None:
        """A run starts: its engine loads."""
        self._label = label
        self._done = {}
        self._task = self._bars.add_task(f"{label}: engine starts", total=self._requests)
        self._line("engine starts")

    def told(self, event: dict[str, Any]) -> None:
        """Shows one event of the engine's process."""
        if self._task is None:
            return
        if event["event"] == "restart":
            self._bars.update(self._task, description=f"{self._label}: engine stopped, starts again")
            self._line("engine stopped, starts again")
        elif event["event"] == "ready":
            phase = max(self._done, default=-1) + 1
            self._bars.update(self._task, description=f"{self._label}: {self._phases[phase]}")
            self._line(f"engine ready after {event['seconds']:.0f} s")
        elif event["event"] == "request":
            phase = event["phase"]
            self._done[phase] = self._done.get(phase, 0) + 1
            text = f"{self._label}: {self._phases[phase]}, first token {event['ttft_s']:.2f} s"
            self._bars.update(self._task, advance=1, description=text)
        elif event["event"] == "phase":
            phase = event["phase"]
            self._line(f"{self._phases[phase]} done, {self._done.get(phase, 0)} requests")
        elif event["event"] == "done":
            self._bars.update(self._task, description=f"{self._label}: done")
            self._line(f"done after {event['seconds']:.0f} s")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: {text}", highlight=False)


def run_engine(spec: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Runs `spec` and returns its result. Raises ConfigurationError or RunError with the engine's own reason."""
    folder.mkdir()
    spec_file, out_file, log_file = folder / "spec.json", folder / "out.json", folder / "log.txt"
    spec_file.write_text(json.dumps(spec))
    command = [sys.executable, *ENGINE, "--spec", str(spec_file), "--out", str(out_file)]
    with log_file.open("w+", errors="replace") as log:
        # a group of its own: an interrupted demo stops the engine and its workers, and none is left behind; its
        # stdin ends with this process, also if that is killed
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"event"'):
                    progress.told(json.loads(line))
                else:
                    log.write(line)
                    log.flush()
            code = process.wait()
        finally:
            _stop(process)
    if code or not out_file.exists():
        raise _reason(log_file.read_text(errors="replace"), code)
    result: dict[str, Any] = json.loads(out_file.read_text())
    return result


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends whatever is left of the process's group."""
    for signal_number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 1.0)):
        if not _signal_group(process.pid, signal_number):
            return
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            process.poll()
            if not _signal_group(process.pid, 0):
                return
            time.sleep(0.05)


def _signal_group(group: int, signal_number: int) -> bool:
    """False if nobody is left in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal_number)
        return True
    return False


def _reason(log: str, code: int) -> KVTierError:
    """The first error in the engine's log that says something, as one line."""
    keep = Path(f"kvtier-demo-engine.{os.getpid()}.log")
    found = [match for line in log.splitlines() if (match := _ERROR.search(line))]
    found = [match for match in found if not match[2].startswith(_WRAPPERS)]
    for match in found:
        if match[1] in ("ConfigurationError", "PoolError"):
            return ConfigurationError(match[2])
    with contextlib.suppress(OSError):
        keep.write_text(log)
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    said = f"{found[0][1]}: {found[0][2]}" if found else ended
    return RunError(f"the engine stopped: {said} (its log: {keep})")
