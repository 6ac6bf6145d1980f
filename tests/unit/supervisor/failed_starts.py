"""Diagnoses of failed starts, made up."""

from __future__ import annotations

from typing import Any

from saferun.evidence.diagnosis_values import Cause, Diagnosis, Traceback
from saferun.model import ExitStatus, RankEnd


def diagnosis(
    class_name: str = "import_error",
    *,
    ranks: tuple[int, ...] = (3,),
    location: str = "train.py:12",
    start: str = "inside",
    tracebacks: tuple[Traceback, ...] = (),
    proof: str = "ImportError: no",
    **more: Any,
) -> Diagnosis:
    """Of rank 3, which raised ImportError within init_process_group."""
    cause = Cause(class_name, f"{class_name} words", ranks, proof, "", location)
    end = RankEnd(ranks[0], ranks[0], 100, ExitStatus(1, None), 1.0, 1.0, stopped_by_us=False) if ranks else None
    return Diagnosis("it failed", end, None, (), (), (), cause=cause, start=start, tracebacks=tracebacks, **more)
