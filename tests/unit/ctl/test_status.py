"""What ``saferunctl status`` says of a run that ends while it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saferun.ctl import status
from saferun.ctl.status import read_status, status_lines
from saferun.errors import UsageError
from saferun.files.run_files import RunState

if TYPE_CHECKING:
    from saferun.ctl.live_run import LiveRun

RUN = Path("saferun_runs/20260101-120000-abcdef")


class ClosedRun:
    """A connection whose saferun ends before it answers."""

    is_closed = False

    def ask(self, *_arguments: object, **_keywords: object) -> object:
        """There is no answer."""
        raise UsageError(
            f"the saferun process of {RUN} does not answer: Connection reset by peer", "see saferunctl list"
        )

    def close(self) -> None:
        """What every user of a connection does."""
        self.is_closed = True


def _unreachable(_directory: Path) -> LiveRun:
    raise UsageError(f"no saferun process of {RUN} can be reached from here: Connection refused", "see saferunctl list")


@pytest.mark.parametrize("is_connected", [True, False])
@pytest.mark.parametrize(("name", "is_said"), [("succeeded", False), ("failed", False), ("running", True)])
def test_a_run_that_ends_while_it_is_asked_has_ended(
    monkeypatch: pytest.MonkeyPatch, name: str, *, is_said: bool, is_connected: bool
) -> None:
    """That it gave no answer is said of a run that lives only."""
    states, closed = iter([RunState("running"), RunState(name)]), ClosedRun()
    monkeypatch.setattr(status, "state_of", lambda _directory: next(states))
    monkeypatch.setattr(status, "find_live", (lambda _directory: closed) if is_connected else _unreachable)
    seen = read_status(RUN)
    assert closed.is_closed == is_connected
    assert seen.state.name == name
    first, *others = status_lines(seen, 0.0)
    assert first == f"{RUN}: {name}"
    assert bool(others) == is_said
