"""saferun's own messages on a terminal: wrapped between words, and coloured. Pure."""

from __future__ import annotations

_RED, _YELLOW, _CYAN, _BOLD = "31", "33", "36", "1"
_NAME, _HINT, _WARNING, _CULPRIT = "saferun: ", "hint: ", "warning: ", "  > "
# What the sentence of a suspected hang has.
_SUSPECTED = ("the job may hang", "it may be a long step")
# Quotations, trees and tables keep their columns.
_FIXED = ("  | ", "│", "├", "└")
_LEAST_COLUMNS = 40
_INDENT = 2


def styled(text: str, *, columns: int, is_colored: bool) -> str:
    """A message as a terminal shows it.

    Args:
        text: its lines.
        columns: the width of the terminal.
        is_colored: whether colours are wanted.
    """
    lines = text.split("\n")
    is_report = any(line.startswith("  ") for line in lines[1:])
    shown = []
    for number, line in enumerate(lines):
        rows = _wrapped(line, columns)
        color = _color(line, is_headline=is_report and number == 0) if is_colored else ""
        shown += [_painted(row, color, is_first=at == 0) if color else row for at, row in enumerate(rows)]
    return "\n".join(shown)


def _color(line: str, *, is_headline: bool) -> str:
    if line.startswith(_HINT):
        return _CYAN
    if line.startswith(_CULPRIT):
        return _BOLD
    if not line.startswith(_NAME):
        return ""
    if line.startswith(_NAME + _WARNING) or any(part in line for part in _SUSPECTED):
        return _YELLOW
    return _RED if is_headline else ""


def _painted(row: str, color: str, *, is_first: bool) -> str:
    """A row in a colour; saferun's name keeps its own."""
    name = _NAME if is_first and row.startswith(_NAME) else ""
    text = row[len(name) :]
    indent = text[: len(text) - len(text.lstrip(" "))]
    return f"{name}{indent}\x1b[{color}m{text[len(indent) :]}\x1b[0m"


def _wrapped(line: str, columns: int) -> list[str]:
    """The line in rows of at most so many columns; a word that is longer stays whole."""
    content = line.strip(" ")
    if len(line) <= columns or columns < _LEAST_COLUMNS or any(mark in line for mark in _FIXED) or "  " in content:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" ")) + _INDENT)
    rows = [""]
    for word in line.rstrip(" ").split(" "):
        if len(rows[-1]) + len(word) > columns and rows[-1].strip(" "):
            rows[-1] = rows[-1].rstrip(" ")
            rows.append(indent)
        rows[-1] += f"{word} "
    rows[-1] = rows[-1].rstrip(" ")
    return rows
