"""Whether a hang may be none, because the rank that the others wait for waits for something outside the job. Pure.

A sleep, an answer of a database, a file lock of another job, a program that the rank has started: whether they end in a
minute or never cannot be observed. The same goes for what a GPU computes, also before a collective that all ranks have
called. What can be seen not to end by itself is no such wait: any other collective, a lock between threads, a call that
holds the GIL, another rank, a GPU that has failed.

Of a process whose I/O and system call may not be read (it is not dumpable, a security module denies it, gVisor) only
the stack is known: whether it works in what it is in, or waits, cannot be observed either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.diagnosis.collectives import compare
from saferun.diagnosis.frames import Calls, UserCode, is_native
from saferun.diagnosis.hang_gpus import has_failed_gpu
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.merged_stacks import (
    WORKER_NAME,
    best_dumps,
    main_thread,
    started_in_child,
    waits_for_a_thread,
    worker_dumps,
)
from saferun.diagnosis.rank_view import Found, RankView, first_found, library_call
from saferun.diagnosis.rank_waits import Wait, rank_waits
from saferun.diagnosis.wait_rules import GIL, OWN_GIL, RULES
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import Evidence, ProcessSnapshot, StackDump, ThreadStack
from saferun.evidence.wait_evidence import EPHEMERAL_FROM, ThreadWait
from saferun.model import Value
from saferun.text.wording import duration_text, ranks_text

# Waits that can be seen to lead out of the process by their calls alone, where its system call is not known.
_LEADS_OUT = frozenset({"file_io", "network", "debugger"})
_OUTSIDE_CALLS = _LEADS_OUT | {"subprocess", "data_loading"}
_ANY_PROCESS = frozenset({"a queue between processes", "a lock between processes", "a future"})
_SLEEPING = ("hrtimer_nanosleep", "do_nanosleep")
# Libraries that ask a server in a thread of their own, for which the caller waits.
_ASKED_IN_A_THREAD = Calls(("/fsspec/asyn.py", ()), ("/grpc/_channel.py", ()), ("/cassandra/cluster.py", ("result",)))
# A loop of asyncio waits for whatever its threads and its children do.
_EVENT_LOOP = Calls(("/asyncio/base_events.py", ()), ("/asyncio/runners.py", ()))
_LOCK, _QUEUE, _POOL = "a lock", "a queue", "a process pool"
# What another thread gives to the one that waits, whichever that is.
_GIVEN = frozenset({_QUEUE, "an event", "a condition", "a semaphore", "a barrier between threads"})
_THREADING = Calls(("/threading.py", ()))
_WATCHED = frozenset({GIL, OWN_GIL, "a queue between processes", "a lock between processes"})
_NO_STACKS = "unanswering"
_CERTAIN = frozenset({"stopped", "spinning", _NO_STACKS, "dead"})
_ON_GPU, _IN_CALL = "gpu", "collective"
_ON_GPUS = frozenset({_ON_GPU, _IN_CALL})
_ALL_HAVE_CALLED = frozenset({"hang_all_in_collective", "hang_stuck_collective"})
# By NCCL's RAS.
_LOST = frozenset({"dead", "unanswering", "failed", "aborted"})
_FILE_LOCK = ("a lock on ", "a lock file")
EXTERNAL_WAIT = "--external-wait-timeout"
GROUP_TIMEOUT = f"the timeout of the process group; {EXTERNAL_WAIT} sets another time"
"""What sets how long such a hang is only suspected."""


def external_ranks(evidence: Evidence, cause: Cause | None) -> tuple[int, ...]:
    """The ranks that wait for something outside the job, where it may be that all others wait only for them.

    Or those of a call that all have made, before which their GPUs may still compute. Empty where something else of what
    was seen is a hang by itself.

    Args:
        evidence: of a hang.
        cause: what the diagnosis has found.
    """
    case = _Case(evidence)
    odd = [wait for wait in case.waits if not wait.found.of_peers and wait.found.kind != "dead"]
    external = {wait.rank for wait in odd if case.is_external(wait)}
    ended = {wait.rank for wait in case.waits if wait.found.kind == "dead"}
    blamed = cause.ranks if cause is not None else ()
    if not external:
        return case.queued_ranks(cause)
    if (blamed and not {*blamed} & (external | ended)) or case.is_proven(external):
        return ()
    if any(wait.found.kind == "lock" and wait.rank not in external and not case.waits_for_a_rank(wait) for wait in odd):
        return ()
    return tuple(sorted(external))


class _Waiter(Value):
    """A process, and what it waits in."""

    rank: int
    found: Found
    process: ProcessSnapshot | None
    dump: StackDump | None


class _Awaited(Value):
    """A process that another one waits for."""

    child: ProcessSnapshot
    parent: ProcessSnapshot


_Judged = tuple[bool, Sequence[_Awaited]]
_NOTHING: _Judged = (False, ())
_OUTSIDE: _Judged = (True, ())


class _Case:
    """What the processes of the job do."""

    def __init__(self, evidence: Evidence) -> None:
        capture = evidence.capture
        self._hosts = Hosts(evidence)
        self._store_port = evidence.store_port
        self._user = UserCode(evidence.script, evidence.cwd)
        ended = {end.rank: end.status.description for end in evidence.ends if not end.stopped_by_us}
        self._dumps = best_dumps(capture.stacks)
        self._child_dumps = {(dump.rank, dump.pid): dump for dump in worker_dumps(capture.stacks)}
        self._ranks = {process.rank: process for process in capture.processes if process.is_rank}
        self._children: dict[int, list[ProcessSnapshot]] = {}
        for process in capture.processes:
            if not process.is_rank:
                self._children.setdefault(process.rank, []).append(process)
        self._processes = {(self._number(process.rank), process.pid): process for process in capture.processes}
        self._ports = self._ports_of(evidence)
        seen = {*self._dumps, *self._ranks}
        ranks = sorted(seen if self._hosts.are_several else {*evidence.ranks} or seen)
        self._findings = compare(capture.collectives, ranks)
        self._recorded = {one.rank for one in capture.collectives if not one.failure}
        is_lost = any(one.is_timed and one.kind in _LOST for one in capture.nccl)
        self._failed = {one.rank for one in capture.collectives if one.has_failed or is_lost}
        self._is_beating = evidence.hang is not None and evidence.hang.kind == "heartbeat"
        self.waits: Sequence[Wait] = rank_waits(
            capture,
            self._findings,
            ranks=ranks,
            dead=ended,
            hang=evidence.hang,
            user=self._user,
            store_port=evidence.store_port,
        )

    def is_proven(self, external: set[int]) -> bool:
        """Whether the Flight Recorders show a deadlock that includes these ranks, whatever they do meanwhile.

        A script may ask in a loop with a sleep in it whether a collective is over. A rank that waits for a server, a
        file or a child does not wait in the calls that it has made before, such as an ``irecv``.
        """
        found = self._findings
        waits = [wait.found for wait in self.waits if wait.rank in external]
        if not found.mismatched and any(
            wait.kind in _OUTSIDE_CALLS or wait.detail.startswith(_FILE_LOCK) for wait in waits
        ):
            return False
        stuck = (one.waiting for one in found.stuck if one.is_complete and one.lasts)
        circles = (circle.ranks for circle in found.circles)
        return bool(found.mismatched) or any(external.issubset(ranks) for ranks in (*stuck, *circles))

    def queued_ranks(self, cause: Cause | None) -> tuple[int, ...]:
        """The ranks of a call that all have made, whose GPUs may still be at work on what was queued before it.

        That a kernel has begun is recorded with TORCH_NCCL_ENABLE_TIMING only. A GPU that has failed, or a process that
        NCCL does not reach, shows that there is a hang.
        """
        if cause is None or cause.class_name not in _ALL_HAVE_CALLED or self._is_beating:
            return ()
        stuck = [one for one in self._findings.stuck if not cause.ranks or {*cause.ranks} & {*one.waiting}]
        ranks = {rank for one in stuck for rank in one.waiting}
        has_failed = any(rank in self._failed or has_failed_gpu(self._hosts, rank) for rank in ranks)
        return () if has_failed or any(one.lasts for one in stuck) else tuple(sorted(ranks))

    def is_external(self, wait: Wait) -> bool:
        """Whether a rank waits for something outside the job, by itself or for a process that does."""
        process, dump = self._ranks.get(wait.rank), self._dumps.get(wait.rank)
        is_outside, awaited = self._judge(_Waiter(wait.rank, wait.found, process, dump))
        # Each process once: workers may wait for each other in as many ways as they can be put in order.
        seen = {process.pid} if process is not None else set()
        rest = list(awaited)
        while rest and not is_outside:
            one = rest.pop()
            if one.child.pid not in seen:
                seen.add(one.child.pid)
                is_outside, awaited = self._judge_child(one)
                rest += awaited
        return is_outside

    def waits_for_a_rank(self, wait: Wait) -> bool:
        """Whether another rank of its host is at the other end of what a rank waits for."""
        own = self._ranks.get(wait.rank)
        main = _main_wait(own) if own is not None else None
        pids = {rank.pid for rank in self._ranks.values() if self._are_neighbours(rank.rank, wait.rank)}
        return own is not None and main is not None and bool(pids.intersection(main.pids) - {own.pid})

    def _are_neighbours(self, one: int, other: int) -> bool:
        return self._number(one) == self._number(other)

    def _number(self, rank: int) -> int:
        """The number of a rank's host; -1 where it is not known, or there is only one."""
        host = self._hosts.of(rank)
        return host.host if host is not None else -1

    # ----------------------------------------------------------------------------------------------------- one process

    def _judge(self, one: _Waiter) -> _Judged:
        """Whether a process waits for something outside the job, and else for which others of the job."""
        found, process, dump = one.found, one.process, one.dump
        thread = main_thread(dump) if dump is not None else None
        # A call that holds the GIL keeps all threads of the rank from doing anything, and a server not.
        holds_gil = thread is not None and thread.owns_gil and not thread.active
        main = _main_wait(process) if process is not None else None
        is_unreadable = process is not None and process.unreadable
        if found.of_peers or (found.kind in _CERTAIN and not (is_unreadable and found.kind == _NO_STACKS)):
            return _NOTHING
        if is_unreadable and found.kind != _ON_GPU:
            return _OUTSIDE
        if holds_gil and not self._leads_to_others(main, one.rank):
            return _NOTHING
        if found.kind == _ON_GPU:
            # Where it is not known whether it waits in a collective, it most likely does; all may only be queued there.
            are_queued = any(one.rank in stuck.unknown and not stuck.lasts for stuck in self._findings.stuck)
            is_known = one.rank in self._recorded or (are_queued and one.rank not in self._failed)
            return is_known and not has_failed_gpu(self._hosts, one.rank), ()
        if found.kind == "uninterruptible":
            # A file server may answer again; what a driver waits for is not to be seen.
            return main is not None and main.outside, ()
        view = RankView(one.rank, self._user, thread.frames if thread is not None else ())
        is_outside = self._is_outside(main, one.rank) if main is not None else self._seems_outside(found, process)
        if is_outside or found.kind == "sleep" or _asks_by_its_calls(view, found, main):
            return _OUTSIDE
        children = self._children_of(one.rank, found, process, main) if process is not None else ()
        if children is None:
            return _OUTSIDE
        awaited = [_Awaited(child, process) for child in children if process is not None]
        if dump is None or thread is None:
            return False, awaited
        is_outside, more = self._judge_threads(one, dump, thread, view)
        return is_outside, (*awaited, *more)

    def _seems_outside(self, found: Found, process: ProcessSnapshot | None) -> bool:
        """The same by the stack alone, where the system call is not known."""
        if process is not None and process.wchan.startswith(_SLEEPING):
            return True
        if found.kind not in _LEADS_OUT and not found.detail.startswith(_FILE_LOCK):
            return False
        return not (self._store_port and f":{self._store_port} (" in found.detail)

    def _leads_out(self, address: str, rank: int) -> bool:
        """Whether a connection leads neither to the store nor to a process of the job, by its port."""
        head, _, text = address.rpartition(":")
        name, port, own = head.strip("[]"), int(text) if text.isdigit() else 0, self._number(rank)
        if not port or port == self._store_port:
            return False
        there = self._hosts.at_address(name)
        if there is None and not name.startswith("127.") and name != "::1":
            return True
        number = there.host if there is not None else own
        ports, is_whole, kernels_from = self._ports.get(number, (frozenset(), False, EPHEMERAL_FROM))
        # (On its own host it would have been found to be a process of the same saferun's.)
        return port not in ports and (is_whole or number == own or port < kernels_from)

    def _ports_of(self, evidence: Evidence) -> dict[int, tuple[frozenset[int], bool, int]]:
        """By host: the ports that its ranks have, whether these are all of them, and where the kernel's own begin."""
        kernels: dict[int, int] = {}
        ports: dict[int, set[int]] = {}
        whole: dict[int, set[int]] = {}
        for one in evidence.capture.ports:
            number = self._number(one.ranks[0]) if one.ranks else -1
            ports.setdefault(number, set()).update(one.ports)
            kernels[number] = min(one.kernels_from, kernels.get(number, EPHEMERAL_FROM))
            whole.setdefault(number, set()).update(one.ranks if one.is_whole else ())
        ended = {end.rank for end in evidence.ends}
        ranks = {host.host: {*host.ranks} - ended for host in evidence.hosts}
        return {
            host: (frozenset(found), ranks.get(host, set()) <= whole[host], kernels[host])
            for host, found in ports.items()
        }

    def _leads_to_others(self, wait: ThreadWait | None, rank: int) -> bool:
        """Whether a descriptor of a wait leads out of the job."""
        return wait is not None and (wait.by_descriptor or self._has_address_outside(wait, rank))

    def _is_outside(self, wait: ThreadWait, rank: int) -> bool:
        return wait.outside or any(self._leads_out(address, rank) for address in wait.addresses)

    # -------------------------------------------------------------------------------------------------------- threads

    def _judge_threads(self, one: _Waiter, dump: StackDump, main: ThreadStack, view: RankView) -> _Judged:
        """The same of the threads that the main thread waits for, or may wait for."""
        process, found = one.process, one.found
        own = process.waits if process is not None else ()
        waits = {wait.tid: wait for wait in own if process is not None and wait.tid != process.pid}
        is_awaited = (
            waits_for_a_thread(main, self._user) or library_call(view, _EVENT_LOOP) is not None or found.detail == _POOL
        )
        if found.detail == _LOCK and self._may_wait_in_c(one.rank, waits, dump):
            return _OUTSIDE
        own_threads = [waits.get(thread.tid) for thread in dump.threads if thread is not main and thread.frames]
        if found.detail in _GIVEN and any(self._leads_to_others(wait, one.rank) for wait in own_threads):
            # A server of Python's, or a library's, that receives what the main thread waits for.
            return _OUTSIDE
        if not is_awaited and found.kind != "lock":
            return _NOTHING
        awaited: list[_Awaited] = []
        # Some tools do not know the kernel's numbers of threads, or know those of a namespace.
        are_numbered = bool(own) and process is not None and main.tid == process.pid
        for thread in dump.threads:
            if thread is main:
                continue
            is_outside, more = self._judge_thread(one, thread, waits, is_awaited=is_awaited, is_numbered=are_numbered)
            if is_outside:
                return _OUTSIDE
            awaited += more
        return False, awaited

    def _may_wait_in_c(self, rank: int, waits: Mapping[int, ThreadWait], dump: StackDump) -> bool:
        """Whether what looks like a lock may be a library's wait for threads of its own, which wait outside."""
        with_frames = {thread.tid for thread in dump.threads if thread.frames}
        return any(
            self._has_address_outside(wait, rank) or (wait.sleeps and tid not in with_frames)
            for tid, wait in waits.items()
        )

    def _judge_thread(
        self, one: _Waiter, thread: ThreadStack, waits: Mapping[int, ThreadWait], *, is_awaited: bool, is_numbered: bool
    ) -> _Judged:
        """The same of one other thread of a process."""
        is_users = any(map(self._user.owns, thread.frames)) or _is_timer(thread)
        # Whichever thread of the user's may do that: give what is waited for, or give back a lock.
        counts = is_awaited or (is_users and one.found.detail in {_LOCK, *_GIVEN})
        if not (counts or is_users or one.found.detail == _QUEUE):
            return _NOTHING
        view = RankView(one.rank, self._user, thread.frames, thread.active, one.process, is_main=False)
        does = first_found(view, RULES)
        if does is not None and does.of_peers:
            return _NOTHING
        if thread.tid <= 0 or not is_numbered:
            is_known = does is not None and does.kind in {*_LEADS_OUT, "sleep"}
            any_outside = is_awaited and any(self._is_outside(wait, one.rank) for wait in waits.values())
            any_sleeps = counts and (is_known or any(wait.sleeps for wait in waits.values()))
            return any_outside or any_sleeps, ()
        wait = waits.get(thread.tid, ThreadWait(thread.tid))
        children = self._at(one.rank, wait.pids) if counts else ()
        ends_by_itself = wait.outside or children is None or (is_users and wait.timed)
        if self._has_address_outside(wait, one.rank) or (counts and ends_by_itself):
            return _OUTSIDE
        return False, [_Awaited(child, one.process) for child in children or () if one.process is not None]

    def _has_address_outside(self, wait: ThreadWait, rank: int) -> bool:
        return any(self._leads_out(address, rank) for address in wait.addresses)

    # ------------------------------------------------------------------------------------------------------- children

    def _children_of(
        self, rank: int, found: Found, process: ProcessSnapshot, main: ThreadWait | None
    ) -> Sequence[ProcessSnapshot] | None:
        """The processes that a process waits for; None: there are some of which nothing is known."""
        children = self._children.get(rank, [])
        if not children and found.kind == "subprocess" and found.detail != _POOL:
            # There is one: evidence that is too large is sent without them.
            return None
        if main is not None and main.pids:
            return self._at(rank, main.pids)
        if found.kind == "data_loading":
            return [child for child in children if child.name == WORKER_NAME]
        if found.kind == "subprocess" and found.detail != _POOL:
            own = [child for child in children if child.ppid == process.pid and child.name != WORKER_NAME]
            named = [child for child in own if f"process {child.pid} " in f"{process.waits_on} "]
            return named or own
        if found.kind in {"subprocess", "compile"} or found.detail in _ANY_PROCESS:
            return [child for child in children if _does_its_work(child, process)]
        if process.syscall in {"wait4", "waitid"}:
            return [child for child in children if child.ppid == process.pid]
        return ()

    def _at(self, rank: int, pids: Sequence[int]) -> Sequence[ProcessSnapshot] | None:
        """Processes of a rank's host by their numbers, without ranks; None where some of them are not known."""
        found = [self._processes.get((self._number(rank), pid)) for pid in pids]
        known = [process for process in found if process is not None]
        return [process for process in known if not process.is_rank] if len(known) == len(found) else None

    def _judge_child(self, one: _Awaited) -> _Judged:
        child, parent = one
        rank = child.rank
        dump = self._child_dumps.get((rank, child.pid))
        thread = main_thread(dump) if dump is not None else None
        frames = started_in_child(thread.frames) if thread is not None else ()
        active = thread is not None and thread.active
        below = [process for process in self._children.get(rank, ()) if process.ppid == child.pid]
        found = first_found(RankView(rank, self._user, frames, active, child, children=tuple(below)), RULES)
        if found is None:
            return _NOTHING
        is_outside, awaited = self._judge(_Waiter(rank, found, child, dump))
        if is_outside or (thread is not None and thread.frames):
            return is_outside, awaited
        if below:
            return False, (*awaited, *(_Awaited(process, child) for process in below))
        # Another program, of which nothing leads to the job: what it does is not to be seen.
        main = _main_wait(child)
        is_seen = found.of_peers or found.kind in {"stopped", "dead"} or (main is not None and main.pids)
        return not (is_seen or _does_its_work(child, parent)), awaited


