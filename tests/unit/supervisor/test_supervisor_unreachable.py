"""A host on which a rank fails while its leader cannot be reached: what it waits for, and for how long."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from saferun.supervisor.actions import Diagnose, PrintLine, ReportFailure
from saferun.supervisor.events import Diagnosed, HostsReachable, HostsUnreachable, JobAborted, JobLost, StopRequested
from saferun.supervisor.machine import State
from saferun.supervisor.policy import FailureFacts
from tests.unit.supervisor.fake_job import FAILED, LIMITS, Host, Job

UNREACHABLE = "node0 cannot be reached"
OTHERS_S = 100.0


class Outage:
    """A job whose leader cannot be reached by the host with node rank 1."""

    def __init__(self, *, max_restarts: int = 1, least: int | None = None, spares: int = 0) -> None:
        self.job = Job(3 + spares, max_restarts, least, spares=spares, moves=bool(spares))
        self.job.run()
        self.host: Host = self.job.hosts[1]
        self.facts: FailureFacts | None = None  # of the failure of that host
        self._held: list[tuple[Host, JobAborted]] = []
        self.host.deliver(HostsUnreachable(self.job.now, 0, UNREACHABLE))

    def fail(self) -> None:
        """A rank of that host fails, and nothing of it reaches the others, nor anything of them this host."""
        self.host.exit(FAILED)
        self.settle()

    def settle(self) -> None:
        """Let that host do what follows by itself."""
        while self.host.inbox and self.host.finish is None:
            for other in self.job.hosts:
                aborted = [event for event in other.inbox if isinstance(event, JobAborted)]
                self._held += [(other, event) for event in aborted]
                for event in aborted:
                    other.inbox.remove(event)
            if isinstance(self.host.inbox[0], Diagnosed):
                self.host.inbox[0] = self.host.inbox[0]._replace(facts=self.facts)
            self.host.take()

    def heal(self) -> None:
        """What was on its way arrives."""
        self.host.deliver(HostsReachable(self.job.now, 0))
        for other, event in self._held:
            other.inbox.append(event)

    @property
    def code(self) -> int | None:
        """What the host ends with; None: it has not ended."""
        return self.host.finish.exit_code if self.host.finish is not None else None

    @property
    def decisions(self) -> list[str]:
        """What this host has decided by itself."""
        reported = [action for action in self.host.actions if isinstance(action, ReportFailure)]
        return [f"{action.decision.next_step}: {action.decision.reason}" for action in reported if action.decision]


def test_where_restarts_are_left_a_host_waits_for_the_decision_of_a_leader_that_cannot_be_reached() -> None:
    """A switch restarts. Under torchrun its ranks start again as well, and meet the others when the network is back."""
    outage = Outage()
    outage.fail()
    assert outage.host.state is State.DIAGNOSING
    line = f"rank 0 failed first; {UNREACHABLE}; waiting for its decision about another attempt for 230 s at most"
    assert outage.host.actions.count(PrintLine(line)) == 1
    outage.heal()
    outage.job.next_attempt()
    assert [host.supervisor.attempt for host in outage.job.hosts] == [1, 1, 1]
    assert outage.decisions == []


def test_a_leader_that_is_really_gone_is_waited_for_within_the_limit_of_the_phase() -> None:
    """It decides nothing any more."""
    outage = Outage(max_restarts=3)
    began_at = outage.job.now
    outage.fail()
    outage.host.expire()
    assert outage.code == 1
    assert outage.job.now - began_at == LIMITS.diagnose_s + 2 * OTHERS_S
    assert outage.decisions == ["finish: the other hosts cannot be reached"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_in_an_elastic_job_a_host_meets_the_others_again_without_the_decision(*, is_lost: bool) -> None:
    """They do so as well where the leader is lost, and none of them waits for it."""
    outage = Outage(least=1)
    if is_lost:
        outage.host.deliver(JobLost(outage.job.now, 0, "node0 is gone", "look"))
        outage.settle()
    else:
        outage.fail()
    assert outage.host.state is State.BACKOFF
    assert [decision.partition(":")[0] for decision in outage.decisions] == ["restart"]


def test_in_an_elastic_job_a_start_that_fails_is_tried_again_without_a_leader_that_cannot_be_reached() -> None:
    """As where the leader is lost at once: that it may come back is no reason to end."""
    outage = Outage(max_restarts=0, least=1)
    outage.facts = FailureFacts("master_unreachable", is_start_over=False, in_init=True)
    outage.fail()
    assert outage.host.state is State.BACKOFF
    assert [decision.partition(":")[0] for decision in outage.decisions] == ["retry"]


@pytest.mark.parametrize("least", [None, 1])
def test_without_restarts_no_decision_is_waited_for(least: int | None) -> None:
    """Whatever it is, it is the end of this host."""
    outage = Outage(max_restarts=0, least=least)
    outage.fail()
    assert outage.code == 1


def test_a_leader_that_is_lost_after_it_could_not_be_reached_has_its_place_taken_by_a_spare() -> None:
    """As where it is lost at once."""
    outage = Outage(max_restarts=0, spares=1)
    outage.host.deliver(JobLost(outage.job.now, 0, "node0 is gone", "look"))
    outage.settle()
    assert outage.host.state is State.BACKOFF
    assert [decision.partition(":")[0] for decision in outage.decisions] == ["replace"]


def test_where_a_spare_is_left_a_host_waits_for_the_decision_without_restarts_as_well() -> None:
    """A host that is replaced uses up no restart. If the leader is lost, the spare leads, and needs this one."""
    outage = Outage(max_restarts=0, spares=1)
    outage.fail()
    assert (outage.code, outage.host.state) == (None, State.DIAGNOSING)
    outage.host.deliver(JobLost(outage.job.now, 0, "node0 is gone", "look"))
    outage.settle()
    assert outage.host.state is State.BACKOFF
    assert [decision.partition(":")[0] for decision in outage.decisions] == ["replace"]


def _stop_by_signal(outage: Outage) -> None:
    outage.host.signal(signal.SIGTERM)


def _stop_by_request(outage: Outage) -> None:
    outage.host.interrupted = True  # the ranks work
    outage.host.deliver(StopRequested(outage.job.now, 0, "saferunctl stop", at_once=False))


@pytest.mark.parametrize("stop", [_stop_by_signal, _stop_by_request])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_host_that_is_stopped_does_not_wait_for_a_leader_that_cannot_be_reached(
    stop: Callable[[Outage], None], *, is_first: bool
) -> None:
    """The user or the scheduler wants its end, so that no other attempt can follow here."""
    outage = Outage()
    if is_first:
        stop(outage)
        outage.settle()
    else:
        outage.fail()
        stop(outage)
    assert outage.code is not None
    assert any(isinstance(action, Diagnose) for action in outage.host.actions)
    assert len(outage.decisions) == 1
