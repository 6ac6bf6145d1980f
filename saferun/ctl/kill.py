"""``saferunctl kill``: kill a running job at once, on all its hosts, by SIGKILL to its ranks."""

from __future__ import annotations

import argparse

from saferun.ctl.run_directory import add_run_argument
from saferun.ctl.stop import add_common_arguments, end_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser, is_required=True)
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Have the job end. Returns 0 when it has; 1: that is not known."""
    return end_job(arguments, "kill")
