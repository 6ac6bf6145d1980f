"""The messages between a supervisor and its coordinator about a rendezvous, as both of them have them. Pure.

A task asks to join (``JoinRequest``); when the hosts have met, it gets what they agreed on (``Joined``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Any

from saferun.cluster.messages import MOST_HOSTS, Line
from saferun.model import Value
from saferun.text.typed_json import line_of, list_of, number_of, text_of

__all__ = [
    "EndNote",
    "HostInfoText",
    "HostsPart",
    "JoinRequest",
    "Joined",
    "Master",
    "Peer",
    "ProbeTarget",
    "SecretSharing",
    "TaskInfo",
    "Withdrawal",
    "parts_of",
]

_LONGEST_NAME = 255
_LONGEST_TEXT = 1 << 16
_LONGEST_ENDPOINT = 4 << 10
_MOST_ADDRESSES = 64
_MOST_PORTS = 64

Number = Annotated[int, number_of()]
Host = Annotated[int, number_of(MOST_HOSTS)]
# Kept as it is: a path, or an argument of the command line, may be no UTF-8.
Text = Annotated[str, text_of(_LONGEST_TEXT)]


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("an object is wanted")
    return value


class TaskInfo(Value):
    """A task that joins, and its host.

    Attributes:
        nproc: how many ranks it starts.
        role: of its ranks.
        pid: its process.
        addresses: of this host.
        port: the one that other hosts probe.
        files: the name of its run directory.
        host_info: what the host found out about itself, for the leader.
        probe_endpoint: how other hosts probe this one; empty: they do not.
        full: whether every pair of hosts is to be probed.
    """

    nproc: Number
    role: Text
    pid: Number
    addresses: Annotated[tuple[str, ...], list_of(Text, _MOST_ADDRESSES)] = ()
    port: Number = 0
    files: Text = ""
    host_info: Text = ""
    probe_endpoint: Text = ""
    full: bool = False


class Master(Value):
    """Where the host with node rank 0 serves the ranks' store: on one of these ports.

    ``source``: where their numbers come from, one of the constants of ``text.master_port``. ``is_given``: False
    if nothing names that host, so that the address is this host's own.
    """

    address: Text = "127.0.0.1"
    ports: Annotated[tuple[int, ...], list_of(Number, _MOST_PORTS)] = ()
    source: Text = "given"
    is_given: bool = True


class Address(Value):
    """A host and a port."""

    host: Text = ""
    port: Number = 0


class SecretSharing(Value):
    """How a secret that no file holds gets to the other hosts: by a directory below ``base``, or by munge."""

    base: Text = ""
    required: bool = False


class Withdrawal(Value):
    """Why a host cannot start, which the others read instead of its record.

    Attributes:
        what: the reason.
        hint: what to do about it.
        is_usage: whether the next try will fail in the same way.
        leads: whether the others look for this process to meet there.
    """

    what: Text
    hint: Text
    is_usage: bool = False
    leads: bool = False


class JoinRequest(Value):
    """The settings with which a task joins. For most of them see ``config.HostsConfig`` and ``RendezvousConfig``.

    Attributes:
        attempt: the number of the attempt, as this process counts.
        restarts: how many failures the job has got over.
        task: the number of this process on its host, of so many ``tasks``.
        timeout_s: how long other hosts are waited for.
        connect_s: how long the store is waited for at which the hosts meet; 0: as long.
        probe_after_s: how long a host may be silent before it is probed.
        report_every_s: how often a line says who is waited for.
        one_port: whether the job's own messages go through the ranks' store.
        expected: the names of all hosts, as far as they are known.
        name: this host's.
        script: the name of what the ranks run, for people.
        sharing: None: no secret is shared.
        withdrawal: None: the host takes part.
        spares: how many hosts beside the ``most`` of the job wait to take the place of one.
        replaces_leader: whether the first host is gone or left out, so that a spare leads from now on.
        left_out: on the leader: the hosts, by their numbers in the last attempt, that are not waited for any more.
        has_met: whether this process has met the other hosts of its job before.
    """

    backend: Text
    least: Number
    most: Number
    run_id: Text
    timeout_s: float
    probe_after_s: float
    name: Text
    tasks: Number
    attempt: Number = 0
    restarts: Number = 0
    task: Number = 0
    node_rank: int | None = None
    elastic: bool = False
    master: Master = Master()
    endpoint: Text = ""
    address: Address | None = None
    conf: Annotated[dict[str, Any], _object] = {}  # noqa: RUF012 - never changed
    local_addr: Text | None = None
    connect_s: float = 0.0
    report_every_s: float = 30.0
    one_port: bool = False
    expected: Annotated[tuple[str, ...], list_of(Text, MOST_HOSTS)] = ()
    script: Text = ""
    record: TaskInfo = TaskInfo(0, "", 0)
    sharing: SecretSharing | None = None
    withdrawal: Withdrawal | None = None
    spares: Number = 0
    replaces_leader: bool = False
    left_out: Annotated[tuple[int, ...], list_of(Host, MOST_HOSTS)] = ()
    has_met: bool = False


class EndNote(Value):
    """A user has ended the job by saferunctl, which hosts read that wait to join it. ``at_once``: by SIGKILL."""

    by: Line
    at_once: bool = False


class Peer(Value):
    """A host of the job, as the leader knows it."""

    host: Host
    label: Line
    addresses: Annotated[tuple[str, ...], list_of(Annotated[str, line_of(_LONGEST_NAME)], _MOST_ADDRESSES)]
    base_rank: Number
    ranks: Number


class Replacement(Value):
    """A host that has lost its place to a spare, and why; empty: the leader's supervisor knows."""

    host: Line
    by: Line
    why: Line


