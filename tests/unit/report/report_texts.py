"""Texts of reports, for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import HangVerdict, RankOutput
from saferun.report.console_text import failure_text, hang_text
from tests.unit.report.report_samples import (
    FILES,
    QUIET,
    dead,
)

HEADLINE = "rank 1 (node3, local rank 1, pid 4001) failed first, 2.0 s after the start: exit code 1"
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x1b[31mred\r\x00\x08\x7f\x9b31m\u202egnp.exe\u2028next\nline"
TEXT = st.text(st.characters(codec=None, categories=None), max_size=400)


def diagnosis_of(output: RankOutput | None = None, headline: str = HEADLINE) -> Diagnosis:
    return Diagnosis(headline, dead(1, code=1), output, (), (), ())


def text_of(diagnosis: Diagnosis, *, files: str | None = "saferun-runs/1", restarting: bool = False) -> list[str]:
    return failure_text(diagnosis, files=files, attempt=0, max_restarts=3, restarting=restarting)


def hang_text_of(
    diagnosis: Diagnosis,
    verdict: HangVerdict = QUIET,
    *,
    files: str | None = FILES,
    on_hang: str = "report",
    count: int = 1,
    next_s: float | None = 600.0,
) -> list[str]:
    return hang_text(diagnosis, verdict, host="node1", files=files, on_hang=on_hang, count=count, next_s=next_s)
