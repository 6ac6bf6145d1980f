"""Before the ranks: the leader gives an unfit host's place to a spare, or starts the ranks, whatever breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.cli.main import read_config
from saferun.cluster.job_values import Assignment
from saferun.cluster.join_messages import HostInfoText, Peer
from saferun.launch import preflight_part
from saferun.launch.launch_context import LaunchContext
from saferun.launch.preflight_part import PreflightPart
from saferun.linux.poller import Poller
from saferun.model import Placement
from saferun.preflight import judge as judging
from saferun.preflight.host_messages import encode_host_info
from saferun.preflight.results import UNUSABLE, CheckResult, HostInfo
from saferun.supervisor.actions import ProbeHosts
from saferun.supervisor.events import Event, ProbesPassed, StartFailed
from saferun.supervisor.machine import State
from saferun.supervisor.policy.faulty_hosts import FaultyHost, may_replace

GPU_LOST = CheckResult(
    *("gpus", "warn", "GPU 3 fell off the bus", "reboot", ((UNUSABLE, "GPU 3"),)), class_name="gpu_hardware_error"
)
CUT_OFF = CheckResult("links", "fail", "its eth1 is not reached", "look", class_name="network_between_hosts")
HINT = "look"


class Leader:
    """The first of three hosts, of which each may have found something about itself."""

    def __init__(
        self,
        found: dict[int, CheckResult],
        *options: str,
        spares: Sequence[str] = ("node4",),
        hosts: Sequence[str] = ("--nnodes", "3", "--spares", "1", "--node-rank", "0", "--master-addr", "node1"),
        attempt: int = 0,
        restarts: int = 0,
    ) -> None:
        words = [*hosts, *options, __file__]
        self.posted: list[Event] = []
        self.lines: list[str] = []
        self.spares = spares
        self.on_chunks: Callable[[list[Any]], None] = lambda _: None
        infos = [HostInfo(results=(found[host],) if host in found else ()) for host in range(3)]
        placement = Placement(0, 3, 3, 1, (), "node1", 29500, "job", restarts=restarts)
        texts = tuple(HostInfoText(encode_host_info(info), "") for info in infos)
        assignment = Assignment(
            placement, attempt, leads=True, may_leave=False, files="", checked=True, host_infos=texts
        )
        peers = {host: Peer(host, f"node{host + 1}", (), host, 1) for host in range(3)}
        job = SimpleNamespace(
            leads=True,
            host=0,
            is_head=True,
            peers=peers,
            broadcast_preflight=self._broadcast,
            collect=self._collect,
            share=lambda *_: None,
        )
        context = SimpleNamespace(
            config=read_config(words, {}),
            poller=Poller(),
            post=self.posted.append,
            warn=self.lines.append,
            succeeds=self._succeeds,
            attempt=0,
            environ={},
            job=job,
            screen=SimpleNamespace(print_message=self.lines.append),
            current=SimpleNamespace(assignment=assignment, plan=None),
            supervisor=SimpleNamespace(state=State.PROBING, can_replace=self._can_replace),
            investigation=SimpleNamespace(log=SimpleNamespace(set_preflight=lambda *_: None)),
            start_failed=lambda attempt, error: self.posted.append(
                StartFailed(0.0, attempt, error.what, error.hint, error.exit_code)
            ),
        )
        self.part = PreflightPart(cast("LaunchContext", context), None)

    def _collect(self, _name: str, _s: float, on_chunks: Callable[[list[Any]], None], *, hosts: Sequence[int]) -> None:
        assert hosts
        self.on_chunks = on_chunks

    def _broadcast(self, message: Any) -> None:
        self.part.take_message(message)

    def _can_replace(self, faults: Sequence[FaultyHost]) -> bool:
        return may_replace(faults, self.spares, moves_leader=False)

    def _succeeds(self, what: str, call: Callable[..., Any], *arguments: Any) -> bool:
        try:
            call(*arguments)
        except ArithmeticError as error:
            self.lines.append(f"cannot {what}: {error}")
            return False
        return True

    def end(self) -> Event:
        """The one event that follows when all hosts have reported what they have found."""
        self.part.probe(ProbeHosts(0))
        self.on_chunks([])
        (event,) = self.posted
        return event


@pytest.fixture(autouse=True)
def _no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_part, "_note_bad_hosts", lambda *_: None)


ELASTIC = ("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "--rdzv-id", "job")


FIXED = ("--nnodes", "3", *ELASTIC[2:])
TWO, THREE = ("node1", "node2"), ("node1", "node2", "node3")


@pytest.mark.parametrize(
    ("hosts", "number", "restarts", "known", "had_go_ahead", "expected"),
    [
        (ELASTIC, 0, 0, (), False, StartFailed),
        (ELASTIC, 1, 0, THREE, False, StartFailed),  # the start is tried again
        (ELASTIC, 1, 0, TWO, False, ProbesPassed),  # as a host knows it that leads from now on
        (ELASTIC, 2, 0, THREE, True, ProbesPassed),  # they have run together since
        (ELASTIC, 2, 1, (), False, ProbesPassed),
        (FIXED, 1, 0, TWO, False, StartFailed),
        (FIXED, 1, 1, TWO, True, ProbesPassed),  # a host has taken the place of one
        (FIXED, 1, 1, THREE, True, StartFailed),
    ],
)
def test_a_job_that_has_run_is_not_ended_by_a_check_of_hosts_that_came_later(
    hosts: Sequence[str],
    number: int,
    restarts: int,
    known: Sequence[str],
    expected: type[Event],
    *,
    had_go_ahead: bool,
) -> None:
    """Under torchrun it would be tried. What was found is printed."""
    leader = Leader({2: CUT_OFF}, spares=(), hosts=hosts, attempt=number, restarts=restarts)
    run = leader.part._opened()
    run._hosts, run._had_go_ahead = frozenset(known), had_go_ahead  # of the previous attempt
    event = leader.end()
    assert isinstance(event, expected)
    printed = [*leader.lines, *([event.what] if isinstance(event, StartFailed) else [])]
    assert any(CUT_OFF.message in line for line in printed)


def test_an_unfit_host_is_replaced_before_the_ranks_are_started() -> None:
    """What was found is printed once, as the reason."""
    leader = Leader({1: GPU_LOST})
    event = leader.end()
    assert isinstance(event, StartFailed)
    assert (event.what, event.hint, event.may_go_on) == ("node2: GPU 3 fell off the bus", "reboot", True)
    assert event.faulty == (FaultyHost(1, "node2", "GPU 3 fell off the bus"),)
    assert leader.lines == []


@pytest.mark.parametrize(("spares", "options"), [((), ()), (("node4",), ("--preflight", "warn"))])
def test_the_ranks_are_started_with_an_unfit_host_where_there_is_no_spare(
    spares: Sequence[str], options: Sequence[str]
) -> None:
    """As without spares. Whoever wants warnings only gets no more."""
    leader = Leader({1: GPU_LOST}, *options, spares=spares)
    assert isinstance(leader.end(), ProbesPassed)
    assert leader.lines[0] == "saferun: warning: node2: GPU 3 fell off the bus"


@pytest.mark.parametrize(("spares", "faulty"), [(("node4",), 1), ((), 0)])
def test_a_host_that_ends_the_launch_is_replaced_where_there_is_a_spare(spares: Sequence[str], faulty: int) -> None:
    leader = Leader({2: CUT_OFF}, spares=spares)
    event = leader.end()
    assert isinstance(event, StartFailed)
    assert (event.what, event.hint, event.exit_code) == ("node3: its eth1 is not reached", HINT, 2)
    assert (len(event.faulty), event.may_go_on) == (faulty, False)


def test_a_first_host_that_cannot_be_replaced_is_kept() -> None:
    leader = Leader({0: GPU_LOST._replace(name="gpus")})
    # What this host has found itself is known without a message.
    leader.part._opened()._attempt.own.results.append(GPU_LOST)
    assert isinstance(leader.end(), ProbesPassed)


def test_a_mistake_in_the_judgement_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ignores what a message makes fail: nothing would follow, until the phase is over."""

    def break_itself(*_: object, **__: object) -> None:
        raise ArithmeticError("a mistake of our own")

    monkeypatch.setattr(judging, "judge", break_itself)
    leader = Leader({1: GPU_LOST})
    assert isinstance(leader.end(), ProbesPassed)
    assert leader.lines == ["cannot check this host: a mistake of our own"]


def test_a_mistake_in_the_choice_of_hosts_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader({1: GPU_LOST})

    def break_itself(_faults: object) -> bool:
        raise ArithmeticError("a mistake of our own")

    monkeypatch.setattr(leader, "_can_replace", break_itself)
    leader.part._opened()._can_replace = break_itself
    assert isinstance(leader.end(), ProbesPassed)
