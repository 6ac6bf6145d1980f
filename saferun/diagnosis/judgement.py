"""What a rule of the diagnosis arrives at. Pure."""

from __future__ import annotations

from saferun.evidence.diagnosis_values import Cause
from saferun.model import RankEnd, Value


class Judgement(Value):
    """The cause and the first line of the report; ``first`` is the rank that failed first, where one did.

    ``findings``: further lines for the report.
    """

    cause: Cause
    headline: str
    first: RankEnd | None = None
    findings: tuple[str, ...] = ()
