"""Seeded bugs are found: otherwise the state machines and the simulation would prove nothing."""

import pytest
from mutant_hunt import PACKAGE, apply, finders, hunt, read_table
from mutant_list import MUTANTS, Mutant

UNCHANGED = Mutant("unchanged", "keys.py", "def make_offload_key", "def make_offload_key", "nothing is wrong")


def test_list_fits_the_source():
    """So that a list that has rotted is noticed by the fast tests already."""
    sources = {mutant.module: (PACKAGE / mutant.module).read_text() for mutant in MUTANTS}
    times = {mutant.name: sources[mutant.module].count(mutant.old) for mutant in MUTANTS}
    assert times == {mutant.name: 1 for mutant in MUTANTS}
    assert len(times) == len(MUTANTS) >= 20


def test_table_names_every_mutant_and_only_finders():
    table = read_table()
    assert list(table) == [mutant.name for mutant in MUTANTS]
    assert set(table.values()) <= set(finders())


@pytest.mark.slow
@pytest.mark.parametrize("finder", finders())
def test_nothing_is_found_where_nothing_is_wrong(finder, tmp_path):
    ended = hunt(finder, apply(UNCHANGED, tmp_path))
    assert not ended.found, ended.message


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_mutant_is_found_by_the_finder_that_the_table_names(mutant, tmp_path):
    finder = read_table()[mutant.name]
    assert hunt(finder, apply(mutant, tmp_path)).found, f"{finder} finds nothing: has {mutant.name} become harmless?"
