"""Who of a job's hosts gets which ranks. Pure: records of hosts in, assignments out.

A record describes a host that joins; an assignment is what it gets. Both travel as JSON through the
control store, so whatever is read here may have been written by anyone: it is checked, bounded, and never believed
further than that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from saferun.cluster.join_messages import ProbeTarget
from saferun.cluster.messages import MOST_HOSTS, MOST_TASKS
from saferun.model import Value
from saferun.text.decoding import MALFORMED, display_text, loads, number, text
from saferun.text.typed_json import fit, number_of, seconds_of, text_of
from saferun.text.wording import count_text

Task = TypeVar("Task")

_MOST_RANKS_OF_A_TASK = 4096  # as many as --nproc-per-node may ask for
_MOST_RANKS_OF_A_HOST = 65536
MOST_RANKS = 1 << 20
"""How many ranks a job may have: the leader keeps something of each."""
_MOST_ADDRESSES = 64
_LONGEST_NAME = 255
_LONGEST_PATH = 4096
_HIGHEST_PORT = 65535
_LARGEST = 1 << 40
# All hosts adopt the highest one.
_MOST_ATTEMPTS = 1 << 20
_LONGEST_SILENCE_S = 366 * 86400.0  # --host-timeout is less
MOST_SUCCESSORS = 8
# Fields that a saferun of another state does not write: hosts may differ by an update, and a host, or a coordinator, of
# a job that runs when it is updated is started again.
_NEWER = frozenset({"has_met", "has_begun", "successor_addr", "serves_rendezvous", "probe_after_s"})
LONGEST_RECORD_BYTES = 1 << 20
# What a host found out about itself, and how it can be probed; both are read by others than these.
_LONGEST_INFO = 64 << 10
_LONGEST_ENDPOINT = 4 << 10

# All parts together stay within what the leader can hold; a part alone within what one message may be.
_ALL_CHUNKS_BYTES = 64 << 20
_LEAST_CHUNK_BYTES = 8 << 10
_LARGEST_CHUNK_BYTES = 4 << 20


def _name(value: object) -> str:
    # A name is shown to people, on terminals too.
    return display_text(text(value, _LONGEST_NAME), _LONGEST_NAME) or "?"


def _addresses(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MOST_ADDRESSES:
        raise ValueError("no list of addresses")
    return tuple(text(address, _LONGEST_NAME) for address in value)


def _tasks_of(shape: type[Task]) -> Callable[[Any], tuple[Task, ...]]:
    def read(value: object) -> tuple[Task, ...]:
        if not isinstance(value, list) or not 0 < len(value) <= MOST_TASKS:
            raise ValueError("no list of tasks")
        return tuple(fit(shape, task) for task in value)

    return read


def _tasks_of_host(value: object) -> tuple[TaskRecord, ...]:
    tasks = _tasks_of(TaskRecord)(value)
    if sum(task.nproc for task in tasks) > _MOST_RANKS_OF_A_HOST:
        raise ValueError("too many ranks for a host")
    return tasks


Number = Annotated[int, number_of(_LARGEST)]
Attempt = Annotated[int, number_of(_MOST_ATTEMPTS)]
Ranks = Annotated[int, number_of(MOST_RANKS)]
Port = Annotated[int, number_of(_HIGHEST_PORT)]
Name = Annotated[str, _name]
Path = Annotated[str, text_of(_LONGEST_PATH)]
Endpoint = Annotated[str, text_of(_LONGEST_ENDPOINT)]
Addresses = Annotated[tuple[str, ...], _addresses]


class TaskRecord(Value):
    """One saferun process of a host: its number of ranks, their role, its pid."""

    nproc: Annotated[int, number_of(_MOST_RANKS_OF_A_TASK)]
    role: Name
    pid: Number


class HostRecord(Value):
    """A host that joins.

    ``attempt`` is what it believes comes next, ``restarts`` how many failures it has seen the job get over, ``most``
    for how many hosts it was started. ``port`` is the one that others probe. ``born`` is unique to the process.
    ``host_info``: what it found out about itself, for the leader; ``probe_endpoint``: how others can probe it; empty:
    there is nothing to be probed. ``full``: whether all pairs of hosts are to be probed, if this is the leader's.
    ``has_met``: whether it has met the others before, as its supervisor knows: its coordinator may be another one.
    ``serves_rendezvous``: whether the others cannot meet without it.
    """

    name: Name
    tasks: Annotated[tuple[TaskRecord, ...], _tasks_of_host]
    addresses: Addresses = ()
    port: Port = 0
    files: Path = ""
    attempt: Attempt = 0
    restarts: Attempt = 0
    most: Annotated[int, number_of(MOST_HOSTS)] = 1
    born: Annotated[str, text_of(_LONGEST_NAME)] = ""
    host_info: Annotated[str, text_of(_LONGEST_INFO)] = ""
    probe_endpoint: Endpoint = ""
    full: bool = False
    has_met: bool = False
    serves_rendezvous: bool = False


class TaskAssignment(Value):
    """The assignments of one task's ranks: each base is the number of its first rank."""

    nproc: Ranks
    base_rank: Ranks
    role_base: Ranks
    role_world_size: Ranks
    local_base: Ranks


