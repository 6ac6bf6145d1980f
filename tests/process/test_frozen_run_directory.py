"""The file system under the run directory stops answering. The job goes on, and so does all that saferun says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.breadth import slow_but
from tests.process.frozen import FileSystem, frozen_disk, mirror, needs_mounts
from tests.process.launching import HELPERS_END_S, Job, kill, running, state_of, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_mounts

# Each rank says a line whenever the test lets it, and all it has said when it ends.
TALK = """
from rank import *
tell("ready")
print("first", flush=True)
await_release("talk")
for number in range(2000):
    print(number, "x" * 90, flush=True)
tell("talked")
await_release("end")
print("last", flush=True)
sys.exit(RANK == 0 and "fail" in sys.argv)
"""
# NCCL opens its log in the first collective, and would wait there with the disk.
HAS_LOG = "import os; tell('log' if 'NCCL_DEBUG_FILE' in os.environ else 'no log')\n"
LINES = [f"{number} {'x' * 90}" for number in range(2000)]


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Iterator[FileSystem]:
    with frozen_disk(tmp_path) as disk:
        yield disk


@contextlib.contextmanager
def launched(tmp_path: Path, disk: FileSystem, program: str, *options: str, **more: Any) -> Iterator[Job]:
    """A launch whose run directory is on the disk, which is thawed before what is left of the launch is ended."""
    run = ("--run-dir", f"{disk.path}/run", *options)
    with running(tmp_path / "t", program, *run, before=disk.before(), store=False, **more) as job:
        try:
            yield job
        finally:
            disk.thaw()


def writer_of(job: Job) -> int:
    """The pid of the process that writes the files."""
    return until(lambda: job.called("sr-writer"), "the writer is there")[0]


def freeze(job: Job, disk: FileSystem) -> None:
    """Freeze the disk while a launch runs whose files are there, and wait until it is known."""
    path = disk.inside(disk.path / "run")
    until(
        lambda: all(b"first" in file.read_bytes() for file in found_files(path)) and found_files(path),
        "files are there",
    )
    disk.freeze()
    job.release("talk")
    until(lambda: "does not answer" in job.err, "it is said")


def found_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("*/attempt_0/rank_*/stdout.log"))


def rank_files(run_dir: Path) -> list[Path]:
    """Those of both ranks."""
    files = found_files(run_dir)
    assert len(files) == 2
    return files


def test_a_job_goes_on_without_its_files_which_catch_up(tmp_path: Path, disk: FileSystem) -> None:
    with launched(tmp_path, disk, TALK, nproc=2) as job:
        job.hear("ready", 2)
        freeze(job, disk)
        assert "does not answer" in job.err
        assert f" at {disk.path} " in job.err
        job.hear("talked", 2)
        until(lambda: job.out.count("x" * 90) == 4000, "the console has everything")
        assert state_of(writer_of(job)) == "D"
        disk.thaw()
        until(lambda: "answers again" in job.err, "that is said, too")
        job.release("end")
        assert job.wait() == 0
        assert "missing" not in job.err
        for file in rank_files(disk.inside(disk.path / "run")):
            assert file.read_text().splitlines() == ["first", *LINES, "last"]


@pytest.mark.slow
def test_what_finds_no_room_is_counted_and_noted(tmp_path: Path, disk: FileSystem) -> None:
    """One rank says far more than what is kept in memory; the other's file is whole."""
    program = TALK.replace("range(2000)", "range(300000 if RANK == 0 else 2000)")
    with launched(tmp_path, disk, program, nproc=2) as job:
        job.hear("ready", 2)
        freeze(job, disk)
        job.hear("talked", 2)
        until(lambda: job.out.count("x") == 302000 * 90, "the console has everything")
        disk.thaw()
        until(lambda: "answers again" in job.err, "that is said")
        assert "bytes of 1 stream are missing" in job.err
        job.release("end")
        assert job.wait() == 0
        loud, quiet = (file.read_text() for file in rank_files(disk.inside(disk.path / "run")))
        assert quiet.splitlines() == ["first", *LINES, "last"]
        whole = "".join(["first\n", *(f"{number} {'x' * 90}\n" for number in range(300000)), "last\n"])
        assert_whole_but_for_notes(loud, whole, "the file system did not answer")


