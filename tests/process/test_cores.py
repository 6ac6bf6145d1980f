"""Processes that crash, and what the capture process makes of the cores that they leave."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import cores
from saferun.captures.wire import CaptureReader, CoreRequest, DeadProcess
from saferun.ctl import main as saferunctl
from saferun.evidence import CoreDump
from saferun.linux import core_files
from saferun.linux.cgroups import oom_kill_between, read_memory_state
from saferun.linux.children import Child, exit_status, spawn
from saferun.linux.core_limits import RankPreparation, plan_preparation, prepare_rank
from saferun.linux.core_notes import read_core_notes
from saferun.linux.core_pattern import CorePattern, read_core_pattern, share_a_name
from saferun.linux.core_watch import CoreSaver
from saferun.linux.poller import Poller
from saferun.linux.procfs import children_of
from saferun.model import ExitStatus
from tests.process.launching import DEADLINE_S, REPOSITORY, customized, in_saferun, running, until
from tests.process.one_capture import encode_request

PATTERN = read_core_pattern()
pytestmark = pytest.mark.skipif(not PATTERN.is_relative, reason=f"no cores in the directory: {PATTERN.description()}")

CRASH = """
import ctypes, os, sys, threading, time

def read_nothing():
    ctypes.string_at(16)

def step():
    read_nothing()

def stand_by():
    time.sleep(100)

def give_up():
    os.abort()

def in_thread():
    threading.Thread(target=step).start()
    stand_by()

def in_child():
    import subprocess
    null = subprocess.DEVNULL
    subprocess.run([sys.executable, "-c", open(sys.argv[0]).read(), "step"], stdin=null, stdout=null)
    sys.exit(1)

print("ready", flush=True)
sys.stdin.read()
globals()[sys.argv[-1]]()
"""


class CoreWatch(CoreSaver):
    """Saves the cores of this process's children, in this process's loop."""

    def __init__(self, directory: str, poller: Poller) -> None:
        super().__init__(directory, os.getpid())
        self.is_watching = self.fd >= 0
        if self.is_watching:
            poller.watch(self.fd, self.handle_events)


class Crew:
    """Processes that wait at their standard input, and crash as soon as it is closed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.began = time.time()
        self.script = directory / "crash.py"
        self.script.write_text(CRASH)
        self.files = directory / "files"
        self.files.mkdir()
        self.pids: list[int] = []
        self.told: list[str] = []  # what was said while cores were read
        self.ends: dict[int, ExitStatus] = {}
        self._children: list[Child] = []
        self._read_end, self._write_end = os.pipe()
        os.set_inheritable(self._write_end, False)

    def start(
        self,
        *how: str,
        program: Sequence[str] = (),
        cwd: Path | None = None,
        preparation: RankPreparation | None = None,
        limit: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process for each way to crash, and return when all of them wait."""
        where = cwd or self.directory
        plan = preparation or plan_preparation(str(where), 1, cores=True, tracer_pid=os.getpid())
        # What a rank may come to need is asked of the disk elsewhere; these are small.
        plan = plan._replace(raise_core_limit=limit is None, core_directory="")

        def prepare() -> None:
            os.chdir(where)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
            prepare_rank(plan)

        for word in how:
            said_read, said_write = os.pipe()
            null = os.open(os.devnull, os.O_WRONLY)
            argv = [*(program or (sys.executable, str(self.script))), word]
            variables = {**os.environ, **(environ or {})}
            child = spawn(argv, variables, stdin=self._read_end, stdout=said_write, stderr=null, prepare=prepare)
            self._children.append(child)
            self.pids.append(child.pid)
            os.close(said_write)
            os.close(null)
            with open(said_read, "rb") as said:
                assert said.readline() == b"ready\n"

    def crash(self) -> None:
        """Let them all crash, and wait for their ends. The loop of a supervisor watches for cores meanwhile."""
        poller = Poller()
        watch = CoreWatch(str(self.directory), poller)
        os.close(self._write_end)
        self._write_end = -1
        until = time.monotonic() + DEADLINE_S
        while len(self.ends) < len(self.pids):
            assert time.monotonic() < until, "they live"
            poller.wait(0.01)
            self._reap(os.WNOHANG)
        watch.close()
        poller.close()

    def _reap(self, options: int) -> None:
        for child in self._children:
            if child.pid not in self.ends:
                pid, status = os.waitpid(child.pid, options)
                if pid:
                    self.ends[pid] = exit_status(status)

    def close(self) -> None:
        """End what still lives."""
        for child in self._children:
            if child.pid not in self.ends:
                os.kill(child.pid, signal.SIGKILL)
        self._reap(0)
        for fd in (self._read_end, self._write_end, *(child.pidfd for child in self._children)):
            if fd >= 0:
                os.close(fd)

    def examine(self, *, hard_limit: int | None = None, cwd: Path | None = None, **wanted: Any) -> list[CoreDump]:
        """What the capture process says of their cores; the rank of a process is its place in the crew."""
        dead = tuple(
            DeadProcess(rank, pid, self.ends[pid].signum or 0, str(cwd or self.directory))
            for rank, pid in enumerate(self.pids)
        )
        request = CoreRequest(dead, directory=str(self.files), since=self.began, budget_s=60.0)._replace(**wanted)

        def limit() -> None:
            if hard_limit is not None:
                resource.setrlimit(resource.RLIMIT_CORE, (hard_limit, hard_limit))

        done = subprocess.run(
            [sys.executable, "-m", "tests.process.one_capture"],
            input=encode_request(request),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            cwd=self.directory,
            preexec_fn=limit,
            timeout=DEADLINE_S * 3,
            check=True,
        )
        reader = CaptureReader()
        told: list[str] = []
        reader.on_cores_found = lambda found: told.append(found.message)
        reader.feed(done.stdout)
        assert reader.is_done, done.stderr
        self.told = told
        return list(reader.cores)

    def cores(self) -> list[str]:
        """What lies about in the directory under a core's name."""
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("core"))


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """A crew that leaves nobody behind."""
    crew = Crew(tmp_path)
    try:
        yield crew
    finally:
        crew.close()


