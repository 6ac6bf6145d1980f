"""Reading small system files, up to a limit; a file that cannot be read counts as empty. Nothing here raises."""

from __future__ import annotations

import os
import stat

_MOST_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16


def read_bytes(path: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """A file's content up to a limit; empty if it cannot be read. Blocks as long as the file system does."""
    pieces: list[bytes] = []
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
        return sorted(os.listdir(path))
    except OSError:
        return []


def read_link(path: str) -> str:
    """The target of a link; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
