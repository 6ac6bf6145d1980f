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
_BASE64 = "[A-Za-z0-9+/=]"
# Line ends may be escaped, once or more often.
_ESCAPED = r"\\{1,4}(?:[rn]|u000[aAdD])"
_BREAK = rf"(?:[\r\n\v]|{_ESCAPED})"
_LINE_END = Shape(_BREAK)
_COLOR = r"\x1b\[[0-9;]{0,16}m"
# What stands between the rows of a key, also of one that is printed as a list, or with the rank ahead of each line;
# and what stands behind a row on its line.
_BETWEEN = rf"(?:{_ESCAPED}|[\s\"',+|\\]|b[\"']|{_COLOR}|\[(?:rank|default)?[0-9]{{1,8}}\]:?+)*+"
_BEHIND = rf"(?:[\s\"',+|)\]]|{_COLOR})*+"
# A header ends ahead of a row that is on its line, and with its quotes.
_TAIL = rf"(?:{_BASE64}{{1,39}}+(?!{_BASE64})|(?![\"'](?:[\s,+|)\]]|\Z))[^\r\n\v\\A-Za-z0-9+/=]){{1,200}}+"
_OF_PEM = "Proc-Type|DEK-Info|Content-Domain"  # no other text has them
_HEADER = rf"(?:{_OF_PEM}|Version|Comment|Charset|Hash|MessageID): {_TAIL}"
# Of a key that is cut off, its rows of base64 are redacted, ...
_ROWS = Shape(rf"(?:{_BETWEEN}(?:(?:{_OF_PEM}): {_TAIL}|(?:{_HEADER}{_BETWEEN}){{0,8}}+{_BASE64}{{40,}}+))*+")
_MIXED = r"(?=[a-z0-9+/=]*+[A-Z])(?=[A-Z0-9+/=]*+[a-z])(?=[A-Za-z+/=]*+[0-9])"
# ... and then the last one, which is shorter or cut off itself, and no word.
_ERROR = "[A-Z][A-Za-z]{0,60}?(?:Error|Exception|Exit|Interrupt|Warning)"
_AT_TEXT_END = rf"(?!(?:[A-Za-z]?[a-z]*+|{_ERROR})(?!{_BASE64})){_BASE64}{{1,64}}+(?=[ \t\"',+)\]}}]*+(?:…|\Z))"
_LINE_ENDS = rf"(?=[ \t\"',+)\]}}]*+(?:[\r\n\v\\]|{_COLOR}))"
# Names of types and paths, of parts that have vowels: ``RuntimeError``, ``train/step``.
_PART = r"(?:[A-Z]{0,5}+(?=[a-z]*[aeiouy])[a-z]{2,}+)++"
_NAMES = rf"(?:[/=]?{_PART}(?:[/=]{_PART})*+/?|[A-Z]++)(?!{_BASE64})"
_CUT = rf"(?!{_NAMES}){_BASE64}{{8,64}}+{_LINE_ENDS}"
_SHORTER = rf"(?:(?=[A-Za-z]*+[0-9+/=])(?:{_BASE64}{{4}}){{1,16}}+|{_MIXED}{_BASE64}{{5,7}}+){_LINE_ENDS}"
_LAST_ROW = Shape(rf"{_BETWEEN}(?:{_AT_TEXT_END}|{_SHORTER}|{_CUT})")
_FIRST_ROW = Shape(rf"{_BETWEEN}(?:{_AT_TEXT_END}|{_CUT})")
# The same of log lines, which have something ahead of them.
_TO_NEXT_LINE = Shape(rf"(?:[ \t\"',+|)\]]|{_COLOR})*+{_BREAK}(?:[ \t]*+{_BREAK})*+")
_ROW_OF_LOG = Shape(rf"(?<!{_BASE64}){_MIXED}{_BASE64}{{40,}}+(?={_BEHIND}\Z)")
_LAST_OF_LOG = Shape(rf"(?<!{_BASE64})(?:{_AT_TEXT_END}|{_SHORTER}|{_CUT})")
_HEADER_OF_LOG = Shape(rf"(?<![\w-]){_HEADER}")
# Of a key whose beginning is cut off: a row, what is behind it to the end of its line, and the last rows.
_ROW = Shape(rf"(?<!{_BASE64}){_BASE64}{{40,}}+")
_BETWEEN_ROWS = Shape(_BETWEEN)
_BEHIND_ROWS = Shape(_BEHIND)
_BEHIND_LAST_ROWS = Shape(rf"{_BEHIND}(?:(?:{_BASE64}{{4}}){{1,15}}+{_BEHIND})?")
_SHORT = rf"(?:(?<![^\s\"'|])|{_COLOR})"
_SHORT_ROW = Shape(rf"{_SHORT}(?:{_BASE64}{{4}}){{1,10}}+(?={_BEHIND}\Z)")
_CHECKSUM = Shape(rf"{_SHORT}=[A-Za-z0-9+/]{{4}}(?={_BEHIND}\Z)")  # of PGP
_LONGEST_SHORT = 256
"""A short row at the end of a line, with what is behind it but blanks. From each sign on, the rest of it is read."""
_LONGEST = 16384
_MOST_BLANK = 2
"""Behind a header. What separates rows is read again from each of these lines on."""


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
            end = _behind_rows(text, begins.end(), limit)
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


