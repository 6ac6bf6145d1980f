"""After any end of saferun no process and no file of the run is left, save those in its run directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from saferun.linux.procfs import read_environ_entry
from tests.breadth import slow_but
from tests.process.launching import (
    DEADLINE_S,
    END_AS_TOLD,
    HELPERS_END_S,
    STAY,
    kill,
    kill_reapers,
    read_stat,
    running,
    state_of,
    until,
)
from tests.process.reading import Pipe

# Every rank starts a family in all the ways that keep a process from ending with its parent.
FAMILY = """
import subprocess, sys
from rank import *

def start(word, *, setsid=False, twice=False, environ=None, deaf=False, stopped=False):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(read_end)
        if setsid:
            os.setsid()
        if twice and os.fork() > 0:
            os._exit(0)
        if deaf:
            ignore(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if environ is not None:
            source = "import os, signal, sys; os.write(int(sys.argv[1]), b'x'); signal.pause()"
            os.set_inheritable(write_end, True)
            tell(word)
            os.execve(sys.executable, [sys.executable, "-c", source, str(write_end)], environ)
        tell(word)
        os.write(write_end, b"x")
        os.close(write_end)
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        stay()
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)

start("child")
start("deaf child", deaf=True)
start("session", setsid=True)
start("daemon", setsid=True, twice=True)
start("orphan", twice=True)
start("deaf daemon", setsid=True, twice=True, deaf=True)
start("stopped daemon", setsid=True, twice=True, stopped=True)
if "changed" in sys.argv:
    start("orphan with another environment", twice=True, environ={"PATH": os.environ["PATH"]})
tell("ready")
await_release("end")
if sys.argv[1] == "fail" and RANK == 1:
    sys.exit(3)
if sys.argv[1] != "well":
    stay()
