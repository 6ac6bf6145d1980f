"""Sees which ranks wait for others at one moment, by where their main threads sleep in the kernel.

A main thread that waits for a collective of gloo's sleeps on a futex. One that computes, reads a file, sleeps, or waits
for its data-loader workers does not: it runs, or sleeps elsewhere. The file that tells (/proc/PID/wchan) costs 2 µs and
waits for nothing. Ranks that use GPUs wait with busy main threads; nothing can be seen there of them.

Source: proc(5), /proc/PID/wchan; kernel/futex/waitwake.c of Linux for the names, which differ between versions.
"""

from __future__ import annotations

import os

from saferun.errors import suppress

_FUTEX = b"futex"
# Stopped, traced or frozen: not slow.
_HELD = (b"do_signal_stop", b"ptrace_stop", b"do_freezer_trap", b"__refrigerator")
_LONGEST_NAME = 128
_MOST_DESCRIPTORS = 4096
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/dxg", "/dev/davinci", "/dev/hl")
# NVIDIA's control nodes are also open where no GPU is used.
_CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/dev/nvidia-caps")


class WaitSampler:
    """Reads some processes again and again."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # by process

    def waits(self, pid: int) -> bool | None:
        """Whether a process waits for another rank; None: it is being held, or cannot be seen."""
        fd = self._fds.get(pid)
        try:
            if fd is None:
                fd = self._fds[pid] = os.open(f"/proc/{pid}/wchan", os.O_RDONLY | os.O_CLOEXEC)
            name = os.pread(fd, _LONGEST_NAME, 0)
        except OSError:
            self.drop(pid)
            return None
        if name.startswith(_FUTEX):
            return True
        return None if name.startswith(_HELD) else False

    def drop(self, pid: int) -> None:
        """Read this one no more."""
        fd = self._fds.pop(pid, None)
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def close(self) -> None:
        """Read none any more."""
        for pid in tuple(self._fds):
            self.drop(pid)


def uses_gpu(pid: int) -> bool:
    """Whether a process has a GPU's device open. Costs 2 to 3 µs a descriptor, of which 4,096 at most are read."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names[:_MOST_DESCRIPTORS]:
        with suppress(OSError):  # it was closed meanwhile
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith(_DEVICES) and not target.startswith(_CONTROL):
                return True
    return False
