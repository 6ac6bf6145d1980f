"""Regular expressions that are compiled when a text may match them. Pure.

The diagnosis knows hundreds of messages. To compile them all takes longer than the rest of the diagnosis of a job of
few ranks, and a rank that failed has printed one or two of them. ``known_literals`` has, for each pattern, literals of
which every match has one. A text without them need not be searched: ``in`` takes a hundredth of the time of a search.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from saferun.diagnosis.known_literals import IN_ANY_CASE, LITERALS

_MODULUS = 4294967291  # the largest prime number of 32 bits
_COPIED = ("search", "match", "fullmatch", "findall", "finditer", "split", "sub")


class LazyPattern:
    """A regular expression with the methods of ``re.Pattern``, compiled by the first text that may match.

    Args:
        pattern: the regular expression.
        flags: as for ``re.compile``.
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.pattern, self.flags = pattern, int(flags)
        key = key_of(pattern, self.flags)
        self.literals: tuple[str, ...] = LITERALS.get(key, ())
        """Each match has at least one of them; none: nothing is known."""
        self._in_any_case = key in IN_ANY_CASE

    def __repr__(self) -> str:
        return f"LazyPattern({self.pattern!r}, {self.flags})"

    def may_be_in(self, text: str) -> bool:
        """Whether the text must be searched."""
        if not self.literals:
            return True
        if self._in_any_case:
            # Some letters beyond ASCII are other cases of letters in it.
            if not text.isascii():
                return True
            text = text.lower()
        return any(literal in text for literal in self.literals)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """As ``re.Pattern.search``."""
        return self._compiled().search(text, start) if self.may_be_in(text) else None

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        """As ``re.Pattern.match``."""
        return self._compiled().match(text, start) if self.may_be_in(text) else None

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """As ``re.Pattern.fullmatch``."""
        return self._compiled().fullmatch(text) if self.may_be_in(text) else None

    def findall(self, text: str) -> list[Any]:
        """As ``re.Pattern.findall``."""
        return self._compiled().findall(text) if self.may_be_in(text) else []

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        """As ``re.Pattern.finditer``."""
        return self._compiled().finditer(text) if self.may_be_in(text) else iter(())

    def split(self, text: str, maxsplit: int = 0) -> list[str | Any]:
        """As ``re.Pattern.split``."""
        return self._compiled().split(text, maxsplit) if self.may_be_in(text) else [text]

    def sub(self, replacement: str | Callable[[re.Match[str]], str], text: str, count: int = 0) -> str:
        """As ``re.Pattern.sub``."""
        return self._compiled().sub(replacement, text, count) if self.may_be_in(text) else text

    def _compiled(self) -> re.Pattern[str]:
        compiled = re.compile(self.pattern, self.flags)
        # From now on its methods are called without a detour.
        self.__dict__.update({name: getattr(compiled, name) for name in _COPIED})
        return compiled


def key_of(pattern: str, flags: int) -> int:
    """The key of a pattern in ``known_literals``: without a module that may have to be loaded from a file."""
    return int.from_bytes(f"{flags} {pattern}".encode(), "big") % _MODULUS


def first_match(pattern: LazyPattern, lines: tuple[str, ...]) -> tuple[str, re.Match[str]] | None:
    """The first line in which the pattern is found, and what is found there."""
    if not lines or not pattern.may_be_in(_joined(lines)):
        return None
    for line in lines:
        match = pattern.search(line) if pattern.may_be_in(line) else None
        if match is not None:
            return line, match
    return None


def is_found(pattern: LazyPattern, line: str) -> bool:
    """Whether the pattern is found in a line."""
    return pattern.may_be_in(line) and pattern.search(line) is not None


@lru_cache(maxsize=4)
def _joined(lines: tuple[str, ...]) -> str:
    return "\n".join(lines)
