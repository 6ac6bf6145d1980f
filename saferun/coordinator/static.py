"""The static rendezvous: node ranks are known beforehand, and node rank 0 serves both stores.

The ranks' store is where the others come first: its key ``saferun/control`` says where the control store is. There,
``saferun/job`` is unique to the job, and ``round`` counts its meetings, each with a prefix of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from saferun.coordinator.dial import shown
from saferun.coordinator.gathering import Gathering, attempt_prefix, take_place
from saferun.coordinator.meeting import JoinFailedError, Meeting, Met
from saferun.coordinator.search import Search
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.coordinator.stores import Stores

_CONTROL_KEY = "saferun/control"
JOB_KEY = "saferun/job"
_NO_CONTROL_S = 10.0
# A job before this one may take a moment to give its port back.
_FOREIGN_GRACE_S = 5.0
_LOOK_AGAIN_S = 0.5
_HIGHEST_PORT = 65535


class StaticRendezvous:
    """All meetings of this host.

    Args:
        stores: what this host serves if it is node rank 0.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._job = os.urandom(8).hex()
        self._client: StoreClient | None = None  # to the control store
        self._port = 0  # of the ranks' store
        self._round = -1  # of the last meeting that this host took part in

    def meet(self, meeting: Meeting) -> Met:
        """Meet the other hosts.

        Raises:
            JoinFailedError: it cannot be.
            CancelledError: nobody waits any more.
        """
        if meeting.node_rank is None:
            raise JoinFailedError("this host's node rank is unknown", "pass --node-rank (0 to the number of hosts - 1)")
        if meeting.node_rank >= meeting.most:
            raise JoinFailedError(
                f"{meeting.name} has node rank {meeting.node_rank}, but was started for {meeting.most} hosts",
                "node ranks begin at 0: pass another --node-rank or --nnodes",
            )
        if meeting.node_rank == 0:
            try:
                return self._lead(meeting)
            except StoreBrokenError as error:
                raise JoinFailedError(f"the store of this host is gone: {error}", "start the job again") from error
        while True:
            try:
                return self._follow(meeting, meeting.node_rank)
            except StoreBrokenError:
                # The first host has gone, perhaps to come again.
                self._client = None
                self._round = -1
                meeting.check()
                if meeting.remaining_s <= 0:
                    where = shown(meeting.master_addr, self._port)
                    raise JoinFailedError(*_unreachable(f"{where} closed the connection", meeting)) from None

    def watch_membership(self, on_waiting: Callable[[str], None] | None) -> None:
        """A static job has no hosts that come later."""

    def leave(self) -> None:
        """Nothing is kept alive between meetings."""

    def close(self) -> None:
        """The stores end with the process."""

    # ------------------------------------------------------------------------------------------------------ node rank 0

    def _lead(self, meeting: Meeting) -> Met:
        client = self._client
        again = client is not None
        if client is None:
            # Before anybody is waited for: whoever comes finds both stores.
            client = self._client = self._stores.serve_control()
            client.set(JOB_KEY, self._job)
            self._serve_ranks(meeting)
        own = meeting.wait_for_tasks()
        self._round += 1
        prefix = f"r{self._round}/"
        client.set("round", str(self._round))
        client.set(f"{prefix}open", "")
        gathering = Gathering(client, prefix, meeting.most)
        records = gathering.gather(meeting, own)
        meeting.on_all_here()
        if again:
            # All hosts have stopped their ranks. Nothing of theirs may be found by those that come.
            self._serve_ranks(meeting)
        client.set(f"{prefix}done", "")
        place = gathering.hand_out(records)
        prefix = attempt_prefix(place.attempt)
        return Met(place, client, self._job, prefix, records, meeting.master_addr, self._stores.ranks_port)

    def _serve_ranks(self, meeting: Meeting) -> None:
        control = {"port": self._stores.control_port, "run_id": meeting.run_id, "most": meeting.most, "job": self._job}
        ranks = self._stores.serve_ranks()
        ranks.set(_CONTROL_KEY, json.dumps(control))
        ranks.check(_CONTROL_KEY)

    # ------------------------------------------------------------------------------------------------------- the others

    def _follow(self, meeting: Meeting, host: int) -> Met:
        if self._client is None:
            self._client = self._find_control(meeting)
        client = self._client
        own = meeting.wait_for_tasks()
        number = self._wait_for_round(client, meeting)
        self._round = number
        place = take_place(client, f"r{number}/", host, meeting, own)
        prefix = attempt_prefix(place.attempt)
        return Met(place, client, self._job, prefix, [], meeting.master_addr, self._port)

    def _wait_for_round(self, client: StoreClient, meeting: Meeting) -> int:
        """The number of the meeting that this host can take part in."""
        wanted = self._round + 1
        if wanted == 0:
            found = client.get("round", max(1.0, meeting.remaining_s))
            wanted = int(found) if found is not None and found.isdigit() and len(found) <= 9 else 0  # noqa: PLR2004
            if client.check(f"r{wanted}/done"):
                wanted += 1
        while not client.wait([f"r{wanted}/open"], max(0.1, min(meeting.tell_every_s / 2, meeting.remaining_s))):
            meeting.check()
            first = meeting.expected[0] if meeting.expected else "the first host"
            meeting.say(f"waiting for {first} to begin the next attempt")
            if meeting.remaining_s <= 0:
                raise JoinFailedError(
                    f"{first} did not begin another attempt within {meeting.timeout_s:.0f} s",
                    f"see what saferun says on {first}",
                )
        return wanted

    def _find_control(self, meeting: Meeting) -> StoreClient:
        control: dict[int, dict[str, Any]] = {}

        def look(client: StoreClient) -> str | None:
            found = _read_control(client)
            if found is None:
                return "serves a store that is not saferun's"
            if found["run_id"] != meeting.run_id:
                return f"belongs to another job: its run id is {found['run_id']!r}, this one's {meeting.run_id!r}"
            control[client.address[1]] = found
            return None

        search = Search(self._stores.store_class, meeting.master_addr, meeting.ports, look)
        try:
            while (client := search.wait(_LOOK_AGAIN_S)) is None:
                meeting.check()
                words = search.words()
                meeting.say(words, is_amiss=search.leads_nowhere)
                if meeting.remaining_s <= 0:
                    hint = name_hint("--master-addr") if search.knows_no_name else ""
                    raise JoinFailedError(*_unreachable(words, meeting, hint))
                if search.foreign_for_s() > _FOREIGN_GRACE_S:
                    raise JoinFailedError(
                        words,
                        "give all hosts of a job the same --rdzv-id and --master-port, and other jobs other ports",
                    )
        finally:
            search.end()
        self._port = client.address[1]
        found = control[self._port]
        self._job = found["job"]
        if found["most"] != meeting.most:
            first = meeting.expected[0] if meeting.expected else "the first host"
            words = f"{meeting.name} was started for {meeting.most} hosts, {first} for {found['most']}"
            error = JoinFailedError(words, "give all hosts the same --nnodes")
            self._spoil(meeting, found["port"], error)
            raise error
        return self._connect_control(meeting, found["port"])

    def _connect_control(self, meeting: Meeting, port: int) -> StoreClient:
        def look(client: StoreClient) -> str | None:
            found = client.get(JOB_KEY, _NO_CONTROL_S)
            return (
                None if found is not None and found.decode(errors="replace") == self._job else "is not this job's store"
            )

        search = Search(self._stores.store_class, meeting.master_addr, [port], look)
        try:
            while (client := search.wait(_LOOK_AGAIN_S)) is None:
                meeting.check()
                words = search.words()
                meeting.say(words)
                if meeting.remaining_s <= 0 or search.foreign_for_s() > _FOREIGN_GRACE_S:
                    hint = "saferun's own messages go there: let the hosts of a job reach each other at all ports"
                    raise JoinFailedError(f"{words} ({meeting.timeout_s:.0f} s)", hint)
        finally:
            search.end()
        return client

    def _spoil(self, meeting: Meeting, port: int, error: JoinFailedError) -> None:
        """Let the meeting that is under way fail for all."""
        from saferun.coordinator.gathering import tell_failure

        try:
            client = self._connect_control(meeting, port)
            number = client.get("round", 1.0)
            if number is not None and number.isdigit() and not client.check(f"r{int(number)}/done"):
                tell_failure(client, f"r{int(number)}/", error)
        except StoreBrokenError:
            pass


def _unreachable(words: str, meeting: Meeting, hint: str = "") -> tuple[str, str]:
    hint = hint or way_hint(meeting.master_addr, "--master-port")
    return f"{words}, for {meeting.timeout_s:.0f} s", hint


def way_hint(host: str, option: str) -> str:
    """What to look at where a host that the user named does not answer."""
    return f"see whether saferun runs on {host} with this {option}, and whether a firewall is between"


def name_hint(option: str) -> str:
    """What to look at where a host that the user named is not known."""
    return f"look at this host's name service and /etc/hosts, or pass an address as {option}"


def _read_control(client: StoreClient) -> dict[str, Any] | None:
    text = client.get(_CONTROL_KEY, _NO_CONTROL_S)
    if text is None or len(text) > 4096:  # noqa: PLR2004
        return None
    try:
        found = json.loads(text)
        port, run_id, most, job = (found[key] for key in ("port", "run_id", "most", "job"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(port) is not int or not 0 < port <= _HIGHEST_PORT or type(most) is not int:
        return None
    return {"port": port, "run_id": str(run_id), "most": most, "job": str(job)}
