"""Cores beside a launch, limits on them, and the tools that read them."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.captures import cores
from saferun.captures.wire import CoreRequest, DeadProcess
from saferun.ctl import main as saferunctl
from saferun.linux import core_files
from saferun.linux.cgroups import oom_kill_between, read_memory_state
from saferun.linux.core_limits import RankPreparation, plan_preparation, why_no_cores
from saferun.linux.core_pattern import CorePattern, share_a_name
from saferun.linux.procfs import children_of
from tests.breadth import slow_but
from tests.process.core_steps import (
    PATTERN,
    Crew,
    examined,
    functions,
)
from tests.process.launching import DEADLINE_S, customized, in_saferun, name_of, running, until

pytestmark = pytest.mark.skipif(not PATTERN.is_relative, reason=f"no cores in the directory: {PATTERN.description()}")


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """A crew that leaves nobody behind."""
    crew = Crew(tmp_path)
    try:
        yield crew
    finally:
        crew.close()


# --------------------------------------------------------------------------------------------------- beside a launch


@pytest.mark.skipif(not share_a_name(PATTERN), reason="cores do not share a name here")
@pytest.mark.parametrize("how", slow_but(["killed", "impossible"], "killed"))
def test_a_launch_goes_on_without_the_process_that_saves_cores(tmp_path: Path, how: str) -> None:
    """Another one takes its place, and where there is none cores are lost to each other, as without saferun."""
    program = "from rank import *\ntell('ready')\nawait_release('end')"
    taken = (
        "import saferun.linux.core_watch as core_watch\n"
        "    def helper(*_, **__): raise OSError(11, 'no process')\n"
        "    core_watch.Helper = helper"
    )
    environ = customized(tmp_path, in_saferun(taken)) if how == "impossible" else None
    with running(tmp_path / "run", program, environ=environ, store=False) as job:

        def saver() -> int | None:
            return next((pid for pid in children_of(job.process.pid) if name_of(pid) == "sr-cores"), None)

        job.hear("ready")
        until(lambda: job.has_happened("ModulesImported"), "the launch is under way")
        if how == "killed":
            first = until(saver, "it is there") or 0
            os.kill(first, signal.SIGKILL)
            until(lambda: saver() not in {None, first}, "another one takes its place")
        else:
            assert saver() is None
        job.release("end")
        assert job.wait() == 0
        assert "Traceback" not in job.err


@pytest.mark.skipif(not share_a_name(PATTERN), reason="cores do not share a name here")
def test_a_file_called_core_outlives_a_rank_that_crashes(tmp_path: Path) -> None:
    """The kernel would delete it for the rank's core. It stays under torchrun, which raises no limit."""
    program = "from rank import *\ntell('ready')\nos.kill(os.getpid(), signal.SIGSEGV)"
    before = ("sh", "-c", 'ulimit -S -c 0; echo precious > core; exec "$@"', "sh")
    with running(tmp_path / "run", program, "--cores", "backtrace", store=False, before=before) as job:
        assert job.wait() == 1
        core = tmp_path / "run" / "job" / "core"
        assert core.read_text() == "precious\n"
        assert "SIGSEGV" in job.err
        assert f"it would have replaced {core}" in (job.run_dir / "report.txt").read_text()


@pytest.mark.parametrize("name", slow_but(["SIGINT", "SIGTERM"], "SIGTERM"))
def test_a_core_that_a_signal_left_no_time_for_is_in_the_report(tmp_path: Path, name: str) -> None:
    """It may be as large as all memory of the rank, and the user has not asked for it."""
    skip_without_room(tmp_path)
    program = "from rank import *\ntell('ready')\nos.kill(os.getpid(), signal.SIGSEGV)"
    taken = (
        "import time\n"
        "    import saferun.captures.cores as cores\n"
        "    cores.read_cores = lambda *_, **__: time.sleep(1000)"
    )
    options, environ = ("--cores", "backtrace"), customized(tmp_path, in_saferun(taken))
    before = ("sh", "-c", 'ulimit -S -c 0; exec "$@"', "sh")
    with running(tmp_path / "run", program, *options, environ=environ, store=False, before=before) as job:
        until(lambda: "reading the core of rank 0" in job.err, "it is read")
        job.send(signal.Signals[name])
        assert job.wait() == 1
        [core] = (tmp_path / "run" / "job").glob("core*")
        assert "SIGSEGV" in job.err
        assert f"core: kept in {core} (" in job.err
        assert "it has not been read" in job.err
        assert "captures timed out: cores: a signal left no time" in job.err


