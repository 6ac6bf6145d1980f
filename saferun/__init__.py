"""saferun: a launcher for distributed PyTorch jobs that says what went wrong, and where."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.api.launching import run
    from saferun.api.report import read_report

__all__ = ["heartbeat", "read_report", "run"]
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


def __getattr__(name: str) -> object:
    """``run`` and ``read_report``, which are imported when they are asked for: a launch needs neither."""
    if name == "run":
        from saferun.api.launching import run

        return run
    if name == "read_report":
        from saferun.api.report import read_report

        return read_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
