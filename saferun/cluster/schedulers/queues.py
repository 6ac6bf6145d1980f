"""LSF, PBS, Flux and HTCondor."""

from __future__ import annotations

import re
from collections.abc import Mapping

from saferun.cluster.schedulers.allocation import (
    MOST_LISTED,
    MOST_TASKS,
    Allocation,
    Surroundings,
    expand_process_mapping,
    number,
    tasks_on_each,
)
from saferun.cluster.schedulers.host_list import expand_hosts, matching_names, parse_host_file
from saferun.errors import UsageError

# --------------------------------------------------------------------------------------------------------------------
# LSF


def lsf(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that LSF's ``blaunch`` (one per host) or ``jsrun`` started.

    A batch script has neither LSF_PM_TASKID nor JSM_NAMESPACE_RANK, and is alone. So is each of several processes of a
    host: blaunch starts one for each slot, unless it is given the hosts, and LSF_PM_TASKID, the number of the process
    in the job from 1 on, shows it, except to the first.

    See https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch, and environment variables set for job
    execution.
    """
    environ = surroundings.environ
    job = environ.get("LSB_JOBID")
    if not job or not ("LSF_PM_TASKID" in environ or "JSM_NAMESPACE_RANK" in environ):
        return None
    names = lsf_hosts(environ)
    # The elements of a job array have one id.
    element = environ.get("LSB_JOBINDEX", "0")
    job = job if element in {"", "0"} else f"{job}[{element}]"
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
    index = own_index(names, surroundings)
    if not names or index is None:
        return None
    if "JSM_NAMESPACE_RANK" not in environ and number(environ, "LSF_PM_TASKID") not in {None, index + 1}:
        return None
    return Allocation(
        source=source,
        key=key,
        hosts=len(names),
        hosts_from="LSB_MCPU_HOSTS",
        node_rank=index,
        node_rank_from=f"{surroundings.host_name} in LSB_MCPU_HOSTS",
        names=names,
        local_rank=local_rank,
        tasks=local_size,
        tasks_from=f"JSM_NAMESPACE_LOCAL_SIZE={local_size}",
        master_addr=names[0],
        master_from="the first of LSB_MCPU_HOSTS",
    )


def lsf_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of LSF's job: ``node1 8 node2 8`` -> node1, node2. None where there is no such list."""
    fields = environ.get("LSB_MCPU_HOSTS", "").split()
    names = fields[::2] if all(word.isdigit() for word in fields[1::2]) else []
    return tuple(dict.fromkeys(names or environ.get("LSB_HOSTS", "").split()))


def lsf_job(surroundings: Surroundings) -> int:
    """How many hosts a job has whose batch script this process runs in; 0: in none, or blaunch has started this."""
    environ = surroundings.environ
    if "LSB_JOBID" not in environ or "LSF_PM_TASKID" in environ:
        return 0
    return len(lsf_hosts(environ))


# --------------------------------------------------------------------------------------------------------------------
# PBS


# OpenPBS writes the numbers of tasks so, but for the batch script's.
_FROM_PBSDSH = re.compile(r"[0-9A-F]{8}")


def pbs(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that was started on each host of a PBS job, by whatever means: ``pbsdsh``, ``pdsh``.

    Only where it is asked for: the batch script itself may see the same variables, and is alone. The file with the
    hosts is on the first of them (OpenPBS), or on all (Torque). What PBS itself has started elsewhere has its host's
    number only, and the user has to give the rest.

    See https://help.altair.com/2024.1.0/PBS%20Professional/PBSUserGuide2024.1.pdf, PBS_NODEFILE, and start_process in
    src/resmom/start_exec.c of OpenPBS.
    """
    environ = surroundings.environ
    job = environ.get("PBS_JOBID", "job")
    names = pbs_hosts(surroundings)
    index = own_index(names, surroundings)
    started = _FROM_PBSDSH.fullmatch(environ.get("PBS_TASKNUM", ""))
    if not names and started and "PBS_NODENUM" in environ:
        node_rank = number(environ, "PBS_NODENUM", most=MOST_LISTED)
        return Allocation(
            source=f"PBS job {job}",
            key=f"pbs-{job}",
            hosts=None,
            node_rank=node_rank,
            node_rank_from=f"PBS_NODENUM={node_rank}",
            guessed_master=True,
        )
    if index is None:
        return None
    path = environ["PBS_NODEFILE"]
    return Allocation(
        source=f"PBS job {job}",
        key=f"pbs-{job}",
        hosts=len(names),
        hosts_from=f"PBS_NODEFILE={path}",
        node_rank=index,
        node_rank_from=f"{surroundings.host_name} in PBS_NODEFILE",
        names=names,
        master_addr=names[0],
        master_from="the first of PBS_NODEFILE",
    )


def pbs_hosts(surroundings: Surroundings) -> tuple[str, ...]:
    """The hosts of PBS's job; none where its file is not to be had."""
    path = surroundings.environ.get("PBS_NODEFILE")
    text = surroundings.read_text(path) if path else None
    if not path or text is None:
        return ()
    try:
        return tuple(host.name for host in parse_host_file(text, path))
    except UsageError:
        return ()


def pbs_job(surroundings: Surroundings) -> int:
    """How many hosts a job has whose batch script, or shell, this process runs in; 0: PBS has started it otherwise."""
    environ = surroundings.environ
    if "PBS_JOBID" not in environ or _FROM_PBSDSH.fullmatch(environ.get("PBS_TASKNUM", "")):
        return 0
    return len(pbs_hosts(surroundings))


# --------------------------------------------------------------------------------------------------------------------
# Flux


def flux(surroundings: Surroundings) -> Allocation | None:
    """The place of a task of ``flux run`` or ``flux submit``.

    A batch script of ``flux batch``, and a shell of ``flux alloc``, has no FLUX_TASK_RANK, and is alone. Which task is
    on which node the process manager in Flux's shell knows, and the names of the nodes ``flux hostlist``.

    See https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html.
    """
    environ = surroundings.environ
    job = environ.get("FLUX_JOB_ID")
    rank, size = number(environ, "FLUX_TASK_RANK"), number(environ, "FLUX_JOB_SIZE")
    local_rank = number(environ, "FLUX_TASK_LOCAL_ID", most=MOST_TASKS)
    hosts = number(environ, "FLUX_JOB_NNODES", most=MOST_LISTED)
    if not job or rank is None or local_rank is None or not size or not hosts or not rank < size >= hosts:
        return None
    nodes: tuple[int, ...] = (0,) * size if hosts == 1 else ()
    node_rank_from = f"FLUX_TASK_RANK={rank}, FLUX_JOB_SIZE={size}, FLUX_JOB_NNODES={hosts}"
    if hosts > 1:
        mapping = surroundings.ask_pmi("PMI_process_mapping") or ""
        nodes = expand_process_mapping(mapping, size)
        if nodes and max(nodes) + 1 == hosts:
            node_rank_from = f"PMI_process_mapping={mapping}"
        elif size % hosts == 0 and rank % (size // hosts) == local_rank:
            nodes = tuple(task // (size // hosts) for task in range(size))  # as without --taskmap
        else:
            nodes = ()
    if nodes and nodes[:rank].count(nodes[rank]) != local_rank:
        nodes = ()
    node_rank = nodes[rank] if nodes else None
    names = _flux_names(surroundings) if hosts > 1 else ()
    if len(names) != hosts or own_index(names, surroundings) not in {None, node_rank}:
        names = ()
    return Allocation(
        source=f"Flux job {job}",
        key=f"flux-{job}",
        hosts=hosts,
        hosts_from=f"FLUX_JOB_NNODES={hosts}",
        node_rank=node_rank,
        node_rank_from=node_rank_from,
        names=names,
        local_rank=local_rank,
        tasks=nodes.count(node_rank) if node_rank is not None else 1,
        tasks_from=node_rank_from,
        tasks_by_host=tasks_on_each(nodes),
        master_addr=names[0] if names else None,
        master_from="the first of `flux hostlist`",
        guessed_master=not names,
    )


def _flux_names(surroundings: Surroundings) -> tuple[str, ...]:
    try:
        return expand_hosts(surroundings.ask_command(("flux", "hostlist", "local")) or "")
    except ValueError:
        return ()


# --------------------------------------------------------------------------------------------------------------------
# HTCondor


def htcondor(surroundings: Surroundings) -> Allocation | None:
    """The place of a node of a job of HTCondor's parallel universe: the slots of a job, each with one process.

    Its nodes have their number and how many there are, but not the address of the first one: users export MASTER_ADDR.

    Source: src/condor_starter.V6.1/parallel_proc.cpp of HTCondor, and
    https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html.
    """
    environ = surroundings.environ
    hosts = number(environ, "_CONDOR_NPROCS", most=MOST_LISTED)
    node_rank = number(environ, "_CONDOR_PROCNO", most=MOST_LISTED)
    if not hosts or node_rank is None or node_rank >= hosts:
        return None
    ad = surroundings.read_text(environ.get("_CONDOR_JOB_AD", "")) if environ.get("_CONDOR_JOB_AD") else None
    found = re.search(r"^ClusterId\s*=\s*(\d{1,18})\s*$", ad or "", re.MULTILINE | re.IGNORECASE)
    job = found[1] if found else environ.get("_CONDOR_REMOTE_SPOOL_DIR", "job")
    return Allocation(
        source=f"HTCondor job {job}" if found else "HTCondor",
        key=f"htcondor-{job}",
        hosts=hosts,
        hosts_from=f"_CONDOR_NPROCS={hosts}",
        node_rank=node_rank,
        node_rank_from=f"_CONDOR_PROCNO={node_rank}",
        guessed_master=True,
        uniform=True,
    )


def own_index(names: tuple[str, ...], surroundings: Surroundings) -> int | None:
    """Which of the names is this host's: the only one that fits, by name or else by address."""
    found = matching_names(names, surroundings.host_name)
    if not found:
        own = surroundings.own_names(names)
        found = [i for i, name in enumerate(names) if name in own]
    return found[0] if len(found) == 1 else None
