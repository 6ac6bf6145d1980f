"""Options and the scheduler's environment -> the hosts of the job, the node rank of this one, and the rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.cluster.placement.rank_count import count_ranks
from saferun.cluster.placement.rendezvous_options import check_spares, one_host
from saferun.config import HostsConfig, RendezvousConfig, Setting
from saferun.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.cluster.schedulers import Allocation, Surroundings

__all__ = ["find_place"]

# Without one of these nothing needs to be detected, nor anything be imported that could.
_MARKS = (
    *("SLURM_STEP_ID", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    *("LSF_PM_TASKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "_CONDOR_PROCNO", "KUBERNETES_SERVICE_HOST"),
    *("SM_CURRENT_HOST", "AWS_BATCH_JOB_NODE_INDEX", "RAY_JOB_ID"),
)
# Of a job in whose batch script this process may run, on the first of its hosts only.
_MARKS_OF_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
# What torchrun's options say of the place of this process, or of where it meets others. Whoever writes one of them
# has described the job: what a scheduler provides does not count then, and the options mean what they mean to torchrun.
_COMPLETE = (
    *("nnodes", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)
# Whoever writes one of these asks for the scheduler's hosts.
_REQUESTING = ("scheduler", "hosts", "hostfile")
# A rank of torchrun's or saferun's: what a scheduler provides was for the launcher above it.
_WITHIN_A_RANK = ("TORCHELASTIC_RUN_ID", "SAFERUN_RUN_ID")
# The same of any other launcher's, which may also have got them from the user.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MOST_HOSTS = 1 << 17
# A year; what is beyond is a slip, or not a number at all.
_LONGEST_S = 366 * 86400.0


def find_place(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    surroundings: Surroundings | None = None,
) -> tuple[HostsConfig, RendezvousConfig, int]:
    """The hosts of the job with this one's place, where they meet, and how many ranks this process starts.

    Args:
        values: the options.
        settings: where they come from.
        environ: the environment of this process.
        surroundings: what detectors may look at; None: this host.

    Raises:
        UsageError: what the options say and what was detected contradict each other, or something is missing.
    """
    hosts, rendezvous, ranks = _find(values, settings, environ, surroundings)
    if hosts.shares_console and not hosts.together:
        hosts = hosts._replace(shares_console=False)  # beside others, each of which has a job of its own to report
    return hosts, rendezvous, ranks


def _find(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    surroundings: Surroundings | None,
) -> tuple[HostsConfig, RendezvousConfig, int]:
    least, most = _nnodes(values.nnodes)
    if values.spares:
        check_spares(values, least, most)
    start_s, host_s = _seconds(values, "start_timeout"), _seconds(values, "host_timeout")
    explicit = _is_explicit(settings)
    around, note = _around(values, settings, environ, surroundings, explicit=explicit)
    stop = values.stop_with_parent == "on"
    if values.stop_with_parent == "auto":
        stop = around is not None and around.above
    base = HostsConfig(start_timeout_s=start_s, host_timeout_s=host_s, stop_with_parent=stop)
    if _shares_console(values.console, around):
        is_first = around is None or (not around.node_rank and not around.local_rank)
        base = base._replace(shares_console=True, announces=is_first and not values.node_rank)
    if values.standalone:
        return base, one_host(values, environ), count_ranks(values.nproc_per_node, environ)
    allocation = None
    if around is not None:
        allocation, note = _counting(around, values, settings, environ, surroundings, explicit=explicit)
    if not explicit and not note:
        note = _note(values, environ, around, surroundings)
    base = base._replace(note=note)
    is_alone = most == 1 and not values.spares
    if is_alone and allocation is None and values.node_rank == 0 and not values.hosts and not values.hostfile:
        return base, one_host(values, environ), count_ranks(values.nproc_per_node, environ)
    from saferun.cluster.placement.host_sources import agree

    return agree(values, settings, environ, allocation, base._replace(least=least, most=most))


def _around(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    surroundings: Surroundings | None,
    *,
    explicit: bool,
) -> tuple[Allocation | None, str]:
    """What a launcher provides to this process, and what to say where it has only left its variables to it."""
    wanted = values.scheduler
    if wanted == "none":
        return None, ""
    if wanted == "auto" and (
        not any(mark in environ for mark in _MARKS) or any(name in environ for name in _WITHIN_A_RANK)
    ):
        return None, ""
    from saferun.cluster.placement.launcher import find_launcher, starter_of

    around = find_launcher(wanted, environ, surroundings, explicit=explicit or values.standalone)
    if around is None or settings["scheduler"].origin != "default":
        return around, ""
    is_started, starter = starter_of(around, surroundings)
    if is_started is False:
        note = f"{around.source} did not start this process, but {starter}: its variables are ignored"
    elif around.scheduler != "ray" and all(name in environ for name in _OF_A_RANK):
        note = f"this is a rank of another launcher, as {', '.join(_OF_A_RANK)} are set: the variables of "
        note += f"{around.source} are ignored"
    else:
        return around, ""
    if not _counts(around, values, settings, explicit=explicit):
        return None, ""  # and would have counted for nothing
    return None, f"{note}; --scheduler {around.scheduler} makes them count"


def _counting(
    around: Allocation,
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    surroundings: Surroundings | None,
    *,
    explicit: bool,
) -> tuple[Allocation | None, str]:
    """The scheduler's hosts if they are the hosts of the job; else what to say of them, if anything."""
    if not _counts(around, values, settings, explicit=explicit):
        return None, _unused(around, values, settings) if explicit else ""
    if not any(settings[dest].origin != "default" for dest in (*_REQUESTING, *_COMPLETE)):
        from saferun.cluster.placement.launcher import incomplete

        note = incomplete(around, environ, surroundings)
        if note:
            return None, note
    if _is_a_job_of_its_own(around, values, settings, environ):
        source = f"each of the {around.tasks} processes that {around.source} has on this host is a job of its own"
        if around.tasks == 1:
            source = f"each of the processes of {around.source} is a job of its own"
        return None, f"{source}, as --nproc-per-node is {values.nproc_per_node}"
    return around, ""


