"""MPI's launchers: Open MPI (ORTE up to 4, PRRTE since 5), those with hydra (MPICH, Intel MPI, MVAPICH 3), MVAPICH2.

None of them provides node ranks. All processes of the job must derive the same ones here: if they might not, the result
is None, and the user has to give them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from saferun.cluster.schedulers.allocation import (
    MOST_LISTED,
    MOST_TASKS,
    Allocation,
    Surroundings,
    expand_process_mapping,
    number,
    tasks_on_each,
)
from saferun.cluster.schedulers.host_list import matching_names
from saferun.cluster.schedulers.queues import lsf_hosts
from saferun.cluster.schedulers.slurm import slurm_names
from saferun.model import Value


class _Ranks(Value):
    """What MPI always provides: this process's rank among all processes, and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def fit_blocks(self) -> bool:
        """Whether all hosts may have as many processes as this one, each those next to each other."""
        return self.size % self.local_size == 0 and self.rank % self.local_size == self.local_rank

    @property
    def block(self) -> int:
        """The node rank, if they do."""
        return self.rank // self.local_size


def _ranks(environ: Mapping[str, str], *names: str) -> _Ranks | None:
    rank, size, local_rank, local_size = (number(environ, name) for name in names)
    if rank is None or local_rank is None or not size or not local_size:
        return None
    if rank >= size or local_rank >= local_size or local_size > min(size, MOST_TASKS):
        return None
    return _Ranks(rank, size, local_rank, local_size)


# --------------------------------------------------------------------------------------------------------------------
# Open MPI

_DAEMON_VARIABLES = (
    *("OMPI_MCA_orte_local_daemon_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3"),
    *("PMIX_SERVER_URI21", "PMIX_SERVER_URI2"),
)


