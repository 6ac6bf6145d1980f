"""The process that makes report.html has begun by the time that a page is wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.launch.host_launch import HostLaunch


def calls_of(method: str, *, has_failed: bool, has_incidents: bool = False) -> list[str]:
    """What a launch does when its ranks are captured or signalled."""
    calls: list[str] = []
    context = SimpleNamespace(
        ranks=SimpleNamespace(
            capture=lambda _: calls.append("_capture"), signal=lambda _: calls.append("_signal_ranks")
        ),
        guarded=lambda _, call: call(),
        job=SimpleNamespace(abort_reason=None),
        investigation=SimpleNamespace(log=SimpleNamespace(has_incidents=has_incidents)),
        current=SimpleNamespace(first_failure=lambda: object() if has_failed else None),
        page=SimpleNamespace(prepare=lambda: calls.append("prepare")),
    )
    launch = cast(Any, HostLaunch.__new__(HostLaunch))
    launch._context = context
    getattr(launch, method)(None)
    return calls


@pytest.mark.parametrize("method", ["_capture", "_signal_ranks"])
def test_it_begins_while_the_ranks_are_captured_or_stopped_after_a_failure(method: str) -> None:
    """Its imports take longer than most jobs take to end. What the ranks need comes first."""
    assert calls_of(method, has_failed=True) == [method, "prepare"]
    assert calls_of(method, has_failed=False, has_incidents=True) == [method, "prepare"]


@pytest.mark.parametrize("method", ["_capture", "_signal_ranks"])
def test_it_does_not_begin_where_nothing_has_failed(method: str) -> None:
    """Ranks that are only looked at, or that the user ends."""
    assert calls_of(method, has_failed=False) == [method]
