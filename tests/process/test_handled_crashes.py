"""Cores of subprocesses whose crash a rank survives, where nobody sees them appear, and files in their place."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from saferun.linux import core_files
from saferun.linux.core_limits import LimitNotes
from saferun.linux.core_watch import CoreWatch
from saferun.linux.poller import Poller
from saferun.linux.procfs import children_of
from tests.process.core_steps import PATTERN
from tests.process.launching import customized, in_saferun, name_of, running, until
from tests.process.test_core_tools import skip_without_room

pytestmark = pytest.mark.skipif(not PATTERN.is_relative, reason=f"no cores in the directory: {PATTERN.description()}")

OPTIONS = ("--cores", "backtrace")
CORES_ON = ("sh", "-c", 'ulimit -S -c "$(ulimit -H -c)"; exec "$@"', "sh")
CORES_OFF = ("sh", "-c", 'ulimit -S -c 0; exec "$@"', "sh")

ELSEWHERE = """
from rank import *
import subprocess, time
here = os.getcwd()
crash = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
folder = f"outputs/today/{RANK}"
os.makedirs(folder)
os.chdir(folder)
tell("ready")
await_release("crash")
for cwd in ("w0", "w1", "."):
    os.makedirs(cwd, exist_ok=True)
    assert subprocess.run(crash, cwd=cwd).returncode == -signal.SIGSEGV
subprocess.run(crash, cwd=f"{here}/sub", env={"PATH": "/bin"})
"""


# A busy machine takes its time for the process that deletes them.
PATIENT = in_saferun("import saferun.linux.core_watch as core_watch\n    core_watch._ANSWER_S = 30.0")
LATE = in_saferun("import saferun.launch.core_part as core_part\n    core_part._DELAY_S = 1000.0")


def cores_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("core*") if path.is_file())


def test_crashes_in_other_directories_leave_no_cores(tmp_path: Path) -> None:
    """Hydra and its like run each job in a directory of its own. What is not provably of the run stays."""
    skip_without_room(tmp_path)
    environ = customized(tmp_path, PATIENT)
    with running(tmp_path / "run", ELSEWHERE, *OPTIONS, environ=environ, store=False, before=CORES_OFF, nproc=2) as job:
        folder = tmp_path / "run" / "job"
        (folder / "sub").mkdir()
        job.hear("ready", 2)
        (folder / "outputs" / "core").write_text("precious")
        job.release("crash")
        assert job.wait() == 0
        left = cores_below(folder)
        assert [name for name in left if not name.startswith("sub/")] == ["outputs/core"]
        assert [name for name in left if name.startswith("sub/")]


CRASHES = """
sh -c 'kill -SEGV $$'
echo done
exit 0
"""


def test_a_launch_that_is_over_at_once_leaves_no_core(tmp_path: Path) -> None:
    """Before anybody watches. A later launch would take the core for a file of the user's."""
    skip_without_room(tmp_path)
    script = ["sh", "train.py"]
    environ = customized(tmp_path, PATIENT + LATE)
    options = (*OPTIONS, "--no-python")
    with running(
        tmp_path / "run", CRASHES, *options, environ=environ, store=False, before=CORES_OFF, script=script
    ) as job:
        assert job.wait() == 0
        assert "done" in job.out
        assert cores_below(tmp_path / "run" / "job") == []


WRITES_CORE = """
from rank import *
import resource, subprocess
crash = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
assert resource.getrlimit(resource.RLIMIT_CORE)[0]
tell("ready")
await_release("write")
with open("core", "w") as file:
    file.write("my data")
tell("written")
await_release("crash")
assert subprocess.run(crash).returncode == -signal.SIGSEGV
"""


@pytest.mark.skipif(not PATTERN.repeated_name, reason="each core has a name of its own here")
def test_a_file_called_core_that_a_script_writes_stays(tmp_path: Path) -> None:
    """From then on there are no cores."""
    skip_without_room(tmp_path)
    with running(tmp_path / "run", WRITES_CORE, *OPTIONS, store=False, before=CORES_OFF) as job:
        [rank] = job.hear("ready")
        until(lambda: any(name_of(pid) == "sr-cores" for pid in children_of(job.process.pid)), "it watches")
        job.release("write")
        job.hear("written")
        until(lambda: resource.prlimit(rank.pid, resource.RLIMIT_CORE)[0] == 0, "no core is left from now on")
        job.release("crash")
        assert job.wait() == 0
        assert (tmp_path / "run" / "job" / "core").read_text() == "my data"


def test_the_end_does_not_wait_for_a_file_system_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores are searched for in another process, and that is ended."""
    monkeypatch.setattr(core_files, "find_cores_below", lambda *_, **__: signal.pause())
    notes, poller = LimitNotes(), Poller()
    os.write(notes.fd, b"+")
    watch = CoreWatch(str(tmp_path), poller, notes_fd=notes.fd, run_id="ab")
    watch.begin_at(0.0)
    watch.tick(1.0)
    [pid] = watch.pids
    watch.close(below=True)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    poller.close()
    notes.close()


QUIT = """
from rank import *
import subprocess
child = subprocess.Popen(["sleep", "1000"])
tell("ready")
stay()
"""


@pytest.mark.parametrize("switched_on", [False, True])
def test_ctrl_backslash_leaves_a_core_only_if_the_user_has_cores_on(tmp_path: Path, *, switched_on: bool) -> None:
    """SIGQUIT comes from saferun, which has raised the limit as well; and the end would wait for the cores."""
    skip_without_room(tmp_path)
    before = CORES_ON if switched_on else CORES_OFF
    with running(tmp_path / "run", QUIT, *OPTIONS, store=False, before=before, nproc=2) as job:
        job.hear("ready", 2)
        job.send(signal.SIGQUIT)
        assert job.wait() == 1
        assert "stopped by SIGQUIT" in job.err
        assert bool(cores_below(tmp_path / "run" / "job")) == switched_on
