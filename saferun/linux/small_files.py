"""Reading small system files, up to a limit; a file that cannot be read counts as empty. Nothing here raises.

``unshare --pid`` without ``--mount-proc``, and ``bwrap --unshare-pid`` without ``--proc``, leave the /proc of another
PID namespace: there /proc/17 is another process than the one that kill(17) signals. It counts as not mounted, but for
/proc/self, which is right.

Source: pid_namespaces(7), "/proc and PID namespaces".
"""

from __future__ import annotations

import os
import stat

_MOST_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16
_has_own_processes: bool | None = None


def has_own_processes() -> bool:
    """Whether /proc has the processes of this PID namespace, by the numbers that they have here."""
    global _has_own_processes  # noqa: PLW0603 - asked once; a fork of this process is in the same namespace
    if _has_own_processes is None:
        _has_own_processes = read_link("/proc/self") == str(os.getpid())
    return _has_own_processes


def own_directory() -> str:
    """The directory of this process in /proc, as any process reaches it that has the same /proc."""
    return f"/proc/{read_link('/proc/self') or os.getpid()}"


def _is_hidden(path: str) -> bool:
    return path.startswith("/proc/") and path[6:7].isdigit() and not has_own_processes()


def read_bytes(path: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """A file's content up to a limit; empty if it cannot be read. Blocks as long as the file system does."""
    pieces: list[bytes] = []
    if _is_hidden(path):
        return b""
    try:
        with open(path, "rb", buffering=0) as file:
            # The kernel returns some files in parts.
            while most_bytes > 0 and (piece := file.read(min(most_bytes, _PIECE_BYTES))):
                pieces.append(piece)
                most_bytes -= len(piece)
    except OSError:
        pass
    return b"".join(pieces)


def read_at_once(path: str, most_bytes: int, *, follow: bool = False) -> bytes:
    """A regular file's content, up to a limit; empty if it is missing, no such file, or a link without ``follow``.

    Whatever stands in its place, like a named pipe without a writer, is not waited for.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except OSError:
        return b""
    try:
        return os.read(descriptor, most_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def read_text(path: str, most_bytes: int = _MOST_BYTES) -> str:
    """A file's content as text."""
    return read_bytes(path, most_bytes).decode(errors="replace")


def read_line(path: str) -> str:
    """The first line of a file, stripped."""
    return read_text(path, 4096).partition("\n")[0].strip()


def read_pairs(path: str) -> dict[str, str]:
    """A file of lines ``Name: value``, as /proc/PID/status is."""
    pairs = (line.partition(":") for line in read_text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def list_directory(path: str) -> list[str]:
    """The names in a directory, sorted; none if it cannot be read."""
    try:
        return [] if _is_hidden(path) else sorted(os.listdir(path))
    except OSError:
        return []


def read_link(path: str) -> str:
    """The target of a link; empty if it cannot be read."""
    try:
        return "" if _is_hidden(path) else os.readlink(path)
    except OSError:
        return ""


def modified_ns(path: str) -> int:
    """When a file was modified last, in nanoseconds since the epoch; 0: there is none, or the path is empty."""
    if not path:
        return 0
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
