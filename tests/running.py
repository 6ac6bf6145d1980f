"""How tests are run: a test that never ends fails alone, and side by side the longest files come first.

The hooks of this file are those of ``tests/conftest.py``.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

import pytest

LIMIT_S = 300.0
"""For each of a test's set-up, call and tear-down. A test that needs longer says so: ``@pytest.mark.limit_s(600)``."""
_STDERR = 2

# ----------------------------------------------------------------------------------------------- a test that never ends


def _out_of_time(_signum: int, _frame: FrameType | None) -> None:
    # The report shows the stack of the main thread, and this the others'.
    faulthandler.dump_traceback(_STDERR)
    pytest.fail("this test did not end in time", pytrace=True)


@contextmanager
def _limited(item: pytest.Item) -> Iterator[None]:
    """Raises in the test once its time is over.

    pytest's own limit (``faulthandler_timeout``) ends the process, and is there for a test that waits in C code.
    """
    marker = item.get_closest_marker("limit_s")
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, marker.args[0] if marker else LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


# --------------------------------------------------------------------------------------------------------- side by side

# Hosts of tests/cluster share what a machine has only once (the ARP table, Slurm's ports): one worker runs them all.
_TOGETHER = "tests/cluster"
# What takes longest, longest first, by `--durations` of `make test`: begun last, it would run alone at the end.
LONGEST = (
    _TOGETHER,
    # By `make test-all`: nearly all of these are slow tests.
    "tests/fleet/test_fleet.py",
    "tests/unit/watchdog/test_recorded_stragglers.py",
    "tests/torch/test_differential.py",
    "tests/torch/test_hangs.py",
    "tests/process/test_watch_run.py",
    "tests/torch/test_several_hosts.py",
    "tests/torch/test_crashes.py",
    "tests/torch/test_refusals.py",
    "tests/process/test_investigation.py",
    "tests/process/test_ctl_debug.py",
    "tests/process/test_frozen_run_directory.py",
    "tests/process/test_frozen_places.py",
    "tests/process/test_quiet_work.py",
    "tests/test_architecture.py",
    "tests/torch/test_coordinator_meeting.py",
    "tests/process/test_control_socket.py",
    "tests/process/test_life_and_death.py",
    "tests/torch/test_coordinator_lost_hosts.py",
    "tests/torch/test_trials.py",
    "tests/process/test_leftovers.py",
    "tests/process/test_frozen_crashes.py",
    "tests/process/test_probing.py",
    "tests/torch/test_stalled_saferun.py",
    "tests/process/test_leftovers_wait.py",
    "tests/process/test_uninterruptible.py",
    "tests/torch/test_healthy_jobs.py",
    "tests/torch/test_hook_torch.py",
    "tests/process/test_lost_examiners.py",
    "tests/torch/test_script_debug.py",
    "tests/torch/test_lint_torch.py",
    "tests/torch/test_control_port.py",
    "tests/torch/test_coordinator_handlers.py",
    "tests/unit/env/test_profiles_hostile.py",
    "tests/torch/test_stalled_host.py",
)
_INDEXES = {file: index for index, file in enumerate(LONGEST)}


def unit_of_work(nodeid: str) -> str:
    """What one worker runs from beginning to end: a file, as its tests share fixtures, or several that go together."""
    file = nodeid.partition("::")[0]
    return _TOGETHER if file.startswith(f"{_TOGETHER}/") else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the tests into the order in which workers are given them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _INDEXES.get(unit_of_work(item.nodeid), len(_INDEXES)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What is made while tests are collected stays: each worker would look through it some forty times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Some ten thousand tests stay until the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadfile``."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would begin with the file of the most tests
    scheduling: type[Any] = import_module("xdist.scheduler").LoadFileScheduling

    class Scheduling(scheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

        def schedule(self) -> None:
            """A worker runs a test when it knows the next one: a new one needs two as well."""
            super().schedule()
            for node in list(self.assigned_work):
                self._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """A worker has died of a test: this test is not given to the next one, which would die of it as well."""
            for unit in self.assigned_work[node].values():
                for nodeid, is_done in unit.items():
                    if not is_done:
                        unit[nodeid] = True
                        super().remove_node(node)
                        return str(nodeid)
            super().remove_node(node)
            return None

    return Scheduling(config, log)
