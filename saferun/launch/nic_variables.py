"""``--nic``: the variables that make the libraries use certain network interfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.config import LaunchConfig
from saferun.console.stderr import print_error
from saferun.errors import printable
from saferun.linux.netlink import read_nics
from saferun.preflight.default_nics import mpirun_options, nic_environ


def with_nics(config: LaunchConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with what ``--nic`` sets, which is reported once a job.

    Whether there are such interfaces is for the checks to find out, so that all hosts learn of it.
    """
    names = config.checks.nics
    chosen = nic_environ(names, read_nics(), environ)
    task = config.hosts.task
    if config.hosts.node_rank in {0, None} and (task is None or task.local_rank == 0) and not config.dry_run:
        print_error(f"saferun: {printable(chosen_line(names, chosen))}")
        if config.hosts.detected.startswith("Open MPI"):
            print_error(f"saferun: for mpirun itself: {printable(mpirun_options(names))}")
    return {**environ, **chosen}


def chosen_line(names: Sequence[str], chosen: Mapping[str, str], *, auto: bool = False) -> str:
    """The line that reports what was set."""
    variables = " ".join(f"{name}={value}" for name, value in chosen.items()) or "nothing to change"
    return f"--nic {'auto: ' if auto else ''}{','.join(names)}: {variables}"
