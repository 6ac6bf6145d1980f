"""How hosts whose numbers are known exchange records for assignments, in the control store.

Keys, below the prefix of the rendezvous: ``host/<n>`` a record; ``assignment/<n>`` what that host gets; ``missing`` who
has not come, for the others to print; ``fail`` why no host gets an assignment, written by whoever finds out; ``read``
how many hosts have read of it; and those of ``withdrawals``. ``<n>`` is the host's seat (see ``members``). Each host
reads its own assignment only, so that what the leader sends grows with the number of hosts, not with its square.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from saferun.coordinator.assignments import (
    MOST_RANKS,
    HostAssignment,
    HostRecord,
    assign,
    decode_host_record,
    disagreement,
    missing_text,
)
from saferun.coordinator.failure_messages import LONGEST_MESSAGE, failure_text, publish_failure, read_failure
from saferun.coordinator.gone_hosts import gone_of
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.secrecy import MISMATCH_HINT, SecretMismatch
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.coordinator.withdrawals import read_withdrawal

RECHECK_S = 0.25
_LIST_MISSING_EVERY_S = 1.0
# A record that has lain there for longer may be that of a process that has ended since.
_STALE_RECORD_S = 2.0
_READ_TIMEOUT_S = 3.0
# The same of hosts that have left, of which some may have come again.
_READ_AGAIN_TIMEOUT_S = 0.5
# How long the first host stays to tell those who have yet to come why no host gets an assignment.
_LATE_S = 3.0
_LATE_PAUSE_S = 0.05
# What a host reads instead of its assignment where the store of the job's messages is another one from now on.
MOVED = "moved"


class MovedError(Exception):
    """The rendezvous goes on in another store."""


class OnePortError(Exception):
    """Some host reaches the port of the ranks' store only."""


