"""What other hosts report while this one still prepares an attempt; and what is written of the end."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import pytest

from saferun.cluster.job_values import Assignment
from saferun.config import HostsConfig
from saferun.errors import SaferunError
from saferun.files.run_files import RunEnd
from saferun.launch.attempt_end import AttemptEnd
from saferun.launch.attempt_setup import AttemptSetup
from saferun.launch.launch_context import HostAttempt, LaunchContext
from saferun.model import ExitStatus, Placement, RankAssignment, RankEnd
from saferun.supervisor.actions import (
    ATTEMPT_FAILED,
    BroadcastDecision,
    Diagnose,
    Finish,
    ReportDecision,
    ReportFailure,
    Undiagnosed,
)
from saferun.supervisor.ending import Leave
from saferun.supervisor.events import (
    DeadlineExpired,
    Diagnosed,
    Event,
    HostsJoined,
    JobAborted,
    JobDecided,
    JobLost,
    StartFailed,
)
from saferun.supervisor.machine import State
from tests.unit.samples import end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ABORTED = JobAborted(1.0, 3, "failure", "rank 0: exit code 1", "node0", ours=False)
DECIDED = JobDecided(2.0, 3, "restart", 1, 0.0, 1)
PLACEMENT = Placement(1, 2, 2, 2, (RankAssignment(0, 1, 0),), "node0", 29500, "id")
ASSIGNMENT = Assignment(PLACEMENT, 3, leads=False, may_leave=False, files="")


class Context:
    """What both take of a launch."""

    def __init__(self, state: State) -> None:
        self.supervisor = SimpleNamespace(state=state)
        self.attempt = 0
        self.current = HostAttempt(3, ASSIGNMENT)
        self.ended_attempt = None
        self.torchrun_events = SimpleNamespace(hosts_joined=lambda *_: None)
        self.posted: list[Event] = []
        self.attempt_end = AttemptEnd(cast("LaunchContext", self))

    def post(self, event: Event) -> None:
        self.posted.append(event)

    def start_failed(self, attempt: int, error: SaferunError, *, joined: HostsJoined) -> None:
        self.post(StartFailed(1.0, attempt, error.what, error.hint, 1, joined=joined))

    @property
    def setup(self) -> Any:
        setup = AttemptSetup.__new__(AttemptSetup)
        setup.__dict__["_context"] = self
        return setup

    def join(self) -> None:
        self.setup._post_joined(ASSIGNMENT)


def test_an_abort_that_comes_before_the_attempt_is_prepared_is_not_lost() -> None:
    """The ranks of another host may have failed while this host waits for its log directories."""
    context = Context(State.JOINING)
    for event in (ABORTED, DECIDED):
        context.attempt_end.post_from_job(event)
    assert context.posted == []
    context.join()
    assert [type(event) for event in context.posted] == [HostsJoined, JobAborted, JobDecided]
    # The supervisor has not handled the first of them yet.
    context.attempt_end.post_from_job(DECIDED)
    assert context.posted[-1] == DECIDED


def test_a_start_that_fails_with_the_hosts_met_comes_before_what_other_hosts_report() -> None:
    """The supervisor has taken part in the attempt then, which the others end."""
    context = Context(State.JOINING)
    context.attempt_end.post_from_job(DECIDED)
    context.setup._post_failed(ASSIGNMENT, SaferunError("there is no such tool", "install it"))
    failed, decided = context.posted
    assert isinstance(failed, StartFailed)
    assert failed.joined is not None
    assert failed.joined.placement == ASSIGNMENT.placement
    assert decided == DECIDED


def test_torch_that_cannot_answer_is_a_start_that_fails_with_the_hosts_met() -> None:
    """The other hosts count on the ranks of this one."""
    context = Context(State.JOINING)
    context.setup.on_prepare_failed(SaferunError("ValueError: there is no event handler 'x'", "look", 2))
    (failed,) = context.posted
    assert isinstance(failed, StartFailed)
    assert failed.joined is not None
    assert failed.joined.number == ASSIGNMENT.number


def test_a_host_that_prepares_its_ranks_for_too_long_knows_what_the_hosts_had_agreed_on() -> None:
    """Else it would end without a word to the others, whose ranks wait for its own. What they report comes after it."""
    context = Context(State.JOINING)
    context.attempt_end.post_from_job(ABORTED)
    context.setup.post_expired(9.0)
    expired, aborted = context.posted
    assert isinstance(expired, DeadlineExpired)
    assert expired.joined is not None
    assert expired.joined.placement == ASSIGNMENT.placement
    assert aborted == ABORTED
    # Torch answers all the same, or the file system does.
    context.setup.on_prepared({})
    context.setup._post_held()
    assert len(context.posted) == 2


@pytest.mark.parametrize("state", [State.CHECKING, State.JOINING, State.PROBING, State.STARTING])
def test_another_phase_that_lasts_too_long_is_the_supervisors_alone(state: State) -> None:
    """Before the hosts have met there is nothing to give up, and later the supervisor knows of it."""
    context = Context(state)
    if state is State.JOINING:
        context.current = HostAttempt(3)
    context.setup.post_expired(9.0)
    assert context.posted == [DeadlineExpired(9.0, 0)]


def test_what_the_leader_has_decided_of_the_attempt_before_is_not_held() -> None:
    """The hosts have not met again, and it ends this host, too."""
    context = Context(State.JOINING)
    context.current = HostAttempt(3)
    context.attempt_end.post_from_job(DECIDED)
    assert context.posted == [DECIDED]


@pytest.mark.parametrize("event", [JobLost(1.0, 3, "gone", "hint"), StartFailed(1.0, 3, "no rendezvous", "hint", 1)])
def test_what_ends_the_rendezvous_itself_is_not_held(event: Event) -> None:
    """Without it this host would wait forever."""
    context = Context(State.JOINING)
    context.attempt_end.post_from_job(event)
    assert context.posted == [event]


@pytest.mark.parametrize("state", [State.RUNNING, State.DIAGNOSING, State.BACKOFF])
def test_later_nothing_is_held(state: State) -> None:
    """Also where the attempt has been reported on and the next one is not there yet."""
    context = Context(state)
    context.attempt_end.post_from_job(ABORTED)
    assert context.posted == [ABORTED]


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (Finish(0), "succeeded"),
        (Finish(1), "failed"),
        (Finish(0, leaves=True), "left"),
        (Finish(1, leaves=True), "left"),
        (Finish(143, by="a user", leaves=True), "stopped"),
    ],
)
def test_a_host_that_the_job_goes_on_without_has_not_succeeded(action: Finish, outcome: str) -> None:
    """Whoever gets the event of the end would take the job for done."""
    assert ended_as(action) == outcome


def test_a_host_that_leaves_because_of_a_signal_has_been_stopped_and_the_job_may_go_on() -> None:
    """Whoever reads its run.json does not take the job for done, nor its files for those of an earlier run."""
    ending = Diagnose(0, Leave(15), (), alone=True)
    outcome = ended_as(Finish(143, leaves=True), ending.stop_signum)
    assert outcome == "stopped"
    assert RunEnd(1.0, 143, outcome, "").is_of_one_host


def ended_as(action: Finish, stop_signum: int | None = None) -> str:
    """The outcome that is written of a launch that ends so."""
    written: list[Any] = []
    log = SimpleNamespace(finish=lambda code, outcome: written.append((code, outcome)), last_headline="")
    context: Any = SimpleNamespace(
        attempt=0,
        ended_attempt=None,
        job=SimpleNamespace(abort_reason=None),
        torchrun_events=SimpleNamespace(launch_ended=lambda *_, **__: None),
        checks=SimpleNamespace(settle=bool),
        run_dir=SimpleNamespace(restore=bool),
        guarded=lambda _what, call, *arguments: call(*arguments),
        investigation=SimpleNamespace(log=log),
        log=SimpleNamespace(finish=lambda code, outcome, **_: written.append((code, outcome))),
    )
    attempt_end = AttemptEnd(context)
    attempt_end._stop_signum = stop_signum
    attempt_end.finish(action)
    (exit_code, outcome), again = written
    assert again == (exit_code, outcome) == (action.exit_code, outcome)
    return str(outcome)


def test_the_leader_names_all_other_hosts_and_spares_to_the_run_directory() -> None:
    """It moves what hosts that are not among them left there of an earlier run."""
    context = MagicMock()
    context.job.peers = {1: SimpleNamespace(label="node2"), 2: SimpleNamespace(label="node3")}
    setup: Any = AttemptSetup.__new__(AttemptSetup)
    setup.__dict__.update(_context=context, _config=SimpleNamespace(hosts=HostsConfig(most=4)))
    setup.__dict__.update(_preparation=lambda _placement: None)
    setup.on_assigned(ASSIGNMENT._replace(leads=True, spares=("node4",)))
    assert set(context.run_dir.join.call_args.kwargs["hosts"]) == {"node2", "node3", "node4"}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_host_comes_late_where_others_have_met_before_and_not_by_the_number_of_the_attempt(
    number: int, *, has_begun: bool
) -> None:
    """A start that failed before the first meeting counts: a port may be in use for a moment when a job is repeated."""
    context = MagicMock()
    setup: Any = AttemptSetup.__new__(AttemptSetup)
    setup.__dict__.update(_context=context, _config=SimpleNamespace(hosts=HostsConfig(most=2)))
    setup.__dict__.update(_preparation=lambda _placement: None)
    setup.on_assigned(ASSIGNMENT._replace(number=number, has_begun=has_begun))
    assert context.run_dir.join.call_args.kwargs["is_late"] == has_begun


def test_where_no_diagnosis_came_in_time_other_hosts_and_the_error_file_have_the_first_failure_as_well() -> None:
    """All that is reported of one failure is the same."""
    context = MagicMock(environ={"TORCHELASTIC_ERROR_FILE": "/tmp/error.json"})
    context.guarded = lambda _what, call, *arguments: call(*arguments)
    investigation = context.investigation
    investigation.completed = lambda diagnosis: diagnosis._replace(headline="rank 3 failed: exit code 1")
    context.current.own_failure = lambda *_: None
    undiagnosed: Any = Undiagnosed(ATTEMPT_FAILED)
    attempt_end = AttemptEnd(context)
    attempt_end.report_failure(ReportFailure(0, undiagnosed, restarting=False))
    attempt_end.broadcast_decision(BroadcastDecision(0, "finish", 1, 0.0, 0, undiagnosed))
    named = undiagnosed._replace(headline="rank 3 failed: exit code 1")
    (_, _, reported), _ = context.succeeds.call_args
    assert reported.diagnosis == named
    (_, [_, message, *_], _), _ = context.run_dir.files.ask.call_args
    assert message == named.headline
    investigation.decision_text.assert_called_once_with(named, restarting=False, decision=None)


def written_by(decide: Callable[[AttemptEnd], None], own_failure: RankEnd | None = None, hosts: int = 2) -> list[Any]:
    """What a host writes to its TORCHELASTIC_ERROR_FILE: the message, the file of a rank, its exit code, since when."""
    context = MagicMock(environ={"TORCHELASTIC_ERROR_FILE": "/tmp/error.json"})
    context.guarded = lambda _what, call, *arguments: call(*arguments)
    context.config.hosts = HostsConfig(most=hosts)
    context.current.started_time = 1.7e9
    context.current.plan.placement = PLACEMENT
    context.current.plan.position = lambda assignment: assignment.local_rank
    context.current.plan.destinations.error_files = ("/logs/1/error.json",)
    context.investigation.completed = lambda diagnosis: diagnosis
    context.current.own_failure = lambda *_: own_failure
    decide(AttemptEnd(context))
    return [call.args[1] for call in context.run_dir.files.ask.call_args_list if call.args[0] == "write_error"]


def follow(end: AttemptEnd, *lines: str, restarting: bool = False, signum: int | None = None) -> None:
    end.report_decision(ReportDecision(0, lines, restarting, signum))


def lead(end: AttemptEnd, signum: int | None = None) -> None:
    undiagnosed: Any = Undiagnosed("rank 7 (node9) failed first")
    end.report_failure(ReportFailure(0, undiagnosed, restarting=False, stop_signum=signum))


OWN = RankEnd(0, 1, 4001, ExitStatus(3, None), 1.0, 1.7e9, stopped_by_us=False)


@pytest.mark.parametrize("decide", [lead, lambda end: follow(end, "saferun: rank 7 (node9) failed first")])
def test_each_host_writes_what_the_first_of_its_own_ranks_has_recorded_that_failed(
    decide: Callable[[AttemptEnd], None],
) -> None:
    """As each torchrun does; the job's first failure may be another host's."""
    (written,) = written_by(decide, OWN)
    assert written == ["/tmp/error.json", "rank 7 (node9) failed first", "/logs/1/error.json", 3, 0.0]


@pytest.mark.parametrize(
    "decide", [lead, lambda end: follow(end, "saferun: rank 7 (node9) failed first", "hint: look")]
)
@pytest.mark.parametrize(("hosts", "since"), [(2, 1.7e9), (1, 0.0)])
def test_a_host_whose_ranks_were_only_stopped_writes_why_the_job_has_ended(
    decide: Callable[[AttemptEnd], None], hosts: int, since: float
) -> None:
    """Where hosts have one file in common, what a rank has recorded is more."""
    (written,) = written_by(decide, hosts=hosts)
    assert written == ["/tmp/error.json", "rank 7 (node9) failed first", "", 0, since]


@pytest.mark.parametrize("decide", [lambda end: lead(end, 15), lambda end: follow(end, "saferun: stopped", signum=15)])
def test_a_host_that_a_signal_has_stopped_writes_that(decide: Callable[[AttemptEnd], None]) -> None:
    """In the words of torchrun's exception, whatever its ranks did on their way out."""
    (written,) = written_by(decide, OWN)
    assert written == ["/tmp/error.json", f"SignalException: Process {os.getpid()} got signal: 15", "", 0, 0.0]