"""


# Otherwise those in sessions of their own are waited for, and left after a failure.
ENDED = ("--leftovers", "end")


@pytest.mark.parametrize("end", slow_but(["well", "fail", "SIGTERM", "SIGINT"], "fail"))
def test_no_family_of_a_rank_outlives_saferun(tmp_path: Path, end: str) -> None:
    with running(
        tmp_path, FAMILY, *ENDED, "--shutdown-timeout", "1", nproc=2, arguments=[end, "changed"], store=False
    ) as job:
        job.hear("ready", 2)
        if end.startswith("SIG"):
            job.send(getattr(signal, end))
        else:
            job.release("end")
        assert job.wait() == (0 if end == "well" else 1)
        job.assert_nothing_left(HELPERS_END_S)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT])
def test_no_family_of_a_rank_outlives_a_killed_supervisor(tmp_path: Path, signum: signal.Signals) -> None:
    """After the SIGKILL of torchrun every rank trains on. An unhandled signal ends saferun just so."""
    with running(tmp_path, FAMILY, nproc=2, arguments=["stay"]) as job:
        job.hear("ready", 2)
        until(job.coordinator, "the coordinator runs")
        assert job.reaper() is not None
        job.send(signum)
        assert job.wait() == -signum
        job.assert_nothing_left(timeout_s=DEADLINE_S)


def test_a_killed_supervisor_leaves_no_temporary_files(tmp_path: Path) -> None:
    with running(tmp_path, STAY, "--run-dir", "none", nproc=2, store=False) as job:
        job.hear("ready", 2)
        job.send(signal.SIGKILL)
        job.wait()
        job.assert_nothing_left(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("count", slow_but(range(1, 7), "1", "3", "5"))
def test_a_supervisor_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path, count: int) -> None:
    with running(tmp_path, STAY, nproc=4, sweeps=False, store=False) as job:
        until(lambda: len(job.processes()) >= count, f"there are {count} processes")
        job.send(signal.SIGKILL)
        job.wait()
        job.assert_nothing_left(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("count", slow_but(range(1, 7), "1", "3", "5"))
def test_sigterm_while_saferun_starts_leaves_nothing(tmp_path: Path, count: int) -> None:
    with running(tmp_path, STAY, nproc=4, sweeps=False, store=False) as job:
        until(lambda: len(job.processes()) >= count, f"there are {count} processes")
        job.send(signal.SIGTERM)
        exit_code = job.wait()
        assert exit_code in {1, -signal.SIGTERM}
        assert "Traceback" not in job.err
        # Before saferun can handle signals, SIGTERM ends it like any program, and its reaper sees that a moment later.
        job.assert_nothing_left(timeout_s=DEADLINE_S if exit_code < 0 else HELPERS_END_S)


def test_the_reaper_ends_although_nobody_reads_its_stderr(tmp_path: Path) -> None:
    """A scheduler that is going down reads no more, but has not closed the pipe."""
    with Pipe() as pipe, running(tmp_path, STAY, stderr=pipe.write_end, store=False) as job:
        job.hear("ready")
        os.set_blocking(pipe.write_end, False)
        fill(pipe.write_end)
        os.set_blocking(pipe.write_end, True)
        job.send(signal.SIGKILL)
        job.wait()
        job.assert_nothing_left(timeout_s=DEADLINE_S)


def fill(fd: int) -> None:
    """Write until a non-blocking pipe takes nothing more."""
    try:
        while True:
            os.write(fd, b"x" * 512)
    except BlockingIOError:
        pass


def test_a_killed_reaper_does_not_touch_the_job(tmp_path: Path) -> None:
    """Another one takes its place, and no end waits for it; one that is killed again and again is given up."""
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["0", "0"], store=False) as job:
        job.hear("ready", 2)
        assert kill_reapers(job) == 6
        until(lambda: "is not started any more" in job.err, "it is said")
        job.release("end")
        assert job.wait() == 0
        assert job.err.count("another one has taken its place") == 1


def test_another_reaper_knows_what_the_killed_one_knew(tmp_path: Path) -> None:
    """The sessions of the ranks, in which there are processes without the run's id, and the run's directories."""
    with running(tmp_path, FAMILY, nproc=2, arguments=["stay", "changed"]) as job:
        job.hear("ready", 2)
        until(job.coordinator, "the coordinator runs")
        assert kill_reapers(job, 1) == 1
        job.send(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        job.assert_nothing_left(timeout_s=DEADLINE_S)


def test_sigterm_to_every_process_at_once_leaves_nothing(tmp_path: Path) -> None:
    """Schedulers signal a whole cgroup: ranks, saferun, its coordinator and its reaper together."""
    with running(tmp_path, FAMILY, *ENDED, "--shutdown-timeout", "1", nproc=2, arguments=["stay"]) as job:
        job.hear("ready", 2)
        for pid in job.processes():
            kill(pid, signal.SIGTERM)
        assert job.wait() == 1


def test_sigkill_to_supervisor_and_ranks_at_once_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, FAMILY, nproc=2, arguments=["stay"], sweeps=False, store=False) as job:
        ranks = [said.pid for said in job.hear("ready", 2)]
        for pid in (job.process.pid, *ranks):
            kill(pid, signal.SIGKILL)
        job.wait()
        job.assert_nothing_left(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("end", slow_but(["well", "fail"], "fail"))
def test_as_the_first_process_of_a_container_nothing_outlives_it(tmp_path: Path, end: str) -> None:
    """An entry point: every orphan of the container is its child, and many signals do nothing to it."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    before = ["unshare", *user, "--pid", "--fork", "--mount-proc"]
    with running(
        tmp_path, FAMILY, *ENDED, "--shutdown-timeout", "1", nproc=2, arguments=[end], before=before, store=False
    ) as job:
        until(lambda: len(job.said("ready")) == 2, "both are ready")
        job.release("end")
        assert job.wait() == (0 if end == "well" else 1)


@pytest.mark.slow
def test_children_from_before_saferun_are_left_alone(tmp_path: Path) -> None:
    """A container's entry point starts a daemon, then becomes saferun by exec."""
    before = ["sh", "-c", 'sleep 600 & echo $! >"$LAUNCHING_FOLDER/daemon"; exec "$@"', "sh"]
    with running(
        tmp_path, FAMILY, *ENDED, "--shutdown-timeout", "1", nproc=2, arguments=["well"], before=before, store=False
    ) as job:
        job.hear("ready", 2)
        daemon = int((tmp_path / "daemon").read_text())
        job.spare(daemon)
        try:
            job.release("end")
            assert job.wait() == 0
            assert read_stat(daemon) is not None
        finally:
            kill(daemon, signal.SIGKILL)


@pytest.mark.slow
def test_a_family_with_another_environment_does_not_pass_for_children_from_before(tmp_path: Path) -> None:
    """They differ by their session: a rank begins one of its own, and nobody can enter another's.

    What comes from before is left alone here as well.
    """
    before = ["sh", "-c", 'sleep 600 & echo $! >"$LAUNCHING_FOLDER/daemon"; exec "$@"', "sh"]
    arguments = ["well", "changed"]
    with running(
        tmp_path, FAMILY, *ENDED, "--shutdown-timeout", "1", nproc=2, arguments=arguments, before=before, store=False
    ) as job:
        job.hear("ready", 2)
        daemon = int((tmp_path / "daemon").read_text())
        job.spare(daemon)
        try:
            job.release("end")
            assert job.wait() == 0
            assert read_stat(daemon) is not None
            job.assert_nothing_left()
        finally:
            kill(daemon, signal.SIGKILL)


