"""What Linux may lack: each feature with the system's help, without Python's function, and without the system call."""

from __future__ import annotations

import ast
import ctypes
import errno
import gc
import os
import resource
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.linux import child_output, descriptors, memory_file, pidfd, poller
from saferun.linux.children import Child, fork
from saferun.linux.poller import Poller
from saferun.linux.process_identity import is_living, own_identity
from saferun.linux.procfs import read_stat
from saferun.linux.system_call import system_call
from tests.breadth import slow_but
from tests.process.launching import customized, in_saferun, running, until
from tests.without import lacks_pidfds

LACKS = ("nothing", "Python's functions", "the system calls")
DEADLINE_S = 30.0
NAMELESS: int = getattr(os, "O_TMPFILE", -1)


# An old kernel, or all of this runs below `tests/without.py kernel`.
REFUSED = lacks_pidfds()


@pytest.fixture(params=LACKS)
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What this machine lacks during a test."""
    what: str = request.param
    if what != "nothing":
        for module, name in ((os, "pidfd_open"), (os, "memfd_create"), (signal, "pidfd_send_signal")):
            monkeypatch.delattr(module, name, raising=False)
    if what == "the system calls":

        def refuse(_name: str, *_arguments: object) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        for module in (pidfd, memory_file, descriptors):
            monkeypatch.setattr(module, "system_call", refuse)
    return "the system calls" if REFUSED else what


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_system_call_says_what_went_wrong() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS if REFUSED else errno.ESRCH)):
        system_call("pidfd_open", 1 << 30, 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        system_call("unheard_of")


def test_a_pidfd_tells_the_end_or_is_none(lacking: str, child: subprocess.Popen[bytes]) -> None:
    fd = pidfd.open_pidfd(child.pid)
    assert (fd < 0) == (lacking == "the system calls")
    pidfd.send_signal(child.pid, fd, signal.SIGTERM)
    if fd >= 0:
        assert not os.get_inheritable(fd)
        assert select.select([fd], [], [], DEADLINE_S)[0] == [fd]
        os.close(fd)
    assert child.wait(DEADLINE_S) == -signal.SIGTERM
    assert pidfd.open_pidfd(child.pid) == -1


@pytest.mark.skipif(REFUSED, reason="no pidfds here")
def test_a_filter_that_refuses_only_the_signal_is_got_round(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    """Seccomp profiles older than pidfd_send_signal answer EPERM."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    fd = pidfd.open_pidfd(child.pid)
    pidfd.send_signal(child.pid, fd, signal.SIGTERM)
    os.close(fd)
    assert child.wait(DEADLINE_S) == -signal.SIGTERM