def _shares_console(wanted: str, around: Allocation | None) -> bool:
    """Whether what this process prints is shown together with what the others of its job print.

    srun and mpirun copy the output of all processes to their own, by way of a pipe, a socket or a pseudo-terminal of
    theirs. With a file for each process (``srun --output=%N.log``) that file itself is stderr.
    """
    if wanted != "auto":
        return wanted == "shared"
    if around is None or around.alone or not around.above:
        return False
    from saferun.linux.streams import is_own_output

    return not is_own_output(2)


def _is_explicit(settings: Mapping[str, Setting]) -> bool:
    """Whether the user said where this process belongs, and did not ask for the scheduler's hosts.

    With spares, the number of hosts says how many of them train, and nothing of which one this is.
    """
    has_spares = settings["spares"].origin != "default"
    given = [dest for dest in _COMPLETE if settings[dest].origin != "default" and not (has_spares and dest == "nnodes")]
    return bool(given) and not any(settings[dest].origin != "default" for dest in _REQUESTING)


def _counts(
    allocation: Allocation,
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    *,
    explicit: bool,
) -> bool:
    """Whether the scheduler's hosts are the hosts of the job."""
    if allocation.alone:
        return False  # a step of one process does not show whether there are others
    if allocation.above:
        return not explicit
    if not explicit:
        # The number of a pod alone is a help to those who say that pods belong together, and nothing to others.
        numbered = settings["nnodes"].origin != "default" and settings["node_rank"].origin == "default"
        return allocation.hosts is not None or numbered
    return _completes(allocation, values, settings)


