"""The demo without an engine: what it asks, how it runs and stops its engine, and what it makes of the numbers."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli import demo, demo_process, demo_report
from kvtier.cli.demo_engine import set_environment
from kvtier.errors import ConfigurationError


def options(tmp_path, **changes):
    settings = {"trace": None, "requests": 24, "speed": None, "window_s": 600.0, "users": 6, "turns": 3}
    settings |= {"ram": "1GiB", "model": None, "json_file": tmp_path / "result.json", **changes}
    return demo.Options(**settings)


def record(number, phase, ttft_s, prompt=(100, 0, 0), output=(1, 2, 3)):
    computed, engine, loaded = prompt
    return {
        "id": str(number),
        "phase": phase,
        "ttft_s": ttft_s,
        "prompt_tokens": sum(prompt),
        "computed_tokens": computed,
        "engine_tokens": engine,
        "loaded_tokens": loaded,
        "output": list(output),
        "text": "one two three",
        "user": f"user {number % 2}",
        "question": "How many?",
    }


def canned_runs():
    without = {
        "requests": [record(n, n // 2, 2.0 + n / 10) for n in range(4)],
        "counters": [{}, {}, {}],
        "seconds": 20.0,
        "start_seconds": 30.0,
        "cores": "0,1",
    }
    with_kvtier = {
        "requests": [record(n, n // 2, 0.05 + n / 10, prompt=(20, 0, 80) if n > 1 else (100, 0, 0)) for n in range(4)],
        "counters": [
            {demo_report.STORED: 5.0, demo_report.DEFERRED: 0.0},
            {demo_report.STORED: 5.0 + 2**20, demo_report.DEFERRED: 0.0},
            {
                demo_report.STORED: 5.0 + 3 * 2**20,
                demo_report.LOADED: 4.0 * 2**20,
                demo_report.DISK_LOADED: 3.0 * 2**20,
                demo_report.DEFERRED: 1.0,
            },
        ],
        "seconds": 10.0,
        "start_seconds": 31.0,
        "cores": "0,1",
    }
    return without, with_kvtier


def test_every_user_has_a_document_and_questions(tmp_path):
    users = demo.chat_users(6, 4)
    assert len({user["opening"][0]["content"] for user in users}) == 6
    for user in users:
        assert len(user["questions"]) == 4
        assert [message["role"] for message in user["opening"]] == ["user", "assistant"]
        document = user["opening"][0]["content"]
        assert 5_000 < len(document) < 12_000
        assert "\n? " not in document


def test_both_runs_of_the_chat_are_asked_the_same_every_time(tmp_path):
    spec = demo.chat_spec(options(tmp_path, users=2, turns=2))
    assert spec == demo.chat_spec(options(tmp_path, users=2, turns=2))
    assert [len(user["questions"]) for user in spec["users"]] == [2, 2]
    json.dumps(spec)


def test_a_trace_becomes_requests(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 160, "hash_ids": [0, n + 1]} for n in range(9)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    spec, notes = demo.trace_spec(options(tmp_path, requests=6, speed=4.0), trace)
    assert [request["phase"] for request in spec["requests"]] == [0, 0, 1, 1, 2, 2]
    assert all(len(request["prompt"]) == 64 and request["output"] == 10 for request in spec["requests"])
    assert len({tuple(request["prompt"][:32]) for request in spec["requests"]}) == 1
    assert "6 of the 9 requests" in notes[0]
    assert "4 times as fast" in notes[0]
    assert "12 blocks, 7 different" in notes[1]
    assert len(notes) == 2


def test_what_does_not_fit_is_cut_and_said(tmp_path):
    trace = tmp_path / "trace.jsonl"
    long = {"timestamp": 0, "input_length": 512 * 200, "output_length": 10**5, "hash_ids": list(range(200))}
    trace.write_text(json.dumps(long))
    spec, notes = demo.trace_spec(options(tmp_path), trace)
    [request] = spec["requests"]
    assert len(request["prompt"]) == demo.TRACE_PROMPT_BLOCKS * demo.BLOCK_TOKENS
    assert len(request["prompt"]) + request["output"] <= spec["engine"]["max_model_len"]
    assert "1 prompts are longer than" in notes[2]
    # the engine needs one block more than its longest request
    assert spec["engine"]["max_model_len"] < (spec["engine"]["num_gpu_blocks_override"] - 1) * demo.BLOCK_TOKENS


def test_percentiles_are_values_that_were_seen():
    assert demo_report.percentile([3, 1, 2], 0.5) == 2
    assert demo_report.percentile([3, 1, 2, 4], 0.5) == 2
    assert demo_report.percentile(list(range(1, 101)), 0.95) == 95
    assert demo_report.percentile([7], 0.95) == 7
    assert math.isnan(demo_report.percentile([], 0.5))


def test_rows_per_turn_and_in_total():
    first, second, total = demo_report.compare(*canned_runs(), ["turn 1", "turn 2"])
    assert [row.name for row in (first, second, total)] == ["turn 1", "turn 2", "total"]
    assert first.with_kvtier.stored_bytes == 2**20
    assert first.with_kvtier.loaded_bytes is None
    assert second.with_kvtier.stored_bytes == 2 * 2**20
    assert second.with_kvtier.loaded_bytes == 4 * 2**20
    assert second.with_kvtier.disk_bytes == 3 * 2**20
    assert (first.with_kvtier.deferred_requests, second.with_kvtier.deferred_requests) == (0, 1)
    assert total.with_kvtier.stored_bytes == 3 * 2**20
    assert total.without.stored_bytes is None
    assert second.with_kvtier.loaded_tokens == 160
    assert total.with_kvtier.computed_tokens == 240
    assert total.without.ttft_p50_s == 2.1
    assert (first.identical, total.identical) == (2, 4)


def test_rows_of_a_trace_have_bytes_in_total_only():
    runs = canned_runs()
    for run in runs:
        run["counters"] = [run["counters"][0], run["counters"][-1]]
    first, _, total = demo_report.compare(*runs, ["third 1", "third 2"])
    assert first.with_kvtier.stored_bytes is None
    assert total.with_kvtier.stored_bytes == 3 * 2**20


def printed(*parts, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


def test_the_table_fits_into_80_columns():
    runs = canned_runs()
    for number, request in enumerate(runs[0]["requests"]):
        request |= {"computed_tokens": 20_000 + number, "ttft_s": 123.4}
    text = printed(demo_report.render_table(demo_report.compare(*runs, ["turn 1", "turn 2"]), "Title"))
    assert "…" not in text
    assert text.startswith("Title")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if " off " in line] == ["turn", "turn", "total"]
    [total] = [line.split() for line in lines[-3:] if " on " in line]
    assert total == ["on", "0.150", "0.35", "240", "0", "160", "3", "4", "3", "1", "4/4"] or total[-1] == "4/4"


def test_the_summary_says_what_was_saved():
    rows = demo_report.compare(*canned_runs(), ["turn 1", "turn 2"])
    text = " ".join(demo_report.summary(rows, ["turn 2"]))
    assert "2.20 s without kvtier, 0.25 s with it (8.8 times as fast)" in text
    assert "Turn 2: the median" in text
    restarted = " ".join(demo_report.summary(rows, ["turn 1", "turn 2"], "turn 2"))
    assert "Turn 1: the median" in restarted
    assert "Turn 2, after the restart: the median" in restarted
    assert "400 without, 240 with kvtier (40% less)" in text
    assert "All 12 output tokens of 4 requests are identical" in text
    assert demo_report.first_difference(*canned_runs()) is None


def test_a_different_output_is_said():
    without, with_kvtier = canned_runs()
    with_kvtier["requests"][2]["output"] = [1, 9, 3]
    with_kvtier["requests"][3]["output"] = [1, 2]
    rows = demo_report.compare(without, with_kvtier, ["turn 1", "turn 2"])
    assert [row.identical for row in rows] == [2, 0, 2]
    assert "NOT the same" in demo_report.summary(rows, ["turn 2"])[-1]
    assert demo_report.first_difference(without, with_kvtier) == "request 2 differs from output token 2 on"
    with_kvtier["requests"].pop(2)
    with_kvtier["requests"].pop(2)
    assert demo_report.first_difference(without, with_kvtier) == "request 2 differs in its length"


def test_answers_of_different_users_and_turns():
    text = printed(demo_report.render_answers(canned_runs()[1]["requests"], 3))
    assert "user 0, turn 1" in text
    assert "user 1, turn 2" in text
    assert "How many?" in text
    assert "one two three" in text


def fake_engine(monkeypatch, program):
    monkeypatch.setattr(demo_process, "ENGINE", ("-c", program))


def run_fake(tmp_path, console=None):
    with demo_process.Progress(console or Console(file=io.StringIO()), ["turn 1", "turn 2"], 2) as progress:
        progress.begin("with kvtier")
        return demo_process.run_engine({"mode": "chat"}, tmp_path / "run", progress)


TELL = """
import json, sys
def tell(**event): print(json.dumps(event), flush=True)
print("a warning of the engine's")
tell(event="ready", seconds=3)
tell(event="request", phase=0, ttft_s=.5)
tell(event="phase", phase=0)
tell(event="restart")
tell(event="ready", seconds=5)
tell(event="done", seconds=4)
open(sys.argv[4], "w").write(json.dumps({"spec": json.load(open(sys.argv[2]))}))
"""


def test_a_run_returns_its_result_and_shows_how_far_it_is(tmp_path, monkeypatch, capsys):
    fake_engine(monkeypatch, TELL)
    result = run_fake(tmp_path, Console(width=80))
    assert result == {"spec": {"mode": "chat"}}
    assert capsys.readouterr().out.splitlines() == [
        "with kvtier: engine starts",
        "with kvtier: engine ready after 3 s",
        "with kvtier: turn 1 done, 1 requests",
        "with kvtier: engine stopped, starts again",
        "with kvtier: engine ready after 5 s",
        "with kvtier: done after 4 s",
    ]


def test_the_engines_own_reason_is_the_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = (
        "import sys; print('(Worker) kvtier.errors.ConfigurationError: ram is 5; allowed: more', file=sys.stderr);"
        "sys.exit('RuntimeError: Engine core initialization failed. See root cause above.')"
    )
    fake_engine(monkeypatch, program)
    with pytest.raises(ConfigurationError, match=r"^ram is 5; allowed: more$"):
        run_fake(tmp_path)
    assert not list(tmp_path.glob("*.log"))


def test_another_failure_keeps_the_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_engine(monkeypatch, "raise ValueError('no such thing')")
    with pytest.raises(demo_process.RunError, match="ValueError: no such thing") as caught:
        run_fake(tmp_path)
    [log] = tmp_path.glob("*.log")
    assert log.name in str(caught.value)
    assert "no such thing" in log.read_text()


def test_an_engine_that_ends_without_a_result_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_engine(monkeypatch, "")
    with pytest.raises(demo_process.RunError, match="exit code 0"):
        run_fake(tmp_path)


def test_an_engine_that_was_ended_says_by_what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_engine(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    with pytest.raises(demo_process.RunError, match="ended by SIGTERM"):
        run_fake(tmp_path)


ORPHAN = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[4] + ".pid", "w").write(str(child.pid))
print(json.dumps({"event": "ready", "seconds": 1}), flush=True)
time.sleep(60)
"""


