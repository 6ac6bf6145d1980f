"""What looks at the ranks may fail in every way: the evidence is lost, and nothing else."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from saferun.captures.faulthandler_dump import dump_by_signal
from saferun.captures.process_state import read_snapshot
from saferun.captures.scene import Process
from tests.breadth import slow_but
from tests.process.launching import (
    DEADLINE_S,
    REPOSITORY,
    STAY,
    Job,
    customized,
    in_saferun,
    kill,
    running,
    state_of,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA = json.loads((REPOSITORY / "saferun/report/schema/report.schema.json").read_text(encoding="utf-8"))
TOLD = ("--env-profile", "minimal", "--hang-timeout", "1", "--external-wait-timeout", "0")
STOPPED = (*TOLD, "--on-hang", "stop", "--shutdown-timeout", "5")
# A host on which no more processes can be forked, once the ranks run.
NO_EXAMINER = (
    "import saferun.captures.examiner as run\n"
    "    def no_fork(*_arguments, **_options): raise OSError(11, 'Resource temporarily unavailable')\n"
    "    run.Helper = no_fork"
)
# The process of a capture stands still from its first moment.
STOPS_AT_ONCE = (
    "import os, signal, saferun.captures.examiner_process as serve\n"
    "    name_it = serve.set_name\n"
    "    def name_and_stop(name):\n"
    "        name_it(name)\n"
    "        if name == 'sr-capture': os.kill(os.getpid(), signal.SIGSTOP)\n"
    "    serve.set_name = name_and_stop"
)
# Ranks that sleep until the test lets them go.
SLEEP_UNTIL_RELEASED = """
from rank import *
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
tell("ready")
def hold_still():
    stay()
hold_still()
"""


def incidents(job: Job) -> list[dict[str, Any]]:
    """What the report tells of, after it has been found to keep the schema."""
    report: dict[str, Any] = json.loads((job.run_dir / "report.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(SCHEMA).validate(report)
    found: list[dict[str, Any]] = report["incidents"]
    return found


def capture_process(job: Job) -> int:
    """The capture process, while there is one."""
    return process_called("sr-capture", job)


def process_called(name: str, job: Job) -> int:
    """A process of the job's that has this name; 0: there is none."""
    return next(iter(job.called(name)), 0)


# ----------------------------------------------------------------------------------------------- a healthy job stays so


@pytest.mark.slow
def test_what_cannot_be_taken_in_is_said_and_the_job_goes_on(tmp_path: Path) -> None:
    """An exception in the loop would end the launch, and a job that had come to life again with it."""
    broken = (
        "from saferun.captures.wire import CaptureReader; CaptureReader.feed = lambda self, content: content['no such']"
    )
    environ = customized(tmp_path, in_saferun(broken))
    options = (*TOLD, "--capture-budget", "1")
    with running(tmp_path / "run", SLEEP_UNTIL_RELEASED, *options, nproc=2, environ=environ, store=False) as job:
        ranks = job.hear("ready", 2)
        until(lambda: "job left running" in job.err, "the hang is told")
        for rank in ranks:
            kill(rank.pid, signal.SIGUSR1)
        assert job.wait() == 0
        assert job.err.count("saferun: cannot read what a helper process has sent: TypeError") == 1, job.err
        assert "cannot be inspected (capture budget exceeded)" in job.err
        assert incidents(job)[0]["outcome"] == "continued"


@pytest.mark.slow
def test_a_hang_that_goes_on_is_shown_once_and_then_as_a_line(tmp_path: Path) -> None:
    """The report has every capture; the screen does not need the same picture again."""
    with running(tmp_path / "run", SLEEP_UNTIL_RELEASED, *TOLD, nproc=2, store=False) as job:
        ranks = job.hear("ready", 2)
        until(lambda: job.err.count("next hang check") > 1, "the hang is told again")
        for rank in ranks:
            kill(rank.pid, signal.SIGUSR1)
        assert job.wait() == 0
        assert job.err.count("calls of the ranks on") == 1, job.err
        line = next(line for line in job.err.splitlines() if "still hangs" in line)
        assert re.fullmatch(
            r"saferun: the job still hangs after [0-9.]+ s: all ranks of .*: each waits in pause.*; "
            r"reported 2 times, next hang check in [0-9.]+ s",
            line,
        )
        report = (job.run_dir / "report.txt").read_text(encoding="utf-8")
        assert report.count("calls of the ranks on") == len(incidents(job)) > 1


