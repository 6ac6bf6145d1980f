"""One attempt, from the assignments to the next rendezvous: the log, heartbeats, chunks, and lost hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from saferun.cluster.silence import CUT, REACHED, UNKNOWN
from saferun.coordinator.assignments import HostRecord
from saferun.coordinator.clock_exchange import ClockExchange, ClockSample, ClockServer
from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.control_search import JOB_KEY
from saferun.coordinator.dial import addresses_elsewhere
from saferun.coordinator.evidence_chunks import ChunkReader, chunk_key, is_chunk_name, write_chunk
from saferun.coordinator.heartbeats import HeartbeatMonitor, Heartbeats
from saferun.coordinator.job_log import ANSWERS, QUESTIONS, JobLog
from saferun.coordinator.liveness import Liveness, OwnSupervisor
from saferun.coordinator.liveness_probe import SilenceReason
from saferun.coordinator.prefix_store import PrefixStore
from saferun.coordinator.rendezvous_round import RendezvousResult, RendezvousRound
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.coordinator.tasks import TaskConnection, Tasks
from saferun.model import RANKS_DONE, RANKS_RUN

_BEATS_PER_TIMEOUT = 6
# However short a time the leader lets hosts be silent.
_LEAST_INTERVAL_S = 0.05
_ACKS_S = 10.0
# A host that is lost does not say that it has read the leader's last entry.
_READ_S = 3.0
_READ_AGAIN_S = 0.02
_MOST_UNREAD_BYTES = 8 << 20
# After these entries of the log tasks may end whose ranks have not ended well.
_ENDS = frozenset({"abort", "decision", "request"})


class CoordinatorAttempt:
    """An attempt that this host takes part in.

    Args:
        result: what the rendezvous came to.
        rdzv: how this host joined it.
        own: this host's record.
        tasks: the connections to its tasks.
        on_moved: takes a connection to the control store at another address, where it cannot be reached any more at
            the one where the hosts met.
        is_resumed: whether another process of this host has taken part in it before.
    """

    def __init__(
        self,
        result: RendezvousResult,
        rdzv: RendezvousRound,
        own: HostRecord,
        tasks: Tasks,
        on_moved: Callable[[StoreClient], None] = lambda _: None,
        *,
        is_resumed: bool = False,
    ) -> None:
        self.assignment = result.assignment
        self.number = result.assignment.attempt
        self.is_leader = result.assignment.host == 0
        self.prefix = result.prefix
        self.client = result.client
        self._own = own
        self._records = result.records
        self._tasks = tasks
        self._probe_after_s = rdzv.request.probe_after_s
        self._acked: set[int] = set()
        self._gone: set[int] = set()
        self._done: set[int] = set()  # tasks whose ranks have all ended with exit code 0
        self._closed = False
        self._is_ending = False  # a host, or a task of this one, has announced that; or the control store is lost
        self._cannot_work = False  # on the leader, for want of threads
        self._is_deaf = False  # on the leader: what hears the other hosts could not be opened
        self.is_followed = False  # by another attempt of the same hosts, as the job's log has it
        self._is_called_off = False  # there is no other attempt, by a request that no decision has followed
        self._labels = result.labels if self.is_leader else []
        assignment = result.assignment
        self._channel = ControlChannel(
            result.client,
            result.job,
            JOB_KEY,
            assignment.leader_name,
            addresses_elsewhere(assignment.leader_addresses, own.addresses) or assignment.leader_addresses,
            rdzv.request.probe_after_s,
            start=self._start_channel,
            on_lost=self._on_channel_lost,
            on_late=self._on_late,
            on_searching=self._on_searching,
            on_moved=self._on_channel_moved,
        )
        self._on_moved = on_moved
        self._entry_lock = threading.Lock()
        self._entries: list[dict[str, Any]] | None = [] if is_resumed else None  # for tasks that rejoin
        self.log = JobLog(self._channel, self.prefix, assignment.host, self._on_entry, is_resumed=is_resumed)
        pids = {task: record.pid for task, record in enumerate(own.tasks) if record.pid > 0}
        interval_s = heartbeat_interval_s(rdzv.request.probe_after_s, assignment.probe_after_s)
        self._heartbeats = Heartbeats(
            self._channel, self.prefix, assignment.host, interval_s, pids, is_resumed=is_resumed
        )
        self._clocks = ClockExchange(
            self._channel, self.prefix, assignment.host, assignment.members, self._on_clock_sample
        )
        self._clock_server: ClockServer | None = None
        self._monitor: HeartbeatMonitor | None = None
        self._reader: ChunkReader | None = None
        self._own_supervisor = OwnSupervisor(assignment.leader_name, pids, interval_s, self._probe_after_s)
        self._liveness: Liveness | None = None
        if self.is_leader:
            self._liveness = Liveness(
                result.records,
                self._labels,
                own.addresses,
                interval_s,
                has_one_port=issubclass(result.client.store_class, PrefixStore),
                report=self._report,
            )

    def announce(self) -> None:
        """Report the leader's own tasks to it, before any of them sends something itself."""
        if self.is_leader:
            self._send_head("states", changed={f"0/{task}": {"s": RANKS_RUN} for task in range(len(self._own.tasks))})

    def open(self) -> None:
        """Start to watch, to send heartbeats and, on the leader, to monitor the others."""
        if self.is_leader:
            # Before anything can be sent: the goodbye that follows a decision needs the monitor.
            self._open_leader()
            if self._cannot_work:
                return
        self._channel.open()

    def _open_leader(self) -> None:
        assert self._liveness is not None  # noqa: S101 - this is the leader
        try:
            self._reader = ChunkReader(
                self.client.another(),
                self.prefix,
                self.assignment.chunk_limit_bytes,
                self._deliver_chunk,
                self._is_head_busy,
            )
            self._monitor = HeartbeatMonitor(
                self.client.another(),
                self.prefix,
                [len(record.tasks) for record in self._records],
                self._probe_after_s,
                on_states=lambda changed: self._send_head("states", changed=changed),
                on_chunk=self._reader.announce,
                on_timeout=self._liveness.find_out,
                on_late=self._on_late,
                on_return=lambda host: self._send_head("returned", host=host),
                on_stuck=self._liveness.on_stuck,
            )
            self._liveness.monitor = self._monitor
            self._clock_server = ClockServer(self.client.another(), self.prefix)
            self._reader.start()
            self._monitor.start()
            self._clock_server.start()
        except StoreBrokenError:
            # No descriptor is left, or the store has too many connections in its backlog. It is tried again.
            self._is_deaf = True
            return
        except RuntimeError as error:
            self._cannot_work = True
            text = f"the coordinator of this host cannot work: {error}"
            self._on_channel_lost(SilenceReason(UNKNOWN, text), may_come_again=False)
            return
        if self._closed:
            self._monitor.close()
            self._reader.close()
            self._clock_server.close()

    def _start_channel(self) -> None:
        self.log.start()
        if not self.is_leader:
            self._heartbeats.start()
            self._clocks.start()

    # ------------------------------------------------------------------------------------------------------- from tasks

    def append(self, message: object, *, is_repeated: bool = False) -> None:
        """A task appends something to the job's log. ``is_repeated``: as in ``JobLog.append``."""
        self._is_ending = self._is_ending or (isinstance(message, dict) and message.get("kind") in _ENDS)
        self.log.append(message, is_repeated=is_repeated)

    def set_state(self, task: int, state: object) -> None:
        """A task's state has changed."""
        if not isinstance(state, dict):
            return
        if state.get("s") == RANKS_DONE:
            self._done.add(task)
        else:
            self._done.discard(task)
        if self.is_leader:
            self._send_head("states", changed={f"0/{task}": state})
        else:
            self._heartbeats.set_state(task, state)

    def add_chunk(self, task: int, name: object, text: object) -> None:
        """A task sends a chunk of evidence."""
        if not is_chunk_name(name) or not isinstance(text, str) or len(text) > self.assignment.chunk_limit_bytes:
            return
        named = str(name)
        if self.is_leader:
            self._deliver_chunk(0, task, named, text)
        else:
            key = chunk_key(self.prefix, self.assignment.host, task, named)
            write_chunk(self._channel, key, text, lambda: self._heartbeats.add_chunk(task, named))

    def ack(self, task: int) -> None:
        """A task has taken in the decision."""
        self._acked.add(task)
        self._check_acks()

    def lose_task(self, task: int, *, is_leaving: bool = False, joins_next: bool = False) -> bool:
        """A task has gone; nothing is expected of it any more. That it has may be found twice.

        Args:
            task: which.
            is_leaving: whether it has said goodbye.
            joins_next: whether it had asked to join the next attempt, which then misses it instead.

        Returns:
            Whether there is nothing to report: the job can do without it, as its ranks have ended well or this host is
            a spare, or it is known to have gone, or says goodbye as the attempt ends.
        """
        is_known = task in self._gone
        self._gone.add(task)
        self._check_acks()
        is_needed = task not in self._done and not self.assignment.is_spare
        is_over = self._is_ending or self._closed
        if is_known or joins_next or (is_leaving and (is_over or not is_needed)):
            return True
        if is_needed:
            return False
        why = "this host is a spare" if self.assignment.is_spare else "its ranks have ended well"
        text = f"the saferun of task {task} of {self._own.name} is gone; {why}, so the job goes on"
        self._send_head("warn", text=text)
        return True

    def _check_acks(self) -> None:
        if not self.is_leader and self._all_acked():
            self._heartbeats.set_acked()

    def _all_acked(self) -> bool:
        return set(range(len(self._own.tasks))) <= self._acked | self._gone

    def probe(self, hosts: list[int], *, awaits_heartbeat: bool = False) -> None:
        """Probe hosts, and report to the head what was found; see ``Liveness.probe``."""
        if self._liveness is not None:
            self._liveness.probe(hosts, awaits_heartbeat=awaits_heartbeat)

    # ------------------------------------------------------------------------------------------------------ from others

    def _on_entry(self, k: int, message: dict[str, Any]) -> None:
        if self._closed:
            return
        if message["kind"] == "malformed":
            self._send_head("malformed", k=k, text=message.get("text", ""))
            return
        self._is_ending = self._is_ending or message["kind"] in _ENDS
        self.is_followed = self.is_followed or _is_restart(message)
        # A request while ranks run is followed by a decision, which every host acknowledges.
        self._is_called_off = (self._is_called_off or message["kind"] == "request") and message["kind"] != "decision"
        fields = {"op": "entry", "attempt": self.number, "k": k, "received": time.time(), "message": message}
        with self._entry_lock:
            if self._entries is not None:
                self._entries = _with_entry(self._entries, fields, message, self.assignment.host)
            self._tasks.send_all(fields)

    def welcome(self, connection: TaskConnection, task: int | None) -> None:
        """A task of the process before this one is here again: it gets the log from the beginning."""
        with self._entry_lock:
            connection.task = task
            for message in [{"op": "resumed", "attempt": self.number}, *(self._entries or ())]:
                connection.send(message)

    def missing(self) -> list[int]:
        """The tasks that are expected and not connected."""
        if self._closed or self.log.has("decision"):
            return []
        return [task for task in range(len(self._own.tasks)) if self._tasks.of_task(task) is None]

    def _deliver_chunk(self, host: int, task: int, name: str, text: str) -> None:
        self._send_head("chunk", name=name, host=host, task=task, text=text)

    def _send_head(self, op: str, **fields: Any) -> None:  # noqa: ANN401
        if not self._closed:
            self._tasks.head.send({"op": op, "attempt": self.number, **fields})

    def _report(self, op: str, fields: dict[str, object]) -> None:
        """What is found out about a host; once there is a decision, no host is missed any more."""
        if op not in {"lost", "silent"} or not self.log.has("decision"):
            self._send_head(op, **fields)

    def _is_head_busy(self) -> bool:
        return self._tasks.head.unsent_bytes > _MOST_UNREAD_BYTES and not self._closed

    def _on_clock_sample(self, sample: ClockSample) -> None:
        fields = {"leader_s": sample.leader_s, "error_s": sample.error_s}
        self._tasks.send_all({"op": "clock", "attempt": self.number, **fields})

    def _on_late(self) -> None:
        """A host has been silent for a while: how the ranks do from now on may decide what is made of that."""
        self._tasks.send_all({"op": "late", "attempt": self.number})

    def _on_searching(self, finding: SilenceReason) -> None:
        if not self._closed and not self.log.has("decision"):
            fields = {"host": 0, "label": self.assignment.leader_name, "why": finding.why, "text": finding.message}
            self._tasks.send_all({"op": "silent", "attempt": self.number, **fields})

    def _on_channel_moved(self, was: str, now: str) -> None:
        self._tasks.send_all({"op": "returned", "attempt": self.number, "host": 0, "was": was, "now": now})
        with suppress(StoreBrokenError):
            self._on_moved(self._channel.client.another())

    def _on_channel_lost(self, finding: SilenceReason, may_come_again: bool) -> None:  # noqa: FBT001 - by the channel
        self._is_ending = True  # for this host; each task decides for itself what follows
        if not self._closed and not self.log.has("decision"):
            why = CUT if finding.why == REACHED else finding.why
            fields = {"why": why, "text": finding.message, "again": may_come_again}
            self._tasks.send_all({"op": "store_lost", "attempt": self.number, **fields})

    # ---------------------------------------------------------------------------------------------------------- the end

    def tick(self, elapsed_s: float) -> None:
        """Time has passed."""
        if not self.is_leader:
            self._channel.tick(elapsed_s)
            self.log.tick(elapsed_s, self._probe_after_s)
            return
        self._channel.open_again()
        if self._is_deaf and not self._closed:
            self._is_deaf = False
            try:
                threading.Thread(target=self._open_leader, daemon=True).start()
            except RuntimeError:
                self._is_deaf = True
        stalled = self._own_supervisor.tick(elapsed_s)
        if stalled:
            # It cannot report that; one of the others does, and all wait for it where a decision is due, within bounds.
            self.log.append({"kind": "notice", "text": stalled})

    def wait_acked(self) -> None:
        """After a decision: wait until it has been acknowledged, here and, on the leader, everywhere."""
        give_up_at = time.monotonic() + _ACKS_S
        # The goodbye may have come right after the decision.
        self.log.wait_written(_ACKS_S)
        if self._is_called_off:
            self._wait_read()
            return
        if not self.log.has("decision"):
            if not self.is_leader and not self._closed and self._done >= set(range(len(self._own.tasks))):
                self._heartbeats.wait_written(_ACKS_S)  # the leader would take this host for lost, with its ranks
            return
        while not self._all_acked() and time.monotonic() < give_up_at:
            time.sleep(0.01)
        remaining_s = max(0.0, give_up_at - time.monotonic())
        if self._monitor is not None:
            self._monitor.wait_acked(remaining_s)
        elif not self.is_leader:
            self._heartbeats.wait_written(min(remaining_s, 2.0))

    def _wait_read(self) -> None:
        """Serve the store until the other hosts have read that there is no other attempt; on those, say so."""
        give_up_at = time.monotonic() + _READ_S
        with suppress(StoreBrokenError):
            # By a connection of its own, which breaks where the value is no number.
            client = self.client.another()
            key = f"{self.prefix}called_off"
            if not self.is_leader:
                client.add(key, 1)
                return
            while client.add(key, 0) < self.assignment.members - 1 and time.monotonic() < give_up_at:
                time.sleep(_READ_AGAIN_S)

    def close(self) -> None:
        """The attempt is over for this host: nothing of it is sent any more."""
        if self._closed:
            return
        self._closed = True
        if self.is_leader:
            # The others' watchers wait in the store, and are sent home by this.
            self.log.end()
        else:
            self._channel.close()
            self.log.wake()
        for part in (self._monitor, self._reader, self._clock_server):
            if part is not None:
                part.close()

    def forget(self) -> None:
        """Delete what the attempt has left in the store. For the leader, once the hosts have met again."""
        try:
            client = self.client.another()
            for k in range(self.log.count + 1):
                client.delete(f"{self.prefix}log/{k}")
            for host in range(self.assignment.members):
                client.delete(f"{self.prefix}heartbeat/{host}")
                client.delete(f"{self.prefix}state/{host}")
            client.delete(f"{self.prefix}clock")
        except StoreBrokenError:
            pass
        self._channel.close()


