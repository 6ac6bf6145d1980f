"""When the end of a failed attempt is no longer waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Evidence
from saferun.launch.incident_failure import FailureIncident
from saferun.launch.investigation import Investigation
from saferun.supervisor.actions import Diagnose, HurryDiagnosis
from saferun.supervisor.ending import Failed
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


@pytest.mark.parametrize(("within_s", "expected"), [(3.0, 103.0), (0.0, 100.0), (90.0, 160.0)])
def test_after_a_signal_cores_are_read_for_seconds(
    monkeypatch: pytest.MonkeyPatch, within_s: float, expected: float
) -> None:
    """What is known by then is diagnosed, before the scheduler's SIGKILL; nothing is ever read for longer."""
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    investigation: Any = Investigation.__new__(Investigation)
    investigation._record = SimpleNamespace(running=SimpleNamespace(deadline=160.0))
    investigation.hurry_diagnosis(HurryDiagnosis(0, within_s))
    assert investigation._record.running.deadline == expected
    investigation._record.running = None
    investigation.hurry_diagnosis(HurryDiagnosis(0, within_s))
