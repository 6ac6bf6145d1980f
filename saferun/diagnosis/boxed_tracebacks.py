"""Tracebacks that rich has drawn into boxes, with the message below, which it breaks at the terminal's width. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.message_end import has_one_line, is_after_message, is_logged
from saferun.diagnosis.tracebacks import EXCEPTION, LONGEST_LINE, Block, PythonError, clean_lines
from saferun.evidence.job_evidence import Frame
from saferun.text.wording import CONTEXT, DIRECT

BOX_END = "╰─"
_TOP = LazyPattern(r"\s{0,8}╭─{1,400} Traceback \(most recent call last\) ─{1,400}╮$")
_FRAME = LazyPattern(r"\s{0,8}│ ([^\s│][^│]{0,400}):(\d{1,9})(?: in ([\w.<>]{1,200}))? {1,400}│$")
_MOST_LINES, _MOST_MESSAGE_LINES = 2_000, 60
_MOST_FRAMES = 400


def find_boxed_error(lines: Sequence[str]) -> PythonError | None:
    """The last traceback in a box, with those that it follows from.

    Args:
        lines: the last lines of a stream as they were written, oldest first.
    """
    if not any(BOX_END in line for line in lines):
        return None
    clean = clean_lines(lines)
    tops = [index for index, line in enumerate(clean) if _TOP.match(line)]
    chain: list[Block] = []
    for top, limit in pairwise((*tops, len(clean))):
        between = " ".join(clean[chain[-1].end : top]) if chain else ""
        link = "direct" if DIRECT in between else "context" if CONTEXT in between else ""
        block = _block(clean, top, limit, link)
        if block is not None:
            chain = [*chain, block] if link else [block]
    if not chain:
        return None
    start, last = chain[0].start, chain[-1]
    return PythonError(
        tuple(chain),
        lines=tuple(clean[start : last.end]),
        lines_after=len(clean) - last.end + len(last.message) - 1,
        before=clean[start - 1] if start else "",
        last_message=last.message_start,
    )


def _block(clean: Sequence[str], top: int, limit: int, link: str) -> Block | None:
    limit = min(limit, top + _MOST_LINES)
    bottom = next((index for index in range(top, limit) if clean[index].lstrip().startswith(BOX_END)), limit)
    exception = EXCEPTION.match(clean[bottom + 1]) if bottom + 1 < limit else None
    if exception is None:
        return None
    found = (_FRAME.match(line) for line in clean[top:bottom])
    frames = [Frame(match[3] or "", match[1], int(match[2])) for match in found if match is not None]
    message, end = _message(clean, bottom + 1, limit, len(clean[bottom]))
    return Block(exception[1], message, tuple(frames[-_MOST_FRAMES:]), link, top, end)


def _message(clean: Sequence[str], start: int, limit: int, width: int) -> tuple[tuple[str, ...], int]:
    """The lines of a message as they were before they were broken, and where they end.

    A line is the rest of the one above it if its first word had no room there. Of a word that is longer than a line
    each part but the last fills one. A box is never wider than the terminal, but may be narrower.
    """
    message: list[str] = []
    above = ""
    for index in range(start, min(limit, start + _MOST_MESSAGE_LINES)):
        line = clean[index]
        if message and (is_after_message(line) or is_logged(line) or line in {DIRECT, CONTEXT}):
            return tuple(message), index
        is_rest = bool(message and line) and len(above) + 1 + len(line.split(" ", 1)[0]) > width
        if not is_rest and len(message) == 1 and has_one_line(message[0]):
            return tuple(message), index
        if is_rest:
            is_cut = len(above) >= width and " " not in above
            message[-1] = f"{message[-1]}{'' if is_cut else ' '}{line}"[:LONGEST_LINE]
        else:
            message.append(line)
        above = line
        width = max(width, len(line))
    return tuple(message), min(limit, start + _MOST_MESSAGE_LINES)