class HostRecordCollection:
    """The leader's side of a rendezvous.

    Args:
        client: to the control store.
        prefix: of the rendezvous's keys.
        hosts: how many there will be.
        can_probe: whether hosts can be probed; where one port is all that is open, a refusal means nothing.
        is_asked_for: whether a host asks for ``OnePortError``.
        mismatch: why a host does not come that has another job secret than this one, or none.
        seats: under which numbers the other hosts write their records; None: all up to ``hosts``.
        needed: how many suffice, this one included, once the others have been waited for; None: all of them.
        patience_s: how long those are waited for then.
        goes_on: whether a host that was started in a way that cannot work is left out: the job has run without it.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        hosts: int,
        *,
        can_probe: bool = True,
        is_asked_for: Callable[[], bool] = lambda: False,
        mismatch: Callable[[], SecretMismatch | None] = lambda: None,
        seats: Sequence[int] | None = None,
        needed: int | None = None,
        patience_s: float = 0.0,
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on
        self._started = list(range(1, hosts) if seats is None else seats)
        self._needed = needed
        self._patience_s = patience_s
        self._enough_at: float | None = None  # since when there are enough
        self.withdrawn: dict[int, JoinFailedError] = {}  # seats whose hosts cannot start, where others take their place
        self._late: set[int] = set()  # seats whose hosts have not come in time, where the job can do without them
        self._can_probe = can_probe
        self._is_asked_for = is_asked_for
        self._mismatch = mismatch
        self._client = client
        self._prefix = prefix
        self._hosts = hosts
        self._missing = list(self._started)
        self._seen_at: dict[int, float] = {}

    @property
    def taking_part(self) -> list[int]:
        """The seats of the hosts that take part, in the order of the records: all that have neither left nor come late.

        After ``collect`` all of them have come.
        """
        return [seat for seat in self._started if seat not in self.withdrawn and seat not in self._late]

    def collect(self, rdzv: RendezvousRound, own: HostRecord) -> list[HostRecord]:
        """Wait for the records of all hosts.

        Raises:
            JoinFailedError: some did not come, or a host found that it cannot be.
            OnePortError: it was asked for.
            CancelledError: no task waits for it any more.
            StoreBrokenError: the store is gone.
        """
        rdzv.on_leave = lambda: self.fail(left_error(own.name, rdzv), self._client.another())
        try:
            while True:
                self._wait_for_all(rdzv)
                self._leave_out_withdrawn()
                if self._can_probe and not self._missing:
                    self._missing = self._gone(own)
                    self._leave_out_withdrawn()  # while some are probed, others may leave
                if self._missing:
                    continue
                texts = self._read_texts()
                if None not in texts:
                    break
                self._missing = self._drop_forged(texts)
            records = [own, *self._records(texts)]
            _check_agreement(records, is_elastic=rdzv.request.elastic)
            if isinstance(self._client.signer, SecretAgreement):
                names = {seat: record.name for seat, record in zip(self.taking_part, records[1:], strict=True)}
                self._client.signer.conclude(self._prefix, names)
        except JoinFailedError as error:
            if self._goes_on and error.is_usage:
                self._send_again(error)
                raise
            self.fail(error)
            if error.kind == "gone":
                self._answer_late(error)
            if error.is_published:
                self.fail_for_late(rdzv)
            raise
        return records

    def _wait_for_all(self, rdzv: RendezvousRound) -> None:
        listed_at = 0.0
        while self._missing:
            rdzv.check()
            waited = self._client.wait([self._key(seat) for seat in self._missing], RECHECK_S)
            if waited:
                self._missing = []
                return
            failure = read_failure(self._client.find(f"{self._prefix}fail"))
            if failure is not None:
                raise failure
            if self._is_asked_for():
                raise OnePortError
            if isinstance(self._client.signer, SecretAgreement):
                self._client.signer.keep(self._client)
            now = time.monotonic()
            if now - listed_at < _LIST_MISSING_EVERY_S and rdzv.remaining_s > 0:
                continue
            listed_at = now
            self._list_missing(now)
            message = missing_text(self._missing, self._hosts, rdzv.request.expected)
            if not self._missing or (self._needed is not None and self._has_enough_hosts(rdzv, now)):
                return
            mismatch = self._mismatch()
            if mismatch is not None and mismatch.host in self._missing:
                raise JoinFailedError(mismatch.what, MISMATCH_HINT, kind="usage")
            rdzv.wait_for(message)
            self._client.set(f"{self._prefix}missing", message[:LONGEST_MESSAGE])
            if rdzv.remaining_s <= 0:
                raise missing_error(message, rdzv.timeout_s, rdzv.answer_s)

    def _list_missing(self, now: float) -> None:
        missing = [seat for seat in self._missing if not self._client.check(self._key(seat))]
        for seat in self._missing:
            if seat not in missing:
                self._seen_at[seat] = now
        self._missing = missing

    def _leave_out_withdrawn(self) -> None:
        """Leave out hosts that cannot start, or have left, until they come again.

        Those that are late are waited for again where there are too few without them.

        Raises:
            JoinFailedError: there are too few others.
        """
        if self._needed is None:
            return
        have_some_left = self._client.exists(f"{self._prefix}withdrawn")
        for seat in self._started if have_some_left else [*self._missing, *self.withdrawn]:
            reason = read_withdrawal(self._client, self._prefix, seat)
            if reason is not None:
                self.withdrawn[seat] = reason
            elif self.withdrawn.pop(seat, None) is not None:
                self._seen_at[seat] = time.monotonic()
        if 1 + len(self.taking_part) < self._needed:
            self._missing += self._late
            self._late.clear()
        self._forget_those_left_out()
        if 1 + len(self.taking_part) < self._needed and self.withdrawn:
            error = list(self.withdrawn.values())[-1]
            raise JoinFailedError(error.what, error.hint, kind=error.kind)

    def _has_enough_hosts(self, rdzv: RendezvousRound, now: float) -> bool:
        """Whether the job can do without the hosts that are missing.

        Raises:
            JoinFailedError: hosts cannot start, and there are too few others.
        """
        assert self._needed is not None  # noqa: S101 - by the caller
        self._leave_out_withdrawn()
        if 1 + len(self.taking_part) - len(self._missing) < self._needed:
            self._enough_at = None
            return not self._missing
        self._enough_at = self._enough_at or now
        if self._missing and now - self._enough_at < self._patience_s and rdzv.remaining_s > 0:
            return False
        self._late.update(self._missing)
        self._forget_those_left_out()
        return True

    def _forget_those_left_out(self) -> None:
        seats = set(self.taking_part)
        self._missing = [seat for seat in self._missing if seat in seats]
        self._seen_at = {seat: at for seat, at in self._seen_at.items() if seat in seats}

    def _gone(self, own: HostRecord) -> list[int]:
        """Hosts that came early and whose saferun has ended while the others were waited for."""
        now = time.monotonic()
        stale = [seat for seat, seen_at in self._seen_at.items() if now - seen_at > _STALE_RECORD_S]
        if not stale:
            return []
        records = {seat: decode_host_record(self._client.find(self._key(seat)) or b"") for seat in stale}
        gone = gone_of({seat: record for seat, record in records.items() if record is not None}, own)
        for seat in gone:
            self._client.delete(self._key(seat))
            del self._seen_at[seat]
        return gone

    def _read_texts(self) -> list[bytes | None]:
        """The records of all hosts; None for those that no host of this job has written."""
        return self._client.read_all([self._key(seat) for seat in self.taking_part]) if self.taking_part else []

    def _drop_forged(self, texts: list[bytes | None]) -> list[int]:
        """Delete forged records; their hosts publish theirs again then."""
        forged = [seat for seat, text in zip(self.taking_part, texts, strict=True) if text is None]
        for seat in forged:
            self._client.delete(self._key(seat))
        return forged

    def _records(self, texts: list[bytes | None]) -> list[HostRecord]:
        records = []
        for seat, text in zip(self.taking_part, texts, strict=True):
            record = decode_host_record(text or b"")
            if record is None:
                raise JoinFailedError(
                    f"the record of the host with node rank {seat} cannot be read",
                    "use the same version of saferun on all hosts",
                )
            records.append(record)
        return records

    def move(self) -> None:
        """Send all hosts that have come, or come here late, to where the rendezvous goes on."""
        for seat in self.taking_part:
            self._client.set(f"{self._prefix}assignment/{seat}", MOVED)
        self._client.check(f"{self._prefix}fail")

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until all hosts have read that; those who have not read it in time find out by the end of the store."""
        give_up_at = time.monotonic() + timeout_s
        with suppress(StoreBrokenError):
            # By a connection of its own, which breaks where the value is no number.
            client = self._client.another()
            while client.add(f"{self._prefix}left", 0) < len(self.taking_part) and time.monotonic() < give_up_at:
                time.sleep(0.02)

    def publish_assignments(
        self,
        records: Sequence[HostRecord],
        seats: Sequence[int] | None = None,
        spares: int = 0,
        own_seat: int = 0,
        *,
        probe_after_s: float = 0.0,
    ) -> HostAssignment:
        """Give every host its assignment, and return the leader's own.

        Args:
            records: of all hosts, in order of their numbers.
            seats: where the others look for their assignments, in the same order; None: as they were collected.
            spares: how many of them, the last ones, get no ranks.
            own_seat: the one of this host.
            probe_after_s: for how long this host lets the others be silent.
        """
        order = (own_seat, *seats) if seats is not None else ()
        assignments = assign(records, spares, order, probe_after_s=probe_after_s)
        prefix = attempt_prefix(assignments[0].attempt)
        for assignment in assignments[1:]:
            # The monitor reads those of many hosts in one go, which would wait for keys that are not there.
            self._client.set(f"{prefix}heartbeat/{assignment.host}", "0")
            self._client.set(f"{prefix}state/{assignment.host}", "")
        for seat, assignment, record in zip(seats or self.taking_part, assignments[1:], records[1:], strict=True):
            # Whoever gets it knows by this that it is no replay from another job, and not of another process.
            fields = self._client.signer.fields if isinstance(self._client.signer, SecretAgreement) else {}
            text = json.dumps({**assignment._asdict(), "to": record.born, **fields})
            self._client.set(f"{self._prefix}assignment/{seat}", text)
        if self._needed is not None:
            self._client.set(f"{self._prefix}handed_out", "")  # whoever has none is too late
        # An answer, so that all has arrived before a host may end the store.
        self._client.check(f"{self._prefix}fail")
        return assignments[0]

    def _send_again(self, error: JoinFailedError) -> None:
        """Tell all hosts to meet again, but for those that this one has found unable to take part."""
        # They read it in time: the store is there until all have left this round of torch's rendezvous.
        signer = self._client.signer
        refused = signer.refused if isinstance(signer, SecretAgreement) else set()
        for seat in self.taking_part:
            self._hand_out(self._client, seat, failure_text(error, is_again=seat not in refused))

    def _answer_late(self, error: JoinFailedError) -> None:
        """Publish to those who have yet to come that some host is gone: where this one meets again, its store stays."""
        with suppress(StoreBrokenError):
            for seat in self.taking_part:
                self._hand_out(self._client, seat, failure_text(error))

    def fail(self, error: JoinFailedError, client: StoreClient | None = None) -> None:
        """Publish to those who have come that no host gets an assignment, and wait a moment until they have read it."""
        client = client or self._client
        try:
            if not error.is_published:
                publish_failure(client, self._prefix, error)
            text = client.find(f"{self._prefix}fail") or b""
            handed_out = 0
            # One after the other: whoever has come again counts as a reader, too.
            for seats, timeout_s in (
                (self.taking_part, _READ_TIMEOUT_S),
                (list(self.withdrawn), _READ_AGAIN_TIMEOUT_S),
            ):
                arrived = [seat for seat in seats if client.check(self._key(seat))]
                for seat in arrived:
                    self._hand_out(client, seat, text.decode(errors="replace"))
                handed_out += len(arrived)
                give_up_at = time.monotonic() + (timeout_s if arrived else 0.0)
                while client.add(f"{self._prefix}read", 0) < handed_out and time.monotonic() < give_up_at:
                    time.sleep(0.02)
        except StoreBrokenError:
            pass

    def fail_for_late(self, rdzv: RendezvousRound, timeout_s: float = _LATE_S) -> None:
        """The same for those who are on their way: they would wait for hosts that have gone."""
        give_up_at = time.monotonic() + timeout_s
        waited_for, handed_out = set(self.taking_part), 0
        with suppress(StoreBrokenError):
            text = (self._client.find(f"{self._prefix}fail") or b"").decode(errors="replace")
            while time.monotonic() < give_up_at:
                rdzv.check()
                here = {seat for seat in waited_for if self._client.check(self._key(seat))}
                for seat in here:
                    self._hand_out(self._client, seat, text)
                handed_out += len(here)
                waited_for -= here
                waited_for -= {seat for seat in waited_for if self._client.check(self._withdrawn(seat))}
                if not waited_for and self._client.add(f"{self._prefix}read", 0) >= handed_out:
                    return
                time.sleep(_LATE_PAUSE_S)

    def _hand_out(self, client: StoreClient, seat: int, failure: str) -> None:
        key = f"{self._prefix}assignment/{seat}"
        if client.create(key, failure) == FORGED:
            client.set(key, failure)

    def _withdrawn(self, seat: int) -> str:
        return f"{self._prefix}withdrawn/{seat}"

    def _key(self, seat: int) -> str:
        return f"{self._prefix}host/{seat}"


