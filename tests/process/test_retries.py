"""Starts that fail for a passing reason are tried again, and nothing else is."""

from __future__ import annotations

import json
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import kill, read_stat, running, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.launching import Job

RAN = "from rank import *\ntell('ran')"
# A failure that another try will not change, told by every attempt.
IMPORTS_NOTHING = "from rank import *\ntell('ran')\nimport no_such_module"
# Fails so often, in the words given, and then works. What has been before is kept in a file.
FAILS_AT_FIRST = """
from rank import *
path = f"{FOLDER}/attempts.{RANK}"
number = len(open(path).read()) if os.path.exists(path) else 0
open(path, "a").write("x")
tell("ran")
times, message = int(sys.argv[1]), sys.argv[2]
if RANK == 0 and number < times:
    raise RuntimeError(message)
"""


def decisions(job: Job) -> list[str]:
    report = json.loads((job.run_dir / "report.json").read_text())
    return [row["next_step"] for row in report["decisions"]]


def test_a_port_that_is_free_a_moment_later_is_waited_for(tmp_path: Path) -> None:
    """The job before still has it, for one; nobody has to start this one again."""
    port = str(own_port())
    with socket.create_server(("127.0.0.1", int(port))) as holder:
        options = ("--master-port", port, "--retry-wait", "1")
        with running(tmp_path, RAN, *options, nproc=2) as job:
            until(lambda: "(retry 1 of 3)" in job.err, "the first try has failed")
            assert not job.said("ran")
            holder.close()
            assert job.wait() == 0
            # TORCHELASTIC_RESTART_COUNT: a retry of the start is no restart.
            assert [word.attempt for word in job.said("ran")] == [0, 0]
            assert f"port {port} on " in job.err
            assert set(decisions(job)) == {"retry"}
            assert [event for event in job.events() if event["event"] == "Decision"]


def test_the_retries_of_a_start_end(tmp_path: Path) -> None:
    """Whoever holds the port means to keep it."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        options = ("--master-port", str(holder.getsockname()[1]), "--retry-wait", "0", "--start-retries", "2")
        with running(tmp_path, RAN, *options) as job:
            assert job.wait() == 1
            assert job.err.count("starting again") == 2
            assert "not started again: all 2 retries are used up" in job.err
            # What has been said once, with the advice, is only named by what follows each time.
            assert job.err.count("hint: stop that process") == 1
            assert job.err.count(" is in use by pid ") == 3
            assert job.err.count(": the same again\n") == 1
            assert not job.said("ran")


def test_a_store_that_is_lost_while_the_ranks_start_is_served_anew(tmp_path: Path) -> None:
    """Whatever killed the process behind it; nothing has been trained yet."""
    program = """
from rank import *
import socket
path = f"{FOLDER}/began.{RANK}"
again = os.path.exists(path)
open(path, "w")
tell("again" if again else "ready")
if not again:
    await_release("ask")
asked = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
asked.sendall(bytes(1) + (0x3C85F7CE).to_bytes(4, sys.byteorder))  # as torch's client of the store does
if not again:
    stay()
"""
    with running(tmp_path, program, "--retry-wait", "0.1", nproc=2) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("StoreServed"), "the store is served")
        coordinator = job.coordinator()
        assert coordinator is not None
        kill(coordinator, signal.SIGKILL)
        until(lambda: read_stat(coordinator) is None, "the coordinator is gone")
        job.release("ask")
        assert job.wait() == 0
        assert [word.attempt for word in job.said("again")] == [0, 0]
        assert "(retry 1 of 3): the store's process ended (killed by SIGKILL)" in job.err


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--start-retries", "5", "--retry-wait", "0"), marks=pytest.mark.slow)]
)
def test_what_another_try_would_not_change_is_reported_after_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    """An import that fails will fail again."""
    with running(tmp_path, IMPORTS_NOTHING, *options, store=False) as job:
        assert job.wait() == 1
        assert len(job.said("ran")) == 1
        assert "starting again" not in job.err


def test_arguments_that_are_wrong_twice_end_the_restarts(tmp_path: Path) -> None:
    """It cannot have made progress, and would fail a third time; the GPUs are better used otherwise."""
    program = """
import argparse
from rank import *
tell("ran")
argparse.ArgumentParser().parse_args(["--no-such-option"])
"""
    with running(tmp_path, program, "--max-restarts", "5", store=False) as job:
        assert job.wait() == 1
        assert len(job.said("ran")) == 2
        assert "not started again: the same failure twice in a row (usage_error, rank 0)" in job.err
        assert decisions(job) == ["restart", "finish"]


@pytest.mark.slow
def test_a_module_that_comes_late_is_found_by_a_restart(tmp_path: Path) -> None:
    """An environment is being unpacked while the job starts: torchrun restarts as often as it was asked to."""
    program = """
from rank import *
tell("ran")
if ATTEMPT < 3:
    import no_such_module
tell("trained")
"""
    with running(tmp_path, program, "--max-restarts", "5", store=False) as job:
        assert job.wait() == 0
        assert len(job.said("ran")) == 4
        assert decisions(job) == ["restart"] * 3


# Trains a hundred steps from its checkpoint on, and then fails at the same line as each time.
CHECKPOINTS = """
from rank import *
path = f"{FOLDER}/checkpoint"
step = int(open(path).read()) if os.path.exists(path) else 0
tell(f"from {step}")
for step in range(step + 1, step + 101):
    with open(path + ".new", "w") as file:
        file.write(str(step))
    os.replace(path + ".new", path)
