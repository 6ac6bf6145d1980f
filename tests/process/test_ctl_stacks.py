"""``saferunctl stacks``: whom a word of the command line means, and where those processes are in their code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.captures.wire import CaptureTarget
from saferun.ctl.live_stacks import LiveProcess, find_asked_processes, read_processes
from saferun.errors import SaferunError, UsageError
from tests.breadth import slow_but
from tests.process.launching import REPOSITORY, Job, kill, running, state_of, two_lines, until

SAFERUNCTL = (sys.executable, "-m", "saferun.ctl")
RUN_ID = "0123456789abcdef"


def ask(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """One question."""
    return subprocess.run(
        [*SAFERUNCTL, "stacks", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def answer(*arguments: str, cwd: Path) -> str:
    """What is printed, which has to be all."""
    done = ask(*arguments, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def refusal(*arguments: str, cwd: Path) -> tuple[str, str]:
    """The two lines about a wrong question."""
    done = ask(*arguments, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done
    return two_lines(done.stderr)


# ------------------------------------------------------------------------------------------------------- whom it means


def host(*processes: LiveProcess) -> dict[int, LiveProcess]:
    return {process.pid: process for process in processes}


def member(pid: int, ppid: int, rank: int = -1, **more: Any) -> LiveProcess:
    """A process of the run, started in the order of the numbers."""
    return LiveProcess(pid, ppid, started_at=pid, rank=rank, **{"run_id": RUN_ID, **more})


def stranger(pid: int, ppid: int = 1, **more: Any) -> LiveProcess:
    return LiveProcess(pid, ppid, started_at=pid, **more)


# A supervisor with its coordinator and two ranks, of which one has a data-loader worker.
JOB = host(
    stranger(1, 0),
    stranger(100),
    member(101, 100),
    member(110, 100, 0, hook_prefix="/tmp/hook/a0r0"),
    member(111, 100, 1),
    member(120, 110, 0, hook_prefix="/tmp/hook/a0r0"),
    stranger(500),
)
RANKS = (CaptureTarget(0, 110, "/tmp/hook/a0r0"), CaptureTarget(1, 111, ""))


@pytest.mark.parametrize("target", ["100", RUN_ID, RUN_ID[:6]])
def test_a_supervisor_and_a_run_id_mean_the_ranks(target: str) -> None:
    """Not the supervisor itself, nor its coordinator, nor again what a rank has started."""
    assert find_asked_processes(target, JOB).targets == RANKS


def test_a_shell_above_the_supervisor_means_the_ranks_too() -> None:
    assert find_asked_processes("50", {**JOB, 50: stranger(50), 100: stranger(100, 50)}).targets == RANKS


def test_the_pid_of_a_rank_means_that_rank() -> None:
    asked = find_asked_processes("110", JOB)
    assert (asked.targets, asked.has_ranks) == ((RANKS[0],), True)


def test_the_pid_of_a_worker_means_that_process_of_its_rank() -> None:
    assert find_asked_processes("120", JOB).targets == (CaptureTarget(0, 120, "/tmp/hook/a0r0"),)


def test_any_other_process_is_looked_at_as_well() -> None:
    asked = find_asked_processes("500", JOB)
    assert (asked.targets, asked.has_ranks) == ((CaptureTarget(0, 500),), False)


def test_a_job_inside_of_a_rank_is_found_by_its_supervisor() -> None:
    """The outer rank's variables are there too, in every process of the inner job."""
    inner = host(
        member(200, 110, 0),
        member(210, 200, 0, run_id="fedcba9876543210"),
        member(211, 200, 1, run_id="fedcba9876543210"),
    )
    assert [target.pid for target in find_asked_processes("200", {**JOB, **inner}).targets] == [210, 211]


def test_an_orphan_does_not_stand_in_for_its_rank() -> None:
    """A data-loader worker of an earlier attempt has the variables of a rank, and nobody for a parent."""
    asked = find_asked_processes(RUN_ID, {**JOB, 105: member(105, 1, 0), 106: member(106, 1, 1)})
    assert [target.pid for target in asked.targets] == [110, 111]
    assert asked.orphans == (105, 106)


def test_a_rank_that_cannot_be_known_is_named_by_its_process() -> None:
    """In uninterruptible sleep, of a saferun that does not answer: its variables may not be read."""
    stuck = {112: stranger(112, 100, is_readable=False, is_stuck=True)}
    other = {501: stranger(501, 500, is_readable=False, is_stuck=True)}
    asked = find_asked_processes(RUN_ID, {**JOB, **stuck, **other})
    assert asked.targets == RANKS
    (remark,) = asked.remarks
    assert "process 112 may be a rank" in remark


