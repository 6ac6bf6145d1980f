"""Recorded hangs: three gloo ranks of which, as a rule, rank 1 stays away from the collective of the others.

Taken of torch 2.13 on CPUs with py-spy 0.4.3 (with and without native calls), /proc and the Flight Recorder; paths made
neutral. ``recorded_stacks/`` has one file for each; a list in it is a frame, or a look, by position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    ThreadStack,
)
from saferun.model import ExitStatus, RankEnd

FOLDER = Path(__file__).parent / "recorded_stacks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SCRIPT, CWD, HOST = "train.py", "/job", "node1"
RANKS = (0, 1, 2)
SITE = "/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"


def capture_of(name: str, *, native: bool = True, recorder: bool = True) -> Capture:
    """What was seen of a recorded hang; on request without native calls, or without the Flight Recorder."""
    content = _load(name)
    dumps = (_dump(raw) for raw in content["stacks"])
    return Capture(
        processes=tuple(ProcessSnapshot(*raw) for raw in content["looks"]),
        stacks=tuple(dump for dump in dumps if native or "native" not in dump.tool),
        collectives=tuple(_collectives(raw) for raw in content["collectives"]) if recorder else (),
    )


def ends_of(name: str) -> tuple[RankEnd, ...]:
    """The ranks of a recorded hang that had ended by then."""
    return tuple(
        RankEnd(rank, rank, 4000 + rank, ExitStatus(code, None), 100.0, 1.7e9, stopped_by_us=False)
        for rank, code in _load(name)["ended"]
    )


def evidence_of(
    name: str, verdict: HangVerdict | None = None, *, native: bool = True, recorder: bool = True
) -> Evidence:
    """A recorded hang as it comes to be diagnosed."""
    return evidence(capture_of(name, native=native, recorder=recorder), verdict, ends=ends_of(name))


def evidence(
    capture: Capture,
    verdict: HangVerdict | None = None,
    *,
    ends: tuple[RankEnd, ...] = (),
    ranks: tuple[int, ...] = RANKS,
) -> Evidence:
    """A hang of ranks on one host."""
    return Evidence(
        host=HOST,
        started_at=0.0,
        ends=ends,
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=ranks,
        capture=capture,
        hang=verdict or HangVerdict("quiescent", ranks, 300.0, certain=True),
        script=SCRIPT,
        cwd=CWD,
    )


def dump_of(
    rank: int, *frames: Frame, pid: int = 0, active: bool = False, tool: str = "py-spy", name: str = "python"
) -> StackDump:
    """The main thread of a rank, innermost call first. With a pid it is a descendant of the rank."""
    own = pid or 100 + rank
    thread = ThreadStack("MainThread", own, is_main=True, active=active, owns_gil=False, frames=frames)
    return StackDump(rank, own, not pid, name, tool, (thread,))


def look_of(rank: int, **fields: Any) -> ProcessSnapshot:
    """A rank that sleeps in a futex, but for the fields that are given; with ``pid`` a descendant of it."""
    own = fields.pop("pid", 0)
    look = ProcessSnapshot(
        rank=rank,
        pid=own or 100 + rank,
        ppid=100 + rank if own else 1,
        is_rank=not own,
        name="python",
        command="",
        state="S",
        wchan="futex_do_wait",
        syscall="futex",
        threads=1,
        tracer_pid=0,
        core_dumping=False,
        rss_bytes=1,
        waits_on="",
        cpu_s=1.0,
    )
    return look._replace(**fields)


def native(function: str, file: str = "/usr/lib/libc.so.6") -> Frame:
    """A native call."""
    return Frame(function, file, 0, native=True)


def _load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _dump(raw: dict[str, Any]) -> StackDump:
    threads = (ThreadStack(**{**thread, "frames": _frames(thread["frames"])}) for thread in raw["threads"])
    return StackDump(**{**raw, "threads": tuple(threads)})


def _frames(raw: Iterable[list[Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(*fields) for fields in raw)


def _collectives(raw: dict[str, Any]) -> RankCollectives:
    groups = (
        GroupProgress(
            **{
                **group,
                "ranks": tuple(group["ranks"]),
                "calls": tuple(CollectiveCall(**call) for call in group["calls"]),
            }
        )
        for group in raw["groups"]
    )
    return RankCollectives(raw["rank"], tuple(groups))
