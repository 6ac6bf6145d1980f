"""The command ``saferunctl``: inspects a host, settings and runs. One file a subcommand.

It needs no running saferun, and changes nothing but what a subcommand is for. A wrong command line gives two lines and
exit code 2. Only the module of the subcommand that is asked for is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, TextIO, cast

from saferun import __version__
from saferun.console.stderr import print_error
from saferun.errors import EXIT_USAGE, SaferunError, UsageError
from saferun.linux.search_path import search_pythons_own_first
from saferun.linux.signals import see_children_end
from saferun.model import Value


class SubcommandModule(Protocol):
    """What the module of a subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The arguments of the subcommand."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Answer. Returns the exit code."""


class Subcommand(Value):
    """A subcommand of the command: its name, what it is for, and its module, if that is called otherwise.

    ``takes_more``: arguments that the subcommand does not know itself are handed to it as ``more``.
    """

    name: str
    summary: str
    module: str = ""
    takes_more: bool = False

    def load(self) -> SubcommandModule:
        """Import the module."""
        return cast("SubcommandModule", importlib.import_module(f"saferun.ctl.{self.module or self.name}"))


SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand(
        "list",
        "the runs of this user, one line each: running, hung, succeeded, failed, stopped, left, lost, unknown",
        "list_runs",
    ),
    Subcommand("logs", "the output of a run's ranks, in the order of time, also while it runs"),
    Subcommand("diff", "how two runs differ: settings, versions, hosts, environment, outcome"),
    Subcommand(
        "status",
        "what the ranks of a run do now: progress, output, memory, CPU, GPUs, and how long each waits for the others",
    ),
    Subcommand("stop", "stop a running job on all its hosts, as SIGTERM to each saferun does"),
    Subcommand("kill", "kill a running job at once on all its hosts, by SIGKILL to its ranks"),
    Subcommand("restart", "stop the ranks of a running job and start them again, on all its hosts"),
    Subcommand("stacks", "where the processes of a run, or any process, are in their code"),
    Subcommand("record", "where ranks spend their time over some seconds, as a flame graph and for speedscope"),
    Subcommand("attach", "connect this terminal to one rank of a running job, for a debugger or a prompt"),
    Subcommand(
        "debug",
        "attach pdb or gdb to a running rank; hang detection is paused",
        "debug_rank",
    ),
    Subcommand("report", "the report of a run: text, JSON, an HTML page, or a trace for Perfetto or speedscope"),
    Subcommand("story", "the last events of a run in which something went wrong, and what saferun did about them"),
    Subcommand("core", "the stacks in a core file"),
    Subcommand("clean", "remove old run directories: beyond the newest N, or older than a time"),
    Subcommand("shim", "make a directory with a torchrun that runs saferun, for tools that call torchrun"),
    Subcommand("completion", "print the shell completion script"),
    Subcommand("env", "env profiles and variables: list, show, explain, diff, lint"),
    Subcommand(
        "health", "whether this host is fit for a job, for Slurm's HealthCheckProgram, a prolog or a Kubernetes probe"
    ),
    Subcommand(
        "doctor",
        "check this host, or the hosts of a job, as a launch does before it starts anything",
        takes_more=True,
    ),
)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of two lines; the parsers of subcommands and actions are of its kind."""

    def error(self, message: str) -> NoReturn:
        """Two lines and exit code 2."""
        from saferun.ctl.usage_errors import plain_error  # slow to import

        error = plain_error(message, self.prog)
        print_error(error)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The ``saferunctl`` command.

    Args:
        argv: the arguments; None: those of this process.

    Returns:
        The exit code: 0, or 1 where the answer is bad news, or 2 for a usage error.
    """
    if argv is None:
        search_pythons_own_first()
    see_children_end()
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="saferunctl", description="Inspect a host, settings and runs.")
    parser.add_argument("--version", action="version", version=f"saferunctl {__version__}")
    subcommands = parser.add_subparsers(metavar="SUBCOMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), "")
    for subcommand in SUBCOMMANDS:
        # What is handed on must not be taken for an abbreviation of something else.
        abbreviates = not subcommand.takes_more
        subparser = subcommands.add_parser(
            subcommand.name, help=subcommand.summary, description=subcommand.summary, allow_abbrev=abbreviates
        )
        if subcommand.name == asked:
            module = subcommand.load()
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, takes_more=subcommand.takes_more, parser=subparser)
    arguments, more = parser.parse_known_args(argv)
    if more and not arguments.takes_more:
        arguments.parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.more = more
    try:
        return _run(arguments)
    except SaferunError as error:
        print_error(error)
        return error.exit_code
    except FileNotFoundError:
        if _has_current_directory():
            raise
        print_error(UsageError("the current directory is gone", "change to another one with cd"))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        SaferunError: it fails, or standard output cannot be written.
    """
    if sys.stdout is None:
        sys.stdout = _unwritable()
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        from saferun.ctl.answer import discard_output

        discard_output()  # the reader has seen enough
        return 0
    except OSError as error:
        if error.filename is not None or _can_print():
            raise
        from saferun.ctl.answer import discard_output

        discard_output()
        what = f"standard output cannot be written: {error.strerror}"
        raise SaferunError(what, "see where it leads: it is closed, or a file on a full disk") from None
    return code


def _unwritable() -> TextIO:
    """In place of a stream that is closed: no file that is opened later becomes standard output."""
    return open(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), "w", encoding="utf-8")


def _can_print() -> bool:
    """Whether it was not standard output that has failed: it takes an empty line."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _has_current_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True
