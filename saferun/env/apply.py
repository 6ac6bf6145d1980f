"""The result of env profiles, ``--env`` and ``--unset`` for the ranks of this host."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, MutableMapping, Sequence

from saferun.config import EnvironConfig
from saferun.env.profiles import Resolution, default_search_path, load_profiles, render, resolve, user_directory
from saferun.env.profiles.profile_values import COMPONENTS, Removed, Vendor
from saferun.errors import UsageError
from saferun.linux.answering_files import present_files
from saferun.linux.gpu_nodes import gpu_vendor
from saferun.linux.installed_versions import read_package_versions
from saferun.linux.nccl_files import system_file, user_file, variables_in_nccl_files
from saferun.model import RankAssignment

# Variables that torchrun sets by default, and that may be unset.
_DEFAULTS_OF_TORCHRUN = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
# What a profile has a rank write into its own directory.
_FILES_OF_A_RANK = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_DEBUG_FILE")


def without_outer_files(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without what another saferun has set for the rank that this one was started from.

    The ranks of this launch would write their dumps over those of that rank.
    """
    outer = environ.get("SAFERUN_RUN_DIR") if "SAFERUN_RUN_ID" in environ else None
    names = {name for name in _FILES_OF_A_RANK if outer and environ.get(name, "").startswith(f"{outer}/")}
    if "NCCL_DEBUG_FILE" in names:
        names.add("NCCL_DEBUG")  # they are set together
    return {name: value for name, value in environ.items() if name not in names} if names else environ


def without_logs(resolution: Resolution) -> Resolution:
    """The resolution without what a profile has a healthy rank write below the run directory.

    NCCL opens its log in the first collective, and waits there with the file system if that does not answer.
    """
    names = {setting.variable.name for setting in resolution.settings if setting.profile is not None}
    if "NCCL_DEBUG_FILE" not in names:
        return resolution
    left_out = names & {"NCCL_DEBUG_FILE", "NCCL_DEBUG"}  # they are set together
    return resolution._replace(
        settings=tuple(setting for setting in resolution.settings if setting.variable.name not in left_out)
    )


def resolve_environ(config: EnvironConfig, environ: Mapping[str, str]) -> Resolution:
    """Decide which variables the ranks get, keep or lose.

    Args:
        config: the user's settings.
        environ: the environment that the ranks would inherit.

    Raises:
        UsageError: a missing or malformed profile, or a malformed ``--env``.
    """
    vendor = host_vendor(config.vendor)
    present = files_of_user(environ, vendor)
    has_directory = user_directory(environ) in present
    try:
        resolution = _resolved(config, environ, vendor, present, with_user=has_directory)
    except UsageError as error:
        if not has_directory:
            raise
        # A directory that was only found does not refuse a launch that does not need it.
        try:
            resolution = _resolved(config, environ, vendor, present, with_user=False)
        except UsageError:
            raise error from None
        from saferun.env.profiles.found import report_unused

        report_unused(error, "the env profiles in the home directory are not used")
    # Variables that the ranks would not inherit, but get by default.
    known = {*(removed.name for removed in resolution.removed), *(s.variable.name for s in resolution.settings)}
    more = [Removed(name, "--unset") for name in _DEFAULTS_OF_TORCHRUN if name in config.unset and name not in known]
    return resolution._replace(removed=tuple(sorted((*resolution.removed, *more))))


def files_of_user(environ: Mapping[str, str], vendor: Vendor) -> frozenset[str]:
    """The directory of the user's own profiles and NCCL's own file, if they are there.

    One whose file system does not answer is left out, which is reported.

    Args:
        environ: the environment that the ranks would inherit.
        vendor: the vendor of the host's GPUs.
    """
    present, silent = present_files([path for path in (user_directory(environ), user_file(environ, vendor)) if path])
    if silent:
        from saferun.env.profiles.found import report_silent

        report_silent(silent)
    return present


def _resolved(
    config: EnvironConfig, environ: Mapping[str, str], vendor: Vendor, present: Collection[str], *, with_user: bool
) -> Resolution:
    own = user_file(environ, vendor)
    return resolve(
        load_profiles(default_search_path(config.profile_path, environ, with_user=with_user)),
        config.profiles,
        vendor=vendor,
        versions=installed_versions(environ),
        user_environ=environ,
        env=config.env,
        unset=config.unset,
        nccl_files=variables_in_nccl_files([*([own] if own in present else []), system_file(vendor)]),
    )


def host_vendor(wanted: str) -> Vendor:
    """The GPU vendor for env profiles on this host."""
    if wanted == "nvidia":
        return "nvidia"
    if wanted == "amd":
        return "amd"
    if wanted == "none":
        return "any"
    return gpu_vendor() or "any"


def installed_versions(environ: Mapping[str, str]) -> dict[str, str]:
    """The versions of torch, NCCL and ROCm of the ranks, as far as files have them."""
    if environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return {}  # another interpreter, with packages of its own
    return read_versions(sys.path)


def read_versions(directories: Sequence[str]) -> dict[str, str]:
    """The versions of ``torch``, ``nccl`` and ``rocm``, which profiles depend on, as far as files have them.

    Args:
        directories: the directories with packages: ``sys.path`` of the ranks' interpreter.
    """
    found = read_package_versions(directories)
    return {name: found[name] for name in COMPONENTS if name in found}


def apply(
    resolution: Resolution,
    environ: MutableMapping[str, str],
    assignment: RankAssignment,
    *,
    host: str,
    world_size: int,
    run_dir: str | None,
    rank_dir: str | None,
) -> None:
    """Apply a resolution to a rank's environment.

    Args:
        resolution: the result of ``resolve_environ``.
        environ: the rank's environment so far; changed.
        assignment: the rank.
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
            rank=assignment.rank,
            local_rank=assignment.local_rank,
            world_size=world_size,
            run_dir=run_dir,
            rank_dir=rank_dir,
        )
    )
