"""Why an attempt ends, where more than one reason has come."""

from __future__ import annotations

import itertools
import signal
import typing

import pytest

from saferun.supervisor.actions import Diagnose
from saferun.supervisor.ending import (
    Ending,
    Failed,
    Hung,
    Leave,
    NotStarted,
    Regroup,
    Stopped,
    StoreLost,
    explanation,
    is_final,
    prevailing,
    signum_of,
)

FAILED = Failed(2)
STOPPED = Stopped(signal.SIGTERM)
STOPPED_ELSEWHERE = Stopped(signal.SIGTERM, "node2")
HUNG = Hung(is_final=True)
STORE_LOST = StoreLost("the store's process ended", "import torch")
NOT_STARTED = NotStarted("port 29500 is in use", "pass another", 2)
REGROUP = Regroup("node3 wants to join")
LEAVE = Leave(signal.SIGTERM)
ALL: tuple[Ending, ...] = (
    *(FAILED, STOPPED_ELSEWHERE, HUNG, STORE_LOST, NOT_STARTED, REGROUP),
    *(STOPPED, LEAVE),
)
# Rows: what had come before; columns: what comes now, in the order of ALL. What prevails is ``<`` the earlier one or
# ``^`` the later one.
TABLE = {
    FAILED: "< < ^ ^ ^ ^ < <",
    STOPPED_ELSEWHERE: "< < ^ ^ ^ ^ ^ ^",
    HUNG: "< < ^ ^ ^ ^ < <",
    STORE_LOST: "< < < ^ ^ ^ < <",
    NOT_STARTED: "< < < < ^ ^ < <",
    REGROUP: "< < < < < ^ ^ ^",
    STOPPED: "< < < < < < < <",
    LEAVE: "< < < < < < < <",
}
# What a value of the same kind, but not the same, says.
OTHERS: dict[Ending, Ending] = {
    FAILED: Failed(3),
    STOPPED_ELSEWHERE: Stopped(signal.SIGINT, "node4"),
    HUNG: Hung(),
    STORE_LOST: StoreLost("another", ""),
    NOT_STARTED: NotStarted("no such program", "check the path", 1),
    REGROUP: Regroup("node4 leaves the job"),
    STOPPED: Stopped(signal.SIGINT),
    LEAVE: Leave(signal.SIGINT),
}


@pytest.mark.parametrize(("earlier", "later"), list(itertools.product(ALL, ALL)))
def test_of_two_reasons_the_table_says_which_prevails(earlier: Ending, later: Ending) -> None:
    """One value, whatever else happens on the way out."""
    sign = TABLE[earlier].split()[ALL.index(later)]
    other = OTHERS[later]
    assert prevailing(earlier, other) is (earlier if sign == "<" else other)


def test_a_signal_to_this_host_counts_after_one_to_another_host() -> None:
    """A scheduler signals all of them; what a user asked for stays what it was."""
    assert prevailing(STOPPED_ELSEWHERE, STOPPED) is STOPPED
    asked = Stopped(signal.SIGTERM, "node2", "saferunctl stop")
    assert prevailing(asked, STOPPED) is asked


def test_a_kill_after_a_stop_names_who_asked_for_both() -> None:
    """The exit code is that of the kill."""
    stop = Stopped(signal.SIGTERM, by="saferunctl stop by a")
    kill = Stopped(signal.SIGKILL, by="saferunctl kill by b")
    both = Stopped(signal.SIGKILL, by="saferunctl stop by a, then saferunctl kill by b")
    assert prevailing(stop, kill) == both
    assert prevailing(both, kill) is both
    assert prevailing(kill, kill._replace(by="saferunctl kill by c")) is kill
    assert prevailing(STOPPED, kill) is STOPPED


def test_the_table_has_every_kind_of_ending() -> None:
    """A new one has to find its place in it."""
    assert {type(one) for one in ALL} == set(typing.get_args(Ending))


@pytest.mark.parametrize("ending", ALL)
def test_the_first_reason_is_the_reason(ending: Ending) -> None:
    assert prevailing(None, ending) == ending


def test_only_a_signal_to_this_host_is_one_that_stopped_it() -> None:
    """What the report says of another host is for that host to say."""
    assert [one for one in ALL if signum_of(one) is not None] == [STOPPED, LEAVE]


def test_what_saferun_could_not_do_is_explained_by_it_and_all_else_by_the_ranks() -> None:
    assert [one for one in ALL if explanation(one)[0]] == [STORE_LOST, NOT_STARTED]


def test_there_is_no_other_attempt_where_it_would_meet_the_same() -> None:
    """Unless the cause has a class that says that it may pass."""
    assert [one for one in ALL if is_final(one)] == [HUNG, NOT_STARTED]
    assert not is_final(NOT_STARTED._replace(class_name="port_in_use"))
    assert not is_final(Hung())


def test_a_diagnosis_is_asked_for_with_what_follows_from_the_ending() -> None:
    """What the other hosts were lost by counts where the ending itself explains nothing."""
    diagnose = Diagnose(0, FAILED, lost="node1 does not answer", lost_hint="look there")
    assert (diagnose.stop_signum, diagnose.hung, diagnose.error_class) == (None, False, "")
    assert (diagnose.error, diagnose.error_hint) == ("node1 does not answer", "look there")
    diagnose = diagnose._replace(ending=NOT_STARTED._replace(class_name="port_in_use", by_checks=True))
    assert (diagnose.error, diagnose.error_hint) == ("port 29500 is in use", "pass another")
    assert (diagnose.error_class, diagnose.by_checks) == ("port_in_use", True)
    assert diagnose._replace(ending=STORE_LOST).error_class == "store_lost"
    assert diagnose._replace(ending=HUNG).hung
    assert diagnose._replace(ending=STOPPED).stop_signum == signal.SIGTERM
