"""Hosts and local world sizes -> ranks, and the environment and arguments of each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.config import LaunchConfig
from saferun.errors import UsageError
from saferun.model import Placement, RankAssignment

# Variables of the launcher that torchrun copies to each rank's, where they are set.
_HANDED_TO_PLUGINS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_TIMER_FILE")


def single_host(nproc_per_node: int, master_addr: str, master_port: int, run_id: str) -> Placement:
    """The placement of a job that has one host."""
    return Placement(
        group_rank=0,
        group_world_size=1,
        world_size=nproc_per_node,
        role_world_size=nproc_per_node,
        ranks=tuple(RankAssignment(i, i, i) for i in range(nproc_per_node)),
        master_addr=master_addr,
        master_port=master_port,
        run_id=run_id,
    )


def rank_environs(config: LaunchConfig, placement: Placement, environ: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """The environment of each rank of this host as torchrun makes it, in order of local rank.

    Args:
        config: the launch.
        placement: this host's place in the job.
        environ: what the ranks inherit.

    Raises:
        UsageError: the environment and the options contradict each other.
    """
    return tuple({**environ, **rank_environ(config, placement, assignment, environ)} for assignment in placement.ranks)


def rank_environ(
    config: LaunchConfig, placement: Placement, assignment: RankAssignment, environ: Mapping[str, str]
) -> dict[str, str]:
    """What torchrun adds to the environment of a rank (TORCHELASTIC_ERROR_FILE apart).

    Args:
        config: the launch.
        placement: this host's place in the job.
        assignment: the rank's numbers.
        environ: the environment that the rank inherits.

    Raises:
        UsageError: ``--virtual-local-rank`` with fewer GPUs in CUDA_VISIBLE_DEVICES than ranks.
    """
    local_world_size = placement.local_world_size or len(placement.ranks)
    added = {
        "RANK": str(assignment.rank),
        "GROUP_RANK": str(placement.group_rank),
        "ROLE_RANK": str(assignment.role_rank),
        "ROLE_NAME": config.role,
        "LOCAL_RANK": str(assignment.local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "WORLD_SIZE": str(placement.world_size),
        "GROUP_WORLD_SIZE": str(placement.group_world_size),
        "ROLE_WORLD_SIZE": str(placement.role_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(placement.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": placement.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(config.rendezvous.agent_store),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": str(config.settings["signals_to_handle"].value),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if local_world_size > 1 and "OMP_NUM_THREADS" not in environ:
        added["OMP_NUM_THREADS"] = "1"
    if config.virtual_local_rank:
        added["LOCAL_RANK"] = "0"
        added["CUDA_VISIBLE_DEVICES"] = _visible_device(
            assignment.local_rank, environ.get("CUDA_VISIBLE_DEVICES"), one_each=config.hosts.task is not None
        )
    return added


def plugin_environs(
    config: LaunchConfig, placement: Placement, environ: Mapping[str, str]
) -> tuple[dict[str, str], ...]:
    """What torchrun hands to a ``--logs-specs`` plugin of each rank's environment, in order of local rank.

    Args:
        config: the launch.
        placement: this host's place in the job.
        environ: what the ranks inherit.

    Raises:
        UsageError: the environment and the options contradict each other.
    """
    inherited = {name: environ[name] for name in _HANDED_TO_PLUGINS if name in environ}
    environs = [{**inherited, **rank_environ(config, placement, rank, environ)} for rank in placement.ranks]
    for handed in environs:
        del handed["TORCHELASTIC_SIGNALS_TO_HANDLE"]  # torchrun sets it in its own environment
    return tuple(environs)


def apply_changes(environ: dict[str, str], changes: Mapping[str, str | None], inherited: Mapping[str, str]) -> None:
    """Apply what a ``--logs-specs`` plugin has changed of a rank's environment.

    Args:
        environ: the rank's environment.
        changes: the plugin's values; None where it has deleted a variable. Under torchrun the rank then has what the
            launcher has.
        inherited: what the ranks inherit.
    """
    for name, changed in changes.items():
        value = inherited.get(name) if changed is None else changed
        if value is not None:
            environ[name] = value
        elif name != "OMP_NUM_THREADS":  # torchrun has set it in its own environment
            environ.pop(name, None)


def _visible_device(local_rank: int, visible: str | None, *, one_each: bool) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if len(devices) == 1 and one_each:
        return visible.strip()  # the scheduler has given each task a GPU of its own
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU in CUDA_VISIBLE_DEVICES={visible}",
            "lower --nproc-per-node, or list one GPU a rank",
        )
    return devices[local_rank].strip()


def substitute_local_rank(arguments: Sequence[str], local_rank: int) -> list[str]:
    """Arguments with ``$local_rank`` and ``${local_rank}`` replaced and ``$$`` made ``$``, as torchrun does it."""
    if not any("$" in argument for argument in arguments):
        return list(arguments)
    # Only command lines with a dollar pay for the import.
    from string import Template

    return [Template(argument).safe_substitute(local_rank=str(local_rank)) for argument in arguments]
