"""Options and what a scheduler told -> the hosts of the job, this one's place among them, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saferun.config import HostsConfig, RendezvousConfig, Setting
from saferun.errors import UsageError
from saferun.place.ranks import count_ranks
from saferun.place.rendezvous import one_host

if TYPE_CHECKING:
    from saferun.schedulers import Allocation, Surroundings

__all__ = ["find_place"]

# Without one of these nothing needs to be detected, nor anything be imported that could.
_MARKS = (
    *("SLURM_STEP_ID", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LSF_PM_TASKID", "JSM_NAMESPACE_RANK"),
    "KUBERNETES_SERVICE_HOST",
)
# A rank of torchrun's or saferun's: what a scheduler told was for the launcher above it.
_WITHIN_A_RANK = ("TORCHELASTIC_RUN_ID", "SAFERUN_RUN_ID")
_MOST_HOSTS = 1 << 17
_MOST_BYTES = 16 << 20
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
    least, most = _nnodes(values.nnodes)
    start_s, host_s = _seconds(values, "start_timeout"), _seconds(values, "host_timeout")
    if values.node_rank < 0:
        raise UsageError(f"--node-rank {values.node_rank} is negative", "host 0 is the first one")
    allocation = _allocation(values, environ, surroundings)
    stop = values.stop_with_parent == "on" or (
        values.stop_with_parent == "auto" and allocation is not None and allocation.above
    )
    base = HostsConfig(start_timeout_s=start_s, host_timeout_s=host_s, stop_with_parent=stop)
    if values.standalone:
        return base, one_host(values, environ), count_ranks(values.nproc_per_node, environ)
    if allocation is not None and not _counts(allocation, settings):
        allocation = None
    if most == 1 and allocation is None and values.node_rank == 0 and not values.hosts and not values.hostfile:
        return base, one_host(values, environ), count_ranks(values.nproc_per_node, environ)
    from saferun.place.told import agree

    return agree(values, settings, environ, allocation, base._replace(least=least, most=most))


def _counts(allocation: Allocation, settings: Mapping[str, Setting]) -> bool:
    """Whether what a scheduler told has a say about the hosts of the job."""
    if allocation.alone:
        return False  # a step of one process says nothing of others that there may be
    if allocation.hosts is None and not allocation.above:
        # The number of a pod: a help to those who say that pods belong together, and nothing to others.
        return settings["nnodes"].origin != "default" and settings["node_rank"].origin == "default"
    return True


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


def _allocation(
    values: Any,  # noqa: ANN401 - argparse's namespace
    environ: Mapping[str, str],
    surroundings: Surroundings | None,
) -> Allocation | None:
    wanted = values.scheduler
    if wanted == "none":
        return None
    if wanted == "auto" and (
        not any(mark in environ for mark in _MARKS) or any(name in environ for name in _WITHIN_A_RANK)
    ):
        return None
    from saferun.schedulers import BY_NAME, detect

    around = _this_host(environ) if surroundings is None else surroundings
    if wanted == "auto":
        return detect(around)
    allocation = BY_NAME[wanted](around)
    if allocation is None:
        raise UsageError(
            f"--scheduler {wanted}: the environment of this process holds nothing of the kind",
            "start saferun by it on every host, or leave --scheduler out",
        )
    return allocation


def _this_host(environ: Mapping[str, str]) -> Surroundings:
    import socket

    from saferun.host.net import is_this_host
    from saferun.host.process_manager import ask_process_manager, command_lines_above
    from saferun.schedulers import Surroundings

    def read_text(path: str) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_MOST_BYTES)
        except OSError:
            return None

    return Surroundings(
        environ,
        socket.gethostname(),
        read_text,
        command_lines_above,
        is_this_host,
        lambda key: ask_process_manager(key, environ),
    )