class ProbeTarget(Value):
    """A host that this one is to probe."""

    host: Host
    label: Line
    endpoint: Annotated[str, text_of(_LONGEST_ENDPOINT)]


class HostInfoText(Value):
    """What a host found out about itself, and how it is probed."""

    host_info: Text
    endpoint: Text


class HostsPart(Value):
    """Some of the hosts, for the leader. Where they are many, all parts but the last come before ``Joined``.

    The supervisor reads no message that is longer than 16 MiB, and does nothing else while it decodes one.
    """

    peers: Annotated[tuple[Peer, ...], list_of(Peer, MOST_HOSTS, skips=True)] = ()
    host_infos: Annotated[tuple[HostInfoText, ...], list_of(HostInfoText, MOST_HOSTS)] = ()


def parts_of(
    peers: Sequence[Peer], infos: Sequence[HostInfoText], *, part_bytes: int = 1 << 20, all_bytes: int = 64 << 20
) -> list[HostsPart]:
    """All hosts in parts, of which there is at least one.

    Args:
        peers: the hosts.
        infos: what each found out about itself.
        part_bytes: how large a part is, but for a host that is larger alone.
        all_bytes: how large all parts may be together: what further hosts found out about themselves is left out.
    """
    parts: list[tuple[list[Peer], list[HostInfoText]]] = [([], [])]
    size_bytes = total_bytes = 0
    for peer, info in zip_longest(peers, infos):
        known = info
        if known is not None and total_bytes + len(known.host_info) > all_bytes:
            known = HostInfoText("", "")
        own_bytes = len(known.host_info) + len(known.endpoint) if known is not None else 0
        own_bytes += sum(map(len, (peer.label, *peer.addresses))) if peer is not None else 0
        if size_bytes + own_bytes > part_bytes and size_bytes:
            parts.append(([], []))
            size_bytes = 0
        size_bytes += own_bytes
        total_bytes += own_bytes
        if peer is not None:
            parts[-1][0].append(peer)
        if known is not None:
            parts[-1][1].append(known)
    return [HostsPart(tuple(some), tuple(theirs)) for some, theirs in parts]


class Joined(Value):
    """What the hosts agreed on, for one task.

    ``peers`` and ``host_infos`` are for the leader, ``probe_endpoints`` for the first task of a host. ``local_base`` is
    the local rank of the task's first rank. ``signed``: by which secret messages are signed, else ``unsigned_why``.
    A host that waits as a spare has a number behind those of the ``hosts``; ``successors`` are those that may lead. The
    leader gets all of them as ``spare_peers``, and as ``replacements`` what has become of the hosts whose places spares
    have taken since the last attempt. ``has_begun``: whether some of the hosts have met before. ``run_id``: the
    job's, for the ranks, if a rendezvous handler has one of its own. ``needed``: for the leader, the hosts without
    which the others cannot meet again.
    """

    attempt: Number
    restarts: Number
    host: Number
    hosts: Number
    base_rank: Number
    world_size: Number
    role_base: Number
    role_world_size: Number
    master_addr: Annotated[str, text_of(_LONGEST_NAME)]
    master_port: Number
    leader: bool
    leader_name: Line
    label: Line
    local_base: Number = 0
    local_world_size: Number = 0
    files: Text = ""
    checked: bool = False
    chunk_limit_bytes: Number = 1 << 16
    leader_addresses: Annotated[tuple[str, ...], list_of(Text, _MOST_ADDRESSES)] = ()
    probe_endpoints: Annotated[tuple[ProbeTarget, ...], list_of(ProbeTarget, MOST_HOSTS)] = ()
    host_infos: Annotated[tuple[HostInfoText, ...], list_of(HostInfoText, MOST_HOSTS)] = ()
    peers: Annotated[tuple[Peer, ...], list_of(Peer, MOST_HOSTS, skips=True)] = ()
    signed: Line = ""
    unsigned_why: Line = ""
    offered: Line = ""
    spare_peers: Annotated[tuple[Peer, ...], list_of(Peer, MOST_HOSTS, skips=True)] = ()
    successors: Annotated[tuple[str, ...], list_of(Line, _MOST_ADDRESSES)] = ()
    replacements: Annotated[tuple[Replacement, ...], list_of(Replacement, MOST_HOSTS, skips=True)] = ()
    has_begun: bool = False
    run_id: Text = ""
    needed: Annotated[tuple[int, ...], list_of(Host, MOST_HOSTS)] = ()
