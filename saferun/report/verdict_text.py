"""What single ranks do in a hang, for the console and the page. Pure."""

from __future__ import annotations

from saferun.text.wording import duration_text

OF_SINGLE_RANKS = frozenset({"stopped", "uninterruptible", "heartbeat", "overdue"})
"""Kinds of verdicts about single ranks: others may make progress."""


def single_ranks_text(kind: str, whose: str, lasted_s: float | None) -> str:
    """What single ranks do while others may make progress; empty: the verdict is about all ranks.

    Args:
        kind: of the verdict.
        whose: the ranks that it is about.
        lasted_s: how long; None: not known.
    """
    lasted = lasted_text(lasted_s)
    match kind:
        case "stopped":
            return f"{whose} in state T (stopped by a signal){lasted}"
        case "uninterruptible":
            return f"{whose} in state D (uninterruptible sleep){lasted}"
        case "heartbeat":
            return f"no heartbeat from {whose}{lasted}"
        case "overdue":
            so_far = f", {duration_text(max(lasted_s, 0.0))} so far" if lasted_s else ""
            return f"{whose} in a phase that takes longer than expected (saferun.expect){so_far}"
    return ""


def lasted_text(lasted_s: float | None) -> str:
    """`` for 31 s``; empty: not known."""
    return f" for {duration_text(max(lasted_s, 0.0))}" if lasted_s else ""