def test_a_daemon_that_denies_its_origin_is_left_alone(tmp_path: Path) -> None:
    """Neither its environment nor its session tells whose it is: it may be anybody's, and torchrun leaves it too."""
    program = """
from rank import *
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        path = FOLDER + "/daemon"
        source = "import os, signal, sys; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); signal.pause()"
        os.execve(sys.executable, [sys.executable, "-c", source, path], {"PATH": os.environ["PATH"]})
    os._exit(0)
await_release("end")
"""
    with running(tmp_path, program) as job:
        path = tmp_path / "daemon"
        daemon = int(
            until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text(), "it is there")
        )
        try:
            job.release("end")
            assert job.wait() == 0
            assert job.err == ""
            assert read_stat(daemon) is not None
        finally:
            kill(daemon, signal.SIGKILL)


def test_orphans_of_children_from_before_saferun_are_left_alone(tmp_path: Path) -> None:
    """As before, where the daemon detaches itself while saferun runs already, as daemons do."""
    detach = """
        while ! test -e "$LAUNCHING_FOLDER/release.detach"; do sleep 0.01; done
        sleep 600 &
        echo $! >"$LAUNCHING_FOLDER/daemon"
    """
    before = ["sh", "-c", f'({detach}) & exec "$@"', "sh"]
    with running(tmp_path, END_AS_TOLD, nproc=1, arguments=["0"], before=before, store=False) as job:
        job.hear("ready")
        job.release("detach")
        path = tmp_path / "daemon"
        daemon = int(until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text(), "detached"))
        job.spare(daemon)
        parent = Path(f"/proc/{daemon}/stat")
        until(lambda: f") {state_of(daemon)} {job.process.pid} " in parent.read_text(), "it is saferun's child")
        try:
            job.release("end")
            assert job.wait() == 0
            assert read_stat(daemon) is not None
        finally:
            kill(daemon, signal.SIGKILL)


NESTING = """
import subprocess
from rank import *
if "SAFERUN_OUTER_RUNS" not in os.environ:
    inner = [sys.executable, "-m", "saferun", "--nproc-per-node", "2", "--run-dir", "none", "--shutdown-timeout", "1"]
    child = subprocess.Popen([*inner, *sys.argv[1:], sys.argv[0]])
    open(FOLDER + "/inner", "w").write(str(child.pid))
    tell("inner")
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.exit(child.wait() != 0)
if os.fork() == 0:
    os.setsid()
    tell("grandchild")
    stay()
tell("ready")
await_release("end")
"""


@pytest.mark.slow
def test_saferun_in_saferun_ends_as_one(tmp_path: Path) -> None:
    with running(tmp_path, NESTING, *ENDED, nproc=2, arguments=ENDED, store=False) as job:
        job.hear("ready", 4)
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize("signum", slow_but([signal.SIGTERM, signal.SIGINT, signal.SIGKILL], "SIGKILL", "SIGTERM"))
def test_saferun_in_saferun_dies_as_one(tmp_path: Path, signum: signal.Signals) -> None:
    """A training script that starts a launcher of its own (for an evaluation, a sweep) is common.

    What the inner one has left in sessions of their own, the outer one leaves as well, unless one of them is killed. At
    Ctrl-C the outer ranks end at once, and the inner one has 2 s, in which it may not have ended.
    """
    with running(tmp_path, NESTING, "--shutdown-timeout", "30", nproc=2, sweeps=False, store=False) as job:
        inner = {read_environ_entry(said.pid, "SAFERUN_RUN_ID") for said in job.hear("ready", 4)}
        assert len(inner) == 2
        grandchildren = job.hear("grandchild", 4)
        job.send(signum)
        assert job.wait() == (-signum if signum == signal.SIGKILL else 1)
        if signum == signal.SIGTERM:
            assert job.err.count("they are not ended") >= 2
            assert all(read_stat(said.pid) is not None for said in grandchildren)
        if signum != signal.SIGKILL:
            for said in grandchildren:
                kill(said.pid, signal.SIGKILL)
        until(lambda: not job.processes(), "all processes are gone")
        assert not [name for run_id in inner for name in Path("/dev/shm").glob(f"*{run_id}*")]


@pytest.mark.slow
def test_when_an_inner_saferun_is_killed_its_ranks_die_and_the_outer_one_reports(tmp_path: Path) -> None:
    with running(tmp_path, NESTING, nproc=1, sweeps=False, store=False) as job:
        job.hear("ready", 2)
        job.hear("inner")
        os.kill(int((tmp_path / "inner").read_text()), signal.SIGKILL)
        assert job.wait() == 1
        until(lambda: not job.processes(), "all processes are gone")
