"""Launches saferun as a process of its own, from a program, a notebook or a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from saferun.api.function_call import function_call
from saferun.api.launch_process import run_to_end
from saferun.api.launched_run import printed_failure, rank_exit_codes, run_dir
from saferun.api.report import NAME, Report, read_report
from saferun.errors import SaferunError, UsageError, suppress

# A program within a step of a scheduler launches on its own host, and meets no other: options come after, and win.
_OWN_OPTIONS = ("--stop-with-parent", "on", "--scheduler", "none")


class RunResult(NamedTuple):
    """How a launch ended.

    Attributes:
        exit_code: saferun's.
        rank_exit_codes: those of the ranks of the last attempt on this host, minus the number of a signal; empty where
            the launch has no files.
        run_dir: the run directory; None: there is none.
        report: what report.json says; None: none was written, as where nothing went wrong, where the launch did not
            start, or where it has no run directory.
        values: what a function returned, in the order of the ranks, None of one that has left by ``sys.exit(0)``; empty
            where the launch failed, and for scripts.
        stdout: with ``capture``, at most the last 64 MiB.
        stderr: likewise.
    """

    exit_code: int
    rank_exit_codes: dict[int, int]
    run_dir: str | None
    report: Report | None
    values: tuple[Any, ...] = ()
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the launch has succeeded."""
        return self.exit_code == 0

    def check(self) -> RunResult:
        """This result, if the launch has succeeded.

        Raises:
            SaferunError: it has failed; the text says why, as far as there is a report or captured output.
        """
        if self.ok:
            return self
        failure = self.report.failure if self.report is not None else None
        headline, hint = (failure.headline, failure.hint) if failure is not None else printed_failure(self.stderr)
        headline = headline or f"the launch ended with exit code {self.exit_code}"
        raise SaferunError(headline, hint or f"see {self.run_dir or 'its output'}", self.exit_code)


def run(
    target: str | os.PathLike[str] | Callable[..., object],
    *,
    nproc: int | str = 1,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    capture: bool = False,
) -> RunResult:
    """Launch a script or a function on this host, by saferun as a process of its own, and wait for its end.

    Args:
        target: the path of a script, or a function, which every rank calls. Ranks have to be able to import it, unless
            cloudpickle is installed.
        nproc: the number of ranks: a number, or ``auto``, ``cpu``, ``gpu`` or ``xpu``.
        args: arguments of the script or the function.
        env: variables that are set for this launch.
        options: more options of saferun, as on the command line: ``["--max-restarts", "1"]``.
        capture: return the output instead of passing it on to this process's stdout and stderr.

    Raises:
        SaferunError: the function cannot be launched, or what it returned cannot be pickled; its text has a hint. A
            launch that fails is a result.
        UsageError: ``args`` or ``options`` is one string, or ``env`` has something else than strings.
        KeyboardInterrupt: Ctrl-C; the launch has been stopped.
    """
    for name, value in (("args", args), ("options", options)):
        if isinstance(value, (str, bytes)):
            hint = f"pass a list, one element for each word: {name}={os.fsdecode(value).split()}"
            raise UsageError(f"saferun.run: {name} is one string", hint)
    environ = _environ(_variables(env or {}))
    with ExitStack() as stack:
        if callable(target):
            call = stack.enter_context(function_call(target, args))
            program = call.program
        else:
            call = None
            program = [os.fspath(target), *map(str, args)]
        # -P: a module in the current directory would stand in for one of Python's.
        own = [sys.executable, "-P", "-m", "saferun", *_OWN_OPTIONS, "--nproc-per-node", str(nproc)]
        began = time.time()
        ended = run_to_end([*own, *options, *program], environ, capture=capture)
        directory = run_dir(ended.pid, began, options, environ)
        values = call.values() if call is not None and ended.exit_code == 0 else ()
    codes = rank_exit_codes(directory) if directory is not None else {}
    report = None
    if directory is not None and os.path.exists(os.path.join(directory, NAME)):
        with suppress(SaferunError):
            report = read_report(directory)
    return RunResult(ended.exit_code, codes, directory, report, values, ended.stdout, ended.stderr)


def _variables(env: object) -> dict[str, str]:
    """The variables that are set for a launch.

    Raises:
        UsageError: one of them is no string.
    """
    if not isinstance(env, Mapping):
        raise UsageError(f"saferun.run: env is not a dict: {env!r}", "pass variables as env={'NAME': 'value'}")
    variables = {}
    for name, value in env.items():
        try:
            variables[os.fsdecode(name)] = os.fsdecode(value)
        except TypeError:
            kind = type(name if not isinstance(name, (str, bytes)) else value).__name__
            hint = f"pass strings: env={{{str(name)!r}: {str(value)!r}}}"
            raise UsageError(f"saferun.run: env: {name}={value!r}: {kind} is not a string", hint) from None
    return variables


def _environ(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of saferun, in which this package is found as it is found here."""
    environ = {**os.environ, **changes}
    directory = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if os.path.basename(directory) not in {"site-packages", "dist-packages"} and directory not in entries:
        environ["PYTHONPATH"] = os.pathsep.join([*entries, directory])
    return environ