if step < 1000:
    MESSAGE
"""
FAILURES = (
    "raise RuntimeError('bad batch')",
    "raise OSError(5, 'Input/output error', f'shard-{step}')",
    "sys.exit('the loader gave up')",
)


@pytest.mark.slow
@pytest.mark.parametrize("message", FAILURES)
def test_a_job_that_gets_further_each_time_has_all_its_restarts(tmp_path: Path, message: str) -> None:
    """As torchrun has it; that is what checkpoints are for, and nearly all of training is the same few lines."""
    program = CHECKPOINTS.replace("MESSAGE", message)
    with running(tmp_path, program, "--max-restarts", "9", store=False) as job:
        assert job.wait() == 0
        assert [word.word for word in job.said()] == [f"from {number * 100}" for number in range(10)]
        assert [word.attempt for word in job.said()] == [*range(10)]
        assert (tmp_path / "checkpoint").read_text() == "1000"


@pytest.mark.slow
def test_torchrun_restarts_such_a_job_as_often(tmp_path: Path) -> None:
    """What saferun is measured by."""
    program = CHECKPOINTS.replace("MESSAGE", FAILURES[0]).replace("101", "301")
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    with running(tmp_path, program, "--max-restarts", "9", launcher=torchrun, sweeps=False) as job:
        assert job.wait(120) == 0
        assert [word.word for word in job.said()] == ["from 0", "from 300", "from 600", "from 900"]


@pytest.mark.slow
def test_hangs_use_up_all_restarts(tmp_path: Path) -> None:
    """A lock that is held at the same line each time may still be passed the next time."""
    program = (
        "from rank import *\ntell('ran')\nimport threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()"
    )
    options = ("--on-hang", "restart", "--max-restarts", "2", "--hang-timeout", "1", "--capture-budget", "5")
    with running(tmp_path, program, *options, store=False) as job:
        assert job.wait(120) != 0
        assert [word.attempt for word in job.said("ran")] == [0, 1, 2]
        assert "the same failure twice" not in job.err


@pytest.mark.slow
def test_retry_always_uses_up_all_restarts(tmp_path: Path) -> None:
    """As torchrun does."""
    with running(tmp_path, IMPORTS_NOTHING, "--max-restarts", "3", "--retry-always") as job:
        assert job.wait() == 1
        assert len(job.said("ran")) == 4


@pytest.mark.slow
def test_a_failure_that_nobody_knows_is_not_tried_again_where_there_was_no_start(tmp_path: Path) -> None:
    """A script without torch.distributed may have done anything by then; torchrun would run it once."""
    arguments = ("1", "something went wrong")
    with running(tmp_path, FAILS_AT_FIRST, arguments=arguments) as job:
        assert job.wait() == 1
        assert len(job.said("ran")) == 1


@pytest.mark.parametrize(
    "fails",
    slow_but(
        [
            "raise OSError('<urlopen error [Errno -3] Temporary failure in name resolution>')",
            "raise OSError(98, 'Address already in use')",
            "raise OSError(116, 'Stale file handle', '/data/shard-3')",
            "print('NCCL error: unhandled system error', file=sys.stderr); sys.exit(1)",
        ],
        "raise OSError(98, 'Address already in use')",
    ),
)
def test_what_a_script_does_by_itself_at_first_is_done_once(tmp_path: Path, fails: str) -> None:
    """As under torchrun: the causes pass, but it has met nobody, and may have left something behind."""
    with running(tmp_path, f"{RAN}\n{fails}", store=False) as job:
        assert job.wait() == 1
        assert len(job.said("ran")) == 1
        assert "starting again" not in job.err


@pytest.mark.parametrize("rank_of_many", slow_but([1, 2], "1"))
def test_a_syntax_error_that_the_script_raises_leaves_all_restarts(tmp_path: Path, rank_of_many: int) -> None:
    """Text that it evaluates may be data, hours after the start; torchrun restarts after it."""
    program = """
from rank import *
tell("ran")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 0:
    eval("lr = = 3")
"""
    with running(tmp_path, program, "--max-restarts", "1", nproc=rank_of_many) as job:
        assert job.wait() == 0
        assert decisions(job) == ["restart"]


@pytest.mark.parametrize(
    "fails",
    slow_but(
        [
            "raise SyntaxError('broken PNG file')",
            "raise SyntaxError('a section is expected', ('schedule.py', 3, 1, 'rate = 3'))",
            "compile('lr = = 3', 'schedule.py', 'exec')",
        ],
        "raise SyntaxError('broken PNG file')",
    ),
)
def test_a_syntax_error_that_the_script_raises_twice_leaves_all_restarts(tmp_path: Path, fails: str) -> None:
    """Pillow raises one for a file that is no image, and the file may be whole the next time; torchrun restarts."""
    program = f"""
from rank import *
tell("ran")
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 3:
    {fails}
"""
    with running(tmp_path, program, "--max-restarts", "4") as job:
        assert job.wait() == 0
        assert decisions(job) == ["restart"] * 3
        assert "fix the source" not in job.err


@pytest.mark.slow
def test_a_script_that_python_cannot_read_is_not_started_again(tmp_path: Path) -> None:
    """None of it has run, and no attempt changes that."""
    with running(tmp_path, "x = = 3", "--max-restarts", "2", nproc=2, store=False) as job:
        assert job.wait() == 1
        assert decisions(job) == ["finish"]
        assert "another attempt would not change it (SyntaxError: invalid syntax)" in job.err
