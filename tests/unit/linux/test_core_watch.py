"""The process that watches for cores: how often it lowers limits, and how long the end of a launch waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.linux import core_watch
from saferun.linux.core_watch import _search_s, _Service


def test_a_file_that_is_written_again_and_again_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are lowered at once, and then twice a second: new ranks may have been started meanwhile."""
    lowered: list[tuple[int, str]] = []
    saver: Any = SimpleNamespace(has_other=False, paths=[])
    lines: Any = None
    monkeypatch.setattr(core_watch, "have_raised", lambda fd: fd == 7)
    monkeypatch.setattr(core_watch, "lower_limits", lambda owner_pid, _, entry: lowered.append((owner_pid, entry)))
    search: Any = SimpleNamespace(run_entry="SAFERUN_RUN_ID=ab")
    service = _Service(lines, saver, 71, 7, spared=0, room_bytes=0, search=search, ranks=(), failed=())
    assert service._lower(100.0) is None
    assert lowered == []
    for step in range(100):
        saver.has_other = True
        service._lower(100.0 + step / 100)
    assert lowered == [(71, "SAFERUN_RUN_ID=ab")] * 2
    assert service._lower(100.99) == pytest.approx(0.01)
    assert service._lower(101.01) is None
    assert len(lowered) == 3


def test_limits_that_ranks_have_not_raised_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores were on, or the script has raised them itself."""
    monkeypatch.setattr(core_watch, "have_raised", lambda _: False)
    monkeypatch.setattr(core_watch, "lower_limits", lambda *_: pytest.fail("lowered"))
    saver: Any = SimpleNamespace(has_other=True, paths=[])
    nothing: Any = None
    service = _Service(nothing, saver, 71, -1, spared=0, room_bytes=0, search=nothing, ranks=(), failed=())
    assert service._lower(100.0) is None
    assert not saver.has_other


@pytest.mark.parametrize(("launch_s", "search_s"), [(0.0, 0.1), (1.0, 0.1), (10.0, 0.2), (86400.0, 0.5)])
def test_a_short_launch_does_not_pay_for_a_search(launch_s: float, search_s: float) -> None:
    assert _search_s(launch_s) == pytest.approx(search_s)
