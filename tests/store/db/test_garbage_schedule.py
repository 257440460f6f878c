"""When garbage is collected, counted in intervals and commits."""

from __future__ import annotations

import itertools

from opendata_queue.store.db.garbage_schedule import LONGEST_PAUSE, WORTH_COMMITS, GarbagePace

OLD: int = 66
"""The interval in which all that a commit has left behind is old enough to go."""


def collections(pace: GarbagePace, intervals: int, *, commits: int = 0) -> list[int]:
    """The intervals at whose end it collects, with so many commits in each."""
    found = []
    for number in range(1, intervals + 1):
        for _ in range(commits):
            pace.committed()
        if pace.is_due():
            pace.collected()
            found.append(number)
    return found


def test_a_busy_database_is_looked_at_in_every_interval() -> None:
    assert collections(GarbagePace(OLD), 100, commits=WORTH_COMMITS) == [*range(1, 101)]


def test_an_idle_database_is_looked_at_a_few_times_and_then_no_more() -> None:
    pace = GarbagePace(OLD)
    pace.committed()

    assert collections(pace, 10_000) == [1, 3, 7, 15, 31, 47, 63, 79]


def test_the_last_look_comes_when_everything_is_old_enough_to_go() -> None:
    for idle_before in range(200):
        pace = GarbagePace(OLD)
        collections(pace, idle_before)
        pace.committed()

        assert OLD <= collections(pace, 10_000)[-1] <= OLD + LONGEST_PAUSE


def test_a_database_with_few_commits_is_looked_at_less_often_but_again_and_again() -> None:
    found = collections(GarbagePace(OLD), 1_000, commits=1)

    assert len(found) == 1_000 // LONGEST_PAUSE + 3
    assert all(later - one <= LONGEST_PAUSE for one, later in itertools.pairwise(found))


def test_many_commits_after_a_quiet_time_are_looked_after_at_once() -> None:
    pace = GarbagePace(OLD)
    collections(pace, 10_000)

    assert collections(pace, 3, commits=WORTH_COMMITS) == [1, 2, 3]


def test_a_look_that_failed_is_due_again_in_the_next_interval() -> None:
    pace = GarbagePace(OLD)
    collections(pace, 3)

    assert [pace.is_due() for _ in range(6)] == [False, False, False, True, True, True]