def open_mpi(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that Open MPI's mpirun started.

    OMPI_COMM_WORLD_NODE_RANK is a rank within the host. But each of mpirun's daemons has a number, 0 being mpirun's
    own host, and a process gets the number of its daemon. Release 4 also gives the processes of all hosts but
    mpirun's own the names of the hosts.

    See https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html.
    """
    environ = surroundings.environ
    ranks = _ranks(
        environ,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    if ranks is None or "JSM_NAMESPACE_RANK" in environ:
        return None
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    hosts = number(environ, "OMPI_MCA_orte_num_nodes", most=MOST_LISTED)
    hosts_from = f"OMPI_MCA_orte_num_nodes={hosts}"
    if not hosts:
        hosts = 1 if ranks.local_size == ranks.size else _hosts_of_prted(surroundings, ranks)
        hosts_from = f"OMPI_COMM_WORLD_SIZE={ranks.size}, OMPI_COMM_WORLD_LOCAL_SIZE={ranks.local_size}"
    daemon = _daemon(environ)
    listed = expand_node_regex(environ.get("OMPI_MCA_orte_node_regex", ""))
    node_rank = _open_mpi_node_rank(ranks, hosts, daemon, len(listed))
    names: tuple[str, ...] = ()
    if node_rank is not None and hosts is not None and daemon is not None:
        # Without mpirun's own host, where that has none of the processes.
        names = listed[daemon - node_rank :][:hosts]
    if len(names) != hosts:
        names = _names_of_job(surroundings, hosts, node_rank)
    master: str | None = None
    if names:
        master = names[0]
    elif node_rank is not None and daemon == node_rank:
        # mpirun's own host is host 0. Since release 5 its name is part of the job's.
        master = surroundings.host_name if daemon == 0 else _launch_host(job)
    return Allocation(
        source=f"Open MPI job {job}".rstrip(),
        key=f"openmpi-{job or 'job'}",
        hosts=hosts,
        hosts_from=hosts_from,
        node_rank=node_rank,
        node_rank_from=f"its daemon {daemon}",
        names=names,
        local_rank=ranks.local_rank,
        tasks=ranks.local_size,
        tasks_from=f"OMPI_COMM_WORLD_LOCAL_SIZE={ranks.local_size}",
        master_addr=master or None,
        master_from="the first of the hosts" if names else "mpirun's own host",
    )


def _hosts_of_prted(surroundings: Surroundings, ranks: _Ranks) -> int | None:
    """How many hosts there are if all have as many processes, unless the daemon's command line contradicts that.

    It has the number of all daemons, the one on mpirun's own host included, which may have no process.
    """
    if not ranks.fit_blocks:
        return None
    hosts = ranks.size // ranks.local_size
    for argv in surroundings.ancestors():
        if argv and argv[0].rpartition("/")[2] == "prted":
            daemons = number(dict(pairwise(argv)), "ess_base_num_procs", most=MOST_LISTED)
            return hosts if daemons is None or hosts in {daemons, daemons - 1} else None
    return hosts


def _daemon(environ: Mapping[str, str]) -> int | None:
    """The number of the daemon that started this process: 3 for ``prterun-node1-4711@0.3;tcp4://...``."""
    for variable in _DAEMON_VARIABLES:
        name, semicolon, _ = environ.get(variable, "").partition(";")
        digits = name.rpartition(".")[2]
        if semicolon and digits.isascii() and digits.isdigit() and int(digits) < MOST_LISTED:
            return int(digits)
    return None


def _launch_host(job: str) -> str | None:
    """Mpirun's host: ``node1`` for ``prterun-node1-4711@1``."""
    found = re.fullmatch(r"(?:prterun|prte|mpirun)-(.+)-\d+@\d+", job)
    return found[1] if found else None


def _open_mpi_node_rank(ranks: _Ranks, hosts: int | None, daemon: int | None, listed: int) -> int | None:
    if hosts == 1:
        return 0
    if daemon is None or hosts is None:
        return None
    if daemon == 0:
        return 0  # mpirun's own host takes part, and then it is the first
    if listed == hosts and daemon < hosts:
        return daemon  # every host that has a daemon takes part
    # Some daemon has no process: mpirun's own, started from a login node, or a host that was not needed.
    if ranks.fit_blocks and ranks.size // ranks.local_size == hosts and ranks.block in {daemon, daemon - 1}:
        return ranks.block
    return None


def expand_node_regex(text: str) -> tuple[str, ...]:
    """``node[1:1-4],login@0(5)`` -> the names of the hosts with daemons, in order; the first is mpirun's own.

    Before the colon stands the number of digits. What is no such text gives no names.
    """
    names: list[str] = []
    for item in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)?", text.partition("@")[0]):
        found = re.fullmatch(r"([^\[]*)\[(\d{1,2}):([\d,-]+)\](.*)", item)
        if found is None:
            if "[" in item:
                return ()
            names.append(item)
            continue
        for part in found[3].split(","):
            low, dash, high = part.partition("-")
            if not low.isdigit() or (dash and not high.isdigit()) or len(high or low) > int(found[2]):
                return ()
            last = int(high) if dash else int(low)
            if last - int(low) >= MOST_LISTED or len(names) > MOST_LISTED:
                return ()
            names.extend(f"{found[1]}{i:0{int(found[2])}}{found[4]}" for i in range(int(low), last + 1))
    return tuple(names)


# --------------------------------------------------------------------------------------------------------------------
# MPICH's hydra and what descends from it


class _Launcher(Value):
    """What is known of the mpiexec that started this process."""

    host: str
    port: str
    proxy: int | None


