"""The rendezvous of a job with spares, as the leader conducts them: who is waited for, and who gets whose place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saferun.cluster.join_messages import Replacement
from saferun.coordinator.assignments import HostRecord, name_of
from saferun.coordinator.failure_messages import failure_text
from saferun.coordinator.host_record_collection import HostRecordCollection
from saferun.coordinator.members import Members
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.store_client import StoreClient
from saferun.text.wording import count_text

LATE_HINT = "the job is not affected; find out why this host was late"
# How long hosts are waited for that the job can do without: at its start, where nodes boot, and between attempts.
_FIRST_PATIENCE_S = 60.0
_PATIENCE_S = 30.0


def late_key(seat: int) -> str:
    """Set by a host that has come too late, and waits for the next attempt."""
    return f"late/{seat}"


class SpareRounds:
    """All rendezvous of the job.

    Args:
        rdzv: the first of them.
        order: of the last one, which another host held, in whose place this one is from now on; empty: there was none.
    """

    def __init__(self, rdzv: RendezvousRound, order: Sequence[int] = ()) -> None:
        self._seat = rdzv.request.node_rank or 0
        self._needed = rdzv.most
        self._started = rdzv.most + rdzv.spares
        self._members = Members(rdzv.most, range(self._started))
        self._names: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self._is_first = not order
        self._rdzv: RendezvousRound | None = None  # that has begun last
        if order:
            self._members.replace_leader(order, self._seat)
        self.replacements: tuple[Replacement, ...] = ()  # who has lost the place to whom in the last rendezvous

    def collection(self, rdzv: RendezvousRound, client: StoreClient, prefix: str, **more: Any) -> HostRecordCollection:  # noqa: ANN401
        """What collects the records of a rendezvous. ``more``: as it is in a job without spares."""
        if rdzv is not self._rdzv:  # else it moves to another store: whoever may come again has been found
            self._rdzv = rdzv
            # The one of this host's tasks that leads knows them, whichever has come first.
            self._members.leave_out({number for join in rdzv.joins.values() for number in join.left_out})
        # A host that misses this one as well says so again; one that has gone since is not waited for each time.
        seats = self._members.expected(lambda seat: client.delete(late_key(seat)))
        if len({self._seat, *seats}) < self._needed:
            # The ranks would be fewer than the job was started with: a host that comes again is waited for.
            self._members.readmit()
            seats = self._members.expected(lambda _: False)
        return HostRecordCollection(
            client,
            prefix,
            self._started,
            seats=[seat for seat in seats if seat != self._seat],
            needed=self._needed,
            patience_s=_FIRST_PATIENCE_S if self._is_first else _PATIENCE_S,
            **more,
        )

    def refuse(self, client: StoreClient, prefix: str) -> None:
        """Let hosts that are left out, and come again, know: the job goes on, and their exit codes must not end it."""
        for seat in self._members.left_out:
            name = self._names.get(seat, f"the host with node rank {seat}")
            what = f"{name} was left out of this job"
            error = JoinFailedError(what, "see the report of the job for the reason", kind="needless")
            client.set(f"{prefix}assignment/{seat}", failure_text(error))

    def arrange(
        self, rdzv: RendezvousRound, collection: HostRecordCollection, records: Sequence[HostRecord]
    ) -> tuple[list[HostRecord], list[int], int]:
        """The records in order of the hosts' numbers, the seats of all but the first, and how many are spares.

        Raises:
            JoinFailedError: there are too few; no attempt has another WORLD_SIZE than the job was started with.
        """
        by_seat = dict(zip((self._seat, *collection.taking_part), records, strict=True))
        for seat, record in by_seat.items():
            self._names[seat] = record.name
        self._reasons.update({seat: error.what for seat, error in collection.withdrawn.items()})
        before = self._members.order
        order = self._members.arrange(by_seat)
        if len(order) < self._needed:
            what = f"the hosts have met with {len(order)} of the {count_text(self._needed, 'host')} that the job needs"
            error = JoinFailedError(what, "start the job again")
            collection.fail(error)
            raise error
        self.replacements = tuple(
            Replacement(
                self._names.get(was) or name_of(was, rdzv.request.expected),
                self._names[now],
                "" if was in self._members.left_out else self._reasons.get(was, "it did not come"),
            )
            for was, now in self._members.replaced(before)
        )
        self._is_first = False
        return [by_seat[seat] for seat in order], list(order[1:]), len(order) - self._needed
