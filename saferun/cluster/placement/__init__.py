"""From options and the scheduler's environment: the hosts of the job, this one's node rank, and the rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.cluster.placement.rank_count import count_ranks
from saferun.cluster.placement.rendezvous_options import MOST_NNODES, check_spares, is_registered, one_host
from saferun.config import HostsConfig, RendezvousConfig, Setting
from saferun.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.cluster.schedulers import Allocation, Surroundings

__all__ = ["find_place"]

# Set by launchers. If none is set, detection and its imports are skipped; a new scheduler must add one of its own.
_LAUNCHER_VARIABLES = (
    *("SLURM_STEP_ID", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    *("LSF_PM_TASKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "_CONDOR_PROCNO", "KUBERNETES_SERVICE_HOST"),
    *("SM_CURRENT_HOST", "AWS_BATCH_JOB_NODE_INDEX", "RAY_JOB_ID"),
)
# Set in a job's batch script, where this process may run too: on the first of the job's hosts only.
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
# Options of torchrun's about this process's place in the job, or its rendezvous. If one of them is given, the user has
# described the job: what a scheduler provides is ignored, and the options mean what they mean to torchrun.
_TOPOLOGY_OPTIONS = (
    *("nnodes", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)
# If one of these is given, the user asks for the scheduler's hosts.
_REQUESTING = ("scheduler", "hosts", "hostfile")
# Set in a rank of torchrun or saferun: what a scheduler provides was for the launcher above it.
_WITHIN_A_RANK = ("TORCHELASTIC_RUN_ID", "SAFERUN_RUN_ID")
# Set in a rank of any launcher; a user may also have set them.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# A year; anything beyond is a typing error, or infinite.
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
    hosts, rendezvous, ranks = _find(values, settings, _without_left_over_rank(environ), surroundings)
    if hosts.shares_console and not hosts.spans_hosts:
        hosts = hosts._replace(shares_console=False)  # the other processes there report jobs of their own
    return hosts, rendezvous, ranks


def is_in_batch_job(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job of a batch system, whoever places its ranks.

    Args:
        environ: of this process.
    """
    return any(name in environ for name in (*_JOB_VARIABLES, "FLUX_JOB_ID"))


