"""Whether the other hosts live, as the leader finds out; and whether the leader's own supervisor does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from saferun.cluster.silence import CUT, GONE, REACHED, UNKNOWN, UNREACHABLE
from saferun.coordinator.assignments import HostRecord
from saferun.coordinator.dial import addresses_elsewhere
from saferun.coordinator.heartbeats import HeartbeatMonitor
from saferun.coordinator.liveness_probe import MAY_WORK, SilenceReason, probe_host
from saferun.coordinator.stuck_processes import stuck_message, stuck_processes, wait_locations

# For how long a host that answers is given to send another heartbeat.
_HEARTBEAT_AGAIN_S = 3.0
# For how many intervals the next heartbeat of a host is waited for that seems to be gone, where that may well be wrong.
_INTERVALS_TO_WAIT = 1.5
# A host with a heartbeat in so many intervals is there, whatever a probe finds.
_INTERVALS_ALIVE = 2.0
# How long it may take until a heartbeat has been read.
_UNREAD_S = 2.0
_PAUSE_S = 0.02
# So many hosts are probed at once, each at all its addresses; the others wait. One that does not answer takes 3.5 s.
_MOST_PROBED = 128


class Liveness:
    """Probes hosts, in the background, and weighs that against their heartbeats.

    Args:
        records: of all hosts.
        labels: their names in the job.
        own_addresses: of this host, at which no other one is probed if it has any else.
        interval_s: between heartbeats.
        has_one_port: whether all but one port may be closed, so that a refusal means nothing.
        report: takes what was found: ``probed``, ``silent``, ``lost`` or ``warn``, with the fields of that message.
        probe: asks one host whether it is there.
    """

    def __init__(
        self,
        records: Sequence[HostRecord],
        labels: Sequence[str],
        own_addresses: Sequence[str],
        interval_s: float,
        *,
        has_one_port: bool,
        report: Callable[[str, dict[str, object]], None],
        probe: Callable[..., SilenceReason] = probe_host,
    ) -> None:
        self.monitor: HeartbeatMonitor | None = None  # of the heartbeats, once there are any
        self._records = records
        self._labels = labels
        self._own_addresses = own_addresses
        self._interval_s = interval_s
        self._has_one_port = has_one_port
        self._report = report
        self._probe_host = probe
        self._refused: dict[int, bytes] = {}  # the heartbeats of hosts that lived when their ports refused
        self._probes = _Background(_MOST_PROBED)

    def probe(self, hosts: Sequence[int], *, awaits_heartbeat: bool) -> None:
        """Probe hosts.

        Args:
            hosts: their numbers.
            awaits_heartbeat: a host that seems gone gets one heartbeat period to show that it is not, and one that does
                not answer is not lost for that: its silence decides, as while nothing of it is waited for.
        """
        for host in hosts:
            if 0 < host < len(self._records):
                self._probes.add(partial(self._probe, host, awaits_heartbeat))

    def find_out(self, host: int) -> None:
        """Find out about a host whose heartbeats have stopped.

        Raises:
            RuntimeError: no thread can be started now.
        """
        self._probes.add(partial(self._find_out, host))

    def on_stuck(self, host: int, task: int, location: str) -> None:
        """A supervisor waits for a file system, or is stopped, while its host is there."""
        tasks = self._records[host].tasks
        pid = tasks[task].pid if task < len(tasks) else tasks[0].pid
        self._report("warn", {"text": stuck_message(self._labels[host], pid, location)})

    def _ask(self, host: int) -> SilenceReason:
        record = self._records[host]
        addresses = addresses_elsewhere(record.addresses, self._own_addresses) or list(record.addresses)
        return self._probe_host(self._labels[host], addresses, record.port, address=None)

    def _may_refuse(self, monitor: HeartbeatMonitor, host: int) -> bool:
        """Whether something before a host may refuse its port: it does if heartbeats have come since a refusal."""
        return self._has_one_port or self._refused.get(host, now := monitor.heartbeat_of(host)) != now

    def _note_refusal(self, monitor: HeartbeatMonitor, host: int) -> None:
        """The port of a host that lives was refused. Its last heartbeat may be one that was on its way as it ended."""
        self._refused.setdefault(host, monitor.heartbeat_of(host))

    def _probe(self, host: int, awaits_heartbeat: bool) -> None:  # noqa: FBT001 - a thread's argument
        monitor = self.monitor
        finding = self._ask(host)
        if monitor is None:
            is_there = finding.why == CUT  # it is too early for heartbeats
        elif finding.why in {CUT, UNREACHABLE}:
            is_there = monitor.silent_s(host) < _INTERVALS_ALIVE * self._interval_s
        elif finding.why == GONE:
            if self._patience_s(monitor, host, waits=False):
                # Its last heartbeat may be in the store, and not have been read yet.
                time.sleep(min(_UNREAD_S, self._interval_s))
            before = monitor.heartbeat_of(host)
            waits = awaits_heartbeat or self._may_refuse(monitor, host)
            is_there = _has_another(monitor, host, before, self._patience_s(monitor, host, waits=waits))
            if is_there:
                self._note_refusal(monitor, host)
        else:
            is_there = False
        if is_there:
            # Whatever stands before it: a firewall may refuse every port but one.
            finding = SilenceReason(REACHED, f"{self._labels[host]} answers")
        elif finding.why == UNREACHABLE and awaits_heartbeat:
            # A switch may restart. The monitor goes on to read its heartbeats, and finds out if none come.
            finding = SilenceReason(UNKNOWN, finding.message)
        elif finding.why in {GONE, UNREACHABLE} and monitor is not None:
            # Its answer to the decision is not waited for either.
            monitor.lose(host)
        self._report("probed", {"host": host, "why": finding.why, "text": finding.message})

    def _patience_s(self, monitor: HeartbeatMonitor, host: int, *, waits: bool) -> float:
        """For how long the next heartbeat is waited for of a host whose port is refused."""
        remaining_s = _INTERVALS_ALIVE * self._interval_s - monitor.silent_s(host)
        return max(remaining_s, _INTERVALS_TO_WAIT * self._interval_s if waits else 0.0)

    def _find_out(self, host: int) -> None:
        monitor = self.monitor
        if monitor is None:
            return
        try:
            self._judge(monitor, host)
        except Exception:
            monitor.reset(host)  # it is found out after another timeout
            raise

    def _judge(self, monitor: HeartbeatMonitor, host: int) -> None:
        before = monitor.heartbeat_of(host)
        finding = self._ask(host)
        # One that answers may have been held up, and its next heartbeat is on its way then. So it may be where the
        # network was away until now, and a firewall refuses.
        wait_s = min(_HEARTBEAT_AGAIN_S, 2 * self._interval_s) if finding.why in {CUT, GONE} else 0.0
        if _has_another(monitor, host, before, wait_s):
            if finding.why == GONE:
                self._note_refusal(monitor, host)
            monitor.reset(host)
            return
        if finding.why == GONE and self._may_refuse(monitor, host):
            # Something before that host may refuse every port but one.
            finding = SilenceReason(UNKNOWN, finding.message)
        if finding.why in MAY_WORK or monitor.is_missed(host):
            # Whether the job goes on is judged by those who see its ranks.
            monitor.miss(host)
            op = "silent"
        else:
            monitor.lose(host)
            op = "lost"
        self._report(op, {"host": host, "label": self._labels[host], "why": finding.why, "text": finding.message})


class _Background:
    """What is done in the background, so much of it at once.

    Args:
        most: how many threads there are at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads = 0

    def add(self, do: Callable[[], None]) -> None:
        """Do this too, as soon as a thread is free. What it raises costs what it does.

        Raises:
            RuntimeError: there is no thread, and none can be started now.
        """
        with self._lock:
            self._waiting.append(do)
            if self._threads >= self._most:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._threads -= 1
                if self._threads:
                    return  # those that there are do it when they are free
                self._waiting.remove(do)
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                do = self._waiting.popleft()
            with suppress(Exception):
                do()


