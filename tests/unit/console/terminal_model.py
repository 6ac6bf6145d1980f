"""A small terminal: enough of one to see what a person would see."""

from __future__ import annotations

import re

_CONTROL = re.compile(rb"\x1b\[([0-9;?]*)([A-Za-z])")


class Terminal:
    """Takes bytes and knows the screen, with everything that has scrolled off its top.

    Args:
        columns: the width.
        rows: the height.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self.wraps = True
        self._lines: list[list[str]] = [[]]  # scrolled off and shown alike
        self._row = 0  # index into _lines
        self._column = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        data = self._rest + data
        i = 0
        while i < len(data):
            if data[i : i + 1] == b"\x1b":
                match = _CONTROL.match(data, i)
                if match is None:
                    break  # the rest of the sequence is still to come
                self._control(match[1].decode(), match[2].decode())
                i = match.end()
                continue
            self._put(chr(data[i]))
            i += 1
        self._rest = data[i:]

    @property
    def lines(self) -> list[str]:
        """Everything from the first line on, blank lines at the end left out."""
        lines = ["".join(line).rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def at_line_start(self) -> bool:
        return self._column == 0

    @property
    def _top(self) -> int:
        return max(0, len(self._lines) - self.rows)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._down()
        else:
            assert char.isprintable(), f"{char!r} reached the terminal"
            if self._column == self.columns:
                if self.wraps:
                    self._column = 0
                    self._down()
                else:
                    self._column -= 1
            line = self._lines[self._row]
            line.extend(" " * (self._column + 1 - len(line)))
            line[self._column] = char
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])

    def _control(self, arguments: str, letter: str) -> None:
        match letter:
            case "A":
                self._row = max(self._top, self._row - int(arguments or 1))
            case "J" if arguments in {"", "0"}:
                del self._lines[self._row][self._column :]
                # The rows stay part of the screen, empty.
                for line in self._lines[self._row + 1 :]:
                    line.clear()
            case "h" | "l" if arguments == "?7":
                self.wraps = letter == "h"
            case "m":
                pass
            case _:
                raise AssertionError(f"an escape sequence that this terminal does not know: {arguments}{letter}")