class Successor(Value):
    """A spare host, which may lead the job one day, and where its control store is then."""

    name: Name
    addresses: Addresses
    port: Port


def _successors(value: object) -> tuple[Successor, ...]:
    if not isinstance(value, list) or len(value) > MOST_SUCCESSORS:
        raise ValueError("no list of spares")
    return tuple(fit(Successor, one) for one in value)


def _seats(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_HOSTS:
        raise ValueError("no list of hosts")
    return tuple(number(one, 0, MOST_HOSTS) for one in value)


class HostAssignment(Value):
    """What one host gets: its own ranks, and of the others only what it needs.

    ``probe_endpoints``: the hosts that it is to probe. ``checked``: whether the leader
    looks at what the hosts find, before any rank is started. ``spares``: how many hosts without ranks there are; their
    numbers follow those of the ``hosts``. ``successors``: the first of them; ``order``, for these alone: the node
    ranks that all hosts were started with, in order of their numbers. ``has_begun``: whether some host has met others
    before; the attempt's number does not say so, since each host counts starts of its own that have failed.
    ``probe_after_s``: for how long the leader lets a host be silent, which may have another ``--host-timeout`` than
    this one; 0: it does not say.
    """

    attempt: Attempt
    restarts: Attempt
    host: Number
    hosts: Annotated[int, number_of(MOST_HOSTS)]
    label: Name
    leader_name: Name
    leader_addresses: Addresses
    files: Path
    world_size: Ranks
    chunk_limit_bytes: Annotated[int, number_of(_LARGEST_CHUNK_BYTES)]
    tasks: Annotated[tuple[TaskAssignment, ...], _tasks_of(TaskAssignment)]
    probe_endpoints: tuple[ProbeTarget, ...] = ()
    checked: bool = False
    spares: Annotated[int, number_of(MOST_HOSTS)] = 0
    successors: Annotated[tuple[Successor, ...], _successors] = ()
    order: Annotated[tuple[int, ...], _seats] = ()
    has_begun: bool = False
    probe_after_s: Annotated[float, seconds_of(_LONGEST_SILENCE_S)] = 0.0

    @property
    def is_spare(self) -> bool:
        """Whether this host has no ranks."""
        return self.host >= self.hosts

    @property
    def members(self) -> int:
        """How many hosts take part, with and without ranks."""
        return self.hosts + self.spares

    @property
    def local_world_size(self) -> int:
        """The ranks of this host, of all its tasks."""
        return sum(task.nproc for task in self.tasks)


def assign(
    records: Sequence[HostRecord], spares: int = 0, order: Sequence[int] = (), *, probe_after_s: float = 0.0
) -> list[HostAssignment]:
    """The assignments of all hosts, by torchrun's rules.

    Ranks are contiguous by host number, and by task within a host; ranks within a role are counted in the same order.
    The attempt, and the count of restarts, is the highest that any host knows of.

    Args:
        records: of all hosts, in order of host number.
        spares: how many of them, the last ones, get no ranks.
        order: with which node ranks they were started.
        probe_after_s: for how long the leader lets a host be silent; 0: the hosts are not to know.
    """
    hosts = len(records) - spares
    successors = tuple(Successor(one.name, one.addresses, one.port) for one in records[hosts:][:MOST_SUCCESSORS])
    attempt = max(record.attempt for record in records)
    restarts = max(record.restarts for record in records)
    has_begun = any(record.has_met for record in records)
    labels = label_hosts([record.name for record in records])
    role_sizes: Counter[str] = Counter()
    for record in records[:hosts]:
        for task in record.tasks:
            role_sizes[task.role] += task.nproc
    leader = records[0]
    limit = chunk_limit_bytes(sum(len(record.tasks) for record in records))
    world_size = role_sizes.total()
    role_next: Counter[str] = Counter()
    rank_next = 0
    assignments = []
    for host, record in enumerate(records):
        tasks = []
        local_next = 0
        for task in record.tasks:
            if host >= hosts:
                tasks.append(TaskAssignment(0, 0, 0, 0, 0))
                continue
            tasks.append(TaskAssignment(task.nproc, rank_next, role_next[task.role], role_sizes[task.role], local_next))
            rank_next += task.nproc
            local_next += task.nproc
            role_next[task.role] += task.nproc
        assignments.append(
            HostAssignment(
                attempt=attempt,
                restarts=restarts,
                host=host,
                hosts=hosts,
                label=labels[host],
                leader_name=labels[0],
                leader_addresses=leader.addresses,
                files=leader.files,
                world_size=world_size,
                chunk_limit_bytes=limit,
                tasks=tuple(tasks),
                probe_endpoints=_probe_targets(records[:hosts], labels, host) if host < hosts else (),
                checked=bool(leader.host_info),
                spares=spares,
                successors=successors,
                order=tuple(order) if 0 <= host - hosts < MOST_SUCCESSORS else (),
                has_begun=has_begun,
                probe_after_s=probe_after_s,
            )
        )
    return assignments


def _probe_targets(records: Sequence[HostRecord], labels: Sequence[str], host: int) -> tuple[ProbeTarget, ...]:
    """The hosts that one is to probe."""
    others = partners(host, len(records), full=records[0].full)
    return tuple(
        ProbeTarget(other, labels[other], records[other].probe_endpoint)
        for other in others
        if records[other].probe_endpoint
    )


def partners(host: int, hosts: int, *, full: bool = False) -> tuple[int, ...]:
    """The hosts that a host probes, in order.

    Those one, two, four, eight … further on, as in a dissemination barrier (Hensgen, Finkel, Manber 1988): in each
    round every host probes one and is probed by one, and after the last, whose number is the logarithm of the hosts',
    each has been probed by as many.

    Args:
        host: its number.
        hosts: how many there are.
        full: all others, each host beginning with the next.
    """
    steps = range(1, hosts) if full else (1 << k for k in range(max(hosts - 1, 0).bit_length()))
    return tuple((host + step) % hosts for step in steps)


def label_hosts(names: Sequence[str]) -> list[str]:
    """The names under which the job knows its hosts: with ``.<host number>`` where two have the same; all differ."""
    labels = list(names)
    # A host may be called what another one has just been labelled: the suffixes grow until all differ.
    while len(count := Counter(labels)) < len(labels):
        labels = [label if count[label] == 1 else f"{label}.{host}" for host, label in enumerate(labels)]
    return labels


def chunk_limit_bytes(tasks: int) -> int:
    """How long a piece of evidence of one task may be."""
    return min(_LARGEST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, _ALL_CHUNKS_BYTES // max(1, tasks)))


def disagreement(a: HostRecord, b: HostRecord) -> str | None:
    """What two hosts were started with differently, for people; None: nothing."""
    if a.most != b.most:
        return f"{a.name} was started for {count_text(a.most, 'host')}, {b.name} for {count_text(b.most, 'host')}"
    return None


def missing_text(missing: Sequence[int], hosts: int, expected: Sequence[str]) -> str:
    """Who has not come, by name where it is known: ``2 of 4 hosts: node2, node3``."""
    shown = 16
    names = [name_of(host, expected) for host in missing[:shown]]
    if len(missing) > shown:
        names.append(f"and {len(missing) - shown} more")
    return f"{len(missing)} of {count_text(hosts, 'host')}: {', '.join(names)}"


def name_of(host: int, expected: Sequence[str]) -> str:
    """A host that has not joined: the name that the scheduler gave it, else its node rank."""
    return expected[host] if host < len(expected) and expected[host] else f"node rank {host}"


# -------------------------------------------------------------------------------------------------------------- as JSON


def encode_host_record(record: HostRecord) -> str:
    """The record as text that ``decode_host_record`` reads."""
    return json.dumps(record._asdict())


def decode_host_record(content: bytes | str) -> HostRecord | None:
    """A host's record; None where it is malformed or out of bounds."""
    record: HostRecord | None = typed(HostRecord, content)
    return record


def encode_assignment(assignment: HostAssignment) -> str:
    """The assignment as text that ``decode_assignment`` reads."""
    return json.dumps(assignment._asdict())


def decode_assignment(content: bytes | str) -> HostAssignment | None:
    """A host's assignment; None where it is malformed or out of bounds."""
    assignment: HostAssignment | None = typed(HostAssignment, content)
    return assignment if assignment is not None and assignment.host < assignment.members else None


def typed(shape: Any, content: bytes | str, *, longest: int = LONGEST_RECORD_BYTES) -> Any:  # noqa: ANN401 - a type and a value of it
    """A value of a shape from JSON; None where it is malformed or out of bounds, or lacks a field that all write."""
    try:
        found = loads(content, longest=longest)
        return fit(shape, {field: found[field] for field in shape._fields if field in found or field not in _NEWER})
    except MALFORMED:
        return None
