"""Failed jobs of one host that tests of the diagnosis share."""

from __future__ import annotations

from pathlib import Path

from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Evidence, Frame, RankOutput, StackDump, ThreadStack
from saferun.model import RankEnd

RECORDED = Path(__file__).parent / "recorded_failures"


def evidence(
    *ends: RankEnd,
    outputs: tuple[RankOutput, ...] = (),
    stop_signum: int | None = None,
    trouble: str = "",
    abandoned: tuple[int, ...] = (),
) -> Evidence:
    hint = "look there" if trouble else ""
    ranks = tuple(sorted(end.rank for end in ends))
    return Evidence(
        "node3",
        90.0,
        ends,
        outputs,
        abandoned,
        stop_signum,
        trouble,
        hint,
        ranks=ranks,
        script="train.py",
        cwd="/home/user/job",
    )


def said(rank: int, name: str) -> RankOutput:
    """What a real program said, as if this rank had."""
    text = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("--- stderr\n")[2]
    lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
    return RankOutput(rank, tuple(line.replace("[rank1]", f"[rank{rank}]") for line in lines), "", "", 0.0)


def class_of(found: Diagnosis) -> str:
    return found.cause.class_name if found.cause is not None else ""


def dump_of(rank: int, frames: tuple[Frame, ...]) -> StackDump:
    thread = ThreadStack("MainThread", 4000 + rank, is_main=True, active=False, owns_gil=False, frames=frames)
    return StackDump(rank, 4000 + rank, is_rank=True, name="python", tool="py-spy", threads=(thread,))
