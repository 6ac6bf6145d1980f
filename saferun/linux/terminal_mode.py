"""The mode of the terminal in which a rank has the keyboard: keys come at once and unchanged. Source: termios(3)."""

from __future__ import annotations

import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INPUT, OUTPUT, LOCAL, CONTROL = 0, 1, 3, 6
"""Indices of the attributes."""
COOKED = termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG
"""What a terminal does by itself: it echoes, edits lines, and makes signals of keys."""
_CHANGED = termios.BRKINT | termios.ICRNL | termios.IGNCR | termios.INLCR | termios.ISTRIP | termios.IXON


def raw_mode(mode: list[Any]) -> list[Any]:
    """A terminal's attributes with keys that come unchanged. What is written to it is shown as before."""
    raw = list(mode)
    raw[INPUT] &= ~_CHANGED
    raw[LOCAL] &= ~COOKED
    control = list(raw[CONTROL])
    control[termios.VMIN], control[termios.VTIME] = 1, 0
    raw[CONTROL] = control
    return raw


class TerminalMode:
    """The mode of a terminal, for whoever outlives a process that may change it. ``fd``: the terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            self._before: list[Any] | None = termios.tcgetattr(fd)
        except (OSError, termios.error):
            self._before = None

    def restore(self) -> None:
        """Leave the terminal as it was, if a rank still has its keyboard."""
        if self._before is None:
            return
        try:
            if termios.tcgetattr(self._fd) == raw_mode(self._before):
                termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
        except (OSError, termios.error):
            pass  # it is gone
