"""The hosts of a job and their saferuns, as they were assigned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.cluster.join_messages import Peer
from saferun.cluster.messages import MOST_TASKS
from saferun.linux.bare_socket import short_host_name


class Roster:
    """Who is in the job. Only the leader knows the other hosts.

    Args:
        host: this host's number.
        task: which of several saferuns of this host this is.
        label: this host's name in the job; empty: the hosts have not met.
        has_tasks: whether each rank has a saferun of its own.
        peers: all hosts with ranks.
        spares: all hosts without.
        leader: the name of the host that decides for the job.
        leads: whether this process decides for the job.
        leader_addresses: of the leader, where that is another host.
        neighbour_addresses: this host's own, where other processes of the job have ranks on it.
    """

    def __init__(
        self,
        host: int,
        task: int,
        *,
        has_tasks: bool,
        label: str = "",
        peers: Iterable[Peer] = (),
        spares: Iterable[Peer] = (),
        leader: str = "",
        leads: bool = False,
        leader_addresses: Sequence[str] = (),
        neighbour_addresses: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.task = task
        self.label = label or short_host_name()
        self._has_tasks = has_tasks
        self.peers = {peer.host: peer for peer in peers}
        self.spares = {peer.host: peer for peer in spares}
        self.leader = leader
        self.leads = leads
        self._leader_addresses = leader_addresses
        self._neighbour_addresses = neighbour_addresses

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

    @property
    def host_addresses(self) -> list[str]:
        """The addresses of other hosts, as far as they are known: on the first host those of all hosts with ranks."""
        if self.host != 0:
            return list(self._leader_addresses)
        return [address for peer in list(self.peers.values())[1:] for address in peer.addresses]

    @property
    def other_addresses(self) -> tuple[str, ...]:
        """The addresses at which there are other ranks of the job, as far as they are known."""
        return (*self.host_addresses, *self._neighbour_addresses)

    def others(self, hosts: Iterable[int] | None = None) -> set[tuple[int, int]]:
        """All other saferuns, by host and task, or only the first ones of these hosts."""
        found = (
            {(host, task) for host in self.peers for task in range(self.tasks_of(host))}
            if hosts is None
            else {(host, 0) for host in hosts}
        )
        return found - {(self.host, self.task)}
