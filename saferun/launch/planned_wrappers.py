"""The tools of ``--wrap`` in a launch that is not carried out: for ``--dry-run``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from saferun.config import LaunchConfig
from saferun.env.apply import apply
from saferun.env.profiles import Resolution
from saferun.launch.dry_run import planned_placement
from saferun.launch.wrapped_hosts import missing_host_lines, with_own_name
from saferun.launch.wrapping import Wrapper, missing_rank, misspelt_lines, usable_wrappers
from saferun.supervisor.topology import rank_environs


def planned_wrappers(
    config: LaunchConfig, resolution: Resolution, environ: Mapping[str, str], host: str
) -> tuple[tuple[tuple[Wrapper, ...], ...], list[str]]:
    """What each rank of this host would run under, as far as that is known before the hosts meet.

    Args:
        config: the launch.
        resolution: what env profiles, --env and --unset come to.
        environ: what the ranks would inherit.
        host: name of this host.

    Returns:
        The tools of each rank, none where no rank has any; and lines about ranks that the job may not have, and about
        likely mistakes.

    Raises:
        UsageError: as the launch would.
    """
    if not config.wraps or config.checks.preflight == "only":
        return (), []
    placement, _, _ = planned_placement(config)
    environs = rank_environs(config, placement, environ)
    run_dir, rank_dir = ("{run_dir}", "{rank_dir}") if config.output.keep_files else (None, None)
    for assignment, of_rank in zip(placement.ranks, environs, strict=True):
        apply(
            resolution,
            of_rank,
            assignment,
            host=host,
            world_size=placement.world_size,
            run_dir=run_dir,
            rank_dir=rank_dir,
        )
    wraps, notes = [], misspelt_lines(config.wraps)
    asked = with_own_name(config.wraps, config.hosts, host, os.uname().nodename)
    if not config.hosts.may_have_others:
        notes += missing_host_lines(asked, {host})
    for wrap in asked:
        if config.hosts.most > 1 and not wrap.ranks.is_local and (error := missing_rank(wrap, placement)):
            # Other hosts may have more ranks.
            notes.append(f"{error.what}, if all hosts have as many ranks as this one")
            wraps.append(wrap._replace(ranks=wrap.ranks._replace(may_miss=True)))
        else:
            wraps.append(wrap)
    rank_dirs = [rank_dir] * len(placement.ranks)
    return usable_wrappers(wraps, placement, host, rank_dirs, config.command, environs), notes
