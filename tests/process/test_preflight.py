"""Preflight checks on one host: what would break the job stops it before any rank runs; nothing else does."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, cast

import pytest

from saferun.cli.main import read_config
from saferun.launch.preflight_part import ranks_wait
from saferun.linux.poller import Poller
from saferun.linux.process_room import may_be_short_of_processes
from saferun.model import ExitStatus
from saferun.preflight.check_process import CheckProcess
from saferun.preflight.driver import PreflightRun, context_of
from tests.breadth import slow_but
from tests.process.launching import running, until
from tests.unit.preflight.host_roots import Root

if TYPE_CHECKING:
    from pathlib import Path

    from saferun.cluster.job_interface import JobPort
    from saferun.preflight.driver import PreflightOutcome

RAN = "from rank import *\ntell('ran')"
RAN_AND_WAITS = f"{RAN}\nawait_release('end')"
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
        assert not (tmp_path / "job" / "saferun-runs").exists()


NOBODY_READS_IT = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "TP_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize("options", [(), pytest.param(("--no-python",), marks=pytest.mark.slow)])
def test_an_interface_that_a_site_s_module_names_stops_no_job_that_may_not_use_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Torchrun does not look at it, and a login node has no ib0."""
    script = ("sh", "-c", "exec python3 train.py") if options else ("train.py",)
    with running(tmp_path, RAN, *options, nproc=2, environ=NOBODY_READS_IT, script=script) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 2
        assert "saferun: warning: GLOO_SOCKET_IFNAME names ib0, which this host does not have" in job.err


@pytest.mark.parametrize("ranks", slow_but([8, 40], "8"))
def test_a_limit_on_open_files_that_torchrun_lives_with_stops_nobody(tmp_path: Path, ranks: int) -> None:
    """Ranks whose streams find no room write to the console themselves; one line says so."""
    limited = ("prlimit", "--nofile=32:32", "--")
    # Python's -u makes several writes of one print; among ranks that share a file only one write stays in one piece.
    program = "from rank import *\nsys.stdout.write(f'line of {RANK}\\n')"
    with running(tmp_path, program, nproc=ranks, before=limited) as job:
        assert job.wait() == 0, job.err
        lines = sorted(int(line.rpartition(" ")[2]) for line in job.out.splitlines())
        assert lines == list(range(ranks))
        assert job.err.count("the limit on open files leaves no room for the output of all ranks") == 1


def test_a_healthy_host_says_nothing_of_its_checks(tmp_path: Path) -> None:
    """They are for when something is wrong; what they found is in a file."""
    with running(tmp_path, RAN_AND_WAITS, nproc=2) as job:
        until((job.run_dir / "preflight.json").exists, "the checks are made beside the ranks")
        job.release("end")
        assert job.wait() == 0
        assert job.err == ""
        found = json.loads((job.run_dir / "preflight.json").read_text())
        assert {result["verdict"] for result in found["results"]} <= {"ok", "skipped"}
        assert {"open_files", "shared_memory", "disk"} <= {result["check"] for result in found["results"]}


@pytest.mark.slow
def test_what_is_found_while_the_ranks_run_is_told_while_they_run(tmp_path: Path) -> None:
    """On one host they do not wait for what can be no more than a warning."""
    with running(tmp_path, RAN_AND_WAITS, nproc=2, before=("prlimit", "--nofile=100:100", "--")) as job:
        job.hear("ran", 2)
        until(lambda: "saferun: warning: a process may open 100 files" in job.err, "the warning is told")
        job.release("end")
        assert job.wait() == 0


def broken(how: str) -> tuple[str, ...]:
    """A saferun whose check process breaks, and is given up soon."""
    modules = "saferun.preflight.check_process, saferun.preflight.checks.server as s"
    patch = f"import os, time, {modules}; s.answer = lambda _: {how}"
    run = "saferun.preflight.check_process._GIVE_UP_S = 0.5; from saferun.cli.main import main; main()"
    return sys.executable, "-c", f"{patch}; {run}"


BREAKS = {"hangs": "time.sleep(600)", "dies": "os._exit(3)", "raises": "1 / 0", "is killed": "os.kill(os.getpid(), 9)"}


