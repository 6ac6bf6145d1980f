"""What is made of a host of which nothing is heard, by how the ranks that can be seen do."""

from __future__ import annotations

import pytest

from saferun.cluster.silence import GO_ON, LOST, WAIT, Progress, SilentHost, judge, together, with_phases

HOST_TIMEOUT_S, HANG_TIMEOUT_S = 24.0, 300.0


def verdict(why: str, progress: Progress, *, goes_on: bool = False, hang_timeout_s: float = HANG_TIMEOUT_S) -> str:
    return judge(SilentHost(2, "node3", why, "words", 0.0, goes_on), progress, HOST_TIMEOUT_S, hang_timeout_s)


def test_what_is_certain_needs_no_ranks() -> None:
    """Its saferun has been seen not to run."""
    assert verdict("gone", Progress(runs=True, watched_s=20.0, still_s=0.0, quiet_s=0.0)) == LOST


@pytest.mark.parametrize("why", ["unreachable", "cut", "unknown", "frozen"])
def test_ranks_that_move_let_the_job_go_on(why: str) -> None:
    """They could not, without the ranks of that host."""
    assert verdict(why, Progress(runs=True, watched_s=15.0, still_s=1.0, quiet_s=0.0)) == GO_ON


@pytest.mark.parametrize("why", ["unreachable", "cut", "unknown", "frozen"])
def test_ranks_that_stand_still_show_that_a_host_is_lost(why: str) -> None:
    """Within the time in which a dead host is named."""
    assert verdict(why, Progress(runs=True, watched_s=15.0, still_s=15.0, quiet_s=15.0)) == LOST


def test_no_verdict_before_the_ranks_have_been_watched() -> None:
    """A connection that breaks is found out about at once."""
    assert verdict("unreachable", Progress(runs=True, watched_s=3.0, still_s=3.0, quiet_s=3.0)) == WAIT


def test_a_loop_that_waits_is_no_progress_unless_the_host_is_known_to_live() -> None:
    """NCCL waits for a dead host with all of a processor."""
    burning = Progress(runs=True, watched_s=15.0, still_s=15.0, quiet_s=0.0)
    assert verdict("unreachable", burning) == LOST
    assert verdict("cut", burning) == GO_ON


def test_a_job_that_goes_on_without_hearing_of_a_host_ends_when_it_stands_still() -> None:
    """At once it does not: a step may take its time."""
    at_rest = Progress(runs=True, watched_s=100.0, still_s=20.0, quiet_s=20.0)
    assert verdict("unreachable", at_rest, goes_on=True) == GO_ON
    assert verdict("unreachable", at_rest._replace(still_s=24.0, quiet_s=24.0), goes_on=True) == LOST
    burning = at_rest._replace(still_s=299.0, quiet_s=0.0)
    assert verdict("unreachable", burning, goes_on=True) == GO_ON
    assert verdict("unreachable", burning._replace(still_s=300.0), goes_on=True) == LOST
    assert verdict("unreachable", burning._replace(still_s=3000.0), goes_on=True, hang_timeout_s=0.0) == GO_ON


def test_whatever_is_found_later_a_job_that_goes_on_is_judged_by_its_ranks() -> None:
    """The first host ends in good order while another one still writes its checkpoint, and cannot tell it so."""
    working = Progress(runs=True, watched_s=50.0, still_s=0.0, quiet_s=0.0)
    assert verdict("gone", working, goes_on=True) == GO_ON


def test_where_no_ranks_run_they_are_asked_for_what_they_have_shown() -> None:
    """Ranks that ended a moment ago had got on; of those that ended before anybody was in doubt nothing is known."""
    assert verdict("unreachable", Progress(runs=False, watched_s=15.0, still_s=2.0, quiet_s=2.0)) == GO_ON
    assert verdict("unreachable", Progress(runs=False, watched_s=3.0, still_s=3.0, quiet_s=3.0)) == WAIT
    assert verdict("unreachable", Progress(runs=False, watched_s=12.0, still_s=12.0, quiet_s=12.0)) == LOST
    assert (
        verdict("unreachable", Progress(runs=False, watched_s=99.0, still_s=99.0, quiet_s=99.0), goes_on=True) == GO_ON
    )


