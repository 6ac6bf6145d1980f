"""Locks the code that this process runs in memory; otherwise the kernel may drop pages and read them again from disk.

Their file system may hang by then, and the process with it. Pages that are in memory are locked at once, others when
they are first used; none is read for it, so it takes no memory.

Sources: mlock2(2), MLOCK_ONFAULT; proc_pid_maps(5). Without privileges RLIMIT_MEMLOCK, 8 MiB as a rule, bounds it.
"""

from __future__ import annotations

from saferun.errors import suppress
from saferun.linux.system_call import system_call

_ONFAULT = 1
# Mappings that are not of files on disk.
_NO_FILES = ("/memfd:", "/dev/", "/SYSV")


def lock_code() -> int:
    """Lock the program, its libraries and their constants, as far as the limit allows.

    Returns:
        How much of the address space has been locked, in bytes; 0 if that is not permitted.
    """
    locked_bytes = 0
    for start, end in _mappings():
        with suppress(OSError):
            system_call("mlock2", start, end - start, _ONFAULT)
            locked_bytes += end - start
    return locked_bytes


def _mappings() -> list[tuple[int, int]]:
    """The mappings of files with code: code first, as the limit may not suffice for all."""
    # 7f0a2b400000-7f0a2bd31000 r-xp 00000000 08:01 1234                       /usr/lib/libpython3.12.so.1.0
    code, others, programs = [], [], set()
    try:
        with open("/proc/self/maps", "rb", buffering=0) as file:
            lines = file.readall().decode(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        addresses, mode, _, _, _, *path = line.split(None, 5)
        if not path or not path[0].startswith("/") or path[0].startswith(_NO_FILES):
            continue
        start, end = (int(number, 16) for number in addresses.split("-"))
        if "x" in mode:
            code.append((start, end))
            programs.add(path[0])
        elif "r" in mode:
            others.append((path[0], start, end))
    return code + [(start, end) for path, start, end in others if path in programs]