def test_the_end_of_any_process_is_noticed(
    lacking: str, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a look at /proc where there are no pidfds; one that waits to be reaped has ended too."""
    del lacking
    monkeypatch.setattr(poller, "_PROC_POLL_S", 0.01)
    loop, ended = Poller(), []
    loop.watch_process(child.pid, lambda: ended.append(child.pid))
    loop.wait(0.02)
    assert ended == []
    child.kill()
    while not ended:
        loop.wait(DEADLINE_S)
    loop.wait(0.02)
    assert ended == [child.pid]
    loop.close()


def test_a_number_that_somebody_else_has_got_is_an_end(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "open_pidfd", lambda _pid: -1)
    real = read_stat(child.pid)
    assert real is not None
    stats = iter([real, real._replace(start_ticks=real.start_ticks + 1)])
    monkeypatch.setattr(poller, "read_stat", lambda _pid: next(stats))
    loop, ended = Poller(), []
    loop.watch_process(child.pid, lambda: ended.append(1))
    loop.wait(0)
    assert ended == [1]
    loop.close()


def test_a_process_that_cannot_be_seen_lives_until_a_signal_finds_none(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc mounted with hidepid shows no processes of others."""
    monkeypatch.setattr(poller, "open_pidfd", lambda _pid: -1)
    monkeypatch.setattr(poller, "read_stat", lambda _pid: None)
    monkeypatch.setattr(poller, "_PROC_POLL_S", 0.0)
    loop, ended = Poller(), []
    loop.watch_process(child.pid, lambda: ended.append(1))
    loop.wait(0)
    assert ended == []
    child.kill()
    child.wait()
    loop.wait(0)
    assert ended == [1]
    loop.close()


def test_watching_can_be_ended(lacking: str, child: subprocess.Popen[bytes]) -> None:
    del lacking
    loop, ended = Poller(), []
    loop.watch_process(child.pid, lambda: ended.append(1))
    loop.unwatch_process(child.pid)
    loop.unwatch_process(child.pid)
    child.kill()
    loop.wait(0)
    assert ended == []
    loop.close()


def test_the_output_of_a_child_ends_with_the_child(lacking: str) -> None:
    """Not with its pipe: a process that it leaves behind may hold that forever."""
    read_end, write_end = os.pipe()

    def run() -> None:
        os.write(write_end, b"said")
        if os.fork() == 0:
            signal.pause()

    pid = fork(run)
    os.close(write_end)
    try:
        opened = pidfd.open_pidfd(pid)
        assert (opened < 0) == (lacking == "the system calls")
        output, status = child_output.collect_output(Child(pid, opened), read_end, DEADLINE_S)
    finally:
        os.killpg(pid, signal.SIGKILL)
    assert output == b"said"
    assert status is not None
    assert status.ok


def test_a_forked_process_holds_no_descriptor_of_this_one() -> None:
    """One that sleeps in the kernel cannot be ended. Whoever reads the output of saferun still has to see its end."""

    def list_all(write_fd: int) -> None:
        folder = "/proc/self/fd"
        names = [name for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")]
        where = {int(name): os.readlink(f"{folder}/{name}") for name in names}
        os.write(write_fd, repr((write_fd, where)).encode())

    read_end, write_end = os.pipe()
    output, _ = child_output.run_forked(list_all, DEADLINE_S)
    os.close(read_end)
    os.close(write_end)
    own, where = ast.literal_eval(output.decode())
    assert where.pop(own).startswith("pipe:")
    assert where == dict.fromkeys(range(3), os.devnull)


def test_a_fork_that_the_system_refuses_is_an_error_and_not_a_child_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_work: Callable[[], None]) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    gc.collect()  # what earlier tests have left open is not closed in between
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(child_output, "fork", refuse)
    with pytest.raises(BlockingIOError):
        child_output.run_forked(lambda _: None, DEADLINE_S)
    assert os.listdir("/proc/self/fd") == before


def test_what_a_child_writes_just_before_its_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write and exit between the question for its output and the one for its end."""
    hold, release = os.pipe()
    read_end, write_end = os.pipe()

    def run() -> None:
        os.read(hold, 1)
        os.write(write_end, b"last")

    def end_now(pid: int) -> bool:
        os.write(release, b".")
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None

    pid = fork(run)
    monkeypatch.setattr(child_output, "_is_zombie", end_now)
    output, status = child_output.collect_output(Child(pid, -1), read_end, DEADLINE_S)
    for fd in (hold, release, write_end):
        os.close(fd)
    assert output == b"last"
    assert status is not None
    assert status.ok


def test_a_child_that_has_closed_its_output_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pidfd it is found by polling, and each launch with a home directory on a server has such a child."""
    waits: list[float] = []
    hold, release = os.pipe()
    read_end, write_end = os.pipe()

    class Poll:
        def __init__(self) -> None:
            self._poll = select_poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, wait_ms: float) -> list[tuple[int, int]]:
            waits.append(wait_ms)
            return self._poll.poll(wait_ms)

    def run() -> None:
        os.close(write_end)
        os.read(hold, 1)

    def end_later(pid: int) -> bool:
        if waits[-3:] == [1.0] * 3:
            os.write(release, b".")
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return is_zombie(pid)

    select_poll, is_zombie = select.poll, child_output._is_zombie
    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(child_output, "_is_zombie", end_later)
    pid = fork(run)
    os.close(write_end)
    child_output.collect_output(Child(pid, -1), read_end, DEADLINE_S)
    for fd in (hold, release):
        os.close(fd)
    assert waits[-3:] == [1.0] * 3


@pytest.mark.parametrize("executable", [False, True])
def test_a_memory_file_has_its_content_and_no_name(
    lacking: str, executable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_file, "_directories", lambda **_: iter(["/nowhere", str(tmp_path)]))
    content = Path("/bin/true").read_bytes()
    fd = memory_file.memory_file("sample", content, executable=executable)
    try:
        assert os.read(fd, 1 << 20) == content
        assert not os.get_inheritable(fd)
        assert list(tmp_path.iterdir()) == []
        assert ("memfd" in os.readlink(f"/proc/self/fd/{fd}")) == (lacking != "the system calls")
        if executable:
            done = subprocess.run([f"/proc/{os.getpid()}/fd/{fd}"], timeout=DEADLINE_S, check=False)
            assert done.returncode == 0
    finally:
        os.close(fd)


def test_a_memory_file_may_be_kept_off_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's loop must not wait for a file system."""
    tried = []

    def refuse(directory: str, _content: bytes, *, executable: bool) -> int:
        tried.append((directory, executable))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory_file, "_memfd", refuse_memfd)
    monkeypatch.setattr(memory_file, "_made_in", refuse)
    with pytest.raises(OSError, match="No space left"):
        memory_file.memory_file("sample", b"", disks=False)
    assert tried == [("/dev/shm", False)]


