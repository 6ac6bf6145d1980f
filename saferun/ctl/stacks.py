"""``saferunctl stacks``: where the processes of a running job are in their code."""

from __future__ import annotations

import argparse

from saferun.ctl.run_directory import TARGET_HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument(
        "target",
        nargs="?",
        default="latest",
        metavar="PID|RUN",
        help=f"{TARGET_HELP}. Each with all its descendants; of a run on several hosts all are shown",
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="with C and C++ frames; stops each process while they are read, for a second or more",
    )
    parser.add_argument("--json", action="store_true", help="everything that was seen, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Take the stacks and print them."""
    from saferun.ctl import live_stacks  # slow to import

    return live_stacks.run(arguments)
