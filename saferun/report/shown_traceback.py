"""Whether a traceback stands on the console already, whole, so that a report need not quote it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.diagnosis.exception_groups import without_prefix
from saferun.diagnosis.tracebacks import clean_lines
from saferun.evidence.diagnosis_values import Traceback


def is_above(shown: Callable[[int], Sequence[Sequence[bytes]]], traceback: Traceback) -> bool:
    """Whether one of the ranks of a traceback is seen to have printed it.

    Args:
        shown: returns the lines of each traceback of a rank that stands whole on the console.
        traceback: of a report, perhaps without its middle.
    """
    wanted = [line for line in traceback.lines if line]
    for rank in traceback.ranks:
        for raw in shown(rank):
            lines = [line for line in clean_lines(line.decode(errors="replace") for line in raw) if line]
            if lines and (_holds(lines, wanted) or _holds(without_prefix(lines), wanted)):
                return True
    return False


def _holds(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether lines stand among others, side by side; ``  … 5 lines …`` among them stands for any number of lines."""
    gap = next((index for index, line in enumerate(wanted) if line.startswith("  … ")), len(wanted))
    head, tail = wanted[:gap], wanted[gap + 1 :]
    starts = range(len(lines) - len(head) - len(tail) + 1)
    return any(lines[at : at + len(head)] == head for at in starts) and (not tail or lines[-len(tail) :] == tail)
