"""Ranks that all wait for others, in different groups of which it is not known who belongs to them. Pure.

gloo's Flight Recorder does not say it. If the groups have members in common, they were entered in different orders.
"""

from __future__ import annotations

from collections.abc import Mapping

from saferun.diagnosis.collectives import CollectiveFindings, Stuck
from saferun.diagnosis.hang_classes import CIRCLE_ADVICE
from saferun.diagnosis.judgement import Judgement
from saferun.diagnosis.rank_waits import Wait
from saferun.evidence.diagnosis_values import Cause
from saferun.text.wording import ranks_text

_MOST_SHOWN = 4
_SEVERAL = 2


def in_different_groups(findings: CollectiveFindings, waits: Mapping[int, Wait], who: str) -> Judgement | None:
    """What is seen of them; None where they are in one group, or it is known who belongs to the groups.

    Args:
        findings: of the Flight Recorders.
        waits: what each rank is in.
        who: all of them, in words.
    """
    unknown = [one for one in findings.stuck if not one.is_complete and not one.unknown]
    if len({one.group for one in unknown}) < _SEVERAL or len(unknown) < len(findings.stuck):
        return None
    sides = [_side(one, waits) for one in sorted(unknown, key=lambda one: -len(one.waiting))]
    more = f" and {len(sides) - _MOST_SHOWN} more" if len(sides) > _MOST_SHOWN else ""
    message = "wait in different groups"
    cause = Cause("hang_all_in_collective", message, (), "", CIRCLE_ADVICE, "")
    return Judgement(cause, f"{who} {message}: {', '.join(sides[:_MOST_SHOWN])}{more}")


def _side(stuck: Stuck, waits: Mapping[int, Wait]) -> str:
    location = next((waits[rank].location for rank in stuck.waiting if rank in waits), "")
    return f"{ranks_text(stuck.waiting)} in {stuck.op} of group {stuck.group}{f' at {location}' if location else ''}"
