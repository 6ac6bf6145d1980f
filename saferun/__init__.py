"""saferun: a launcher for distributed PyTorch jobs that says what went wrong, and where."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.api.launching import run
    from saferun.api.report import read_report
    from saferun.api.script import debug as debug
    from saferun.api.script.failures import record
    from saferun.api.script.reported_progress import expect, step
    from saferun.errors import SaferunError

__all__ = ["SaferunError", "debug", "expect", "heartbeat", "read_report", "record", "run", "step"]
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


# What is imported when it is asked for, with the module that has it: a launch needs none of it.
_LAZY = {
    "SaferunError": "saferun.errors",
    "expect": "saferun.api.script.reported_progress",
    "read_report": "saferun.api.report",
    "record": "saferun.api.script.failures",
    "run": "saferun.api.launching",
    "step": "saferun.api.script.reported_progress",
}


def __dir__() -> list[str]:
    """What there is, also what has not been imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """What is imported when it is asked for."""
    if name == "debug":
        from importlib import import_module

        found: object = import_module("saferun.api.script.debug")
        globals()[name] = found
        return found
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return found
