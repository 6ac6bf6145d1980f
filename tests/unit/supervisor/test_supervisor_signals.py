"""Signals on several hosts: what the ranks get where another host was signalled, and where this one is, too."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from saferun.supervisor.actions import (
    CaptureEvidence,
    Diagnose,
    Finish,
    PrintLine,
    ReportDecision,
    ReportFailure,
    SignalRanks,
    SweepOrphans,
)
from saferun.supervisor.events import (
    DeadlineExpired,
    EvidenceCaptured,
    JobAborted,
    JobDecided,
    RankExited,
    SignalReceived,
)
from saferun.supervisor.machine import State
from tests.unit.supervisor.fake_job import FAILED, KILLED, Host, Job
from tests.unit.supervisor.test_supervisor_jobs import codes, started

if TYPE_CHECKING:
    from saferun.supervisor.actions import Action

TERM, INT, HUP, QUIT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1
STOP_SIGNALS = (TERM, INT, QUIT, USR1)
GRACE_S = 30.0


def job_of(hosts: int = 2, **options: object) -> Job:
    """A job whose ranks run, with ``--signals-to-handle SIGTERM,SIGINT,SIGQUIT,SIGUSR1``."""
    job = started(hosts, **options)
    for host in job.hosts:
        host.supervisor._launch.job = host.supervisor._launch.job._replace(stop_signals=STOP_SIGNALS)
    return job


def aborted(job: Job, signum: int, reason: str = "signal", idle_s: float = 0.0) -> JobAborted:
    return JobAborted(job.now, 0, reason, "words", "node0", signum=signum, idle_s=idle_s)


def signalled(host: Host, event: JobAborted | SignalReceived | DeadlineExpired | EvidenceCaptured) -> list[SignalRanks]:
    """What the ranks of a host get after an event; they live on."""
    return sent(host.supervisor.handle(event))


def sent(actions: list[Action]) -> list[SignalRanks]:
    return [action for action in actions if isinstance(action, SignalRanks)]


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_signal_that_another_host_got_reaches_the_ranks_here(signum: int) -> None:
    """Ranks save a checkpoint at it, on all hosts or on none; the scheduler's own signal may come too late."""
    job = job_of()
    assert signalled(job.hosts[1], aborted(job, signum)) == [SignalRanks(0, (0, 1), signum)]


@pytest.mark.parametrize("reason", ["signal", "parent", "a reason of another release"])
@pytest.mark.parametrize("signum", [HUP, signal.SIGUSR2, signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT, 63])
def test_another_host_chooses_among_the_stop_signals_of_this_launch(reason: str, signum: int) -> None:
    """Whoever may write to the job's log could otherwise kill ranks without a checkpoint, or suspend them."""
    job = job_of()
    assert signalled(job.hosts[1], aborted(job, signum, reason)) == [SignalRanks(0, (0, 1), TERM)]


@pytest.mark.parametrize(("reason", "signum"), [("restart", USR1), ("request", USR1), ("request", INT)])
def test_what_a_user_asks_for_by_saferunctl_is_no_signal_to_another_host(reason: str, signum: int) -> None:
    """The ranks get SIGTERM, or SIGKILL by ``saferunctl kill``."""
    job = job_of()
    assert signalled(job.hosts[1], aborted(job, signum, reason)) == [SignalRanks(0, (0, 1), TERM)]


def test_ctrl_c_that_does_not_stop_this_launch_reaches_its_ranks_as_sigterm() -> None:
    """``--signals-to-handle`` may leave it out."""
    job = job_of()
    job.hosts[1].supervisor._launch.job = job.hosts[1].supervisor._launch.job._replace(stop_signals=(TERM,))
    assert signalled(job.hosts[1], aborted(job, INT)) == [SignalRanks(0, (0, 1), TERM)]


