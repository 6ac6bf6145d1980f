"""What a host reports about its ranks when the leader asks, and what the leader makes of it."""

from __future__ import annotations

from saferun.cluster.asked_progress import ProgressOfOthers, ProgressReports
from saferun.cluster.silence import Progress


def seen(watched_s: float, still_s: float, quiet_s: float) -> Progress:
    return Progress(runs=True, watched_s=watched_s, still_s=still_s, quiet_s=quiet_s)


def test_a_host_reports_how_often_its_ranks_moved_and_were_active() -> None:
    """Counts that grow: a report that gets lost is made good by the next one. What has not changed is not sent."""
    counts: list[tuple[int, int]] = []
    reports = ProgressReports(2.0, lambda *count: counts.append(count))
    assert not reports.is_due(100.0)
    reports.begin(100.0)
    for now, progress in (
        (100.0, seen(0.0, 0.0, 0.0)),  # watched since this moment: nothing has been seen yet
        (102.0, seen(2.0, 0.5, 0.5)),
        (104.0, seen(4.0, 2.5, 0.5)),
        (106.0, seen(6.0, 4.5, 2.5)),
    ):
        assert not reports.is_due(now - 0.1)
        assert reports.is_due(now)
        reports.report(progress, now, 200.0)
    assert counts == [(1, 1), (1, 2)]


def test_a_host_reports_only_for_a_while() -> None:
    """Until it is asked again, and then it counts on."""
    counts: list[tuple[int, int]] = []
    reports = ProgressReports(2.0, lambda *count: counts.append(count))
    for now in (100.0, 200.0):
        reports.begin(now)
        reports.report(seen(9.0, 0.0, 0.0), now, now)
        assert not reports.is_due(now + 50.0)
    reports.begin(300.0)
    reports.end()
    assert not reports.is_due(300.0)
    assert counts == [(1, 1), (2, 2)]


def test_the_leader_knows_of_others_what_they_have_reported_since_it_asked() -> None:
    """They report nothing while their ranks stand still."""
    answers = iter((True, True))
    others = ProgressOfOthers(lambda: next(answers))
    others.hear(90.0, moved=True)  # what nothing was asked for
    assert others.progress(100.0) is None
    others.begin(100.0)
    others.begin(101.0)
    assert others.progress(110.0) == seen(10.0, 10.0, 10.0)
    others.hear(112.0, moved=True)
    others.hear(115.0, moved=False)
    assert others.progress(120.0) == seen(20.0, 8.0, 5.0)
    assert others.ask_again()
    assert others.progress(120.0) == seen(20.0, 8.0, 5.0)
    others.end()
    assert others.progress(120.0) is None
    assert not [*answers]  # each time that they are asked is a message


def test_where_no_other_host_has_ranks_any_more_the_leader_knows_nothing_of_others() -> None:
    """It judges by its own ranks then; other hosts may have ranks again later."""
    answers = iter((False, True, False, True))
    others = ProgressOfOthers(lambda: next(answers))
    for now, are_asked in ((100.0, False), (101.0, True)):
        others.begin(now)
        assert others.are_asked is are_asked
    assert not others.ask_again()
    assert others.progress(102.0) is None
    others.begin(103.0)
    assert others.progress(104.0) == seen(1.0, 1.0, 1.0)