def functions(look: CoreDump) -> list[str]:
    return [frame.function for frame in look.threads[0].frames]


@pytest.mark.parametrize("faulthandler", ["", "1"])
@pytest.mark.parametrize("how", ["step", "in_thread"])
def test_a_segmentation_fault_shows_the_crashed_thread_in_both_languages(
    crew: Crew, how: str, faulthandler: str
) -> None:
    """Faulthandler, on in every rank, raises the signal anew: its calls are not the answer."""
    crew.start(how, environ={"PYTHONFAULTHANDLER": faulthandler})
    crew.crash()
    [look] = crew.examine()
    assert (look.rank, look.pid, look.signum) == (0, crew.pids[0], signal.SIGSEGV)
    assert (look.tool, look.failure, look.address, look.sender_pid) == ("pystack", "", "0x10", 0)
    top, *called = functions(look)
    assert "strlen" in top
    assert look.threads[0].frames[0].native
    assert called.index("read_nothing") < called.index("step")
    assert look.threads[0].is_main is (how == "step")
    others = [frame.function for thread in look.threads[1:] for frame in thread.frames]
    assert ("in_thread" in others) is (how == "in_thread")
    text = (crew.files / "rank_0.core.txt").read_text()
    assert "SIGSEGV" in text
    assert crew.told == [f"reading the core of rank 0 ({look.size_bytes / (1 << 20):.0f} MiB) …"]
    assert "read_nothing" in text


def test_a_core_is_deleted_once_its_stacks_are_taken(crew: Crew) -> None:
    """A core of a rank is as large as its memory, and nobody asked for it."""
    crew.start("step")
    crew.crash()
    assert crew.cores()
    [look] = crew.examine()
    assert not look.kept
    assert look.size_bytes > 1 << 20
    assert crew.cores() == []


def test_an_abort_is_the_process_s_own(crew: Crew) -> None:
    """It sent the signal itself, which is no news to anybody."""
    crew.start("give_up")
    crew.crash()
    [look] = crew.examine()
    assert (look.signum, look.sender_pid) == (signal.SIGABRT, 0)
    assert "give_up" in functions(look)


