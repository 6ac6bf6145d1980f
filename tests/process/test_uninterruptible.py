"""Processes in an uninterruptible sleep: nothing ends them, and nothing may wait for them."""

from __future__ import annotations

import os
import struct
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.process.frozen import frozen_disk, needs_mounts
from tests.process.launching import DEADLINE_S, HELPERS_END_S, read_stat, running, state_of, until

if TYPE_CHECKING:
    from collections.abc import Iterator


class StuckFileSystem:
    """A file system that never answers: who opens a file there sleeps uninterruptibly, even after SIGKILL.

    It is mounted at ``folder/stuck``, for saferun and what it starts alone. Source: fuse(4), mount_namespaces(7).
    """

    def __init__(self, folder: Path) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        self._mount_point = folder / "stuck"
        self._mount_point.mkdir()

    def arguments(self) -> dict[str, Any]:
        """Arguments for ``running``, so that saferun finds the file system mounted."""
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        source = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for failed in (
    libc.unshare(0x20000),  # CLONE_NEWNS
    libc.mount(b"none", b"/", None, 0x4000 | 1 << 18, None),  # MS_REC | MS_PRIVATE
    libc.mount(b"stuck", {os.fsencode(self._mount_point)!r}, b"fuse", 6, {options.encode()!r}),  # MS_NOSUID | MS_NODEV
):
    if failed:
        sys.exit(os.strerror(ctypes.get_errno()))
os.close({self._device})
os.execv(sys.argv[1], sys.argv[1:])
"""
        return {"before": [sys.executable, "-c", source], "pass_fds": [self._device], "store": False}

    def begin(self) -> None:
        """Answer the kernel's greeting, which it sends when the file system has been mounted."""
        operation, number = self._next_request()
        assert operation == 26  # FUSE_INIT
        answer = struct.pack("<IIIIHHIIHHI", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0).ljust(64, b"\0")
        os.write(self._device, struct.pack("<IiQ", 16 + len(answer), 0, number) + answer)

    def await_opening(self) -> None:
        """Return when somebody waits for an answer."""
        self._next_request()

    def close(self) -> None:
        """Wake everybody: their calls fail."""
        if self._device >= 0:
            os.close(self._device)
            self._device = -1

    def _next_request(self) -> tuple[int, int]:
        def read() -> bytes:
            try:
                return os.read(self._device, 1 << 20)
            except (BlockingIOError, PermissionError):  # PermissionError: it is not mounted yet
                return b""

        _, operation, number = struct.unpack_from("<IIQ", until(read, "a request to the file system"))
        return operation, number


@contextmanager
def stuck_file_system(folder: Path) -> Iterator[StuckFileSystem]:
    """A file system that wakes everybody in the end."""
    file_system = StuckFileSystem(folder)
    try:
        yield file_system
    finally:
        file_system.close()


NEEDS_A_STUCK_FILE_SYSTEM = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="a file system that hangs takes root and /dev/fuse"
)


@NEEDS_A_STUCK_FILE_SYSTEM
def test_a_rank_in_an_uninterruptible_sleep_is_named_and_left(tmp_path: Path) -> None:
    """A rank stuck in a dead network file system or driver: no signal ends it, and torchrun waits for it forever."""
    program = """
from rank import *
if RANK == 1:
    await_release("end")
    sys.exit(1)
tell("opening")
open(FOLDER + "/stuck/file")
"""
    with (
        stuck_file_system(tmp_path) as file_system,
        running(tmp_path, program, "--shutdown-timeout", "0", nproc=2, **file_system.arguments()) as job,
    ):
        file_system.begin()
        (stuck,) = job.hear("opening")
        file_system.await_opening()
        job.release("end")
        until(lambda: state_of(stuck.pid) == "D", "the rank is in state D")
        try:
            assert job.wait() == 1
            assert "could not be killed (uninterruptible, state D): local rank 0; left behind" in job.err
            assert "Traceback" not in job.err
            assert state_of(stuck.pid) == "D"
            until(lambda: job.processes() == [stuck.pid], "all others have ended", timeout_s=HELPERS_END_S)
        finally:
            file_system.close()
        job.assert_nothing_left(DEADLINE_S)


