"""Every verb of saferunctl about a job of four hosts: while it lives, when it has ended, and when it was killed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import Way, assert_nothing_left, start
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

SPEAKS = """
print("rank", RANK, flush=True)
tell("ready")
stay()
"""
ENDS = (("stop", "latest"), ("stop", "latest", "--after-checkpoint"), ("kill", "latest"), ("restart", "latest"))


def refused(host: Host, folder: Path, *arguments: str) -> str:
    """What a command says that cannot answer: two lines."""
    done = host.run([sys.executable, "-m", "saferun.ctl", *arguments], cwd=folder)
    assert done.returncode == 1, done
    what, hint = str(done.stderr).splitlines()
    assert hint.startswith("hint: ")
    return what


def assert_logs(host: Host, folder: Path) -> None:
    """All ranks' lines, by their hosts."""
    lines = ask(host, folder, "logs", "latest", "--grep", "^rank").splitlines()
    assert sorted(lines) == [f"[node{rank + 1}:{rank}] rank {rank}" for rank in range(4)]


def assert_page(host: Host, folder: Path) -> None:
    """A page needs no report, which is written at a failure."""
    ask(host, folder, "report", "latest", "--html", "--output", "page.html")
    page = (folder / "page.html").read_text()
    assert all(f"node{number}" in page for number in (1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 3])
@pytest.mark.parametrize("end", ["stopped", "lost"])
def test_each_host_answers_about_a_job_that_lives_and_one_that_has_ended(
    cluster: Cluster, tmp_path: Path, asked: int, end: str
) -> None:
    host = cluster.hosts[asked]
    job = start(cluster, Way("by_hand"), tmp_path, SPEAKS, nproc=1)
    job.hear("ready", 4)
    job.until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    assert "running" in ask(host, tmp_path, "list", "--here")
    status = ask(host, tmp_path, "status", "latest")
    assert all(f"node{number}: " in status for number in (1, 2, 3, 4))
    assert_logs(host, tmp_path)
    assert_page(host, tmp_path)
    assert ask(host, tmp_path, "diff", "latest", "latest")
    ask(host, tmp_path, "clean", "--keep", "0")
    assert "attempt 1" in ask(host, tmp_path, "restart", "latest")
    job.until(lambda: sum(said.word == "ready" for said in job.words) == 8, "all ranks run again")

    if end == "stopped":
        assert "exit code 143" in ask(host, tmp_path, "stop", "latest")
        assert set(job.finish()) == {143}, job.story("another exit code")
    else:
        for process in job.processes:
            process.kill()
        job.finish()
    assert_nothing_left(cluster)
    # A host sees the processes of others by what they write: those that were killed a moment ago may live.
    shown = end if end == "stopped" or asked == 0 else "running"
    assert shown in ask(host, tmp_path, "list", "--here")
    assert shown in ask(host, tmp_path, "status", "latest")
    lines = ask(host, tmp_path, "logs", "latest", "--grep", "^rank").splitlines()
    assert sorted({line.split("] ")[1] for line in lines}) == [f"rank {rank}" for rank in range(4)]
    assert_page(host, tmp_path)
    assert ask(host, tmp_path, "diff", "latest", "latest")
    for arguments in ENDS:
        what = refused(host, tmp_path, *arguments)
        assert ("has ended: stopped" if end == "stopped" else "can be reached from here") in what
    ask(host, tmp_path, "clean", "--keep", "0")
    assert bool(list((tmp_path / "saferun-runs").glob("[0-9]*"))) == (end == "lost")