def test_a_signal_from_outside_has_a_sender(crew: Crew) -> None:
    """Who sent it is the first question about a SIGABRT that the process did not send itself."""
    crew.start("stand_by", environ={"PYTHONFAULTHANDLER": ""})
    os.kill(crew.pids[0], signal.SIGABRT)
    crew.crash()
    [look] = crew.examine()
    assert (look.signum, look.sender_pid) == (signal.SIGABRT, os.getpid())


def test_of_four_that_crash_at_once_every_core_is_found_or_missed(crew: Crew) -> None:
    """They may all have written to the same name; whose core is gone is told why."""
    crew.start("step", "step", "step", "step")
    crew.crash()
    looks = sorted(crew.examine(), key=lambda look: look.rank)
    assert [look.pid for look in looks] == crew.pids
    read = [look for look in looks if look.threads]
    assert read
    assert all("step" in functions(look) for look in read)
    assert all(look.failure for look in looks if not look.threads)
    assert crew.cores() == []


def test_cores_that_come_one_after_another_are_all_saved(crew: Crew) -> None:
    """The kernel deletes a core for the next one of the same name."""
    crew.start("stand_by", "stand_by", "stand_by", environ={"PYTHONFAULTHANDLER": ""})
    poller = Poller()
    watch = CoreWatch(str(crew.directory), poller)
    for number, pid in enumerate(crew.pids):
        os.kill(pid, signal.SIGQUIT)
        until = time.monotonic() + DEADLINE_S
        while watch.is_watching and len(watch.renamed) <= number:
            assert time.monotonic() < until
            poller.wait(0.1)
    watch.close()
    poller.close()
    crew.crash()
    looks = crew.examine()
    assert sorted(look.pid for look in looks if look.threads) == sorted(crew.pids)


def test_a_file_of_the_user_s_own_called_core_is_left_alone(crew: Crew) -> None:
    """Packages have directories and scripts have files of that name."""
    poller = Poller()
    watch = CoreWatch(str(crew.directory), poller)
    (crew.directory / "core").write_text("of the user's own")
    poller.wait(0.1)
    (crew.directory / "core").unlink()
    (crew.directory / "core").mkdir()
    poller.wait(0.1)
    watch.close()
    poller.close()
    assert crew.cores() == ["core"]
    assert watch.renamed == []


def test_a_process_without_a_core_is_told_why_limit(crew: Crew) -> None:
    """'No core' alone sends people to search for it."""
    crew.start("step", limit=0)
    crew.crash()
    [look] = crew.examine(hard_limit=0)
    assert (look.path, look.threads) == ("", ())
    assert "the hard limit on cores is 0" in look.failure


def test_a_process_without_a_core_is_told_why_directory(crew: Crew) -> None:
    """The kernel writes where the process is, and says nothing when it cannot."""
    nowhere = Path("/proc")
    crew.start("step", cwd=nowhere)
    crew.crash()
    [look] = crew.examine(cwd=nowhere)
    assert look.path == ""
    assert "/proc" in look.failure


def test_a_core_that_was_cut_off_is_kept_and_told_as_such(crew: Crew) -> None:
    """No tool reads it; deleting it unread would take away the last trace."""
    crew.start("step", limit=1 << 20)
    crew.crash()
    [look] = crew.examine()
    assert look.kept
    assert look.threads == ()
    assert "truncated" in look.failure
    assert Path(look.path).exists()


def test_the_core_of_a_process_that_changed_its_directory_is_found_below(crew: Crew) -> None:
    """Hydra and its like run each job in a directory of its own."""
    below = crew.directory / "outputs" / "today"
    below.mkdir(parents=True)
    crew.start("step", cwd=below)
    crew.crash()
    [look] = crew.examine()
    assert look.path.startswith(str(below))
    assert "step" in functions(look)
    assert list(below.iterdir()) == []


def test_whatever_else_is_called_core_is_neither_believed_nor_deleted(crew: Crew) -> None:
    """Only the process in a core's notes says whose it is."""
    garbage = crew.directory / "core.saferun.garbage"
    garbage.write_bytes(b"\x7fELF\x02\x01\x01" + os.urandom(4000))
    os.mkfifo(crew.directory / "core.saferun.fifo")
    (crew.directory / "core.saferun.link").symlink_to("/dev/zero")
    (crew.directory / f"core.saferun.{os.getpid()}.0").write_bytes(b"")
    before = crew.cores()
    crew.start("step")
    crew.crash()
    [look] = crew.examine()
    assert "step" in functions(look)
    assert crew.cores() == before


