"""Ctrl-C at any moment of the start ends saferun as it ends any program, without a traceback of its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import REPOSITORY, SAFERUN, clean_environ

if TYPE_CHECKING:
    from pathlib import Path

# From the interpreter's first instruction to ranks that run; the moments differ from machine to machine.
MOMENTS_S = [number * 0.02 for number in range(1, 21)]


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_start_leaves_no_traceback(tmp_path: Path) -> None:
    """Somebody has seen the slip in the command line. What Python itself says before saferun begins is Python's."""
    environ = clean_environ(tmp_path, "early")
    (tmp_path / "train.py").write_text("import signal; signal.pause()")
    options = ("--run-dir", "none", "--no-inject", "train.py")
    ends = set()
    for moment_s in MOMENTS_S:
        process = subprocess.Popen(
            [*SAFERUN, *options],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        time.sleep(moment_s)  # no handshake: any moment is to do
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        own = str(REPOSITORY / "saferun").encode()
        assert own not in err, err.decode()
        if b"Traceback" not in err:
            # By the signal, or, where ranks were running by then, after they have been ended.
            assert process.returncode in {-signal.SIGINT, 1}, (moment_s, process.returncode, err)
            ends.add(process.returncode)
    assert -signal.SIGINT in ends


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """What a script starts in the background is not meant by the user's Ctrl-C."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "import saferun.__main__; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    environ = clean_environ(tmp_path, "early")
    shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True)
    assert shown.stdout == b"True\n"


def test_the_command_begins_where_the_interrupt_is_looked_after() -> None:
    """The installed command imports this module first, and only then the rest."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["saferun"] == "saferun.__main__:main"
