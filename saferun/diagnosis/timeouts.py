"""What is said of ranks that waited too long: first who did not come, and where it is, then who timed out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.diagnosis.causes.failure import Failure
from saferun.diagnosis.collectives import CollectiveFindings
from saferun.diagnosis.frames import UserCode, location_text
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.lost_peers import call_of
from saferun.diagnosis.rank_view import user_frame
from saferun.diagnosis.rank_waits import Wait
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence
from saferun.model import Value
from saferun.text.wording import ranks_text

_NCCL = "nccl_timeout"
_TIMEOUTS = frozenset({_NCCL, "collective_timeout"})
_TIMED_OUT = LazyPattern(r"\bwithin \d|\bafter \d")
# What a message says of the others that stands before it already.
_OTHERS = LazyPattern(r": another rank did not come to the collective(?: within (.{1,20}))?$")
# What NCCL's watchdog and its monitor log of the group of all ranks, also on ranks that have not timed out.
_ENQUEUED = LazyPattern(r"[Ll]ast enqueued (?:NCCL )?work: (\d{1,12})\b")
# The number of the collective that did not end. The CPUs are ahead of it, each as far as its own work lets it.
_UNFINISHED = LazyPattern(
    r"\bWorkNCCL\(SeqNum=(\d{1,12})\b|\bat NCCL work: (\d{1,12})\b"
    r"|\bwatchdog at work(?: sequence id)?: (\d{1,12})\b"
)
_OTHER_GROUP = LazyPattern(r"\[PG ID [1-9]|PG GUID (?!0\()")
_MOST_LOCATIONS = 4
_DONE_FOR = frozenset({"dead", "unanswering"})
# A rank that is seen there may be on its way out as well.
_AT_ITS_END = "interpreter"


class Late(Value):
    """Ranks that did not come to what others waited in, and in words what they did."""

    ranks: tuple[int, ...]
    message: str


def is_timeout(cause: Cause) -> bool:
    """Whether a rank waited until a time was over, rather than that it was refused at once."""
    return cause.class_name in _TIMEOUTS or _TIMED_OUT.search(cause.message) is not None


def idle(waits: Iterable[Wait], late: Iterable[int] = ()) -> list[Wait]:
    """Ranks that did something else than wait for others.

    Args:
        waits: what each was seen in.
        late: ranks that had waited for too long themselves, whatever they were seen in after that.
    """
    left = {*late}
    found = [wait for wait in waits if not wait.found.of_peers and wait.found.kind not in _DONE_FOR]
    found = [wait for wait in found if wait.rank not in left]
    return [wait for wait in found if wait.found.kind != _AT_ITS_END] or found


def not_busy(waits: Sequence[Wait], cause: Cause) -> list[Wait]:
    """Those of them that are seen not to wait in a call of NCCL's: in that the CPU may be busy until the GPU is done.

    Args:
        waits: what ranks were seen in.
        cause: of the rank that timed out.
    """
    return [wait for wait in waits if cause.class_name != _NCCL or not _is_busy(wait)]


def _is_busy(wait: Wait) -> bool:
    return wait.found.kind == "gpu" or (wait.found.kind == "user_code" and wait.found.doing.startswith("computes"))


def unseen(waits: Sequence[Wait], cause: Cause) -> str:
    """What is said at the end of a first line where ranks may wait in NCCL as well, and none is seen to be late."""
    if not waits or not_busy(waits, cause):
        return ""
    compute, wait = ("computes", "waits") if len(waits) == 1 else ("compute", "wait")
    ranks = ranks_text(sorted(wait.rank for wait in waits))
    return f"; the awaited rank is unknown: {ranks} {compute} or {wait} in NCCL as well"


def who_is_late(
    evidence: Evidence,
    hosts: Hosts,
    failure: Failure,
    cause: Cause,
    findings: CollectiveFindings,
    waits: Sequence[Wait],
) -> Late | None:
    """The ranks that others waited for, as far as that is known.

    Args:
        evidence: of all.
        hosts: of the job.
        failure: of the first rank that timed out.
        cause: of that failure.
        findings: of the Flight Recorders.
        waits: of the ranks that did something else than wait.
    """
    doing = {wait.rank: wait.description for wait in waits}
    if cause.ranks and cause.ranks != (failure.end.rank,):
        # The library has named them.
        return Late(cause.ranks, f"{cause.message}{_doing(doing, cause.ranks, evidence, hosts)}")
    if findings.culprits:
        message = findings.lines[0] if findings.lines else f"{ranks_text(findings.culprits)} did not come"
        return Late(findings.culprits, f"{message}{_doing(doing, findings.culprits, evidence, hosts)}")
    # By the Flight Recorders all have called it.
    if behind := None if findings.suspects else _behind(evidence):
        ranks, number, waiting = behind
        message = (
            f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not called collective {number} that "
            f"{ranks_text(waiting)} waited in"
        )
        return Late(ranks, f"{message}{_doing(doing, ranks, evidence, hosts)}")
    waits = not_busy(waits, cause)
    if not waits:
        return None
    ranks = tuple(wait.rank for wait in waits)
    call = call_of(failure)
    to = f" to {call}" if call else ""
    message = f"{_who(ranks, evidence, hosts)} did not come{to}"
    return Late(ranks, f"{message}{_doing(doing, ranks, evidence, hosts)}")


def waited(cause: Cause, rank: int) -> str:
    """The message of a timeout of a rank, where it stands before it who did not come."""
    if is_timeout(cause) and cause.ranks not in {(), (rank,)}:
        return "timed out"  # its message names the ranks as well
    match = _OTHERS.search(cause.message)
    if match is None:
        return cause.message
    return cause.message[: match.start()] + (f" after {match[1]}" if match[1] else "")


def _behind(evidence: Evidence) -> tuple[tuple[int, ...], int, tuple[int, ...]] | None:
    """Ranks that had not called what others timed out in, by their own logs; the number of that; and who waited."""
    last: dict[int, int] = {}
    unfinished: list[int] = []
    for rank, output in evidence.outputs_by_rank.items():
        lines = [line for line in output.last_lines if not _OTHER_GROUP.search(line)]
        numbers = [int(match[1]) for line in lines if (match := _ENQUEUED.search(line))]
        unfinished += [int(match[match.lastindex or 0]) for line in lines if (match := _UNFINISHED.search(line))]
        if numbers:
            last[rank] = numbers[-1]
    if not unfinished:
        return None
    first = min(unfinished)
    ranks = tuple(sorted(rank for rank, number in last.items() if number < first))
    waiting = tuple(sorted(rank for rank, number in last.items() if number >= first))
    return (ranks, first, waiting) if ranks and waiting else None


def advice_on(ranks: Sequence[int]) -> str:
    """What to do about ranks that did not come in time."""
    return (
        f"look at what keeps {ranks_text(ranks)} from it; where that only takes long, "
        "raise the timeout of init_process_group"
    )


def _who(ranks: Sequence[int], evidence: Evidence, hosts: Hosts) -> str:
    end = next((end for end in evidence.ends if end.rank == ranks[0]), None)
    if len(ranks) == 1 and end is not None:
        return hosts.who(end)
    return hosts.names(ranks)


def _doing(doing: dict[int, str], ranks: Sequence[int], evidence: Evidence, hosts: Hosts) -> str:
    """What the first of these ranks did of which that is known; the others' is in the picture."""
    rank = next((rank for rank in ranks if rank in doing), None)
    if rank is None:
        return ""
    who = "it" if len(ranks) == 1 else _who([rank], evidence, hosts)
    return f": {who} {doing[rank]}"


def unfinished_calls(evidence: Evidence) -> list[str]:
    """Where ranks made the first call that is not over, as those that have ended left it in their Flight Recorders."""
    user = UserCode(evidence.script, evidence.cwd)
    locations: dict[tuple[str, str], list[int]] = {}
    for one in evidence.capture.collectives:
        waiting = [call for group in one.groups for call in group.calls if not call.retired and call.frames]
        first = min(waiting, key=lambda call: call.order, default=None)
        location = location_text(user_frame(first.frames, user)) if first is not None else ""
        if first is not None and location:
            locations.setdefault((first.op, location), []).append(one.rank)
    return [
        f"{ranks_text(ranks)} called {op} at {location}, which is not over (Flight Recorder)"
        for (op, location), ranks in list(locations.items())[:_MOST_LOCATIONS]
    ]
