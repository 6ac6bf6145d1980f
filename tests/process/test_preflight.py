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
NO_SUCH_NIC = ("--nic", "nosuch0")


def test_what_would_break_the_job_stops_the_launch_before_any_rank_starts(tmp_path: Path) -> None:
    """Exit code 2, two lines, and no rank has run."""
    with running(tmp_path, RAN, *NO_SUCH_NIC, nproc=2) as job:
        assert job.wait() == 2
        assert not job.said("ran")
        assert "nosuch0" in job.err
        assert "\nhint: " in job.err
        assert job.out == ""


def test_with_preflight_warn_the_same_is_only_told(tmp_path: Path) -> None:
    """Whoever knows better than saferun has the last word."""
    with running(tmp_path, RAN, "--preflight", "warn", *NO_SUCH_NIC, nproc=2) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 2
        assert "saferun: warning: " in job.err
        assert "nosuch0" in job.err


def test_with_preflight_off_nobody_looks(tmp_path: Path) -> None:
    """And nothing is said."""
    with running(tmp_path, RAN, "--preflight", "off", *NO_SUCH_NIC, nproc=2) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 2
        assert "preflight" not in job.err
        assert "warning" not in job.err


@pytest.mark.parametrize(("options", "exit_code"), [((), 0), (NO_SUCH_NIC, 2)])
def test_with_preflight_only_a_table_is_all_there_is(tmp_path: Path, options: tuple[str, ...], exit_code: int) -> None:
    """It starts nothing and leaves no files."""
    with running(tmp_path, RAN, "--preflight", "only", *options, nproc=2) as job:
        assert job.wait() == exit_code
        assert not job.said("ran")
        assert "shared_memory" in job.out
        assert ("nosuch0" in job.out) == bool(options)
        assert not (tmp_path / "job" / "saferun_runs").exists()


NOBODY_READS_IT = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "TP_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize("options", [(), ("--no-python",)])
def test_an_interface_that_a_site_s_module_names_stops_no_job_that_may_not_use_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Torchrun does not look at it, and a login node has no ib0."""
    script = ("sh", "-c", "exec python3 train.py") if options else ("train.py",)
    with running(tmp_path, RAN, *options, nproc=2, environ=NOBODY_READS_IT, script=script) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 2
        assert "saferun: warning: GLOO_SOCKET_IFNAME names ib0, which this host does not have" in job.err


@pytest.mark.parametrize("ranks", [8, 40])
def test_a_limit_on_open_files_that_torchrun_lives_with_stops_nobody(tmp_path: Path, ranks: int) -> None:
    """Ranks whose streams find no room write to the console themselves; one line says so."""
    limited = ("prlimit", "--nofile=32:32", "--")
    program = "from rank import *\nprint('line of', RANK, flush=True)"
    with running(tmp_path, program, nproc=ranks, before=limited) as job:
        assert job.wait() == 0, job.err
        lines = sorted(int(line.rpartition(" ")[2]) for line in job.out.splitlines())
        assert lines == list(range(ranks))
        assert job.err.count("the limit on open files leaves no room for the output of all ranks") == 1


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