def test_an_attempt_that_is_followed_by_another_has_no_error_file() -> None:
    """Nor has it under torchrun."""
    assert written_by(lambda end: follow(end, "saferun: starting all ranks again", restarting=True), OWN) == []


def test_a_decision_without_words_names_the_host_that_has_more() -> None:
    """A message whose text had to be left out, for instance."""
    (written,) = written_by(follow)
    assert "the job has failed" in written[1]


VICTIM, CULPRIT = end_of(3, code=1, at=4.0), end_of(4, code=1, at=5.0)
STOPPED = end_of(5, signum=15, at=3.0, stopped=True)
ELSEWHERE = end_of(0, code=1)


@pytest.mark.parametrize(
    ("of_job", "of_host", "ends", "expected"),
    [
        (CULPRIT, None, (VICTIM, CULPRIT), CULPRIT),
        (None, CULPRIT, (VICTIM, CULPRIT), CULPRIT),
        (ELSEWHERE, CULPRIT, (VICTIM, CULPRIT), CULPRIT),
        (ELSEWHERE, None, (CULPRIT, VICTIM), VICTIM),
        (ELSEWHERE, None, (STOPPED, VICTIM, end_of(6, code=0, at=1.0)), VICTIM),
        (ELSEWHERE, None, (STOPPED,), None),
        (None, None, (VICTIM,), VICTIM),
    ],
    ids=["the job's", "the host's", "another host's", "the first", "stopped before", "only stopped", "nothing known"],
)
def test_of_several_hosts_each_has_a_first_failure_of_its_own(
    of_job: RankEnd | None, of_host: RankEnd | None, ends: Sequence[RankEnd], expected: RankEnd | None
) -> None:
    """What has recorded an error on this host, as its torchrun would know it. A rank that saferun stopped has none."""
    attempt, group, plan = HostAttempt(), MagicMock(), MagicMock()
    attempt.group, attempt.plan = group, plan
    group.ranks = [SimpleNamespace(end=end) for end in (*ends, None)]
    plan.placement.ranks = (*group.ranks, "one that could not be started")
    plan.placement.world_size = 9
    diagnoses: list[Any] = [first and SimpleNamespace(first_failure=first) for first in (of_job, of_host)]
    assert attempt.own_failure(*diagnoses) == expected
    # A job of one host: its diagnosis knows all, such as a store that was lost.
    plan.placement.world_size = len(plan.placement.ranks)
    assert attempt.own_failure(*diagnoses) == next((end for end in (of_job, of_host) if end in ends), None)
    attempt.plan = None
    assert attempt.own_failure(*diagnoses) == next((end for end in (of_job, of_host) if end in ends), None)


@pytest.mark.parametrize(("attempt", "is_known"), [(0, True), (1, False)])
def test_what_this_host_has_found_out_of_the_attempt_counts_for_its_error_file(attempt: int, *, is_known: bool) -> None:
    """On hosts that do not lead; of an earlier attempt nothing does."""
    asked: list[Any] = []
    own = Undiagnosed("rank 1 failed")

    def decide(end: AttemptEnd) -> None:
        end._context.current.own_failure = lambda *found: asked.append(found)  # type: ignore[method-assign]
        end.post_investigated(Diagnosed(1.0, 0, cast("Any", own)))
        end.report_decision(ReportDecision(attempt, ("saferun: rank 1 failed",), restarting=False))

    written_by(decide)
    assert asked == [(None, own if is_known else None)]
