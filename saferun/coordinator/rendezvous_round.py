"""One rendezvous of a job's hosts, as this host sees it: who takes part here, until when, and what is waited for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from saferun.cluster.join_messages import Address, EndNote, HostInfoText, JoinRequest, Peer, Replacement
from saferun.cluster.messages import MOST_TASKS
from saferun.coordinator.assignments import HostAssignment, HostRecord, TaskRecord, label_hosts
from saferun.coordinator.dial import plain
from saferun.coordinator.secrecy import NO_SECRET
from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.waiting_notice import WaitingNotice
from saferun.model import JsonObject, Value
from saferun.text.wording import count_text

if TYPE_CHECKING:
    from saferun.coordinator.secret_agreement import SecretAgreement

_BORN = os.urandom(8).hex()

JoinFailure = Literal["", "usage", "again", "incomplete", "needless", "gone"]


class JoinFailedError(Exception):
    """This host cannot join. ``what`` and ``hint`` are for people; ``is_published``: the other hosts know it already.

    ``end``: a user has ended the job. ``kind``: empty, or one of these:

    * ``usage``: the hosts were started in a way that cannot work, and so will be the next time.
    * ``again``: the same of a newcomer to a running job, which cannot take part; all others meet again without it.
    * ``incomplete``: the start timeout is over, and hosts, or processes of this one, are missing.
    * ``needless``: the job goes on, or has ended, without this host.
    * ``gone``: torch's rendezvous was complete, and then a host left, or did not answer: the others can meet again.
    """

    def __init__(
        self,
        what: str,
        hint: str,
        *,
        kind: JoinFailure = "",
        is_published: bool = False,
        end: EndNote | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.is_published = is_published
        self.kind = kind
        self.end = end

    @property
    def is_usage(self) -> bool:
        """Whether the hosts were started in a way that cannot work."""
        return self.kind in {"usage", "again"}

    @property
    def is_again(self) -> bool:
        """Whether all hosts but a newcomer meet again."""
        return self.kind == "again"


class JobEndedError(Exception):
    """A user has ended the job while this host waited to join it."""

    def __init__(self, note: EndNote) -> None:
        super().__init__(note.by)
        self.note = note


class CancelledError(Exception):
    """No task waits for this rendezvous any more."""


class RendezvousResult(Value):
    """What a rendezvous comes to: this host's assignment, the way to the control store, and the ranks' store.

    ``run_id``: the job's for the ranks, where a rendezvous handler says it; else empty.
    """

    assignment: HostAssignment
    client: StoreClient
    job: str
    prefix: str
    records: list[HostRecord]
    master_addr: str
    master_port: int
    replacements: tuple[Replacement, ...] = ()
    run_id: str = ""

    @property
    def labels(self) -> list[str]:
        """The names of all hosts, spares included, for the leader."""
        return label_hosts([record.name for record in self.records])

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All hosts with ranks, for the leader."""
        labels = self.labels
        peers = []
        base_rank = 0
        for host, record in enumerate(self._training):
            nproc = sum(task.nproc for task in record.tasks)
            peers.append(Peer(host, labels[host], record.addresses, base_rank, nproc))
            base_rank += nproc
        return tuple(peers)

    @property
    def spare_peers(self) -> tuple[Peer, ...]:
        """All spares, for the leader."""
        first = self.assignment.hosts
        labels = self.labels[first:]
        spares = zip(labels, self.records[first:], strict=True)
        return tuple(Peer(first + i, label, record.addresses, 0, 0) for i, (label, record) in enumerate(spares))

    @property
    def host_infos(self) -> tuple[HostInfoText, ...]:
        """What all hosts with ranks found out about themselves, and their probe endpoints, for the leader."""
        return tuple(HostInfoText(record.host_info, record.probe_endpoint) for record in self._training)

    @property
    def needed(self) -> tuple[int, ...]:
        """The hosts without which the others cannot meet again, for the leader."""
        return tuple(host for host, record in enumerate(self._training) if record.serves_rendezvous)

    @property
    def _training(self) -> list[HostRecord]:
        return self.records[: self.assignment.hosts]


