"""What can be wrong with a host itself, as opposed to its networks: done to it on purpose, and the way back."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.machines.host import Machine

_SHARED_MEMORY = "/dev/shm"
_FILLING = "left_by_a_dead_job"
_LOADER_LIST = "/etc/ld.so.preload"
_FAKE_VERSION, _CLOCK_LIBRARY = "/run/faults/torch_version.py", "/run/faults/clock.so"
# What reads the wall clock, in terms of what the kernel says: CLOCK_REALTIME and its coarse sister are shifted, and
# whatever measures how long something takes is left alone. Debian's faketime cannot do that: with the monotonic clock
# left alone, its clock_nanosleep() fails.
_CLOCK_SOURCE = """
struct timespec { long s, ns; };
struct timeval { long s, us; };
extern long syscall(long, ...);
#ifdef __x86_64__
enum { CLOCK_GETTIME = 228 };
#else
enum { CLOCK_GETTIME = 113 };
#endif
int clock_gettime(int clock, struct timespec *now) {
    int failed = syscall(CLOCK_GETTIME, clock, now);
    if (!failed && (clock == 0 || clock == 5))
        now->s += SHIFT_S;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec t;
    clock_gettime(0, &t);
    now->s = t.s;
    now->us = t.ns / 1000;
    return 0;
}
long time(long *where) {
    struct timespec t;
    clock_gettime(0, &t);
    if (where)
        *where = t.s;
    return t.s;
}
"""


class AilingMachine(Machine):
    """A host, and what can be wrong with it. Every fault is noted in ``faults``.

    Limits and clock are those of what is started from then on by the tests themselves, not by the host's daemons.
    """

    faults: Sequence[str] = ()
    _covered: str = ""
    _shared_memory_bytes: int = 0

    def _note(self, fault: str) -> None:
        self.faults = [*self.faults, fault]

    def _mount(self, *words: str) -> None:
        enter = ("nsenter", f"--target={self.pid}", "--mount", "--pid", "--")
        done = subprocess.run([*enter, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr.strip() or done.returncode}"

    # ------------------------------------------------------------------------------------------- memory and limits

    def fill_shared_memory(self, size_bytes: int = 32 << 20, free_bytes: int = 1 << 20) -> None:
        """Make /dev/shm small, and let a file take most of it.

        Args:
            size_bytes: of the file system; so much of the machine's memory is really used.
            free_bytes: what is left.
        """
        self._note(f"/dev/shm has {free_bytes} of {size_bytes} bytes")
        file = self.path(f"{_SHARED_MEMORY}/{_FILLING}")
        room = os.statvfs(file.parent)
        self._shared_memory_bytes = self._shared_memory_bytes or room.f_blocks * room.f_frsize
        self._mount("mount", "-o", f"remount,size={size_bytes}", _SHARED_MEMORY)
        room = os.statvfs(file.parent)
        with open(file, "wb") as filling:
            os.posix_fallocate(filling.fileno(), 0, room.f_bavail * room.f_frsize - free_bytes)

    def free_shared_memory(self) -> None:
        """Undo ``fill_shared_memory``."""
        if self._shared_memory_bytes:
            self.path(f"{_SHARED_MEMORY}/{_FILLING}").unlink(missing_ok=True)
            self._mount("mount", "-o", f"remount,size={self._shared_memory_bytes}", _SHARED_MEMORY)
            self._shared_memory_bytes = 0

    def limit_files(self, count: int) -> None:
        """Let no process open more files than so many: ``ulimit -n``, soft and hard."""
        self._note(f"{count} open files")
        self.wrapping = ("prlimit", f"--nofile={count}:{count}")

    # ---------------------------------------------------------------------------------------------------- the clock

    def shift_clock(self, seconds: int) -> None:
        """Set the wall clock forward, or back where that is less than 0; files keep the machine's time.

        No namespace has a wall clock of its own, so it is the C library that is shifted: by /etc/ld.so.preload, and no
        variable, since those are compared between hosts.
        """
        self._note(f"clock {seconds:+} s")
        library = self.path(_CLOCK_LIBRARY)
        library.parent.mkdir(exist_ok=True)
        compiler = ("tcc", "-shared", "-nostdlib", f"-DSHIFT_S={seconds}", "-o", os.fspath(library), "-")
        subprocess.run(compiler, input=_CLOCK_SOURCE, text=True, check=True)
        self.path(_LOADER_LIST).write_text(f"{_CLOCK_LIBRARY}\n")

    # ----------------------------------------------------------------------------------------------------- versions

    def fake_torch(self, version: str) -> None:
        """Let torch's files say that it is another version. It is the same torch all the same."""
        self._note(f"torch {version}")
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        self._covered = os.path.join(os.path.dirname(spec.origin), "version.py")
        text = re.sub(r"(__version__ = ')[^']*", rf"\g<1>{version}", Path(self._covered).read_text(encoding="utf-8"))
        fake = self.path(_FAKE_VERSION)
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(text)
        self._mount("mount", "--bind", _FAKE_VERSION, self._covered)
        # What is compiled from it must not be kept where all hosts find it.
        self.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    # --------------------------------------------------------------------------------------------------- the way back

    def cure(self) -> None:
        """Undo all of these."""
        self.free_shared_memory()
        if self._covered:
            self._mount("umount", self._covered)
        self.path(_LOADER_LIST).unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """It was switched off: what was wrong with it went with its mounts, and nothing has to be undone."""
        self.wrapping = ()
        self._covered = ""
        self._shared_memory_bytes = 0
        self.environ.pop("PYTHONDONTWRITEBYTECODE", None)
