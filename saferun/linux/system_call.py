"""System calls by number, for Pythons that were built with headers older than the call."""

from __future__ import annotations

import ctypes
import errno
import os

libc = ctypes.CDLL(None, use_errno=True)
# Bound once: looking a symbol up between fork and exec would take the loader's lock.
_syscall = libc.syscall
_syscall.restype = ctypes.c_long

# Calls of Linux 5.1 and later have the same number on all architectures. Source:
# linux/include/uapi/asm-generic/unistd.h.
_EVERYWHERE = {"pidfd_send_signal": 424, "pidfd_open": 434, "close_range": 436}
# Source: arch/*/…/syscall*.tbl of Linux.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "loongarch64": 279, "ppc64le": 360, "s390x": 350}
_MLOCK2 = {"x86_64": 325, "aarch64": 284, "riscv64": 284, "loongarch64": 284, "ppc64le": 378, "s390x": 374}
_MACHINE = os.uname().machine
_NUMBERS = {**_EVERYWHERE, "memfd_create": _MEMFD_CREATE.get(_MACHINE, -1), "mlock2": _MLOCK2.get(_MACHINE, -1)}


def system_call(name: str, *arguments: int | bytes) -> int:
    """Make a system call. Returns what it returns.

    Args:
        name: its name.
        arguments: numbers, or bytes that are passed as the address of a C string.

    Raises:
        OSError: the system call failed; ENOSYS if the kernel or this file lacks it.
    """
    number = _NUMBERS.get(name, -1)
    if number < 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
