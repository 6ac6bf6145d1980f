"""Suggestions for mistyped words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_SHORT = 4  # two words of so few letters easily have most of them in common: nope, none
_LONGEST = 100  # comparing takes the product of the lengths


def nearest(word: str, valid: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The most similar of the valid words, or None if none is similar.

    Args:
        word: what was written.
        valid: the words that are known.
        likeness: how similar it has to be, from 0 to 1.
    """
    from difflib import get_close_matches

    if len(word) > _LONGEST:
        return None
    candidates = list(valid)
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = get_close_matches(word.lower(), list(by_lower), n=1, cutoff=likeness)
    return by_lower[close[0]] if close else None


def advice(word: str, valid: Iterable[str], more: str = "") -> str:
    """A hint: the nearest valid word, or all of them; then another sentence."""
    candidates = list(valid)
    near = nearest(word, candidates)
    if near is not None and len(word) <= _SHORT and sorted(word) != sorted(near):  # not rnak, rank
        near = nearest(word, candidates, likeness=0.8)
    if near is not None:
        return f"did you mean {near}? {more}".rstrip()
    return f"known are {', '.join(candidates)}{'. ' if more else ''}{more}"


def quoted(text: str, limit: int = 60) -> str:
    """A part of a user's file, for messages: printable and short."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "'" + "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut) + "'"
