"""What containers and batch systems leave out: places to write, a home, a name for the user, an init process.

Each launch has a mount namespace of its own (a pid or user namespace where that is what is missing). One rank fails,
and the report has the other one's stack: error files, the hook and the capture all have found a place.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.launching import END_AS_TOLD, REPOSITORY, STAY, running, without

# Where nothing had been taken away, the tests would promise nothing.
PROGRAM = (
    """
import os
for path in filter(None, os.environ["LACKING"].split(":")):
    assert not os.access(path, os.W_OK), path
assert "no name" != os.environ["LACKING_NAME"] or os.getuid() == 54321
assert "no init" != os.environ["LACKING_NAME"] or os.getppid() == 1
"""
    + END_AS_TOLD
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# As root, or as root of a user namespace of one's own.
_MOUNTS = ("unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "--mount")


class Lack(NamedTuple):
    """What is missing.

    Attributes:
        read_only: directories that cannot be written.
        environ: changes of the environment.
        command: a command before saferun.
        keeps_files: whether a run directory can be made.
    """

    read_only: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    keeps_files: bool = True


_ALL_TMP = ("/tmp", "/var/tmp")
LACKS = {
    "no TMPDIR": Lack(environ=(("TMPDIR", "/nonexistent/tmp"),)),
    "a long TMPDIR": Lack(environ=(("TMPDIR", "FOLDER/" + "long" * 30),)),
    "a read-only TMPDIR": Lack(("/opt", *_ALL_TMP), (("TMPDIR", "/opt"),)),
    "no /tmp": Lack(_ALL_TMP, (("TMPDIR", ""),)),
    "no /tmp and no /dev/shm": Lack((*_ALL_TMP, "/dev/shm"), (("TMPDIR", ""),)),
    "no /dev/shm": Lack(("/dev/shm",)),
    "a read-only directory": Lack(("FOLDER/job",), keeps_files=False),
    "a read-only directory and no /tmp": Lack(("FOLDER/job", *_ALL_TMP), (("TMPDIR", ""),), keeps_files=False),
    "no home": Lack(environ=(("HOME", "/nonexistent/home"), ("XDG_CACHE_HOME", ""), ("XDG_RUNTIME_DIR", ""))),
    "no name": Lack(command=("unshare", "--map-user=54321", "--map-group=54321")),
    "no init": Lack(command=("unshare", "--pid", "--fork", "--mount-proc")),
}
# Each promise has a fast test; the rest differs little from it.
FAST = ("no /tmp and no /dev/shm", "no name")


def before(lack: Lack, folder: Path) -> list[str]:
    """The command that takes it away and becomes the rest of its arguments."""
    # What the test itself needs stays writable: its folder is a mount of its own.
    lines = ["set -e", f"mount --bind {shlex.quote(str(folder))} {shlex.quote(str(folder))}"]
    for path in _paths(lack.read_only, folder):
        inner = str(folder) if str(folder).startswith(f"{path}/") else ""
        if inner:
            lines += [f"mount --rbind {path} {path}"]
        else:
            lines += [f"mount --bind {path} {path}"]
        lines += [f"mount -o remount,bind,ro {path}"]
    lines += [f"cd {shlex.quote(str(folder / 'job'))}", 'exec "$@"']
    return [*_MOUNTS, "sh", "-c", "\n".join(lines), "sh", *lack.command]


def _paths(paths: Sequence[str], folder: Path) -> list[str]:
    return [path.replace("FOLDER", str(folder)) for path in paths]


def environ(lack: Lack, folder: Path, name: str = "") -> dict[str, str]:
    """The changes of the environment."""
    changes = {name: value.replace("FOLDER", str(folder)) for name, value in lack.environ}
    changes |= {"LACKING": ":".join(_paths(lack.read_only, folder)), "LACKING_NAME": name}
    if changes.get("TMPDIR", "").startswith(str(folder)):
        os.makedirs(changes["TMPDIR"])
    return changes


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LACKS])
def test_a_failure_is_told_whatever_the_machine_lacks(tmp_path: Path, name: str) -> None:
    lack = LACKS[name]
    with running(
        tmp_path / "run",
        PROGRAM,
        nproc=2,
        arguments=["stay", "7"],
        store=False,
        before=before(lack, tmp_path / "run"),
        environ=environ(lack, tmp_path / "run", name),
    ) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert "rank 1 (" in job.err
        assert "exit code 7" in job.err
        assert "stopped because of it: rank 0" in job.err
        assert ("cannot" in job.err) <= (not lack.keeps_files), job.err
        if lack.keeps_files:
            report = json.loads((job.run_dir / "report.json").read_text(encoding="utf-8"))
            assert "train.py" in json.dumps(report), "the stack of the rank that was still there"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LACKS if name != "a read-only directory and no /tmp"])
def test_torchrun_runs_there_as_well(tmp_path: Path, name: str) -> None:
    """Where it ends with a traceback, for want of a temporary directory, saferun need not run, but does."""
    lack = LACKS[name]
    with running(
        tmp_path / "run",
        PROGRAM,
        nproc=2,
        arguments=["stay", "7"],
        launcher=TORCHRUN,
        before=before(lack, tmp_path / "run"),
        environ=environ(lack, tmp_path / "run", name),
        sweeps=False,
    ) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait(120) == 1


def test_dev_null_may_be_a_file_that_only_root_can_write(tmp_path: Path) -> None:
    """Somebody's ``mv`` or ``rm`` as root has done that on many a host, and torchrun runs there."""
    nothing = tmp_path / "null"
    nothing.touch(mode=0o444)
    mount = [*_MOUNTS, "sh", "-c", f'mount --bind {shlex.quote(str(nothing))} /dev/null && exec "$@"', "sh"]
    folder = tmp_path / "run"
    program = "import os\ntry:\n os.open('/dev/null', os.O_RDWR)\nexcept OSError: print('it is so')\n" + END_AS_TOLD
    with running(folder, program, nproc=2, arguments=["stay", "7"], before=[*mount, *without([1, 2])]) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert job.out.count("it is so") == 2
        assert "exit code 7" in job.err
        assert "cannot" not in job.err
        assert (job.run_dir / "report.json").exists()


