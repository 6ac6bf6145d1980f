"""The last calls of the current thread, for its failure record: read from its ring (``saferun_calls.py``).

The hook holds it where calls are recorded. It uses ``os``, ``sys`` and modules in C only. It reads the file
in memory, as ``captures/call_rings.py`` does for the report.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAGIC = int.from_bytes(b"SRCALLS1", sys.byteorder)
_PID, _NAMES_SIZE = 1, 4  # numbers in the first page
_THREADS, _THREAD_NUMBERS, _MOST_THREADS = 512, 8, 64
_NAMES, _RINGS, _ENTRIES = 8192, 131072, 256
_MOST, _LONGEST_NAME = 32, 100
_KINDS = ("call", "return", "raise", "line")


def last_calls(prefix: str) -> "list[dict[str, Any]]":
    """The newest calls of this thread, oldest first; none where it has recorded none.

    Args:
        prefix: what the paths of the rank's files begin with.

    Raises:
        OSError: there is no such file: calls are not recorded, or this is a child of the process that records them.
    """
    is_known = "_thread" in sys.modules, "time" in sys.modules
    thread, clock = __import__("_thread").get_native_id(), __import__("time").monotonic_ns()
    for name, known in zip(("_thread", "time"), is_known, strict=True):
        if not known:
            del sys.modules[name]
    fd = os.open(f"{prefix}.{os.getpid()}.calls", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        head = memoryview(os.pread(fd, _NAMES, 0)).cast("Q")
        heads = [_THREADS + slot * _THREAD_NUMBERS for slot in range(_MOST_THREADS)]
        of_thread = [at for at in heads if head[at] == thread]
        if head[0] != _MAGIC or head[_PID] != os.getpid() or not of_thread:
            return []
        found = max(of_thread, key=lambda at: head[at + 3])  # a number of a thread may have been another one's before
        slot, count = heads.index(found), head[found + 1]
        ring = memoryview(os.pread(fd, _ENTRIES * 16, _RINGS + slot * _ENTRIES * 16)).cast("Q")
        names = os.pread(fd, min(head[_NAMES_SIZE], _RINGS - _NAMES), _NAMES)
    finally:
        os.close(fd)
    rows = []
    for number in range(max(count - _MOST, 0), count):
        time, word = ring[number % _ENTRIES * 2], ring[number % _ENTRIES * 2 + 1]
        kind, start = word & 15, (word >> 4 & 0xFFFFF) * 8
        if 0 < kind <= len(_KINDS) and start:
            function, line, file = _name(names, start)
            row = {"before_s": round((clock - time) / 1e9, 6), "kind": _KINDS[kind - 1], "function": function}
            line = word >> 24 if _KINDS[kind - 1] == "line" else line
            rows.append({**row, "file": _name(names, file * 8)[0], "line": line})
    return rows


def _name(names: bytes, start: int) -> "tuple[str, int, int]":
    """A name, its line and the index of the name of its file."""
    size, line, file = (int.from_bytes(names[at : at + 4], sys.byteorder) for at in range(start, start + 12, 4))
    return names[start + 12 : start + 12 + size].decode("utf-8", "replace")[-_LONGEST_NAME:], line, file