def _asks_by_its_calls(view: RankView, found: Found, main: ThreadWait | None) -> bool:
    """Whether the calls alone show a wait for something outside the job."""
    if found.detail.startswith("a lock file") or library_call(view, _ASKED_IN_A_THREAD) is not None:
        return True
    # With a timeout of its own it goes on, whatever it waits for. Who waits for the GIL looks at it again and again, as
    # worker processes do at their queues.
    is_timed = main is not None and main.timed
    return is_timed and found.kind == "lock" and found.detail not in _WATCHED


def _is_timer(thread: ThreadStack) -> bool:
    """Whether a thread is in no code but that of ``threading``, as a ``threading.Timer`` is until its time has come."""
    calls = [frame for frame in thread.frames if not is_native(frame)]
    return bool(calls) and all(frame in _THREADING for frame in calls)


def _main_wait(process: ProcessSnapshot) -> ThreadWait | None:
    return next((wait for wait in process.waits if wait.tid == process.pid), None)


def _does_its_work(child: ProcessSnapshot, parent: ProcessSnapshot) -> bool:
    """Whether a child runs the code of its parent: a fork of it, or one that multiprocessing has started."""
    if not child.command or not parent.command:
        return child.name == parent.name
    return child.command == parent.command or "multiprocessing" in child.command or child.name == WORKER_NAME


