"""`kvtier simulate`: what it prints, and that it prints the same again."""

import json
import re
import shlex

import pytest

from kvtier.cli import main
from kvtier.manager.requests import RequestState


def run(capsys, *arguments):
    code = main.run(["simulate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_ends_with_one_line_and_says_the_same_again(capsys):
    code, out, err = run(capsys, "--seeds", "0:3")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"seeds=3 operations=\d+ faults=\d+ digest=[0-9a-f]{32}", out.splitlines()[-1])
    assert run(capsys, "--seeds", "0:3") == (0, out, "")


def test_json(capsys):
    _, out, _ = run(capsys, "--seeds", "0:3")
    code, printed, _ = run(capsys, "--seeds", "0:3", "--json")
    record = json.loads(printed)
    assert code == 0
    assert "seeds={seeds} operations={operations} faults={faults} digest={digest}".format(**record) in out
    assert sum(record["faults_by_kind"].values()) == record["faults"]
    assert "wall_s" not in record
    assert "wall_s" in json.loads(run(capsys, "--seeds", "0:3", "--json", "--timings")[1])


def test_the_log_goes_to_a_file_or_to_the_output(capsys, tmp_path):
    file = tmp_path / "log"
    _, out, _ = run(capsys, "--seeds", "2:3", "--log", str(file))
    log = file.read_text()
    assert len(log.splitlines()) > 100
    assert run(capsys, "--seeds", "2:3", "--log", "-") == (0, log + out, "")


def test_timings_are_said_only_when_asked_for(capsys):
    plain = run(capsys, "--seeds", "0:2")[1]
    timed = run(capsys, "--seeds", "0:2", "--timings")[1]
    assert "operations/s" not in plain
    assert "operations/s" in timed
    assert timed.endswith(plain)


def test_a_broken_promise_is_one_line_with_the_command_that_repeats_it(capsys, monkeypatch):
    monkeypatch.setattr(RequestState, "may_wait", lambda *arguments: True)
    code, _, err = run(capsys, "--seeds", "0:30")
    assert code == main.FAILED
    (line,) = err.splitlines()
    command = line.partition("to repeat it: ")[2]
    program, *arguments = shlex.split(command)
    assert program == "kvtier"
    assert main.run(arguments) == main.FAILED
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--seeds", text] for text in ("5:5", "5", "a:b", "-1:3")),
        ["--operations", "10"],
        ["--policy", "fifo"],
        ["--log", "/nowhere/at/all"],
    ],
)
def test_bad_input_is_one_line(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert code == main.BAD_INPUT
    assert not out
    assert len(err.splitlines()) == 1
    assert arguments[1] in err
