"""Whether ranks get on, told from real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import count
from typing import TYPE_CHECKING

import pytest

from saferun.cluster import progress as progress_module
from saferun.cluster.progress import ProgressWatch
from saferun.linux.poller import Poller
from saferun.text.script_state import ReportedPhase, ScriptState
from saferun.watchdog.monitor import WatchedRank
from tests.process.launching import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READS = "data = open('/dev/zero', 'rb', 0)\nwhile True: data.read(65536); time.sleep(0.01)"
WAITS = "sys.stdin.read()"
BURNS = "while True: pass"
SPAN_S = 4.0


def watched(
    program: str,
    is_seen: Callable[[ProgressWatch, float], bool],
    read_script: Callable[[], ScriptState | None] = lambda: None,
    heartbeat_file: str = "",
) -> None:
    """Watch a process until something is seen."""
    command = [sys.executable, "-S", "-c", f"import sys, time\nprint('ready', flush=True)\n{program}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            rank = WatchedRank(0, 0, process.pid, lambda: 0, "", heartbeat_file, read_script)
            watch = ProgressWatch(SPAN_S, Poller())
            watch.begin(time.monotonic())

            def look() -> bool:
                now = time.monotonic()
                watch.tick(now, [rank])
                return is_seen(watch, now)

            until(look, "what the process does")
        finally:
            process.kill()


@pytest.mark.parametrize("program", [READS, BURNS])
def test_a_rank_that_works_gets_on(program: str) -> None:
    """One that only uses its processor too, where it has no sequence numbers that say that it waits."""
    watched(
        program, lambda watch, now: watch.progress(now, runs=True).still_s < watch.progress(now, runs=True).watched_s
    )


def test_a_rank_that_waits_stands_still() -> None:
    """However often it is looked at."""
    looks = []

    def is_seen(watch: ProgressWatch, now: float) -> bool:
        progress = watch.progress(now, runs=True)
        # What it did before it began to wait falls into the first samples.
        looks.append(progress.watched_s - progress.quiet_s)
        return progress.quiet_s > SPAN_S / 2

    watched(WAITS, is_seen)
    assert looks[-1] < SPAN_S


def test_a_phase_that_a_script_has_announced_is_seen_until_its_end() -> None:
    """The rank itself does nothing, and is not said to move."""
    began = time.monotonic()
    state = ScriptState("1", phase=ReportedPhase("evaluating", began - 1.0, began + SPAN_S / 2))

    def is_seen(watch: ProgressWatch, now: float) -> bool:
        progress = watch.progress(now, runs=True)
        if now < began + SPAN_S / 2:
            assert progress.unannounced_s < SPAN_S / 4
        return progress.unannounced_s > SPAN_S / 4 and progress.quiet_s > SPAN_S / 2

    watched(WAITS, is_seen, lambda: state)


def test_steps_that_a_script_reports_are_progress() -> None:
    """They may be all that a rank shows."""
    marks = count()

    def is_seen(watch: ProgressWatch, now: float) -> bool:
        progress = watch.progress(now, runs=True)
        return progress.watched_s > SPAN_S and progress.still_s < SPAN_S / 4

    watched(WAITS, is_seen, lambda: ScriptState(str(next(marks)), step=1))


def test_heartbeats_that_a_script_sends_are_progress(tmp_path: Path) -> None:
    beats = tmp_path / "heartbeat"
    beats.touch()

    def is_seen(watch: ProgressWatch, now: float) -> bool:
        os.utime(beats, (now, now))
        progress = watch.progress(now, runs=True)
        return progress.watched_s > SPAN_S and progress.still_s < SPAN_S / 4

    watched(WAITS, is_seen, heartbeat_file=str(beats))


def test_ranks_of_which_nothing_can_be_seen_are_taken_to_be_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host is lost because /proc is that of another PID namespace."""
    monkeypatch.setattr(progress_module, "has_own_processes", lambda: False)
    monkeypatch.setattr("saferun.cluster.progress.FamilyReader.read", lambda _self, **_: None)

    def is_seen(watch: ProgressWatch, now: float) -> bool:
        progress = watch.progress(now, runs=True)
        return progress.watched_s > SPAN_S and progress.still_s < SPAN_S / 4

    watched(WAITS, is_seen)
