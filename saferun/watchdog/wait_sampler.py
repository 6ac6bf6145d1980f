"""Sees which ranks wait for others at one moment, by where their main threads sleep in the kernel.

A main thread that waits for a collective of gloo's sleeps on a futex. One that computes, reads a file, sleeps, or waits
for its data-loader workers does not: it runs, or sleeps elsewhere. The file that tells (/proc/PID/wchan) costs 2 µs and
waits for nothing. Ranks that use GPUs wait with busy main threads; nothing can be seen there of them.

Source: proc(5), /proc/PID/wchan; kernel/futex/waitwake.c of Linux for the names, which differ between versions;
Documentation/scheduler/sched-stats.rst for /proc/PID/schedstat, which is of the main thread alone.
"""

from __future__ import annotations

import os

from saferun.errors import suppress
from saferun.linux.small_files import has_own_processes, list_directory, read_link

_FUTEX = b"futex"
# Stopped, traced or frozen: not slow.
_HELD = (b"do_signal_stop", b"ptrace_stop", b"do_freezer_trap", b"__refrigerator")
_LONGEST_CONTENT = 128
_MOST_DESCRIPTORS = 4096
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/dxg", "/dev/davinci", "/dev/hl")
# NVIDIA's control nodes are also open where no GPU is used.
_CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/dev/nvidia-caps")


class WaitSampler:
    """Reads some processes again and again."""

    def __init__(self) -> None:
        self._fds: dict[tuple[int, str], int] = {}  # by process and file
        self._run_times: dict[int, bytes] = {}  # by process

    def waits(self, pid: int) -> bool | None:
        """Whether a process waits for another rank; None: it is being held, or cannot be seen."""
        try:
            name = self._read(pid, "wchan")
        except OSError:
            self.drop(pid)
            return None
        if name.startswith(_FUTEX):
            return True
        return None if name.startswith(_HELD) else False

    def has_run(self, pid: int) -> bool:
        """Whether the main thread of a process has run since this was asked last; True also where that is unknown."""
        try:
            run_time = self._read(pid, "schedstat")
        except OSError:
            return True
        before, self._run_times[pid] = self._run_times.get(pid), run_time
        # Kernels without CONFIG_SCHED_INFO have zeros there.
        return run_time != before or run_time.startswith(b"0 ")

    def _read(self, pid: int, name: str) -> bytes:
        fd = self._fds.get((pid, name))
        if fd is None:
            if not has_own_processes():
                raise FileNotFoundError(f"/proc/{pid}/{name}")
            fd = self._fds[pid, name] = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, _LONGEST_CONTENT, 0)

    def drop(self, pid: int) -> None:
        """Read this one no more."""
        self._run_times.pop(pid, None)
        for name in ("wchan", "schedstat"):
            fd = self._fds.pop((pid, name), None)
            if fd is not None:
                with suppress(OSError):
                    os.close(fd)

    def close(self) -> None:
        """Read none any more."""
        for pid in {pid for pid, _ in self._fds}:
            self.drop(pid)


def uses_gpu(pid: int) -> bool:
    """Whether a process has a GPU's device open. Costs 2 to 3 µs a descriptor, of which 4,096 at most are read."""
    for name in sorted(list_directory(f"/proc/{pid}/fd"), key=int)[:_MOST_DESCRIPTORS]:
        target = read_link(f"/proc/{pid}/fd/{name}")  # empty if it was closed meanwhile
        if target.startswith(_DEVICES) and not target.startswith(_CONTROL):
            return True
    return False
