"""Heartbeats of the hosts and states of their tasks: the hosts' side and the leader's.

Below the attempt's prefix: ``heartbeat/<host>`` is a number. A heartbeat adds 1 to it, and the answer is the sum, by
which a host also notices a store that does not answer. When a state has changed, it is written to ``state/<host>``
first, and the heartbeat adds 2**32 as well; then ``wake`` is set, for which the leader waits. So a host at rest sends
one small request an interval, and writes its state once a minute, in case it was overwritten.

With a job secret a heartbeat is a signed number, which its host writes and which has to rise; a state is numbered
likewise. So neither can be forged or replayed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from saferun.cluster.messages import MOST_TASKS
from saferun.coordinator.assignments import typed
from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.coordinator.stuck_processes import LONGEST_LOCATION, stuck_processes, wait_locations
from saferun.model import ASKED_CHUNK, RANKS_RUN, Value
from saferun.text.typed_json import line_of, number_of, text_of

CHANGE = 1 << 32
_LONGEST_STATE_BYTES = 256 << 10
_LONGEST_TASK_STATE_BYTES = 4 << 10
# Left out first, in this order, where a task's state is longer: how its ranks do matters more.
_NEEDED_LESS = ("waits", "beside", "route")
_MOST_CHUNKS = 1000
_READ_EVERY_S = 1.0
_LONGEST_TICK_S = 2.0
# When all hosts report at once, this many times as long as a read took is waited before the next one.
_PAUSE_PER_READ = 4.0
_LEAST_PAUSE_S = 0.005
_REWRITE_EVERY_S = 60.0
_LONGEST_SUM = 20


class Heartbeats:
    """A host's own heartbeats.

    Args:
        channel: to the control store.
        prefix: the attempt's.
        host: this host's number.
        interval_s: between heartbeats at rest.
        supervisors: the pids of this host's tasks, by task.
        is_resumed: whether another process of this host has sent some before.
    """

    def __init__(
        self,
        channel: ControlChannel,
        prefix: str,
        host: int,
        interval_s: float,
        supervisors: dict[int, int],
        *,
        is_resumed: bool = False,
    ) -> None:
        self._channel = channel
        self._prefix = prefix
        self._host = host
        self._interval_s = interval_s
        self._supervisors = supervisors
        self._changed = threading.Condition()
        self._is_dirty = True
        self._written = 0
        self._wanted = 0
        self._tasks: dict[str, Any] = {str(task): {"s": RANKS_RUN} for task in supervisors}
        self._chunks: list[ChunkName] = []
        self._stuck: dict[str, str] = {}
        self._locations: dict[str, str] = {}  # where those in state D wait
        self._seen_in_d: dict[int, int] = {}
        self._acked = False
        self._sum = 0  # what the heartbeats have come to
        self._is_resumed = is_resumed
        self._stored = b""  # the last one, with a job secret
        self._rewrite_at = 0.0

    def start(self) -> None:
        """Beat, with the channel's connection of now."""
        threading.Thread(target=self._run, daemon=True).start()

    def set_state(self, task: int, state: dict[str, Any]) -> None:
        """A task's state. What is too long even without what is needed less is ignored."""
        for name in _NEEDED_LESS:
            if len(json.dumps(state)) > _LONGEST_TASK_STATE_BYTES:
                state = {field: value for field, value in state.items() if field != name}
        if len(json.dumps(state)) <= _LONGEST_TASK_STATE_BYTES:
            self._change(lambda: self._tasks.update({str(task): state}))

    def add_chunk(self, task: int, name: str) -> None:
        """A chunk has been written to the store."""

        def add() -> None:
            if name.startswith(ASKED_CHUNK):
                self._chunks = [old for old in self._chunks if old.task != task or not old.name.startswith(ASKED_CHUNK)]
            self._chunks.append(ChunkName(task, name))

        self._change(add)

    def set_acked(self) -> None:
        """All tasks of this host have taken in the decision."""
        self._change(lambda: setattr(self, "_acked", True))

    def _change(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._is_dirty = True
            self._wanted += 1
            self._changed.notify_all()

    def wait_written(self, timeout_s: float) -> None:
        """Wait until all changes so far have reached the store."""
        with self._changed:
            wanted = self._wanted
            self._changed.wait_for(lambda: self._written >= wanted, timeout_s)

    def _run(self) -> None:
        client = self._channel.client
        with self._changed:
            self._is_dirty = True
        checked_at = 0.0
        is_first = True
        while self._channel.is_current(client):
            now = time.monotonic()
            if now - checked_at >= self._interval_s:
                checked_at = now
                self._check_supervisors()
            with self._changed:
                is_news, is_old = self._is_dirty, now >= self._rewrite_at
                wanted, text = self._wanted, self._text() if is_news or is_old else None
                self._is_dirty = False
            try:
                if is_first and self._sum and client.signer is None:
                    # In case it was overwritten; what is no number would break the connection again.
                    client.set(f"{self._prefix}heartbeat/{self._host}", str(self._sum))
                is_first = False
                if self._is_resumed and client.signer is not None:
                    self._sum = max(self._sum, self._sum_before(client))
                self._is_resumed = False
                if text is None:
                    self._add(client, 1)
                else:
                    # Now and then without need: the leader may have read something else there.
                    self._rewrite_at = now + _REWRITE_EVERY_S
                    client.set(f"{self._prefix}state/{self._host}", text, self._sum + 1)
                    self._add(client, CHANGE + 1)
                if is_news:
                    client.set(f"{self._prefix}wake", "1")
            except StoreBrokenError:
                with self._changed:
                    # Where the channel is there again already, its thread may have seen nothing to be written.
                    self._is_dirty = True
                    self._changed.notify_all()
                self._channel.repair(client)
                return
            with self._changed:
                self._written = max(self._written, wanted)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_dirty, self._interval_s)

    def _add(self, client: StoreClient, amount: int) -> None:
        key = f"{self._prefix}heartbeat/{self._host}"
        if client.signer is None:
            self._sum = client.add(key, amount)
            return
        self._sum += amount
        self._stored = client.put(key, self._stored, str(self._sum), self._sum)

    def _sum_before(self, client: StoreClient) -> int:
        """What the heartbeats of the process before this one came to: with a job secret, a lower sum counts for old."""
        found = client.find(f"{self._prefix}heartbeat/{self._host}") or b""
        return int(found) if found.isdigit() and len(found) < _LONGEST_SUM else 0

    def _text(self) -> str:
        chunks = tuple(self._chunks[-_MOST_CHUNKS:])
        return json.dumps(HostState(self._tasks, chunks, self._stuck, self._acked, self._locations)._asdict())

    def _check_supervisors(self) -> None:
        stuck = stuck_processes(self._supervisors, self._seen_in_d)
        if stuck != self._stuck:
            locations = wait_locations(stuck, self._supervisors)
            with self._changed:
                self._stuck, self._locations = stuck, locations
                self._is_dirty = True


