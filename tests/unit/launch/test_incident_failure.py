"""When the end of a failed attempt is no longer waited for."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.captures.wire import CoreRequest, DeadCalls, RecorderFile
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, Evidence, Frame, HangVerdict, StackDump, ThreadStack
from saferun.launch.attempt_record import NO_TIME, AttemptRecord
from saferun.launch.incident_failure import FailureIncident
from saferun.launch.incident_hang import HangIncident
from saferun.launch.investigation import Investigation
from saferun.supervisor import deciding
from saferun.supervisor.actions import ATTEMPT_FAILED, Diagnose, HurryDiagnosis, Undiagnosed
from saferun.supervisor.ending import Failed, Hung, Leave, Stopped
from saferun.supervisor.events import Diagnosed
from saferun.supervisor.machine import State
from tests.unit.host_samples import host_evidence

DIAGNOSIS = Diagnosis("rank 0 failed first", None, None, (), (), ())


class Launch:
    """What an incident finds of its launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stands = (State.DIAGNOSING, 0)
        self.posted: list[Any] = []
        self.shared: list[tuple[str, int]] = []
        self.hands_over: list[Any] = []
        record: Any = SimpleNamespace(concluded_attempt=-1, evidence=None)
        self.record = record
        launch = SimpleNamespace(
            is_in=lambda state, attempt: self.stands == (state, attempt),
            guarded=lambda _what, call, *arguments: call(*arguments),
            succeeds=lambda _what, call, *arguments: (call(*arguments), True)[1],
            job=SimpleNamespace(leads=False),
            cores=None,
        )
        exchange = SimpleNamespace(share=self._share)
        context: Any = SimpleNamespace(launch=launch, others_s=60.0, exchange=lambda: exchange, post=self.posted.append)
        self.incident = FailureIncident(context, record, Diagnose(0, Failed()))
        monkeypatch.setattr(self.incident, "_gather", lambda *_: host_evidence(0))
        monkeypatch.setattr(self.incident, "_diagnose", lambda: DIAGNOSIS)
        monkeypatch.setattr(self.incident, "_facts", lambda _: None)

    def _share(self, name: str, own: Evidence, _timeout_s: float, on_done: Any, **more: Any) -> None:
        self.shared.append((name, more["attempt"]))
        self.hands_over.append(lambda: on_done(own, ()))


def test_evidence_that_is_waited_for_is_handed_in_and_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch)
    launch.incident._conclude(None, "")
    launch.hands_over[0]()
    assert launch.shared == [("end", 0)]
    (event,) = launch.posted
    assert isinstance(event, Diagnosed)
    assert (event.attempt, launch.record.concluded_attempt) == (0, 0)


@pytest.mark.parametrize("stands", [(State.BACKOFF, 0), (State.PROBING, 1), (State.DIAGNOSING, 1), (State.DONE, 0)])
def test_what_dead_ranks_left_is_not_handed_in_where_the_hosts_have_met_again(
    monkeypatch: pytest.MonkeyPatch, stands: tuple[State, int]
) -> None:
    """A core may take longer to read than that."""
    launch = Launch(monkeypatch)
    launch.stands = stands
    launch.incident._conclude(None, "")
    assert (launch.shared, launch.posted, launch.record.concluded_attempt) == ([], [], -1)


def test_the_evidence_of_the_others_is_not_diagnosed_where_the_hosts_have_met_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = Launch(monkeypatch)
    launch.incident._conclude(None, "")
    launch.stands = (State.BACKOFF, 0)
    launch.hands_over[0]()
    assert launch.posted == []


@pytest.fixture(name="investigation")
def _investigation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    investigation: Any = Investigation.__new__(Investigation)
    investigation._record = AttemptRecord(cast("Any", None))
    investigation._guarded = lambda _what, call, *arguments: call(*arguments)
    investigation.log = SimpleNamespace(write=lambda: None)
    investigation.hangs = SimpleNamespace(tick=lambda _: None)
    investigation._cause_wait = None
    return investigation


