"""What the README shows is run, and what it lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.runtime import disk
from kvtier.runtime.config import _KEYS, parse_config
from kvtier.runtime.tiers import SHARED_OPTIONS, STORES, SharedSettings, parse_tiers

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text()


def test_the_python_example_runs(text: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, str(README), "exec"), {})


def test_the_python_example_of_the_replay_manual_runs() -> None:
    manual = README.parent / "docs" / "replay.md"
    (example,) = re.findall(r"```python\n(.*?)```", manual.read_text(), re.DOTALL)
    exec(compile(example, str(manual), "exec"), {})


def test_every_setting_is_in_the_table_with_its_default(text: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))
    defaults = parse_config({"ram": "1GiB"})
    for key, (field, _) in _KEYS.items():
        assert f"`{key}`" in text, key
        if key in rows and key != "ram":
            default = getattr(defaults, field)
            shown = (
                "none"
                if default in (None, ())
                else f"{default:g}"
                if isinstance(default, float)
                else str(default).lower()
            )
            assert rows[key].strip("`") == ("1" if key == "blocks_per_chunk" else shown), key


def test_every_setting_of_the_disk_is_in_its_table_with_its_default(text: str) -> None:
    table = text[text.index("| key of `disk` |") :].split("\n\n", maxsplit=1)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert rows.keys() == disk._KEYS.keys()
    required = {key for key, default in rows.items() if default == "required"}
    assert required == {"path", "capacity"}
    shown = {key: default for key, default in rows.items() if key not in required and default != "none"}
    shown["direct"] = shown["direct"] == "true"
    given = {"path": "/a", "capacity": 1}
    assert disk.parse_disk({**given, **shown}) == disk.parse_disk(given)


def test_every_option_of_shared_tiers_is_in_its_table_with_its_default(text: str) -> None:
    table = text[text.index("| option of all |") :].split("\n\n", maxsplit=1)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert rows.keys() == SHARED_OPTIONS.keys()
    shown = "&".join(f"{name}={default}" for name, default in rows.items())
    (plain,), (told,) = parse_tiers(["valkey://host"]), parse_tiers([f"valkey://host?{shown}"])
    assert isinstance(plain, SharedSettings)
    assert isinstance(told, SharedSettings)
    assert told.config(bytes(32)) == plain.config(bytes(32))
    assert (told.admission, told.epoch, told.stop_flush_s) == (plain.admission, plain.epoch, plain.stop_flush_s)


def test_every_kind_of_store_is_in_the_table_with_its_options(text: str) -> None:
    table = text[text.index("| store | URL |") :].split("\n\n", maxsplit=1)[0]
    named = set(re.findall(r"`(\w+)`", table))
    for scheme, kind in STORES.items():
        assert set(kind.options) <= named, scheme
    for kind in {id(kind): kind for kind in STORES.values()}.values():
        assert any(f"`{scheme}://" in table for scheme, other in STORES.items() if other is kind)


def test_every_file_that_is_linked_exists(text: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (README.parent / target).exists(), target
