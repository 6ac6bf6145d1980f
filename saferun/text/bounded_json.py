"""Untrusted values as JSON of bounded size, on single lines, without secrets. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from saferun.model import JsonObject
from saferun.text.redaction import lines_without_keys, redacted_arguments, redacted_text
from saferun.text.token_shapes import Shape

if TYPE_CHECKING:
    from saferun.evidence.job_evidence import Frame

_LONGEST_TEXT = 1000
_SHORTEST_TEXT = 100
_MOST = 20_000
_MOST_FRAMES = 200
_MOST_ARGUMENTS = 1000
# An upper bound of what an object takes besides its texts, of a name and its indentation, and of a number in a list.
_OBJECT_BYTES = 400
_FIELD_BYTES = 40
_ITEM_BYTES = 10
# Levels around an object, each with one more space in each of its lines.
_DEEPEST = 12
_LARGEST_INTEGER = (1 << 63) - 1

_T = TypeVar("_T")


class Page:
    """Turns values into JSON of bounded size, and records what had to be cut.

    The count is an upper bound of the size of the JSON, indented by one.

    Args:
        size_bytes: the maximum size.
    """

    def __init__(self, size_bytes: int) -> None:
        self.used_bytes = _OBJECT_BYTES * 4
        self.cut: set[str] = set()
        self._size_bytes = size_bytes
        # Names are short; a text that is not may not take more than a small part of everything.
        self._longest = max(min(_LONGEST_TEXT, size_bytes // 400), _SHORTEST_TEXT)

    def text(self, value: str) -> str:
        """An untrusted text, on one line."""
        line = redacted_line(value, self._longest)
        self.used_bytes += len(json.dumps(line)) + _FIELD_BYTES
        return line

    def command(self, value: str) -> str:
        """A command line that is one string."""
        line = redacted_command_line(value, self._longest)
        self.used_bytes += len(json.dumps(line)) + _FIELD_BYTES
        return line

    def first(self, name: str, values: Sequence[_T], convert: Callable[[_T], Any], most: int = _MOST) -> list[Any]:
        """The first values, as many as fit into half of the remaining room: more fields follow."""
        converted: list[Any] = []
        self.used_bytes += _FIELD_BYTES
        floor = (self._size_bytes - self.used_bytes) // 2
        for value in values[:most]:
            if self._size_bytes - self.used_bytes < floor + _FIELD_BYTES:
                break
            converted.append(convert(value))
        if len(converted) < len(values):
            self.cut.add(name)
        return converted

    def objects(self, name: str, values: Sequence[_T], convert: Callable[[_T], JsonObject]) -> list[Any]:
        """The same for values that become objects."""

        def counted(value: _T) -> JsonObject:
            before = self.used_bytes
            self.used_bytes += _OBJECT_BYTES
            content = convert(value)
            # Most take less than what has been counted for their fields.
            self.used_bytes = min(self.used_bytes, before + _size_bytes(content))
            return content

        return self.first(name, values, counted)

    def value(self, name: str, value: Any, names: Mapping[str, str] = MappingProxyType({})) -> JsonObject:  # noqa: ANN401 - a named tuple
        """The fields of a value as an object: each is converted by its type.

        Args:
            name: of the list that is cut where there is no room.
            value: a named tuple whose fields are texts, numbers, truth values, ranks, lines, or further such values.
            names: what fields are called where it is not by their own names; empty: they are left out.
        """
        fields = ((names.get(field, field), item) for field, item in value._asdict().items())
        return {field: self._converted(name, item) for field, item in fields if field}

    def values(self, name: str, values: Sequence[Any], names: Mapping[str, str] = MappingProxyType({})) -> list[Any]:
        """The first values, each as such an object."""
        return self.objects(name, values, lambda value: self.value(name, value, names))

    def _converted(self, name: str, value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                return self.value(name, value)
            return self.ranks(name, value) if all(type(item) is int for item in value) else self.lines(name, value)
        if value is None or isinstance(value, bool):
            return value
        return count(value) if isinstance(value, int) else number(value)

    def lines(self, name: str, values: Sequence[str]) -> list[Any]:
        """The last lines."""
        return self.first(name, lines_without_keys(values)[::-1], self.text)[::-1]

    def ranks(self, name: str, values: Iterable[int]) -> list[Any]:
        """Ranks in order."""

        def counted(rank: int) -> int:
            self.used_bytes += len(str(rank)) + _ITEM_BYTES
            return rank

        return self.first(name, sorted({count(value) for value in values}), counted)

    def frames(self, name: str, frames: Sequence[Frame]) -> tuple[list[Any], int]:
        """Calls, outermost first, without the middle ones if there are too many; and how many were left out."""
        is_long = len(frames) > _MOST_FRAMES
        inner = frames[_MOST_FRAMES // 4 - _MOST_FRAMES :] if is_long else frames
        tail = self.first(name, inner[::-1], self._frame)[::-1]
        head = self.first(name, frames[: _MOST_FRAMES // 4], self._frame) if is_long else []
        left_out = len(frames) - len(head) - len(tail)
        if left_out:
            self.cut.add(name)
        return [*head, *tail], left_out

    def _frame(self, frame: Frame) -> JsonObject:
        self.used_bytes += _OBJECT_BYTES // 4
        return {
            "function": self.text(frame.function),
            "file": self.text(frame.file),
            "line": count(frame.line),
            "native": bool(frame.native),
        }


def _size_bytes(content: JsonObject) -> int:
    """How large it is in a list as it is written, at most."""
    written = json.dumps(content, indent=1)
    return len(written) + _DEEPEST * (written.count("\n") + 1) + 2


def shown(text: str, limit: int = 300) -> str:
    """An untrusted text as one line without control characters and secrets, at most ``limit`` characters long.

    Indentation is kept, as tracebacks need it.
    """
    # A secret may extend across the limit: redact first.
    return _cut(redacted_text(_beginning(text, 2 * limit)), limit)


def redacted_line(text: str, limit: int = 1000) -> str:
    """The same with a higher limit."""
    return shown(text, limit)


def redacted_command(argv: Sequence[str]) -> list[str]:
    """A command line without the values of options that hold secrets."""
    return [
        _cut(one, 2000) for one in redacted_arguments(_beginning(argument, 4000) for argument in argv[:_MOST_ARGUMENTS])
    ]


def redacted_command_line(command: str, limit: int = 1000) -> str:
    """The same for a command line that is one string."""
    [whole] = lines_without_keys([_beginning(command, 2 * limit)])
    arguments = whole.split(" ")[:_MOST_ARGUMENTS]
    split = _OPTION_LINES().split
    pairs = [
        (split(before), split(after)) for before, after in zip(arguments, redacted_arguments(arguments), strict=True)
    ]
    # What extended over several lines, as in quotes, was redacted as a whole; else its lines are arguments, too.
    pieces = [after if len(after) == len(before) else before for before, after in pairs]
    redacted = iter(redacted_arguments(chain.from_iterable(pieces)))
    found: list[str] = []
    for each, (_, after) in zip(pieces, pairs, strict=True):
        of_lines = [*islice(redacted, len(each))]
        found.append("\v".join(of_lines if each is after else after))
    return _cut(" ".join(found), limit)


# Line ends as white space, which no unquoted value contains; a quoted value may: it is redacted as a whole.
_LINE_ENDS = str.maketrans("\r\n", "\v\v")
_OPTION_LINES = Shape(r"\v(?=--)")


def _beginning(text: str, limit: int) -> str:
    """So much of a text, in one line, to be redacted."""
    line = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return line.translate(_LINE_ENDS)


def _cut(text: str, limit: int) -> str:
    line = text[: limit + 1].expandtabs()
    if not line.isprintable():
        line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def integer(value: int) -> int:
    """An integer that every JSON parser can represent."""
    return max(-_LARGEST_INTEGER, min(int(value), _LARGEST_INTEGER))


def count(value: int) -> int:
    """The same, but not negative."""
    return max(integer(value), 0)


def number(value: float | None) -> float | None:
    """A number that JSON can represent; None for infinity and NaN."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 6)
