"""What stood still in a hang, in words: all ranks, or single ones while others went on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.report.page.contents import VerdictPart
from saferun.report.verdict_text import lasted_text, single_ranks_text
from saferun.text.bounded_json import shown
from saferun.text.wording import ranks_text

_WIDTH = 60


def whose_text(ranks: Sequence[int]) -> str:
    """The ranks that a verdict is about."""
    return ranks_text(ranks, _WIDTH) if ranks else "a rank"


def stalled_text(verdict: VerdictPart) -> str:
    """The sentence about what stood still."""
    lasted = lasted_text(verdict.stalled_s)
    whose = whose_text(verdict.ranks)
    match verdict.kind:
        case "quiescent" | "":
            text = f"no rank had made progress{lasted}"
        case "stuck_collective":
            text = f"no collective had made progress{lasted}, and all ranks were otherwise idle"
        case "spinning":
            text = f"{whose} in a busy loop{lasted}, and no other rank had made progress"
        case kind:
            text = single_ranks_text(kind, whose, verdict.stalled_s) or f"{shown(kind, 40)}{lasted}"
    return f"{text[:1].upper()}{text[1:]}{'' if verdict.certain else ' (suspected, not certain)'}."
