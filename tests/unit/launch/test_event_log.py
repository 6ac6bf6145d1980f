"""The lines of events.jsonl."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from saferun.evidence.job_evidence import HangVerdict
from saferun.launch.event_log import EventLog
from saferun.supervisor.events import Diagnosed, Event, HangSuspected, SignalReceived
from saferun.supervisor.machine import State
from saferun.supervisor.policy import FailureFacts
from tests.unit.supervisor.fake_world import DIAGNOSIS


def recorded(event: Event) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    context: Any = SimpleNamespace(
        run_dir=SimpleNamespace(write_event=lines.append), supervisor=SimpleNamespace(remark="")
    )
    EventLog(context).record(event, State.RUNNING, State.RUNNING)
    (line,) = lines
    return line


def test_a_time_without_progress_keeps_the_name_that_it_has_in_the_file() -> None:
    assert recorded(SignalReceived(1.0, 0, signal.SIGTERM, idle_s=2.5))["quiet_s"] == 2.5
    verdict = HangVerdict("quiescent", (0, 1), 300.0, certain=True)
    assert recorded(HangSuspected(1.0, 0, verdict))["verdict"] == {
        "kind": "quiescent",
        "ranks": [0, 1],
        "quiet_s": 300.0,
        "certain": True,
        "busy": [],
        "overdue": "",
    }


def test_what_decides_about_another_attempt_keeps_its_names_in_the_file() -> None:
    facts = FailureFacts("port_in_use", is_start_over=False, transient_override=True)
    shown = recorded(Diagnosed(1.0, 0, DIAGNOSIS, facts=facts))["facts"]
    assert {name: shown[name] for name in ("started", "transient", "life")} == {
        "started": False,
        "transient": True,
        "life": None,
    }
