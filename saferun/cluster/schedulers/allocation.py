"""What a scheduler or MPI provides to a process: its place in the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from saferun.model import Value

# More hosts than any job has, processes than any host, and ranks than any job.
MOST_LISTED = 1 << 17
MOST_TASKS = 1 << 16
_MOST_RANKS = 1 << 24
# Slurm's special steps have the highest numbers of 32 bits.
MOST_STEPS = (1 << 32) - 1
_LONGEST = 18
_NUMBERS = (
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_LOCALID"),
    *("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_NODE_ID", "MV2_NUM_NODES_IN_JOB"),
    *("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
    *("JOB_COMPLETION_INDEX", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LSF_PM_TASKID"),
    *("_CONDOR_PROCNO", "_CONDOR_NPROCS", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
)
RAYLET = "raylet"
# What a launcher has running above each process that it starts: its daemon, or the launcher itself.
_LAUNCHERS = frozenset(
    (
        *("slurmstepd", "orted", "prted", "prte", "prterun", "orterun", "mpirun", "mpiexec", "mpirun.openmpi"),
        *("mpiexec.openmpi", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy", "mpispawn", "mpirun_rsh"),
        *("flux-shell", "res", "pbs_mom", "jsrun", "jsmd", "condor_starter", RAYLET),
    )
)
# With these a daemon is above each process of the job, and Ray's is none of them: `srun -N4 ray start --block`.
_START_RAY = frozenset(("flux", "htcondor", "lsf", "mvapich", "openmpi", "pbs", "pmi", "slurm"))
_LAUNCHERS_BEGIN = ("mpirun", "mpiexec", "orterun", "prterun")  # mpirun.lsf, mpiexec.mpich, .prterun-wrapped
# Where a person's shell comes from. A launcher's daemon may itself be below an sshd, but is the nearer one then.
_LOGINS = frozenset(("sshd", "sshd-session", "dropbear", "tmux", "screen", "SCREEN", "login", "mosh-server"))
_SHELLS = frozenset(("bash", "sh", "dash", "ash", "zsh", "fish", "ksh", "mksh", "tcsh", "csh"))
_WITH_VALUE = frozenset(("--rcfile", "--init-file", "-o", "+o", "-O", "+O"))
# A batch script, an interactive shell, what an ssh into a job becomes part of: none is a task of a step.
_NO_TASK_OF_SLURM = re.compile(r"\[[^\]]*\.(batch|interactive|extern)\]")


class Allocation(Value):
    """A process's place in a job, as its launcher provides it.

    Attributes:
        source: who provides it, for people: ``Slurm step 4711.0``.
        key: what all processes of this launch have in common and no other launch has: ``slurm-4711-0``.
        hosts: how many hosts there are; None: not known.
        hosts_from: where that stands: ``SLURM_STEP_NUM_NODES=4``.
        node_rank: which of them this is; None: not known, or not for certain.
        node_rank_from: where that stands.
        names: the hosts in order of node rank; empty: not known.
        local_rank: which of the processes on this host this is.
        tasks: how many processes this host has.
        tasks_from: where that stands.
        tasks_by_host: how many each host has, in order of node rank; empty: not known.
        master_addr: where host 0 is found; None: not known.
        master_from: where the address stands.
        master_port: the port for it; None: not known.
        guessed_master: whether ``master_addr`` is the host of the launcher itself, which need not be host 0.
        above: whether something of the launcher's watches over this process and exits with the job.
        uniform: whether what is unknown here is unknown to all processes of the job, so that all decide alike.
        scheduler: what --scheduler calls who provides it.
    """

    source: str
    key: str
    hosts: int | None
    hosts_from: str = ""
    node_rank: int | None = None
    node_rank_from: str = ""
    names: tuple[str, ...] = ()
    local_rank: int = 0
    tasks: int = 1
    tasks_from: str = ""
    tasks_by_host: tuple[int, ...] = ()
    master_addr: str | None = None
    master_from: str = ""
    master_port: int | None = None
    guessed_master: bool = False
    above: bool = True
    uniform: bool = False
    scheduler: str = ""

    @property
    def task_a_rank(self) -> bool:
        """Whether each process stands for one rank: some host has several of them."""
        return max(self.tasks, *self.tasks_by_host, 1) > 1

    @property
    def alone(self) -> bool:
        """Whether this is the only process that was started."""
        return self.hosts == 1 and self.tasks == 1

    @property
    def found(self) -> tuple[str, ...]:
        """Where each value was found, one a line: ``node rank 2: SLURM_NODEID=2``."""
        rows = (
            (f"{self.hosts} hosts", self.hosts_from if self.hosts is not None else ""),
            (f"node rank {self.node_rank}", self.node_rank_from if self.node_rank is not None else ""),
            (f"local rank {self.local_rank} of {self.tasks}", self.tasks_from if self.tasks > 1 else ""),
            (f"master {self.master_addr}", self.master_from if self.master_addr else ""),
        )
        return tuple(f"{what}: {where}" for what, where in rows if where)


class Surroundings(Value):
    """What a detector may look at. Only the environment is there for certain; the rest is asked for when needed.

    Attributes:
        environ: the environment of this process.
        host_name: the name of this host.
        read_text: the text of a file, or None.
        ancestors: the command lines of the processes above this one, the nearest first.
        own_names: those of several names or addresses that lead to this host.
        ask_pmi: what MPI's process manager answers for a key (``PMI_process_mapping``), or None.
        ask_command: what a command prints, or None.
    """

    environ: Mapping[str, str]
    host_name: str = ""
    read_text: Callable[[str], str | None] = lambda _: None
    ancestors: Callable[[], Sequence[Sequence[str]]] = tuple
    own_names: Callable[[Sequence[str]], Collection[str]] = lambda _: ()
    ask_pmi: Callable[[str], str | None] = lambda _: None
    ask_command: Callable[[Sequence[str]], str | None] = lambda _: None


def number(environ: Mapping[str, str], *names: str, most: int = _MOST_RANKS) -> int | None:
    """The value of the first of these variables that holds a whole number from 0 to ``most``."""
    for name in names:
        text = environ.get(name, "").strip()
        if _is_number(text) and int(text) <= most:
            return int(text)
    return None


def named_master(environ: Mapping[str, str], hosts: int) -> str:
    """``MASTER_ADDR``; empty: it is not set, or is no address of another host where there are several.

    Base images and shell profiles set it to localhost, for scripts without a launcher.
    """
    master = environ.get("MASTER_ADDR", "")
    is_own = master in {"localhost", "::1", "[::1]"} or master.startswith("127.")
    return "" if is_own and hosts > 1 else master


def tasks_on_each(nodes: Sequence[int]) -> tuple[int, ...]:
    """How many processes each node has, by the node of each process."""
    counts = [0] * (max(nodes, default=-1) + 1)
    for node in nodes:
        counts[node] += 1
    return tuple(counts)


class Ancestry(Value):
    """The processes above this one, as far as they can be seen.

    Attributes:
        lines: their command lines, the nearest first.
        at_terminal: which of them read their standard input from a terminal.
        entered: whether something outside of this container started a process in it: ``docker exec``, ``kubectl exec``.
        pids: their numbers.
    """

    lines: Sequence[Sequence[str]] = ()
    at_terminal: Collection[int] = ()
    entered: bool = False
    pids: Sequence[int] = ()


def nearest_launcher(ancestry: Ancestry) -> int | None:
    """Which process above is the nearest daemon of a launcher, from 0; None: none, or a login is nearer."""
    for i, argv in enumerate(ancestry.lines):
        name = _name_of(argv)
        if name in _LAUNCHERS or name.startswith(_LAUNCHERS_BEGIN):
            return i
        if name in _LOGINS:
            return None
    return None


def _name_of(argv: Sequence[str]) -> str:
    return argv[0].partition(" ")[0].rpartition("/")[2].rstrip(":").removeprefix(".") if argv else ""


def started_by(ancestry: Ancestry, scheduler: str = "") -> tuple[bool | None, str]:
    """Whether a launcher started this process, by the processes above it, and what they show.

    True: its daemon is above. False: the server of a person's shell is nearer, or that shell itself, so the variables
    are left over from somewhere else, or were given to the shell; or Ray's daemon is, and the variables are those of
    the step that Ray itself was started with. None: neither is to be seen, as in a container.

    Args:
        ancestry: the processes above.
        scheduler: what --scheduler calls the launcher.
    """
    for i, argv in enumerate(ancestry.lines):
        name = _name_of(argv)
        if name == "slurmstepd" and scheduler == "slurm" and _NO_TASK_OF_SLURM.search(" ".join(argv)):
            return False, "a batch script or a shell of Slurm's"
        if name == RAYLET and scheduler in _START_RAY:
            return False, name
        if name in _LAUNCHERS or name.startswith(_LAUNCHERS_BEGIN):
            return True, name
        if name in _LOGINS:
            return False, name
        if i in ancestry.at_terminal and takes_commands(argv):
            return False, "an interactive shell"
    return (False, "docker exec, kubectl exec or the like") if ancestry.entered else (None, "")


def takes_commands(argv: Sequence[str]) -> bool:
    """Whether this is the command line of a shell that has neither a script nor ``-c``, and so reads its commands."""
    if not argv or argv[0].rpartition("/")[2].removeprefix("-") not in _SHELLS:
        return False
    rest = iter(argv[1:])
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith(("-", "+")) or word.startswith("--command") or "c" in word.partition("--")[0]:
            return False
    return True


def expand_process_mapping(text: str, size: int) -> tuple[int, ...]:
    """``(vector,(0,2,4),(2,1,2))`` -> the node of each rank: 4 ranks each on nodes 0 and 1, and 2 on node 2.

    The blocks are gone through again until all ranks have a node. What is no such text gives none.
    """
    blocks = [tuple(map(int, block)) for block in re.findall(r"\((\d{1,9}),(\d{1,9}),(\d{1,9})\)", text)]
    if not text.replace(" ", "").startswith("(vector,") or not 0 < size <= MOST_LISTED:
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


def odd_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of launchers that should hold numbers and hold something else; they count as not there."""
    return tuple(
        name
        for name in _NUMBERS
        if name in environ and number(environ, name, most=MOST_STEPS if "STEP" in name else _MOST_RANKS) is None
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST
