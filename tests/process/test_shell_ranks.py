"""Ranks that are shells or wrappers and end at a signal before the training that they have started."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import running, until

if TYPE_CHECKING:
    from pathlib import Path

# Writes its checkpoint at a signal, for longer than orphaned processes have after a failure.
SAVES = """
from rank import *
tell_signals(signal.SIGTERM, signal.SIGINT)
tell("ready")
await_release("signalled")
time.sleep(2.5)
tell("saved")
"""
TRAIN = f"{sys.executable} train.py"
# As `conda run` waits.
WAITS = "import subprocess, sys; subprocess.Popen([sys.executable, 'train.py']).communicate()"
SHELLS = {
    "bash": ("bash", "-c", f"{TRAIN}; true"),
    # With any trap bash has a handler for SIGTERM, and dies of that signal nonetheless.
    "bash with a trap": ("bash", "-c", f"trap : EXIT; {TRAIN}; true"),
    "conda run": (sys.executable, "-c", WAITS),
}
NO_PYTHON = ("--shutdown-timeout", "600", "--no-python")
WAITING = "saferun: waiting for 1 process of rank 0: "


@pytest.mark.parametrize(
    ("shell", "signum"),
    [
        ("bash", signal.SIGTERM),
        ("bash with a trap", signal.SIGTERM),
        ("conda run", signal.SIGINT),
        ("conda run", signal.SIGTERM),
    ],
)
def test_training_that_a_shell_has_started_saves_its_checkpoint_when_the_signal_has_ended_the_shell(
    tmp_path: Path, shell: str, signum: signal.Signals
) -> None:
    """It has the rest of the grace, and its signal once. Under torchrun it lives on, too; it had two seconds."""
    with running(tmp_path, SAVES, *NO_PYTHON, script=SHELLS[shell], store=False) as job:
        job.hear("ready")
        job.send(signum)
        job.hear(signum.name)
        until(lambda: WAITING in job.err, "saferun waits for it")
        job.release("signalled")
        job.hear("saved")
        assert job.wait() == 1
        assert job.said(signal.SIGTERM.name) + job.said(signal.SIGINT.name) == []
        assert "saferun: ending" not in job.err


# Saves its checkpoint and ends at once; the helper that it had forked has its handlers, and would live on.
LEAVES = """
from rank import *
handled = []
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda number, _frame: handled.append(number))
if not os.fork():
    while True:
        time.sleep(0.1)
tell("ready")
while not handled:
    time.sleep(0.02)
os._exit(0)
"""


# By SIGINT a program of --no-python that is a Python cannot be distinguished from a wrapper, as conda run is.
@pytest.mark.parametrize(
    ("options", "signum"),
    [((), signal.SIGTERM), ((), signal.SIGINT), (("--no-python",), signal.SIGTERM)],
    ids=["python-SIGTERM", "python-SIGINT", "program-SIGTERM"],
)
def test_a_helper_of_training_that_has_handled_the_signal_itself_is_not_waited_for(
    tmp_path: Path, options: tuple[str, ...], signum: signal.Signals
) -> None:
    """The launcher's end would come up to half a minute later, and with a scheduler's SIGKILL no report at all."""
    script = ("sh", "-c", f"exec {TRAIN}") if options else ("train.py",)
    with running(tmp_path, LEAVES, "--shutdown-timeout", "600", *options, script=script, store=False) as job:
        job.hear("ready")
        job.send(signum)
        assert job.wait() != 0
        assert WAITING not in job.err


def test_ctrl_c_ends_what_the_shell_has_started(tmp_path: Path) -> None:
    with running(tmp_path, SAVES, *NO_PYTHON, script=SHELLS["bash"], store=False) as job:
        job.hear("ready")
        job.send(signal.SIGTERM)
        until(lambda: WAITING in job.err, "saferun waits for it")
        job.send(signal.SIGINT)
        assert job.wait() == 1
        assert job.said("saved") == []