@pytest.mark.parametrize("lack", ["Python", "file system"])
def test_a_shared_memory_file_needs_no_kind_of_file_that_is_missing_here(
    lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some Pythons have no O_TMPFILE, and some file systems refuse it."""
    opened, names = os.open, []

    def refuse(path: str, flags: int, *arguments: int, **more: int) -> int:
        if flags & NAMELESS == NAMELESS:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        names.append(path)
        return opened(path, flags, *arguments, **more)

    monkeypatch.setattr(memory_file, "_memfd", refuse_memfd)
    if lack == "Python":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    else:
        monkeypatch.setattr(os, "open", refuse)
    fd = memory_file.shared_memory_file("sample")
    try:
        assert (os.write(fd, b"sample"), os.pread(fd, 9, 0)) == (6, b"sample")
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_nlink == 0
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not any(os.path.exists(name) for name in names)
    finally:
        os.close(fd)


def refuse_memfd(_name: str, *, executable: bool) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(executable))


@pytest.mark.parametrize("lacking", ["the system calls"], indirect=True)
def test_a_memory_file_that_finds_no_place_says_so(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del lacking
    monkeypatch.setattr(memory_file, "_directories", lambda **_: iter([str(tmp_path / "none")]))
    with pytest.raises(FileNotFoundError):
        memory_file.memory_file("sample", b"")


CLOSING = """
import errno, os, sys
from saferun.linux.process_identity import is_living, own_identity
from saferun.linux.procfs import read_stat
from saferun.linux import descriptors

def refuse(*_):
    raise OSError(errno.ENOSYS, "none")

lacks = sys.argv[1]
if lacks != "nothing":
    descriptors.system_call = refuse
if lacks == "all":
    descriptors.os.listdir = refuse
for fd in (5, 6, 7, 40, 1500):
    os.dup2(0, fd)
descriptors.close_all_but(6, 40, 2)
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print([fd for fd in range(4000) if is_open(fd)])
"""


@pytest.mark.parametrize("lacks", ["nothing", "close_range", "all"])
def test_all_descriptors_are_closed_but_a_few(lacks: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSING, lacks], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.strip() == "[0, 1, 2, 6, 40]"


# How much it says that it has locked, and how much the kernel says, in KiB.
LOCKING = """
import re
from pathlib import Path
from saferun.linux.locked_code import lock_code
print(lock_code() >> 10, re.search(r"VmLck:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def locked_kib(**more: Any) -> tuple[int, int]:
    """The same, of a process of its own."""
    done = subprocess.run([sys.executable, "-c", LOCKING], check=True, capture_output=True, text=True, **more)
    said, seen = map(int, done.stdout.split())
    return said, seen


def test_the_code_of_a_process_is_locked_in_memory() -> None:
    """No page of it is read again from a file system that may be dead by then."""
    said, seen = locked_kib()
    assert said == seen
    # The interpreter and the C library have more than that.
    assert (seen > 2000) is not REFUSED


def test_code_that_may_not_be_locked_stays_as_it_is() -> None:
    """A container's limit may be 0."""

    def forbid() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK

    assert locked_kib(preexec_fn=forbid) == (0, 0)


def test_a_little_room_takes_what_finds_it() -> None:
    """Less than the usual limit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)

    said, seen = locked_kib(preexec_fn=limit)
    assert said == seen
    assert seen <= 1 << 10


@pytest.mark.parametrize("is_allowed", slow_but([True, False], "True"))
def test_the_supervisor_locks_its_code_where_it_may(tmp_path: Path, *, is_allowed: bool) -> None:
    """Beside the ranks; where it may not, nothing is said, and the job goes on."""
    refuse = (
        "import saferun.linux.locked_code as locked_code\n"
        "    def refuse(*_): raise OSError(12, 'no room')\n"
        "    locked_code.system_call = refuse"
    )
    environ = None if is_allowed else customized(tmp_path, in_saferun(refuse))
    program = "from rank import *\ntell('ready')\nawait_release('end')"
    with running(tmp_path / "run", program, environ=environ, store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ModulesImported"), "all is in memory")
        status = Path(f"/proc/{job.process.pid}/status").read_text()
        assert ("VmLck:\t       0 kB" in status) is not (is_allowed and not REFUSED)
        job.release("end")
        assert job.wait() == 0
        assert job.err == ""


def test_a_process_is_known_again_by_more_than_its_number(child: subprocess.Popen[bytes]) -> None:
    """A number is used again; another boot, or a container, has processes of the same numbers."""
    stat = read_stat(child.pid)
    assert stat is not None
    process = own_identity()._replace(pid=child.pid, start_ticks=stat.start_ticks)
    assert is_living(process)
    assert is_living(process._replace(start_ticks=stat.start_ticks + 1)) is False
    assert is_living(process._replace(boot_id="another")) is None
    assert is_living(process._replace(pid_namespace="another")) is None
    assert is_living(process._replace(start_ticks=0)) is None
    child.kill()
    until(lambda: is_living(process) is False, "a process that has ended does not live, also before it is reaped")
    child.wait()
    assert is_living(process) is False
