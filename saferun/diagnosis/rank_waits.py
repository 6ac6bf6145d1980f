"""Who waits in what: each rank gets one answer, and ranks of the same answer are one group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.diagnosis.collectives import CollectiveFindings, compare
from saferun.diagnosis.frames import UserCode, is_native, location_text
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.merged_stacks import best_dumps, followed_threads, main_thread, waits_for_a_thread, worker_dumps
from saferun.diagnosis.peer_rules import in_collective
from saferun.diagnosis.rank_view import Found, RankView, first_found, user_frame
from saferun.diagnosis.wait_rules import RULES, keeps_gil
from saferun.evidence.diagnosis_values import WaitGroup
from saferun.evidence.job_evidence import Capture, Evidence, Frame, HangVerdict, ProcessSnapshot, StackDump, ThreadStack
from saferun.model import Value
from saferun.text.wording import NOT_PYTHON

IN_THREAD = "in another thread"
# Vague kinds, which give way to what a thread is in that the main thread waits for.
_VAGUE = frozenset({"lock", "user_code"})
# Kinds for which it matters that no other thread of the process can run meanwhile.
_HELD_UP_BY_GIL = frozenset({"sleep", "lock", "file_io", "network", "user_code"})


class Wait(Value):
    """What one rank waits in, and where in the user's code; ``location`` is empty where that is not known."""

    rank: int
    found: Found
    location: str

    @property
    def description(self) -> str:
        """To stand after "it": ``sleeps at train.py:52 in step``."""
        if self.found.problem and self.found.kind == "data_loading":
            return self.found.problem
        at = f" at {self.location}" if self.location else ""
        problem = f"; {self.found.problem}" if self.found.problem else ""
        return f"{self.found.doing}{at}{problem}"


def wait_groups(
    capture: Capture,
    *,
    ranks: Sequence[int],
    dead: Mapping[int, str],
    hang: HangVerdict | None = None,
    script: str = "",
    cwd: str = "",
) -> tuple[WaitGroup, ...]:
    """Who waits in what: every rank in one group, those that wait alike in the same, ordered by their first rank.

    Args:
        capture: what was seen.
        ranks: all ranks of this host.
        dead: how those that have ended did: ``exit code 0``.
        hang: the verdict, where there is one.
        script: the path of the script, or its module; empty where unknown.
        cwd: the ranks' working directory.
    """
    findings = compare(capture.collectives, ranks)
    return group_waits(rank_waits(capture, findings, ranks=ranks, dead=dead, hang=hang, user=UserCode(script, cwd)))


def waits_of(evidence: Evidence, hosts: Hosts, findings: CollectiveFindings) -> tuple[Wait, ...]:
    """What those that lived were waiting in."""
    capture = evidence.capture
    ranks = sorted({*(dump.rank for dump in capture.stacks), *(process.rank for process in capture.processes)})
    if not ranks:
        return ()
    dead = {end.rank: end.status.description for end in evidence.ends if not end.stopped_by_us}
    user = UserCode(evidence.script, evidence.cwd)
    waits = rank_waits(capture, findings, ranks=ranks, dead=dead, hang=None, user=user)
    return located_waits(waits, hosts)


def group_waits(waits: Iterable[Wait]) -> tuple[WaitGroup, ...]:
    """Ranks that wait alike as one group."""
    members: dict[tuple[str, str, str], list[int]] = {}
    for wait in waits:
        members.setdefault((wait.found.kind, wait.found.detail, wait.location), []).append(wait.rank)
    groups = [
        WaitGroup(kind, what, tuple(sorted(ranks)), location) for (kind, what, location), ranks in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: group.ranks))


def rank_waits(
    capture: Capture,
    findings: CollectiveFindings,
    *,
    ranks: Sequence[int],
    dead: Mapping[int, str],
    hang: HangVerdict | None,
    user: UserCode,
    store_port: int = 0,
) -> tuple[Wait, ...]:
    """What each rank waits in, in order of the ranks.

    Args:
        capture: what was seen.
        findings: of the Flight Recorders.
        ranks: all ranks of this host.
        dead: how those that have ended did.
        hang: the verdict, where there is one.
        user: distinguishes the user's own code.
        store_port: of the job's store; 0: unknown.
    """
    processes, children = _processes(capture.processes)
    dumps = best_dumps(capture.stacks)
    workers: dict[int, list[StackDump]] = {}
    for dump in worker_dumps(capture.stacks):
        workers.setdefault(dump.rank, []).append(dump)
    pending = {wait.rank: wait.op or "a collective" for wait in reversed(findings.waiting)}
    behind = {rank for missing in findings.missing for rank in missing.ranks}
    natives = _natives(dumps, processes)
    keeping = {_likeness_of(dump, processes.get(rank)) for rank, dump in dumps.items() if keeps_gil(dump)}
    waits = []
    for rank in sorted({*ranks, *dead}):
        found_dump = dumps.get(rank)
        thread = main_thread(found_dump) if found_dump is not None else None
        view = RankView(
            rank,
            user,
            frames=thread.frames if thread is not None else (),
            active=thread is not None and thread.active,
            owns_gil=thread is not None and thread.owns_gil,
            process=processes.get(rank),
            children=tuple(children.get(rank, ())),
            workers=tuple(workers.get(rank, ())),
            pending=pending.get(rank, ""),
            is_behind=rank in behind,
            ended=dead.get(rank, ""),
            failure=found_dump.failure if found_dump is not None else "",
            hang=hang,
            store_port=store_port,
            is_bare=found_dump is not None and _is_bare(found_dump),
        )
        likeness = _likeness(view.frames, view.process)
        view = view._replace(frames=natives.get(likeness, view.frames), keeps_gil=likeness in keeping)
        waits.append(_wait(view, _followed(found_dump, user)))
    return tuple(waits)


