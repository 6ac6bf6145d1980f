"""Private keys in texts, whole and cut off (PEM, https://www.rfc-editor.org/rfc/rfc7468). Pure.

They are the only secrets that are known over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.text.token_shapes import Shape

MARK = "PRIVATE KEY"
"""Every private key, and either half of one, holds this."""

_BEGINS = Shape(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_ENDS = Shape(r"-----END[A-Z0-9 ]{0,60}-----")
_ITS_END = Shape(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
# Of a key that is cut off, its rows of base64 are redacted, the last of which may be shorter; line ends may be
# escaped.
_CUT_OFF = Shape(
    r"(?:(?:\\{0,2}[rn]|[\s\"',+|]|\[rank[0-9]{1,8}\]:)*+"
    r"(?:[A-Za-z0-9+/=]{40,}+|(?:Proc-Type|DEK-Info|Content-Domain): [^\r\n\v\\]{1,80}))*+"
    r"(?:(?:\\{0,2}[rn]|\s)*+[A-Za-z0-9+/=]{1,64}+(?=[ \t\"',+]*+(?:[\r\n\v\\…]|\Z)))?"
)
# A line of such a key, and its last one; log lines have something ahead of them.
_LINE_END = Shape(r"[\r\n\v]|\\{1,2}[rn]")
_ROW = Shape(r"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{40,}+(?=[\s\"',+]*+\Z)")
_LAST_ROW = Shape(r"(?<![^\s\"'|])(?:[A-Za-z0-9+/=]{4}){1,10}+(?=[\s\"',+]*+\Z)")
_LONGEST = 16384


def without_private_keys(text: str, instead: str) -> str:
    """A text without private keys. Of one that is cut off, the rows next to its beginning or its end go.

    The time is linear in the length of the text.
    """
    if MARK not in text:
        return text
    pieces: list[str] = []
    done = 0
    next_end: re.Match[str] | None = None
    has_ends = True
    for begins in _BEGINS().finditer(text):
        if begins.start() < done:
            continue
        if has_ends and (next_end is None or next_end.start() < begins.end()):
            next_end = _ENDS().search(text, begins.end())
            has_ends = next_end is not None
        another = text.find("-----BEGIN", begins.end(), begins.end() + _LONGEST)
        limit = another if another >= 0 else begins.end() + _LONGEST
        if next_end is not None and begins.end() <= next_end.start() < limit:
            end = next_end.end()
        else:
            cut_off = _CUT_OFF().match(text, begins.end(), limit)
            end = cut_off.end() if cut_off is not None else begins.end()
        pieces += (_without_ends(text[done : begins.start()], instead), instead)
        done = end
    pieces.append(_without_ends(text[done:], instead))
    return "".join(pieces)


def lines_without_private_keys(lines: Sequence[str], instead: str) -> list[str]:
    """Lines without private keys; each key becomes one line at most."""
    if any(MARK in line for line in lines):
        text = "\n".join(lines)
        found = without_private_keys(text, instead)
        if found != text:
            return found.split("\n")
    return [*lines]


def _without_ends(text: str, instead: str) -> str:
    """The text without keys whose beginnings it lacks."""
    if MARK not in text:
        return text
    pieces: list[str] = []
    done = after = 0
    for ends in _ITS_END().finditer(text):
        begin = _first_row(text, max(after, ends.start() - _LONGEST), ends.start())
        after = ends.end()
        if begin >= 0:
            pieces += (text[done:begin], instead)
            done = after
    pieces.append(text[done:])
    return "".join(pieces)


def _first_row(text: str, after: int, end: int) -> int:
    """Where the rows of a key begin that ends at an offset; -1: there are none."""
    line_ends = [line_end.span() for line_end in _LINE_END().finditer(text, after, end)]
    begins = [after, *(behind for _, behind in line_ends)]
    stops = [*(at for at, _ in line_ends), end]
    found = -1
    may_be_short = True
    for begin, stop in zip(reversed(begins), reversed(stops), strict=True):
        line = text[begin:stop]
        row = _ROW().search(line)
        if row is not None:
            found = begin + row.start()
            may_be_short = False
        elif line.strip() and stop < end:  # else it is blank, or the line of the end itself
            if not may_be_short or _LAST_ROW().search(line) is None:
                break
            may_be_short = False
    return found