def heartbeat_interval_s(own_s: float, leaders_s: float) -> float:
    """How often a host sends a heartbeat.

    Args:
        own_s: for how long this host lets the store answer nothing: what a heartbeat gets is an answer.
        leaders_s: for how long the leader lets this host be silent; 0: it does not say.
    """
    interval_s = own_s / _BEATS_PER_TIMEOUT
    return min(interval_s, max(leaders_s / _BEATS_PER_TIMEOUT, _LEAST_INTERVAL_S)) if leaders_s else interval_s


def _with_entry(
    kept: list[dict[str, Any]], fields: dict[str, Any], message: dict[str, Any], host: int
) -> list[dict[str, Any]]:
    """What tasks of a host that rejoin hear, with another entry. Of each kind of question the newest is enough."""
    kind, hosts = message["kind"], message.get("hosts")
    if kind in QUESTIONS:
        if isinstance(hosts, list) and host not in hosts:
            return kept  # other hosts are asked
        kept = [entry for entry in kept if entry["message"]["kind"] != kind]
    return kept if kind in ANSWERS else [*kept, fields]


def _is_restart(message: dict[str, Any]) -> bool:
    """Whether an entry of the log says that the hosts meet again."""
    word = {"abort": "reason", "decision": "next"}.get(message["kind"], "")
    return message.get(word) == "restart"