def slow_capture(folder: Path) -> dict[str, str]:
    """An environ with which a capture lasts for the whole budget."""
    slow = "import saferun.captures.wire as wire; wire.CaptureReader.feed = lambda self, content: content['no such']"
    return customized(folder, in_saferun(slow))


def test_a_job_that_comes_to_life_while_it_is_looked_at_is_not_stopped(tmp_path: Path) -> None:
    """A file system that was slow to answer must not cost the job."""
    program = """
from rank import *
tell("ready")
await_release("wake")
while not os.path.exists(FOLDER + "/release.end"):
    print("a step", flush=True)
    sum(range(100000))
    time.sleep(0.02)
"""
    options = (*STOPPED, "--capture-budget", "6")
    with running(tmp_path / "run", program, *options, nproc=2, environ=slow_capture(tmp_path), store=False) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("HangSuspected", state="capturing"), "the hang is being looked at")
        job.release("wake")
        until(lambda: "job left running: it made progress during the capture" in job.err, "it is told")
        job.release("end")
        assert job.wait() == 0
        assert incidents(job)[0]["outcome"] in {"continued", "recovered"}
        assert not incidents(job)[0]["verdict"]["certain"]
        assert "the job hangs: " not in job.err


@pytest.mark.slow
def test_a_rank_that_ends_well_while_the_others_are_captured_shows_that_there_is_no_hang(tmp_path: Path) -> None:
    """Stacks of two moments do not go together: the others seem to wait for one that had ended."""
    program = """
from rank import *
tell("ready")
await_release("wake" if RANK == 0 else "end")
"""
    options = (*STOPPED, "--capture-budget", "6")
    with running(tmp_path / "run", program, *options, nproc=2, environ=slow_capture(tmp_path), store=False) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("HangSuspected", state="capturing"), "the hang is being captured")
        job.release("wake")
        until(lambda: "job left running: it made progress during the capture" in job.err, "that is said")
        job.release("end")
        assert job.wait() == 0
        assert "the job may hang: " in job.err
        assert not incidents(job)[0]["verdict"]["certain"]