def test_a_core_of_another_run_in_the_same_directory_stays(crew: Crew) -> None:
    """Two jobs may share a directory."""
    crew.start("step", "give_up")
    crew.crash()
    before = {read_core_notes(str(crew.directory / name)).pid for name in crew.cores()}
    # No process has this number: it is beyond what the kernel gives.
    crew.examine(dead=(DeadProcess(0, 1 << 23, signal.SIGSEGV, str(crew.directory)),))
    assert {read_core_notes(str(crew.directory / name)).pid for name in crew.cores()} == before
    assert before


def test_a_core_from_before_the_start_is_not_this_run_s(crew: Crew) -> None:
    """Numbers of processes come again."""
    crew.start("step")
    crew.crash()
    [look] = crew.examine(since=time.time() + 60)
    assert look.path == ""
    assert crew.cores()


def test_the_core_of_a_rank_s_child_is_found_by_its_session(crew: Crew) -> None:
    """A data loader's crash shows only as an exception in its rank."""
    crew.start("in_child")
    crew.crash()
    assert crew.ends[crew.pids[0]].code == 1
    [look] = crew.examine()
    assert look.rank == 0
    assert look.pid != crew.pids[0]
    assert look.signum == signal.SIGSEGV
    assert "step" in functions(look)
    assert (crew.files / f"rank_0.pid_{look.pid}.core.txt").exists()


def test_one_core_of_each_kind_of_crash_is_kept(crew: Crew) -> None:
    """The same crash on 64 ranks is one crash."""
    crew.start("stand_by", "stand_by", "give_up", environ={"PYTHONFAULTHANDLER": ""})
    poller = Poller()
    watch = CoreWatch(str(crew.directory), poller)
    for number, pid in enumerate(crew.pids[:2]):
        os.kill(pid, signal.SIGQUIT)
        until = time.monotonic() + DEADLINE_S
        while watch.is_watching and len(watch.renamed) <= number:
            assert time.monotonic() < until
            poller.wait(0.1)
    watch.close()
    poller.close()
    crew.crash()
    looks = crew.examine(mode="keep", keep=4)
    kept = [look for look in looks if look.kept]
    assert sorted(look.signum for look in kept) == [signal.SIGQUIT, signal.SIGABRT]
    assert {os.path.dirname(look.path) for look in kept} == {str(crew.files)}
    assert all(read_core_notes(look.path).pid == look.pid for look in kept)
    assert crew.cores() == []


def test_no_more_cores_are_kept_than_asked_for(crew: Crew) -> None:
    """The disk is everybody's."""
    crew.start("give_up")
    crew.crash()
    [look] = crew.examine(mode="keep", keep=0)
    assert not look.kept
    assert "give_up" in functions(look)


# --------------------------------------------------------------------------------------------------- beside a launch


def name_of(pid: int) -> str:
    """A process's name; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@pytest.mark.skipif(not share_a_name(PATTERN), reason="cores do not share a name here")
@pytest.mark.parametrize("how", ["killed", "impossible"])
def test_a_launch_goes_on_without_the_process_that_saves_cores(tmp_path: Path, how: str) -> None:
    """Another one takes its place, and where there is none cores are lost to each other, as without saferun."""
    program = "from rank import *\ntell('ready')\nawait_release('end')"
    taken = (
        "import saferun.linux.core_saving as core_saving\n"
        "    def helper(*_, **__): raise OSError(11, 'no process')\n"
        "    core_saving.Helper = helper"
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
@pytest.mark.parametrize("extension", ["xz", "zst", "lz4", ""])
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
    [look] = [found for found in cores.examine_cores(request) if isinstance(found, CoreDump)]
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


@pytest.mark.parametrize(("mode", "call"), [("keep", "move_core"), ("backtrace", "delete_core")])
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
    [look] = [found for found in cores.examine_cores(request) if isinstance(found, CoreDump)]
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
    [look] = [found for found in cores.examine_cores(request) if isinstance(found, CoreDump)]
    assert (look.rank, look.pid, look.kept) == (3, 4711, False)
    assert look.failure == "no core can be looked for: the file system at / does not answer"
