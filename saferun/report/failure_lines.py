"""What the failure record of a rank (``saferun.record``) adds to a report. Pure."""

from __future__ import annotations

from saferun.evidence.diagnosis_values import Diagnosis, Traceback
from saferun.evidence.job_evidence import RankOutput
from saferun.text.bounded_json import shown

_SHOWN = 2
_LONGEST = 300
# What is left of the beginning of every traceback that is shown.
_COMPARED_LINES = 12


def console_locals(diagnosis: Diagnosis, traceback: Traceback | None) -> list[str]:
    """What the locals were at the exception whose traceback is shown; nothing where another rank's is."""
    output = diagnosis.output
    if output is None:
        return []
    rank = output.rank if output.rank >= 0 else output.local_rank
    if traceback is not None and rank not in traceback.ranks:
        return []
    return [f"  {_cut(shown(line, 1000))}" for line in output.failure[:_SHOWN] if line.startswith("locals of ")]


def is_recorded(traceback: Traceback, output: RankOutput | None) -> bool:
    """Whether a traceback is the one of the failure record, which has no lines of the source."""
    recorded = output.traceback if output is not None else ()
    return bool(recorded) and traceback.lines[:_COMPARED_LINES] == recorded[:_COMPARED_LINES]


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rpartition('; ')[0]}; …"