CRASHING_SUBPROCESSES = """
from rank import *
import subprocess
crash = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
tell("ready")
await_release("crash")
for number in range(3):
    assert subprocess.run(crash).returncode == -signal.SIGSEGV
    tell("crashed")
    await_release(f"after_{number}")
sys.exit(int(sys.argv[1]))
"""


def skip_without_room(directory: Path) -> None:
    """Skip a test where saferun would not raise the limit on cores."""
    reason = why_no_cores(str(directory), 1, asked=True)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(("limit", "left"), [("0", 0), ("unlimited", 3)])
def test_crashes_that_a_rank_handles_leave_no_cores(tmp_path: Path, limit: str, left: int) -> None:
    """Its subprocesses inherit the limit that saferun raises for it. Cores that the user has switched on stay."""
    skip_without_room(tmp_path)
    before = ("sh", "-c", f'ulimit -S -c {limit}; exec "$@"', "sh")
    options = ("--cores", "backtrace")
    with running(tmp_path / "run", CRASHING_SUBPROCESSES, *options, store=False, before=before, arguments=["0"]) as job:
        folder = tmp_path / "run" / "job"

        def cores() -> list[str]:
            return [path.name for path in folder.iterdir() if path.name.startswith("core")]

        job.hear("ready")
        until(lambda: any(name_of(pid) == "sr-cores" for pid in children_of(job.process.pid)), "it watches")
        until(lambda: job.has_happened("ModulesImported"), "the launch is under way")
        job.release("crash")
        for number in range(3):
            job.hear("crashed")
            if share_a_name(PATTERN):
                until(lambda: "core" not in cores(), "it is saved")
            job.release(f"after_{number}")
        assert job.wait() == 0
        assert len(cores()) == left


@pytest.mark.slow
@pytest.mark.parametrize("code", ["0", "1"])
def test_cores_of_a_script_that_raises_the_limit_itself_stay(tmp_path: Path, code: str) -> None:
    """Where there is no room, for instance, saferun raises none, and these are the user's as under torchrun."""
    skip_without_room(tmp_path)
    no_room = (
        "import saferun.linux.core_limits as core_limits\n    core_limits._why_no_room = lambda *_: 'there is no room'"
    )
    program = f"import resource\nhard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n{CRASHING_SUBPROCESSES}".replace(
        'tell("ready")', 'resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\ntell("ready")'
    )
    environ = customized(tmp_path, in_saferun(no_room))
    before = ("sh", "-c", 'ulimit -S -c 0; exec "$@"', "sh")
    options = ("--cores", "backtrace")
    with running(
        tmp_path / "run", program, *options, environ=environ, store=False, before=before, arguments=[code]
    ) as job:
        folder = tmp_path / "run" / "job"
        job.hear("ready")
        until(lambda: any(name_of(pid) == "sr-cores" for pid in children_of(job.process.pid)), "it watches")
        until(lambda: job.has_happened("ModulesImported"), "the launch is under way")
        job.release("crash")
        for number in range(3):
            job.hear("crashed")
            if share_a_name(PATTERN):
                until(lambda: not (folder / "core").exists(), "it is saved")
            job.release(f"after_{number}")
        assert job.wait() == int(code)
        assert len([path for path in folder.iterdir() if path.name.startswith("core")]) == 3


POOL = """
from rank import *
import subprocess
for number, crash in enumerate(["ctypes.string_at(0)", "os.abort()"]):
    tell("ready")
    await_release(f"crash_{number}")
    assert subprocess.run([sys.executable, "-c", f"import ctypes, os; {crash}"]).returncode < 0
    tell("crashed")
await_release("end")
sys.exit(7)
"""


