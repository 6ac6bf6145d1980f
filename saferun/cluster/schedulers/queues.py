"""LSF and PBS: lists of hosts, in which this host finds itself by its name."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.cluster.schedulers.allocation import MOST_TASKS, Allocation, Surroundings, number
from saferun.cluster.schedulers.host_list import matching_names, parse_host_file
from saferun.errors import UsageError


def lsf(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that LSF's ``blaunch`` (one a host) or ``jsrun`` started.

    A batch script has neither LSF_PM_TASKID nor JSM_NAMESPACE_RANK, and is alone.

    See https://www.ibm.com/docs/en/spectrum-lsf: environment variables set for job execution.
    """
    environ = surroundings.environ
    job = environ.get("LSB_JOBID")
    if not job or not ("LSF_PM_TASKID" in environ or "JSM_NAMESPACE_RANK" in environ):
        return None
    names = _lsf_hosts(environ)
    source, key = f"LSF job {job}", f"lsf-{job}"
    local_size, local_rank = 1, 0
    if "JSM_NAMESPACE_RANK" in environ:
        size = number(environ, "JSM_NAMESPACE_SIZE") or 0
        local_size = number(environ, "JSM_NAMESPACE_LOCAL_SIZE", most=MOST_TASKS) or 0
        local_rank = number(environ, "JSM_NAMESPACE_LOCAL_RANK") or 0
        if not local_rank < local_size <= size:
            return None
        hosts = -(-size // local_size)
        # The batch script's own host stands before those of jsrun.
        names = names[len(names) - hosts :] if len(names) == hosts + 1 else names
        namespace = environ.get("JSM_NAMESPACE_ID", "0")
        source, key = f"LSF job {job}, jsrun {namespace}", f"lsf-{job}-{namespace}"
    place = own_place(names, surroundings)
    if not names or place is None:
        return None
    return Allocation(
        source=source,
        key=key,
        hosts=len(names),
        hosts_from="LSB_MCPU_HOSTS",
        node_rank=place,
        node_rank_from=f"{surroundings.host_name} in LSB_MCPU_HOSTS",
        names=names,
        local_rank=local_rank,
        tasks=local_size,
        tasks_from=f"JSM_NAMESPACE_LOCAL_SIZE={local_size}",
        master_addr=names[0],
    )


def _lsf_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """``node1 8 node2 8`` -> node1, node2."""
    fields = environ.get("LSB_MCPU_HOSTS", "").split()
    names = fields[::2] if all(word.isdigit() for word in fields[1::2]) else []
    return tuple(dict.fromkeys(names or environ.get("LSB_HOSTS", "").split()))


def pbs(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that was started on each host of a PBS job, by whatever means: ``pbsdsh``, ``pdsh``.

    Only where it is asked for: the batch script itself sees the same variables, and is alone.

    See https://help.altair.com/2024.1.0/PBS%20Professional/PBSUserGuide2024.1.pdf, PBS_NODEFILE.
    """
    environ = surroundings.environ
    path = environ.get("PBS_NODEFILE")
    text = surroundings.read_text(path) if path else None
    if not path or text is None:
        return None
    try:
        names = tuple(host.name for host in parse_host_file(text, path))
    except UsageError:
        return None
    place = own_place(names, surroundings)
    if place is None:
        return None
    job = environ.get("PBS_JOBID", "job")
    return Allocation(
        source=f"PBS job {job}",
        key=f"pbs-{job}",
        hosts=len(names),
        hosts_from=f"PBS_NODEFILE={path}",
        node_rank=place,
        node_rank_from=f"{surroundings.host_name} in PBS_NODEFILE",
        names=names,
        master_addr=names[0],
    )


def own_place(names: tuple[str, ...], surroundings: Surroundings) -> int | None:
    """Which of the names is this host's: the only one that fits, by name or else by address."""
    found = matching_names(names, surroundings.host_name)
    if not found:
        own = surroundings.own_names(names)
        found = [i for i, name in enumerate(names) if name in own]
    return found[0] if len(found) == 1 else None
