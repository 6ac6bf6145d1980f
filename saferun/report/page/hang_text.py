"""What stood still in a hang, in words: all ranks, or single ones while others went on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.report.page.contents import VerdictPart
from saferun.text.bounded_json import shown
from saferun.text.wording import duration_text, ranks_text

OF_SINGLE_RANKS = frozenset({"stopped", "uninterruptible", "heartbeat", "overdue"})
"""Kinds of verdicts about single ranks: others may make progress."""
_WIDTH = 60


def single_ranks_text(kind: str, ranks: Sequence[int], lasted_s: float | None) -> str:
    """What single ranks do while others may make progress; empty: the verdict is about all ranks.

    Args:
        kind: of the verdict.
        ranks: that it is about.
        lasted_s: how long; None: not known.
    """
    whose = ranks_text(ranks, _WIDTH) if ranks else "a rank"
    lasted = _lasted(lasted_s)
    match kind:
        case "stopped":
            return f"{whose} in state T (stopped by a signal){lasted}"
        case "uninterruptible":
            return f"{whose} in state D (uninterruptible sleep){lasted}"
        case "heartbeat":
            return f"no heartbeat from {whose}{lasted}"
        case "overdue":
            return f"{whose} in a phase that takes longer than expected (saferun.expect){lasted}"
    return ""


def stalled_text(verdict: VerdictPart) -> str:
    """The sentence about what stood still."""
    lasted = _lasted(verdict.stalled_s)
    whose = ranks_text(verdict.ranks, _WIDTH) if verdict.ranks else "a rank"
    match verdict.kind:
        case "quiescent" | "":
            text = f"no rank had made progress{lasted}"
        case "stuck_collective":
            text = f"no collective had made progress{lasted}, and all ranks were otherwise idle"
        case "spinning":
            text = f"{whose} in a busy loop{lasted}, and no other rank had made progress"
        case kind:
            text = single_ranks_text(kind, verdict.ranks, verdict.stalled_s) or f"{shown(kind, 40)}{lasted}"
    return f"{text[:1].upper()}{text[1:]}{'' if verdict.certain else ' (suspected, not certain)'}."


def _lasted(seconds: float | None) -> str:
    return f" for {duration_text(max(seconds, 0.0))}" if seconds else ""
