"""Work that hardly shows is work, and what only looks like it is none: ranks without torch, and a watch over them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saferun.captures import inspection
from saferun.linux import sock_diag
from saferun.watchdog import monitor
from tests.process.launching import DEADLINE_S, running, until, without
from tests.process.quiet_jobs import Together, watched_together
from tests.process.quiet_servers import CALL, quiet_servers
from tests.process.quiet_shapes import PLAIN_HANGS, PLAIN_WORK
from tests.process.watch_jobs import SLEEPS, Job

TIMEOUT_S = 4.0
TIMEOUTS = 2.6


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    with watched_together(tmp_path_factory, {**PLAIN_WORK, **PLAIN_HANGS}, TIMEOUT_S) as jobs:
        jobs.run(TIMEOUTS)
        jobs.until_reported(*PLAIN_HANGS)
    # What was told of them is all that is asked: they do not use processors while other tests run.
    return jobs


@pytest.mark.parametrize("name", PLAIN_WORK)
def test_bytes_from_outside_and_threads_at_work_are_progress(together: Together, name: str) -> None:
    """The main thread shows nothing of it."""
    assert together.jobs[name].verdicts == []


@pytest.mark.parametrize("name", PLAIN_HANGS)
def test_what_goes_on_in_a_hang_does_not_hide_it(together: Together, name: str) -> None:
    """Heartbeats, keep-alives and questions for work go on whether a rank works or hangs."""
    assert {(verdict.kind, verdict.certain) for verdict in together.jobs[name].verdicts} == {("quiescent", True)}


def test_ranks_that_talk_to_each_other_make_no_progress(tmp_path: Path) -> None:
    """That is what those do that wait for each other."""
    serves = """
listener = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1] + ".part", "w").write(str(listener.getsockname()[1]))
os.rename(sys.argv[1] + ".part", sys.argv[1])
def serve():
    connection, _ = listener.accept()
    while True:
        connection.sendall(bytes(100))
        time.sleep(0.1)
in_thread(serve)
time.sleep(1000)
"""
    reads = """
path = sys.argv[1].replace("fifo1", "fifo0")
while not os.path.exists(path): time.sleep(0.01)
connection = socket.create_connection(("127.0.0.1", int(open(path).read())))
def read():
    while True: connection.recv(1 << 16)
in_thread(read)
time.sleep(1000)
"""
    with contextlib.closing(Job(tmp_path, CALL + serves, CALL + reads, timeout_s=TIMEOUT_S)) as job:
        job.begin()
        assert job.until_told()[:2] == ("quiescent", (10, 11))


def test_what_the_store_sends_is_no_progress(tmp_path: Path) -> None:
    """Torch's watchdogs ask it once a second."""
    with quiet_servers(tmp_path) as servers:
        job = Job(
            tmp_path,
            CALL + PLAIN_WORK["downloads 1 kB/s"],
            SLEEPS,
            timeout_s=TIMEOUT_S,
            environ=servers.environ,
            store_port=servers.port,
        )
        with contextlib.closing(job):
            job.begin()
            assert job.until_told().certain


