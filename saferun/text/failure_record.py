"""The failure record that a rank has written (``saferun.record``): decoded, bounded, and as lines for a report. Pure.

It comes from the rank, so nothing of it is believed: whatever is not as it should be is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from saferun.errors import printable
from saferun.model import JsonObject
from saferun.text.decoding import MALFORMED, loads, number_or, text_or_empty
from saferun.text.redaction import lines_without_keys, redacted_text
from saferun.text.wording import CONTEXT, DIRECT, size_text

__all__ = [
    "LONGEST_BYTES",
    "failure_lines",
    "failure_record_from",
    "is_of",
    "local_text",
    "memory_parts",
    "traceback_lines",
]

LONGEST_BYTES = 256 << 10
"""Twice as long as a rank writes it."""
_DEEPEST = 12
_MOST_ITEMS = 50_000
_LONGEST_LINE = 1000
_LONGEST_NAME = 80
_MOST_SHOWN = 16
_MOST_SIZES = 16
_LARGEST_SIZE = 1 << 50
_MOST_LINKED = 3
_MOST_MESSAGE_LINES = 20
_BETWEEN = {"cause": DIRECT, "context": CONTEXT}
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/lib64/python")
_VERSION = 1


def failure_record_from(content: bytes, *, longest: int = LONGEST_BYTES) -> JsonObject | None:
    """The record; None where it is none, or exceeds a bound."""
    try:
        found = loads(content, longest=longest, deepest=_DEEPEST, most=_MOST_ITEMS)
    except MALFORMED:
        return None
    if not isinstance(found, dict) or found.get("version") != _VERSION or not isinstance(found.get("exceptions"), list):
        return None
    return found


def is_of(record: JsonObject, printed: Sequence[object]) -> bool:
    """Whether the record is of an exception that a traceback has shown.

    Args:
        record: the record.
        printed: the exception's type, and the file and the line of its innermost frame; empty: there is none.
    """
    first = next(iter(record["exceptions"]), None)
    frames = _list(first, "frames") if isinstance(first, dict) else []
    if not isinstance(first, dict) or not frames or not isinstance(frames[-1], dict):
        return False
    kind = text_or_empty(first.get("type"), _LONGEST_LINE).removeprefix("__main__.")
    # Of a long path the record has the end.
    file = text_or_empty(frames[-1].get("file"), _LONGEST_LINE)
    line = frames[-1].get("line")
    return bool(kind and file) and [kind, line] == [*printed[:1], *printed[2:]] and str(printed[1]).endswith(file)


def failure_lines(record: JsonObject) -> tuple[str, ...]:
    """What the locals were where it failed, and how much memory it had: a few lines without secrets.

    First those of the innermost frame of the user's own code, then those of the innermost frame of all.
    """
    try:
        exceptions = [row for row in record["exceptions"] if isinstance(row, dict)]
        frames = [frame for frame in _list(exceptions[0], "frames") if isinstance(frame, dict)] if exceptions else []
        own = [frame for frame in frames if not _is_of_library(frame)]
        picked = own[-1:] + [frame for frame in frames[-1:] if frame not in own[-1:]]
        lines = [line for frame in picked if (line := _frame_line(frame))]
        memory = _memory_line(record)
        found = (*lines, memory) if memory else tuple(lines)
        return tuple(printable(redacted_text(line))[:_LONGEST_LINE] for line in found)
    except MALFORMED:
        return ()


def traceback_lines(record: JsonObject) -> tuple[str, ...]:
    """The exception with its frames, and those it was raised from, as Python prints them without the source's lines.

    Secrets are left out.
    """
    try:
        lines: list[str] = []
        for row, link in _chain(record["exceptions"]):
            lines[:0] = [*_printed(row), *(["", _BETWEEN[link], ""] if link else [])]
        return tuple(printable(redacted_text(line))[:_LONGEST_LINE] for line in lines_without_keys(lines))
    except MALFORMED:
        return ()


def _chain(rows: list[Any]) -> Iterator[tuple[JsonObject, str]]:
    """The exception, and what it comes from: each with how the row ahead of it follows from it; empty for the first."""
    at, link = 0, ""
    for _ in range(_MOST_LINKED):
        if not (0 <= at < len(rows) and isinstance(rows[at], dict)):
            return
        yield rows[at], link
        following = (
            (number, str(row["link"]))
            for number, row in enumerate(rows)
            if isinstance(row, dict) and number > at and row.get("of") == at and row.get("link") in _BETWEEN
        )
        at, link = next(following, (-1, ""))


def _printed(row: JsonObject) -> Iterator[str]:
    yield "Traceback (most recent call last):"
    for frame in _list(row, "frames"):
        if isinstance(frame, dict):
            file, line = text_or_empty(frame.get("file"), _LONGEST_LINE), number_or(0, frame.get("line"))
            # Of a class or a function within another one, Python prints the name alone.
            name = text_or_empty(frame.get("function"), _LONGEST_LINE).rpartition(".")[2]
            yield f'  File "{file}", line {line}, in {name}'
    kind = text_or_empty(row.get("type"), _LONGEST_LINE).removeprefix("__main__.")
    message = text_or_empty(row.get("message"), _LONGEST_LINE * _MOST_MESSAGE_LINES)
    yield from f"{kind}: {message}".removesuffix(": ").splitlines()[:_MOST_MESSAGE_LINES]


def _list(row: JsonObject, name: str) -> list[Any]:
    found = row.get(name)
    return found if isinstance(found, list) else []


def _is_of_library(frame: JsonObject) -> bool:
    path = text_or_empty(frame.get("file"), _LONGEST_LINE)
    return path.startswith("<") or any(part in path for part in _LIBRARIES)


def _frame_line(frame: JsonObject) -> str:
    rows = [row for row in _list(frame, "locals") if isinstance(row, dict)]
    # Tensors say most, and a loop over the batch has many numbers.
    rows.sort(key=lambda row: 0 if "shape" in row else 1 if "items" in row else 2)
    texts = [text for row in rows if (text := _named(row))]
    if not texts:
        return ""
    left = len(texts) - _MOST_SHOWN
    shown = "; ".join(texts[:_MOST_SHOWN]) + (f"; {left} more" if left > 0 else "")
    file = text_or_empty(frame.get("file"), _LONGEST_LINE).rpartition("/")[2]
    function = text_or_empty(frame.get("function"), _LONGEST_NAME)
    return f"locals of {function} ({file}:{number_or(0, frame.get('line'))}): {shown}"


def _named(row: JsonObject) -> str:
    """``x float32 [8, 512] cpu``, ``n = 3``; empty where nothing is known but the type."""
    name = text_or_empty(row.get("name"), _LONGEST_LINE)[:_LONGEST_NAME]
    if content := _content(row):
        return f"{name} {content}"
    value = text_or_empty(row.get("value"), _LONGEST_NAME)
    return f"{name} = {value}" if value else ""


def _content(row: JsonObject) -> str:
    """Of a tensor, and of what holds some."""
    if "shape" in row:
        return _tensor(row)
    items = [item for item in _list(row, "items") if isinstance(item, dict)][:_MOST_SIZES]
    if not items:
        return ""
    parts = ", ".join(_named(item) if "name" in item else _tensor(item) for item in items)
    return f"{{{parts}}}" if "name" in items[0] else f"[{parts}]"


def local_text(row: JsonObject) -> str:
    """What is known of a local: a tensor, a number, else its type and its length."""
    found = _content(row) or text_or_empty(row.get("value"), _LONGEST_NAME)
    if found:
        return found
    length = number_or(-1, row.get("length"))
    kind = text_or_empty(row.get("type"), _LONGEST_NAME) or "?"
    return f"{kind} of length {length}" if length >= 0 else kind


def _tensor(row: JsonObject) -> str:
    parts = [text_or_empty(row.get("dtype"), _LONGEST_NAME), _sizes(row, "shape")]
    parts.append(text_or_empty(row.get("device"), _LONGEST_NAME))
    text = " ".join(part for part in parts if part)
    if "local_shape" in row:
        text += f", of which this rank has {_sizes(row, 'local_shape')}"
    return f"{text}, not finite" if row.get("finite") is False else text


def _sizes(row: JsonObject, name: str) -> str:
    sizes = (number_or(-1, size, -1) for size in _list(row, name)[:_MOST_SIZES])
    return f"[{', '.join('?' if size < 0 else str(size) for size in sizes)}]"


def _memory_line(record: JsonObject) -> str:
    parts = list(memory_parts(record))
    return f"memory then: {'; '.join(parts)}" if parts else ""


def memory_parts(record: JsonObject) -> Iterator[str]:
    """How much memory the process had, and torch on the GPU; nothing where that is not known."""
    memory = record.get("memory")
    if isinstance(memory, dict) and (size := _size(memory, "rss_bytes")):
        yield f"process {size} (peak {_size(memory, 'peak_rss_bytes') or '?'})"
    for gpu in [one for one in _list(record, "gpus") if isinstance(one, dict)][:_MOST_SIZES]:
        device = number_or(-1, gpu.get("device"))
        allocated, reserved = _size(gpu, "allocated_bytes") or "0 B", _size(gpu, "reserved_bytes") or "0 B"
        peak = _size(gpu, "peak_allocated_bytes") or "?"
        yield f"torch on GPU {device} {allocated} (peak {peak}), with its cache {reserved}"


def _size(row: JsonObject, name: str) -> str:
    found = number_or(-1, row.get(name), 0, _LARGEST_SIZE)
    return size_text(found) if found > 0 else ""
