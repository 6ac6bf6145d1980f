"""Real gloo jobs that crash: the right rank and the right class, and the others as its victims."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import slow_but
from tests.process.launching import in_mounts, kill, until
from tests.torch.watching import EXAMPLES, await_failure, blamed, report_of, watched

CRASH = EXAMPLES / "crash.py"


@pytest.mark.parametrize(
    ("how", "class_name", "words"),
    # tests/unit has recorded output of all of them.
    slow_but(
        [
            ("segv", "segmentation_fault", "read_through_a_null_pointer"),
            ("segv-thread", "segmentation_fault", "read_through_a_null_pointer"),
            ("abort", "abort", "abort"),
            ("fpe", "floating_point_error", "divide_by_zero"),
            ("exit", "python_exit", "exit code 3"),
            ("raise", "python_exception", "KeyError: 'labels'"),
            ("import", "import_error", "flash_attention_of_another_planet"),
            ("early", "early_exit", "exit code 0"),
            ("disk", "disk_full", "No space left on device"),
            ("port", "port_in_use", "Address already in use"),
            ("loader", "data_loader_worker_killed", "worker"),
        ],
        "segv",
    ),
)
def test_the_rank_that_died_first_is_the_cause(tmp_path: Path, how: str, class_name: str, words: str) -> None:
    """The others lose a connection, and say so at length; none of them may be named as the cause."""
    with watched(tmp_path, CRASH, "--how", how, "--rank", "1", nproc=3) as job:
        failure = await_failure(job)
        assert job.process.returncode == 1
        assert blamed(failure) == (class_name, [1]), job.err
        told = job.err[job.err.index("saferun: rank 1") :]
        # A traceback that the console has shown is not shown again.
        assert words in (job.err if "  above: the traceback of rank 1" in told else told), job.err


@pytest.mark.slow
def test_too_many_open_files_are_named(tmp_path: Path) -> None:
    """The limit of the test's own, so that it takes no time to reach."""

    def lower_the_limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with watched(tmp_path, CRASH, "--how", "files", "--rank", "1", preexec_fn=lower_the_limit) as job:
        assert blamed(await_failure(job)) == ("too_many_open_files", [1]), job.err


@pytest.mark.slow
def test_a_full_shared_memory_is_named(tmp_path: Path) -> None:
    """As in a container, where /dev/shm has 64 MiB: the rank gets SIGBUS and no words."""
    mounts = in_mounts(("/dev/shm", "size=16m"), directory=str(tmp_path / "case" / "job"))
    with watched(tmp_path / "case", CRASH, "--how", "shm", "--rank", "1", before=mounts) as job:
        assert blamed(await_failure(job)) == ("shared_memory_exhausted", [1]), job.err


@pytest.mark.slow
def test_a_rank_killed_from_outside_is_told_as_such(tmp_path: Path) -> None:
    """Nobody's bug in the script: somebody else, or something else, killed it."""
    with watched(tmp_path, CRASH, "--how", "killed", "--rank", "1") as job:
        until(lambda: "waiting" in job.out, "rank 1 waits", timeout_s=120)
        pids = next(event["pids"] for event in job.events() if event["event"] == "RanksStarted")
        kill(pids[1], signal.SIGKILL)
        assert blamed(await_failure(job)) == ("killed_from_outside", [1]), job.err


@pytest.mark.slow
def test_a_traceback_that_all_ranks_print_is_shown_once(tmp_path: Path) -> None:
    """Eight copies of the same lines hide what they say."""
    with watched(tmp_path, CRASH, "--how", "raise", "--rank", "all", nproc=4) as job:
        failure = await_failure(job)
        assert failure["cause"]["class"] == "python_exception"
        own = [line for line in job.err.splitlines() if not line.startswith("[")]
        assert sum("KeyError: 'labels'" in line for line in own if line.startswith(("  |", "  "))) <= 2, own
        assert len(own) < 40


@pytest.mark.slow
def test_four_ranks_that_crash_at_once_are_each_found(tmp_path: Path) -> None:
    """With the core pattern ``core`` they all write to the same name."""
    with watched(tmp_path, CRASH, "--how", "segv", "--rank", "all", nproc=4) as job:
        failure = await_failure(job)
        class_name, ranks = blamed(failure)
        assert class_name == "segmentation_fault"
        assert len(ranks) >= 1
        assert {end["rank"] for end in (failure["first_failure"], *failure["also_failed"])} == {0, 1, 2, 3}
    assert not [path for path in (tmp_path / "job").iterdir() if path.name.startswith("core")], "cores are left behind"


def _memory_cgroup() -> Path | None:
    """A new small memory cgroup of our own; None where none can be made."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = top / f"saferun-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(1200 << 20))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


@pytest.mark.slow
def test_a_rank_killed_by_the_oom_killer_of_its_cgroup_is_told_as_such(tmp_path: Path) -> None:
    """Exit code -9 alone has cost people days."""
    group = _memory_cgroup()
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    join = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    try:
        with watched(tmp_path, CRASH, "--how", "memory", "--rank", "1", before=join) as job:
            failure = await_failure(job)
            assert blamed(failure) == ("host_oom_kill", [1]), job.err
            assert failure["oom"]["limit_bytes"] == 1200 << 20
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().split(), "the cgroup is empty")
        group.rmdir()


@pytest.mark.slow
def test_the_report_is_there_where_the_job_went_well_in_the_end(tmp_path: Path) -> None:
    """A retry that worked hides a fault that will come back."""
    script = EXAMPLES / "fail_once.py"
    with watched(tmp_path, script, options=("--max-restarts", "1")) as job:
        assert job.wait(120) == 0
        report: dict[str, Any] = report_of(job)
        assert report["run"]["outcome"] == "succeeded"
        assert [incident["outcome"] for incident in report["incidents"]] == ["restarted"]
        text = (job.run_dir / "report.txt").read_text()
        assert re.search(r"rank \d", text)
