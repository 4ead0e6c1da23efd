"""What is logged about transfers: where failing begins and where it ends."""

from kvtier.transfers.health import WELL_AFTER, FailureLog


def lines(outcomes):
    log = FailureLog("loads")
    told = [log.note_success() if well else log.note_failure("the disk is gone") for well in outcomes]
    return [line for line in told if line]


def test_nothing_while_all_is_well():
    assert lines([True] * 1000) == []


def test_one_line_for_any_number_of_failures():
    assert len(lines([False] * 1000)) == 1
    assert "loads" in lines([False])[0]
    assert "the disk is gone" in lines([False])[0]


def test_one_line_when_it_is_well_again_says_how_many_had_failed():
    first, second = lines([False] * 7 + [True] * 100)
    assert "7" in second
    assert first != second


def test_failures_that_come_and_go_are_one_episode():
    assert len(lines([False, True] * 500)) == 1


def test_a_new_episode_is_a_new_line():
    episode = [False] + [True] * WELL_AFTER
    told = lines(episode * 3)
    assert len(told) == 6
    assert told[1] == told[3] == told[5]
