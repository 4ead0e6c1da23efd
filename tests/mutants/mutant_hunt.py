"""Applies mutants to copies of the source and lets the finders at them; as a program it renews the table in docs/.

A finder is anything that ends differently where there is a bug. The table says which of them find a mutant; the test
holds the first that it names to that.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mutant_finders import FINDERS, FOUND
from mutant_list import MUTANTS, Mutant

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "kvtier"
TABLE = REPOSITORY / "docs" / "mutants.md"
SIMULATION = "simulation"
_SEEDS = "0:150"
_TIMEOUT_S = 300
_HEAD = """# Mutants

Deliberate bugs, each in one place of the source, and what finds them: the state machines of `tests/stateful` and the
simulation, each given a few seconds. `tests/mutants` applies each to a copy of the source and lets the finder that is
named first look for it; `python tests/mutants/mutant_hunt.py` asks all of them and writes the table anew.

| mutant | where | what is wrong | found by |
| --- | --- | --- | --- |
"""


class Hunt(NamedTuple):
    """How one finder ended over one copy."""

    found: bool
    message: str
    seconds: float


def apply(mutant: Mutant, folder: Path) -> Path:
    """A copy of the source with the mutant in it. AssertionError if the list does not fit the source any more."""
    shutil.copytree(PACKAGE, folder / "kvtier", ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "kvtier" / mutant.module
    source = module.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: {source.count(mutant.old)} times in {mutant.module}"
    patched = source.replace(mutant.old, mutant.new)
    compile(patched, str(module), "exec")
    module.write_text(patched)
    return folder


def hunt(finder: str, folder: Path) -> Hunt:
    """Runs one finder over the kvtier in `folder`."""
    begin = time.monotonic()
    command, found_status = _command(finder)
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "KVTIER_UNDER_TEST": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    result = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    found = result.returncode == found_status
    assert found or result.returncode == 0, f"{finder} ended with {result.returncode}: {result.stderr[-2000:]}"
    lines = (result.stdout + result.stderr).strip().splitlines() if found else []
    return Hunt(found, lines[-1] if lines else "", time.monotonic() - begin)


def _command(finder: str) -> tuple[list[str], int]:
    if finder == SIMULATION:
        start = "from kvtier.cli.main import main; main()"
        return [sys.executable, "-c", start, "simulate", "--seeds", _SEEDS], 1
    return [sys.executable, str(Path(__file__).with_name("mutant_finders.py")), finder], FOUND


def finders() -> list[str]:
    """All that this kvtier has, in the order in which they are asked."""
    simulates = (PACKAGE / "cli" / "simulate.py").exists()
    return [*FINDERS, *([SIMULATION] if simulates else [])]


def read_table() -> dict[str, list[str]]:
    """Mutant -> the finders that the table names."""
    rows = [line.strip("| \n").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[3].split(", ") for row in rows}


def can_find(finder: str, mutant: Mutant) -> bool:
    """Whether the finder drives the module that the mutant is in: the others need not be asked."""
    is_tiered = mutant.module in ("manager/tiered.py", "manager/tier_transfers.py", "manager/promotions.py")
    is_persisted = mutant.module in ("manager/persisted.py", "tiers/ram_keeper.py")
    if is_persisted or finder == "persisted machine":
        return is_persisted and finder == "persisted machine"
    if finder == "policy machine":
        return mutant.module.startswith("policy/")
    return is_tiered == (finder == "tiered machine")


def find(mutant: Mutant) -> list[str]:
    """Every finder that finds it, and one line for each on the terminal."""
    found_by = []
    for finder in finders():
        if not can_find(finder, mutant):
            continue
        with tempfile.TemporaryDirectory() as folder:
            ended = hunt(finder, apply(mutant, Path(folder)))
        print(f"{mutant.name:28} {finder:16} {ended.seconds:5.1f} s  {ended.message[:110]}", flush=True)
        if ended.found:
            found_by.append(finder)
    return found_by


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="these mutants only, and no table")
    names = parser.parse_args().names
    rows = [
        f"| `{mutant.name}` | `{mutant.module}` | {mutant.note} | {', '.join(find(mutant)) or 'nothing'} |\n"
        for mutant in MUTANTS
        if not names or mutant.name in names
    ]
    if not names:
        TABLE.write_text(_HEAD + "".join(rows))


if __name__ == "__main__":
    main()