def _behind_rows(text: str, begin: int, limit: int) -> int:
    """Where the rows end of a key whose end is cut off.

    Args:
        text: the text.
        begin: the offset behind the line with which the key begins.
        limit: how far it may go.
    """
    end = at = begin
    width = 0  # of what stands ahead of its lines, in a log
    blank = 0  # lines behind a header
    while True:
        rows = _ROWS().match(text, at, limit)
        if rows is not None and rows.end() > at:
            end = at = rows.end()
        short = (_LAST_ROW if end > begin else _FIRST_ROW)().match(text, at, limit)
        if short is not None:
            return short.end()
        next_line = _TO_NEXT_LINE().match(text, at, limit)
        if next_line is None:
            return end
        line = next_line.end()
        stops = _LINE_END().search(text, line, limit)
        stop = stops.start() if stops is not None else limit
        row = _ROW_OF_LOG().search(text, line, stop)
        if row is not None and (end > begin or text[row.start()] != "/"):  # no path, with which no key begins
            end = at = row.end()
            width = row.start() - line
            continue
        if end > begin:
            short = _LAST_OF_LOG().match(text, line + width, limit) if width else None
            return short.end() if short is not None else end
        # Rows may follow a header, behind an empty line.
        header = _HEADER_OF_LOG().search(text, line, stop)
        if header is not None:
            width = header.start() - line
            blank = 0
        elif not width or blank == _MOST_BLANK or len(text[line:stop].rstrip()) > width:
            return end
        else:
            blank += 1
        at = stop


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
        row = _rows_of(line, may_be_short=may_be_short)
        if row >= 0:
            found = begin + row
            may_be_short = False
        elif (line := line.rstrip()) and stop < end:  # else it is blank, or the line of the end itself
            tail = max(0, len(line) - _LONGEST_SHORT)
            if may_be_short and _CHECKSUM().search(line, tail) is not None:
                continue
            if not may_be_short or _SHORT_ROW().search(line, tail) is None:
                break
            may_be_short = False
    return found


def _rows_of(line: str, *, may_be_short: bool) -> int:
    """Where the rows begin with which a line ends, of which the last one may be short; -1: there are none."""
    rows = [row.span() for row in _ROW().finditer(line)]
    behind = _BEHIND_LAST_ROWS if may_be_short else _BEHIND_ROWS
    if not rows or behind().fullmatch(line, rows[-1][1]) is None:
        return -1
    found = rows[-1][0]
    for begin, end in reversed(rows[:-1]):
        if _BETWEEN_ROWS().fullmatch(line, end, found) is None:
            break
        found = begin
    return found
