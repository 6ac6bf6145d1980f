"""What env profiles, ``--env`` and ``--unset`` come to for the ranks of this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence

from saferun.config import EnvironConfig
from saferun.env.profiles import Resolution, default_search_path, load_profiles, render, resolve
from saferun.env.profiles.model import COMPONENTS, Removed, Vendor
from saferun.linux.gpu_nodes import gpu_vendor
from saferun.linux.installed_versions import read_package_versions
from saferun.model import RankAssignment

# What torchrun sets of itself, and nothing of the job's order depends on.
_TOLD = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def resolve_environ(config: EnvironConfig, environ: Mapping[str, str]) -> Resolution:
    """Decide which variables the ranks get, keep or lose.

    Args:
        config: what was asked for.
        environ: what the ranks would inherit.

    Raises:
        UsageError: a profile that is not there or not in order, a malformed ``--env``.
    """
    resolution = resolve(
        load_profiles(default_search_path(config.profile_path, environ)),
        config.profiles,
        vendor=host_vendor(config.vendor),
        versions=installed_versions(environ),
        user_environ=environ,
        env=config.env,
        unset=config.unset,
    )
    # What the ranks would not inherit, but be told.
    known = {*(removed.name for removed in resolution.removed), *(s.variable.name for s in resolution.settings)}
    more = [Removed(name, "--unset") for name in _TOLD if name in config.unset and name not in known]
    return resolution._replace(removed=tuple(sorted((*resolution.removed, *more))))


def host_vendor(wanted: str) -> Vendor:
    """Whose GPUs env profiles are for on this host."""
    if wanted == "nvidia":
        return "nvidia"
    if wanted == "amd":
        return "amd"
    if wanted == "none":
        return "any"
    return gpu_vendor() or "any"


def installed_versions(environ: Mapping[str, str]) -> dict[str, str]:
    """The versions of torch, NCCL and ROCm that the ranks will have, as far as files tell."""
    if environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return {}  # another interpreter, with packages of its own
    return read_versions(sys.path)


def read_versions(places: Sequence[str]) -> dict[str, str]:
    """The versions of ``torch``, ``nccl`` and ``rocm``, which profiles ask for, as far as files tell them.

    Args:
        places: the directories where packages are, in the order of import: ``sys.path`` of the ranks' interpreter.
    """
    found = read_package_versions(places)
    return {name: found[name] for name in COMPONENTS if name in found}


def apply(
    resolution: Resolution,
    environ: MutableMapping[str, str],
    place: RankAssignment,
    *,
    host: str,
    world_size: int,
    run_dir: str | None,
    rank_dir: str | None,
) -> None:
    """Make a rank's environment what the resolution says.

    Args:
        resolution: what ``resolve_environ`` came to.
        environ: the rank's environment so far; changed.
        place: the rank.
        host: name of this host.
        world_size: number of ranks of the job.
        run_dir: the run directory, or None.
        rank_dir: the rank's own directory of this attempt, or None.
    """
    for removed in resolution.removed:
        environ.pop(removed.name, None)
    environ.update(
        render(
            resolution,
            host=host,
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=world_size,
            run_dir=run_dir,
            rank_dir=rank_dir,
        )
    )