def _has_another(monitor: HeartbeatMonitor, host: int, before: bytes, wait_s: float) -> bool:
    """Whether a host has sent another heartbeat since, or does so in time."""
    give_up_at = time.monotonic() + wait_s
    while monitor.heartbeat_of(host) == before and time.monotonic() < give_up_at:
        time.sleep(_PAUSE_S)
    return monitor.heartbeat_of(host) != before


class OwnSupervisor:
    """The leader's own supervisor, whose heartbeats no monitor reads: its coordinator sees when it does not run.

    Args:
        label: the host's name in the job.
        pids: of the supervisors of this host, by task.
        interval_s: how often it is checked.
        probe_after_s: half of which it may stand still.
    """

    def __init__(self, label: str, pids: Mapping[int, int], interval_s: float, probe_after_s: float) -> None:
        self._label = label
        self._pids = {0: pids[0]} if 0 in pids else {}
        self._interval_s = interval_s
        self._probe_after_s = probe_after_s
        self._seen_in_d: dict[int, int] = {}
        self._stuck_s = 0.0
        self._unchecked_s = 0.0

    def tick(self, elapsed_s: float) -> str:
        """Time has passed. Returns what is to be reported now; empty: nothing."""
        self._unchecked_s += elapsed_s
        if self._unchecked_s < self._interval_s:
            return ""
        stuck = stuck_processes(self._pids, self._seen_in_d)
        before_s, limit_s = self._stuck_s, self._probe_after_s / 2
        self._stuck_s = before_s + self._unchecked_s if stuck else 0.0
        self._unchecked_s = 0.0
        if not before_s < limit_s <= self._stuck_s:
            return ""
        return stuck_message(self._label, self._pids[0], wait_locations(stuck, self._pids).get("0", ""))
