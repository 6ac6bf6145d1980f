"""What the failure record of a rank (``saferun.record``) adds to a report. Pure."""

from __future__ import annotations

from saferun.evidence.diagnosis_values import Diagnosis, Traceback
from saferun.text.bounded_json import shown

_SHOWN = 2
_LONGEST = 300


def console_locals(diagnosis: Diagnosis, traceback: Traceback | None) -> list[str]:
    """What the locals were at the exception whose traceback is shown; nothing where another rank's is."""
    output = diagnosis.output
    if output is None:
        return []
    rank = output.rank if output.rank >= 0 else output.local_rank
    if traceback is not None and rank not in traceback.ranks:
        return []
    return [f"  {_cut(shown(line, 1000))}" for line in output.failure[:_SHOWN] if line.startswith("locals of ")]


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rpartition('; ')[0]}; …"