def test_without_socket_diagnosis_wake_ups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seccomp may deny it. A thread that data wakes up all the time is at work; one that asks now and then is not."""
    monkeypatch.setattr(sock_diag, "_NETLINK_SOCK_DIAG", 31)  # such a protocol there is not
    programs = {name: PLAIN_WORK[name] for name in ("downloads 1 kB/s", "downloads 1 MB/s through a Unix socket")}
    hangs = "asks for work every two seconds"
    with watched_together(tmp_path, {**programs, hangs: PLAIN_HANGS[hangs]}, TIMEOUT_S) as jobs:
        jobs.run(TIMEOUTS)
        jobs.until_reported(hangs)
        assert [name for name, job in jobs.jobs.items() if job.verdicts] == [hangs]


def _never(_value: object) -> bytes:
    time.sleep(1000)
    return b""


def _fails(_value: object) -> bytes:
    raise PermissionError


def _takes_the_examiner_with_it(_value: object) -> bytes:
    os.kill(os.getppid(), signal.SIGKILL)
    return _never(_value)


@pytest.mark.parametrize(
    "look",
    [
        _never,
        *(
            pytest.param(look, marks=pytest.mark.slow)
            for look in (_fails, lambda _value: b"{", _takes_the_examiner_with_it)
        ),
    ],
    ids=["hangs", "fails", "answers nonsense", "the examiner dies"],
)
def test_a_look_that_fails_costs_its_evidence_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[object], bytes]
) -> None:
    """A hang is found as before, and a job at work is none."""
    monkeypatch.setattr(inspection, "inspection_json", look)
    monkeypatch.setattr(monitor, "_INSPECTION_DEADLINE_S", 0.5)
    works = "while True:\n    time.sleep(0.5)\n    burn(0.02)\n"
    (tmp_path / "works").mkdir()
    with (
        contextlib.closing(Job(tmp_path, SLEEPS, SLEEPS)) as hangs,
        contextlib.closing(Job(tmp_path / "works", works, SLEEPS, shared=hangs)) as healthy,
    ):
        hangs.begin()
        healthy.begin()
        give_up_at = time.monotonic() + DEADLINE_S
        while not hangs.verdicts:
            assert time.monotonic() < give_up_at
            hangs.turn()
            healthy.turn(wait_s=0.0)
        assert hangs.verdicts[0][:2] == ("quiescent", (10, 11))
        assert hangs.verdicts[0].certain
        assert healthy.verdicts == []


def test_a_rank_whose_descriptors_cannot_be_read_is_judged_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks that are not dumpable not even the I/O can be read: the diagnosis takes the certainty back."""
    monkeypatch.setattr(inspection, "list_fds", lambda *_: [])
    with contextlib.closing(Job(tmp_path, SLEEPS, SLEEPS)) as job:
        job.begin()
        assert job.until_told().certain


def test_a_rank_at_work_that_may_not_be_read_is_not_stopped(tmp_path: Path) -> None:
    """It is not dumpable (Python with capabilities of its own), saferun is not root's: what it writes is not seen."""
    program = """
from rank import *
import ctypes, select
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
tell("ready")
silent, _ = os.pipe()
while not os.path.exists(f"{FOLDER}/release.end"):
    with open(f"written{RANK}", "wb") as file:
        file.write(bytes(70000))
    select.select([silent], [], [], 0.3)
"""
    options = ("--env-profile", "minimal", "--hang-timeout", "1", "--on-hang", "stop", "--shutdown-timeout", "2")
    before = without([19])  # CAP_SYS_PTRACE
    with running(tmp_path, program, *options, nproc=2, before=before, store=False) as job:
        job.hear("ready", 2)
        until(lambda: "saferun: the job may hang" in job.err or "hangs" in job.err, "it looks like a hang")
        job.release("end")
        assert job.wait() == 0, job.err
        report = " ".join((job.run_dir / "report.txt").read_text(encoding="utf-8").split())
        assert "ranks 0-1 may be at work: their I/O and system calls cannot be read in /proc" in report


@pytest.mark.slow
def test_a_job_that_downloads_goes_on_until_the_download_stands_still(tmp_path: Path) -> None:
    """From the command to the verdict: only then nothing moves any more."""
    program = f"""
from rank import *
{CALL}
if RANK == 0:
    connection = call("drip 100 0.1")
    tell("downloads")
    while connection.recv(1 << 16): pass
stay()
"""
    options = ("--env-profile", "minimal", "--hang-timeout", "3", "--on-hang", "stop", "--shutdown-timeout", "2")
    with (
        quiet_servers(tmp_path) as servers,
        running(tmp_path / "run", program, *options, nproc=2, environ=servers.environ, store=False) as job,
    ):
        job.hear("downloads", 1)
        time.sleep(7)
        assert "hangs" not in job.err
        servers.close()
        assert job.wait() != 0
        assert "saferun: the job hangs" in job.err
        assert "stopping all ranks (--on-hang stop)" in job.err
