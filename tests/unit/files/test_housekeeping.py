"""What is done about runs beside a launch: nothing of it can hold up the writer process."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from saferun.files import housekeeping
from saferun.files.housekeeping import Housekeeper, Housework, do_housework
from tests.unit.described_runs import make_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORK = Housework("0123456789abcdef", "/run", "", 0)


def keeper_of(monkeypatch: pytest.MonkeyPatch, work: Callable[..., Any]) -> tuple[Housekeeper, list[Any]]:
    """A housekeeper whose fork does this, and what it has found."""
    monkeypatch.setattr(housekeeping, "do_housework", work)
    found: list[Any] = []
    keeper = Housekeeper(found.append)
    keeper.plan(WORK)
    return keeper, found


def test_it_is_done_at_a_quiet_moment_and_what_was_found_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, found = keeper_of(monkeypatch, lambda *_arguments: {"runs": 3})
    poll, beats = select.poll(), list[int]()
    assert keeper.due > time.monotonic()
    keeper.step(poll, {}, lambda: beats.append(1))
    assert not found
    later = time.monotonic() + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    keeper.step(poll, {7: select.POLLIN}, lambda: beats.append(1))  # there is something else to do
    keeper.step(poll, {}, lambda: beats.append(1))
    keeper.step(poll, dict(poll.poll()), lambda: beats.append(1))
    assert found == [{"runs": 3}]
    assert not beats
    keeper.finish()
    assert len(found) == 1


def test_other_hosts_are_shown_once_a_minute_that_this_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, beats = Housekeeper(lambda _found: None), list[int]()
    began = time.monotonic()
    for later_s in (1.0, 61.0, 62.0, 125.0):
        monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: began + later_s)
        keeper.step(select.poll(), {}, lambda: beats.append(1))
    assert len(beats) == 2


def test_a_file_system_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home directory may be on one."""
    monkeypatch.setattr(housekeeping, "_LAST_S", 0.01)
    keeper, found = keeper_of(monkeypatch, lambda *_arguments: signal.pause())
    keeper.finish()
    assert not found
    assert os.waitpid(keeper._pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("answer", [b"", b"[1]", b"{", b"\xff"])
def test_an_answer_that_is_none_is_passed_over(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    keeper, found = keeper_of(monkeypatch, lambda *_arguments: None)
    monkeypatch.setattr(json, "dumps", lambda _found: answer.decode("latin-1"))
    keeper.finish()
    assert not found


def test_runs_are_counted_and_noted(tmp_path: Path) -> None:
    base = tmp_path / "saferun-runs"
    for number in range(3):
        make_run(base, f"2026010{number}-120000-abcdef")
    (base / "notes").mkdir()
    path = str(base / "20260102-120000-abcdef")
    found = do_housework(Housework("0123456789abcdef", path, str(base), 0), {"HOME": str(tmp_path)}, 60.0)
    assert (found["runs"], found["removed"]) == (3, 0)
    assert found["size_bytes"] > 0
    (entry,) = (tmp_path / ".local" / "state" / "saferun" / "runs").iterdir()
    assert os.readlink(entry) == path
    found = do_housework(Housework("", path, str(base), 1), {}, 0.0)
    assert (found["runs"], found["removed"], found["size_bytes"]) == (1, 2, 0)


def test_without_a_directory_of_runs_nothing_is_found(tmp_path: Path) -> None:
    for base in ("", str(tmp_path / "nowhere")):
        assert do_housework(Housework("", "/run", base, 5), {}, 1.0)["runs"] == 0