def process_manager(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that ``mpiexec`` of MPICH, Intel MPI or MVAPICH 3 started.

    The environment has ranks and local ranks only. Which rank is on which host the process manager knows; mpiexec's own
    host stands in the command line of its proxy, or is where its ssh comes from. Within a job of Slurm or LSF the hosts
    are those of the job, if this one is where it should be among them. Slurm's PMI has no MPI_LOCALRANKID: that is left
    to Slurm.
    """
    environ = surroundings.environ
    ranks = _ranks(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if ranks is None:
        return None
    launcher = _launcher(surroundings) or _intel_launcher(surroundings)
    hosts: int | None = None
    node_rank: int | None = None
    tasks_by_host: tuple[int, ...] = ()
    hosts_from = f"PMI_SIZE={ranks.size}, MPI_LOCALNRANKS={ranks.local_size}"
    node_rank_from = f"PMI_RANK={ranks.rank}, MPI_LOCALNRANKS={ranks.local_size}"
    if ranks.local_size == ranks.size:
        hosts, node_rank = 1, 0
    elif mapping := surroundings.ask_pmi("PMI_process_mapping"):
        nodes = expand_process_mapping(mapping, ranks.size)
        if nodes and nodes.count(nodes[ranks.rank]) == ranks.local_size:
            hosts, node_rank = max(nodes) + 1, nodes[ranks.rank]
            tasks_by_host = tasks_on_each(nodes)
            hosts_from = node_rank_from = f"PMI_process_mapping={mapping}"
    elif ranks.fit_blocks and (launcher is None or launcher.proxy in {None, ranks.block}):
        hosts, node_rank = ranks.size // ranks.local_size, ranks.block
    names = _names_of_job(surroundings, hosts, node_rank)
    master = launcher.host if launcher is not None else None
    if names:
        master = names[0]
    elif node_rank == 0 and master is not None and master not in surroundings.own_names((master,)):
        master = None  # mpiexec was started elsewhere, and the others cannot know this host
    return Allocation(
        source=f"mpiexec on {launcher.host}" if launcher is not None else "mpiexec",
        key=_job_key(environ, launcher),
        hosts=hosts,
        hosts_from=hosts_from,
        node_rank=node_rank,
        node_rank_from=node_rank_from,
        names=names,
        local_rank=ranks.local_rank,
        tasks=ranks.local_size,
        tasks_from=f"MPI_LOCALNRANKS={ranks.local_size}",
        tasks_by_host=tasks_by_host,
        master_addr=master,
        master_from="the first host of the job" if names else "mpiexec's own host",
        guessed_master=not names,
    )


def _launcher(surroundings: Surroundings) -> _Launcher | None:
    for argv in surroundings.ancestors():
        if not argv or "hydra" not in argv[0].rpartition("/")[2]:
            continue
        values = dict(pairwise(argv))
        host, _, port = values.get("--control-port", "").rpartition(":")
        if not host:
            host, port = values.get("--upstream-host", ""), values.get("--upstream-port", "")
        if host:
            proxy = values.get("--proxy-id", "")
            return _Launcher(host, port, int(proxy) if proxy.isascii() and proxy.isdigit() else None)
    return None


def _intel_launcher(surroundings: Surroundings) -> _Launcher | None:
    """The same for Intel MPI, whose proxy has it in its environment, except for mpiexec's host.

    That is where the proxy's ssh comes from, as far as mpiexec itself has started the proxies: beyond the width of its
    tree they start each other.
    """
    environ = surroundings.environ
    proxy = number(environ, "HYDRA_BSTRAP_NODE_ID", most=MOST_LISTED)
    if proxy is None:
        return None
    name = environ.get("I_MPI_HYDRA_UUID", "")
    if any(argv and argv[0].rpartition("/")[2] == "mpiexec.hydra" for argv in surroundings.ancestors()):
        return _Launcher(surroundings.host_name, name, proxy)
    width = number(environ, "HYDRA_BSTRAP_TREE_WIDTH", most=MOST_LISTED) or 0
    caller = environ.get("SSH_CONNECTION", "").partition(" ")[0]
    size, local_size = number(environ, "PMI_SIZE") or 0, number(environ, "MPI_LOCALNRANKS") or 1
    if environ.get("HYDRA_BSTRAP_LAUNCHER") != "ssh" or not caller or size // local_size > width + 1:
        return None
    return _Launcher(caller, name, proxy)


def _names_of_job(surroundings: Surroundings, hosts: int | None, node_rank: int | None) -> tuple[str, ...]:
    """The names of the hosts that the scheduler around mpiexec gave to the job, if as many and in this order."""
    if hosts in {None, 1} or node_rank is None:
        return ()
    environ = surroundings.environ
    candidates = [slurm_names(environ.get(name, "")) for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")]
    for names in (*candidates, lsf_hosts(environ)):
        if len(names) == hosts and matching_names(names, surroundings.host_name) == [node_rank]:
            return names
    return ()


def _job_key(environ: Mapping[str, str], launcher: _Launcher | None) -> str:
    name = environ.get("I_MPI_HYDRA_UUID")
    if name:
        return f"mpi-{name}"
    if launcher is not None:
        return f"mpi-{launcher.host}-{launcher.port}"
    jobs = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return "-".join(["mpi", *(environ[job] for job in jobs if environ.get(job))])


# --------------------------------------------------------------------------------------------------------------------
# MVAPICH2's mpirun_rsh


def mpirun_rsh(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that ``mpirun_rsh`` of MVAPICH2 started, by way of a ``mpispawn`` on each host.

    Mpispawn leaves its own variables to the processes. The names of the hosts are among them only where mpispawns start
    each other; where mpirun_rsh starts them all, its own host is.

    Source: src/pm/mpirun/mpispawn.c of MVAPICH2 (setup_global_environment, setup_local_environment).
    """
    environ = surroundings.environ
    ranks = _ranks(
        environ,
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    )
    hosts = number(environ, "MV2_NUM_NODES_IN_JOB", "MPISPAWN_NNODES", most=MOST_LISTED)
    node_rank = number(environ, "MV2_NODE_ID", "MPISPAWN_ID", most=MOST_LISTED)
    if ranks is None or not hosts or node_rank is None or node_rank >= hosts:
        return None
    names = _mpispawn_hosts(environ.get("MPISPAWN_HOSTLIST", ""))
    names = names if len(names) == hosts else ()
    launcher = environ.get("MPISPAWN_MPIRUN_HOST") if environ.get("USE_LINEAR_SSH", "1") == "1" else None
    job = environ.get("MPISPAWN_MPIRUN_ID") or environ.get("MPIRUN_ID", "")
    master = names[0] if names else launcher
    if node_rank == 0 and not names and master is not None and master not in surroundings.own_names((master,)):
        master = None  # mpirun_rsh was started elsewhere, and the others cannot know this host
    return Allocation(
        source=f"mpirun_rsh on {launcher}" if launcher else "mpirun_rsh",
        key="-".join(("mvapich", names[0] if names else launcher or "", job)),
        hosts=hosts,
        hosts_from=f"MV2_NUM_NODES_IN_JOB={hosts}",
        node_rank=node_rank,
        node_rank_from=f"MV2_NODE_ID={node_rank}",
        names=names,
        local_rank=ranks.local_rank,
        tasks=ranks.local_size,
        tasks_from=f"MV2_COMM_WORLD_LOCAL_SIZE={ranks.local_size}",
        master_addr=master,
        master_from="MPISPAWN_HOSTLIST" if names else f"MPISPAWN_MPIRUN_HOST={launcher}",
        guessed_master=not names,
    )


def _mpispawn_hosts(text: str) -> tuple[str, ...]:
    """``node1:2:0:1:node2:2:2:3`` (host, number of processes, their ranks) -> the names of the hosts."""
    fields, names = text.split(":"), []
    while fields and fields[0]:
        count = number({"count": fields[1]}, "count", most=MOST_TASKS) if len(fields) > 1 else None
        if count is None or len(fields) < count + 2:
            return ()
        names.append(fields[0])
        fields = fields[count + 2 :]
    return tuple(names)
