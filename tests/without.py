"""Runs a command without what some kernels, containers and Pythons lack.

    python tests/without.py kernel COMMAND...         # pidfds, memfd_create, close_range, mlock2: as on old kernels
    python tests/without.py python COMMAND...         # os.pidfd_open and the like: as in Pythons of conda and uv
    python tests/without.py kernel,prctl COMMAND...   # and no orphans handed over, no death with the parent

The kernel's part is a seccomp filter, inherited by everything that the command starts: ENOSYS for the system calls.
With ``kernel``, closing a descriptor beyond 65535, which nothing here ever opens, ends the process: that is a loop over
all numbers up to the limit. The Python's part is a ``sitecustomize`` in PYTHONPATH: ``tests/lacking``.

Source: seccomp(2); linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER, _RETURN = 0x20, 0x15, 0x25, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
# Offsets in struct seccomp_data; the lower half of the first argument on little-endian machines.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLOSE = {"x86_64": 3, "aarch64": 57}
_PRCTL = {"x86_64": 157, "aarch64": 167}
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
_MLOCK2 = {"x86_64": 325, "aarch64": 284}
# The same everywhere.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _CLOSE_RANGE, _PIDFD_GETFD = 424, 434, 436, 438
_NEWER = (_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _CLOSE_RANGE, _PIDFD_GETFD)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Beyond the latter: negative numbers, and the one with which tmux closes what is no descriptor.
_HIGHEST_DESCRIPTOR, _HIGHEST_LOOPED = 65535, 0x7FFFFFFE


def _filter(features: Sequence[str]) -> bytes:
    machine = platform.machine()
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if "kernel" in features:
        for number in (*_NEWER, _MEMFD_CREATE[machine], _MLOCK2[machine]):
            steps += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
        steps += [
            (_JUMP_IF_EQUAL, 0, 5, _CLOSE[machine]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_JUMP_IF_GREATER, 2, 0, _HIGHEST_LOOPED),
            (_JUMP_IF_GREATER, 0, 1, _HIGHEST_DESCRIPTOR),
            (_RETURN, 0, 0, _KILL_PROCESS),
            (_RETURN, 0, 0, _ALLOW),
        ]
    if "limits" in features:
        steps += [(_JUMP_IF_EQUAL, 0, 1, _PRLIMIT64[machine]), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    if "prctl" in features:
        steps += [
            (_JUMP_IF_EQUAL, 0, 4, _PRCTL[machine]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_JUMP_IF_EQUAL, 1, 0, _PR_SET_PDEATHSIG),
            (_JUMP_IF_EQUAL, 0, 1, _PR_SET_CHILD_SUBREAPER),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def install(features: Sequence[str]) -> None:
    """Take these away from this process, and from all that it starts.

    Raises:
        OSError: the kernel refuses.
    """
    if "python" in features:
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lacking")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    if not {"kernel", "limits", "prctl"}.intersection(features):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    program = ctypes.create_string_buffer(_filter(features))
    description = ctypes.create_string_buffer(
        struct.pack("=HxxxxxxQ", (len(program) - 1) // 8, ctypes.addressof(program))
    )
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if os.geteuid() != 0:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(description), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def without(*features: str) -> list[str]:
    """A command before another one, which then runs without these."""
    return [sys.executable, os.path.abspath(__file__), ",".join(features)]


def lacks_pidfds() -> bool:
    """Whether they are missing here already: on an old kernel, or below ``kernel``."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(_PIDFD_OPEN, os.getpid(), 0)
    if fd >= 0:
        os.close(fd)
    return fd < 0 and ctypes.get_errno() == errno.ENOSYS


if __name__ == "__main__":
    install(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