@pytest.mark.parametrize("has_successor", [False, True])
def test_where_ranks_here_have_failed_only_a_spare_that_may_lead_ends_the_wait(*, has_successor: bool) -> None:
    """The other hosts meet there without the silent leader, and need this one. Else it is waited for: it may return."""
    silent = SilentHost(0, "node0", "unreachable", "words", 0.0, goes_on=True)
    failed = Progress(runs=False, watched_s=40.0, still_s=23.0, quiet_s=23.0)
    limits = HOST_TIMEOUT_S, HANG_TIMEOUT_S
    assert judge(silent, failed, *limits, has_successor=has_successor) == GO_ON
    failed = failed._replace(still_s=24.0, quiet_s=24.0)
    assert judge(silent, failed, *limits, has_successor=has_successor) == (LOST if has_successor else GO_ON)
    assert judge(silent, failed._replace(ended=True), *limits, has_successor=has_successor) == GO_ON


def test_ranks_of_other_hosts_show_what_one_without_ranks_cannot_see() -> None:
    """Whose own have ended; and nothing is decided before those have been watched as well."""
    own = Progress(runs=False, watched_s=20.0, still_s=20.0, quiet_s=20.0)
    assert verdict("unreachable", together(own, None)) == LOST
    assert verdict("unreachable", together(own, Progress(runs=True, watched_s=3.0, still_s=3.0, quiet_s=3.0))) == WAIT
    assert verdict("unreachable", together(own, Progress(runs=True, watched_s=9.0, still_s=2.0, quiet_s=2.0))) == GO_ON
    still = Progress(runs=True, watched_s=15.0, still_s=15.0, quiet_s=15.0)
    assert verdict("unreachable", together(own, still)) == LOST


@pytest.mark.parametrize("why", ["unreachable", "cut", "unknown", "frozen"])
def test_where_all_ranks_here_ended_well_a_silent_host_is_waited_for(why: str) -> None:
    """Its own may write their last checkpoint; nothing here can show that, and torchrun waits at its exit barrier."""
    ended = Progress(runs=False, watched_s=99.0, still_s=99.0, quiet_s=99.0, ended=True)
    assert verdict(why, ended) == GO_ON
    assert verdict(why, ended, goes_on=True) == GO_ON


def test_where_all_ranks_here_ended_well_a_host_that_is_gone_is_lost_all_the_same() -> None:
    """Its saferun does not run there, and its ranks have ended with it."""
    assert verdict("gone", Progress(runs=False, watched_s=9.0, still_s=9.0, quiet_s=9.0, ended=True)) == LOST


@pytest.mark.parametrize("why", ["unreachable", "cut", "unknown", "frozen"])
def test_while_a_rank_is_in_a_phase_that_it_announced_a_silent_host_is_not_lost(why: str) -> None:
    """An evaluation of an hour, during which the others wait: torchrun trains on."""
    in_phase = Progress(runs=True, watched_s=400.0, still_s=400.0, quiet_s=400.0, unannounced_s=1.0)
    assert verdict(why, in_phase) == GO_ON
    assert verdict(why, in_phase, goes_on=True) == GO_ON


def test_after_the_phase_ranks_have_the_whole_time_again() -> None:
    after = Progress(runs=True, watched_s=400.0, still_s=400.0, quiet_s=400.0, unannounced_s=23.0)
    assert verdict("unreachable", after, goes_on=True) == GO_ON
    assert verdict("unreachable", after._replace(unannounced_s=24.0), goes_on=True) == LOST
    assert verdict("unreachable", after._replace(unannounced_s=11.0)) == GO_ON
    assert verdict("unreachable", after._replace(unannounced_s=12.0)) == LOST


@pytest.mark.parametrize("goes_on", [False, True])
def test_no_phase_keeps_a_job_that_waits_for_a_host_that_is_gone(goes_on: bool) -> None:
    """Its ranks have ended with its saferun, and nothing that is announced brings them back."""
    in_phase = Progress(runs=True, watched_s=400.0, still_s=400.0, quiet_s=400.0, unannounced_s=1.0)
    assert verdict("gone", in_phase, goes_on=goes_on) == LOST


def test_a_phase_counts_together_with_what_is_seen_of_other_hosts() -> None:
    own = Progress(runs=True, watched_s=99.0, still_s=99.0, quiet_s=99.0, unannounced_s=1.0)
    both = together(own, own._replace(unannounced_s=float("inf")))
    assert verdict("unreachable", both) == GO_ON
    assert with_phases(both) == both._replace(still_s=1.0, quiet_s=1.0)
