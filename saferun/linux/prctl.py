"""The prctl(2) calls that saferun needs, by ctypes, so that no C extension has to be built."""

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


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal, SIGKILL if none is given, when its parent *thread* exits.

    Call it in the child between fork and exec. If the parent has exited already, so does this process.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(127)


def outlive_parent() -> None:
    """Undo ``die_with_parent``.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def hide_environ_entry(name: str) -> None:
    """Overwrite an entry in the environment that other processes see of this one, as programs do to set their title.

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
    """Have orphaned descendants become children of this process. Returns False if the kernel refuses.

    Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    return bool(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def allow_ptrace_by(pid: int) -> None:
    """Let a process and its descendants trace this one if Yama only permits ancestors. No effect without Yama.

    It survives exec, and is not inherited by children.

    Source: prctl(2), PR_SET_PTRACER; Linux, Documentation/admin-guide/LSM/Yama.rst.
    """
    _prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def set_name(name: str) -> None:
    """Name this process in ``ps`` and ``top`` (at most 15 bytes are kept)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer), 0, 0, 0)


def keep_freed_memory(size_bytes: int) -> None:
    """Have malloc keep freed memory up to this size instead of returning it to the kernel at every chunk of output.

    The page faults of the next chunk would cost more than the rest of the output path.

    Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD. No effect if the C library has no mallopt.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, size_bytes)
        mallopt(_M_TRIM_THRESHOLD, size_bytes)