def test_stacks_of_ranks_that_make_no_progress_come_before_the_signal_of_another_host() -> None:
    """As on that host."""
    job = job_of()
    (look,) = job.hosts[1].supervisor.handle(aborted(job, USR1, idle_s=10.0))
    assert look == CaptureEvidence(0, (0, 1), 2.0)
    assert signalled(job.hosts[1], EvidenceCaptured(job.now, 0)) == [SignalRanks(0, (0, 1), USR1)]


def test_a_signal_to_another_host_while_a_failure_is_captured_here_reaches_the_ranks_that_are_left() -> None:
    """This host's own would as well."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(RankExited(job.now, 0, 0, FAILED))
    assert signalled(host, aborted(job, USR1)) == []
    assert signalled(host, EvidenceCaptured(job.now, 0)) == [SignalRanks(0, (1,), USR1)]


@pytest.mark.parametrize(("announced", "own"), [(USR1, TERM), (TERM, USR1), (HUP, USR1), (TERM, INT), (USR1, INT)])
def test_a_signal_to_this_host_that_differs_from_the_one_of_another_host_is_passed_on_once(
    announced: int, own: int
) -> None:
    """It has come a moment later. The ranks keep the grace that they have."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, announced))
    deadline = host.supervisor.deadline
    name = signal.Signals(own).name
    actions = host.supervisor.handle(SignalReceived(job.now + 1.0, 0, own))
    assert actions == [PrintLine(f"{name}: passed on to 2 ranks", of_signal=True), SignalRanks(0, (0, 1), own)]
    assert (host.state, host.supervisor.deadline) == (State.STOPPING, deadline)
    more = [SignalReceived(job.now + at, 0, signum) for at, signum in ((1.1, own), (2.0, QUIT), (2.0, USR1))]
    assert [signalled(host, event) for event in more] == [[], [], []]
    assert signalled(host, DeadlineExpired(job.now + GRACE_S / 2, 0)) == []  # the late capture
    assert signalled(host, DeadlineExpired(job.now + GRACE_S, 0)) == [SignalRanks(0, (0, 1), signal.SIGKILL)]


@pytest.mark.parametrize("signum", [TERM, QUIT, USR1])
def test_the_signal_that_the_ranks_have_got_already_is_not_sent_twice(signum: int) -> None:
    """Twice would be two checkpoints and two requeues."""
    job = job_of()
    host = job.hosts[1]
    assert len(signalled(host, aborted(job, signum))) == 1
    assert host.supervisor.handle(SignalReceived(job.now, 0, signum)) == []


def test_ranks_that_save_a_checkpoint_are_not_disturbed_because_what_started_saferun_is_gone() -> None:
    """The scheduler has ended it, perhaps; no signal has come to this host."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, USR1))
    assert host.supervisor.handle(SignalReceived(job.now, 0, TERM, why="parent process 7 is gone")) == []


def test_a_signal_that_was_replaced_by_sigterm_is_passed_on_when_it_comes_to_this_host_itself() -> None:
    """The hosts may have been started with different ``--signals-to-handle``."""
    job = job_of()
    host = job.hosts[1]
    assert signalled(host, aborted(job, HUP)) == [SignalRanks(0, (0, 1), TERM)]
    assert signalled(host, SignalReceived(job.now, 0, HUP)) == [SignalRanks(0, (0, 1), HUP)]


def test_the_line_about_a_signal_that_is_passed_on_names_what_the_ranks_get() -> None:
    """``--signals-to-handle`` may leave SIGINT out; whoever debugs a handler for it would look for it in vain."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor._launch.job = host.supervisor._launch.job._replace(stop_signals=(TERM, USR1))
    host.supervisor.handle(aborted(job, USR1))
    line = PrintLine("SIGINT: passed on to 2 ranks as SIGTERM", of_signal=True)
    assert host.supervisor.handle(SignalReceived(job.now + 1.0, 0, INT)) == [line, SignalRanks(0, (0, 1), TERM)]


