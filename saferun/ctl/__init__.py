"""The command ``saferunctl``: inspects a host, settings and runs. One file a verb.

It needs no running saferun, and changes nothing but what a verb is for. A wrong command line gives two lines and exit
code 2. Only the module of the verb that is asked for is imported.
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


class VerbModule(Protocol):
    """What the module of a verb has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The arguments of the verb."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Answer. Returns the exit code."""


class Verb(Value):
    """A verb of the command: its name, what it is for, and its module, if that is called otherwise.

    ``takes_more``: arguments that the verb does not know itself are handed to it as ``more``.
    """

    name: str
    summary: str
    module: str = ""
    takes_more: bool = False

    def load(self) -> VerbModule:
        """Import the module."""
        return cast("VerbModule", importlib.import_module(f"saferun.ctl.{self.module or self.name}"))


VERBS: tuple[Verb, ...] = (
    Verb(
        "list",
        "the runs of this user, one line each: running, hung, succeeded, failed, stopped, left, lost, unknown",
        "list_runs",
    ),
    Verb("logs", "the output of a run's ranks, in the order of time, also while it runs"),
    Verb("diff", "how two runs differ: settings, versions, hosts, environment, outcome"),
    Verb(
        "status",
        "what the ranks of a run do now: progress, output, memory, CPU, GPUs, and how long each waits for the others",
    ),
    Verb("stop", "stop a running job on all its hosts, as SIGTERM to each saferun does"),
    Verb("kill", "end a running job at once on all its hosts, by SIGKILL to its ranks"),
    Verb("restart", "end the ranks of a running job and start them again, on all its hosts"),
    Verb("stacks", "where the processes of a run, or any process, are in their code"),
    Verb("record", "where ranks spend their time over some seconds, as a flame graph and for speedscope"),
    Verb("attach", "connect this terminal to one rank of a running job, for a debugger or a prompt"),
    Verb(
        "debug",
        "attach pdb or gdb to a running rank; hang detection is paused",
        "debug_rank",
    ),
    Verb("report", "the report of a run: text, JSON, an HTML page, or a trace for Perfetto or speedscope"),
    Verb("story", "the last events of a run in which something went wrong, and what saferun did about them"),
    Verb("core", "the stacks in a core file"),
    Verb("clean", "remove old run directories: beyond the newest N, or older than a time"),
    Verb("shim", "make a directory with a torchrun that runs saferun, for tools that call torchrun"),
    Verb("completion", "print the shell completion script"),
    Verb("env", "env profiles and variables: list, show, explain, diff, lint"),
    Verb(
        "health", "whether this host is fit for a job, for Slurm's HealthCheckProgram, a prolog or a Kubernetes probe"
    ),
    Verb(
        "doctor",
        "check this host, or the hosts of a job, as a launch does before it starts anything",
        takes_more=True,
    ),
)


class _Parser(argparse.ArgumentParser):
    """argparse with errors of two lines; the parsers of verbs and actions are of its kind."""

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
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    asked = next((word for word in argv if not word.startswith("-")), "")
    for verb in VERBS:
        # What is handed on must not be taken for an abbreviation of something else.
        abbreviates = not verb.takes_more
        subparser = verbs.add_parser(verb.name, help=verb.summary, description=verb.summary, allow_abbrev=abbreviates)
        if verb.name == asked:
            module = verb.load()
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, takes_more=verb.takes_more)
    arguments, more = parser.parse_known_args(argv)
    if more and not arguments.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
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
    """Run the verb.

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
