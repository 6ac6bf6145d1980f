"""What is asked of a capture of living ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.captures.wire import CaptureRequest
from saferun.evidence.job_evidence import HangVerdict
from saferun.launch import live_capture
from saferun.launch.live_capture import LiveCapture


def request_of(monkeypatch: pytest.MonkeyPatch, verdict: HangVerdict | None) -> CaptureRequest:
    asked: list[CaptureRequest] = []
    monkeypatch.setattr(
        live_capture, "start_capture", lambda _context, _record, request, _on_done: asked.append(request)
    )
    monkeypatch.setattr(live_capture, "new_directory", lambda *_arguments: "/run")
    watch = SimpleNamespace(capture_budget_s=20.0, native="auto", strace=True, trace_calls=())
    context: Any = SimpleNamespace(
        launch=SimpleNamespace(config=SimpleNamespace(watch=watch)),
        hook=SimpleNamespace(prefix=lambda *_arguments: ""),
        log=SimpleNamespace(launched_time=1000.0, captures=0),
    )
    record: Any = SimpleNamespace(started_time=2000.0)
    action: Any = SimpleNamespace(verdict=verdict, attempt=3, local_ranks=(0,), budget_s=20.0)
    rank: Any = SimpleNamespace(assignment=SimpleNamespace(rank=0, local_rank=0), child=SimpleNamespace(pid=77), pid=77)
    LiveCapture(context, record, action)._start([rank], 20.0)
    (request,) = asked
    return request


def test_the_kernel_log_of_earlier_attempts_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that failed in one may have been reset before the next."""
    assert request_of(monkeypatch, None).since == 2000.0


@pytest.mark.parametrize("is_certain", [True, False])
def test_only_of_a_certain_hang_ranks_may_be_stopped_for_long(
    monkeypatch: pytest.MonkeyPatch,
    is_certain: bool,
) -> None:
    verdict = HangVerdict("quiescent", (0,), 300.0, is_certain)
    assert request_of(monkeypatch, verdict).is_certain is is_certain
    assert not request_of(monkeypatch, None).is_certain
