"""What the tasks of this host are answered that have joined, once all hosts have met."""

from __future__ import annotations

from saferun.cluster.join_messages import HostsPart, Joined, parts_of
from saferun.coordinator.assignments import TaskAssignment
from saferun.coordinator.rendezvous_round import RendezvousResult
from saferun.coordinator.secret_agreement import signed_fields
from saferun.model import JsonObject


def join_answers(result: RendezvousResult, task: int, share: TaskAssignment) -> list[JsonObject]:
    """The messages to one task: ``joined``, and to the leader's before it ``hosts``, in as many parts as it takes.

    Args:
        result: of the rendezvous.
        task: the number of the task.
        share: its part of this host's assignment.
    """
    assignment = result.assignment
    is_leader = assignment.host == 0 and task == 0
    *earlier, hosts = parts_of(result.peers, result.host_infos) if is_leader else [HostsPart()]
    joined = Joined(
        assignment.attempt,
        assignment.restarts,
        assignment.host,
        assignment.hosts,
        base_rank=share.base_rank,
        world_size=assignment.world_size,
        role_base=share.role_base,
        role_world_size=share.role_world_size,
        master_addr=result.master_addr,
        master_port=result.master_port,
        leader=is_leader,
        leader_name=assignment.leader_name,
        label=assignment.label,
        local_base=share.local_base,
        local_world_size=assignment.local_world_size,
        files=assignment.files,
        checked=assignment.checked,
        chunk_limit_bytes=assignment.chunk_limit_bytes,
        leader_addresses=assignment.leader_addresses,
        probe_endpoints=assignment.probe_endpoints if task == 0 else (),
        host_infos=hosts.host_infos,
        peers=hosts.peers,
        spare_peers=result.spare_peers if is_leader else (),
        replacements=result.replacements,
        has_begun=assignment.has_begun,
        successors=tuple(one.name for one in assignment.successors),
        run_id=result.run_id,
        needed=result.needed if is_leader else (),
        **signed_fields(result.client.signer),
    )
    parts = [{"op": "hosts", "attempt": assignment.attempt, **part._asdict()} for part in earlier]
    return [*parts, {"op": "joined", **joined._asdict()}]
