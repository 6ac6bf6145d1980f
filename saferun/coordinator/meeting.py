"""One meeting of a job's hosts, as this host sees it: who takes part here, until when, and what is waited for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from saferun.coordinator.dial import plain
from saferun.coordinator.places import HostPlace, HostRecord, TaskRecord, label_hosts
from saferun.coordinator.secrecy import NO_SECRET
from saferun.coordinator.store_client import StoreClient
from saferun.model import Value

if TYPE_CHECKING:
    from saferun.coordinator.pact import Pact

_MOST_TASKS = 4096
_BORN = os.urandom(8).hex()
# How soon something is told that waiting alone will hardly mend.
_AMISS_S = 2.0


class JoinFailedError(Exception):
    """The hosts cannot meet. ``what`` and ``hint`` are for people; ``is_told``: the other hosts know it already.

    ``is_usage``: the hosts were started in a way that cannot work, and so will be the next time.
    """

    def __init__(self, what: str, hint: str, *, is_told: bool = False, is_usage: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.is_told = is_told
        self.is_usage = is_usage


class CancelledError(Exception):
    """Nobody waits for this meeting any more."""


class Met(Value):
    """What a meeting comes to: this host's place, the way to the control store, and the ranks' store."""

    place: HostPlace
    client: StoreClient
    job: str
    prefix: str
    records: list[HostRecord]
    master_addr: str
    master_port: int

    @property
    def peers(self) -> list[list[Any]]:
        """All hosts, for the leader: host, label, name, pid, addresses, first rank, ranks."""
        labels = label_hosts([record.name for record in self.records])
        peers = []
        base_rank = 0
        for host, record in enumerate(self.records):
            nproc = sum(task.nproc for task in record.tasks)
            pid = record.tasks[0].pid
            peers.append([host, labels[host], record.name, pid, list(record.addresses), base_rank, nproc])
            base_rank += nproc
        return peers

    @property
    def host_infos(self) -> list[tuple[str, str]]:
        """What all hosts found out about themselves, and their probe endpoints, for the leader."""
        return [(record.host_info, record.probe_endpoint) for record in self.records]


class Meeting:
    """A meeting, from the first task of this host that joins to the places of all hosts.

    Args:
        first: the message of that task.
    """

    def __init__(self, first: dict[str, Any]) -> None:
        self.backend = str(first["backend"])
        rank = first.get("node_rank")
        self.node_rank: int | None = int(rank) if rank is not None else None
        self.least = int(first["least"])
        self.most = int(first["most"])
        address, ports = first.get("master") or ("127.0.0.1", [])
        self.master_addr = plain(str(address))
        self.ports = [int(port) for port in ports]
        self.endpoint = str(first.get("endpoint") or "")
        host, port = first.get("address") or ("", 0)
        self.endpoint_address = plain(str(host)), int(port)
        self.conf: dict[str, Any] = dict(first.get("conf") or {})
        self.run_id = str(first["run_id"])
        self.local_addr: str | None = first.get("local_addr") or None
        self.timeout_s = float(first["timeout_s"])
        self.connect_s = float(first.get("connect_s") or self.timeout_s)
        self.host_timeout_s = float(first["host_timeout_s"])
        self.elastic = bool(first.get("elastic"))
        self.one_port = bool(first.get("one_port"))
        self.addresses = [str(address) for address in (first.get("record") or {}).get("addresses") or ()]
        self.expected = [str(name) for name in first.get("expected") or []]
        self.name = str(first["name"])
        self.tell_every_s = float(first.get("tell_every_s") or 30.0)
        self.task_count = min(_MOST_TASKS, max(1, int(first["tasks"])))
        self.began_at = time.monotonic()
        self._give_up_at = self.began_at + self.timeout_s
        self.is_over = False
        self.secrecy = NO_SECRET
        # What signs the messages of the job with this number where no secret was named; None: nothing does.
        self.make_pact: Callable[[str], Pact | None] = lambda _: None
        self.is_torchs = False  # torch's handler waits for the others, and knows best when to give up
        # Called when all hosts are known to have left the attempt before.
        self.on_all_here: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] | None = (
            None  # tells the other hosts that this one goes, once they can be told
        )
        self._joins: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._words = ""
        self._is_amiss = False
        self._told_at = self.began_at
        self._left = ""

    def add(self, task: int, message: dict[str, Any]) -> bool:
        """A task of this host joins; False: it has joined already."""
        with self._changed:
            if task in self._joins:
                return False
            self._joins[task] = message
            self._changed.notify_all()
            return True

    @property
    def joins(self) -> dict[int, dict[str, Any]]:
        """The messages of those who have joined, by task."""
        with self._changed:
            return dict(self._joins)

    def wait_for_tasks(self) -> HostRecord:
        """This host's record, once all its tasks have joined.

        Raises:
            JoinFailedError: some do not come.
            CancelledError: nobody waits any more.
        """
        while True:
            with self._changed:
                missing = [task for task in range(self.task_count) if task not in self._joins]
                if not missing:
                    return self._record()
            shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")  # noqa: PLR2004
            words = f"{len(missing)} of {self.task_count} tasks on this host: {shown}"
            self.say(f"waiting for {words}")
            self.check()
            if self.remaining_s <= 0:
                raise JoinFailedError(
                    f"{len(missing)} of {self.task_count} saferun processes on {self.name} did not come within"
                    f" {self.timeout_s:.0f} s: task {shown}",
                    "see whether the scheduler has started them all, and what they say",
                )
            self._wait_for_more(self.task_count - len(missing))

    def _wait_for_more(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._joins) > count, min(1.0, self.remaining_s))

    def _record(self) -> HostRecord:
        records = [self._joins[task]["record"] for task in range(self.task_count)]
        head = records[0]
        return HostRecord(
            name=self.name,
            tasks=tuple(TaskRecord(int(r["nproc"]), str(r["role"]), int(r["pid"])) for r in records),
            addresses=tuple(map(str, head.get("addresses") or ())),
            port=int(head.get("port") or 0),
            files=str(head.get("files") or ""),
            attempt=max(int(join["attempt"]) for join in self._joins.values()),
            restarts=max(int(join["restarts"]) for join in self._joins.values()),
            most=self.most,
            born=_BORN,
            host_info=str(head.get("host_info") or ""),
            probe_endpoint=str(head.get("probe_endpoint") or ""),
            full=head.get("full") is True,
        )

    # ---------------------------------------------------------------------------------------------------------- waiting

    @property
    def remaining_s(self) -> float:
        """The time left for others to come."""
        return self._give_up_at - time.monotonic()

    @property
    def connect_remaining_s(self) -> float:
        """The time left for the store to come at which hosts meet."""
        return self.began_at + self.connect_s - time.monotonic()

    def allow(self, least_s: float) -> None:
        """Others are known to be there: leave at least this much time for what remains to be done."""
        self._give_up_at = max(self._give_up_at, time.monotonic() + least_s)

    def check(self) -> None:
        """Go on, or not.

        Raises:
            CancelledError: nobody waits any more.
        """
        if self.is_over:
            raise CancelledError

    def say(self, words: str, *, is_amiss: bool = False) -> None:
        """What is being waited for, for whoever asks. ``is_amiss``: that is more than somebody who comes late."""
        self._words = words
        self._is_amiss = is_amiss

    def words_due(self) -> str | None:
        """What to tell the tasks now; None: nothing yet."""
        now = time.monotonic()
        is_first = self._told_at == self.began_at
        wait_s = min(_AMISS_S, self.tell_every_s) if self._is_amiss and is_first else self.tell_every_s
        if self.is_over or not self._words or now - self._told_at < wait_s:
            return None
        self._told_at = now
        return f"{self._words} ({now - self.began_at:.0f} s)"

    def overdue(self) -> JoinFailedError | None:
        """What to say where the meeting's own thread can say nothing: it waits for somebody who does not answer."""
        if self.is_over or self.is_torchs or self.remaining_s > -5.0:  # noqa: PLR2004
            return None
        return JoinFailedError(
            f"the hosts did not meet within {self.timeout_s:.0f} s: {self._words or 'no answer'}",
            "see what saferun says on the other hosts, and whether they are alive",
        )
