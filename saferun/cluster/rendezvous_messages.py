"""The messages between a supervisor and its coordinator at a rendezvous."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.cluster.job_values import Assignment, Peer
from saferun.cluster.messages import LONGEST_MESSAGE
from saferun.config import LaunchConfig
from saferun.linux.bare_socket import short_host_name
from saferun.model import JsonObject, Placement, RankAssignment
from saferun.supervisor.actions import JoinHosts
from saferun.text.decoding import display_text, number, text

_LONGEST_NAME = 255
_LONGEST_PATH = 4096
_MOST_LABELS = 8
# Of a chunk of evidence: what is sent along with it.
_WRAPPING_BYTES = 256
_LEAST_CHUNK_BYTES = 1 << 10


def join_message(config: LaunchConfig, action: JoinHosts, *, task: int, port: int) -> JsonObject:
    """The settings with which this process joins.

    Args:
        config: the launch.
        action: which attempt it is.
        task: this process's number on its host.
        port: of the ranks' store, where it is bound here; else 0.
    """
    hosts, rendezvous = config.hosts, config.rendezvous
    master = rendezvous.master_addr or (hosts.names[0] if hosts.names else "127.0.0.1")
    is_bound = rendezvous.backend == "static" and port
    ports = [port] if is_bound else list(rendezvous.ports or (rendezvous.master_port or 0,))
    return {
        "op": "join",
        "attempt": action.attempt,
        "restarts": action.restarts,
        "task": task,
        "tasks": hosts.task.local_world_size if hosts.task is not None else 1,
        "backend": rendezvous.backend,
        "node_rank": hosts.node_rank,
        "least": hosts.least,
        "most": hosts.most,
        "elastic": hosts.least != hosts.most,
        "master": [master, ports],
        "endpoint": rendezvous.endpoint,
        "address": rendezvous.address,
        "conf": dict(rendezvous.conf),
        "run_id": rendezvous.run_id,
        "local_addr": rendezvous.local_addr,
        "connect_s": hosts.connect_timeout_s,
        "one_port": rendezvous.control == "same",
        "expected": list(hosts.names),
        "name": short_host_name(),
    }


def assignment_from(config: LaunchConfig, message: JsonObject) -> Assignment:
    """What the hosts agreed on, for this process.

    Raises:
        One of ``MALFORMED``: it makes no sense.
    """
    nproc = config.nproc_per_node
    local_base = number(message.get("local_base", 0)) if config.hosts.task is not None else 0
    base, role_base = number(message["base_rank"]), number(message["role_base"])
    hosts = number(message["hosts"])
    placement = Placement(
        group_rank=number(message["host"]),
        group_world_size=hosts,
        world_size=number(message["world_size"]),
        role_world_size=number(message["role_world_size"]),
        ranks=tuple(RankAssignment(local_base + i, base + i, role_base + i) for i in range(nproc)),
        master_addr=text(message["master_addr"], _LONGEST_NAME),
        master_port=number(message["master_port"]),
        run_id=config.rendezvous.run_id,
        local_world_size=number(message.get("local_world_size", nproc)),
        host=display_text(message["label"], LONGEST_MESSAGE),
        leader=display_text(message["leader_name"], LONGEST_MESSAGE),
        restarts=number(message["restarts"]),
    )
    return Assignment(
        placement,
        number(message["attempt"]),
        leads=bool(message["leader"]),
        may_leave=hosts > config.hosts.least,
        files=text(message.get("files") or "", _LONGEST_PATH),
        checked=bool(message.get("checked")),
        probe_endpoints=tuple(
            (number(host), display_text(label, LONGEST_MESSAGE), str(endpoint))
            for host, label, endpoint in message.get("probe_endpoints") or ()
        ),
        host_infos=tuple((str(info), str(endpoint)) for info, endpoint in message.get("host_infos") or ()),
    )


def chunk_limit(message: JsonObject) -> int:
    """How large a chunk of evidence may be, by the hosts' agreement."""
    return max(number(message.get("chunk_limit_bytes", 1 << 16)), _LEAST_CHUNK_BYTES) - _WRAPPING_BYTES


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