def test_ranks_do_not_wait_for_a_disk_that_is_far_too_slow(tmp_path: Path) -> None:
    """It takes 200 KiB a second, and one rank says 40 MB; the other's file is whole."""
    program = TALK.replace("range(2000)", "range(400000 if RANK == 0 else 2000)")
    (tmp_path / "source").mkdir()
    with mirror(tmp_path, tmp_path / "source") as disk, launched(tmp_path, disk, program, nproc=2) as job:
        job.hear("ready", 2)
        path = disk.inside(disk.path / "run")
        until(
            lambda: len(found_files(path)) == 2 and all(file.read_bytes() for file in found_files(path)),
            "files are there",
        )
        disk.slow_down()
        job.release("talk")
        job.hear("talked", 2)
        until(lambda: job.out.count("x") == 402000 * 90, "the console has everything")
        assert f" at {disk.path} takes less than 1 MiB a second" in job.err
        disk.thaw()
        until(lambda: "keeps up again" in job.err, "that is said")
        assert "bytes of 1 stream are missing" in job.err
        job.release("end")
        assert job.wait() == 0
        loud, quiet = (file.read_text() for file in rank_files(path))
        assert quiet.splitlines() == ["first", *LINES, "last"]
        whole = "".join(["first\n", *(f"{number} {'x' * 90}\n" for number in range(400000)), "last\n"])
        assert_whole_but_for_notes(loud, whole, "the file system was too slow")


