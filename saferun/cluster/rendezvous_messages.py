"""The messages between a supervisor and its coordinator at a rendezvous."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.cluster.job_values import Assignment
from saferun.cluster.join_messages import Address, HostsPart, Joined, JoinRequest, Master, Peer, TaskInfo
from saferun.config import HostsConfig, LaunchConfig, RendezvousConfig
from saferun.linux.bare_socket import short_host_name
from saferun.model import JsonObject, Placement, RankAssignment
from saferun.supervisor.actions import JoinHosts
from saferun.text.typed_json import fit

_MOST_LABELS = 8
# Of a chunk of evidence: what is sent along with it.
_WRAPPING_BYTES = 256
_LEAST_CHUNK_BYTES = 1 << 10


def join_request(
    hosts: HostsConfig, rendezvous: RendezvousConfig, action: JoinHosts, *, task: int, port: int, record: TaskInfo
) -> JoinRequest:
    """The settings with which this process joins.

    Args:
        hosts: the hosts of the job.
        rendezvous: how they meet.
        action: which attempt it is.
        task: this process's number on its host.
        port: of the ranks' store, where it is bound here; else 0.
        record: what the other hosts are to know of this process.
    """
    master = rendezvous.master_addr or (hosts.names[0] if hosts.names else "127.0.0.1")
    is_bound = rendezvous.backend == "static" and port and not hosts.node_rank
    return JoinRequest(
        rendezvous.backend,
        hosts.least,
        hosts.most,
        rendezvous.run_id,
        timeout_s=hosts.start_timeout_s,
        probe_after_s=hosts.probe_after_s,
        name=short_host_name(),
        tasks=hosts.task.local_world_size if hosts.task is not None else 1,
        attempt=action.attempt,
        restarts=action.restarts,
        task=task,
        node_rank=hosts.node_rank,
        elastic=hosts.least != hosts.most,
        master=Master(
            master,
            (port,) if is_bound else rendezvous.ports or (rendezvous.master_port or 0,),
            rendezvous.port_source,
            rendezvous.is_master_given,
        ),
        endpoint=rendezvous.endpoint,
        address=Address(*rendezvous.address) if rendezvous.address is not None else None,
        conf=dict(rendezvous.conf),
        local_addr=rendezvous.local_addr,
        connect_s=hosts.connect_timeout_s,
        one_port=rendezvous.control == "same",
        expected=hosts.names,
        record=record,
        spares=hosts.spares,
    )


class JoinedParts:
    """The hosts' agreement. Of a large job the list of hosts precedes it, in several messages."""

    def __init__(self) -> None:
        self._hosts: list[HostsPart] = []

    def take(self, message: JsonObject) -> Joined | None:
        """Take ``hosts``, a part of the list, or ``joined``. Returns the agreement once it is whole."""
        if message["op"] == "hosts":
            part: HostsPart = fit(HostsPart, message)
            if part.peers and part.peers[0].host == 0:
                self._hosts = []  # those before were of a coordinator that ended before it had sent all
            self._hosts.append(part)
            return None
        joined: Joined = fit(Joined, message)
        if not self._hosts:
            return joined
        hosts, self._hosts = [*self._hosts, HostsPart(joined.peers, joined.host_infos)], []
        return joined._replace(
            peers=tuple(peer for part in hosts for peer in part.peers),
            host_infos=tuple(info for part in hosts for info in part.host_infos),
        )


def assignment_from(config: LaunchConfig, joined: Joined) -> Assignment:
    """What the hosts agreed on, for this process."""
    local_base = joined.local_base if config.hosts.task is not None else 0
    is_spare = joined.host >= joined.hosts
    placement = Placement(
        group_rank=joined.host,
        group_world_size=joined.hosts,
        world_size=joined.world_size,
        role_world_size=joined.role_world_size,
        ranks=tuple(
            RankAssignment(local_base + i, joined.base_rank + i, joined.role_base + i)
            for i in range(0 if is_spare else config.nproc_per_node)
        ),
        master_addr=joined.master_addr,
        master_port=joined.master_port,
        run_id=joined.run_id or config.rendezvous.run_id,
        local_world_size=joined.local_world_size,
        host=joined.label,
        leader=joined.leader_name,
        restarts=joined.restarts,
    )
    return Assignment(
        placement,
        joined.attempt,
        leads=joined.leader,
        may_leave=joined.hosts > config.hosts.least,
        files=joined.files,
        checked=joined.checked,
        probe_endpoints=joined.probe_endpoints,
        host_infos=joined.host_infos,
        spares=tuple(peer.label for peer in joined.spare_peers) or joined.successors,
        replacements=tuple(one for one in joined.replacements if one.why),
        has_begun=joined.has_begun,
        needed=joined.needed,
    )


def chunk_limit(joined: Joined) -> int:
    """How large a chunk of evidence may be, by the hosts' agreement."""
    return max(joined.chunk_limit_bytes, _LEAST_CHUNK_BYTES) - _WRAPPING_BYTES


def hosts_text(peers: Iterable[Peer], world_size: int) -> str:
    """``2 hosts (node0, node1), 8 ranks, 4 on each``."""
    peers = list(peers)
    shown = ", ".join(peer.label for peer in peers[:_MOST_LABELS])
    if len(peers) > _MOST_LABELS:
        shown += f" and {len(peers) - _MOST_LABELS} more"
    counts = {peer.ranks for peer in peers}
    each = f", {counts.pop()} on each" if len(counts) == 1 and len(peers) > 1 else ""
    hosts = "1 host" if len(peers) == 1 else f"{len(peers)} hosts"
    return f"{hosts} ({shown}), {world_size} ranks{each}"