@pytest.mark.slow
def test_of_several_subprocesses_that_crash_every_core_is_read(tmp_path: Path) -> None:
    """The first one has the cause: the others abort because of it."""
    skip_without_room(tmp_path)
    before = ("sh", "-c", 'ulimit -S -c 0; exec "$@"', "sh")
    with running(tmp_path / "run", POOL, "--cores", "backtrace", store=False, before=before) as job:
        folder = tmp_path / "run" / "job"
        for number in range(2):
            job.hear("ready")
            until(lambda: any(name_of(pid) == "sr-cores" for pid in children_of(job.process.pid)), "it watches")
            until(lambda: job.has_happened("ModulesImported"), "the launch is under way")
            job.release(f"crash_{number}")
            job.hear("crashed")
            if share_a_name(PATTERN):
                until(lambda: not (folder / "core").exists(), "it is saved")
        job.release("end")
        assert job.wait() == 1
        report = (job.run_dir / "report.json").read_text()
        assert '"signal": "SIGSEGV"' in report
        assert '"signal": "SIGABRT"' in report
        assert [path.name for path in folder.iterdir() if path.name.startswith("core")] == []


def test_the_core_of_a_subprocess_that_a_rank_fails_of_is_read(tmp_path: Path) -> None:
    """It is the cause, and deleted only afterwards."""
    skip_without_room(tmp_path)
    before = ("sh", "-c", 'ulimit -S -c 0; exec "$@"', "sh")
    options = ("--cores", "backtrace")
    with running(tmp_path / "run", CRASHING_SUBPROCESSES, *options, store=False, before=before, arguments=["1"]) as job:
        folder = tmp_path / "run" / "job"
        job.hear("ready")
        until(lambda: job.has_happened("ModulesImported"), "the launch is under way")
        job.release("crash")
        for number in range(3):
            job.hear("crashed")
            until(lambda: not (folder / "core").exists(), "it is saved")
            job.release(f"after_{number}")
        assert job.wait() == 1
        assert [path.name for path in folder.iterdir() if path.name.startswith("core")] == []
        assert '"signal": "SIGSEGV"' in (job.run_dir / "report.json").read_text()


# -------------------------------------------------------------------------------------------------------- the limits


def test_a_rank_gets_the_hard_limit_and_no_shared_memory(crew: Crew) -> None:
    """Anything between none and all makes cores that nobody can read."""
    plan = RankPreparation(raise_core_limit=True, drop_shared_memory=True, tracer_pid=os.getpid())
    crew.start("stand_by", preparation=plan)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert resource.prlimit(crew.pids[0], resource.RLIMIT_CORE) == (hard, hard)
    assert int(Path(f"/proc/{crew.pids[0]}/coredump_filter").read_text(), 16) == 0x31


def test_without_cores_a_rank_keeps_what_the_user_set(crew: Crew) -> None:
    """``--cores off`` changes nothing."""
    plan = plan_preparation(str(crew.directory), 1, cores=False, tracer_pid=0)
    assert plan == RankPreparation(raise_core_limit=False, drop_shared_memory=False, tracer_pid=0)
    mine = Path("/proc/self/coredump_filter").read_text()
    crew.start("stand_by", preparation=plan, limit=1 << 20)
    assert resource.prlimit(crew.pids[0], resource.RLIMIT_CORE) == (1 << 20, 1 << 20)
    assert Path(f"/proc/{crew.pids[0]}/coredump_filter").read_text() == mine