def test_a_process_that_has_closed_the_file_is_not_asked_for_its_stacks(tmp_path: Path) -> None:
    """Python would write them into whatever file of the script's own has the number by now."""
    script = (
        "import faulthandler, os, sys, time\n"
        "stacks = open(f'{sys.argv[1]}.{os.getpid()}.stacks', 'wb')\n"
        "faulthandler.register(63, stacks.fileno())\n"
        "os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), stacks.fileno())\n"
        "print(flush=True)\n"
        "time.sleep(1000)\n"
    )
    checkpoint = tmp_path / "checkpoint"
    command = [sys.executable, "-c", script, str(tmp_path / "a0r0"), str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            look = read_snapshot(0, process.pid, is_rank=True)
            asked = Process(0, process.pid, is_rank=True, hook_prefix=str(tmp_path / "a0r0"), snapshot=look)
            assert dump_by_signal([asked], float("inf")) == {}
        finally:
            process.kill()
    assert checkpoint.read_bytes() == b""


def test_a_process_with_one_handler_for_all_signals_is_not_asked_for_its_stacks(tmp_path: Path) -> None:
    """The handler has taken the place of faulthandler's, and may save a checkpoint and end the training."""
    script = (
        "import faulthandler, os, signal, sys\n"
        "stacks = open(f'{sys.argv[1]}.{os.getpid()}.stacks', 'wb')\n"
        "faulthandler.register(63, stacks.fileno())\n"
        "for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(signum, lambda signum, _: os._exit(3))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a0r0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        look = read_snapshot(0, process.pid, is_rank=True)
        asked = Process(0, process.pid, is_rank=True, hook_prefix=str(tmp_path / "a0r0"), snapshot=look)
        assert dump_by_signal([asked], time.monotonic() + DEADLINE_S) == {}
        process.stdin.close()
        assert process.wait() == 0


def test_stacks_are_whole_although_who_writes_them_waits_for_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a rank stops in the middle of it; the main thread is the last that faulthandler writes."""
    # As the kernel shows a thread within faulthandler's handler: the signal is blocked in it.
    script = (
        "import os, signal, sys\n"
        "stacks = open(f'{sys.argv[1]}.{os.getpid()}.stacks', 'wb', buffering=0)\n"
        "def write(*_):\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {63})\n"
        "    stacks.write(b'Thread 0x1 (most recent call first):\\n')\n"
        "    sys.stdin.readline()\n"
        "    stacks.write(b'  File \"a.py\", line 7 in work\\n')\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, {63})\n"
        "signal.signal(63, write)\n"
        "print(flush=True)\n"
        "while True: signal.pause()\n"
    )
    prefix = tmp_path / "a0r0"
    command = [sys.executable, "-c", script, str(prefix)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            stacks = Path(f"{prefix}.{process.pid}.stacks")
            pauses_s: list[float] = []

            def pause(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
                sleep(seconds)
                if stacks.stat().st_size:
                    pauses_s.append(seconds)
                if len(pauses_s) == 20:
                    print(file=process.stdin, flush=True)

            monkeypatch.setattr(time, "sleep", pause)
            look = read_snapshot(0, process.pid, is_rank=True)
            asked = Process(0, process.pid, is_rank=True, hook_prefix=str(prefix), snapshot=look)
            text = dump_by_signal([asked], time.monotonic() + DEADLINE_S)[process.pid]
            assert text.decode().splitlines()[1:] == ['  File "a.py", line 7 in work']
        finally:
            process.kill()


# --------------------------------------------------------------------------------------------------- what is in the way


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["threading.py", "base64.py"], "threading.py"))
def test_the_users_modules_do_not_disturb_the_capture(tmp_path: Path, name: str) -> None:
    """PYTHONPATH is full of things that are meant for the ranks."""
    source = "import sys\nif 'saferun' in sys.modules: raise ImportError\n"
    environ = customized(tmp_path, source, name)
    program = "import time\ntime.sleep(1000)\n"
    with running(tmp_path / "run", program, *STOPPED, nproc=2, environ=environ, store=False) as job:
        assert job.wait() == 1
        hang, _ = incidents(job)
        assert hang["cause"]["class"] == "hang_sleep", job.err
        assert hang["cause"]["location"] == "train.py:2", job.err


def test_a_capture_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    """The hint would be of no use without the reason."""
    environ = customized(tmp_path, in_saferun(NO_EXAMINER))
    options = (*STOPPED, "--no-python")
    script = ("sleep", "1000")
    with running(tmp_path / "run", "", *options, nproc=2, environ=environ, script=script, store=False) as job:
        assert job.wait() == 1
        told = "saferun: the examiner cannot be forked: Resource temporarily unavailable; hangs are not captured"
        assert job.err.count(told) == 1, job.err
        assert "cannot be inspected (the capture cannot be started: there is no examiner)" in job.err
        assert [incident["outcome"] for incident in incidents(job)] == ["stopped", "ended"]


def test_an_examiner_that_is_lost_is_replaced(tmp_path: Path) -> None:
    """The out-of-memory killer may take any process; the job goes on, and its hang is looked into."""
    program = "from rank import *\ntell('ready')\nawait_release('hang')\ntime.sleep(1000)\n"
    options = (*STOPPED, "--hang-timeout", "3")
    with running(tmp_path, program, *options, nproc=2, store=False) as job:
        job.hear("ready", 2)
        lost = until(lambda: process_called("sr-examiner", job), "the examiner")
        kill(lost, signal.SIGKILL)
        until(lambda: process_called("sr-examiner", job) not in {0, lost}, "another one")
        job.release("hang")
        assert job.wait() == 1
        assert job.err.count("saferun: the examiner has ended; another one takes its place") == 1
        assert incidents(job)[0]["cause"]["location"] == "train.py:4", job.err


def test_each_attempt_has_one_diagnosis_where_cores_cannot_be_read(tmp_path: Path) -> None:
    """A second one would be that of the attempt that follows."""
    environ = customized(tmp_path, in_saferun(NO_EXAMINER))
    crash = tmp_path / "crash.sh"
    crash.write_text("ulimit -c 0\nkill -SEGV $$\n")
    options = ("--env-profile", "minimal", "--no-python", "--max-restarts", "1", "--monitor-interval", "0.1")
    script = ("sh", str(crash))
    with running(tmp_path / "run", "", *options, environ=environ, script=script, store=False) as job:
        assert job.wait() == 1
        assert [event["attempt"] for event in job.events() if event["event"] == "Diagnosed"] == [0, 1]
        assert [incident["outcome"] for incident in incidents(job)] == ["restarted", "ended"]


@pytest.mark.slow
def test_where_nothing_is_to_be_captured_that_is_the_reason(tmp_path: Path) -> None:
    """And not that looking was denied."""
    with running(tmp_path, STAY, *STOPPED, "--capture-budget", "0", store=False) as job:
        assert job.wait() == 1
        assert "cannot be inspected (--capture-budget is 0)" in job.err
        assert incidents(job)[0]["timed_out"] == []


# --------------------------------------------------------------------------------------------------------- what is seen


@pytest.mark.slow
def test_the_main_thread_of_hundreds_is_the_one_that_is_shown(tmp_path: Path) -> None:
    """It is the oldest one, and comes last."""
    program = """
import threading, time
threading.stack_size(65536)
for _ in range(300):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def wait_for_them_all():
    time.sleep(1000)
wait_for_them_all()
"""
    with running(tmp_path, program, *STOPPED, store=False) as job:
        assert job.wait() == 1
        assert incidents(job)[0]["cause"]["location"] == "train.py:7 in wait_for_them_all", job.err


SECRETS = """
import subprocess, sys
subprocess.Popen(["sh", "-c", "sleep 1000; : --header 'Authorization: Bearer S3CRET'"])
subprocess.Popen(["sh", "-c", "sleep 1000; : --password S3CRET; : DB_PASSWORD=S3CRET"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "--header", "Authorization: Bearer S3CRET"])
subprocess.Popen(["sh", "-c", "export A=1; MY_TOKEN=S3CRET sleep 1000; :"]).wait()
"""


@pytest.mark.slow
def test_no_secret_of_a_command_line_is_told(tmp_path: Path) -> None:
    """Reports are passed on, and a whole shell command is one argument."""
    arguments = ["--token", "S3CRET", "--api-key=S3CRET", "postgres://me:S3CRET@host/db"]
    arguments += [
        "Authorization: Bearer S3CRET",
        "x --password S3CRET; :",
        "x --key S3CRET & A=1 TOKEN='S3CRET S3CRET' :",
    ]
    options = (*STOPPED, "--env", "API_TOKEN=S3CRET")
    with running(tmp_path, SECRETS, *options, nproc=2, arguments=arguments, store=False) as job:
        assert job.wait() == 1
        assert incidents(job)[0]["cause"]["class"] == "hang_subprocess", job.err
        assert "MY_TOKEN=" in job.err
        written = [path for path in job.run_dir.resolve().rglob("*") if path.is_file()]
        assert any(path.name.endswith("process_state.json") for path in written)
        assert [path for path in (*written, tmp_path / "stderr") if b"S3CRET" in path.read_bytes()] == []


# ------------------------------------------------------------------------------------------------- the end of a capture


@pytest.mark.parametrize(
    ("signum", "code"), slow_but([(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, -9)], "SIGTERM")
)
def test_a_capture_that_does_not_end_holds_nobody_up(tmp_path: Path, signum: int, code: int) -> None:
    """Ctrl-C does not wait for it at all, another signal for as long as the budget lasts, and nothing is left of it."""
    options: Sequence[str] = (*TOLD, "--capture-budget", "4", "--shutdown-timeout", "5")
    environ = customized(tmp_path, in_saferun(STOPS_AT_ONCE))
    with running(tmp_path, STAY, *options, nproc=2, environ=environ, store=False, sweeps=False) as job:
        job.hear("ready", 2)
        # A hang that goes on is captured more than once, should the first have been given up meanwhile.
        until(lambda: state_of(capture_process(job)) == "T", "the capture process stands still")
        job.send(signum)
        assert job.wait() == code
        job.assert_nothing_left(DEADLINE_S)
        if signum != signal.SIGKILL:
            assert f"stopped by {signal.Signals(signum).name}" in job.err
