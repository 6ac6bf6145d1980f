"""The command ``saferunctl``: inspects a host, settings and runs. One file a verb.

It needs no running saferun, and changes nothing but what a verb is for. A wrong command line gives two lines and exit
code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from saferun import __version__
from saferun.console.stderr import print_error
from saferun.ctl import core, doctor, env, live_stacks, report, status, story
from saferun.errors import SaferunError, UsageError
from saferun.model import Value


class Verb(Value):
    """A verb of the command: its name, what it is for, its arguments, and what answers.

    ``takes_more``: arguments that the verb does not know itself are handed to it as ``more``.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    takes_more: bool = False


VERBS: tuple[Verb, ...] = (
    Verb("doctor", doctor.SUMMARY, doctor.add_arguments, doctor.run, takes_more=True),
    Verb("env", "env profiles and variables: list, show, explain, diff, lint", env.add_arguments, env.run),
    Verb(
        "stacks",
        "where the processes of a run, or any process, are in their code",
        live_stacks.add_arguments,
        live_stacks.run,
    ),
    Verb("status", status.SUMMARY, status.add_arguments, status.run),
    Verb("story", story.SUMMARY, story.add_arguments, story.run),
    Verb("report", report.SUMMARY, report.add_arguments, report.run),
    Verb("core", "the stacks in a core file", core.add_arguments, core.run),
)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of two lines; the parsers of verbs and actions are of its kind."""

    def error(self, message: str) -> NoReturn:
        """Two lines and exit code 2."""
        print_error(UsageError(message, f"see {self.prog} --help"))
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The ``saferunctl`` command.

    Args:
        argv: the arguments; None: those of this process.

    Returns:
        The exit code: 0, or 1 where the answer is bad news, or 2 for a usage error.
    """
    parser = _Parser(prog="saferunctl", description="Inspect a host, settings and runs.")
    parser.add_argument("--version", action="version", version=f"saferunctl {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        # What is handed on must not be taken for an abbreviation of something else.
        abbreviates = not verb.takes_more
        subparser = verbs.add_parser(verb.name, help=verb.summary, description=verb.summary, allow_abbrev=abbreviates)
        verb.add_arguments(subparser)
        subparser.set_defaults(run=verb.run, takes_more=verb.takes_more)
    arguments, more = parser.parse_known_args(argv)
    if more and not arguments.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.more = more
    try:
        code: int = arguments.run(arguments)
    except SaferunError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader has seen enough, and what is left in the buffer must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
