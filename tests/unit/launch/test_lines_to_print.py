"""Where hosts share a console and no leader is left to report for all of them, one other host does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from saferun.config import HostsConfig
from saferun.launch.launch_context import LaunchContext
from saferun.supervisor.actions import PrintLine

LINES = ("saferun: node1 is lost", "hint: look there")
NAMED = ("saferun: node3: node1 is lost",)


def printed(hosts: HostsConfig, **job: object) -> tuple[str, ...]:
    """What node3 prints."""
    context = LaunchContext.__new__(LaunchContext)
    context.host = "node3"
    known: dict[str, object] = {"leads": False, "leader": "node1", "host": 2, "is_head": True}
    known |= {"is_join_failure_reported": False, "is_refusal_printed": False, **job}
    vars(context).update(
        config=SimpleNamespace(hosts=hosts),
        job=SimpleNamespace(**known),
    )
    return tuple(context.lines_to_print(LINES, "node1 is lost"))


SHARED = HostsConfig(8, 8, 2, shares_console=True, prints_start_lines=False)


def test_the_second_host_reports_the_loss_of_the_leader_and_each_other_one_names_itself() -> None:
    """64 hosts with eight lines each say no more than one of them."""
    assert printed(SHARED, host=1) == LINES
    assert printed(SHARED, host=2) == NAMED
    assert printed(SHARED, host=1, is_head=False) == NAMED


@pytest.mark.parametrize(("node_rank", "expected"), [(1, LINES), (2, NAMED), (None, NAMED)])
def test_before_the_hosts_have_met_their_node_ranks_say_who_prints_all(
    node_rank: int | None, expected: tuple[str, ...]
) -> None:
    assert printed(SHARED._replace(node_rank=node_rank), leader="", host=0) == expected


def test_what_another_host_has_found_out_is_left_to_it() -> None:
    assert printed(SHARED, leader="", host=0, is_join_failure_reported=True) == ()


def test_what_a_host_has_printed_before_it_left_is_not_printed_again() -> None:
    """A script that one of 64 hosts lacks: two lines, and not two more by the leader."""
    leader = SHARED._replace(prints_start_lines=True)
    assert printed(leader, leader="", host=0) == LINES
    assert printed(leader, leader="", host=0, is_refusal_printed=True) == ()
    assert printed(leader._replace(shares_console=False), leader="", host=0, is_refusal_printed=True) == LINES


def test_on_a_console_of_its_own_each_host_reports_all_of_it() -> None:
    own = HostsConfig(8, 8, 2, shares_console=False, prints_start_lines=False)
    assert printed(own, is_join_failure_reported=True) == LINES
    leads = cast("dict[str, object]", {"leads": True, "host": 0})
    assert printed(SHARED, **leads) == LINES


@pytest.mark.parametrize(("leads", "of_signal", "said"), [(True, True, 1), (False, True, 0), (False, False, 1)])
def test_of_hosts_on_one_console_one_tells_of_a_signal(*, leads: bool, of_signal: bool, said: int) -> None:
    """A scheduler sends it to all of them; a line about anything else is each host's own."""
    lines: list[str] = []
    context = LaunchContext.__new__(LaunchContext)
    context.__dict__.update(
        config=SimpleNamespace(hosts=SHARED),
        host="node3",
        screen=SimpleNamespace(print_message=lines.append),
        job=SimpleNamespace(leads=leads, leader="node1"),
    )
    context.print_line(PrintLine("SIGTERM: stopping 8 ranks", of_signal=of_signal))
    assert len(lines) == said
