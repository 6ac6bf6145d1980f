"""``saferunctl status`` of a running job on one host, and of runs that have ended."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from saferun.linux.procfs import children_of, read_name
from tests.process.control_clients import control_command, control_socket, saferunctl
from tests.process.launching import END_AS_TOLD, STAY, Job, customized, running, two_lines, until

QUIET = ("--preflight", "off")
USES = """
from rank import *
held = bytearray(200 << 20)
print("hello", flush=True)
tell("ready")
while not os.path.exists(f"{FOLDER}/release.end"):
    if RANK == 1:
        time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def status_of(job: Job, run: str = "latest") -> dict[str, Any]:
    """The answer as JSON."""
    done = saferunctl(job, "status", run, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def ranks_in(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the only host's ranks."""
    (host,) = answer["live"]["hosts"]
    rows = host["ranks"]
    assert isinstance(rows, list)
    return rows


def test_it_shows_what_each_rank_does(folder: Path) -> None:
    with running(folder, USES, *QUIET, nproc=2, store=False) as job:
        pids = {word.rank: word.pid for word in job.hear("ready", 2)}
        control_socket(job)
        answer = status_of(job)
        rows = ranks_in(answer)
        assert answer["state"] == answer["live"]["state"] == "running"
        assert [(row["rank"], row["pid"]) for row in rows] == [(0, pids[0]), (1, pids[1])]
        assert all(row["rss_mib"] >= 200 and row["output_age_s"] >= 0 and row["processes"] == 1 for row in rows)

        def more_is_used() -> bool:
            used = [row["cpu_percent"] for row in ranks_in(status_of(job))]
            return bool(used[0] > used[1])

        until(more_is_used, "the rank that computes uses more")
        text = saferunctl(job, "status", "latest").stdout
        assert "rank" in text.splitlines()[3]
        job.release("end")
        assert job.wait() == 0
        assert status_of(job)["live"] is None
        assert ": succeeded " in saferunctl(job, "status", "latest").stdout


@pytest.mark.slow
def test_where_the_examiner_does_not_answer_the_rest_is_shown(folder: Path) -> None:
    """Memory and processors are unknown then; the job goes on."""
    folder.mkdir()
    source = """
import sys
if sys.orig_argv[1:3] == ["-m", "saferun"]:
    import time
    import saferun.captures.rank_usage as usage
    usage.usage_json = lambda pids: time.sleep(1000)
"""
    environ = customized(folder, source)
    with running(folder, END_AS_TOLD, *QUIET, nproc=2, arguments=("0", "0"), environ=environ, store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        answer = status_of(job)
        assert [row["rss_mib"] for row in ranks_in(answer)] == [-1, -1]
        assert [row["rank"] for row in ranks_in(answer)] == [0, 1]
        job.release("end")
        assert job.wait() == 0


@pytest.mark.slow
def test_where_there_is_no_examiner_the_rest_is_shown(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        for _ in range(6):
            for pid in children_of(job.process.pid):
                if read_name(pid) == "sr-examiner":
                    os.kill(pid, signal.SIGKILL)
            assert [row["rank"] for row in ranks_in(status_of(job))] == [0]
        job.release("end")
        assert job.wait() == 0


def test_watching_redraws_on_a_terminal_and_repeats_lines_elsewhere(folder: Path) -> None:
    """Both end with the run."""
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        command = control_command("status", "latest", "-w", "0.1")
        main, other = pty.openpty()
        on_terminal = subprocess.Popen(command, cwd=folder / "job", env=job.environ, stdout=other)
        os.close(other)
        elsewhere = subprocess.Popen(command, cwd=folder / "job", env=job.environ, stdout=subprocess.PIPE, text=True)
        seen = b""
        while seen.count(b"\x1b[2J") < 2:
            seen += os.read(main, 1 << 16)
        job.release("end")
        assert job.wait() == 0
        out, _ = elsewhere.communicate(timeout=60)
        while True:
            try:
                if not os.read(main, 1 << 16):
                    break
            except OSError:  # EIO: the other end is closed
                break
        os.close(main)
        assert (on_terminal.wait(60), elsewhere.returncode) == (0, 0)
        assert "\x1b" not in out
        assert ": succeeded " in out.splitlines()[-1]


@pytest.mark.slow
def test_watchers_that_do_not_read_cost_the_launch_nothing(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        from tests.process.control_clients import connected

        silent = [connected(path) for _ in range(20)]
        for connection in silent:
            connection.send(b'{"op": "status"}\n')
        assert status_of(job)["live"]["ok"]
        for connection in silent:
            connection.close()
        job.release("end")
        assert job.wait() == 0


def test_a_run_that_was_killed_is_lost(folder: Path) -> None:
    with running(folder, STAY, *QUIET, store=False) as job:
        job.hear("ready")
        control_socket(job)
        job.send(signal.SIGKILL)
        job.wait()
        # The latest one would be another run of this user without files, if there is one that lives.
        assert status_of(job, str(job.run_dir.resolve()))["state"] == "lost"


def test_a_directory_that_is_no_run_is_refused_in_two_lines(folder: Path, tmp_path: Path) -> None:
    with running(folder, "print('x')", *QUIET, store=False) as job:
        assert job.wait() == 0
        done = saferunctl(job, "status", str(tmp_path))
        assert done.returncode == 2
        assert "run.json" in two_lines(done.stderr)[0]
        until(lambda: ": succeeded " in saferunctl(job, "status", "latest").stdout, "it has ended")
