"""Work that samples of /proc do not show: what inspections of a quiet rank say about the time between them. Pure.

Bytes that sockets carry to or from outside the job are progress, and so are work of threads other than the main one and
calls of NCCL, which its RAS subsystem counts.
What goes on whether a rank works or hangs is none: heartbeats, keep-alives, queries every few seconds, log shippers,
metrics that are collected or fetched, the threads of gloo, NCCL and the store.

Some work looks like what goes on in a hang, however long it is watched: a slow transfer like a heartbeat that
one side sends, a transfer between two hosts of the job like one between two ranks, a single long write to a slow disk
like a wait for a dead one, a frozen control group like one that is never continued. A slow transfer counts as work for
some timeouts; apart from that all of these leave a verdict uncertain for as long as they last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from saferun.captures.inspection_values import Connection, JobInspection, RankInspection, Thread
from saferun.model import Value
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit
from saferun.watchdog.signs import BLINK_NS, DOUBTED, WAKE_NS

Work: TypeAlias = Literal["works", "may work", "waits"]
_ThreadWork: TypeAlias = Literal["works", "may work", "busy", "waits"]
_Flow: TypeAlias = Literal["bulk", "slow", ""]

# More than what keeps connections alive, reports metrics or asks for work, all connections together.
_BULK_BYTES_PER_S = 16_384
# A slow transfer, which goes on in each interval of an inspection. A query every few seconds does not.
_STEADY_BYTES_PER_S = 400
_LOPSIDED_FACTOR = 4
# What comes in bursts has not been asked for: an answer is not so much longer than its question.
_PUSHED_BYTES_PER_S = 500
_PUSHED_FACTOR = 64
_UPLOADED_BYTES_PER_S = 4096
# The same of a child that a rank waits for; see ``signs``.
_WORK_SHARE = 0.003
_DRIP_BYTES_PER_S = 256
_IO_BYTES_PER_S = 16_384
# One that is busy may as well busy-loop: its stacks decide about that; see ``signs``.
_BUSY_SHARE = 0.1
# What a thread has always done is not what the rank waits for.
_AS_EVER = 1.5
# A shorter life says little about what a thread does when the rank works.
_LIVED_S = 10.0
_DISK_WAITS = 2
# Compilers use whole cores; a service that idles, or collects metrics, does not.
_SERVER_SHARE = 0.2
# Threads of torch, NCCL, RCCL and CUDA that wait, poll and keep connections alive. Not those of autograd. NCCL and RCCL
# name theirs only with NCCL_SET_THREAD_NAME=1; those of UCX, libfabric and HIP have none that are theirs alone.
# Without a name such a thread is judged by what it does, which is little, or a busy loop.
_NOT_THE_USERS = (
    *("pt_gloo", "gloo_", "pt_tcpst", "pt_nccl", "pt_worker", "pt_dist", "pt_elastic", "pt_watchdog"),
    *("NCCL", "nccl", "RCCL", "cuda-Evt", "cuda0"),
)


def inspection_from(content: bytes) -> JobInspection | None:
    """The answer of the examiner; None where it is none."""
    try:
        inspection: JobInspection = fit(JobInspection, loads(content))
    except MALFORMED:
        return None
    count = len(inspection.moments_s)
    connections = [one for rank in inspection.ranks for one in rank.connections]
    is_whole = count > 1 and all(len(one.taken) == len(one.sent) == count for one in connections)
    return inspection if is_whole else None


class _First(Value):
    """A thread when it was first seen while its rank stood still, and how long that had lasted."""

    thread: Thread
    still_s: float


class QuietWork:
    """What inspections say about one rank."""

    def __init__(self) -> None:
        self._before: RankInspection | None = None
        self._before_s = 0.0
        self._first: dict[tuple[int, int], _First] = {}

    def take(self, moments_s: Sequence[float], now: RankInspection, *, still_s: float, patience_s: float) -> Work:
        """What the rank does.

        Args:
            moments_s: of the inspection.
            now: what it has found.
            still_s: for how long the rank has not moved, by its samples.
            patience_s: how long the work of threads counts of which it is not known whether they do it always.
        """
        since_s = max(moments_s[-1] - self._before_s, 1e-3)
        if still_s < since_s:
            # It has moved by itself since then, and what was found before is of an earlier time.
            self._before, self._first = None, {}
        before, self._before, self._before_s = self._before, now, moments_s[-1]
        flow = _flow(before, now, since_s, moments_s, internal=False)
        is_slow = flow == "slow" or _is_served(now, moments_s)
        is_unclear = bool(_flow(before, now, since_s, moments_s, internal=True)) or now.is_frozen
        known = {(one.tid, one.start_ticks): one for one in before.threads} if before is not None else {}
        found = set()
        for thread in filter(_is_users, now.threads):
            is_slow = is_slow or (bool(thread.data_wakes) and min(thread.data_wakes) > 0)
            is_unclear = is_unclear or thread.in_disk_waits >= max(len(moments_s), _DISK_WAITS)
            if not thread.is_main:
                key = thread.tid, thread.start_ticks
                first = self._first.setdefault(key, _First(thread, still_s))
                found.add(_thread_does(first, known.get(key), thread, since_s))
        may_work = "may work" in found
        launches = before is not None and _has_launched(before, now)
        if launches or flow == "bulk" or "works" in found or ((is_slow or may_work) and still_s < patience_s):
            return "works"
        is_doubtful = (may_work or "busy" in found) and still_s < patience_s * DOUBTED
        return "may work" if is_slow or is_unclear or is_doubtful else "waits"


def _thread_does(first: _First, before: Thread | None, now: Thread, since_s: float) -> _ThreadWork:
    """The same of one thread, or ``busy``. ``before``: in the inspection before, which ended so long ago."""
    if now.in_disk_waits >= _DISK_WAITS and now.wakes and _last(now) > now.wakes[0] + 1:
        # One uninterruptible sleep after the other: it waits for a slow disk.
        return "works"
    lived_s = first.thread.age_s - first.still_s
    if before is None and lived_s > 0:
        return "waits"
    # Of one that was started while the rank stood still all that it has done counts.
    over_s = since_s if before is not None else max(now.age_s, 1e-3)
    ran_ns, io_bytes, faults, wakes = (
        (now.run_ns, now.io_bytes, now.major_faults, _last(now))
        if before is None
        else (
            now.run_ns - before.run_ns,
            now.io_bytes - before.io_bytes,
            now.major_faults - before.major_faults,
            _last(now) - _last(before),
        )
    )
    share = ran_ns / 1e9 / over_s
    io_bytes_per_s = io_bytes / over_s
    if faults > 0 or io_bytes_per_s > _IO_BYTES_PER_S:
        return "works"
    runs = share > _WORK_SHARE and ran_ns > BLINK_NS + WAKE_NS * wakes
    drips = io_bytes_per_s > _DRIP_BYTES_PER_S
    if not runs and not drips:
        return "waits"
    if lived_s < _LIVED_S:
        return "busy" if share > _BUSY_SHARE else "may work"
    # What it did while the rank stood still is taken off what it had done when it was first seen.
    share_before = (first.thread.run_ns / 1e9 - share * first.still_s) / lived_s
    io_before = (first.thread.io_bytes - io_bytes_per_s * first.still_s) / lived_s
    runs = runs and share > _AS_EVER * share_before
    drips = drips and io_bytes_per_s > _AS_EVER * io_before
    if runs and share > _BUSY_SHARE:
        return "busy"
    return "works" if runs or drips else "waits"


def _is_users(thread: Thread) -> bool:
    return not thread.name.startswith(_NOT_THE_USERS)


def _last(thread: Thread) -> int:
    return thread.wakes[-1] if thread.wakes else 0


def _flow(
    before: RankInspection | None, now: RankInspection, since_s: float, moments_s: Sequence[float], *, internal: bool
) -> _Flow:
    """What connections carry: ``bulk``, ``slow`` or nothing (empty).

    Args:
        before: the inspection before, which ended ``since_s`` ago.
        now: this inspection.
        since_s: see above.
        moments_s: of this inspection.
        internal: whether those are meant that may lead to other ranks, or all others.
    """
    meant = [one for one in now.connections if one.may_be_internal is internal and one.taken]
    asked = [one for one in meant if not one.is_accepted]
    # Many small transfers at a time are one.
    together = Connection(
        0,
        False,
        tuple(map(sum, zip(*(one.taken for one in asked), strict=True))),
        tuple(map(sum, zip(*(one.sent for one in asked), strict=True))),
    )
    flows = {_steady_flow(one, moments_s) for one in (*asked, together) if one.taken}
    if before is not None:
        flows.add(_flow_since(before, meant, since_s))
    return "bulk" if "bulk" in flows else "slow" if "slow" in flows else ""


def _is_served(inspection: RankInspection, moments_s: Sequence[float]) -> bool:
    """Whether a process of this host that the rank waits for is at work, such as a compile server."""
    busy_s = inspection.servers_busy_s
    return bool(busy_s) and busy_s[-1] - busy_s[0] > _SERVER_SHARE * (moments_s[-1] - moments_s[0])


def _steady_flow(one: Connection, moments_s: Sequence[float]) -> _Flow:
    """What a connection carries all the time that the inspection lasts."""
    moments = list(zip(moments_s, one.taken, one.sent, strict=False))
    least = min((now[1] - was[1] + now[2] - was[2]) / max(now[0] - was[0], 1e-3) for was, now in pairwise(moments))
    taken, sent = moments[-1][1] - moments[0][1], moments[-1][2] - moments[0][2]
    if least >= _BULK_BYTES_PER_S:
        return "bulk"
    is_lopsided = max(taken, sent) >= _LOPSIDED_FACTOR * min(taken, sent)
    return "slow" if is_lopsided and least >= _STEADY_BYTES_PER_S else ""


def _flow_since(before: RankInspection, connections: Iterable[Connection], since_s: float) -> _Flow:
    """What connections have carried since the inspection before."""
    known = {one.inode: one for one in before.connections}
    total_bytes = 0
    is_slow = False
    for one in connections:
        taken, sent = _carried(known.get(one.inode), one)
        # Answers to those who fetch metrics are none of the rank's work; what it is sent is.
        total_bytes += taken + (0 if one.is_accepted else sent)
        if not one.is_accepted:
            is_pushed = taken >= _PUSHED_FACTOR * sent and taken / since_s > _PUSHED_BYTES_PER_S
            is_uploaded = sent >= _PUSHED_FACTOR * taken and sent / since_s > _UPLOADED_BYTES_PER_S
            is_slow = is_slow or is_pushed or is_uploaded
    return "bulk" if total_bytes / since_s > _BULK_BYTES_PER_S else "slow" if is_slow else ""


def _has_launched(before: RankInspection, now: RankInspection) -> bool:
    """Whether NCCL counts more calls than in the inspection before; communicators come and go."""
    known = {one.communicator: one.launched for one in before.nccl_calls}
    return any(one.launched > known.get(one.communicator, one.launched) for one in now.nccl_calls)


def _carried(before: Connection | None, now: Connection) -> tuple[int, int]:
    if before is None or before.taken[-1] > now.taken[-1] or before.sent[-1] > now.sent[-1]:
        # Another one: the number of the socket has been given again.
        return now.taken[-1], now.sent[-1]
    return now.taken[-1] - before.taken[-1], now.sent[-1] - before.sent[-1]
