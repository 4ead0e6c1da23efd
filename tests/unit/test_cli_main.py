"""The command line: help, what is passed on to vLLM, and one line for bad input."""

import json
import shlex
import subprocess
import sys

import pytest

from kvtier import __version__
from kvtier.cli import main, serve

COMMANDS = ["serve", "demo", "demo-model", "simulate", "inspect", "verify", "gc", "version"]


def run(capsys, *arguments):
    code = main.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def no_vllm(monkeypatch):
    find_spec = serve.importlib.util.find_spec
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))


def test_help_names_every_command_and_has_examples(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, err = run(capsys, *arguments)
        assert code == 0
        assert not err
        assert "Examples:\n" in out
        for command in COMMANDS:
            assert command in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(capsys, command):
    code, out, err = run(capsys, command, "--help")
    assert code == 0
    assert not err
    assert f"Usage: kvtier {command}" in out


def test_version(capsys):
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert f"kvtier {__version__}" in out.splitlines()
    assert "torch" in out


def test_neither_torch_nor_an_engine_is_imported():
    program = "import sys, kvtier.cli.main, kvtier.cli.demo, kvtier.cli.demo_engine, kvtier.cli.model\n"
    program += "print([name for name in ('torch', 'vllm', 'transformers', 'gguf') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def serve_dry_run(capsys, *arguments):
    code, out, err = run(capsys, "serve", *arguments)
    assert code == 0, err
    command = shlex.split(out)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return command


def test_serve_writes_the_connector_and_leaves_vllms_arguments_alone(capsys):
    mine = ["--port", "8000", "--served-model-name", "it's mine", "--max-model-len=4096"]
    options = ["--ram", "8GiB", "--policy", "lru", "--deadline-s", "2.5", "--set", "blocks_per_chunk=4"]
    command = serve_dry_run(capsys, "some/model", *options, "--dry-run", "--", *mine)
    assert command[3:5] == ["--model", "some/model"]
    assert command[5] == "--kv-transfer-config"
    assert json.loads(command[6]) == {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram": "8GiB", "policy": "lru", "deadline_s": 2.5, "blocks_per_chunk": 4},
    }
    assert command[7:] == mine


def test_serve_with_a_disk(capsys, tmp_path):
    command = serve_dry_run(capsys, "m", "--disk", str(tmp_path), "--disk-capacity", "20GiB", "--dry-run")
    disk = json.loads(command[6])["kv_connector_extra_config"]["disk"]
    assert disk == {"path": str(tmp_path), "capacity": "20GiB"}


def test_serve_leaves_a_server_with_lower_tiers_time_to_stop(capsys, tmp_path):
    disk = ("--disk", str(tmp_path), "--disk-capacity", "20GiB")
    assert serve_dry_run(capsys, "m", *disk, "--dry-run")[-2:] == ["--shutdown-timeout", "10"]
    assert serve_dry_run(capsys, "m", "--tier", "valkey://cache", "--dry-run")[-2:] == ["--shutdown-timeout", "10"]
    assert "--shutdown-timeout" not in serve_dry_run(capsys, "m", "--dry-run")
    for mine in (["--shutdown-timeout", "3"], ["--shutdown_timeout=3"]):
        assert serve_dry_run(capsys, "m", *disk, "--dry-run", "--", *mine)[-len(mine) :] == mine


def test_serve_with_shared_tiers(capsys, tmp_path):
    urls = [f"disk://{tmp_path}/kv?capacity=20GiB", "valkey://cache:6379?ttl=1d&connections=8"]
    command = serve_dry_run(capsys, "m", "--tier", urls[0], "--tier", urls[1], "--dry-run")
    assert json.loads(command[6])["kv_connector_extra_config"] == {"ram": "4GiB", "tiers": urls}


def test_serve_leaves_out_what_was_not_set(capsys):
    command = serve_dry_run(capsys, "m", "--print-command")
    assert json.loads(command[6])["kv_connector_extra_config"] == {"ram": "4GiB"}


def test_serve_becomes_the_server(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(serve, "require_vllm", lambda extra: None)
    monkeypatch.setattr(serve.os, "execv", lambda path, command: started.append((path, command)))
    assert run(capsys, "serve", "m", "--", "--port", "1")[0] == 0
    [(path, command)] = started
    assert path == sys.executable
    assert command[0] == sys.executable
    assert command[-2:] == ["--port", "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["foo"], "No such command 'foo'"),
        (["serve"], "model"),
        (["serve", "m", "--port", "8000"], "go after `--`"),
        (["serve", "m", "n"], "'n': expected one model"),
        (["serve", "m", "--ram", "8 bananas"], "ram is '8 bananas'"),
        (["serve", "m", "--policy", "best"], "policy is 'best'; allowed: adaptive, arc, lru, lru2, s3fifo"),
        (["serve", "m", "--deadline-s", "-1"], "deadline_s is -1.0"),
        (["serve", "m", "--deadline-s", "soon"], "--deadline-s"),
        (["serve", "m", "--store-threshold", "-1"], "store_threshold is -1"),
        (["serve", "m", "--set", "polciy=lru"], "did you mean 'policy'?"),
        (["serve", "m", "--set", "policy"], "--set policy: expected KEY=VALUE"),
        (["serve", "m", "--policy", "lru", "--set", "policy=arc"], "policy: given twice"),
        (["serve", "m", "--", "--kv-transfer-config", "{}"], "--kv-transfer-config: kvtier serve writes it"),
        (["serve", "m", "--", "--kv-transfer-config={}"], "--kv-transfer-config: kvtier serve writes it"),
        (["serve", "m", "--disk", "/tmp"], "--disk-capacity is missing"),
        (["serve", "m", "--disk-capacity", "1GiB"], "--disk is missing"),
        (["serve", "m", "--disk", "/tmp", "--disk-capacity", "much"], "disk.capacity is 'much'"),
        (["serve", "m", "--tier", "vlkey://host"], "did you mean 'valkey://'?"),
        (["serve", "m", "--tier", "valkey://host?conections=8"], "did you mean 'connections'?"),
        (["serve", "m", "--tier", f"disk://{__file__}?capacity=1GiB"], "is not a folder"),
        (
            ["serve", "m", "--disk", "/tmp", "--disk-capacity", "1GiB", "--tier", "disk:///tmp/b?capacity=1GiB"],
            "'disk' and a disk:// URL in 'tiers'",
        ),
        (["serve", "m", "--disk", __file__, "--disk-capacity", "1GiB"], "is not a folder"),
        (["demo", "--speed", "0"], "--speed 0"),
        (["demo", "--window-s", "-1"], "--window-s -1"),
        (["demo", "--users", "1"], "--users"),
        (["demo", "--requests", "many"], "--requests"),
        (["demo", "--ram", "3x"], "ram is '3x'"),
        (["demo", "--trace", "no/such/file.jsonl"], "no/such/file.jsonl does not exist"),
        (["demo-model", "--wheel", "no.whl"], "--wheel: no.whl is not a file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_started(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(serve.os, "execv", pytest.fail)
    code, out, err = run(capsys, *arguments)
    assert code == main.BAD_INPUT
    assert not out
    assert said in err
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["serve", "m"], ["demo"]])
def test_without_vllm_one_line_says_what_to_install(no_vllm, capsys, command):
    code, _, err = run(capsys, *command)
    assert code == main.BAD_INPUT
    assert err.count("\n") == 1
    assert "vLLM is not installed: pip install 'kvtier[" in err
    assert "vllm==0.32.*" in err


def test_without_vllm_the_rest_works(no_vllm, capsys):
    serve_dry_run(capsys, "m", "--dry-run")
    assert run(capsys, "version")[0] == 0


def test_another_vllm_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(serve.importlib.metadata, "version", lambda name: "0.29.1")
    code, _, err = run(capsys, "serve", "m")
    assert code == main.BAD_INPUT
    assert "vLLM 0.29.1 is not supported" in err


def test_a_failure_is_one_line_too(monkeypatch, capsys):
    from kvtier.cli import demo
    from kvtier.cli.demo_process import RunError

    def fail(options):
        raise RunError("the engine\nstopped")

    monkeypatch.setattr(demo, "run", fail)
    code, _, err = run(capsys, "demo")
    assert code == main.FAILED
    assert err == "kvtier: the engine stopped\n"


def test_outputs_that_differ_fail_the_demo(monkeypatch, capsys):
    from kvtier.cli import demo

    monkeypatch.setattr(demo, "run", lambda options: False)
    assert run(capsys, "demo")[0] == main.FAILED


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    from kvtier.cli import demo

    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    code, _, err = run(capsys, "demo")
    assert code == main.INTERRUPTED
    assert err == "kvtier: interrupted\n"
