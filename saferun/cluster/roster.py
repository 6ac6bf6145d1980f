"""The hosts of a job and their saferuns, as they were assigned."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.cluster.job_values import Peer
from saferun.cluster.messages import LONGEST_MESSAGE, MOST_HOSTS, MOST_TASKS
from saferun.linux.bare_socket import short_host_name
from saferun.text.decoding import MALFORMED, display_text, number

_LONGEST_NAME = 255


class Roster:
    """Who is in the job. Only the leader knows the other hosts.

    Args:
        host: this host's number.
        task: which of several saferuns of this host this is.
        has_tasks: whether each rank has a saferun of its own.
        peers: all hosts, as the coordinator lists them; what makes no sense there is left out.
    """

    def __init__(self, host: int, task: int, *, has_tasks: bool, peers: Iterable[object] = ()) -> None:
        self.host = host
        self.task = task
        self._has_tasks = has_tasks
        self.peers = {peer.host: peer for peer in map(_peer, peers) if peer is not None}

    @property
    def label(self) -> str:
        """This host's name in the job."""
        peer = self.peers.get(self.host)
        return peer.label if peer is not None else short_host_name()

    @property
    def task_count(self) -> int:
        """How many saferuns there are."""
        return sum(map(self.tasks_of, self.peers)) if self._has_tasks else len(self.peers)

    def tasks_of(self, host: int) -> int:
        """How many saferuns a host has; 0: there is no such host."""
        peer = self.peers.get(host)
        return 0 if peer is None else min(peer.ranks, MOST_TASKS) if self._has_tasks else 1

    def peer_of(self, host: int, task: int) -> Peer | None:
        """The host of a saferun; None: there is no such saferun."""
        return self.peers[host] if task < self.tasks_of(host) else None

    def others(self, hosts: Iterable[int] | None = None) -> set[tuple[int, int]]:
        """All other saferuns, by host and task, or only the first ones of these hosts."""
        found = (
            {(host, task) for host in self.peers for task in range(self.tasks_of(host))}
            if hosts is None
            else {(host, 0) for host in hosts}
        )
        return found - {(self.host, self.task)}


def _peer(value: object) -> Peer | None:
    try:
        host, label, _name, _pid, addresses, base_rank, nproc = value  # type: ignore[misc]
        return Peer(
            number(host, 0, MOST_HOSTS),  # type: ignore[has-type]
            display_text(label, LONGEST_MESSAGE),  # type: ignore[has-type]
            tuple(display_text(address, _LONGEST_NAME) for address in addresses),  # type: ignore[has-type]
            number(base_rank),  # type: ignore[has-type]
            number(nproc),  # type: ignore[has-type]
        )
    except MALFORMED:
        return None
