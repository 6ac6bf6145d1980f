"""What works on after ranks that ended with exit code 0: an upload of the last checkpoint, beside torchrun."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import DEADLINE_S, customized, in_saferun, kill, read_stat, running, until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

# A rank that ends while a program of its own uploads: it works until it is told that the network is free.
UPLOADING = """
import subprocess
from rank import *
work = '''
import os, sys, time
folder, rank = sys.argv[1:3]
while not os.path.exists(folder + "/release.upload"):
    open("/dev/null", "wb").write(bytes(1 << 16))
    time.sleep(0.01)
open(f"{folder}/uploaded.{rank}", "w").write("whole")
'''
child = subprocess.Popen(
    [sys.executable, "-c", work, FOLDER, str(RANK), "--token=hidden"], start_new_session="session" in sys.argv,
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
open(f"{FOLDER}/pid.{RANK}", "w").write(str(child.pid))
tell("ready")
"""


@pytest.mark.parametrize("where", ["family", "session"])
def test_an_upload_is_waited_for_and_named(tmp_path: Path, where: str) -> None:
    with running(tmp_path, UPLOADING, "--shutdown-timeout", "1", arguments=[where], store=False) as job:
        job.hear("ready")
        until(lambda: "waiting for 1 process of rank 0: " in job.err, "it is named")
        pid = (tmp_path / "pid.0").read_text()
        assert f"(pid {pid}), 10 min at most" in job.err
        assert "hidden" not in job.err
        assert job.process.poll() is None
        job.release("upload")
        assert job.wait() == 0
        assert (tmp_path / "uploaded.0").read_text() == "whole"
        assert "ending" not in job.err


@pytest.mark.slow
def test_under_torchrun_the_upload_is_whole_as_well(tmp_path: Path) -> None:
    """The promise that saferun keeps: what torchrun finishes, saferun finishes."""
    with running(tmp_path, UPLOADING, arguments=["session"], launcher=TORCHRUN, sweeps=False) as job:
        assert job.wait(120) == 0
        pid = int((tmp_path / "pid.0").read_text())
        assert read_stat(pid) is not None
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


def test_the_upload_of_a_rank_that_ended_before_the_others_is_not_touched_meanwhile(tmp_path: Path) -> None:
    program = UPLOADING + "\nif RANK == 1:\n    await_release('end')\n"
    with running(tmp_path, program, nproc=2, arguments=["family"], store=False) as job:
        job.hear("ready", 2)
        job.release("upload")
        until(lambda: (tmp_path / "uploaded.0").exists() and (tmp_path / "uploaded.1").exists(), "both are uploaded")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(tmp_path: Path, signum: signal.Signals) -> None:
    with running(tmp_path, UPLOADING, arguments=["session"], store=False) as job:
        until(lambda: "waiting for 1 process of rank 0: " in job.err, "it is waited for")
        job.send(signum)
        assert job.wait() == 0
        assert f"{signum.name}: processes that the ranks left behind are not waited for" in job.err
        assert "ending 1 process of rank 0: " in job.err
        assert not (tmp_path / "uploaded.0").exists()


def test_what_works_for_longer_than_it_may_is_ended_and_named(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, "--leftovers-timeout", "1", "--shutdown-timeout", "1", store=False) as job:
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert "which had not ended in time" in job.err


IDLE = """
from rank import *
if os.fork() == 0:
    if "session" in sys.argv:
        os.setsid()
    tell("idle")
    stay()
await_release("end")
"""


@pytest.mark.parametrize("where", ["family", "session"])
def test_what_does_nothing_is_ended_after_the_shutdown_timeout_and_named(tmp_path: Path, where: str) -> None:
    with running(tmp_path, IDLE, "--shutdown-timeout", "1", arguments=[where], store=False) as job:
        (idle,) = job.hear("idle")
        job.release("end")
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert f"(pid {idle.pid}), idle for 1 s" in job.err


def test_an_idle_process_beside_one_that_works_is_ended_and_the_other_is_not(tmp_path: Path) -> None:
    program = UPLOADING + IDLE.replace("from rank import *", "")
    with running(tmp_path, program, "--shutdown-timeout", "1", arguments=["session"], store=False) as job:
        (idle,) = job.hear("idle")
        job.release("end")
        until(lambda: f"(pid {idle.pid}), idle for 1 s" in job.err, "the idle one is ended")
        until(lambda: read_stat(idle.pid) is None, "it is gone")
        assert read_stat(int((tmp_path / "pid.0").read_text())) is not None
        job.release("upload")
        assert job.wait() == 0
        assert (tmp_path / "uploaded.0").exists()


def test_with_leftovers_end_nothing_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, "--leftovers", "end", arguments=["session"], store=False) as job:
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert "waiting" not in job.err
        assert not (tmp_path / "uploaded.0").exists()


def test_with_leftovers_leave_they_live_on(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, "--leftovers", "leave", arguments=["session"], sweeps=False, store=False) as job:
        assert job.wait() == 0
        assert job.err == ""
        assert read_stat(int((tmp_path / "pid.0").read_text())) is not None
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


TALKING = """
import subprocess
from rank import *
work = '''
import os, sys, time
folder, rank = sys.argv[1:3]
while not os.path.exists(folder + "/release.upload"):
    time.sleep(0.01)
for number in range(3):
    print("line", number, "of rank", rank, flush=True)
    print("error", number, "of rank", rank, file=sys.stderr, flush=True)
open(f"{folder}/uploaded.{rank}", "w").write("whole")
'''
subprocess.Popen([sys.executable, "-c", work, FOLDER, str(RANK)], start_new_session=True, stdin=subprocess.DEVNULL)
tell("ready")
"""


@pytest.mark.parametrize("options", [(), ("--run-dir", "none"), ("-r", "3")], ids=["files", "no files", "redirected"])
def test_with_leftovers_leave_they_may_write_as_before(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As under torchrun, whose ranks have the console itself. They were killed by SIGPIPE."""
    with running(tmp_path, TALKING, "--leftovers", "leave", *options, nproc=2, sweeps=False, store=False) as job:
        assert job.wait() == 0
        job.release("upload")
        until(lambda: all((tmp_path / f"uploaded.{rank}").exists() for rank in (0, 1)), "they have worked on")
        if options != ("-r", "3"):
            until(lambda: job.out.count("line 2 of rank") == 2, "the last line is there")
            until(lambda: job.err.count("error 2 of rank") == 2, "the last line of stderr is there")
        until(lambda: not job.left(), "nothing of it is left")


@pytest.mark.parametrize("name", ["_left_pipes", "_copy_left_output"])
def test_without_a_process_for_their_output_they_are_left_all_the_same(tmp_path: Path, name: str) -> None:
    """What saferun adds to it is absent, with one line."""
    broken = (
        "from saferun.launch.rank_actions import RankActions as owner\n"
        "    def fail(*_): raise RuntimeError('planted')\n"
        f"    owner.{name} = fail"
    )
    environ = customized(tmp_path, in_saferun(broken))
    with running(
        tmp_path, UPLOADING, "--leftovers", "leave", arguments=["session"], environ=environ, sweeps=False, store=False
    ) as job:
        assert job.wait() == 0
        assert job.err.count("cannot keep the output of what is left running: RuntimeError: planted") == 1
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


@pytest.mark.parametrize("leftovers", ["wait", "leave"])
def test_after_a_failure_they_are_ended_and_that_is_said(tmp_path: Path, leftovers: str) -> None:
    """They would hold the GPUs' memory, ports and files of the next attempt."""
    program = UPLOADING.replace('tell("ready")', "sys.exit(ATTEMPT == 0)")
    with running(tmp_path, program, "--leftovers", leftovers, "--max-restarts", "1", sweeps=False, store=False) as job:
        until(lambda: "ending 1 process of rank 0: " in job.err, "it is ended")
        job.release("upload")
        assert job.wait() == 0


def test_helpers_that_end_by_themselves_are_not_talked_about(tmp_path: Path) -> None:
    """The resource tracker of multiprocessing notices that its process is gone, and ends."""
    program = """
import multiprocessing.shared_memory
from rank import *
segment = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
segment.close()
segment.unlink()
"""
    with running(tmp_path, program, nproc=2, store=False) as job:
        assert job.wait() == 0
        assert job.err == ""


# ------------------------------------------------------------------------------------------------ what is not ours


def test_as_the_first_process_of_a_container_it_leaves_foreign_processes_alone(tmp_path: Path) -> None:
    """What ``docker exec`` left there is handed to it when its shell ends; a restart may not end that."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    # Its parent is a process from before, which waits until ranks run and then ends: the orphan goes to pid 1.
    foreign = """
        while ! test -e "$LAUNCHING_FOLDER/release.detach"; do sleep 0.01; done
        env -u LAUNCHING_MARK setsid sh -c 'echo $$ >"$LAUNCHING_FOLDER/foreign"
            while ! test -e "$LAUNCHING_FOLDER/release.foreign"; do sleep 0.02; done' &
    """
    inside = ["sh", "-c", f'({foreign}) & exec "$@"', "sh"]
    before = ["unshare", *user, "--pid", "--fork", "--mount-proc", *inside]
    program = """
from rank import *
if ATTEMPT == 0:
    tell("ready")
    await_release("fail")
    sys.exit(1)
tell("again")
path = FOLDER + "/foreign"
pid = int(open(path).read())
parent = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
tell(f"foreign is there, child of {parent}")
await_release("end")
"""
    try:
        with running(tmp_path, program, "--max-restarts", "1", before=before, sweeps=False, store=False) as job:
            until(lambda: job.said("ready"), "the rank runs")
            job.release("detach")
            until(lambda: (tmp_path / "foreign").exists() and (tmp_path / "foreign").read_text(), "it detached itself")
            job.release("fail")
            until(lambda: job.said("again"), "the second attempt runs")
            until(lambda: job.said("foreign is there, child of 1"), "the foreign process lives")
            job.release("end")
            assert job.wait() == 0
            assert "ending" not in job.err
    finally:
        (tmp_path / "release.foreign").touch()


def test_a_daemon_that_a_sidecar_starts_later_survives_a_restart_and_the_end(tmp_path: Path) -> None:
    """An entry point: ``( sidecar ) & exec saferun``; the sidecar starts a daemon with setsid while ranks train."""
    sidecar = """
        while ! test -e "$LAUNCHING_FOLDER/release.detach"; do sleep 0.01; done
        setsid sleep 600 &
        echo $! >"$LAUNCHING_FOLDER/daemon"
    """
    before = ["sh", "-c", f'({sidecar}) & exec "$@"', "sh"]
    program = """
from rank import *
tell(f"attempt {ATTEMPT}")
await_release(f"end{ATTEMPT}")
sys.exit(ATTEMPT == 0)
"""
    with running(tmp_path, program, "--max-restarts", "1", before=before, store=False) as job:
        job.hear("attempt 0")
        job.release("detach")
        path = tmp_path / "daemon"
        daemon = int(until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text(), "detached"))
        job.spare(daemon)
        stat = Path(f"/proc/{daemon}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[1] == str(job.process.pid), "it is saferun's child")
        until(lambda: os.getsid(daemon) == daemon, "it has a session of its own")
        try:
            job.release("end0")
            job.hear("attempt 1")
            assert read_stat(daemon) is not None
            job.release("end1")
            assert job.wait() == 0
            assert read_stat(daemon) is not None
            assert "ending" not in job.err
        finally:
            kill(daemon, signal.SIGKILL)


# --------------------------------------------------------------------------------------------- environments overwritten

# What setproctitle does: the memory of the environment is used for the title.
OVERWRITTEN = """
import ctypes
from rank import *

def overwrite_environ():
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    assert not open("/proc/self/environ", "rb").read().strip(b"\\0")

if os.fork() == 0:
    overwrite_environ()
    ignore(signal.SIGTERM)
    tell("nameless")
    stay()
await_release("end")
"""

STANDS_STILL_ONCE_RANKS_ARE_FORKED = """import os, signal, saferun.launch.rank_group as ranks
    class Still(ranks.RankGroup):
        def start(self):
            started = super().start()
            os.kill(os.getpid(), signal.SIGSTOP)
            return started
    ranks.RankGroup = Still"""


def test_a_killed_supervisor_leaves_no_child_that_overwrote_its_environment(tmp_path: Path) -> None:
    """vLLM, Ray and others set their workers' titles; such a worker would hold its GPU."""
    with running(tmp_path, OVERWRITTEN, nproc=2, store=False) as job:
        nameless = job.hear("nameless", 2)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: all(read_stat(said.pid) is None for said in nameless), "they are gone")
        job.assert_nothing_left(DEADLINE_S)


