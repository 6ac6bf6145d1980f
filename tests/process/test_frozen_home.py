"""The user's home directory lies on a file system that does not answer."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.process.frozen import mirror, needs_mounts
from tests.process.launching import customized, in_saferun, running

pytestmark = needs_mounts

IMPATIENT = in_saferun("import saferun.linux.answering_files as part; part.DEADLINE_S = 1.0")
SPEAK = """
from rank import *
print("here", os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], flush=True)
"""


def test_a_launch_goes_on_without_what_is_in_a_home_directory_that_does_not_answer(tmp_path: Path) -> None:
    """Script and packages are elsewhere: torchrun would never open a file there."""
    home = tmp_path / "home"
    (home / ".config" / "saferun" / "profiles").mkdir(parents=True)
    (home / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    with mirror(tmp_path, home) as system:
        system.freeze()
        environ = {**customized(tmp_path, IMPATIENT), "HOME": str(system.path), "XDG_CONFIG_HOME": ""}
        with running(tmp_path / "launch", SPEAK, nproc=2, environ=environ, before=system.before(), store=False) as job:
            assert job.wait() == 0
            assert job.out.count("here 1") == 2
            silent = f"the file system of {system.path}/.config/saferun/profiles does not answer"
            assert job.err.count(silent) == 1
            assert "env profiles and NCCL settings are not read" in job.err
            # Who has asked for an answer there cannot be ended before.
            system.thaw()


def test_a_home_directory_on_a_server_is_read_where_nothing_reports_the_end_of_a_process(tmp_path: Path) -> None:
    """Some daemons start their children with SIGCHLD ignored: the kernel reaps them."""
    home = tmp_path / "home"
    profiles = home / ".config" / "saferun" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "mine.yaml").write_text("variables: {TORCH_NCCL_ASYNC_ERROR_HANDLING: 3}")
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    with mirror(tmp_path, home) as system:
        environ = {"HOME": str(system.path), "XDG_CONFIG_HOME": ""}
        before = [*system.before(), sys.executable, "-c", ignoring]
        with running(
            tmp_path / "launch", SPEAK, "--env-profile", "mine", environ=environ, before=before, store=False
        ) as job:
            assert job.wait() == 0
            assert "here 3" in job.out