# ----------------------------------------------------------------------------------------------------------- the leader


def _by_task(decode: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def decode_all(value: dict[str, Any]) -> dict[str, Any]:
        return {_task(key): decode(entry) for key, entry in value.items()}

    return decode_all


def _task(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) < 6):  # noqa: PLR2004 - bounded
        raise ValueError("no task")
    return key


def _task_state(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("an object is wanted")
    return value


class ChunkName(Value):
    """A chunk of evidence that a task has written to the store."""

    task: Annotated[int, number_of(MOST_TASKS)]
    name: Annotated[str, text_of(LONGEST_LOCATION)]


class HostState(Value):
    """What a host reports about its tasks, by their numbers.

    ``stuck``: the supervisors in state D or T; ``locations``: what those wait for.
    """

    tasks: Annotated[dict[str, Any], _by_task(_task_state)]
    chunks: tuple[ChunkName, ...]
    stuck: Annotated[dict[str, str], _by_task(line_of(1))]
    acked: bool
    locations: Annotated[dict[str, str], _by_task(line_of(LONGEST_LOCATION))]


def read_state(content: bytes, tasks: int = MOST_TASKS) -> HostState | None:
    """A host's state; None where it is malformed or out of bounds.

    Args:
        content: what the host has written.
        tasks: how many saferuns it has.
    """
    state: HostState | None = typed(HostState, content, longest=_LONGEST_STATE_BYTES)
    if state is None:
        return None
    named = [*map(int, (*state.tasks, *state.stuck, *state.locations)), *(chunk.task for chunk in state.chunks)]
    return state if all(task < tasks for task in named) else None


class PeerStatus:
    """What the leader knows of one host."""

    def __init__(self) -> None:
        self.heartbeat = b"0"
        self.changes = 0
        self.silent_s = 0.0
        self.stuck_s = 0.0
        self.is_stuck_reported = False
        self.state = HostState({}, (), {}, acked=False, locations={})
        self.is_lost = False
        self.is_probed = False  # it is being probed right now
        self.is_late = False  # it has been silent for half of the time
        self.is_reported_silent = False  # it has been reported that no heartbeat is received from it


class HeartbeatMonitor:
    """The leader's view of the other hosts.

    Args:
        client: to the control store, of its own.
        prefix: the attempt's.
        tasks: how many saferuns each host has, the leader included.
        probe_after_s: for how long a host may be silent before it is probed.
        on_states: gets the changed states of tasks: {"host/task": state}.
        on_chunk: takes host, task and name of a chunk that is in the store.
        on_timeout: takes a host that has sent no heartbeat for too long. Called once; ``reset`` makes it count again,
            ``lose`` ends it.
        on_late: called when a host has been silent for half of that time.
        on_return: takes a host that was ``missed`` and sends heartbeats again.
        on_stuck: takes, once each time, a host whose supervisor sleeps uninterruptibly or is stopped, the task, and
            where it waits (:func:`stuck_message`). The host is not given up: its coordinator sends heartbeats.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        tasks: Sequence[int],
        probe_after_s: float,
        *,
        on_states: Callable[[dict[str, Any]], None],
        on_chunk: Callable[[int, int, str], None],
        on_timeout: Callable[[int], None],
        on_late: Callable[[], None],
        on_return: Callable[[int], None],
        on_stuck: Callable[[int, int, str], None],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._probe_after_s = probe_after_s
        self._on_states = on_states
        self._on_chunk = on_chunk
        self._on_timeout = on_timeout
        self._on_late = on_late
        self._on_return = on_return
        self._on_stuck = on_stuck
        self._tasks = tasks
        self._seen = {host: PeerStatus() for host in range(1, len(tasks))}
        self._changed = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Read, until ``close``."""
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def lose(self, host: int) -> None:
        """Nothing is expected of this host any more."""
        with self._changed:
            self._seen[host].is_lost = True
            self._changed.notify_all()

    def heartbeat_of(self, host: int) -> bytes:
        """The number of its last heartbeat."""
        return self._seen[host].heartbeat

    def silent_s(self, host: int) -> float:
        """For how long it has sent no heartbeat."""
        return self._seen[host].silent_s

    def reset(self, host: int) -> None:
        """It lives after all: count again."""
        seen = self._seen[host]
        seen.silent_s = 0.0
        seen.is_probed = False

    def miss(self, host: int) -> bool:
        """It sends no heartbeats for now, and is not given up: count again. Whether that is news."""
        seen = self._seen[host]
        is_news, seen.is_reported_silent = not seen.is_reported_silent, True
        self.reset(host)
        return is_news

    def is_missed(self, host: int) -> bool:
        """Whether it has been reported that no heartbeat is received from it."""
        return self._seen[host].is_reported_silent

    def wait_acked(self, timeout_s: float) -> None:
        """Wait until every host that can be heard has taken in the decision."""

        def all_acked() -> bool:
            return all(seen.state.acked or seen.is_lost or seen.is_reported_silent for seen in self._seen.values())

        with self._changed:
            self._changed.wait_for(lambda: self._closed or all_acked(), timeout_s)

    def _run(self) -> None:
        checked_at = time.monotonic()
        read_every_s = min(_READ_EVERY_S, self._probe_after_s / 6)
        while not self._closed:
            try:
                if self._client.wait([f"{self._prefix}wake"], read_every_s):
                    # Deleted before the heartbeats are read: who wakes now is seen by this read or by the next one.
                    self._client.delete(f"{self._prefix}wake")
                began_at = time.monotonic()
                self._read(min(began_at - checked_at, _LONGEST_TICK_S))
                checked_at = began_at
            except (StoreBrokenError, MemoryError):
                # The store is this process's own: it is being closed, or something held the connection up.
                with contextlib.suppress(StoreBrokenError, MemoryError):
                    self._client = self._client.another()
                    self._restore_keys()
                began_at = time.monotonic() - _READ_EVERY_S
            pause_s = max(_LEAST_PAUSE_S, min(_READ_EVERY_S, _PAUSE_PER_READ * (time.monotonic() - began_at)))
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _restore_keys(self) -> None:
        """All are read in one go, which waits for those that were deleted."""
        for host, seen in self._seen.items():
            if not seen.is_lost:
                # Its host may set it again at any moment.
                self._client.swap(f"{self._prefix}heartbeat/{host}", b"", "0")
                self._client.swap(f"{self._prefix}state/{host}", b"", "")

    def _read(self, elapsed_s: float) -> None:
        hosts = [host for host, seen in self._seen.items() if not seen.is_lost]
        keys = [f"{self._prefix}heartbeat/{host}" for host in hosts]
        heartbeats = self._client.read_all(keys, newest=True) if hosts else []
        changed: dict[int, int] = {}
        for host, heartbeat in zip(hosts, heartbeats, strict=True):
            seen = self._seen[host]
            if heartbeat is not None and heartbeat != seen.heartbeat:
                seen.heartbeat = heartbeat
                seen.silent_s = 0.0
                seen.is_late = False
                if seen.is_reported_silent:
                    seen.is_reported_silent = False
                    self._on_return(host)
                changes = (
                    int(heartbeat) // CHANGE if heartbeat.isdigit() and len(heartbeat) < _LONGEST_SUM else seen.changes
                )
                if changes != seen.changes:
                    changed[host] = changes
            else:
                seen.silent_s += elapsed_s
            letters = seen.state.stuck.values()
            seen.stuck_s = seen.stuck_s + elapsed_s if letters else 0.0
        if changed:
            for host in self._read_states(list(changed)):
                self._seen[host].changes = changed[host]
        for host in hosts:
            self._judge(host, self._seen[host])

    def _read_states(self, hosts: list[int]) -> list[int]:
        """Take in the states of hosts. Returns those that have one: another one is read again at the next heartbeat."""
        texts = self._client.read_all([f"{self._prefix}state/{host}" for host in hosts], newest=True)
        changed: dict[str, Any] = {}
        chunks, read = [], []
        for host, content in zip(hosts, texts, strict=True):
            if content is None:
                continue  # it was overwritten
            read.append(host)
            state = read_state(content, self._tasks[host])
            if state is None:
                continue
            before = self._seen[host].state
            for task, value in state.tasks.items():
                if before.tasks.get(task) != value:
                    changed[f"{host}/{task}"] = value
            chunks += [(host, task, name) for task, name in state.chunks if (task, name) not in before.chunks]
            with self._changed:
                self._seen[host].state = state
                self._changed.notify_all()
        if changed:
            self._on_states(changed)
        for part in chunks:
            self._on_chunk(*part)
        return read

    def _judge(self, host: int, seen: PeerStatus) -> None:
        if seen.is_probed or seen.is_lost:
            return
        if not seen.is_late and seen.silent_s >= self._probe_after_s / 2:
            seen.is_late = True
            self._on_late()
        if seen.silent_s >= self._probe_after_s:
            seen.is_probed = True
            try:
                self._on_timeout(host)
            except RuntimeError:
                seen.is_probed = False  # no thread can be started now
        elif seen.stuck_s < self._probe_after_s / 2:
            seen.is_stuck_reported = seen.is_stuck_reported and seen.stuck_s > 0
        elif not seen.is_stuck_reported:
            seen.is_stuck_reported = True
            task = next(map(int, seen.state.stuck), 0)
            self._on_stuck(host, task, seen.state.locations.get(str(task), ""))