def test_a_supervisor_killed_before_it_knows_that_its_ranks_run_leaves_none_of_their_children(tmp_path: Path) -> None:
    """Whose ranks these are is told before any of them is its program: on a busy machine they may be ahead."""
    environ = customized(tmp_path, in_saferun(STANDS_STILL_ONCE_RANKS_ARE_FORKED))
    with running(tmp_path, OVERWRITTEN, nproc=2, environ=environ, store=False) as job:
        nameless = job.hear("nameless", 2)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: all(read_stat(said.pid) is None for said in nameless), "they are gone")
        job.assert_nothing_left(DEADLINE_S)


def test_an_overwritten_environment_does_not_pass_for_a_foreign_process_at_the_end(tmp_path: Path) -> None:
    with running(tmp_path, OVERWRITTEN, "--shutdown-timeout", "1", store=False) as job:
        (nameless,) = job.hear("nameless")
        job.release("end")
        assert job.wait() == 0
        assert f"(pid {nameless.pid})" in job.err


# -------------------------------------------------------------------------------------------------- the end of the run

BROKEN = """
import sys
import saferun.launch.host_launch
from saferun.cli.main import main

name = sys.argv.pop(1)
target, _, method = name.rpartition(".")
module, _, target = target.rpartition(":")
owner = getattr(__import__(module, fromlist=["x"]), target)
real = getattr(owner, method)

def fail(*arguments):
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_end":
            raise RuntimeError("injected")
        frame = frame.f_back
    return real(*arguments)

setattr(owner, method, fail)
sys.exit(main())
"""


@pytest.mark.parametrize(
    "step",
    slow_but(
        [
            "saferun.launch.rank_actions:RankActions.close",
            "saferun.launch.console_part:ConsolePart.drain",
            "saferun.launch.investigation:Investigation.close",
            "saferun.cluster.solo_job:SoloJob.close",
            "saferun.launch.orphaned_segments:OrphanedSegments.close",
            "saferun.launch.orphans:Orphans.close",
            "saferun.linux.poller:Poller.close",
        ],
        *("saferun.launch.console_part:ConsolePart.drain", "saferun.launch.orphans:Orphans.close"),
        "saferun.linux.poller:Poller.close",
    ),
)
def test_each_step_of_the_end_may_fail_alone(tmp_path: Path, step: str) -> None:
    """One that fails keeps no other from being taken, and the reaper ends what is left."""
    launcher = [sys.executable, "-c", BROKEN, step]
    program = IDLE.replace('tell("idle")', 'tell("daemon")')
    with running(
        tmp_path, program, "--leftovers", "end", launcher=launcher, arguments=["session"], sweeps=False, store=False
    ) as job:
        job.hear("daemon")
        job.release("end")
        job.wait()
        assert "Traceback" not in job.err
        job.assert_nothing_left(DEADLINE_S)
