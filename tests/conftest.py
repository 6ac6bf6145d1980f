"""What holds for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

from saferun.supervisor.machine import Supervisor
from tests.running import (
    pytest_collection,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_xdist_make_scheduler,
)

__all__ = [
    "pytest_collection",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_xdist_make_scheduler",
]

# An event in a state in which the table of transitions lacks it is an error here, and only noted where people use it.
Supervisor.is_strict = True

# A shell without job control ignores the first two for what it puts into the background, nohup ignores the third for
# anything, and children inherit that. The tests send them.
for _signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum == signal.SIGINT else signal.SIG_DFL)

# With another umask the files of a test may be writable for a group, and settings that others may write do not count.
os.umask(0o022)

# The runs of tests are not noted in the index of this user's runs, but where a test has an index of its own.
os.environ["XDG_STATE_HOME"] = os.devnull

# Launches that keep no files have their records here: "latest" of one test is no launch of another worker's.
_RUNTIME = os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="saferun-tests-")


def pytest_unconfigure() -> None:
    """Remove what this process has made."""
    shutil.rmtree(_RUNTIME, ignore_errors=True)