def _is_bare(dump: StackDump) -> bool:
    """Whether it is a Python without Python code: its interpreter does not exist yet, or no more."""
    if dump.failure:
        return dump.failure.endswith(NOT_PYTHON) and dump.name.startswith(("python", "pt_main"))
    return not any(thread.frames for thread in dump.threads)


def _processes(
    processes: Iterable[ProcessSnapshot],
) -> tuple[dict[int, ProcessSnapshot], dict[int, list[ProcessSnapshot]]]:
    """The snapshots of ranks and of their descendants, by rank; the latest of each process."""
    newest = {(process.rank, process.pid): process for process in processes}
    own = {process.rank: process for process in newest.values() if process.is_rank}
    children: dict[int, list[ProcessSnapshot]] = {}
    for _, process in sorted(newest.items()):
        if not process.is_rank:
            children.setdefault(process.rank, []).append(process)
    return own, children


def located_waits(waits: Sequence[Wait], hosts: Hosts) -> tuple[Wait, ...]:
    """The same waits, with the host's name after each address that belongs to a host of the job."""
    if not hosts.are_several:
        return tuple(waits)
    located = {found: found._replace(detail=hosts.located(found.detail)) for found in {wait.found for wait in waits}}
    return tuple(wait._replace(found=located[wait.found]) for wait in waits)


_Likeness = tuple[tuple[Frame, ...], str]


def _likeness(frames: Sequence[Frame], process: ProcessSnapshot | None) -> _Likeness:
    return tuple(frame for frame in frames if not is_native(frame)), process.syscall if process is not None else ""


def _likeness_of(dump: StackDump, process: ProcessSnapshot | None) -> _Likeness:
    thread = main_thread(dump)
    return _likeness(thread.frames if thread is not None else (), process)


def _natives(
    dumps: Mapping[int, StackDump], processes: Mapping[int, ProcessSnapshot]
) -> dict[_Likeness, tuple[Frame, ...]]:
    """Stacks with native calls, by what they have in common with those that were taken without.

    Native calls are taken of one rank among those that stand in the same line, in the same system call.
    """
    found: dict[_Likeness, tuple[Frame, ...]] = {}
    for rank, dump in sorted(dumps.items()):
        thread = main_thread(dump)
        # What runs is elsewhere at the next glance.
        if thread is not None and not thread.active and any(map(is_native, thread.frames)):
            likeness = _likeness(thread.frames, processes.get(rank))
            if likeness[0]:
                found.setdefault(likeness, thread.frames)
    return found


def _followed(dump: StackDump | None, user: UserCode) -> Sequence[ThreadStack]:
    """The threads that the main thread waits for: in the user's code, else a library's that wait for other ranks."""
    main = main_thread(dump) if dump is not None else None
    if dump is None or main is None:
        return ()
    followed = followed_threads(dump, user)
    if followed or not waits_for_a_thread(main, user):
        return followed
    # As when a library saves a checkpoint in a thread of its own.
    others = (thread for thread in dump.threads if thread is not main)
    return [thread for thread in others if in_collective(RankView(-1, user, thread.frames, is_main=False)) is not None]


def _wait(view: RankView, followed: Sequence[ThreadStack]) -> Wait:
    found = first_found(view, RULES) or Found("unanswering", "", "cannot be inspected")
    location = location_text(user_frame(view.frames, view.user))
    is_blocked = view.owns_gil and not view.active and not view.keeps_gil
    if is_blocked and found.kind in _HELD_UP_BY_GIL and not found.of_peers:
        found = found._replace(doing=f"{found.doing} in C code that holds the GIL")
    if found.kind in _VAGUE and followed:
        inner_views = [_view_of(view, thread) for thread in followed]
        # What a thread waits for other ranks with is what the rank does.
        _, found, location = min(inner_views, key=lambda inner: inner[0])
    return Wait(view.rank, found, location if found.kind != "dead" else "")


def _view_of(view: RankView, thread: ThreadStack) -> tuple[tuple[bool, bool], Found, str]:
    inner = view._replace(frames=thread.frames, active=thread.active, is_main=False)
    found = first_found(inner, RULES) or Found("user_code", "", "waits")
    location = location_text(user_frame(thread.frames, view.user))
    found_there = (
        found._replace(detail=f"{found.detail}, {IN_THREAD}".removeprefix(", ")) if not found.of_peers else found
    )
    return (not found.of_peers, found.kind in _VAGUE), found_there, f"{location}" if location else ""
