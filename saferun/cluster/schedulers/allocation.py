"""What a scheduler or MPI provides to a process: its place in the job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from saferun.model import Value

# More hosts than any job has, processes than any host, and ranks than any job.
MOST_HOSTS = 1 << 17
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
    "JOB_COMPLETION_INDEX",
)


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
        master_port: the port for it; None: not known.
        guessed_master: whether ``master_addr`` is the host of the launcher itself, which need not be host 0.
        above: whether something of the launcher's watches over this process and exits with the job.
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
    master_port: int | None = None
    guessed_master: bool = False
    above: bool = True

    @property
    def task_a_rank(self) -> bool:
        """Whether each process stands for one rank: some host has several of them."""
        return max(self.tasks, *self.tasks_by_host, 1) > 1

    @property
    def alone(self) -> bool:
        """Whether this is the only process that was started."""
        return self.hosts == 1 and self.tasks == 1


class Surroundings(Value):
    """What a detector may look at. Only the environment is there for certain; the rest is asked for when needed.

    Attributes:
        environ: the environment of this process.
        host_name: the name of this host.
        read_text: the text of a file, or None.
        ancestors: the command lines of the processes above this one, the nearest first.
        own_names: those of several names or addresses that lead to this host.
        ask_pmi: what MPI's process manager answers for a key (``PMI_process_mapping``), or None.
    """

    environ: Mapping[str, str]
    host_name: str = ""
    read_text: Callable[[str], str | None] = lambda _: None
    ancestors: Callable[[], Sequence[Sequence[str]]] = tuple
    own_names: Callable[[Sequence[str]], Collection[str]] = lambda _: ()
    ask_pmi: Callable[[str], str | None] = lambda _: None


def number(environ: Mapping[str, str], *names: str, most: int = _MOST_RANKS) -> int | None:
    """The value of the first of these variables that holds a whole number from 0 to ``most``."""
    for name in names:
        text = environ.get(name, "").strip()
        if _is_number(text) and int(text) <= most:
            return int(text)
    return None


def odd_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of launchers that should hold numbers and hold something else; they count as not there."""
    return tuple(
        name
        for name in _NUMBERS
        if name in environ and number(environ, name, most=MOST_STEPS if "STEP" in name else _MOST_RANKS) is None
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST
