"""What ``saferunctl status`` says of a run that ends while it is asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saferun import ctl
from saferun.ctl import live_run, status
from saferun.ctl.status import read_status, status_lines
from saferun.errors import UsageError
from saferun.files.run_files import RunState
from tests.unit.described_runs import make_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from saferun.ctl.live_run import LiveRun

RUN = Path("saferun-runs/20260101-120000-abcdef")


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


def _unreachable(_directory: Path) -> Iterator[LiveRun]:
    raise UsageError(f"no saferun process of {RUN} can be reached from here: Connection refused", "see saferunctl list")


@pytest.mark.parametrize("is_connected", [True, False])
@pytest.mark.parametrize(("name", "is_said"), [("succeeded", False), ("failed", False), ("running", True)])
def test_a_run_that_ends_while_it_is_asked_has_ended(
    monkeypatch: pytest.MonkeyPatch, name: str, *, is_said: bool, is_connected: bool
) -> None:
    """That it gave no answer is said of a run that lives only."""
    states, closed = iter([RunState("running"), RunState(name)]), ClosedRun()
    monkeypatch.setattr(status, "state_of", lambda _directory: next(states))
    monkeypatch.setattr(live_run, "connections", (lambda _directory: iter([closed])) if is_connected else _unreachable)
    seen = read_status(RUN)
    assert closed.is_closed == is_connected
    assert seen.state.name == name
    first, *others = status_lines(seen, 0.0)
    assert first == f"{RUN}: {name}"
    assert bool(others) == is_said


@pytest.mark.parametrize("kind", ["fifo", "link", "large"])
def test_waits_that_are_no_regular_file_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Neither a FIFO nor a link to a device keeps the answer, nor a file of any size."""
    run = make_run(tmp_path, "20260101-120000-abcdef")
    path = run / "waits.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text('{"x": 1}' + " " * 200)
        monkeypatch.setattr(status, "_MOST_BYTES", 100)
    monkeypatch.setattr(Path, "read_bytes", lambda _path: pytest.fail("it is read as a whole"))
    assert read_status(run).waits is None


def test_waits_are_part_of_the_status(tmp_path: Path) -> None:
    run = make_run(tmp_path, "20260101-120000-abcdef")
    (run / "waits.json").write_text('{"x": 1}')
    assert read_status(run).waits == {"x": 1}


def test_what_the_terminal_has_scrolled_off_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is on the screen is drawn again."""
    run = make_run(tmp_path, "20260101-120000-abcdef")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert ctl.main(["status", str(run), "-w"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("\x1b[H\x1b[2J")
    assert "\x1b[3J" not in out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon", "1e6"])
def test_an_interval_that_is_none_is_said_in_words(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    """Else argparse would name a function of saferun's."""
    with pytest.raises(SystemExit):
        ctl.main(["status", f"-w{seconds}"])
    said = capsys.readouterr().err
    assert f"{seconds} is not a number of seconds above 0 and below 1000000" in said