def unreadable_processes(evidence: Evidence) -> dict[int, ProcessSnapshot]:
    """By rank, the process of which neither the I/O nor the system call may be read: its own, else one below it."""
    found: dict[int, ProcessSnapshot] = {}
    for process in evidence.capture.processes:
        if process.unreadable and (process.is_rank or process.rank not in found):
            found[process.rank] = process
    return found


def suspected(
    diagnosis: Diagnosis,
    ranks: Sequence[int],
    certain_after_s: float,
    unreadable: Mapping[int, ProcessSnapshot] | None = None,
    *,
    by: str = EXTERNAL_WAIT,
) -> Diagnosis:
    """The diagnosis of a hang that is only suspected, because these ranks wait for something outside the job.

    Args:
        diagnosis: as of a hang that is certain.
        ranks: as of ``external_ranks``.
        certain_after_s: how long such a hang is only suspected.
        unreadable: as of ``unreadable_processes``.
        by: what sets that time.
    """
    on_gpus = {rank: group.kind for group in diagnosis.groups if group.kind in _ON_GPUS for rank in group.ranks}
    kinds = {on_gpus.get(rank, "") for rank in ranks}
    is_one = len(ranks) == 1
    what = "something outside the job, which may still come"
    gpus = "its GPU" if is_one else "their GPUs"
    if kinds == {_IN_CALL}:
        what = f"a call that all have made, before which {gpus} may still compute"
    elif kinds <= _ON_GPUS:
        what = f"{gpus}, which may still compute"
    does = f"{ranks_text(ranks)} {'waits' if is_one else 'wait'} for {what}"
    hidden = {rank: process for rank, process in (unreadable or {}).items() if rank in ranks and rank not in on_gpus}
    if hidden:
        does = _hidden_text(hidden)
    line = f"{does}: the hang is certain after {duration_text(certain_after_s)} ({by})"
    return worded_as_suspicion(diagnosis)._replace(findings=(line, *diagnosis.findings))


def _hidden_text(hidden: Mapping[int, ProcessSnapshot]) -> str:
    """What ranks do, or processes below them, that cannot be observed; only the ranks where there are such."""
    own = sorted(rank for rank, process in hidden.items() if process.is_rank)
    shown = own or sorted(hidden)
    is_one = len(shown) == 1
    why = f"{'its' if is_one else 'their'} I/O and system calls cannot be read in /proc"
    if own:
        return f"{ranks_text(own)} may be at work: {why}"
    below = hidden[shown[0]]
    which = f"{below.name} (pid {below.pid})" if is_one else "processes below them"
    waits = f"{ranks_text(shown)} {'waits' if is_one else 'wait'} for something outside the job"
    return f"{waits}, or for {which}, which may be at work: {why}"


def worded_as_suspicion(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis of a hang that was taken for certain, and is not."""
    return diagnosis._replace(headline=diagnosis.headline.replace("the job hangs: ", "the job may hang: ", 1))
