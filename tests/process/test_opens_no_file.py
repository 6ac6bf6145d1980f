"""Once the ranks run, the supervisor touches no file system that could hang.

strace writes down every system call of the supervisor alone that names a file or uses a descriptor. From the moment
at which the ranks have been started, none of them may be about a file outside of the kernel's own file systems.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from saferun.linux.core_pattern import read_core_pattern, share_a_name
from saferun.linux.file_systems import is_in_memory
from saferun.linux.procfs import children_of, read_environ_entry
from tests.process.launching import Job, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where CI is set a missing strace is a failure: `make test` installs it, as root.
pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None and not os.environ.get("CI"),
    reason="needs strace, which `make test` installs as root",
)

# Kernel memory, behind which there is no disk and no network.
IN_MEMORY = ("/proc/", "/sys/", "/dev/", "/memfd:")
# The name of the current directory is kept by the kernel; the target of a link in /proc is only text.
HARMLESS = frozenset({"getcwd", "readlink", "readlinkat"})

_LINE = re.compile(r"(\d+\.\d+) (\w+)\((.*)")
_DESCRIPTOR = re.compile(r"(?<![\w.])(\d+|AT_FDCWD)<(/[^>]*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')

PROGRAM = """
import saferun
from rank import *
print("hello", flush=True)
saferun.heartbeat()
tell("ready")
await_release("crash")
if ATTEMPT == 0 and RANK == 1:
    raise ValueError("once")
def hang():
    while True:
        time.sleep(1000)
hang()
"""


class Call(NamedTuple):
    """One system call: when (seconds since the epoch), which, and all of it as strace has it."""

    at: float
    name: str
    text: str


@contextlib.contextmanager
def traced(folder: Path, program: str, *options: str, outside: tuple[str, ...] = (), **arguments: Any) -> Iterator[Job]:
    """A launch whose supervisor, and nobody else, is traced; ``outside``: a command before all of it.

    The tracer is no parent of it (-D), does not follow forks, and says what descriptors are (-y); of what is read and
    written it shows nothing (-s 0).
    """
    tracer = ("strace", "-D", "-ttt", "-y", "-s", "0", "-e", "trace=%file,%desc", "-e", "signal=none")
    with running(
        folder / "run", program, *options, before=(*outside, *tracer, "-o", str(folder / "calls")), **arguments
    ) as job:
        yield job


def calls_on_files(folder: Path, since: float) -> list[Call]:
    """Calls that touched a file outside of the kernel's memory. ``since``: seconds since the epoch."""
    found = []
    for line in (folder / "calls").read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None or float(match[1]) < since or match[2] in HARMLESS:
            continue
        at, name, text = float(match[1]), match[2], match[3]
        paths = [path for _, path in _DESCRIPTOR.findall(text)]
        texts = [path for path in _TEXT.findall(text) if path]
        if any(path.startswith("/") for path in texts):
            # Where a path is absolute the directory that it could be relative to does not matter.
            paths = [path for number, path in _DESCRIPTOR.findall(text) if number != "AT_FDCWD"]
        paths += texts
        if any(not path.startswith(IN_MEMORY) for path in paths):
            found.append(Call(at, name, line))
    return found


def started_time(job: Job) -> float:
    """When the first ranks had been started, in seconds since the epoch."""
    (first, *_) = [entry for entry in job.events() if entry["event"] == "RanksStarted"]
    return float(first["time"])


def assert_touches_no_file(job: Job, folder: Path) -> None:
    text = (folder / "calls").read_text(errors="replace")
    assert "exited with" in text or "+++" in text, "the trace is not whole"
    wrong = calls_on_files(folder, started_time(job))
    assert not wrong, "\n".join(f"{call.at - started_time(job):.3f} s: {call.text}" for call in wrong)


def test_a_crash_a_restart_a_hang_and_a_stop_touch_no_file(tmp_path: Path) -> None:
    """All that a launch may meet, in one."""
    options = ("--max-restarts", "1", "--hang-timeout", "3", "--external-wait-timeout", "0", "--shutdown-timeout", "5")
    with traced(tmp_path, PROGRAM, *options, nproc=2) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("ModulesImported"), "all is in memory")
        job.release("crash")
        job.hear("ready", 2)
        until(lambda: "saferun: the job hangs" in job.err, "the hang is told")
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "ValueError: once" in job.err
        assert "stopped by SIGTERM" in job.err
        report = json.loads((job.run_dir / "report.json").read_text())
        assert [incident["kind"] for incident in report["incidents"]][:2] == ["failure", "hang"]
    assert_touches_no_file(job, tmp_path)


