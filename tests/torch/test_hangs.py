"""Real gloo jobs that hang: the right rank and the right kind, and where the rank stands."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import kill, until
from tests.process.test_uninterruptible import NEEDS_A_STUCK_FILE_SYSTEM, stuck_file_system
from tests.torch.watching import EXAMPLES, await_failure, await_hang, blamed, report_of, stop, watched

HANG = EXAMPLES / "hang.py"
TIMEOUT = ("--hang-timeout", "3")
# Of ranks that wait for something outside the job, as a sleep is: as certain as all others.
AT_ONCE = ("--external-wait-timeout", "0")


@pytest.mark.parametrize(
    ("how", "class_name", "function"),
    # tests/unit has recorded stacks of all of them.
    slow_but(
        [
            ("sleep", "hang_sleep", "sleep_for_long"),
            ("poll", "hang_sleep", "wait_for_a_batch_that_never_comes"),
            ("lock", "hang_lock", "wait_for_a_lock"),
            ("queue", "hang_lock", "wait_for_a_queue"),
            ("c", "hang_sleep", "block_in_c"),
            ("fifo", "hang_fifo", "read_from_a_fifo"),
            ("subprocess", "hang_subprocess", "wait_for_a_subprocess"),
            ("mismatch", "hang_mismatched_collectives", "run_out_of_batches"),
            ("missing", "hang_missing_collective", "wait_in_the_store"),
            ("loader", "hang_data_loading", "load_from_a_worker_that_deadlocks"),
        ],
        "missing",
    ),
)
def test_the_rank_that_stays_away_is_named_with_what_it_does_instead(
    tmp_path: Path, how: str, class_name: str, function: str
) -> None:
    """Whoever is woken up by a hang wants one rank, one reason and one line of code."""
    options = (*TIMEOUT, *AT_ONCE, "--on-hang", "stop")
    with watched(tmp_path / "case", HANG, "--how", how, "--rank", "1", nproc=3, options=options) as job:
        failure = await_failure(job)
        hang = await_hang(job)
        assert job.process.returncode == 1
        assert blamed(hang) == (class_name, [1]), job.err
        assert function in hang["cause"]["location"], hang["cause"]
        assert blamed(failure) == (class_name, [1]), job.err
        assert report_of(job)["run"]["outcome"] == "failed"


# Groups of pairs; each rank is in two of them. argv: how often all ranks make all calls before, and per rank the order
# of its groups in the step that hangs.
PAIRS = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
groups = {pair: dist.new_group([int(rank) for rank in pair]) for pair in ("01", "12", "02")}
def step(pairs):
    for pair in pairs:
        dist.all_reduce(torch.ones(1), group=groups[pair])
for _ in range(int(sys.argv[1])):
    step(pair for pair in groups if str(dist.get_rank()) in pair)
step(sys.argv[2 + dist.get_rank()].split("+"))
"""


# tests/unit/diagnosis has recorded ones of both.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "orders", "named", "message"),
    [
        (
            2,
            ["01+02", "12+01", "02+12"],
            [0, 1, 2],
            (
                "wait for each other: rank 0 in collective 3 (all_reduce) of group 1 for rank 1, "
                "rank 1 in collective 3 (all_reduce) of group 2 for rank 2, "
                "rank 2 in collective 3 (all_reduce) of group 3 for rank 0"
            ),
        ),
        # gloo does not record who belongs to a group, and nobody has called anything in it before.
        (0, ["01+02", "12+01", "02+12"], [], "wait in different groups: rank 0 in all_reduce of group 1"),
    ],
)
def test_groups_that_are_entered_in_different_orders_are_named(
    tmp_path: Path, steps: int, orders: list[str], named: list[int], message: str
) -> None:
    """Each rank waits for another one, and none of them is missing anywhere."""
    script = tmp_path / "pairs.py"
    script.write_text(PAIRS)
    with watched(
        tmp_path / "case", script, str(steps), *orders, nproc=3, options=(*TIMEOUT, "--on-hang", "stop")
    ) as job:
        hang = await_hang(job)
        await_failure(job)
    assert blamed(hang)[1] == named, job.err
    assert message in hang["headline"], hang["headline"]
    assert "every rank must enter its groups in the same order" in hang["cause"]["advice"]


