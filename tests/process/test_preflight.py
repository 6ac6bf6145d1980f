"""Checks before the start on one host: what would break the job stops it before any rank runs; nothing else does."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from saferun.check_run import CheckProcess
from saferun.cli import read_config
from saferun.host.poller import Poller
from saferun.model import ExitStatus
from saferun.preflight_run import PreflightRun, context_of
from tests.process.launching import running, until

if TYPE_CHECKING:
    from pathlib import Path

    from saferun.preflight_run import Outcome

RAN = "from rank import *\ntell('ran')"
NO_SUCH_NIC = {"GLOO_SOCKET_IFNAME": "nosuch0"}


def test_what_would_break_the_job_stops_the_launch_before_any_rank_starts(tmp_path: Path) -> None:
    """Exit code 2, two lines, and no rank has run."""
    with running(tmp_path, RAN, nproc=2, environ=NO_SUCH_NIC) as job:
        assert job.wait() == 2
        assert not job.said("ran")
        assert "nosuch0" in job.err
        assert "\nhint: " in job.err
        assert job.out == ""


def test_with_preflight_warn_the_same_is_only_told(tmp_path: Path) -> None:
    """Whoever knows better than saferun has the last word."""
    with running(tmp_path, RAN, "--preflight", "warn", nproc=2, environ=NO_SUCH_NIC) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 2
        assert "saferun: warning: " in job.err
        assert "nosuch0" in job.err


def test_with_preflight_off_nobody_looks(tmp_path: Path) -> None:
    """And nothing is said."""
    with running(tmp_path, RAN, "--preflight", "off", nproc=2, environ=NO_SUCH_NIC) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 2
        assert "preflight" not in job.err
        assert "warning" not in job.err


@pytest.mark.parametrize(("environ", "exit_code"), [({}, 0), (NO_SUCH_NIC, 2)])
def test_with_preflight_only_a_table_is_all_there_is(tmp_path: Path, environ: dict[str, str], exit_code: int) -> None:
    """It starts nothing and leaves no files."""
    with running(tmp_path, RAN, "--preflight", "only", nproc=2, environ=environ) as job:
        assert job.wait() == exit_code
        assert not job.said("ran")
        assert "shared_memory" in job.out
        assert ("nosuch0" in job.out) == bool(environ)
        assert not (tmp_path / "job" / "saferun_runs").exists()


def test_a_healthy_host_says_nothing_of_its_checks(tmp_path: Path) -> None:
    """They are for when something is wrong; what they found is in a file."""
    with running(tmp_path, RAN, nproc=2) as job:
        assert job.wait() == 0
        assert job.err == ""
        found = json.loads((job.run_dir / "preflight.json").read_text())
        assert {result["verdict"] for result in found["results"]} <= {"ok", "skipped"}
        assert {"open_files", "shared_memory", "disk"} <= {result["check"] for result in found["results"]}


def test_a_process_that_was_forked_early_is_the_one_that_checks() -> None:
    """It has imported what it needs beside the supervisor; another one would do that once more."""
    config = read_config(["--run-dir", "none", "--no-python", "true"], {**os.environ})
    process = CheckProcess()
    poller = Poller()
    outcomes: list[Outcome] = []
    checks = PreflightRun(config, poller, job=None, environ={}, say=print, warn=pytest.fail, process=process)
    checks.check(context_of(config, {}, bound=(), attempt=0, old_pids=()), outcomes.append)
    assert checks.pids == {process.pid}

    def is_checked() -> bool:
        poller.wait(0.01)
        return bool(outcomes)

    until(is_checked, "this host is checked")
    process.end()  # which leaves alone what is somebody else's by now
    assert os.waitpid(process.pid, 0)[0] == process.pid
    assert checks.on_exit(process.pid, ExitStatus(0, None))
    assert not checks.pids
    assert len(outcomes[0].preflight.results) > 10
