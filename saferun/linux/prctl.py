"""The prctl(2) calls that saferun needs, by ctypes: no package with a compiler for five lines of C."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_libc = ctypes.CDLL(None, use_errno=True)
# Bound once: looking a symbol up between fork and exec would take the loader's lock.
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_prctl.restype = ctypes.c_int


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send this process SIGKILL when its parent *thread* ends.

    Call it in the child between fork and exec. Where the parent is gone already, the process ends here.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(127)


def outlive_parent() -> None:
    """Have the kernel send nothing any more when the parent ends: what ``die_with_parent`` has asked for is over.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def hide_environ_entry(name: str) -> None:
    """Overwrite an entry of the environment that others see of this process, as programs do that set their title.

    Source: proc(5), /proc/PID/environ; environ(7).
    """
    entries = ctypes.POINTER(ctypes.c_void_p).in_dll(_libc, "environ")
    number = 0
    while (address := entries[number]) is not None:
        entry = ctypes.string_at(address)
        if entry.startswith(f"{name}=".encode()):
            ctypes.memset(address, ord("-"), len(entry))
        number += 1


def become_subreaper() -> bool:
    """Have orphaned descendants become children of this process. False where the kernel refuses.

    Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    return bool(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def allow_ptrace_by(pid: int) -> None:
    """Let a process and its descendants trace this one where Yama would let ancestors alone. Nothing without Yama.

    It outlives exec, and is not inherited by children.

    Source: prctl(2), PR_SET_PTRACER; Linux, Documentation/admin-guide/LSM/Yama.rst.
    """
    _prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def set_name(name: str) -> None:
    """Name this process in ``ps`` and ``top`` (at most 15 bytes are kept)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer), 0, 0, 0)


def keep_freed_memory(size_bytes: int) -> None:
    """Have malloc keep freed memory up to this size instead of giving it back at every chunk of output.

    Giving it back means page faults for the next chunk, which cost more than all the rest of the output path.

    Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD. Does nothing where the C library has no mallopt.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, size_bytes)
        mallopt(_M_TRIM_THRESHOLD, size_bytes)
