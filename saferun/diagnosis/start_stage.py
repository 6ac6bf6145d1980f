"""How far the start of a failed attempt had come: whether every rank got through ``init_process_group``. Pure.

The evidence, the surest first:

* A rank that failed in it, by its traceback, or that was still in it when it was captured.
* Ranks that have a process group: the hook has opened the worker server in them (which it does when the first one is
  registered, the last but one thing that ``init_process_group`` does), the Flight Recorder has a group, or torch has
  put ``[rank3]:`` before what they printed, as it does from then on.
* The ranks' store: how many have connected to it, and how many have left gloo's address in it. It comes last, since
  ranks may meet by another store, and since the last steps of gloo and NCCL cannot be seen in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.tracebacks import LONGEST_LINE, find_fatal_report, find_python_error
from saferun.evidence.job_evidence import Evidence, Frame, RankOutput, StackDump
from saferun.model import Value

BEFORE, INSIDE, THROUGH = "before", "inside", "through"
STAGES = frozenset({BEFORE, INSIDE, THROUGH})

_INIT = "init_process_group"
_INIT_FILE = "distributed/distributed_c10d.py"
_PREFIX = LazyPattern(r"\s{0,8}(?:\[default\d{0,6}\]:)?\[rank(\d{1,6})\]:")
_LAST_LINES = 40


class StoreStage(Value):
    """The stage by the ranks' store.

    Attributes:
        stage: ``before``, ``inside``, ``through``; empty: it cannot be asked.
        arrived: how many ranks have connected to it; -1: unknown.
        world_size: how many were expected.
    """

    stage: str = ""
    arrived: int = -1
    world_size: int = 0


def read_store_stage(message: object) -> StoreStage:
    """The coordinator's answer to ``start_stage``; what does not fit is no answer."""
    if not isinstance(message, dict):
        return StoreStage()
    stage, arrived, world_size = (message.get(name) for name in ("stage", "arrived", "world_size"))
    if not isinstance(stage, str) or stage not in STAGES or type(arrived) is not int or type(world_size) is not int:
        return StoreStage()
    return StoreStage(stage, arrived, world_size)


def start_stage(evidence: Evidence, *, marked: Collection[int] = (), store: StoreStage | None = None) -> str:
    """How far the start had come: ``before``, ``inside``, ``through``; empty where it is not known.

    A host of several judges its own ranks, without the store. The one that leads asks again for all hosts' evidence
    merged, whose ``start`` is what the hosts found, with the store's answer.

    Args:
        evidence: of the attempt, its capture included.
        marked: ranks in which the hook has seen a process group.
        store: the answer of the ranks' store before it was dropped.
    """
    ranks = {*evidence.ranks} or {end.rank for end in evidence.ends}
    if (
        evidence.start == INSIDE
        or any(_is_inside(dump) for dump in evidence.capture.stacks)
        or _failed_inside(evidence)
    ):
        return INSIDE
    through = {*marked} | _grouped(evidence) | _prefixed(evidence)
    if evidence.start == THROUGH or (ranks and ranks <= through):
        return THROUGH
    if store is not None and store.stage and not (store.stage == BEFORE and through):
        return store.stage
    if through & ranks:
        # The others have the same hook and the same torch, and no process group.
        return INSIDE
    return evidence.start if evidence.start in STAGES else ""


def stage_by_time(stage: str, *, elapsed_s: float, window_s: float, has_progressed: bool) -> str:
    """The same where the ranks never came to ``init_process_group``, or where it is not known: by time.

    A script that works without it, or by means of its own, has no start that could fail forever: after the window, or
    once it has made progress, the start counts as over. A rank that is known to be inside may wait there for longer.

    Args:
        stage: what is known.
        elapsed_s: since the ranks were started.
        window_s: ``--start-window``.
        has_progressed: whether a rank has made progress, for example by ``saferun.heartbeat``.
    """
    if stage not in {"", BEFORE}:
        return stage
    return THROUGH if has_progressed or elapsed_s >= window_s else BEFORE


# --------------------------------------------------------------------------------------------------------------- inside


def _is_init(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2] == _INIT and frame.file.endswith(_INIT_FILE)


def _is_inside(dump: StackDump) -> bool:
    """Whether a process that lived was in ``init_process_group``; a rank's descendant counts for the rank."""
    return any(_is_init(frame) for thread in dump.threads for frame in thread.frames)


def _failed_inside(evidence: Evidence) -> bool:
    """Whether a rank that failed by itself did so in ``init_process_group``."""
    outputs = evidence.outputs_by_rank
    for end in evidence.ends:
        if end.status.ok or end.stopped_by_us:
            continue
        output = outputs.get(end.rank)
        if output is not None and any(_is_init(frame) for frame in _last_frames(output)):
            return True
        cores = (core for core in evidence.cores if (core.rank, core.pid) == (end.rank, end.pid))
        if any(_is_init(frame) for core in cores for thread in core.threads for frame in thread.frames):
            return True
    return False


def _last_frames(output: RankOutput) -> Iterable[Frame]:
    """The calls in a rank's last lines: of the exception that ended it, or of faulthandler."""
    error = find_python_error(output.last_lines)
    if error is not None:
        for block in error.blocks:
            yield from block.frames
    fatal = find_fatal_report(output.last_lines)
    if fatal is not None:
        yield from fatal.frames
        yield from fatal.main_frames


# -------------------------------------------------------------------------------------------------------------- through


def _grouped(evidence: Evidence) -> set[int]:
    """Ranks whose Flight Recorder knows a process group."""
    return {one.rank for one in evidence.capture.collectives if one.groups}


def _prefixed(evidence: Evidence) -> set[int]:
    """Ranks whose output has torch's prefix with their number."""
    found = set()
    for rank, output in evidence.outputs_by_rank.items():
        for line in output.last_lines[-_LAST_LINES:]:
            match = _PREFIX.match(line[:LONGEST_LINE])
            if match is not None and int(match[1]) == rank:
                found.add(rank)
                break
    return found