def _without_left_over_rank(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without the variables of a rank that submitted this job, or started this step."""
    mark = next((name for name in reversed(_WITHIN_A_RANK) if name in environ), "")
    if not mark or not any(name in environ for name in _LAUNCHER_VARIABLES):
        return environ
    from saferun.cluster.placement.launcher import is_rank_left_over

    if not is_rank_left_over(mark, environ[mark]):
        return environ
    left_over = {*_WITHIN_A_RANK, *_OF_A_RANK, "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environ.items() if name not in left_over}


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
    offered, note = _from_launcher(values, settings, environ, surroundings, explicit=explicit)
    stop = values.stop_with_parent == "on"
    if values.stop_with_parent == "auto":
        stop = offered is not None and offered.above
    base = HostsConfig(start_timeout_s=start_s, host_timeout_s=host_s, stop_with_parent=stop)
    if _shares_console(values.console, offered):
        is_first = offered is None or (not offered.node_rank and not offered.local_rank)
        base = base._replace(shares_console=True, prints_start_lines=is_first and not values.node_rank)
    if values.standalone:
        return base, one_host(values, environ), count_ranks(values.nproc_per_node, environ)
    allocation = None
    if offered is not None:
        allocation, note = _applicable(offered, values, settings, environ, surroundings, explicit=explicit)
    if not explicit and not note:
        note = _note(values, environ, offered, surroundings)
    base = base._replace(note=note)
    is_alone = most == 1 and not values.spares and not is_registered(values)
    if is_alone and allocation is None and values.node_rank == 0 and not values.hosts and not values.hostfile:
        return base, one_host(values, environ), count_ranks(values.nproc_per_node, environ)
    from saferun.cluster.placement.host_sources import agree

    return agree(values, settings, environ, allocation, base._replace(least=least, most=most))


def _from_launcher(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    surroundings: Surroundings | None,
    *,
    explicit: bool,
) -> tuple[Allocation | None, str]:
    """What the launcher of this process provides, and a note for the user.

    There is a note where a launcher's variables are set but ignored, as it did not start this process itself.
    """
    wanted = values.scheduler
    if wanted == "none":
        return None, ""
    if wanted == "auto" and (
        not any(mark in environ for mark in _LAUNCHER_VARIABLES) or any(name in environ for name in _WITHIN_A_RANK)
    ):
        return None, ""
    from saferun.cluster.placement.launcher import find_launcher, find_ray_worker, starter_of
    from saferun.cluster.schedulers.allocation import RAYLET

    offered = find_launcher(wanted, environ, surroundings, explicit=explicit or values.standalone)
    if offered is None or settings["scheduler"].origin != "default":
        return offered, ""
    is_started, starter = starter_of(offered, surroundings)
    is_below_ray = is_started is False and starter == RAYLET
    if is_below_ray and (worker := find_ray_worker(environ)) is not None:
        return worker, ""
    if is_started is False:
        note = f"{offered.source} did not start this process, but {starter}: its variables are ignored"
    elif offered.scheduler != "ray" and all(name in environ for name in _OF_A_RANK):
        note = f"this is a rank of another launcher, as {', '.join(_OF_A_RANK)} are set: the variables of "
        note += f"{offered.source} are ignored"
    else:
        return offered, ""
    if not _applies(offered, values, settings, explicit=explicit):
        return None, ""  # would not have applied anyway, so that there is nothing to note
    # The other tasks of a step in which Ray was started are Ray's daemons: they would be waited for in vain.
    return None, note if is_below_ray else f"{note}; --scheduler {offered.scheduler} makes them count"


def _applicable(
    offered: Allocation,
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    surroundings: Surroundings | None,
    *,
    explicit: bool,
) -> tuple[Allocation | None, str]:
    """The scheduler's hosts if they are the hosts of the job; if not, a note about that, or an empty one."""
    if not _applies(offered, values, settings, explicit=explicit):
        return None, _unused(offered, values, settings) if explicit else ""
    if not any(settings[dest].origin != "default" for dest in (*_REQUESTING, *_TOPOLOGY_OPTIONS)):
        from saferun.cluster.placement.launcher import incomplete

        note = incomplete(offered, environ, surroundings)
        if note:
            return None, note
    if _is_a_job_of_its_own(offered, values, settings, environ):
        source = f"each of the {offered.tasks} processes that {offered.source} has on this host is a job of its own"
        if offered.tasks == 1:
            source = f"each of the processes of {offered.source} is a job of its own"
        return None, f"{source}, as --nproc-per-node is {values.nproc_per_node}"
    return offered, ""


def _shares_console(wanted: str, offered: Allocation | None) -> bool:
    """Whether this process and the others of its job print to the same console.

    srun and mpirun copy the output of all processes to their own, through a pipe, a socket or a pseudo-terminal. With
    a file for each process (``srun --output=%N.log``) that file itself is stderr.
    """
    if wanted != "auto":
        return wanted == "shared"
    if offered is None or offered.alone or not offered.above:
        return False
    from saferun.linux.streams import is_own_output

    return not is_own_output(2)


def _is_explicit(settings: Mapping[str, Setting]) -> bool:
    """Whether the user gave this process's place in the job, and did not ask for the scheduler's hosts.

    With spares, --nnodes is only how many hosts train, and does not describe the job.
    """
    has_spares = settings["spares"].origin != "default"
    given = [
        dest
        for dest in _TOPOLOGY_OPTIONS
        if settings[dest].origin != "default" and not (has_spares and dest == "nnodes")
    ]
    return bool(given) and not any(settings[dest].origin != "default" for dest in _REQUESTING)


def _applies(
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
        # A pod's number alone is of use only if --nnodes says that the pods are one job.
        numbered = settings["nnodes"].origin != "default" and settings["node_rank"].origin == "default"
        return allocation.hosts is not None or numbered
    return _completes(allocation, values, settings)


def _completes(allocation: Allocation, values: Any, settings: Mapping[str, Setting]) -> bool:  # noqa: ANN401
    """Whether MASTER_ADDR and RANK complete the PET_* variables of a PyTorchJob.

    Its operator sets the number of pods where torchrun reads it (PET_NNODES), but the rendezvous only in MASTER_ADDR,
    which torchrun does not read: under torchrun every pod is its own master, and the job does not start. Options that
    the user gave are never completed.
    """
    most = _nnodes(values.nnodes)[1]
    if most == 1 or values.rdzv_backend != "static" or values.rdzv_endpoint:
        return False
    if settings["nnodes"].location != "PET_NNODES" or allocation.hosts != most or allocation.master_port is None:
        return False
    given = {dest for dest in ("node_rank", "master_addr", "master_port") if settings[dest].origin != "default"}
    return "node_rank" not in given or (values.node_rank == allocation.node_rank and "master_addr" not in given)


def _unused(allocation: Allocation, values: Any, settings: Mapping[str, Setting]) -> str:  # noqa: ANN401
    """The note where the options describe the whole job, but not which of its pods this is; empty: none."""
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
    """Whether each of several processes of a host is to start several ranks: under torchrun each is a job of its own.

    Replaces ``values.nproc_per_node`` by a number: torch may have to be asked, and that takes seconds.
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
    offered: Allocation | None,
    surroundings: Surroundings | None,
) -> str:
    """The note about variables that are not valid, or about hosts of the job that stay unused; empty: none."""
    is_published = any(mark in environ for mark in (*_LAUNCHER_VARIABLES, *_JOB_VARIABLES))
    if not is_published or values.scheduler != "auto" or any(name in environ for name in _WITHIN_A_RANK):
        return ""
    from saferun.cluster.schedulers.allocation import odd_values

    odd = odd_values(environ)
    if odd:
        return f"ignored, as the value is not a valid number: {', '.join(odd)}"
    if offered is not None or values.hosts or values.hostfile or not any(mark in environ for mark in _JOB_VARIABLES):
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
        raise UsageError(f"--nnodes {text} is neither N nor MIN:MAX", "write 4, or 2:4") from None
    if not 0 < least <= most:
        raise UsageError(f"--nnodes {text}: MIN must be at least 1 and at most MAX", "for one host, leave it out")
    if least > MOST_NNODES:
        raise UsageError(f"--nnodes {text} is more than {MOST_NNODES} hosts", "for one host, leave it out")
    return least, min(most, MOST_NNODES)  # whoever writes 1:1000000 means that there is no limit


def _seconds(values: Any, dest: str) -> float:  # noqa: ANN401 - argparse's namespace
    value: float = getattr(values, dest)
    if not 0 < value < _LONGEST_S:
        raise UsageError(f"--{dest.replace('_', '-')} {value:g} is not a number of seconds above 0", "leave it out")
    return value
