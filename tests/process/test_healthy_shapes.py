"""Quiet work of many shapes, while another rank waits: none of it may be called a hang, at least not for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.quiet_jobs import Together, watched_together
from tests.process.quiet_shapes import HANGS, SHAPES
from tests.process.watch_jobs import SLEEPS, Job

TIMEOUT_S = 4.0
TIMEOUTS = 5.0


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with watched_together(tmp_path_factory, SHAPES, TIMEOUT_S) as jobs:
        jobs.run(TIMEOUTS)
        yield jobs


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    # Their server is at work for no other job.
    with watched_together(tmp_path_factory, HANGS, TIMEOUT_S) as jobs:
        jobs.run(1.0)
        jobs.until_reported(*HANGS)
        yield jobs


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_quiet_work_is_no_hang(shapes: Together, name: str) -> None:
    """``--on-hang stop`` would have ended the job. What cannot be told from a loop may be suspected."""
    assert all(rank.poll() is None for rank in shapes.jobs[name].ranks)
    assert [verdict for verdict in shapes.jobs[name].verdicts if verdict.certain] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_found_whatever_goes_on_beside_it(hangs: Together, name: str) -> None:
    """Else all of this would be worth nothing."""
    assert {(verdict.kind, verdict.certain) for verdict in hangs.jobs[name].verdicts} == {("quiescent", True)}


# ----------------------------------------------------------------------------------------------- ranks that may not run

STEPS = "while True:\n    time.sleep(0.05)\n    burn(0.01)\n"


@contextlib.contextmanager
def two_ranks(folder: Path, timeout_s: float = 2.0) -> Iterator[Job]:
    job = Job(folder, STEPS, STEPS, timeout_s=timeout_s)
    try:
        job.begin()
        yield job
    finally:
        job.close()


def test_a_job_that_is_stopped_and_continued_does_not_hang(tmp_path: Path) -> None:
    """A scheduler that suspends jobs stops all ranks. That they are stopped is reported, as suspected."""
    with two_ranks(tmp_path) as job:
        for process in job.ranks:
            process.send_signal(signal.SIGSTOP)
        assert set(job.run(5.0)) <= {"stopped"}
        for process in job.ranks:
            process.send_signal(signal.SIGCONT)
        assert set(job.run(3.0)) <= {"stopped"}
        assert not any(verdict.certain for verdict in job.verdicts)


@pytest.mark.slow
def test_a_job_that_is_stopped_again_and_again_does_not_hang(tmp_path: Path) -> None:
    """Ranks share their GPUs and take turns."""
    with two_ranks(tmp_path) as job:
        for _ in range(6):
            for process in job.ranks:
                process.send_signal(signal.SIGSTOP)
            job.run(1.3)
            for process in job.ranks:
                process.send_signal(signal.SIGCONT)
            job.run(0.2)
        assert not any(verdict.certain for verdict in job.verdicts)


@pytest.mark.slow
def test_a_suspended_laptop_does_not_hang(tmp_path: Path) -> None:
    """Nothing runs for a while, the watch neither."""
    with two_ranks(tmp_path) as job:
        for _ in range(2):
            for process in job.ranks:
                process.send_signal(signal.SIGSTOP)
            time.sleep(5.0)
            for process in job.ranks:
                process.send_signal(signal.SIGCONT)
            assert job.run(1.5) == []


def _cpu_quota(name: str, percent: int) -> Path:
    """A control group of this machine whose processes get so much of a processor."""
    for parent, first in (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), ("/sys/fs/cgroup", "cpu.max")):
        group = Path(parent) / name
        try:
            group.mkdir()
            content = f"{percent * 1000}" if "quota" in first else f"{percent * 1000} 100000"
            (group / first).write_text(content)
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        return group
    pytest.skip("no control group for processors can be made here")


@pytest.mark.slow
def test_a_throttled_container_does_not_hang(tmp_path: Path) -> None:
    """Its ranks want to run, and get 2 % of a processor together."""
    group = _cpu_quota(f"saferun-test-{os.getpid()}", 2)
    try:
        with contextlib.closing(Job(tmp_path, "while True: sum(range(3000))", SLEEPS, timeout_s=3.0)) as job:
            for process in job.ranks:
                (group / "cgroup.procs").write_text(str(process.pid))
            job.begin()
            job.run(15.0)
            # A process that ends takes CPU time for that, too.
            for process in job.ranks:
                (group.parent / "cgroup.procs").write_text(str(process.pid))
            assert not any(verdict.certain for verdict in job.verdicts)
    finally:
        group.rmdir()
