"""Settings common to the unit tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from saferun.cluster.placement import launcher
from saferun.cluster.schedulers import Ancestry
from saferun.linux import nccl_files
from tests.unit.above import Above

# A busy machine makes single examples slow, which is no fault of the code. Counterexamples are printed, not stored.
settings.register_profile(
    "all",
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("quick", settings.get_profile("all"), max_examples=15, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """`make test` takes fewer examples of everything, `make test-all` more."""
    settings.load_profile("quick" if config.getoption("markexpr") == "not slow" else "all")


@pytest.fixture(autouse=True)
def above(monkeypatch: pytest.MonkeyPatch) -> Above:
    """Nothing is above this process, unless a test says otherwise; what started the tests themselves is no matter."""
    seen = Above()
    monkeypatch.setattr(
        launcher, "processes_above", lambda: Ancestry(seen.lines, seen.at_terminal, seen.entered, seen.pids)
    )
    return seen


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own file is in HOME, where a test can put it."""
    monkeypatch.setattr(nccl_files, "_USERS", os.devnull)
