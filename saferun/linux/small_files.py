"""Small files of the system, read whole up to a limit; one that cannot be read is empty. Nothing here raises."""

from __future__ import annotations

import os

_MOST_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16


def read_bytes(path: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """The beginning of a file; empty where it cannot be read. It waits for whatever the file system waits for."""
    pieces: list[bytes] = []
    try:
        with open(path, "rb", buffering=0) as file:
            # The kernel gives some of its files in pieces.
            while most_bytes > 0 and (piece := file.read(min(most_bytes, _PIECE_BYTES))):
                pieces.append(piece)
                most_bytes -= len(piece)
    except OSError:
        pass
    return b"".join(pieces)


def read_text(path: str, most_bytes: int = _MOST_BYTES) -> str:
    """The same as text."""
    return read_bytes(path, most_bytes).decode(errors="replace")


def read_line(path: str) -> str:
    """The first line of a file, without the blanks around it."""
    return read_text(path, 4096).partition("\n")[0].strip()


def read_pairs(path: str) -> dict[str, str]:
    """A file of lines ``Name: value``, as /proc/PID/status is."""
    pairs = (line.partition(":") for line in read_text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def list_directory(path: str) -> list[str]:
    """The names in a directory, sorted; none where it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def read_link(path: str) -> str:
    """What a link leads to; empty where it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