def test_an_entry_of_the_environment_may_have_no_name(tmp_path: Path) -> None:
    """``env "=x"``: the kernel takes it, Python's subprocess passes it on, and its execve refuses it."""
    with running(
        tmp_path, END_AS_TOLD, nproc=2, arguments=["stay", "7"], store=False, before=["env", "=x", "NAMED=y"]
    ) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert "exit code 7" in job.err
        assert "examiner" not in job.err


def test_where_nothing_can_be_written_the_ranks_run_without_files(tmp_path: Path) -> None:
    """Under torchrun it does not start, for want of a temporary directory."""
    folder = tmp_path / "run"
    lack = Lack(("FOLDER/job", *_ALL_TMP, "/dev/shm", "/run"), (("TMPDIR", ""), ("XDG_RUNTIME_DIR", "")))
    with running(
        folder,
        END_AS_TOLD,
        nproc=1,
        arguments=["0"],
        store=False,
        before=before(lack, folder),
        environ=environ(lack, folder),
    ) as job:
        job.release("end")
        assert job.wait() == 0
        assert "no error files of the ranks: " in job.err
        assert "Traceback" not in job.err


# ------------------------------------------------------------------------------------ cleaners of temporary directories

FAIL_FIRST = """
from rank import *
tell("ready")
await_release(f"end.{ATTEMPT}")
sys.exit(3 if ATTEMPT == 0 else 0)
"""


def test_a_deleted_temporary_directory_is_there_again_in_the_next_attempt(tmp_path: Path) -> None:
    """Those who clean up /tmp delete what is ten days old; a job may be older, and its restart needs the hook."""
    options = ("--max-restarts", "1")
    with running(tmp_path, FAIL_FIRST, *options, nproc=2, store=False) as job:
        job.hear("ready", 2)
        folder = job.scratch_folder()
        shutil.rmtree(folder)
        job.release("end.0")
        job.hear("ready", 2)
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
        job.release("end.1")
        assert job.wait() == 0


def test_the_temporary_directory_is_locked_while_the_job_runs(tmp_path: Path) -> None:
    """systemd-tmpfiles leaves alone what somebody has locked."""
    with running(tmp_path, STAY, nproc=1, store=False) as job:
        job.hear("ready")
        folder = job.scratch_folder()
        fd = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
        job.send(signal.SIGTERM)
        assert job.wait() == 1


# The /proc of the machine, where other processes have the numbers of the ranks.
_OTHER_PROC = ("unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "--pid", "--fork")


def test_with_the_proc_of_another_pid_namespace_a_healthy_job_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """What rank 0 writes was looked for in whatever process of the machine has its number."""
    program = """
from rank import *
import select
tell("ready")
assert os.readlink("/proc/self") != str(os.getpid())
silent, _ = os.pipe()
for _ in range(20):
    with open(f"written{RANK}", "wb") as file:
        file.write(bytes(70000))
    select.select([silent], [], [], 0.3)
"""
    options = ("--env-profile", "minimal", "--hang-timeout", "1", "--on-hang", "stop", "--shutdown-timeout", "2")
    with running(tmp_path, program, *options, nproc=2, before=_OTHER_PROC, store=False) as job:
        assert job.wait() == 0, job.err
        assert "the job" not in job.err, job.err
        assert job.err.count("/proc shows another PID namespace") == 1


def test_with_the_proc_of_another_pid_namespace_a_failure_is_reported(tmp_path: Path) -> None:
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["stubborn", "7"], before=_OTHER_PROC, store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert "exit code 7" in job.err
        assert "Traceback" not in job.err


def test_no_process_of_another_pid_namespace_is_signalled() -> None:
    """Its number is another process's here: the reaper, and the sweep of what ranks left, might end that one."""
    program = """
import os, sys
from saferun.linux import procfs, reaper
from saferun.linux.sessions import Sessions

def note(event, args):
    if event == "os.kill":
        signalled.append(args)

signalled = []
sys.addaudithook(note)
killed = reaper.kill_run("run-of-test-containers", Sessions())
print(killed, signalled, procfs.living_processes(), procfs.descendants_of(1), procfs.read_stat(os.getpid()))
"""
    marked = {**os.environ, "SAFERUN_RUN_ID": "run-of-test-containers"}
    with subprocess.Popen(["sleep", "1000"], env=marked) as outside:
        try:
            command = [*_OTHER_PROC, sys.executable, "-c", program]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY)
        finally:
            outside.kill()
    assert said.stdout == "0 [] [] [] None\n"
