"""Whose blocks an engine makes: the same for engines that may read each other's, and refused where nobody can tell."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from namespace_process import Lines
from test_vllm_settings import build_connector
from vllm_harness import BLOCK, connector_arguments, engine_arguments, prepare_process

from kvtier.cli.main import run

NUM_LAYERS = 3


def identity(model: Path, weights_id: str | None = None, kv_heads: int = 2, **changes: Any) -> dict[str, Any]:
    """As the connector asks for it. Nothing is loaded."""
    prepare_process()
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvtier.adapters.vllm.identity import identity_fields

    num_blocks = changes.pop("num_blocks", 40)
    transfer = KVTransferConfig(**connector_arguments({"ram": "1MiB"}))
    config = EngineArgs(**engine_arguments(model, num_blocks, kv_transfer_config=transfer, **changes))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=32, dtype=torch.float32)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_LAYERS)]
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
    )
    return identity_fields(config.create_engine_config(), kv_cache, weights_id)


@pytest.fixture(scope="module")
def usual(dense: Path) -> dict[str, Any]:
    return identity(dense)


def test_what_does_not_change_the_bytes_does_not_change_the_identity(dense, usual, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(dense, copy)
    assert identity(copy) == usual
    assert identity(dense, num_blocks=60, max_num_seqs=8, max_model_len=640, seed=7) == usual
    assert identity(dense, enable_lora=True, max_loras=4) == identity(dense, enable_lora=True, max_cpu_loras=8)


def test_everything_that_changes_the_bytes_changes_the_identity(dense, usual, tmp_path, monkeypatch):
    (weights,) = dense.glob("*.safetensors")
    copy = tmp_path / "retrained"
    shutil.copytree(dense, copy)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    (copy / weights.name).write_bytes(content)
    others = [
        identity(copy),
        identity(dense, weights_id="mine"),
        identity(dense, weights_id="yours"),
        identity(dense, dtype="bfloat16"),
        identity(dense, kv_heads=4),
        identity(dense, prefix_caching_hash_algo="sha256_cbor"),
        identity(dense, enable_lora=True),
        identity(dense, enable_lora=True, max_lora_rank=32),
        identity(dense, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        identity(dense, tensor_parallel_size=2, distributed_executor_backend="mp"),
    ]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    others.append(identity(dense))
    everything = [usual, *others]
    assert all(one != other for i, one in enumerate(everything) for other in everything[:i])


def test_how_long_a_sequence_may_be_matters_where_positions_depend_on_it(dense):
    def with_rope(rope_type: str, max_model_len: int) -> dict[str, Any]:
        rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
        return identity(dense, hf_overrides={"rope_parameters": rope}, max_model_len=max_model_len)

    assert with_rope("linear", 640) == with_rope("linear", 960)
    assert with_rope("dynamic", 640) != with_rope("dynamic", 960)


def test_where_nobody_could_tell_there_is_no_identity(dense, monkeypatch):
    from kvtier.adapters.vllm.identity import NoIdentityError

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    cases = {
        "load_format 'dummy'": {"load_format": "dummy"},
        "PYTHONHASHSEED": {"prefix_caching_hash_algo": "xxhash"},
    }
    for words, changes in cases.items():
        with pytest.raises(NoIdentityError, match=words) as refusal:
            identity(dense, **changes)
        assert "\n" not in str(refusal.value)
    assert identity(dense, weights_id="mine", load_format="dummy")["weights"] == {"id": "mine"}
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert identity(dense, prefix_caching_hash_algo="xxhash")["hash"] == {"algorithm": "xxhash", "seed": "7"}


def test_a_model_by_its_name_is_looked_up_on_this_machine_only(dense):
    from types import SimpleNamespace

    from kvtier.adapters.vllm.identity import NoIdentityError, weights_of
    from kvtier.runtime.identity import weights_identity

    asked: list[Any] = []

    def find_snapshot(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(dense)

    model = SimpleNamespace(model="some/model", revision="main")
    config: Any = SimpleNamespace(
        model_config=model, load_config=SimpleNamespace(load_format="auto", download_dir="/models")
    )
    assert weights_of(config, find_snapshot) == weights_identity(dense)
    assert asked == [("some/model", {"revision": "main", "cache_dir": "/models", "local_files_only": True})]
    with pytest.raises(NoIdentityError, match=r"some/model.*set weights_id"):
        weights_of(config)


def disk_in(folder: Path) -> dict[str, Any]:
    return {"ram": "1MiB", "disk": {"path": str(folder), "capacity": "64MiB", "min_free": 0}}


def test_chunks_of_another_size_are_another_cache(dense, tmp_path):
    for blocks_per_chunk in (1, 2, 1):
        build_connector(dense, {**disk_in(tmp_path), "blocks_per_chunk": blocks_per_chunk})
    assert len(list(tmp_path.glob("cache-*"))) == 2


def test_without_an_identity_the_engine_starts_without_a_disk_and_one_line_says_why(
    dense, tmp_path, caplog, monkeypatch
):
    # an engine of another test has given our lines a handler of their own
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.WARNING, logger="kvtier"):
        build_connector(dense, disk_in(tmp_path), load_format="dummy")
    assert list(tmp_path.iterdir()) == []
    # a record may reach the handler in two ways
    (line,) = {record.getMessage() for record in caplog.records if "no disk tier" in record.getMessage()}
    assert "load_format 'dummy'" in line
    assert "set weights_id" in line


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"load_format": "dummy"}, "load_format 'dummy'"), ({"prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED")],
)
def test_without_an_identity_there_are_no_shared_tiers_and_nobody_is_contacted(
    dense, caplog, monkeypatch, changes, why
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"valkey://127.0.0.1:{listener.getsockname()[1]}"
        with caplog.at_level(logging.WARNING), caplog.at_level(logging.WARNING, logger="kvtier"):
            build_connector(dense, {"ram": "1MiB", "tiers": [url]}, **changes)
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody was contacted
    (line,) = {record.getMessage() for record in caplog.records if "kvtier" in record.getMessage()}
    assert line.startswith("kvtier: no shared tiers, blocks stay in RAM only:")
    assert why in line
    assert "\n" not in line


def test_an_engine_that_is_to_be_given_other_weights_says_so(dense, tmp_path, monkeypatch):
    from vllm.config import WeightTransferConfig

    from kvtier.adapters.vllm import spec

    told: list[bool] = []
    build_stack = spec.build_stack

    def note(config, pool, identity, *rest):
        told.append(identity.weights_may_change)
        return build_stack(config, pool, identity, *rest)

    monkeypatch.setattr(spec, "build_stack", note)
    build_connector(dense, disk_in(tmp_path))
    build_connector(dense, disk_in(tmp_path), weight_transfer_config=WeightTransferConfig(backend="ipc"))
    assert told == [False, True]


@pytest.fixture
def log(monkeypatch):
    """What kvtier has logged, from level INFO on."""
    prepare_process()
    import kvtier.adapters.vllm  # sets its level when it is first imported

    assert kvtier.adapters.vllm
    handler, logger = Lines(), logging.getLogger("kvtier")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield handler
    logger.manager._clear_cache()


def test_an_engine_says_what_its_namespace_is_made_of(dense, tmp_path, log, capsys):
    build_connector(dense, disk_in(tmp_path / "kv"))
    source = tmp_path / "vllm.log"
    source.write_text(log.text)
    capsys.readouterr()
    assert run(["doctor", str(source), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (cache,) = (tmp_path / "kv").glob("cache-*")
    assert said["namespace"].startswith(cache.name.removeprefix("cache-"))
    assert said["fields"].items() >= identity(dense).items()
    assert said["tiers"] == ["disk"]


def test_an_engine_says_why_it_has_none(dense, tmp_path, log, capsys):
    build_connector(dense, disk_in(tmp_path / "kv"), load_format="dummy")
    source = tmp_path / "vllm.log"
    source.write_text(log.text)
    assert run(["doctor", str(source)]) == 1
    assert "load_format 'dummy'" in capsys.readouterr().out


@pytest.mark.parametrize("why", ["load_format 'dummy'", "weight_transfer_config"])
def test_ram_does_not_outlive_an_engine_whose_weights_nobody_knows(dense, tmp_path, caplog, monkeypatch, why):
    from vllm.config import WeightTransferConfig

    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    settings = {"ram": "1MiB", "pool_dir": str(tmp_path), "ram_persist": "test"}
    changes = {"load_format": "dummy"} if "dummy" in why else {"weight_transfer_config": WeightTransferConfig("ipc")}
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.WARNING, logger="kvtier"):
        build_connector(dense, settings, **changes)
    assert list(tmp_path.iterdir()) == []
    (line,) = {record.getMessage() for record in caplog.records if "kvtier" in record.getMessage()}
    assert line.startswith("kvtier: nothing in RAM will outlive this process:")
    assert why in line
