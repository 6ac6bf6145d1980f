"""``saferunctl stacks``: where the processes of a running job are in their code."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument(
        "target",
        nargs="?",
        default="latest",
        metavar="PID|RUN",
        help="a process with all its descendants, or a run: its directory, its name below saferun_runs, its id, "
        "or 'latest' (the default). Of a run on several hosts all are shown",
    )
    parser.add_argument("--native", action="store_true", help="with C and C++ frames; pauses each process for a second")
    parser.add_argument("--json", action="store_true", help="everything that was seen, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Take the stacks and print them."""
    from saferun.ctl import live_stacks  # slow to import

    return live_stacks.run(arguments)