def test_only_ranks_that_have_not_ended_get_the_second_signal() -> None:
    """The number of one that has may be another process's."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, TERM))
    host.supervisor.handle(RankExited(job.now, 0, 0, KILLED))
    assert signalled(host, SignalReceived(job.now, 0, USR1)) == [SignalRanks(0, (1,), USR1)]


def test_ranks_that_get_sigkill_get_no_signal_after_it() -> None:
    """It would not be taken in, and its line would say otherwise."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, TERM))
    host.supervisor.handle(DeadlineExpired(job.now + GRACE_S / 2, 0))
    host.supervisor.handle(DeadlineExpired(job.now + GRACE_S, 0))
    assert host.supervisor.handle(SignalReceived(job.now + GRACE_S, 0, USR1)) == []


def test_a_second_ctrl_c_ends_the_grace_after_the_signal_of_another_host_too() -> None:
    """The first one is passed on, since a launcher may have sent it to all hosts."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, TERM))
    assert signalled(host, SignalReceived(job.now + 1.0, 0, INT)) == [SignalRanks(0, (0, 1), INT)]
    assert signalled(host, SignalReceived(job.now + 1.1, 0, INT)) == []
    assert signalled(host, SignalReceived(job.now + 2.0, 0, INT)) == [SignalRanks(0, (0, 1), signal.SIGKILL)]


def test_ctrl_c_in_the_sweep_ends_it_after_the_signal_of_another_host_too() -> None:
    """No rank is left whose grace it could shorten."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, TERM))
    for rank in (0, 1):
        host.supervisor.handle(RankExited(job.now, 0, rank, KILLED))
    assert host.supervisor.handle(SignalReceived(job.now, 0, INT)) == [SweepOrphans(0, 0.0)]


def test_ctrl_c_while_stacks_are_captured_for_the_signal_of_another_host_reaches_the_ranks() -> None:
    """It waits for no evidence, and they have had no grace."""
    job = job_of()
    host = job.hosts[1]
    host.supervisor.handle(aborted(job, TERM, idle_s=10.0))
    assert host.state is State.CAPTURING
    assert signalled(host, SignalReceived(job.now, 0, INT)) == [SignalRanks(0, (0, 1), INT)]
    assert host.supervisor.deadline == job.now + GRACE_S


@pytest.mark.parametrize("own", [None, USR1, TERM])
def test_a_job_that_a_signal_ends_ends_alike_on_all_hosts(own: int | None) -> None:
    """Whether the signal comes to one host, to all, or to each another one."""
    job = job_of(3, max_restarts=3)
    job.hosts[0].signal(USR1)
    job.hosts[2].take()
    if own is not None:
        job.hosts[2].signal(own)
    job.settle()
    assert codes(job) == [1, 1, 1]
    assert job.number == 0


def reported(host: Host) -> int | None:
    (report,) = [action for action in host.actions if isinstance(action, ReportFailure | ReportDecision)]
    return report.stop_signum


@pytest.mark.parametrize("own", [None, TERM, USR1])
@pytest.mark.parametrize("state", [State.STOPPING, State.DIAGNOSING])
def test_each_host_reports_the_signal_that_has_come_to_it(state: State, own: int | None) -> None:
    """For TORCHELASTIC_ERROR_FILE; ranks may have ended at the signal of another host before that comes."""
    job = job_of()
    job.hosts[0].signal(USR1)
    while job.hosts[1].state is not state:
        for host in job.hosts[1:] if state is State.STOPPING else job.hosts:
            host.take()
    if own is not None:
        job.hosts[1].signal(own)
    job.settle()
    assert [reported(host) for host in job.hosts] == [USR1, own]


def test_a_signal_after_a_failure_is_not_reported_as_its_cause() -> None:
    """The ranks have recorded more."""
    job = job_of()
    job.hosts[0].exit(FAILED)
    job.hosts[1].take()
    job.hosts[1].signal(TERM)
    job.settle()
    assert [reported(host) for host in job.hosts] == [None, None]