@pytest.mark.slow
def test_of_a_chain_of_groups_the_rank_at_the_root_is_named(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, that one in another group for rank 2, which has left out the call."""
    script = tmp_path / "pairs.py"
    asleep = PAIRS.replace("step(sys", "import time\nif dist.get_rank() == 2:\n    time.sleep(600)\nstep(sys")
    script.write_text(asleep)
    with watched(tmp_path / "case", script, "2", "01", "12+01", "12", nproc=3, options=(*TIMEOUT, *AT_ONCE)) as job:
        hang = await_hang(job)
        stop(job)
    assert blamed(hang) == ("hang_sleep", [2]), job.err


@pytest.mark.slow
def test_a_rank_that_spins_is_suspected_and_the_job_goes_on(tmp_path: Path) -> None:
    """Computing for long and spinning look alike from outside: it is told and never acted upon."""
    with watched(
        tmp_path, HANG, "--how", "spin", "--rank", "1", nproc=3, options=("--hang-timeout", "4", "--on-hang", "stop")
    ) as job:
        hang = await_hang(job)
        assert blamed(hang) == ("hang_spinning", [1]), job.err
        assert "spin_in_python" in hang["cause"]["location"]
        assert not hang["verdict"]["certain"]
        assert job.process.poll() is None
        stop(job)


@pytest.mark.slow
def test_a_stopped_rank_is_told_at_once_and_the_job_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    """SIGSTOP by somebody else: no timeout has to pass, and nothing is lost when SIGCONT comes."""
    with watched(
        tmp_path, HANG, "--how", "stop", "--rank", "1", "--steps", "2", nproc=2, options=("--hang-timeout", "60")
    ) as job:
        hang = await_hang(job)
        assert blamed(hang) == ("hang_stopped", [1]), job.err
        (pid,) = [look["pid"] for look in hang["processes"] if look["rank"] == 1 and look["is_rank"]]
        kill(pid, signal.SIGCONT)
        assert job.wait(60) == 0
        until(lambda: report_of(job).get("run", {}).get("outcome") == "succeeded", "the report of a good end")


@pytest.mark.slow
def test_without_the_hook_the_picture_is_there_all_the_same(tmp_path: Path) -> None:
    """The Flight Recorder is not available, and the rest works."""
    options = (*TIMEOUT, "--on-hang", "stop", "--no-inject")
    with watched(tmp_path, HANG, "--how", "lock", "--rank", "1", nproc=3, options=options) as job:
        await_failure(job)
        assert blamed(await_hang(job)) == ("hang_lock", [1]), job.err


@pytest.mark.slow
def test_the_culprit_of_a_hang_leaves_a_core_where_cores_are_kept(tmp_path: Path) -> None:
    """SIGABRT makes a core without ptrace, and its stacks name the line again."""
    options = (*TIMEOUT, *AT_ONCE, "--on-hang", "stop", "--cores", "keep")
    with watched(tmp_path, HANG, "--how", "sleep", "--rank", "1", nproc=2, options=options) as job:
        failure = await_failure(job)
        assert blamed(failure) == ("hang_sleep", [1]), job.err


@pytest.mark.slow
def test_a_hang_is_restarted_where_that_was_asked_for(tmp_path: Path) -> None:
    """All ranks start again, and the report tells of both attempts."""
    options = (*TIMEOUT, *AT_ONCE, "--on-hang", "restart", "--max-restarts", "1")
    with watched(tmp_path, HANG, "--how", "sleep", "--rank", "1", nproc=2, options=options) as job:
        await_failure(job)
        report = report_of(job)
        kinds = [(incident["kind"], incident["attempt"], incident["outcome"]) for incident in report["incidents"]]
        assert kinds == [
            ("hang", 0, "restarted"),
            ("failure", 0, "restarted"),
            ("hang", 1, "stopped"),
            ("failure", 1, "ended"),
        ]


@pytest.mark.slow
def test_the_picture_of_a_hang_is_short(tmp_path: Path) -> None:
    """Under 40 lines for 8 ranks, with the cause in the first one."""
    options = (*TIMEOUT, "--on-hang", "stop")
    with watched(tmp_path, HANG, "--how", "lock", "--rank", "5", nproc=8, options=options) as job:
        await_failure(job)
        assert blamed(await_hang(job)) == ("hang_lock", [5]), job.err
        own = [line for line in job.err.splitlines() if not line.startswith("[")]
        assert len(own) < 40 + 10, "the picture of the hang, and the few lines about the end"
        assert "rank 5" in next(line for line in own if line.startswith("saferun: the job hangs"))


@NEEDS_A_STUCK_FILE_SYSTEM
@pytest.mark.slow
def test_a_rank_in_an_uninterruptible_sleep_is_named(tmp_path: Path) -> None:
    """A dead network file system: no tool may attach to the rank, and none is needed."""
    folder = tmp_path / "fs"
    folder.mkdir()
    program = f"""
import os, signal
import torch
import torch.distributed as dist
signal.signal(signal.SIGUSR1, lambda *_: None)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
def load_a_checkpoint():
    open("{folder}/stuck/file")
if dist.get_rank() == 1:
    load_a_checkpoint()
dist.all_reduce(torch.ones(1))
os._exit(0)
"""
    script = tmp_path / "load.py"
    script.write_text(program)
    with stuck_file_system(folder) as file_system:
        arguments = {**file_system.arguments(), "store": True}
        with watched(tmp_path / "job-run", script, nproc=2, options=TIMEOUT, **arguments) as job:
            file_system.begin()
            file_system.await_opening()
            # The kernel sleeps interruptibly until the first signal comes.
            kill(next(event["pids"][1] for event in job.events() if event["event"] == "RanksStarted"), signal.SIGUSR1)
            hang = await_hang(job)
            assert blamed(hang) == ("hang_uninterruptible", [1]), job.err
            assert "load_a_checkpoint" in hang["cause"]["location"]
            file_system.close()
            stop(job)