# ----------------------------------------------------------------------------------------------------------- no memory


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB."""
    tops = (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")
    group = None
    for top, limit in tops:
        try:
            group = top / f"saferun-cores-{os.getpid()}"
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
            break
        except OSError:
            if group is not None and group.exists():
                group.rmdir()
            group = None
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    yield group
    until = time.monotonic() + DEADLINE_S
    while (group / "cgroup.procs").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    group.rmdir()


def test_a_kill_for_memory_is_told_by_the_counters_of_the_cgroup(crew: Crew, small_cgroup: Path) -> None:
    """The exit status says SIGKILL and nothing else."""
    (crew.directory / "eat.py").write_text("import sys; print('ready'); sys.stdin.read(); b'x' * (1 << 30)")
    join = f'echo $$ > {small_cgroup}/cgroup.procs && exec "$@"'
    crew.start("x", program=["sh", "-c", join, "sh", sys.executable, "-u", str(crew.directory / "eat.py")])
    with subprocess.Popen(["sh", "-c", join, "sh", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as beside:
        assert beside.stdin is not None
        assert beside.stdout is not None
        beside.stdin.write(b"\n")
        beside.stdin.flush()
        beside.stdout.readline()
        before = read_memory_state(beside.pid)
        crew.crash()
        after = read_memory_state(beside.pid)
        beside.stdin.close()
    assert crew.ends[crew.pids[0]].signum == signal.SIGKILL
    kill = oom_kill_between(before, after, rss_bytes=60 << 20)
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.rss_bytes, kill.kills) == ("cgroup", 64 << 20, 60 << 20, 1)
    assert oom_kill_between(after, after) is None


# -------------------------------------------------------------------------------------------------- other tools, verb


def _hide(monkeypatch: pytest.MonkeyPatch, *tools: str) -> None:
    import saferun.captures.core_reading as reading

    if "pystack" in tools:
        monkeypatch.setitem(sys.modules, "pystack", None)
    if "gdb" in tools:
        monkeypatch.setattr(reading, "find_gdb", lambda: "")
    if "py-spy" in tools:
        monkeypatch.setattr(reading, "find_tool", lambda _name: "")


def _core_of(crew: Crew, how: str) -> str:
    crew.start(how, environ={"PYTHONFAULTHANDLER": "1"})
    crew.crash()
    [name] = crew.cores()
    return str(crew.directory / name)


@pytest.fixture
def limits() -> Iterator[None]:
    """Reading cores takes away this process's own."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.usefixtures("limits")