def _check_agreement(records: Sequence[HostRecord], *, is_elastic: bool) -> None:
    # torch's rendezvous has found each host to be one too many or not, by its own MAX: a running job may get another.
    for record in () if is_elastic else records:
        if (message := disagreement(records[0], record)) is not None:
            raise JoinFailedError(message, "give all hosts the same --nnodes", kind="usage")
    ranks = sum(task.nproc for record in records for task in record.tasks)
    if ranks > MOST_RANKS:
        raise JoinFailedError(
            f"the hosts have {ranks} ranks together, and a job may have {MOST_RANKS}",
            "look at --nproc-per-node on all hosts",
        )


def attempt_prefix(attempt: int) -> str:
    """Where the keys of an attempt are."""
    return f"a{attempt}/"


def missing_error(message: str, timeout_s: float, answer_s: float | None = None) -> JoinFailedError:
    """Some hosts did not come.

    Args:
        message: which.
        timeout_s: the time that they had for that.
        answer_s: how long they have not answered, where torch's rendezvous counts them in; None: it is not known to.
    """
    count, _, names = message.partition(": ")
    named = f": {names}" if names else ""
    if answer_s is not None:
        return JoinFailedError(
            f"{count} came to the rendezvous and then did not answer for {answer_s:.0f} s{named}",
            "see whether saferun still runs there, and its output",
            kind="gone",
        )
    return JoinFailedError(
        f"{count} did not come within {timeout_s:.0f} s{named}",
        "check that saferun was started there, and see its output; --start-timeout sets how long to wait",
        kind="incomplete",
    )


def forget_round(control: StoreClient, prefix: str, seats: int) -> None:
    """Delete what the hosts have written in a rendezvous that no host reads any more.

    Args:
        control: a connection to the control store, which is used for nothing but to make another.
        prefix: of the rendezvous's keys.
        seats: how many hosts there may have been.
    """
    with suppress(StoreBrokenError):
        client = control.another()
        for seat in range(seats):
            for kind in ("host", "assignment", "withdrawn", "leaver"):
                client.delete(f"{prefix}{kind}/{seat}")


def left_error(name: str, rdzv: RendezvousRound) -> JoinFailedError:
    """This host, of that name, leaves before the others have their assignments."""
    what, hint = f"{name} left while the hosts of the job met", f"see the output of saferun on {name}"
    return JoinFailedError(what, hint, kind=rdzv.failure_kind, end=rdzv.end)
