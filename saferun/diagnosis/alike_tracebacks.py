"""Tracebacks that several ranks printed alike, each shown once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Traceback

# What differs between ranks that fail alike.
_DIFFERENCES = LazyPattern(
    r"0x[0-9a-fA-F]{1,20}|(?<=torch_)\d{1,20}(?:_\d{1,20}){0,4}|(?<=\]:)\d{1,6}"
    r"|\b(?:pids?|PID|rank|Rank|local_rank|cuda:|GPU|gpu|device|worker|fd)[ =:(]{0,3}(?:\(s\)|s\))?[ ]?\d{1,10}"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,6})?|\[\d{1,6}\]"
    # How much of what they wrote is known.
    r"|\band no traceback(?: in the last \d{1,9} lines of its stderr)?"
)
_MOST_LINES = 60
_OUTER_LINES = 12


def likeness(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines without what differs between ranks that fail alike: their numbers, addresses and process numbers."""
    return tuple(map(_like, lines))


# Ranks that fail alike have the same lines.
@lru_cache(maxsize=2048)
def _like(line: str) -> str:
    return _DIFFERENCES.sub("#", line)


def merge_tracebacks(texts: Iterable[tuple[int, Sequence[str]]], most: int = 3) -> tuple[Traceback, ...]:
    """What ranks printed, each text once with the ranks that printed it, the first ``most`` of them.

    Args:
        texts: ranks and their lines; the most important first.
        most: how many tracebacks are kept.
    """
    merged: list[tuple[tuple[str, ...], list[int], Sequence[str]]] = []
    for rank, lines in texts:
        if not lines:
            continue
        same = next((ranks for like, ranks, _ in merged if _is_like(lines, like)), None)
        if same is not None:
            same.append(rank)
        elif len(merged) < most:
            merged.append((likeness(lines), [rank], lines))
    return tuple(Traceback(tuple(sorted(set(ranks))), tuple(_bounded(lines))) for _, ranks, lines in merged)


def _is_like(lines: Sequence[str], like: tuple[str, ...]) -> bool:
    """Whether lines are those but for what differs; most others differ in the last line or an early one."""
    return len(lines) == len(like) and all(_like(lines[index]) == like[index] for index in (-1, *range(len(like) - 1)))


def _bounded(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return list(lines)
    left = len(lines) - _MOST_LINES + 1
    inner = lines[len(lines) - (_MOST_LINES - _OUTER_LINES - 1) :]
    return [*lines[:_OUTER_LINES], f"  … {left} lines …", *inner]
