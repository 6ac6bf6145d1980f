"""Requests to the control socket that mean another run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.launch.control_part import ControlPart

SUBSCRIPTIONS = ("subscribe_status", "subscribe_table", "subscribe_asked")


@pytest.mark.parametrize(("run_id", "is_answered"), [("ab12", True), ("", True), (None, True), ("cd34", False)])
def test_a_request_for_another_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, run_id: str | None, *, is_answered: bool
) -> None:
    """A run directory may name the control socket of another one. Programs that name no run are answered."""
    reports = SimpleNamespace(**dict.fromkeys(SUBSCRIPTIONS, lambda *_calls: None))
    part = ControlPart(cast("Any", SimpleNamespace(run_id="ab12", job=SimpleNamespace(reports=reports))))
    sent: list[dict[str, Any]] = []
    asked: list[str] = []
    monkeypatch.setattr(part, "_send", lambda _client, answer: sent.append(answer))
    monkeypatch.setitem(ControlPart._METHODS, "stop", lambda _part, _client, request: asked.append(request.op))
    part._answer(cast("Any", None), {"op": "stop"} if run_id is None else {"op": "stop", "run_id": run_id})
    assert asked == (["stop"] if is_answered else [])
    if not is_answered:
        assert sent[0]["error"].startswith("this is not run cd34")


def test_what_was_promised_is_kept_where_the_part_fails_and_a_failure_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that were to save a checkpoint are stopped in time. A part that fails each time keeps no loop busy."""
    reports = SimpleNamespace(**dict.fromkeys(SUBSCRIPTIONS, lambda *_calls: None))
    warned: list[str] = []
    part = ControlPart(
        cast(
            "Any",
            SimpleNamespace(job=SimpleNamespace(reports=reports), log=SimpleNamespace(ended={}), warn=warned.append),
        )
    )
    stopped: list[str] = []
    monkeypatch.setattr(part, "_post_stop", lambda by, **_when: stopped.append(by))
    monkeypatch.setattr(part, "_report_restart", lambda: 1 / 0)
    part._stop_at, part._stop_by = 10.0, "saferunctl"
    part.tick(5.0)
    assert part.deadline == 10.0
    part.tick(10.0)
    part.tick(11.0)
    assert stopped == ["saferunctl"]
    assert len(warned) == 1
    assert part.deadline is None