def test_an_interrupted_run_leaves_no_process_behind(tmp_path, monkeypatch):
    fake_engine(monkeypatch, ORPHAN)

    def interrupt(self, event):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_process.Progress, "told", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_fake(tmp_path)
    child = int((tmp_path / "run" / "out.json.pid").read_text())
    until = time.monotonic() + 5
    while alive(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(child)


def test_an_engine_whose_demo_was_killed_ends_itself(tmp_path):
    program = "from kvtier.cli.demo_engine import end_with_parent; import time; end_with_parent(); time.sleep(60)"
    engine = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True)
    assert engine.poll() is None
    engine.stdin.close()
    assert engine.wait(timeout=20) == -signal.SIGKILL


def test_an_engine_that_is_done_ends_by_itself():
    program = "from kvtier.cli.demo_engine import end_with_parent; end_with_parent()"
    engine = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True)
    assert engine.wait(timeout=20) == 0
    engine.stdin.close()


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def demo_with(tmp_path, monkeypatch, runs, **changes):
    asked = []

    def run_engine(spec, folder, progress):
        asked.append(dict(spec))
        return runs[0 if spec["connector"] is None else 1]

    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "require_vllm", lambda extra: None)
    monkeypatch.setattr(demo.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(demo, "prepare_demo_model", lambda report: tmp_path)
    monkeypatch.setattr(demo, "run_engine", run_engine)
    return demo.run(options(tmp_path, users=2, turns=2, **changes)), asked


def named(runs):
    for run in runs:
        for request in run["requests"]:
            request["user"] = ("Ana (bakery)", "Bela (harbour)")[int(request["id"]) % 2]
    return runs


def test_the_whole_demo_with_canned_runs(tmp_path, monkeypatch, capsys):
    same, asked = demo_with(tmp_path, monkeypatch, named(canned_runs()))
    assert same
    assert [spec["connector"] is None for spec in asked] == [False, True]
    settings = asked[0]["connector"]["kv_connector_extra_config"]
    assert settings["ram"] == "1GiB"
    assert settings["disk"]["capacity"] == demo.DISK_CAPACITY
    own_disk = Path(settings["disk"]["path"])
    assert own_disk.parent == tmp_path / "cache"
    assert not own_disk.exists()
    assert asked[0]["restart_before"] == 1
    assert {**asked[0], "connector": None} == {**asked[1], "connector": None}
    out = capsys.readouterr().out
    assert "turn 2 off" in out
    assert "Before turn 2 both engines were stopped" in out
    assert "identical" in out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["identical"] is True
    assert [row["name"] for row in result["rows"]] == ["turn 1", "turn 2", "total"]
    assert result["rows"][2]["with"]["loaded_bytes"] == 4 * 2**20
    assert len(result["requests"]["with"]) == 4


def test_a_folder_for_the_disk_is_used_and_stays(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    _, asked = demo_with(tmp_path, monkeypatch, named(canned_runs()), disk=tmp_path / "mine")
    assert asked[0]["connector"]["kv_connector_extra_config"]["disk"]["path"] == str(tmp_path / "mine")
    assert (tmp_path / "mine").exists()
    with pytest.raises(ConfigurationError, match=r"disk\.path"):
        demo_with(tmp_path, monkeypatch, [], disk=Path(__file__))


def test_the_demo_is_not_content_with_another_output(tmp_path, monkeypatch, capsys):
    runs = named(canned_runs())
    runs[1]["requests"][0]["output"] = [5]
    same, _ = demo_with(tmp_path, monkeypatch, runs)
    assert not same
    assert "request 0 differs from output token 1 on" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["identical"] is False


def test_a_result_that_cannot_be_written_is_found_first(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="--json"):
        demo_with(tmp_path, monkeypatch, [], json_file=tmp_path / "no" / "such" / "folder.json")


def test_a_model_folder_is_checked(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="--model"):
        demo_with(tmp_path, monkeypatch, [], model=tmp_path)


def test_every_run_is_bound_to_the_same_cores(monkeypatch):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_environment()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