@pytest.mark.parametrize("how", slow_but(BREAKS.values(), BREAKS["hangs"]), ids=list(BREAKS))
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--nic", "lo"), marks=pytest.mark.slow)], ids=["beside the ranks", "before the ranks"]
)
def test_a_check_process_that_breaks_holds_up_nobody_for_long(
    tmp_path: Path, how: str, options: tuple[str, ...]
) -> None:
    """It fails by being absent, with one line; ranks that wait for it are started when its time is over."""
    with running(tmp_path, RAN_AND_WAITS, *options, nproc=2, launcher=broken(how), store=False) as job:
        job.hear("ran", 2)
        until(lambda: "saferun: preflight checks: the check" in job.err, "it is told")
        job.release("end")
        assert job.wait() == 0


ALONE = cast("JobPort", None)  # of whom the checks of one host ask nothing


def test_a_process_that_was_forked_early_is_the_one_that_checks() -> None:
    """It has imported what it needs beside the supervisor; another one would do that once more."""
    config = read_config(["--run-dir", "none", "--no-python", "true"], {**os.environ})
    process = CheckProcess()
    poller = Poller()
    outcomes: list[PreflightOutcome] = []
    checks = PreflightRun(config, poller, job=ALONE, environ={}, print_message=print, warn=pytest.fail, process=process)
    checks.check(context_of(config, {}, bound=(), attempt=0, old_pids=()), outcomes.append)
    (pid,) = checks.pids
    assert process.pids == {pid}

    def is_checked() -> bool:
        poller.wait(0.01)
        return bool(outcomes)

    until(is_checked, "this host is checked")
    process.discard()  # which leaves alone what is somebody else's by now
    assert os.waitpid(pid, 0)[0] == pid
    assert checks.on_exit(pid, ExitStatus(0, None))
    assert not checks.pids
    assert len(outcomes[0].preflight.results) > 10


def test_a_launch_that_is_over_before_its_checks_keeps_what_they_have_found() -> None:
    """And does not wait for the rest; what was not checked is no failure."""
    config = read_config(["--run-dir", "none", "--no-python", "true"], {**os.environ})
    poller = Poller()
    outcomes: list[PreflightOutcome] = []
    process = CheckProcess()
    (pid,) = process.pids
    os.kill(pid, signal.SIGSTOP)
    checks = PreflightRun(config, poller, job=ALONE, environ={}, print_message=print, warn=pytest.fail, process=process)
    checks.check(context_of(config, {}, bound=(), attempt=0, old_pids=()), outcomes.append, beside=True)
    checks.settle()
    assert [(one.name, one.verdict) for one in outcomes[0].preflight.results] == [("others", "skipped")]
    assert outcomes[0].failure is None
    checks.settle()
    checks.close()
    assert len(outcomes) == 1
    os.waitpid(pid, 0)


ONE_HOST = ("--no-python", "true")


@pytest.mark.parametrize(
    ("options", "environ", "waits"),
    [
        ((), {}, False),
        ((), {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}, False),
        ((), {"GLOO_SOCKET_IFNAME": "nosuch0"}, True),
        ((), {"GLOO_SOCKET_IFNAME": "lo,nosuch0"}, True),
        (("--nic", "lo"), {}, True),
        (("--preflight", "only"), {}, True),
        (("--nnodes", "2", "--node-rank", "0", "--master-addr", "node1"), {}, True),
    ],
)
def test_ranks_wait_for_the_checks_only_where_one_may_refuse_them(
    options: tuple[str, ...], environ: dict[str, str], waits: bool
) -> None:
    """Everybody pays for what ranks wait for."""
    config = read_config([*options, *ONE_HOST], environ)
    assert ranks_wait(config, environ) is waits


def test_few_processes_that_are_left_are_seen_at_once(tmp_path: Path) -> None:
    """By a control group's limit, the process's own or one above it."""
    root = Root(tmp_path)
    assert not may_be_short_of_processes(8, str(tmp_path)), "what cannot be read is no limit"
    root.write("proc/self/cgroup", "0::/pod/job\n")
    for name, maximum, current in (("pod/job", "max", "90"), ("pod", "1024", "100")):
        root.write(f"sys/fs/cgroup/{name}/pids.max", f"{maximum}\n")
        root.write(f"sys/fs/cgroup/{name}/pids.current", f"{current}\n")
    assert not may_be_short_of_processes(8, str(tmp_path))
    assert may_be_short_of_processes(16, str(tmp_path))
    root.write("proc/self/cgroup", "7:memory:/a\n5:pids:/b\n")
    root.write("sys/fs/cgroup/pids/b/pids.max", "64\n")
    assert may_be_short_of_processes(2, str(tmp_path))
    root.write("proc/self/cgroup", b"\xff::\n:::::\n0\n")
    assert not may_be_short_of_processes(2, str(tmp_path))
