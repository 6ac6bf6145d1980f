"""Checks that begin while a retry waits: the next attempt has what they found, and makes them again where it must."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.cli.main import read_config
from saferun.launch import preflight_part
from saferun.launch.launch_context import LaunchContext
from saferun.launch.preflight_part import PreflightPart
from saferun.preflight.outcome import PreflightOutcome
from saferun.preflight.results import CheckResult, Preflight
from saferun.supervisor.actions import ProbeHosts
from saferun.supervisor.events import ChecksAsked, ChecksPassed, Event, ProbesPassed
from saferun.supervisor.machine import State

WELL = PreflightOutcome(None, Preflight((CheckResult("names", "ok", "all is well"),)), {})
BAD = PreflightOutcome(None, Preflight((CheckResult("names", "warn", "a name is unknown"),)), {})
ENVIRON = {"A": "1"}
TWO_HOSTS = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "node1")


class Launch:
    """A launch over two hosts, whose checks a test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *options: str, hosts: tuple[str, ...] = TWO_HOSTS) -> None:
        self.posted: list[Event] = []
        self.lines: list[str] = []
        self.broadcast: list[Any] = []
        self.running: list[Callable[[PreflightOutcome], None]] = []
        words = [*hosts, *options, __file__]
        context = SimpleNamespace(
            config=read_config(words, {}),
            post=self.posted.append,
            succeeds=self.succeeds,
            guarded_poller=None,
            warn=self.lines.append,
            job=SimpleNamespace(leads=False, broadcast_preflight=self.broadcast.append),
            current=SimpleNamespace(assignment=None),
            supervisor=SimpleNamespace(state=State.PROBING),
            attempt=0,
        )
        self.context = context
        self.part = PreflightPart(cast("LaunchContext", context), None)
        run = SimpleNamespace(check=lambda _context, on_checked: self.running.append(on_checked))
        monkeypatch.setattr(self.part, "_opened", lambda: run)
        monkeypatch.setattr(preflight_part, "_check_context", lambda *_: None)

    def succeeds(self, what: str, call: Callable[..., Any], *arguments: Any) -> bool:
        assert what
        try:
            call(*arguments)
        except RuntimeError:
            return False
        return True

    def fail_once(self) -> None:
        """One attempt has been checked, and has failed."""
        self.part.check(0, ENVIRON)
        self.running.pop()(WELL)
        self.posted.clear()


def kinds(launch: Launch) -> list[type]:
    return [type(event) for event in launch.posted]


def test_the_next_attempt_waits_for_no_checks_that_were_made_while_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch)
    launch.fail_once()
    launch.part.check_early(1)
    (end,) = launch.running
    end(WELL)
    assert launch.posted == [], "nothing is reported before the attempt"
    launch.part.check(1, ENVIRON)
    assert kinds(launch) == [ChecksAsked, ChecksPassed]
    assert len(launch.running) == 1


def test_checks_that_still_run_are_waited_for_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU memory of the previous attempt may take long to be free."""
    launch = Launch(monkeypatch)
    launch.fail_once()
    launch.part.check_early(1)
    launch.part.check(1, ENVIRON)
    assert kinds(launch) == [ChecksAsked]
    (end,) = launch.running
    end(BAD)
    assert kinds(launch) == [ChecksAsked, ChecksPassed]


@pytest.mark.parametrize(
    ("found", "attempt", "environ"), [(BAD, 1, ENVIRON), (WELL, 2, ENVIRON), (WELL, 1, {"A": "2"})]
)
def test_what_was_wrong_or_is_of_another_attempt_is_checked_again(
    monkeypatch: pytest.MonkeyPatch, found: PreflightOutcome, attempt: int, environ: dict[str, str]
) -> None:
    """A name may be known by the end of the wait: no launch is refused for what was."""
    launch = Launch(monkeypatch)
    launch.fail_once()
    launch.part.check_early(1)
    launch.running.pop()(found)
    launch.part.check(attempt, environ)
    assert len(launch.running) == 1
    launch.running.pop()(WELL)
    assert kinds(launch) == [ChecksAsked, ChecksPassed]


def test_early_checks_that_break_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch)
    launch.fail_once()

    def break_itself() -> None:
        raise RuntimeError("a mistake of our own")

    monkeypatch.setattr(launch.part, "_opened", break_itself)
    launch.part.check_early(1)
    launch.part.check(1, ENVIRON)
    assert kinds(launch) == [ChecksPassed]


def test_nothing_begins_early_where_no_rank_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checks, and on one host, where they are made beside the ranks."""
    for launch in (Launch(monkeypatch, "--preflight", "off"), Launch(monkeypatch, hosts=())):
        launch.part.check(0, ENVIRON)
        launch.running.clear()
        launch.part.check_early(1)
        assert launch.running == []


@pytest.mark.parametrize("probes", [True, False])
def test_the_process_of_a_host_that_is_not_probed_ends_when_the_hosts_have_met(
    monkeypatch: pytest.MonkeyPatch, probes: bool
) -> None:
    """Of a spare, and where the first host was started without checks: it would listen as long as the job lasts."""
    launch = Launch(monkeypatch)
    closed: list[bool] = []
    launch.part._run = cast("Any", SimpleNamespace(close=lambda: closed.append(True)))
    launch.part.begin_attempt(probes=probes)
    assert closed == ([] if probes else [True])


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("options", [(), ("--preflight", "off")])
def test_a_verdict_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, leads: bool, options: tuple[str, ...]
) -> None:
    """Whatever keeps the leader from it: torchrun would have started the ranks long ago."""
    launch = Launch(monkeypatch, *options)
    launch.context.job.leads = leads
    launch.part.probe(ProbeHosts(0))
    due = launch.part.deadline
    assert due is not None
    launch.part.tick(due)
    assert launch.lines == ["preflight checks between the hosts: no verdict within 50 s; the job goes on"]
    if leads:
        assert [message["ok"] for message in launch.broadcast] == [True]  # which it hears itself, or goes on without
        assert kinds(launch) == []
        assert launch.part.deadline == due + 5
        launch.part.tick(due + 5)
    assert kinds(launch) == [ProbesPassed]
    assert len(launch.lines) == 1
    assert launch.part.deadline is None


def test_a_verdict_that_has_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch)
    launch.part.probe(ProbeHosts(0))
    launch.context.supervisor.state = State.RUNNING
    due = launch.part.deadline
    assert due is not None
    launch.part.tick(due)
    assert (launch.lines, launch.posted, launch.part.deadline) == ([], [], None)


def test_a_launch_of_checks_alone_waits_for_their_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch, "--preflight", "only")
    launch.part.probe(ProbeHosts(0))
    assert launch.part.deadline is None