@pytest.mark.parametrize("options", [("-r", "3"), ("-t", "3")])
@pytest.mark.slow
def test_ranks_wait_for_log_files_on_a_slow_disk(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As under torchrun, which has no other copy: nothing is missing in them."""
    program = TALK.replace("range(2000)", "range(200000 if RANK == 0 else 2000)")
    (tmp_path / "source").mkdir()
    with mirror(tmp_path, tmp_path / "source") as disk:
        logs = disk.inside(disk.path / "logs")
        with launched(tmp_path, disk, program, "--log-dir", f"{disk.path}/logs", *options, nproc=2) as job:
            job.hear("ready", 2)
            until(lambda: len(list(logs.rglob("stdout.log"))) == 2, "files are there")
            disk.slow_down()
            job.release("talk")
            until(lambda: "takes less than 1 MiB a second" in job.err, "it is said")
            (loud,) = (path for path in logs.rglob("stdout.log") if path.parent.name == "0")
            written = loud.stat().st_size
            until(lambda: loud.stat().st_size > written + (1 << 20), "more is written, for some seconds")
            disk.thaw()
            job.hear("talked", 2)
            job.release("end")
            assert job.wait() == 0
        assert loud.read_text() == "".join(
            ["first\n", *(f"{number} {'x' * 90}\n" for number in range(200000)), "last\n"]
        )


def assert_whole_but_for_notes(found: str, whole: str, reason: str) -> None:
    """Assert that a file has all but the bytes that it says are missing."""
    pieces = re.split(rf"\[saferun: (\d+) bytes of this stream are missing here: {reason} for \d+ s\]\n", found)
    assert len(pieces) > 1
    ends = {0}
    for piece, missing in zip(pieces[::2], [*pieces[1::2], "0"], strict=True):
        # The line feed before a note may be the note's own, also where the next byte that is missing is one.
        ways = {piece, piece.removesuffix("\n")} if missing != "0" else {piece}
        ends = {at + len(own) + int(missing) for at in ends for own in ways if whole.startswith(own, at)}
        assert ends, piece[:100]
    assert len(whole) in ends


@pytest.mark.parametrize("signum", slow_but([signal.SIGTERM, signal.SIGINT], "SIGTERM"))
def test_a_signal_ends_the_launch(tmp_path: Path, disk: FileSystem, signum: signal.Signals) -> None:
    """What is not written is written by the writer when it wakes."""
    with launched(tmp_path, disk, TALK, nproc=2, sweeps=False) as job:
        job.hear("ready", 2)
        freeze(job, disk)
        job.hear("talked", 2)
        writer = writer_of(job)
        job.send(signum)
        job.wait()
        assert re.search(r"\d+ bytes are not written yet", job.err)
        until(lambda: job.processes() == [writer], "all others have ended", timeout_s=HELPERS_END_S)
        disk.thaw()
        job.assert_nothing_left(timeout_s=30)
        for file in rank_files(disk.inside(disk.path / "run")):
            assert file.read_text().splitlines() == ["first", *LINES]


@pytest.mark.slow
def test_a_failure_is_told(tmp_path: Path, disk: FileSystem) -> None:
    """The verdict stands on the console; report and events follow."""
    with launched(tmp_path, disk, TALK, nproc=2, arguments=["fail"], sweeps=False) as job:
        job.hear("ready", 2)
        freeze(job, disk)
        job.hear("talked", 2)
        job.release("end")
        assert job.wait() == 1
        assert "failed first" in job.err
        disk.thaw()
        job.assert_nothing_left(timeout_s=30)
        run = disk.inside(disk.path / "run")
        assert "rank 0" in (run / "report.txt").read_text()


@pytest.mark.slow
def test_a_hang_is_told(tmp_path: Path, disk: FileSystem) -> None:
    """With the stacks, whose files are there once the disk answers again."""
    program = TALK.replace('tell("talked")', 'tell("talked"); stay()')
    options = (
        "--hang-timeout",
        "2",
        "--external-wait-timeout",
        "0",
    )
    with launched(tmp_path, disk, program, *options, nproc=2, sweeps=False) as job:
        job.hear("ready", 2)
        freeze(job, disk)
        job.hear("talked", 2)
        until(lambda: "the job hangs" in job.err, "the hang is told", timeout_s=60)
        # Where the ranks are: what was seen of them is told, though no file of it can be written.
        until(lambda: "rank.py:" in job.err, "the stacks are told", timeout_s=60)
        run = disk.inside(disk.path / "run")
        assert not list(run.glob("*/attempt_0/hang_1/*"))
        job.send(signal.SIGINT)
        job.wait()
        assert "found no room" not in job.err
        disk.thaw()
        job.assert_nothing_left(timeout_s=30)
        (hang,) = run.glob("*/attempt_0/hang_1")
        for rank in (0, 1):
            told = json.loads((hang / f"rank_{rank}.py_spy.json").read_text())
            assert any("stay" in json.dumps(thread) for thread in told), told
            assert json.loads((hang / f"rank_{rank}.process_state.json").read_text())
        assert not [path for path in hang.iterdir() if path.name == "missing.txt"]


def test_a_crash_is_told(tmp_path: Path, disk: FileSystem) -> None:
    """What is read of its core is told now, and is in its file when the disk answers again."""
    crash = 'tell("talked"); RANK == 0 and os.kill(os.getpid(), signal.SIGSEGV); stay()'
    program = TALK.replace('tell("talked")', crash)
    with launched(tmp_path, disk, program, "--cores", "backtrace", nproc=2, sweeps=False) as job:
        job.hear("ready", 2)
        freeze(job, disk)
        job.hear("talked")
        assert job.wait(60) == 1
        (verdict,) = [line for line in job.err.splitlines() if "failed first" in line]
        assert verdict.startswith("saferun: rank 0 ")
        assert "killed by SIGSEGV" in verdict
        disk.thaw()
        job.assert_nothing_left(timeout_s=30)
        run = disk.inside(disk.path / "run")
        assert "SIGSEGV" in (run / "report.txt").read_text()
        assert json.loads((run / "report.json").read_text())["incidents"]
        (stacks,) = run.glob("*/attempt_0/failure_1/rank_1.py_spy.json")
        assert json.loads(stacks.read_text())
        if "reading the core" in job.err:
            (core,) = run.glob("*/attempt_0/cores_2/rank_0.core.txt")
            assert "SIGSEGV" in core.read_text()


@pytest.mark.slow
def test_files_of_a_hang_are_there_as_soon_as_the_disk_answers(tmp_path: Path, disk: FileSystem) -> None:
    """Not only at the end of the job, which goes on."""
    program = TALK.replace('tell("talked")', 'tell("talked"); await_release("more")')
    options = ("--hang-timeout", "2", "--external-wait-timeout", "0")
    with launched(tmp_path, disk, program, *options, nproc=1) as job:
        job.hear("ready")
        freeze(job, disk)
        job.hear("talked")
        until(lambda: "the job hangs" in job.err, "the hang is told", timeout_s=60)
        disk.thaw()
        run = disk.inside(disk.path / "run")
        until(lambda: list(run.glob("*/attempt_0/hang_1/rank_0.py_spy.json")), "the stacks are in their file")
        job.release("more")
        job.release("end")
        assert job.wait() == 0


def test_a_restart_does_not_wait_for_the_disk(tmp_path: Path, disk: FileSystem) -> None:
    """The second attempt's directories cannot be made now, and are made later."""
    program = TALK.replace('await_release("talk")', 'ATTEMPT or await_release("talk")').replace(
        "RANK == 0 and", "not ATTEMPT and"
    )
    options = (
        "--max-restarts",
        "1",
    )
    program = program.replace('tell("ready")', HAS_LOG + 'tell("ready")')
    with launched(tmp_path, disk, program, *options, nproc=1, arguments=["fail"]) as job:
        job.hear("log")
        job.hear("ready")
        freeze(job, disk)
        job.hear("talked")
        job.release("end")
        job.hear("no log")
        assert job.hear("ready")[0].attempt == 1
        job.hear("talked")
        disk.thaw()
        assert job.wait() == 0
        (file,) = disk.inside(disk.path / "run").glob("*/attempt_1/rank_0/stdout.log")
        assert file.read_text().splitlines() == ["first", *LINES, "last"]


def test_a_disk_that_is_frozen_from_the_start_keeps_no_job_from_running(tmp_path: Path, disk: FileSystem) -> None:
    disk.freeze()
    options = (
        "--preflight",
        "off",
    )
    program = TALK.replace('tell("ready")', HAS_LOG + 'tell("ready")')
    with launched(tmp_path, disk, program, *options, nproc=2) as job:
        job.hear("no log", 2)
        job.hear("ready", 2)
        job.release("talk")
        job.hear("talked", 2)
        disk.thaw()
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("x" * 90) == 4000
        for file in rank_files(disk.inside(disk.path / "run")):
            assert file.read_text().splitlines() == ["first", *LINES, "last"]


def test_a_writer_that_is_killed_is_replaced_once_and_never_ends_a_job(tmp_path: Path) -> None:
    with running(tmp_path, TALK, nproc=2, store=False) as job:
        job.hear("ready", 2)
        until(lambda: len(found_files(job.run_dir)) == 2, "files are there")
        first = writer_of(job)
        kill(first, signal.SIGKILL)
        until(lambda: "is replaced" in job.err, "that is said")
        job.release("talk")
        job.hear("talked", 2)
        whole = "\n".join(["first", *LINES, ""])
        until(lambda: all(file.read_text() == whole for file in rank_files(job.run_dir)), "the other one goes on")
        kill(writer_of(job), signal.SIGKILL)
        until(lambda: "to the console only" in job.err, "that is said, too")
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("last") == 2
        assert len([line for line in job.err.splitlines() if line.startswith("saferun:")]) == 2
        assert os.path.exists(job.run_dir / "run.json")


def test_a_writer_that_cannot_be_forked_costs_the_files_alone(tmp_path: Path) -> None:
    """A host that is short of processes at that moment starts the job all the same, and says so in one line."""
    program = """
import errno, saferun.files.writer_client as writer
def none(*_arguments, **_options):
    raise OSError(errno.EAGAIN, "no process")
writer.Helper = none
from saferun.cli.main import main
main()
"""
    command = [sys.executable, "-c", program, "--no-python", "echo", "hello"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout
    assert "no process that writes files" in done.stderr
