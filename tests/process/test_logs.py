"""``saferunctl logs`` of real runs: while they run, and afterwards."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import DEADLINE_S, kill, running, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.launching import Job

IN_TURN = """
from rank import *
for number in range(5):
    if RANK == number % 2:
        print("line", number, flush=True)
        print("error", number, file=sys.stderr, flush=True)
        tell(f"said {number}")
    await_release(f"after {number}")
tell("ready")
await_release("end")
print("last", RANK)
"""


def logs(job: Job, *arguments: str) -> subprocess.Popen[str]:
    """The verb, asked from the launch's own directory."""
    return subprocess.Popen(
        [sys.executable, "-m", "saferun.ctl", "logs", *arguments],
        cwd=job.folder / "job",
        env=job.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """The lines of an answer without errors."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    return re.sub(r"(?m)^\[[^:]+:", "[", out).splitlines()


def test_lines_of_all_ranks_are_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """Of a run that lives, of one that is followed to its end, and of one that has ended: the same."""
    with running(tmp_path, IN_TURN, nproc=2, store=False) as job:
        wanted = []
        follower = None
        for number in range(5):
            job.hear(f"said {number}")
            wanted += [f"[{number % 2}] line {number}", f"[{number % 2}] error {number}"]
            if follower is None:
                until(lambda: job.run_dir.joinpath("run.json").exists(), "the run is described")
                follower = logs(job, "-f")
            # Both streams of a rank are read at once: what is later comes later.
            until(lambda: len(lines_of(logs(job))) == len(wanted), "the files have it")  # noqa: B023 - as it is then
            job.release(f"after {number}")
        job.hear("ready", 2)
        assert sorted(lines_of(logs(job))) == sorted(wanted)
        assert lines_of(logs(job, "--stdout")) == wanted[::2]
        job.release("end")
        assert job.wait() == 0
        assert follower is not None
        followed = lines_of(follower)
        assert [line for line in followed if "line" in line] == wanted[::2]
        assert sorted(followed[-2:]) == ["[0] last 0", "[1] last 1"]
        assert lines_of(logs(job)) == followed


def test_a_run_that_is_killed_is_followed_to_its_last_byte(tmp_path: Path) -> None:
    program = (
        "from rank import *\nprint('one', flush=True)\nprint('no newline', end='', flush=True)\ntell('ready')\nstay()"
    )
    with running(tmp_path, program, store=False) as job:
        job.hear("ready")
        until(lambda: lines_of(logs(job)) == ["[0] one", "[0] no newline"], "the files have it")
        until(lambda: job.run_dir.joinpath("run.json").exists(), "the run is described")
        follower = logs(job, "--follow")
        kill(job.process.pid, signal.SIGKILL)
        job.wait()
        assert lines_of(follower) == ["[0] one", "[0] no newline"]


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    program = "for number in range(100000): print(number)"
    with running(tmp_path, program, store=False) as job:
        assert job.wait() == 0
        command = ["sh", "-c", '"$1" -m saferun.ctl logs --grep 9 | head -1', "sh", sys.executable]
        done = subprocess.run(
            command, cwd=tmp_path / "job", env=job.environ, capture_output=True, check=True, timeout=DEADLINE_S
        )
        assert done.stdout.endswith(b":0] 9\n")
        assert done.stderr == b""


@pytest.mark.slow
def test_lines_have_the_prefix_that_the_console_had(tmp_path: Path) -> None:
    """Whatever it is made of; another one may be asked for."""
    for number, (options, shown) in enumerate(
        (
            (("--prefix", "{role}/{local_rank}> ", "--role", "trainer"), {"trainer/0> a", "trainer/1> a"}),
            (("--prefix", "none"), {"a"}),
            (("--log-line-prefix-template", "<${rank}>"), {"<0>a", "<1>a"}),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with running(folder, "print('a')", *options, nproc=2, store=False) as job:
            assert job.wait() == 0
            assert set(job.out.splitlines()) == shown
            assert set(lines_of(logs(job))) == shown
            assert set(lines_of(logs(job, "--prefix", "{rank}: "))) == {"0: a", "1: a"}