# --------------------------------------------------------------------------------------------------------------------
# Jobs that go on without the host that got the signal


def leaving(signum: int, number: int = 1) -> tuple[Job, Host]:
    """An elastic job of which a host leaves after a signal; the other one has just read it."""
    job = job_of(3, least=1)
    job.interrupted = True
    job.hosts[0].signal(signum)
    return job, job.hosts[number]


def test_ranks_that_are_only_started_again_get_sigterm() -> None:
    """The job goes on without the host that was signalled: the signal was not meant for them."""
    job, host = leaving(USR1)
    host.supervisor.handle(host.inbox.popleft())
    assert host.state is State.CAPTURING
    (regroup,) = sent(host.supervisor.handle(DeadlineExpired(job.now + 2.0, 0)))
    assert regroup == SignalRanks(0, (0, 1), TERM)


@pytest.mark.parametrize(("grace_s", "wait_s"), [(30.0, 2.0), (2.0, 1.0), (0.0, 0.0)])
def test_the_wait_for_the_signal_of_this_host_leaves_the_ranks_half_of_their_grace(
    grace_s: float, wait_s: float
) -> None:
    """Under a scheduler it is a part of it."""
    job, host = leaving(USR1)
    host.supervisor._launch.limits = host.supervisor._launch.limits._replace(grace_s=grace_s)
    host.supervisor.handle(host.inbox.popleft())
    assert host.supervisor.deadline == job.now + wait_s


def test_ranks_of_an_elastic_job_get_the_signal_that_all_hosts_get() -> None:
    """As in any other job: by SIGTERM they would die before they have saved a checkpoint."""
    job, host = leaving(USR1)
    host.supervisor.handle(host.inbox.popleft())
    assert signalled(host, SignalReceived(job.now + 0.1, 0, USR1)) == [SignalRanks(0, (0, 1), USR1)]
    assert host.supervisor.deadline == job.now + 0.1 + GRACE_S / 2
    assert host.state is State.STOPPING


@pytest.mark.parametrize("signum", [TERM, INT])
def test_where_a_host_leaves_after_an_ordinary_signal_the_others_meet_again_at_once(signum: int) -> None:
    """Ranks that are started again get the same."""
    _, host = leaving(signum)
    assert signalled(host, host.inbox.popleft()) == [SignalRanks(0, (0, 1), signum)]  # type: ignore[arg-type]


@pytest.mark.parametrize("signum", [TERM, USR1])
def test_the_others_go_on_whatever_signal_the_host_that_leaves_has_got(signum: int) -> None:
    """It uses up no restart."""
    job, _ = leaving(signum)
    for host in job.hosts[1:]:
        host.take()
        if host.state is State.CAPTURING:
            host.expire()
    job.next_attempt()
    assert job.hosts[0].finish == Finish(1, leaves=True)
    assert [host.supervisor.attempt for host in job.hosts[1:]] == [1, 1]


def test_a_rank_that_ends_while_the_signal_of_this_host_is_awaited_is_no_failure() -> None:
    """It has lost the ranks of the host that leaves."""
    job, host = leaving(USR1)
    host.supervisor.handle(host.inbox.popleft())
    for rank in (0, 1):
        host.supervisor.handle(RankExited(job.now, 0, rank, FAILED))
    assert host.state is State.STOPPING
    assert not any(isinstance(action, Diagnose) for action in host.actions)


def test_a_decision_of_the_leader_ends_the_wait_for_the_signal_of_this_host() -> None:
    """Nothing more is to be learned."""
    job, host = leaving(USR1, 2)
    host.supervisor.handle(host.inbox.popleft())
    host.supervisor.handle(JobDecided(job.now, 0, "finish", 1, 0.0, 0))
    assert host.supervisor.deadline == job.now