class RendezvousRound:
    """A rendezvous, from the first task of this host that joins to the assignments of all hosts.

    Args:
        first: what that task asks for.
    """

    def __init__(self, first: JoinRequest) -> None:
        self.request = first
        self.name, self.run_id = first.name, first.run_id
        self.least, self.most = first.least, first.most
        self.spares = first.spares
        self.timeout_s = first.timeout_s
        self.master_addr = plain(first.master.address)
        address = first.address or Address()
        self.endpoint_address = plain(address.host), address.port
        self.task_count = min(MOST_TASKS, max(1, first.tasks))
        self.began_at = time.monotonic()
        self._give_up_at = self.began_at + first.timeout_s
        # For how long hosts are waited for that are known to have come; None: not known.
        self.answer_s: float | None = None
        self.is_over = False
        self.secrecy = NO_SECRET
        # What signs the messages of the job with this number where no secret was named; None: nothing does.
        self.make_agreement: Callable[[str], SecretAgreement | None] = lambda _: None
        self.is_torchs = False  # torch's handler waits for the others, and knows best when to give up
        # Called when all hosts are known to have left the previous attempt.
        self.on_all_here: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] | None = (
            None  # publishes to the other hosts that this one goes, once that is possible
        )
        self.end: EndNote | None = None  # who has ended the job, where that is why this host goes
        # The job, and the number of its rendezvous, to which this host has handed in its record; None: not yet.
        self.handed_in: tuple[str, int] | None = None
        self._joins: dict[int, JoinRequest] = {}
        self._changed = threading.Condition()
        self._notice = WaitingNotice(self.began_at, first.report_every_s)

    @property
    def hosts_text(self) -> str:
        """For how many hosts this one was started."""
        return hosts_text(self.most, self.spares)

    def add(self, task: int, request: JoinRequest) -> bool:
        """A task of this host joins; False: it has joined already."""
        with self._changed:
            if task in self._joins:
                return False
            self._joins[task] = request
            self._changed.notify_all()
            return True

    @property
    def joins(self) -> dict[int, JoinRequest]:
        """What those asked for who have joined, by task."""
        with self._changed:
            return dict(self._joins)

    def wait_for_tasks(self) -> HostRecord:
        """This host's record, once all its tasks have joined.

        Raises:
            JoinFailedError: some do not come.
            CancelledError: no task waits for it any more.
        """
        while True:
            with self._changed:
                missing = [task for task in range(self.task_count) if task not in self._joins]
                if not missing:
                    return self._record()
            shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")  # noqa: PLR2004
            self.wait_for(f"{len(missing)} of {self.task_count} tasks on this host: {shown}")
            self.check()
            if self.remaining_s <= 0:
                raise JoinFailedError(
                    f"{len(missing)} of {self.task_count} saferun processes on {self.name} did not come within"
                    f" {self.timeout_s:.0f} s: task {shown}",
                    "check that the scheduler has started all of them, and see their output",
                    kind="incomplete",
                )
            self._wait_for_more(self.task_count - len(missing))

    def _wait_for_more(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._joins) > count, min(1.0, self.remaining_s))

    def _record(self) -> HostRecord:
        records = [self._joins[task].record for task in range(self.task_count)]
        head = records[0]
        return HostRecord(
            name=self.name,
            tasks=tuple(TaskRecord(task.nproc, task.role, task.pid) for task in records),
            addresses=head.addresses,
            port=head.port,
            files=head.files,
            attempt=max(join.attempt for join in self._joins.values()),
            restarts=max(join.restarts for join in self._joins.values()),
            most=self.most,
            born=_BORN,
            host_info=head.host_info,
            probe_endpoint=head.probe_endpoint,
            full=head.full,
            has_met=any(join.has_met for join in self._joins.values()),
        )

    # ---------------------------------------------------------------------------------------------------------- waiting

    @property
    def remaining_s(self) -> float:
        """The time left for others to come."""
        return self._give_up_at - time.monotonic()

    @property
    def failure_kind(self) -> JoinFailure:
        """Of an error because of a host that does not answer, or leaves."""
        return "" if self.answer_s is None else "gone"

    @property
    def connect_remaining_s(self) -> float:
        """The time left for the store to come at which hosts meet."""
        return self.began_at + (self.request.connect_s or self.timeout_s) - time.monotonic()

    def allow(self, least_s: float) -> None:
        """Others are known to be there: leave at least this much time for what remains to be done."""
        self._give_up_at = max(self._give_up_at, time.monotonic() + least_s)
        self.answer_s = None

    def limit(self, most_s: float) -> None:
        """All others were there a moment ago: whoever does not answer for so long is gone."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + most_s)
        self.answer_s = self.remaining_s

    def check(self) -> None:
        """Go on, or not.

        Raises:
            CancelledError: no task waits for it any more.
        """
        if self.is_over:
            raise CancelledError

    def set_status(self, message: str, *, is_fault: bool = False) -> None:
        """What keeps the hosts from meeting, for whoever asks. ``is_fault``: more than a host that comes late."""
        self._notice.set_status(message, is_fault=is_fault)

    def wait_for(self, whom: str) -> None:
        """Others are waited for, as far as is known only because they come late."""
        self._notice.wait_for(whom)

    def due_message(self) -> JsonObject | None:
        """The message to the tasks that is due, with the seconds that it has lasted; None: nothing yet."""
        return None if self.is_over else self._notice.due_message(time.monotonic())

    def overdue(self) -> JoinFailedError | None:
        """The error where the rendezvous's own thread can report none: it waits for a host that does not answer."""
        if self.is_over or self.is_torchs or self.remaining_s > -5.0:  # noqa: PLR2004
            return None
        most_s = self._give_up_at - self.began_at
        return JoinFailedError(
            f"the hosts did not meet within {most_s:.0f} s: {self._notice.text or 'no answer'}",
            "see the output of saferun on the other hosts, and whether they are alive",
            kind=self.failure_kind,
        )


def hosts_text(hosts: int, spares: int) -> str:
    """``4 hosts``, ``4 hosts and 1 spare``."""
    text = count_text(hosts, "host")
    return f"{text} and {count_text(spares, 'spare')}" if spares else text
