"""``saferunctl doctor``: the checks before a launch, on this host or on those of a job, without a job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from saferun.config import DEFAULT_TRIAL_TIMEOUT_S, LaunchConfig
from saferun.errors import EXIT_USAGE, UsageError

_LONGEST_TRIAL_S = 3600.0
EPILOG = (
    "All options of saferun that say which hosts there are, and how they reach each other, mean here what they mean "
    "there: --nproc-per-node, --nnodes, --hosts, --hostfile, --node-rank, --master-addr, --master-port, --rdzv-*, "
    "--scheduler, --start-timeout, --nic, --preflight-full, --env-profile, --run-dir (for preflight.json) and others. "
    "A training script may be named; it is not run, but is compared between the hosts. Start it on every host like "
    "saferun: srun saferunctl doctor. The leader (node rank 0) prints the table. Exit code: 0, or 1 where a check "
    "failed, or 2 for a usage error."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand itself; all others are a launch's."""
    parser.usage = (
        "saferunctl doctor [--json] [--collective] [--backend NAME] [--trial-timeout SECONDS] [options of saferun] "
        "[script]"
    )
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print what preflight.json holds instead of a table")
    parser.add_argument(
        "--collective",
        action="store_true",
        help="also run a real all_reduce and barrier with torch, on ever smaller sets of hosts and ranks where they "
        "fail, until the bad host, GPU or interface is found",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="with --collective: torch's backend; auto: nccl where there are GPUs (RCCL on AMD's), else gloo",
    )
    parser.add_argument(
        "--trial-timeout",
        type=float,
        default=DEFAULT_TRIAL_TIMEOUT_S,
        metavar="SECONDS",
        help=f"with --collective: how long each of these may take (default: {DEFAULT_TRIAL_TIMEOUT_S:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, and answer on stdout. 1 where a check failed."""
    from saferun.launch.entry import launch  # the other subcommands need nothing of it

    config = config_of(arguments, arguments.more)
    exit_code = launch(config, dict(os.environ))
    return 1 if exit_code == EXIT_USAGE else exit_code


def config_of(arguments: argparse.Namespace, more: Sequence[str]) -> LaunchConfig:
    """The launch that checks and starts nothing.

    Args:
        arguments: the subcommand's own.
        more: those that are a launch's.

    Raises:
        SaferunError: they ask for what cannot be done.
    """
    from saferun.cli.main import read_config
    from saferun.cli.rank_command import NO_SCRIPT

    if arguments.backend != "auto" and not arguments.collective:
        raise UsageError(f"--backend {arguments.backend} is for --collective", "pass --collective as well")
    if not 1.0 <= arguments.trial_timeout <= _LONGEST_TRIAL_S:
        raise UsageError(f"--trial-timeout {arguments.trial_timeout:g} is out of range", "use 1 to 3600 seconds")
    config = read_config(["--preflight", "only", *more, NO_SCRIPT], os.environ)
    checks = config.checks
    if checks.preflight != "only":
        raise UsageError(f"--preflight {checks.preflight}: nothing would be checked here", "leave --preflight out")
    return config._replace(
        checks=checks._replace(
            as_json=arguments.json,
            collective=arguments.collective,
            backend=arguments.backend,
            trial_timeout_s=arguments.trial_timeout,
        )
    )