def test_what_is_left_of_a_run_is_found_without_its_supervisor() -> None:
    orphans = host(stranger(1, 0), member(110, 1, 0), member(111, 1, 1))
    assert [target.pid for target in find_asked_processes(RUN_ID, orphans).targets] == [110, 111]


@pytest.mark.parametrize(
    ("target", "processes", "what", "hint"),
    [
        ("4711", JOB, "there is no process 4711", "ps"),
        ("latest", JOB, "there is no saferun-runs/latest here", "name a pid"),
        ("banana", JOB, "'banana' is no process, no run directory", "name a pid"),
        ("", JOB, "'' is no process", "name a pid"),
        ("9" * 5000, JOB, "is no process, no run", "name a pid"),
        ("\u00b2", JOB, "is no process, no run", "name a pid"),
        (RUN_ID[:2], JOB, "is no process", "name a pid"),
        (
            "0123",
            {**JOB, 300: member(300, 1, 0, run_id="0123ffff")},
            "several runs have an id that begins with '0123'",
            "give more of the name or id",
        ),
        ("500", {500: stranger(500, is_readable=False)}, "process 500 of user", ""),
        (RUN_ID, {101: member(101, 100)}, f"no rank of run {RUN_ID} lives on this host", "it has ended"),
        (
            RUN_ID,
            {101: member(101, 100), 110: stranger(110, 100, is_readable=False, is_stuck=True)},
            f"no rank of run {RUN_ID} can be seen on this host, but a process of this host has threads in",
            "saferunctl stacks 110 shows one by its pid",
        ),
    ],
)
def test_a_word_that_means_nothing_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    processes: dict[int, LiveProcess],
    what: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        find_asked_processes(target, processes)
    assert what in raised.value.what
    assert hint in raised.value.hint
    assert raised.value.hint
    assert raised.value.exit_code == 2


def run_directory(folder: Path, content: str) -> Path:
    path = folder / "saferun-runs" / "20260101-120000-012345"
    path.mkdir(parents=True)
    (path / "run.json").write_text(content)
    (path.parent / "latest").symlink_to(path.name)
    return path


@pytest.mark.parametrize("target", ["latest", "20260101-120000-012345", "saferun-runs/latest", "{path}"])
def test_a_run_is_named_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    path = run_directory(tmp_path, json.dumps({"run_id": RUN_ID}))
    monkeypatch.chdir(tmp_path)
    asked = find_asked_processes(target.format(path=path), JOB)
    assert asked.targets == RANKS
    assert asked.title == "run saferun-runs/20260101-120000-012345"


def test_a_run_that_has_ended_leads_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_directory(tmp_path, json.dumps({"run_id": "feedfeedfeedfeed"}))
    (path / "report.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        find_asked_processes("latest", JOB)
    assert raised.value.hint == "see saferun-runs/20260101-120000-012345/report.txt"


@pytest.mark.parametrize("content", ["", "{}", "[]", "\0", "[" * 99999])
def test_a_directory_that_cannot_be_read_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    run_directory(tmp_path, content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        find_asked_processes("latest", JOB)


def test_the_processes_of_this_host_are_seen_as_they_are() -> None:
    child = subprocess.Popen(
        ["sleep", "3600"], env={"PATH": os.environ["PATH"], "RANK": "7", "SAFERUN_RUN_ID": RUN_ID, "SAFERUN_HOOK": "/x"}
    )
    try:
        seen = read_processes()
        assert seen[child.pid]._replace(started_at=0) == LiveProcess(child.pid, os.getpid(), 0, 7, RUN_ID, "/x")
        assert os.getpid() not in seen
    finally:
        child.kill()
        child.wait()


# ------------------------------------------------------------------------------------------------------- what it prints

SCRIPT = """
import os, sys, time

def wait_for_the_teacher():
    os.write(int(sys.argv[1]), b"ready")
    time.sleep(3600)

def lesson():
    wait_for_the_teacher()

lesson()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps in a known place."""
    (tmp_path / "school.py").write_text(SCRIPT)
    ready, tell = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "school.py", str(tell)], cwd=tmp_path, pass_fds=[tell], env={"PATH": os.environ["PATH"]}
    )
    os.close(tell)
    try:
        assert os.read(ready, 5) == b"ready"
        yield child
    finally:
        os.close(ready)
        child.kill()
        child.wait()


def test_a_process_is_shown_with_its_calls(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    text = answer(str(sleeper.pid), cwd=tmp_path)
    assert text.startswith(f"process {sleeper.pid} (")
    assert "not a rank; 1 process\n" in text
    assert f"    pid {sleeper.pid}  " in text
    assert "rank 0" not in text
    for words in ("merged stacks:", "lesson", "wait_for_the_teacher", "school.py:6", "sleep"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120


def test_whoever_is_looked_at_goes_on_as_before(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    answer(str(sleeper.pid), cwd=tmp_path)
    until(lambda: state_of(sleeper.pid) == "S", "it sleeps on")
    assert sleeper.poll() is None


def test_a_stopped_process_is_shown_and_stays_stopped(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Whoever has stopped it had a reason."""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert "wait_for_the_teacher" in answer(str(sleeper.pid), cwd=tmp_path)
    assert state_of(sleeper.pid) == "T"


def test_json_has_everything(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    content = json.loads(answer(str(sleeper.pid), "--json", cwd=tmp_path))
    assert content["ranks"] == [{"rank": None, "pid": sleeper.pid}]
    assert content["has_ranks"] is False
    (dump,) = content["stacks"]
    assert (dump["pid"], dump["tool"]) == (sleeper.pid, "py-spy")
    functions = [frame["function"] for frame in dump["threads"][0]["frames"]]
    assert functions[:2] == ["wait_for_the_teacher", "lesson"]
    assert [look["state"] for look in content["processes"]] == ["S"]
    assert content["wait_groups"][0]["ranks"] == [0]


def test_native_frames_are_shown_on_demand(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    content = json.loads(answer(str(sleeper.pid), "--native", "--json", cwd=tmp_path))
    frames = [frame for dump in content["stacks"] for thread in dump["threads"] for frame in thread["frames"]]
    assert any(frame["native"] for frame in frames)
    assert any(frame["function"] == "lesson" for frame in frames)


# A call that ends with EINTR if its thread is stopped, beside a thread that computes.
WAITS_BESIDE_WORK = """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
poll = libc.epoll_create1(0)
def wait():
    libc.epoll_wait(poll, ctypes.create_string_buffer(12), 1, -1)
    os._exit(3)
threading.Thread(target=wait, daemon=True).start()
print("ready", flush=True)
def work():
    while True:
        sum(range(100))
work()
"""


def test_a_healthy_process_is_not_stopped(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WAITS_BESIDE_WORK], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(3):
            (dump,) = json.loads(answer(str(child.pid), "--json", cwd=tmp_path))["stacks"]
            assert "work" in {frame["function"] for thread in dump["threads"] for frame in thread["frames"]}
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def bare_sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not Python."""
    child = subprocess.Popen(["sleep", "3600"])
    try:
        until(lambda: state_of(child.pid) == "S", "it sleeps")
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_a_process_that_is_not_python_is_shown_with_its_native_stack(
    bare_sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """By gdb, which lets it go on: on demand, as it is stopped meanwhile."""
    if shutil.which("gdb") is None:
        pytest.skip("needs gdb")
    what, hint = refusal(str(bare_sleeper.pid), cwd=tmp_path)
    assert what.endswith("sleep is not a Python process")
    assert hint.startswith("--native shows its native stacks")
    text = answer(str(bare_sleeper.pid), "--native", cwd=tmp_path)
    assert "nanosleep" in text
    assert "[native]" in text
    until(lambda: state_of(bare_sleeper.pid) == "S", "it sleeps on")
    content = json.loads(answer(str(bare_sleeper.pid), "--native", "--json", cwd=tmp_path))
    assert content["stacks"][0]["tool"] == "gdb"
    assert content["has_ranks"] is False


# gdb stops processes by SIGSTOP; one that it has stopped stays so if gdb is killed.
STUCK_GDB = """#!{python}
import ctypes, os, signal, sys, time

PTRACE_CONT, PTRACE_ATTACH, WALL = 7, 16, 0x40000000
ptrace = ctypes.CDLL(None).ptrace
pid = int(sys.argv[-1])
assert ptrace(PTRACE_ATTACH, pid, 0, 0) == 0
os.waitpid(pid, WALL)
assert ptrace(PTRACE_CONT, pid, 0, signal.SIGSTOP) == 0
os.waitpid(pid, WALL)
open("attached", "w").close()
time.sleep(3600)
"""


@pytest.mark.parametrize("signum", slow_but([signal.SIGKILL, signal.SIGINT], "SIGKILL"))
def test_a_saferunctl_that_is_killed_leaves_no_process_stopped(
    bare_sleeper: subprocess.Popen[bytes], tmp_path: Path, signum: int
) -> None:
    """The debugger dies with it, while it holds the process."""
    gdb = tmp_path / "gdb"
    gdb.write_text(STUCK_GDB.format(python=sys.executable))
    gdb.chmod(0o700)
    asking = subprocess.Popen(
        [*SAFERUNCTL, "stacks", "--native", str(bare_sleeper.pid)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        until((tmp_path / "attached").exists, "the process is held")
        assert state_of(bare_sleeper.pid) == "t"
        asking.send_signal(signum)
        # Nothing that outlives it keeps its output open.
        asking.communicate(timeout=60)
        until(lambda: state_of(bare_sleeper.pid) == "S", "the process goes on", timeout_s=20.0)
    finally:
        asking.kill()
        asking.wait()


def test_without_gdb_the_answer_says_what_is_needed(bare_sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    done = ask(str(bare_sleeper.pid), "--native", cwd=tmp_path, PATH=str(tmp_path))
    what, hint = two_lines(done.stderr)
    assert what.endswith("and its native stacks need gdb, which is not installed")
    assert hint == "install gdb"


def test_a_process_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    what, _ = refusal(str(child.pid), cwd=tmp_path)
    assert what == f"there is no process {child.pid}"


def test_without_a_run_there_is_nothing_to_show(tmp_path: Path) -> None:
    assert refusal(cwd=tmp_path)[0] == "there is no saferun-runs/latest here, and no other run"


def test_a_psutil_that_cannot_be_imported_is_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a part in C, which another Python may not take."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(SaferunError, match="psutil cannot be imported"):
        read_processes()


# ------------------------------------------------------------------------------------------------------------ a launch

APART = """
from rank import *

def evaluate():
    tell("ready")
    await_release("end")

def exchange():
    tell("ready")
    await_release("end")

evaluate() if RANK == 1 else exchange()
"""


def ask_of(job: Job, *arguments: str) -> str:
    return answer(*arguments, cwd=job.folder / "job")


IN_VFORK = """
import ctypes
from rank import *
libc = ctypes.CDLL(None)
fifo = FOLDER + f"/fifo{RANK}"
os.mkfifo(fifo)
actions = ctypes.create_string_buffer(256)
libc.posix_spawn_file_actions_init(actions)
libc.posix_spawn_file_actions_addopen(actions, 0, fifo.encode(), os.O_RDONLY, 0)
argv = (ctypes.c_char_p * 2)(b"true", None)
def read_slowly():
    libc.posix_spawn(ctypes.byref(ctypes.c_int()), b"/bin/true", actions, None, argv, argv)
tell("ready")
read_slowly()
"""


def test_ranks_in_uninterruptible_sleep_are_shown(tmp_path: Path) -> None:
    """They are those that everybody wants to see. Their environment may not be read, but their saferun knows them."""
    with running(tmp_path, IN_VFORK, nproc=2, store=False) as job:
        pids = [word.pid for word in job.hear("ready", 2)]
        try:
            until(lambda: all(state_of(pid) == "D" for pid in pids), "all sleep")
            until((job.run_dir / "run.json").exists, "the run is described")
            text = ask_of(job)
            alone = ask_of(job, str(pids[0]))
        finally:
            job.process.terminate()
            for rank in range(2):
                os.close(os.open(tmp_path / f"fifo{rank}", os.O_RDWR))
    assert "ranks 0-1; " in text.splitlines()[0]
    assert "read_slowly" in text
    assert "read_slowly" in alone


def test_a_launch_is_shown_by_its_directory_its_id_and_its_pid(tmp_path: Path) -> None:
    with running(tmp_path, APART, nproc=3, store=False) as job:
        words = job.hear("ready", 3)
        until((job.run_dir / "run.json").exists, "the run is described")
        run_id = json.loads((job.run_dir / "run.json").read_text())["run_id"]
        texts = [ask_of(job, *target) for target in ([], [run_id], [str(job.process.pid)])]
        for text in texts:
            assert "ranks 0-2; 3 processes\n" in text.splitlines(keepends=True)[0]
            (evaluating,) = [line for line in text.splitlines() if "evaluate" in line and "rank 1" in line]
            assert "train.py" in evaluating
            assert "exchange" in text
        (one,) = [word.pid for word in words if word.rank == 1]
        assert "rank 1; 1 process" in ask_of(job, str(one))
        job.release("end")
        assert job.wait() == 0
    what, _ = refusal(cwd=tmp_path / "job")
    assert "no rank of run saferun-runs/" in what
    assert what.endswith("lives on this host")


def test_a_rank_that_died_meanwhile_does_not_hide_the_others(tmp_path: Path) -> None:
    """The answer is for those that there are."""
    with running(tmp_path, APART, nproc=2, store=False, sweeps=False) as job:
        pids = {word.rank: word.pid for word in job.hear("ready", 2)}
        job.process.send_signal(signal.SIGSTOP)
        kill(pids[0], signal.SIGKILL)
        until(lambda: not state_of(pids[0]), "the rank has ended")
        text = ask_of(job, str(job.process.pid))
        assert "rank 1; 1 process" in text
        job.process.send_signal(signal.SIGCONT)