def test_a_rank_that_fails_at_once_makes_the_supervisor_touch_no_file(tmp_path: Path) -> None:
    """Nothing of what it takes to report it was in memory when it failed."""
    program = """
from rank import *
tell("ready")
await_release("crash")
if RANK == 1:
    raise ValueError("at once")
stay()
"""
    with traced(tmp_path, program, nproc=2) as job:
        job.hear("ready", 2)
        job.release("crash")
        assert job.wait() == 1
        assert "ValueError: at once" in job.err
        assert "where the others were" in job.err
    assert_touches_no_file(job, tmp_path)


@pytest.mark.slow
def test_a_job_that_ends_well_touches_no_file(tmp_path: Path) -> None:
    """With the checks beside it, and with output."""
    program = """
from rank import *
for number in range(1000):
    print("line", number)
tell("ready")
await_release("end")
"""
    with traced(tmp_path, program, nproc=2) as job:
        job.hear("ready", 2)
        until(lambda: list(job.run_dir.glob("**/preflight.json")), "the checks are over")
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("line 999\n") == 2
    assert_touches_no_file(job, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a disk's directory at /dev/shm")
def test_private_directories_on_a_disk_are_not_looked_at(tmp_path: Path) -> None:
    """Where no memory takes them, heartbeats and the like are not known, and the launch ends as it would have."""
    (tmp_path / "disk").mkdir()
    if is_in_memory(str(tmp_path / "disk")):
        pytest.skip(f"{tmp_path} is in memory")
    mount = f'mount --make-rprivate / && mount --bind {tmp_path / "disk"} /dev/shm && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", mount, "sh")
    with traced(tmp_path, PROGRAM, "--max-restarts", "1", nproc=2, outside=before) as job:
        # Code for which there is no memory lies in /dev/shm as well, in files of other names.
        directory = f"/dev/shm/saferun-{read_environ_entry(job.hear('ready', 2)[0].pid, 'SAFERUN_RUN_ID')}"
        until(lambda: job.has_happened("ModulesImported"), "all is in memory")
        job.release("crash")
        job.hear("ready", 2)
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "ValueError: once" in job.err
        since = started_time(job)
    calls = [line for line in (tmp_path / "calls").read_text(errors="replace").splitlines() if directory in line]
    assert calls
    late = [line for line in calls if float(line.split()[0]) >= since and " close(" not in line]
    assert not late, "\n".join(late)
    assert_touches_no_file(job, tmp_path)


def test_the_trace_shows_what_touches_a_file(tmp_path: Path) -> None:
    """A test of the tests: before the ranks are started files are opened, and each kind of call is seen."""
    with traced(tmp_path, "from rank import *\n", nproc=1) as job:
        assert job.wait() == 0
    names = {call.name for call in calls_on_files(tmp_path, 0.0)}
    assert names >= {"openat", "read", "close", "execve"}
    assert names & {"newfstatat", "stat", "fstatat64"}


def watches_for_cores(job: Job) -> bool:
    """Whether the process that saves cores has its watch."""
    for pid in children_of(job.process.pid):
        with contextlib.suppress(OSError):
            if (Path("/proc") / str(pid) / "comm").read_text() == "sr-cores\n":
                return any(os.readlink(fd) == "anon_inode:inotify" for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.slow
@pytest.mark.skipif(not share_a_name(read_core_pattern()), reason="cores do not share a name here")
def test_cores_that_share_a_name_are_saved_from_each_other_by_another_process(tmp_path: Path) -> None:
    """In the directory in which the ranks start, which may be the one that does not answer."""
    program = """
from rank import *
def crash(*_):
    os.kill(os.getpid(), signal.SIGQUIT)
if RANK == 1:
    signal.signal(signal.SIGTERM, crash)
tell("ready")
if RANK == 1:
    stay()
await_release("crash")
crash()
stay()
"""
    with traced(tmp_path, program, "--cores", "backtrace", nproc=2) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("ModulesImported"), "all is in memory")
        until(lambda: watches_for_cores(job), "somebody watches")
        job.release("crash")
        assert job.wait() == 1
        assert "reading the cores of ranks 0, 1" in job.err
        texts = {path.name for path in job.run_dir.glob("*/attempt_0/*/*.core.txt")}
        assert texts == {"rank_0.core.txt", "rank_1.core.txt"}, "the first one has not been lost to the second"
    assert_touches_no_file(job, tmp_path)
