"""The sources of the hosts of a job (options, lists of hosts, schedulers), and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saferun.cluster.placement.lists import listed_hosts, own_index
from saferun.cluster.placement.rank_count import checked_ranks, count_ranks
from saferun.cluster.placement.rendezvous_options import control_port, is_registered, one_host, read_conf, wait_limits
from saferun.cluster.placement.several_hosts import Known, several
from saferun.config import HostsConfig, RendezvousConfig, Setting, TaskConfig
from saferun.errors import UsageError
from saferun.model import Value

if TYPE_CHECKING:
    from saferun.cluster.schedulers import Allocation
    from saferun.cluster.schedulers.host_list import ListedHost

_COMPLETE_HINT = "pass --nnodes, --node-rank and --master-addr"
_ALONE_HINT = "leave {option} out; or pass --scheduler none to use the options only"


def agree(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    allocation: Allocation | None,
    base: HostsConfig,
) -> tuple[HostsConfig, RendezvousConfig, int]:
    """The hosts of the job with this one's place, where they meet, and how many ranks this process starts.

    Args:
        values: the options.
        settings: where they come from.
        environ: the environment of this process.
        allocation: what a scheduler provides, if anything that counts.
        base: what has nothing to do with who the hosts are; ``least`` and ``most`` are what ``--nnodes`` says.

    Raises:
        UsageError: they contradict each other, or what has to be known is missing.
    """
    listed = listed_hosts(values)
    sources = _HostSources(values, settings, allocation, tuple(host.name for host in listed))
    least, most = sources.hosts(base.least, base.most)
    own = own_index(sources.listed, values, settings, allocation) if listed else None
    ranks = sources.ranks(environ, listed[own] if own is not None else None)
    spares = values.spares
    by_handler = is_registered(values)
    if most + spares == 1 and (allocation is None or allocation.tasks == 1) and not by_handler:
        meets = bool(values.rdzv_endpoint) or values.master_port is not None  # else torchrun ignores the rank as well
        if values.node_rank != 0 and values.rdzv_backend == "static" and meets:
            raise UsageError(
                f"--node-rank {values.node_rank} does not exist in a job of one host", "leave --node-rank out"
            )
        return base._replace(least=1, most=1), one_host(values, environ), ranks
    node_rank = sources.node_rank(most + spares, own)
    if node_rank is None and values.rdzv_backend == "static":
        source = allocation.source if allocation is not None else "the command line"
        raise UsageError(
            f"{source} does not tell this process which of {most + spares} hosts it is on",
            f"name the hosts with --hosts or --hostfile, or {_COMPLETE_HINT}",
        )
    names = sources.listed or (allocation.names if allocation is not None else ())
    rendezvous = several(values, settings, environ, Known(most + spares, names, allocation, least))
    rendezvous = rendezvous._replace(control=control_port(values, rendezvous.ports))
    if rendezvous.backend != "static":
        node_rank = None
    elif most + spares == 1:
        node_rank = 0  # whatever the backend that was asked for: the tasks of one host meet there
    start_s, connect_s = wait_limits(rendezvous.backend, read_conf(values.rdzv_conf))
    hosts = base._replace(
        start_timeout_s=base.start_timeout_s if start_s is None else start_s,
        connect_timeout_s=connect_s,
        least=least,
        most=most,
        node_rank=node_rank,
        names=names,
        task=_task(allocation),
        detected=allocation.source if allocation is not None else "",
        found=allocation.found if allocation is not None else (),
        spares=spares,
        by_handler=by_handler,
    )
    return hosts, rendezvous, ranks


class _HostSources(Value):
    """All sources for the hosts of the job."""

    values: Any
    settings: Mapping[str, Setting]
    allocation: Allocation | None
    listed: tuple[str, ...]

    def _given(self, dest: str) -> bool:
        return self.settings[dest].origin != "default"

    @property
    def _list_name(self) -> str:
        return f"--hostfile {self.values.hostfile}" if self.values.hostfile else f"--hosts {self.values.hosts}"

    def hosts(self, least: int, most: int) -> tuple[int, int]:
        """How many hosts there are, at least and at most."""
        allocation, count = self.allocation, self._count()
        if count is None:
            if allocation is not None and not self._given("nnodes"):
                raise UsageError(
                    f"{allocation.source} does not tell this process how many hosts there are",
                    f"name the hosts with --hosts or --hostfile, or {_COMPLETE_HINT}",
                )
            return (most, most) if self.values.rdzv_backend == "static" else (least, most)
        if self.values.spares:
            return self._training(most, count)
        if not self._given("nnodes"):
            return count, count
        if not least <= count <= most:
            given = f"--nnodes {self.values.nnodes}"
            if self.listed:
                raise UsageError(
                    f"{given}, but {self._list_name} names {_hosts(count)}", "leave --nnodes out, or name all hosts"
                )
            hint = _ALONE_HINT.format(option="--nnodes")
            if most == 1:
                hint = "leave --nnodes out for one job of all hosts; or pass --standalone for one on each host"
            raise UsageError(f"{given}, but {_source(allocation)} has {_hosts(count)}", hint)
        # Without a rendezvous that counts hosts there are as many as were started.
        return (count, count) if self.values.rdzv_backend == "static" else (least, most)

    def _count(self) -> int | None:
        """How many hosts there are by the lists that name them; None: none does."""
        count = self.allocation.hosts if self.allocation is not None else None
        if self.listed and count is not None and count != len(self.listed):
            raise UsageError(
                f"{self._list_name} names {_hosts(len(self.listed))}, but {_source(self.allocation)} has "
                f"{_hosts(count)}",
                "name the hosts that it has, or pass --scheduler none to use the options only",
            )
        return len(self.listed) if self.listed else count

    def _training(self, most: int, count: int) -> tuple[int, int]:
        """How many of so many hosts train: all but the spares."""
        spares = self.values.spares
        if not self._given("nnodes"):
            most = count - spares
        if most > 0 and most + spares == count:
            return most, most
        given = f"--nnodes {most} and --spares {spares}" if self._given("nnodes") else f"--spares {spares}"
        where = self._list_name if self.listed else _source(self.allocation)
        raise UsageError(
            f"{given}, but {where} has {_hosts(count)}", "--nnodes and --spares together are the number of hosts"
        )

    def node_rank(self, most: int, own_index: int | None) -> int | None:
        """Which of the hosts this is; None: it is not known for certain."""
        allocation = self.allocation
        known = allocation.node_rank if allocation is not None else None
        if own_index is not None and known is not None and own_index != known and allocation is not None:
            raise UsageError(
                f"{self._list_name} has this host as number {own_index}, but {allocation.source} calls it number "
                f"{known} ({allocation.node_rank_from})",
                "name the hosts in the scheduler's order, or pass --scheduler none to use the options only",
            )
        if own_index is not None:
            known = own_index
        if self.values.rdzv_backend != "static":
            return None  # its rendezvous decides, as under torchrun
        if not self._given("node_rank"):
            if known is None and allocation is None:
                return 0
            return known
        given: int = self.values.node_rank
        if known is not None and given != known:
            source = self._list_name if own_index is not None or allocation is None else allocation.source
            where = f" ({allocation.node_rank_from})" if allocation is not None and own_index is None else ""
            raise UsageError(
                f"--node-rank {given}, but {source} says that this host is number {known}{where}",
                "leave --node-rank out, as the others have theirs from there",
            )
        if not 0 <= given < most:
            raise UsageError(
                f"--node-rank {given} does not exist in a job of {most} hosts", f"number the hosts from 0 to {most - 1}"
            )
        return given

    def ranks(self, environ: Mapping[str, str], own: ListedHost | None) -> int:
        """How many ranks this process starts."""
        allocation, text = self.allocation, self.values.nproc_per_node
        given = self._given("nproc_per_node")
        if allocation is not None and allocation.task_a_rank:
            if given and count_ranks(text, environ) not in {1, allocation.tasks}:
                raise UsageError(
                    f"--nproc-per-node {text}, but {allocation.source} has started {allocation.tasks} "
                    f"process{'es' if allocation.tasks > 1 else ''} on this host ({allocation.tasks_from})",
                    "leave --nproc-per-node out for a rank a process, or have one process started on each host",
                )
            return 1
        slots = own.slots if own is not None else None
        if slots is None or own is None:
            return count_ranks(text, environ)
        if not given:
            return checked_ranks(slots, f"{self._list_name} has {slots} ranks for {own.name}, which")
        count = count_ranks(text, environ)
        if count > slots:
            raise UsageError(
                f"--nproc-per-node {text}, but {self._list_name} has room for {slots} ranks on {own.name}",
                "leave --nproc-per-node out, or raise the number in the file",
            )
        return count


def _source(allocation: Allocation | None) -> str:
    if allocation is None:
        return ""
    return f"{allocation.source} ({allocation.hosts_from})"


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


def _task(allocation: Allocation | None) -> TaskConfig | None:
    if allocation is None or allocation.tasks == 1:
        return None
    # Two hosts of a job may be one machine, in a trial run on one machine.
    which = "" if allocation.node_rank is None else f"-{allocation.node_rank}"
    return TaskConfig(allocation.local_rank, allocation.tasks, f"{allocation.key}{which}")
