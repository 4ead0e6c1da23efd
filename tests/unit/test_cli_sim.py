"""`kvtier trace`, `kvtier replay` and `kvtier plan` as a person runs them."""

from __future__ import annotations

import json

import pytest

from kvtier.cli.main import run
from kvtier.runtime import parse_config


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl.gz"
    assert run(["trace", "generate", "--kind", "chat", "--requests", "200", "-o", str(path)]) == 0
    return str(path)


def test_generate_to_stdout(capsys):
    assert run(["trace", "generate", "--requests", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert set(json.loads(lines[0])) == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_info(trace, capsys):
    assert run(["trace", "info", trace, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"] == 200
    assert 0 < facts["best_block_hit_ratio"] < 1
    assert run(["trace", "info", trace]) == 0
    assert "unique blocks" in capsys.readouterr().out


def test_replay_compares_policies_in_one_table(trace, capsys):
    assert run(["replay", trace, "--policy", "lru,arc,min", "--ram", "5%,20%"]) == 0
    out = capsys.readouterr()
    rows = [line.split() for line in out.out.splitlines() if line.strip().startswith(("none", "lru", "arc", "min"))]
    assert [row[0] for row in rows] == ["none", "lru", "lru", "arc", "arc", "min", "min"]
    assert "…" not in out.out
    assert out.err == ""  # no progress bar where nobody watches


def test_replay_json(trace, capsys):
    arguments = ["replay", trace, "--policy", "lru,min", "--ram", "10%", "--prefill-rate", "5000", "--json"]
    assert run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    none, lru, best = result["cells"]
    assert result["model"]["prefill_tokens_per_s"] == 5000
    assert (none["policy"], lru["policy"], best["policy"]) == ("none", "lru", "min")
    assert none["block_hit_ratio"] == 0 < lru["block_hit_ratio"] < best["block_hit_ratio"]
    assert lru["gpu_saved_s"] == pytest.approx(lru["token_hit_ratio"] * result["trace"]["input_tokens"] / 5000)
    assert lru["tiers"]["ram"]["loaded_bytes"] > 0
    assert best["ttft_p50_s"] <= lru["ttft_p50_s"] <= none["ttft_p50_s"]


def test_replay_untimed_in_chunks_and_full_blocks(trace, capsys):
    arguments = ["replay", trace, "--policy", "lru", "--ram", "100%", "--untimed", "--full-blocks", "--json"]
    assert run(arguments) == 0
    whole = json.loads(capsys.readouterr().out)["cells"][0]
    assert run([*arguments, "--chunk-blocks", "2"]) == 0
    chunked = json.loads(capsys.readouterr().out)["cells"][0]
    assert whole["block_hit_ratio"] == chunked["block_hit_ratio"] > 0
    assert whole["ttft_p50_s"] is None


def test_plan_json_and_its_configuration(trace, capsys):
    assert run(["plan", trace, "--policy", "lru,arc", "--max-ram", "2GiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    config = result["recommended"]["kv_transfer_config"]
    assert config["kv_connector"] == "KVTierConnector"
    assert parse_config(config["kv_connector_extra_config"]).ram_bytes <= 2 * 2**30
    assert [curve["policy"] for curve in result["curves"]] == ["lru", "arc"]
    assert len(result["curves"][0]["points"]) == 10


def test_plan_prints_what_to_paste(trace, tmp_path, capsys):
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}))
    assert run(["plan", trace, "--model", str(tmp_path), "--ram", "5%,1MiB"]) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith("--kv-transfer-config ")]
    assert json.loads(line.partition(" ")[2].strip("'"))["kv_role"] == "kv_both"
    assert "256 KiB" in out  # 512 tokens of 2 * 2 layers * 64 wide * 2 bytes


def test_skipped_lines_are_counted(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\nnonsense\n')
    assert run(["replay", str(path), "--ram", "1blocks"]) == 2
    assert "line 2: not JSON" in capsys.readouterr().err
    assert run(["replay", str(path), "--ram", "1blocks", "--skip-bad"]) == 0
    assert "1 bad lines skipped; line 2: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "TRACE", "--policy", "best"], "--policy 'best' is unknown; allowed:"),
        (["replay", "TRACE", "--policy", "lru,lru"], "names 'lru' twice"),
        (["replay", "TRACE", "--policy", ","], "--policy is ','"),
        (["replay", "TRACE", "--ram", "lots"], "--ram is 'lots'"),
        (["replay", "TRACE", "--prefill-rate", "0"], "--prefill-rate is 0"),
        (["replay", "TRACE", "--chunk-blocks", "4"], "--chunk-blocks needs --untimed"),
        (["replay", "TRACE", "--untimed", "--engine-cache", "5%"], "--engine-cache needs simulated time"),
        (["replay", "TRACE", "--html", "/nowhere/report.html"], "/nowhere/report.html cannot be written"),
        (["plan", "TRACE", "--model", "/nowhere"], "--model: /nowhere cannot be read"),
        (["plan", "TRACE", "--kv-dtype", "fp8"], "--kv-dtype needs --model"),
        (["plan", "TRACE", "--sample-rate", "2"], "--sample-rate is 2"),
        (["trace", "info", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (["trace", "generate", "--kind", "poem"], "'poem' is unknown"),
    ],
)
def test_mistakes_are_one_line(trace, arguments, said, capsys):
    assert run([trace if argument == "TRACE" else argument for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_replay_over_a_slow_link_compresses(trace, capsys):
    arguments = ["replay", trace, "--policy", "lru", "--ram", "2%", "--disk", "100%", "--disk-gb-per-s", "0.125"]
    assert run([*arguments, "--disk-compression", "auto", "--disk-codec", "2,3,4", "--json"]) == 0
    (tier,) = json.loads(capsys.readouterr().out)["model"]["lower_tiers"]
    speeds = {"encode_bytes_per_s": 3e9, "decode_bytes_per_s": 4e9}
    assert tier["compression"] == {"mode": "auto", "ratio": 2.0, **speeds}


@pytest.mark.parametrize(
    "options",
    [
        ["--disk-compression", "yes"],
        ["--disk-codec", "2,3,4"],
        *(["--disk-compression", "on", "--disk-codec", codec] for codec in ("2", "0.5,1,1", "2,0,1", "2,x,1")),
    ],
)
def test_replay_refuses_a_codec_that_cannot_be(trace, capsys, options):
    assert run(["replay", trace, "--disk", "50%", *options]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert options[-2] in line
    assert "allowed" in line or "needs" in line
