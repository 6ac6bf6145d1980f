r"""Colours that a rank leaves set at the end of a line. Pure.

On a console that many ranks share they would colour the lines of other ranks, and in the end the user's shell. So each
line ends its own colours, and the next line of the same stream begins with those that were still set.
"""

from __future__ import annotations

import re

from saferun.console.screen_row import Style

_COLORS = re.compile(rb"\x1b\[([0-9;:]*)m")
_RESET = b"\x1b[0m"
_RESETS = frozenset({b"", b"0"})
# Of the sequences before the rest of a line, so many decide over its colours at most.
_MOST_SEQUENCES = 64
# UTF-8: all bytes of a character but its first.
_LATER_BYTES = bytes(range(0x80, 0xC0))


class OpenColors:
    """What is set in one stream at the end of its last line."""

    def __init__(self) -> None:
        self._style = Style()

    @property
    def is_plain(self) -> bool:
        """Whether nothing is set."""
        return self._style.is_plain

    @property
    def opening(self) -> bytes:
        """Sets it again."""
        return self._style.text.encode()

    def closed(self, lines: bytes, prefix: bytes) -> bytes:
        """Whole lines that begin with the prefix, each with its colours and their end."""
        return b"".join(self._line(line, prefix) for line in lines.splitlines(keepends=True))

    def _line(self, line: bytes, prefix: bytes) -> bytes:
        text = line.removeprefix(prefix)
        content = text.rstrip(b"\r\n")
        opening = self.opening
        for found in _COLORS.finditer(content):
            self._style = self._style.changed(found[1].decode())
        closing = _RESET if not self.is_plain else b""
        return line[: len(line) - len(text)] + opening + content + closing + text[len(content) :]


def rest_of(line: bytes, start: int) -> bytes:
    """What follows in a line from an offset on, in its colours; no character and no colour sequence is cut in two."""
    before: list[bytes] = []
    at = line.rfind(b"\x1b[", 0, start + 1)
    while at >= 0 and len(before) < _MOST_SEQUENCES:
        found = _COLORS.match(line, at)
        if found is not None:
            start = max(start, found.end())
            before.append(found[0])
            if found[1] in _RESETS:
                break
        at = line.rfind(b"\x1b[", 0, at)
    rest = line[start:]
    return b"".join(reversed(before)) + (rest.lstrip(_LATER_BYTES) if start else rest)
