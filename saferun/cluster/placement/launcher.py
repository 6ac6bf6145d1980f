"""The launcher of this process: imported only where variables of a launcher are in the environment."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from saferun.cluster.placement.pmi import ask_command, ask_process_manager, processes_above
from saferun.cluster.schedulers import BY_NAME, Allocation, Ancestry, Surroundings, detect, started_by
from saferun.cluster.schedulers.allocation import named_master, nearest_launcher
from saferun.errors import UsageError
from saferun.linux.procfs import has_variable

_MOST_BYTES = 16 << 20


def find_launcher(
    wanted: str, environ: Mapping[str, str], surroundings: Surroundings | None, *, explicit: bool
) -> Allocation | None:
    """What the launcher of this process provides; None: there is none.

    Args:
        wanted: ``--scheduler``.
        environ: the environment of this process.
        surroundings: what detectors may look at; None: this host.
        explicit: whether options say it all: no name service or process manager is asked for what hardly counts.

    Raises:
        UsageError: the one that was asked for is not there.
    """
    around = surroundings
    if around is None:
        around = Surroundings(environ, socket.gethostname()) if explicit else this_host(environ)
    if wanted == "auto":
        return detect(around)
    allocation = BY_NAME[wanted](around)
    if allocation is None:
        raise UsageError(
            f"--scheduler {wanted}: its variables are not in the environment of this process",
            "start saferun with it on every host, or leave --scheduler out",
        )
    return allocation._replace(scheduler=wanted)


def starter_of(allocation: Allocation, surroundings: Surroundings | None) -> tuple[bool | None, str]:
    """Whether its launcher started this process, as far as can be seen (``started_by``)."""
    above = processes_above() if surroundings is None else Ancestry(surroundings.ancestors())
    return started_by(above, allocation.scheduler)


def find_ray_worker(environ: Mapping[str, str]) -> Allocation | None:
    """What Ray Train provides to a process that its daemon has started; None: this is none of its workers."""
    allocation = BY_NAME["ray"](Surroundings(environ))
    return allocation._replace(scheduler="ray") if allocation is not None else None


def is_rank_left_over(mark: str, value: str) -> bool:
    """Whether the variables of a rank were there before a launcher started this process, or one above it.

    A rank may submit the next job, or start a step, whose processes then have its variables.

    Args:
        mark: a variable that only a rank's launcher sets.
        value: its value here.
    """
    above = processes_above()
    at = nearest_launcher(above)
    if at is None:
        return False
    # What the launcher's daemon has started; with 0 that is this process.
    return at == 0 or (at <= len(above.pids) and has_variable(above.pids[at - 1], mark, value))


def incomplete(allocation: Allocation, environ: Mapping[str, str], surroundings: Surroundings | None) -> str:
    """Why this process is on its own, as under torchrun, as its launcher does not say all; empty: it does.

    Where a launcher has certainly started this process, whose other processes may know more, the user is asked instead.
    """
    missing = _missing(allocation, environ)
    if not missing or (not allocation.uniform and starter_of(allocation, surroundings)[0]):
        return ""
    note = f"{allocation.source} does not tell this process {missing}, so it is a job of its own"
    return f"{note}; --nnodes, --node-rank and --master-addr make it part of one"


def _missing(allocation: Allocation, environ: Mapping[str, str]) -> str:
    """What a job of several hosts needs, and its launcher does not provide; empty: nothing."""
    if allocation.hosts is None:
        return "how many hosts there are"
    if allocation.hosts == 1:
        return ""
    if allocation.node_rank is None:
        return f"which of {allocation.hosts} hosts it is on"
    is_known = allocation.names or allocation.master_addr or named_master(environ, allocation.hosts)
    return "" if is_known else "which host has rank 0"


def this_host(environ: Mapping[str, str]) -> Surroundings:
    """What detectors may look at, on this host; each is read when they ask for it."""
    from saferun.linux.names import own_names

    seen: list[Ancestry] = []

    def above() -> Ancestry:
        if not seen:
            seen.append(processes_above())
        return seen[0]

    def is_left_over() -> bool:
        # A descriptor of that number may be anything by now.
        return started_by(above())[0] is False

    return Surroundings(
        environ,
        socket.gethostname(),
        _read_text,
        lambda: above().lines,
        lambda names: own_names(names)[0],
        lambda key: None if is_left_over() else ask_process_manager(key, environ),
        lambda argv: None if is_left_over() else ask_command(argv, environ),
    )


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return None