def test_gdb_and_py_spy_together_stand_in_for_pystack(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user may well not have pystack."""
    core = _core_of(crew, "step")
    _hide(monkeypatch, "pystack")
    assert saferunctl(["core", core]) == 0
    out = capsys.readouterr().out
    crashed = out.partition("crashed thread")[2].splitlines()
    assert "strlen" in crashed[1]
    called = [line.split()[0] for line in crashed[1:] if line.strip()]
    assert called.index("read_nothing") < called.index("step")
    assert "faulthandler" not in out
    assert "read by gdb and py-spy" in out
    assert "address 0x10" in out


@pytest.mark.usefixtures("limits")
def test_with_py_spy_alone_there_are_python_s_calls(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes with saferun, and half of the stack is better than none."""
    core = _core_of(crew, "step")
    _hide(monkeypatch, "pystack", "gdb")
    assert saferunctl(["core", core]) == 0
    out = capsys.readouterr().out
    assert "read_nothing" in out
    assert "pystack is not installed; gdb is not installed" in out


@pytest.mark.usefixtures("limits")
def test_without_any_tool_a_core_is_told_to_be_unread(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What happened, and what to do about it."""
    core = _core_of(crew, "step")
    _hide(monkeypatch, "pystack", "gdb", "py-spy")
    assert saferunctl(["core", core]) == 2
    err = capsys.readouterr().err
    assert "not installed" in err
    assert "hint: install pystack" in err


@pytest.mark.slow
@pytest.mark.usefixtures("limits")
def test_gdb_says_its_own_when_asked(crew: Crew, capsys: pytest.CaptureFixture[str]) -> None:
    """Addresses, libraries and whatever else it knows."""
    core = _core_of(crew, "in_thread")
    assert saferunctl(["core", core, "--gdb"]) == 0
    out = capsys.readouterr().out
    assert "read by pystack" in out
    assert "$ gdb" in out
    assert "<signal handler called>" in out


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("extension", slow_but(["xz", "zst", "lz4", ""], "zst"))
def test_a_core_that_a_handler_keeps_is_unpacked_read_and_left(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    """systemd-coredump compresses cores, and clears them away by itself."""
    core = _core_of(crew, "step")
    store = crew.directory / "store"
    store.mkdir()
    kept = store / f"core.python3.0.0123456789abcdef.{crew.pids[0]}.1700000000000000"
    os.rename(core, kept)
    if extension:
        tool = {"zst": "zstd"}.get(extension, extension)
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
        unpacked, kept = kept, kept.with_name(f"{kept.name}.{extension}")
        with kept.open("wb") as packed:
            subprocess.run([tool, "-c", str(unpacked)], stdout=packed, check=True)
        unpacked.unlink()
    monkeypatch.setattr(core_files, "HANDLER_DIRECTORIES", (str(store),))
    monkeypatch.setattr(cores, "read_core_pattern", lambda: CorePattern("|/usr/lib/systemd/systemd-coredump %P"))
    dead = DeadProcess(0, crew.pids[0], signal.SIGSEGV, str(crew.directory))
    request = CoreRequest((dead,), directory=str(crew.files), since=crew.began, budget_s=60.0)
    [look] = examined(request)
    assert "step" in functions(look)
    assert (look.kept, look.path) == (True, str(kept))
    assert list(store.iterdir()) == [kept]
    assert sorted(path.name for path in crew.files.iterdir()) == ["rank_0.core.txt"]


@pytest.mark.usefixtures("limits")
def test_a_program_without_python_is_read_by_gdb(crew: Crew, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks may be anything."""
    script = 'echo ready; read line; kill -s SEGV "$$"'
    crew.start("x", program=["bash", "-c", script])
    crew.crash()
    [name] = crew.cores()
    assert saferunctl(["core", str(crew.directory / name)]) == 0
    out = capsys.readouterr().out
    assert "read by gdb" in out
    assert f"sent by pid {crew.pids[0]}" not in out
    assert "bash" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"#!/bin/sh\n", "no ELF file"),
        (b"\x7fELF\x02\x01\x01", "cut off"),
        (b"\x7fELF\x01\x01\x01" + bytes(100), "32-bit"),
        (Path(sys.executable).resolve().read_bytes()[:4096], "no core"),
    ],
)
def test_a_file_that_is_no_core_is_told_in_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    """What happened, and what to do about it."""
    path = tmp_path / "core"
    if content is not None:
        path.write_bytes(content)
    assert saferunctl(["core", str(path)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert words in err[0]
    assert err[1].startswith("hint: ")


@pytest.mark.parametrize(("mode", "call"), slow_but([("keep", "move_core"), ("backtrace", "delete_core")], "keep"))
def test_a_core_whose_file_system_does_not_answer_is_told_all_the_same(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, mode: str, call: str
) -> None:
    """A disk that can be read may hang whoever writes; the core stays where it is, and that is said."""
    crew.start("step")
    crew.crash()
    [core] = crew.cores()
    monkeypatch.setattr(cores, call, lambda *_: signal.pause())
    monkeypatch.setattr(cores, "_MOVE_S", 0.1)
    monkeypatch.setattr(cores, "_DELETE_S", 0.1)
    dead = DeadProcess(0, crew.pids[0], signal.SIGSEGV, str(crew.directory))
    request = CoreRequest((dead,), directory=str(crew.files), mode=mode, since=crew.began, budget_s=60.0)
    [look] = examined(request)
    assert "step" in functions(look)
    assert (look.kept, look.path) == (True, str(crew.directory / core))
    assert "does not answer" in look.failure
    assert [path.name for path in crew.files.iterdir()] == ["rank_0.core.txt"]


def test_no_core_is_looked_for_where_the_file_system_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the whole time that there is for cores, and the verdict waits for it."""
    monkeypatch.setattr(cores, "call_in_child", lambda *_: None)
    monkeypatch.setattr(cores, "responds", lambda *_: False)
    monkeypatch.setattr(cores, "find_cores", lambda *_: signal.pause())
    request = CoreRequest((DeadProcess(3, 4711, signal.SIGSEGV, "/"), DeadProcess(4, 4712, signal.SIGKILL, "/")))
    [look] = examined(request)
    assert (look.rank, look.pid, look.kept) == (3, 4711, False)
    assert look.failure == "no core can be looked for: the file system at / does not answer"
