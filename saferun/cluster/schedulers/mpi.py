"""MPI's launchers: Open MPI (ORTE up to 4, PRRTE since 5) and those with a process manager (MPICH, Intel MPI).

None of them tells node ranks. What is derived here must come out the same in every process of the job: where it might
not, the answer is None, and the user is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from saferun.cluster.schedulers.allocation import MOST_HOSTS, MOST_TASKS, Allocation, Surroundings, number
from saferun.model import Value


class _Ranks(Value):
    """What MPI tells for certain: this process among all, and among those of its host."""

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
    hosts = number(environ, "OMPI_MCA_orte_num_nodes", most=MOST_HOSTS)
    hosts_from = f"OMPI_MCA_orte_num_nodes={hosts}"
    if not hosts:
        hosts = 1 if ranks.local_size == ranks.size else ranks.size // ranks.local_size if ranks.fit_blocks else None
        hosts_from = f"OMPI_COMM_WORLD_SIZE={ranks.size}, OMPI_COMM_WORLD_LOCAL_SIZE={ranks.local_size}"
    daemon = _daemon(environ)
    listed = expand_node_regex(environ.get("OMPI_MCA_orte_node_regex", ""))
    node_rank = _open_mpi_node_rank(ranks, hosts, daemon, len(listed))
    names: tuple[str, ...] = ()
    if node_rank is not None and hosts is not None and daemon is not None:
        # Without mpirun's own host, where that has none of the processes.
        names = listed[daemon - node_rank :][:hosts]
    if len(names) != hosts:
        names = ()
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
    )


def _daemon(environ: Mapping[str, str]) -> int | None:
    """The number of the daemon that started this process: 3 for ``prterun-node1-4711@0.3;tcp4://...``."""
    for variable in _DAEMON_VARIABLES:
        name, semicolon, _ = environ.get(variable, "").partition(";")
        digits = name.rpartition(".")[2]
        if semicolon and digits.isascii() and digits.isdigit() and int(digits) < MOST_HOSTS:
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
            if last - int(low) >= MOST_HOSTS or len(names) > MOST_HOSTS:
                return ()
            names.extend(f"{found[1]}{i:0{int(found[2])}}{found[4]}" for i in range(int(low), last + 1))
    return tuple(names)


# --------------------------------------------------------------------------------------------------------------------
# MPICH's hydra and what descends from it


class _Launcher(Value):
    """What the command line of the proxy above this process tells of mpiexec."""

    host: str
    port: str
    proxy: int | None


def process_manager(surroundings: Surroundings) -> Allocation | None:
    """The place of a process that ``mpiexec`` of MPICH or Intel MPI started.

    The environment has ranks and local ranks only. Which rank is on which host the process manager knows; mpiexec's own
    host stands in the command line of its proxy. Slurm's PMI has no MPI_LOCALRANKID: that is left to Slurm.
    """
    environ = surroundings.environ
    ranks = _ranks(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if ranks is None:
        return None
    launcher = _launcher(surroundings)
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
            tasks_by_host = tuple(nodes.count(node) for node in range(hosts))
            hosts_from = node_rank_from = f"PMI_process_mapping={mapping}"
    elif ranks.fit_blocks and (launcher is None or launcher.proxy in {None, ranks.block}):
        hosts, node_rank = ranks.size // ranks.local_size, ranks.block
    master = launcher.host if launcher is not None else None
    if node_rank == 0 and master is not None and master not in surroundings.own_names((master,)):
        master = None  # mpiexec was started elsewhere, and the others cannot know this host
    return Allocation(
        source=f"mpiexec on {launcher.host}" if launcher is not None else "mpiexec",
        key=_job_key(environ, launcher),
        hosts=hosts,
        hosts_from=hosts_from,
        node_rank=node_rank,
        node_rank_from=node_rank_from,
        local_rank=ranks.local_rank,
        tasks=ranks.local_size,
        tasks_from=f"MPI_LOCALNRANKS={ranks.local_size}",
        tasks_by_host=tasks_by_host,
        master_addr=master,
        guessed_master=True,
    )


def expand_process_mapping(text: str, size: int) -> tuple[int, ...]:
    """``(vector,(0,2,4),(2,1,2))`` -> the node of each rank: 4 ranks each on nodes 0 and 1, and 2 on node 2.

    The blocks are gone through again until all ranks have a node. What is no such text gives none.
    """
    blocks = [tuple(map(int, block)) for block in re.findall(r"\((\d{1,9}),(\d{1,9}),(\d{1,9})\)", text)]
    if not text.replace(" ", "").startswith("(vector,") or not 0 < size <= MOST_HOSTS:
        return ()
    nodes: list[int] = []
    while len(nodes) < size:
        before = len(nodes)
        for first, count, each in blocks:
            for node in range(first, first + count):
                nodes.extend([node] * min(each, size - len(nodes)))
                if len(nodes) == size:
                    break
        if len(nodes) == before:
            return ()
    # Nodes are numbered as they come, so that each number up to the last one is there.
    return tuple(nodes) if set(nodes) == set(range(max(nodes) + 1)) else ()


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


def _job_key(environ: Mapping[str, str], launcher: _Launcher | None) -> str:
    name = environ.get("I_MPI_HYDRA_UUID")
    if name:
        return f"mpi-{name}"
    if launcher is not None:
        return f"mpi-{launcher.host}-{launcher.port}"
    jobs = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return "-".join(["mpi", *(environ[job] for job in jobs if environ.get(job))])
