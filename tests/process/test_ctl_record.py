"""``saferunctl record``: a flame graph and a file for speedscope, of ranks that run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.process.control_clients import saferunctl
from tests.process.launching import running, two_lines, until
from tests.process.somebody import SOMEBODY

# Two ranks compute, and the third waits.
APART = """
from rank import *

def compute():
    return sum(i * i for i in range(10000))

def train():
    tell("ready")
    while True:
        compute()

def wait():
    tell("ready")
    stay()

wait() if RANK == 2 else train()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_it_shows_where_the_time_of_ranks_goes(folder: Path) -> None:
    """Of all ranks, or of those that are named."""
    with running(folder, APART, "--preflight", "off", nproc=3, store=False) as job:
        job.hear("ready", 3)
        until((job.run_dir / "run.json").exists, "the run is described")
        output = str(folder / "one")
        (folder / "theirs").write_text("of another file")
        if os.geteuid() == 0:
            (folder / "one.svg").symlink_to("theirs")
            os.chown(folder / "one.svg", SOMEBODY, SOMEBODY, follow_symlinks=False)
        done = saferunctl(job, "record", "latest", "--seconds", "1", "--output", output)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0] == "recording for 1 s …"
        assert [line.split(":")[0] for line in lines[1:4]] == ["rank 0", "rank 1", "rank 2"]
        assert "compute" in lines[1]
        assert lines[3] == "rank 2: 0 samples; its threads only waited: see --idle"
        assert lines[4:] == [
            f"flame graph: {output}.svg, for a browser",
            f"speedscope: {output}.speedscope.json, for https://www.speedscope.app",
        ]
        profiles = json.loads((folder / "one.speedscope.json").read_text())["profiles"]
        assert [profile["name"] for profile in profiles] == ["rank 0", "rank 1", "rank 2"]
        assert "compute" in (folder / "one.svg").read_text()
        # A link that another user has planted is not followed, and what ranks do is not for all to see.
        assert (folder / "theirs").read_text() == "of another file"
        assert (folder / "one.svg").stat().st_mode & 0o777 == 0o600
        job.send(signal.SIGTERM)
        job.wait()


@pytest.mark.slow
def test_it_shows_what_waits_where_that_is_wanted(folder: Path) -> None:
    with running(folder, APART, "--preflight", "off", nproc=3, store=False) as job:
        job.hear("ready", 3)
        until((job.run_dir / "run.json").exists, "the run is described")
        done = saferunctl(job, "record", "--rank", "2", "--seconds", "1s", "--idle", "--rate", "20", "--json")
        answer = json.loads(done.stdout)
        (rank,) = answer["ranks"]
        assert (rank["rank"], rank["failure"]) == (2, "")
        assert rank["samples"] > 5
        svg, speedscope = answer["files"]
        assert os.path.dirname(svg) == str(folder / "job")
        assert "wait" in Path(speedscope).read_text(encoding="utf-8")

        done = saferunctl(job, "record", str(rank["pid"]), "--seconds", "1")
        assert done.returncode == 1
        what, hint = two_lines(done.stderr)
        assert what == "nothing was recorded: the threads only waited"
        assert "--idle" in hint
        job.send(signal.SIGTERM)
        job.wait()


BAD = (
    ("has no rank 9 here", "--rank", "9"),
    ("--rank x is no list of ranks", "--rank", "x"),
    ("--rank 0-99 are too many ranks", "--rank", "0-99"),
    ("--rank 0-99999999 are too many ranks", "--rank", "0-99999999"),
    ("--seconds 0 is out of bounds", "--seconds", "0"),
    ("--seconds 2h is out of bounds", "--seconds", "2h"),
    ("--seconds soon is not a duration", "--seconds", "soon"),
    ("--rate 0 is out of bounds", "--rate", "0"),
    ("/proc/none is not a directory that can be written to", "--output", "/proc/none/x"),
    ("'no-such-run' is no process", "no-such-run"),
)


@pytest.mark.slow
def test_what_cannot_be_recorded_is_two_lines(folder: Path) -> None:
    """At once, and not after the seconds are over."""
    with running(folder, APART, "--preflight", "off", store=False) as job:
        job.hear("ready")
        until((job.run_dir / "run.json").exists, "the run is described")
        for what, *arguments in BAD:
            done = saferunctl(job, "record", *arguments)
            assert (done.returncode, done.stdout) == (2, ""), arguments
            assert what in two_lines(done.stderr)[0]
        job.send(signal.SIGTERM)
        job.wait()
