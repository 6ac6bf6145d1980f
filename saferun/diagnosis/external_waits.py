"""Whether a hang may be none, because the rank that the others wait for waits for something outside the job. Pure.

A sleep, an answer of a database, a file lock of another job, a program that the rank has started: whether they end in a
minute or never cannot be observed. What can be seen not to end by itself is no such wait: a collective, a lock
between threads, a call that holds the GIL, another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.collectives import compare
from saferun.diagnosis.frames import Calls, UserCode
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.merged_stacks import (
    WORKER_NAME,
    best_dumps,
    followed_threads,
    main_thread,
    started_in_child,
    worker_dumps,
)
from saferun.diagnosis.rank_view import Found, RankView, first_found, library_call
from saferun.diagnosis.rank_waits import Wait, rank_waits
from saferun.diagnosis.wait_rules import RULES
from saferun.evidence import Cause, Diagnosis, Evidence, ProcessSnapshot, StackDump, ThreadStack
from saferun.text.wording import duration_text, ranks_text
from saferun.wait_evidence import EPHEMERAL_FROM, ThreadWait

# A child's child's child may be what is waited for; a longer chain is none that anybody has built on purpose.
_DEPTH = 6
# Waits that can be seen to lead out of the process by their calls alone, where its system call is not known.
_LEADS_OUT = frozenset({"file_io", "network", "debugger"})
_ANY_PROCESS = frozenset({"a queue between processes", "a lock between processes", "a future"})
_SLEEPING = ("hrtimer_nanosleep", "do_nanosleep")
# Libraries that ask a server in a thread of their own, for which the caller waits.
_ASKED_IN_A_THREAD = Calls(("/fsspec/asyn.py", ()), ("/grpc/_channel.py", ()), ("/cassandra/cluster.py", ("result",)))
_QUEUE = "a queue"
_EVENT_WAIT = Calls(("/threading.py", ("wait",)))
_FILE_LOCK = ("a lock on ", "a lock file")


def external_ranks(evidence: Evidence, cause: Cause | None) -> tuple[int, ...]:
    """The ranks that wait for something outside the job, where it may be that all others wait only for them.

    Empty where something else of what was seen is a hang by itself.

    Args:
        evidence: of a hang.
        cause: what the diagnosis has found.
    """
    case = _Case(evidence)
    odd = [wait for wait in case.waits if not wait.found.of_peers and wait.found.kind != "dead"]
    external = {wait.rank for wait in odd if case.is_external(wait)}
    ended = {wait.rank for wait in case.waits if wait.found.kind == "dead"}
    blamed = cause.ranks if cause is not None else ()
    if not external or (blamed and not {*blamed} & (external | ended)) or case.is_proven(external):
        return ()
    if any(wait.found.kind == "lock" and wait.rank not in external and not case.waits_for_a_rank(wait) for wait in odd):
        return ()
    return tuple(sorted(external))


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
        self._ports = {
            (host.host, port)
            for process in capture.processes
            if process.ports and (host := self._hosts.of(process.rank)) is not None
            for port in process.ports
        }
        seen = {*self._dumps, *self._ranks}
        ranks = sorted(seen if self._hosts.are_several else {*evidence.ranks} or seen)
        self._findings = compare(capture.collectives, ranks)
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

        A script may ask in a loop with a sleep in it whether a collective is over.
        """
        found = self._findings
        stuck = (one.waiting for one in found.stuck if one.is_complete)
        circles = (circle.ranks for circle in found.circles)
        return bool(found.mismatched) or any(external.issubset(ranks) for ranks in (*stuck, *circles))

    def is_external(self, wait: Wait) -> bool:
        """Whether a rank waits for something outside the job."""
        process, dump = self._ranks.get(wait.rank), self._dumps.get(wait.rank)
        thread = main_thread(dump) if dump is not None else None
        return self._is_external(wait.rank, wait.found, process, dump, thread, frozenset())

    def waits_for_a_rank(self, wait: Wait) -> bool:
        """Whether another rank of its host is at the other end of what a rank waits for."""
        own = self._ranks.get(wait.rank)
        main = _main_wait(own) if own is not None else None
        pids = {rank.pid for rank in self._ranks.values() if self._are_neighbours(rank.rank, wait.rank)}
        return own is not None and main is not None and bool(pids.intersection(main.pids) - {own.pid})

    def _are_neighbours(self, one: int, other: int) -> bool:
        host, others = self._hosts.of(one), self._hosts.of(other)
        return (host.host if host is not None else -1) == (others.host if others is not None else -1)

    # ----------------------------------------------------------------------------------------------------- one process

    def _is_external(
        self,
        rank: int,
        found: Found,
        process: ProcessSnapshot | None,
        dump: StackDump | None,
        thread: ThreadStack | None,
        seen: frozenset[int],
    ) -> bool:
        if found.of_peers or (thread is not None and thread.owns_gil and not thread.active):
            # A call that holds the GIL keeps all threads of the rank from doing anything.
            return False
        if found.kind in {"stopped", "uninterruptible", "spinning", "gpu", "unanswering", "dead"}:
            return False
        main = _main_wait(process) if process is not None else None
        if found.kind == "sleep" or (main is not None and self._is_outside(main, rank)):
            return True
        if main is None and process is not None and process.wchan.startswith(_SLEEPING):
            return True
        if main is None and (found.kind in _LEADS_OUT or found.detail.startswith(_FILE_LOCK)):
            return not (self._store_port and f":{self._store_port} (" in found.detail)
        if found.detail.startswith("a lock file"):
            return True
        view = RankView(rank, self._user, thread.frames if thread is not None else ())
        if library_call(view, _ASKED_IN_A_THREAD) is not None or (
            main is not None and main.timed and found.detail == "an event" and library_call(view, _EVENT_WAIT)
        ):
            return True
        if process is not None and self._waits_for_a_child(rank, found, process, main, seen):
            return True
        return dump is not None and self._has_thread_outside(rank, found, process, dump, seen)

    def _leads_out(self, address: str, rank: int) -> bool:
        """Whether a connection leads neither to the store nor, by its port, to a rank on another host."""
        head, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) == self._store_port:
            return False
        host = self._hosts.at_address(head.strip("[]")) if self._hosts.are_several else None
        own = self._hosts.of(rank)
        if host is None or (own is not None and host.host == own.host):
            return True
        return int(port) < EPHEMERAL_FROM and (host.host, int(port)) not in self._ports

    def _is_outside(self, wait: ThreadWait, rank: int) -> bool:
        return wait.outside or any(self._leads_out(address, rank) for address in wait.addresses)

    def _has_thread_outside(
        self, rank: int, found: Found, process: ProcessSnapshot | None, dump: StackDump, seen: frozenset[int]
    ) -> bool:
        """Whether a thread that the main thread waits for, or may wait for, does that."""
        waits = {wait.tid: wait for wait in process.waits} if process is not None else {}
        followed = followed_threads(dump, self._user)
        main = main_thread(dump)
        users = [thread for thread in dump.threads if thread is not main and any(map(self._user.owns, thread.frames))]
        for thread in followed or (users if found.kind == "lock" else ()):
            inner = RankView(rank, self._user, thread.frames, thread.active, process, is_main=False)
            does = first_found(inner, RULES)
            if does is not None and does.of_peers:
                continue
            wait = waits.get(thread.tid)
            if wait is None:
                if not waits and followed and does is not None and does.kind in {*_LEADS_OUT, "sleep"}:
                    return True
                continue
            if any(self._leads_out(address, rank) for address in wait.addresses):
                return True
            # Of a lock it is not known who holds it, and a thread that sleeps may have nothing to do with it.
            if (followed or found.detail == _QUEUE) and (
                wait.outside or self._is_any_external(rank, wait.pids, process, seen)
            ):
                return True
        return False

    # ------------------------------------------------------------------------------------------------------- children

    def _waits_for_a_child(
        self, rank: int, found: Found, process: ProcessSnapshot, main: ThreadWait | None, seen: frozenset[int]
    ) -> bool:
        """Whether a child that a process waits for waits for something outside the job, or is such a thing."""
        if len(seen) >= _DEPTH:
            return False
        seen |= {process.pid}
        children = [child for child in self._children.get(rank, ()) if child.pid not in seen]
        if not children and found.kind == "subprocess" and found.detail != "a process pool":
            # There is one: evidence that is too large is sent without them.
            return True
        if main is not None and main.pids:
            return self._is_any_external(rank, main.pids, process, seen)
        if found.kind == "data_loading":
            awaited = [child for child in children if child.name == WORKER_NAME]
        elif found.kind == "subprocess" and found.detail != "a process pool":
            own = [child for child in children if child.ppid == process.pid and child.name != WORKER_NAME]
            named = [child for child in own if f"process {child.pid} " in f"{process.waits_on} "]
            awaited = named or own
        elif found.kind in {"subprocess", "compile"} or found.detail in _ANY_PROCESS:
            awaited = [child for child in children if _does_its_work(child, process)]
        elif process.syscall in {"wait4", "waitid"}:
            awaited = [child for child in children if child.ppid == process.pid]
        else:
            return False
        return any(self._is_child_external(rank, child, process, seen) for child in awaited)

    def _is_any_external(
        self, rank: int, pids: Sequence[int], process: ProcessSnapshot | None, seen: frozenset[int]
    ) -> bool:
        awaited = [child for child in self._children.get(rank, ()) if child.pid in pids and child.pid not in seen]
        return process is not None and any(
            self._is_child_external(rank, child, process, seen | {process.pid}) for child in awaited
        )

    def _is_child_external(
        self, rank: int, child: ProcessSnapshot, parent: ProcessSnapshot, seen: frozenset[int]
    ) -> bool:
        dump = self._child_dumps.get((rank, child.pid))
        thread = main_thread(dump) if dump is not None else None
        frames = started_in_child(thread.frames) if thread is not None else ()
        active = thread is not None and thread.active
        below = [process for process in self._children.get(rank, ()) if process.ppid == child.pid]
        found = first_found(RankView(rank, self._user, frames, active, child, children=tuple(below)), RULES)
        if found is None:
            return False
        if self._is_external(rank, found, child, dump, thread, seen):
            return True
        if thread is not None and thread.frames:
            return False
        if below:
            return any(
                self._is_child_external(rank, one, child, seen | {child.pid})
                for one in below
                if one.pid not in seen and len(seen) < _DEPTH
            )
        # Another program, whose threads wait for each other: what it does is not to be seen.
        return found.kind in {"lock", "uninterruptible"} and not _does_its_work(child, parent)


def _main_wait(process: ProcessSnapshot) -> ThreadWait | None:
    return next((wait for wait in process.waits if wait.tid == process.pid), None)


def _does_its_work(child: ProcessSnapshot, parent: ProcessSnapshot) -> bool:
    """Whether a child runs the code of its parent: a fork of it, or one that multiprocessing has started."""
    if not child.command or not parent.command:
        return child.name == parent.name
    return child.command == parent.command or "multiprocessing" in child.command or child.name == WORKER_NAME


def suspected(diagnosis: Diagnosis, ranks: Sequence[int], certain_after_s: float) -> Diagnosis:
    """The diagnosis of a hang that is only suspected, because these ranks wait for something outside the job."""
    wait = "waits" if len(ranks) == 1 else "wait"
    line = (
        f"{ranks_text(ranks)} {wait} for something outside the job, which may still come: "
        f"the hang is certain after {duration_text(certain_after_s)} (--external-wait-timeout)"
    )
    headline = diagnosis.headline.replace("the job hangs: ", "the job may hang: ", 1)
    return diagnosis._replace(headline=headline, findings=(line, *diagnosis.findings))