@NEEDS_A_STUCK_FILE_SYSTEM
@pytest.mark.slow
def test_a_leftover_that_cannot_be_killed_does_not_disturb_the_next_attempt(tmp_path: Path) -> None:
    """Whatever is left of one attempt: the report of that attempt is whole, and the streams of the next stay open."""
    program = """
from rank import *
if ATTEMPT == 0:
    if os.fork() == 0:
        os.setsid()
        tell("opening")
        open(FOLDER + "/stuck/file")
    await_release("end")
    print("the reason", file=sys.stderr)
    sys.exit(1)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        tell("daemon of the second attempt")
        stay()
    os._exit(0)
tell("again")
await_release("go on")
print("still heard")
"""
    with (
        stuck_file_system(tmp_path) as file_system,
        running(tmp_path, program, "--max-restarts", "1", "--leftovers", "end", **file_system.arguments()) as job,
    ):
        file_system.begin()
        (stuck,) = job.hear("opening")
        file_system.await_opening()
        job.release("end")
        try:
            job.hear("again")
            (daemon,) = job.hear("daemon of the second attempt")
        finally:
            file_system.close()
        until(lambda: read_stat(stuck.pid) is None, "the leftover is gone at last")
        daemon_lives = read_stat(daemon.pid) is not None
        job.release("go on")
        assert job.wait() == 0
        assert daemon_lives
        assert job.out.endswith("still heard\n")
        assert "its last line of output: the reason" in job.err
        assert "  it wrote nothing else to stderr (" in job.err


# A thread waits in a page fault; another one waits for it, and has the lock on the memory map of both.
LOCKED_MAP = """
import ctypes, threading
from rank import *
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def waiting():
    return [task for task in os.listdir("/proc/self/task") if ") D " in open(f"/proc/self/task/{task}/stat").read()]
def begin(function, *arguments):
    number = len(waiting())
    threading.Thread(target=function, args=arguments, daemon=True).start()
    while len(waiting()) == number:
        time.sleep(0.005)
def lock_the_map(size=8192):
    fd = os.open(f"{FOLDER}/disk/{os.getpid()}", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * size)
    os.fsync(fd)
    address = libc.mmap(None, size, 3, 1, fd, 0)
    tell("mapped")
    await_release("fault")
    begin(ctypes.memset, address, 1, 1)
    begin(libc.mprotect, address, size, 1)
    tell("locked")
    await_release("never")
if os.fork() == 0:
    if "session" in sys.argv:
        os.setsid()
    lock_the_map()
await_release("end")
sys.exit(1)
"""


@needs_mounts
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("session", "may be left behind in uninterruptible sleep (state D): 1 process: python"),
        pytest.param("family", "could not be ended and is left behind: 1 process of rank 0: ", marks=pytest.mark.slow),
    ],
)
def test_leftovers_are_not_read_while_their_memory_map_is_locked(tmp_path: Path, where: str, told: str) -> None:
    """Whoever reads their command line or environment waits as they do: forever, and no signal ends that."""
    options = ("--shutdown-timeout", "0")
    with (
        frozen_disk(tmp_path) as disk,
        running(
            tmp_path, LOCKED_MAP, *options, arguments=[where], before=disk.before(), store=False, sweeps=False
        ) as job,
    ):
        try:
            (stuck,) = job.hear("mapped")
            disk.freeze()
            job.release("fault")
            job.hear("locked")
            job.release("end")
            # Not job.wait: of a launch that does not end it reads as much, and would wait as well.
            assert job.process.wait(DEADLINE_S) == 1
            assert state_of(stuck.pid) != ""
        finally:
            disk.thaw()
        assert told in job.err
