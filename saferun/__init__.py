"""saferun: a launcher for distributed PyTorch jobs that says what went wrong, and where."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from saferun.api.report import Report
    from saferun.api.running import RunResult

__version__ = "0.1.0"


def heartbeat() -> None:
    """Tell saferun that this rank is well; optional, for instance once a step.

    A rank that has called it and then stops for ``--hang-timeout`` seconds counts as hanging, even where the process
    still looks busy from outside. A call takes a few microseconds, never raises, and does nothing in a process that
    saferun did not start. What is not Python touches the file that the variable ``SAFERUN_HEARTBEAT_FILE`` names.
    """
    path = os.environ.get("SAFERUN_HEARTBEAT_FILE")
    if path:
        try:
            os.utime(path)
        except OSError:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            except OSError:
                pass


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
        SaferunError: the function cannot be launched; its text has a hint. A launch that fails is a result.
        KeyboardInterrupt: Ctrl-C; the launch has been stopped.
    """
    from saferun.api.running import run as launch

    return launch(target, nproc=nproc, args=args, env=env, options=options, capture=capture)


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read report.json as values.

    Args:
        path: the file, or the run directory.

    Raises:
        SaferunError: there is none, or it cannot be read; its text has a hint.
    """
    from saferun.api.report import read_report as read

    return read(path)
