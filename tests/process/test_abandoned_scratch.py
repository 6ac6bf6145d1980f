"""Temporary directories of runs that were killed with their reapers are removed by a later launch."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from saferun.linux.abandoned_scratch import remove_abandoned
from saferun.linux.procfs import read_environ_entry
from saferun.linux.scratch import shared_bases
from tests.process.launching import STAY, running, until

NAME = "saferun-0123456789abcdef"
LONG_AGO = (1e9, 1e9)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory for temporary files."""
    monkeypatch.setattr("saferun.linux.abandoned_scratch.shared_bases", lambda: [str(tmp_path)])
    return tmp_path


def make(base: Path, name: str = NAME, mode: int = 0o700) -> Path:
    """A directory that looks like a run's."""
    path = base / name
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "file").write_text("x")
    os.utime(path, LONG_AGO)
    return path


def test_what_no_process_has_locked_is_removed(base: Path) -> None:
    """With its contents."""
    path = make(base)
    assert remove_abandoned() == [str(path)]
    assert not path.exists()


def test_a_run_that_lives_keeps_its_directory(base: Path) -> None:
    """It holds a lock, as its supervisor does."""
    path = make(base)
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert remove_abandoned() == []
    os.close(fd)
    assert (path / "file").exists()


def test_what_may_not_have_been_locked_yet_is_kept(base: Path) -> None:
    path = make(base)
    os.utime(path)
    assert remove_abandoned() == []
    assert path.exists()


def test_where_other_hosts_may_use_it_nothing_is_removed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some network file systems a lock is known on its own host only: what lives elsewhere seems abandoned."""
    path = make(base)
    monkeypatch.setattr("saferun.linux.abandoned_scratch.is_on_network", lambda _: True)
    assert remove_abandoned() == []
    assert path.exists()


@pytest.mark.parametrize("name", ["saferun-0123", "saferun-runs", "saferun-0123456789abcdeg", f"x{NAME}", f"{NAME}0"])
def test_other_names_are_not_touched(base: Path, name: str) -> None:
    path = make(base, name)
    assert remove_abandoned() == []
    assert path.exists()


def test_what_others_may_read_or_a_link_is_not_a_runs(base: Path) -> None:
    """A link may lead to anything."""
    elsewhere = make(base, "precious")
    (base / NAME).symlink_to(elsewhere)
    public = make(base, "saferun-fedcba9876543210", 0o755)
    assert remove_abandoned() == []
    assert (elsewhere / "file").exists()
    assert public.exists()


@pytest.mark.slow
def test_a_launch_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """Slurm kills every process of a step at once after two Ctrl-C, reapers included."""
    with running(tmp_path / "killed", STAY, nproc=1, sweeps=False, store=False) as job:
        (rank,) = job.hear("ready")
        name = f"saferun-{read_environ_entry(rank.pid, 'SAFERUN_RUN_ID')}"
        reaper = job.reaper()
        assert reaper is not None
        os.kill(reaper, signal.SIGSTOP)
        job.send(signal.SIGKILL)
        os.kill(reaper, signal.SIGKILL)
        job.wait()
        left = [path for base in shared_bases() if (path := Path(base) / name).exists()]
        assert left, "nothing was left"
        until(lambda: not any(map(is_locked, left)), "the last of its processes has ended")
        for path in left:
            os.utime(path, LONG_AGO)
        with running(tmp_path / "next", STAY, nproc=1, store=False) as following:
            following.hear("ready")
            until(lambda: not any(path.exists() for path in left), "removed")
            following.send(signal.SIGTERM)
            following.wait()


def is_locked(path: Path) -> bool:
    """Whether a process has it locked."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