def _completes(allocation: Allocation, values: Any, settings: Mapping[str, Setting]) -> bool:  # noqa: ANN401
    """Whether what the operator of a PyTorchJob says in PET_* is completed by what else it says.

    Its releases say how many pods there are as torchrun reads it (PET_NNODES), and where they meet in MASTER_ADDR,
    which torchrun does not read: to that every pod is its own master, and nothing comes of it. Nothing is added to what
    the user wrote.
    """
    most = _nnodes(values.nnodes)[1]
    if most == 1 or values.rdzv_backend != "static" or values.rdzv_endpoint:
        return False
    if settings["nnodes"].place != "PET_NNODES" or allocation.hosts != most or allocation.master_port is None:
        return False
    given = {dest for dest in ("node_rank", "master_addr", "master_port") if settings[dest].origin != "default"}
    return "node_rank" not in given or (values.node_rank == allocation.node_rank and "master_addr" not in given)


def _unused(allocation: Allocation, values: Any, settings: Mapping[str, Setting]) -> str:  # noqa: ANN401
    """What to say where options that say everything leave out which of several pods this is; empty: nothing."""
    if allocation.above or not allocation.node_rank or settings["node_rank"].origin != "default":
        return ""
    if _nnodes(values.nnodes)[1] == 1 or values.rdzv_backend != "static":
        return ""
    found, name = allocation.node_rank_from, allocation.scheduler
    return f"this is node rank 0 by its options; {found} counts with --scheduler {name}"


def _is_a_job_of_its_own(
    allocation: Allocation,
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
) -> bool:
    """Whether each of several processes of a host is to start several ranks, which are one job each under torchrun.

    ``values.nproc_per_node`` is a number after that: torch, which may have to be asked, takes seconds to answer.
    """
    if settings["nproc_per_node"].origin == "default" or settings["scheduler"].origin != "default":
        return False
    # All processes of the job must come to the same conclusion.
    tasks = {allocation.tasks, *allocation.tasks_by_host}
    if tasks == {1}:
        return False
    ranks = count_ranks(values.nproc_per_node, environ)
    values.nproc_per_node = str(ranks)
    return ranks != 1 and tasks != {ranks}


def _note(
    values: Any,  # noqa: ANN401 - argparse's namespace
    environ: Mapping[str, str],
    around: Allocation | None,
    surroundings: Surroundings | None,
) -> str:
    """What to say of variables that make no sense, or of hosts that a job was given and that nothing runs on."""
    is_published = any(mark in environ for mark in (*_MARKS, *_MARKS_OF_JOBS))
    if not is_published or values.scheduler != "auto" or any(name in environ for name in _WITHIN_A_RANK):
        return ""
    from saferun.cluster.schedulers.allocation import odd_values

    odd = odd_values(environ)
    if odd:
        return f"ignored, as the value is not a valid number: {', '.join(odd)}"
    if around is not None or values.hosts or values.hostfile or not any(mark in environ for mark in _MARKS_OF_JOBS):
        return ""
    from saferun.cluster.placement.launcher import this_host
    from saferun.cluster.schedulers import unused_hosts

    hosts, starter = unused_hosts(surroundings or this_host(environ))
    if hosts <= 1:
        return ""
    from saferun.linux.bare_socket import short_host_name

    return f"this job has {hosts} nodes; saferun runs on {short_host_name()} only: start it with {starter}"


def _nnodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise UsageError(f"--nnodes {text} is neither N nor MIN:MAX", "for one host, leave it out") from None
    if not 0 < least <= most:
        raise UsageError(f"--nnodes {text}: MIN must be at least 1 and at most MAX", "for one host, leave it out")
    if most > _MOST_HOSTS:
        raise UsageError(f"--nnodes {text} is more than {_MOST_HOSTS} hosts", "for one host, leave it out")
    return least, most


def _seconds(values: Any, dest: str) -> float:  # noqa: ANN401 - argparse's namespace
    value: float = getattr(values, dest)
    if not 0 < value < _LONGEST_S:
        raise UsageError(f"--{dest.replace('_', '-')} {value:g} is not a number of seconds above 0", "leave it out")
    return value
