"""A healthy cluster for every test; or, on a machine that cannot have one, a line that says so.

Where CI is set, nothing is left out: the run fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.machines.cluster import Cluster
from tests.cluster.machines.requirements import why_not
from tests.transitions import assert_all_listed


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the tests out where there can be no cluster."""
    if not collection_path.name.startswith("test_") or not why_not():
        return None
    if os.environ.get("CI"):
        raise pytest.Collector.CollectError(f"tests/cluster cannot run: {why_not()}")
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and why."""
    if why_not():
        terminalreporter.write_line(f"left out: tests/cluster, because {why_not()}", yellow=True)


@pytest.fixture(autouse=True)
def _listed(tmp_path: Path) -> Iterator[None]:
    """Where a test fails for another reason, that is the one to be reported."""
    yield
    assert_all_listed(tmp_path)


class MakeCluster(Protocol):
    """Sets up a cluster that ends with the test; the arguments are ``Cluster.start``'s."""

    def __call__(self, hosts: int = 4, *, slurm: bool = False, **more: Any) -> Cluster: ...


class Standby:
    """The cluster that tests share, one after the other; a new one wherever a test has left its mark on it."""

    def __init__(self, visible: Path) -> None:
        self._visible = visible
        self._cluster: Cluster | None = None

    def healthy(self) -> Cluster:
        """The cluster, as if nobody had used it before."""
        if self._cluster is not None and not self._cluster.is_pristine():
            self.close()
        if self._cluster is None:
            self._cluster = Cluster.start(4, slurm=True, visible=[self._visible])
        return self._cluster

    def close(self) -> None:
        """End it."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@pytest.fixture(scope="session")
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    shared = Standby(tmp_path_factory.getbasetemp())
    yield shared
    shared.close()


@pytest.fixture
def cluster(standby: Standby) -> Iterator[Cluster]:
    """Four hosts with Slurm, healthy. What the test does to them, or leaves running on them, is its own affair."""
    healthy = standby.healthy()
    try:
        yield healthy
    finally:
        # Here and not before the next test: what was left running must not run beside the tests of other rooms.
        if not healthy.is_pristine():
            standby.close()


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCluster]:
    """Clusters of any size, for one test."""
    made: list[Cluster] = []

    def make(hosts: int = 4, *, slurm: bool = False, **more: Any) -> Cluster:
        made.append(Cluster.start(hosts, slurm=slurm, visible=[tmp_path_factory.getbasetemp()], **more))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()