@pytest.mark.parametrize(("within_s", "expected"), [(3.0, 103.0), (0.0, 100.0), (90.0, 160.0)])
def test_after_a_signal_cores_are_read_for_seconds(investigation: Any, within_s: float, expected: float) -> None:
    """What is known by then is diagnosed, before the scheduler's SIGKILL; nothing is ever read for longer."""
    reasons: list[tuple[str, ...]] = []
    running = SimpleNamespace(deadline=160.0, expire=lambda *why: reasons.append(why))
    investigation._record.running = running
    investigation.hurry_diagnosis(HurryDiagnosis(0, within_s))
    assert running.deadline == expected
    investigation.tick(expected)
    assert reasons == [(NO_TIME,) if within_s < 60.0 else ()]


class Begun(Launch):
    """An incident of a rank that has left a core, up to the request to the examiner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, record: AttemptRecord) -> None:
        super().__init__(monkeypatch)
        self.requests: list[CoreRequest] = []
        self.ends: list[tuple[object, str]] = []
        self.end: Any = None
        incident: Any = self.incident
        incident._record = record
        incident._cores = SimpleNamespace(has_raised_limit=True)
        incident._context.launch.config = SimpleNamespace(
            watch=SimpleNamespace(cores="backtrace", keep_cores=4, gdb=False)
        )
        incident._context.launch.attempt = 0
        incident._context.launch.run_dir = SimpleNamespace(rank_path=lambda *_: "", host_path=None)
        end = SimpleNamespace(status=SimpleNamespace(signum=signal.SIGSEGV))
        self.dead = [SimpleNamespace(assignment=SimpleNamespace(rank=0), pid=4711, end=end)]
        self.recorders: tuple[RecorderFile, ...] = ()
        self.calls: tuple[DeadCalls, ...] = ()
        monkeypatch.setattr(incident, "_dead", lambda: self.dead)
        monkeypatch.setattr(incident, "_recorders", lambda: self.recorders)
        monkeypatch.setattr(incident, "_dead_calls", lambda: self.calls)
        monkeypatch.setattr(incident, "_conclude", self._conclude)
        monkeypatch.setattr("saferun.launch.incident_failure.start_capture", self._start)

    def _conclude(self, reader: object, failure: str) -> None:
        incident: Any = self.incident
        incident._is_concluded = True
        self.ends.append((reader, failure))

    def _start(self, _context: object, record: Any, request: CoreRequest, on_done: object, *_: object) -> None:
        self.requests.append(request)
        self.end = on_done
        record.running = object()


def test_a_signal_that_came_before_the_cores_are_read_counts_as_well(
    monkeypatch: pytest.MonkeyPatch, investigation: Any
) -> None:
    """Error files and modules are waited for first; a minute for cores would then take the report with it."""
    investigation.hurry_diagnosis(HurryDiagnosis(0, 3.0))
    monkeypatch.setattr("time.monotonic", lambda: 101.0)
    launch = Begun(monkeypatch, investigation._record)
    launch.incident.begin()
    assert [request.budget_s for request in launch.requests] == [2.0]


def test_under_a_scheduler_the_examiner_gets_what_is_left_until_its_sigkill(
    monkeypatch: pytest.MonkeyPatch, investigation: Any
) -> None:
    """It plans by its budget: with a minute it would have named nothing when it is ended."""
    attempt = SimpleNamespace(
        others=SimpleNamespace(cut_off=None),
        stopping=SimpleNamespace(scheduler_kill_at=112.0, abandoned=()),
        ending=Stopped(15),
    )
    state: Any = SimpleNamespace(
        attempt=attempt,
        number=0,
        answers_to_job=False,
        limits=SimpleNamespace(diagnose_s=90.0),
        enter=lambda *_: None,
    )
    launch = Begun(monkeypatch, investigation._record)
    carry_out: dict[type, Any] = {
        Diagnose: lambda _: launch.incident.begin(),
        HurryDiagnosis: investigation.hurry_diagnosis,
    }
    for action in deciding.diagnose(state, 100.0):
        carry_out[type(action)](action)
    assert [request.budget_s for request in launch.requests] == [7.0]


def test_cores_are_not_read_where_a_signal_has_left_no_time(
    monkeypatch: pytest.MonkeyPatch, investigation: Any
) -> None:
    investigation.hurry_diagnosis(HurryDiagnosis(0, 0.0))
    launch = Begun(monkeypatch, investigation._record)
    launch.incident.begin()
    assert launch.requests == []
    assert launch.ends == [(None, f"cores: {NO_TIME}")]


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize(
    ("recorders", "calls", "expected"),
    [(True, False, "Flight Recorders"), (False, True, "last calls"), (True, True, "Flight Recorders and last calls")],
)
def test_no_core_is_said_to_be_missing_where_none_was_wanted(
    monkeypatch: pytest.MonkeyPatch, investigation: Any, *, is_begun: bool, recorders: bool, calls: bool, expected: str
) -> None:
    if not is_begun:
        investigation.hurry_diagnosis(HurryDiagnosis(0, 0.0))
    launch = Begun(monkeypatch, investigation._record)
    launch.dead.clear()
    launch.recorders = (RecorderFile(0, 4711, "/tmp/fr_0"),) if recorders else ()
    launch.calls = (DeadCalls(0, 4711, "/tmp/calls_0", 99.0),) if calls else ()
    launch.incident.begin()
    if is_begun:
        launch.end(None, NO_TIME)
    assert launch.ends == [(None, f"{expected}: {NO_TIME}")]


def test_what_was_read_whole_is_not_missing(monkeypatch: pytest.MonkeyPatch, investigation: Any) -> None:
    launch = Begun(monkeypatch, investigation._record)
    launch.incident.begin()
    launch.end(None, "")
    assert launch.ends == [(None, "")]


@pytest.mark.parametrize(
    ("headline", "world_size", "expected"),
    [
        (ATTEMPT_FAILED, 3, "rank 3 failed first: exit code 1"),
        (ATTEMPT_FAILED, 6, "rank 3 failed: exit code 1"),
        ("stopped by SIGTERM", 3, "stopped by SIGTERM"),
    ],
    ids=["alone", "with other hosts", "stopped"],
)
def test_where_no_diagnosis_came_in_time_the_first_failure_is_named(
    investigation: Any, headline: str, world_size: int, expected: str
) -> None:
    """A rank of another host may have failed before: what it reports has not come."""
    status = SimpleNamespace(ok=False, description="exit code 1")
    ranks = [
        SimpleNamespace(
            assignment=SimpleNamespace(rank=rank),
            end=SimpleNamespace(stopped_by_us=stopped_by_us, status=status, at=at),
        )
        for rank, at, stopped_by_us in ((1, 4.0, True), (2, 9.0, False), (3, 5.0, False))
    ]
    plan = SimpleNamespace(placement=SimpleNamespace(world_size=world_size))
    investigation._record.group = SimpleNamespace(ranks=ranks, plan=plan)
    assert investigation.completed(cast("Any", Undiagnosed(headline))).headline == expected
    investigation._record.group = None
    assert investigation.completed(cast("Any", Undiagnosed(headline))).headline == headline


HANG = HangVerdict("quiescent", (2, 3), 300.0, certain=True)
WHILE_CAPTURED = "a hang of 300 s was being captured: where the others were is of that moment"


def _dump(rank: int, *, is_read: bool = True) -> StackDump:
    frames = (Frame("recv", "train.py", 12),) if is_read else ()
    threads = (ThreadStack("MainThread", 1, True, True, False, frames),)
    return StackDump(rank, 4000 + rank, is_rank=True, name="python", tool="py-spy", threads=threads)


def _fail_in_a_hang(launch: Launch, failed_at: float, ranks: Sequence[int], more: dict[str, Any]) -> Any:
    """An incident of ranks, of which the last one has failed while they were captured for a hang."""
    incident: Any = launch.incident
    incident._action = Diagnose(0, more.get("ending", Failed(1)))
    launch.record.verdict = more.get("hang", HANG)
    launch.record.capture = Capture()
    stacks = tuple(more.get("stacks", map(_dump, ranks)))  # of all hosts
    launch.record.evidence = host_evidence(0)._replace(capture=Capture(stacks=stacks))
    launch.record.captured_at = 100.0
    launch.record.ranks = [
        SimpleNamespace(assignment=SimpleNamespace(rank=rank), end=SimpleNamespace(at=failed_at)) for rank in ranks
    ]
    return incident


@pytest.mark.parametrize(
    ("failed_at", "ranks", "more", "expected"),
    [
        (112.4, (2, 3), {}, ", 12 s before rank 3 failed"),
        (112.4, (2,), {}, ""),
        (100.4, (2, 3), {}, None),
        (112.4, (2, 3), {"hang": None}, None),
        (112.4, (2, 3), {"ending": Hung()}, None),
        (112.4, (2, 3), {"ending": Stopped(15)}, None),
        (112.4, (2, 3), {"ending": Stopped(15, "node1")}, None),
        (112.4, (2, 3), {"ending": Leave(15)}, None),
        (112.4, (3,), {}, None),
        (112.4, (2, 3), {"stacks": ()}, None),
        (112.4, (2, 3), {"stacks": (_dump(2, is_read=False), _dump(3))}, None),
        (112.4, (2, 3), {"stacks": (_dump(3), _dump(1))}, None),
    ],
    ids=[
        *("earlier", "on another host", "at the same moment", "no hang", "ended for it", "stopped"),
        *("stopped on another host", "left", "no others", "nothing captured", "others not read", "all failed"),
    ],
)
def test_a_failure_while_a_hang_is_captured_says_when_the_others_were_captured(
    monkeypatch: pytest.MonkeyPatch, failed_at: float, ranks: Sequence[int], more: dict[str, Any], expected: str | None
) -> None:
    """A capture may take as long as its budget, and that nothing moved may be why the rank failed."""
    incident = _fail_in_a_hang(Launch(monkeypatch), failed_at, ranks, more)
    ends: Any = (SimpleNamespace(rank=3), (SimpleNamespace(rank=1),))
    found = DIAGNOSIS._replace(first_failure=ends[0], also_failed=ends[1])
    assert incident._stood_still(found) == ("" if expected is None else WHILE_CAPTURED + expected)


def test_what_was_found_comes_before_when_the_others_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console shows the first findings only."""
    launch = Launch(monkeypatch)
    incident = _fail_in_a_hang(launch, 112.4, (2, 3), {})
    first: Any = SimpleNamespace(rank=3)
    found = DIAGNOSIS._replace(first_failure=first, findings=("rank 2 waits in a collective",))
    monkeypatch.setattr("saferun.launch.incident_failure.diagnose", lambda _: found)
    monkeypatch.setattr(incident, "_staged", lambda _: None)
    diagnosis = FailureIncident._diagnose(incident)
    assert diagnosis is not None
    assert diagnosis.findings == (*found.findings, f"{WHILE_CAPTURED}, 12 s before rank 3 failed")


@pytest.mark.parametrize("is_reported", [False, True])
def test_what_is_found_of_a_hang_after_its_report_is_not_about_a_later_failure(is_reported: bool) -> None:
    """The evidence of other hosts may come when the ranks have gone on, and a capture that follows is of its own."""
    record: Any = SimpleNamespace(verdict=HANG, evidence=None, diagnosis=None)
    launch = SimpleNamespace(job=SimpleNamespace(leads=True))
    hang = HangIncident(
        cast("Any", SimpleNamespace(launch=launch)), record, cast("Any", SimpleNamespace(number=1)), HANG, _ignore
    )
    if is_reported:
        record.verdict = None
    hang._take_back()
    assert record.verdict == (None if is_reported else HANG._replace(certain=False))


def _ignore(*_: object) -> None:
    pass
