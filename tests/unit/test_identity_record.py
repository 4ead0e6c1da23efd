"""`kvtier doctor`: what an engine has said of its identity, and what two engines differ in."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.main import BAD_INPUT, run
from kvtier.runtime.identity import SCHEME, namespace_of
from kvtier.runtime.identity_record import LINE_PREFIX, IdentityRecord

FIELDS = {
    "weights": {"files": "ab" * 32},
    "model": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "architectures": ["A"]},
    "dtype": "torch.float32",
    "groups": [{"layers": [f"layer.{i}" for i in range(9)], "block_size": 32}],
    "lora": None,
    "hash": {"algorithm": "sha256", "seed": "0"},
}


def record(**changes: Any) -> IdentityRecord:
    fields = changes.pop("fields", FIELDS)
    given = {
        "namespace": namespace_of(fields).hex(),
        "fields": fields,
        "wanted_tiers": ["disk"],
        "tiers": ["disk"],
        "model": "m",
        "kvtier": "1",
    }
    return IdentityRecord(**{**given, **changes})


def changed(**fields: Any) -> IdentityRecord:
    return record(fields={**FIELDS, **fields})


REFUSED = record(namespace=None, fields={}, reason="load_format 'dummy' takes the weights from elsewhere", tiers=[])


def log(*records: IdentityRecord) -> str:
    """As vLLM's lines look."""
    lines = [f"(EngineCore pid=7) INFO 12-01 10:00:00 [spec.py:70] {LINE_PREFIX}{one.to_json()}" for one in records]
    return "\n".join(["INFO starting", *lines, "INFO ready", "INFO {}"])


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_one_engine_as_a_table_and_as_what_can_be_saved(save, capsys):
    source = save("vllm.log", log(changed(dtype="an earlier start"), record()))
    assert run(["doctor", source]) == 0
    shown = capsys.readouterr().out
    for words in (namespace_of(FIELDS).hex(), "model.rope_parameters.rope_theta", "10000.0", "layer.0 ... layer.8 (9)"):
        assert words in shown
    assert "an earlier start" not in shown
    assert "disk       on" in shown
    assert run(["doctor", source, "--json"]) == 0
    saved = save("saved.json", capsys.readouterr().out)
    assert run(["doctor", saved]) == 0
    assert capsys.readouterr().out == shown


def test_from_the_standard_input(save, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(log(record())))
    assert run(["doctor", "-", save("other.log", log(record()))]) == 0
    assert namespace_of(FIELDS).hex() in capsys.readouterr().out


def test_what_two_engines_differ_in(save, capsys):
    other = changed(
        dtype="torch.bfloat16",
        hash={"algorithm": "sha256", "seed": 0},
        groups=[{"layers": [f"layer.{i}" for i in range(9)], "block_size": 64}],
        lora={"max_lora_rank": "16"},
    )
    one, two = save("a.json", record().to_json()), save("b.log", log(other))
    assert run(["doctor", one, two, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["same"] is False
    assert answer["namespaces"] == [record().namespace, other.namespace]
    assert answer["different"] == [
        {"field": "dtype", "values": ["torch.float32", "torch.bfloat16"]},
        {"field": "groups[0].block_size", "values": [32, 64]},
        {"field": "lora", "values": [None, "(absent)"]},
        {"field": "hash.seed", "values": ["0", 0]},
        {"field": "lora.max_lora_rank", "values": ["(absent)", "16"]},
    ]
    assert run(["doctor", one, two]) == 1
    shown = capsys.readouterr().out
    assert "5 fields differ" in shown
    assert "rope_theta" not in shown


def test_two_of_the_same(save, capsys):
    one, two = save("a.log", log(record(rank=1))), save("b.json", record(model="/elsewhere").to_json())
    assert run(["doctor", one, two, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["same"], answer["different"]) == (True, [])
    assert run(["doctor", one, two]) == 0
    assert "same namespace" in capsys.readouterr().out


def test_an_epoch_that_both_have_is_a_difference(save, capsys):
    one = save("a.json", record(epochs={"valkey": 0, "s3": 7}).to_json())
    two = save("b.json", record(epochs={"valkey": 1}).to_json())
    assert run(["doctor", one, two, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["different"] == [{"field": "epochs.valkey", "values": [0, 1]}]
    assert run(["doctor", one, save("c.json", record(epochs={"s3": 7}).to_json())]) == 0


def test_an_engine_whose_weights_may_change_shares_with_nobody(save, capsys):
    one, two = save("a.json", record().to_json()), save("b.json", record(weights_may_change=True).to_json())
    assert run(["doctor", one, two]) == 1
    said = capsys.readouterr().out
    assert f"{two} is made to be given other weights" in said
    assert "find each other's" not in said
    assert run(["doctor", two]) == 0
    assert "shares with nobody" in capsys.readouterr().out


def test_tiers_that_are_off_and_why(save, capsys):
    refused, failed = save("refused.log", log(REFUSED)), save("failed.log", log(record(tiers=[])))
    assert run(["doctor", refused]) == 1
    assert "load_format 'dummy'" in capsys.readouterr().out
    assert run(["doctor", failed]) == 1
    assert "off: the engine's log says why" in capsys.readouterr().out
    assert run(["doctor", refused, refused]) == 1, "nobody shares without a namespace"
    assert "load_format 'dummy'" in capsys.readouterr().out
    assert run(["doctor", refused, failed, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["different"] == []


def test_another_version_of_the_digest_is_a_difference(save, capsys):
    one, two = save("a.json", record().to_json()), save("b.json", record(namespace="00", scheme=SCHEME + 1).to_json())
    assert run(["doctor", one, two]) == 1
    assert "kvtier.scheme" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "INFO nothing of ours",
        "{}",
        "[]",
        "null",
        "[" * 100_000,
        '{"namespace": 1}',
        record().to_json().replace("torch.float32", "torch.float64"),
        record().to_json().replace('"tiers"', '"tears"'),
        log(record())[:-200],
        f"{LINE_PREFIX}\n",
        f"{LINE_PREFIX}nonsense",
    ],
)
def test_what_is_no_identity_is_refused_in_one_line(save, capsys, text):
    source = save("file", text)
    assert run(["doctor", source]) == BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"kvtier: {source}: ")
    assert said.err.count("\n") == 1
    assert run(["doctor", save("good", record().to_json()), source]) == BAD_INPUT


def test_files_that_cannot_be_read_and_too_many(save, capsys, tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    good = save("good", record().to_json())
    for sources in ([str(tmp_path / "nowhere")], [str(tmp_path)], [str(tmp_path / "binary")], [good] * 3, ["-", "-"]):
        assert run(["doctor", *sources]) == BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1


def test_the_help_has_examples(capsys):
    assert run(["doctor", "--help"]) == 0
    assert "kvtier doctor here.json there.json" in capsys.readouterr().out
