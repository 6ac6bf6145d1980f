"""Readers of the output that are slow, stop reading, or are not there: the ranks and the job go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.process.launching import customized, in_saferun, is_in_write, read_stat, running, until
from tests.process.reading import Pipe, Reader

QUICK = "print('done')"


# ------------------------------------------------------------------------------------------------------- slow readers


def test_a_reader_that_stops_stalls_no_rank_and_is_told_what_it_missed(tmp_path: Path) -> None:
    program = """
from rank import *
tell("ready")
await_release("go")
for number in range(20_000):
    sys.stdout.write(f"{RANK} {number} {'x' * 1000}\\n")
sys.stdout.flush()
tell("written")
await_release("end")
print("the end")
"""
    with Pipe() as pipe:
        with running(tmp_path, program, nproc=2, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader(paused=True)
            job.hear("ready", 2)
            job.release("go")
            job.hear("written", 2)
            assert reader.so_far() == b""
            reader.go_on()
            until(lambda: b" lines skipped here" in reader.so_far(), "the note about skipped lines")
            job.release("end")
            assert job.wait() == 0
            for rank in range(2):
                kept = job.rank_file(rank, "stdout.log").splitlines()
                assert [int(line.split()[1]) for line in kept[:-1]] == list(range(20_000))
        lines = reader.all().decode().splitlines()
        skipped = [int(match[1]) for line in lines if (match := re.search(r": (\d+) lines skipped here; ", line))]
        assert sum(skipped) + len(lines) - len(skipped) == 2 * 20_001
        assert all(len(line.split(" ", 3)[3]) == 1000 for line in lines if "x" * 10 in line)
        assert sum(line.endswith("] the end") for line in lines) == 2


def test_a_burst_reaches_a_reader_that_reads(tmp_path: Path) -> None:
    """Through ``| tee``: more than may wait, at once from every rank, and nothing is skipped."""
    program = """
from rank import *
for number in range(12_000):
    sys.stdout.write(f"{number} {'x' * 1000}\\n")
"""
    with Pipe() as pipe:
        with running(tmp_path, program, nproc=2, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader()
            assert job.wait() == 0
        lines = reader.all().decode().splitlines()
        assert [line for line in lines if "skipped" in line] == []
        assert len(lines) == 2 * 12_000


def test_without_files_a_slow_reader_slows_the_ranks_and_misses_nothing(tmp_path: Path) -> None:
    program = """
from rank import *
tell("writing")
for number in range(20_000):
    sys.stdout.write(f"{number} {'x' * 1000}\\n")
"""
    with Pipe() as pipe:
        with running(tmp_path, program, "--run-dir", "none", nproc=2, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader(paused=True)
            ranks = job.hear("writing", 2)
            until(lambda: all(is_held_up(said.pid, job.process.pid) for said in ranks), "the ranks are held up")
            reader.go_on()
            assert job.wait() == 0
        lines = reader.all().decode().splitlines()
        assert len(lines) == 2 * 20_000
        assert not [line for line in lines if "skipped" in line]


@pytest.mark.parametrize("options", [(), ("--run-dir", "none")])
def test_a_caller_that_reads_when_saferun_has_ended_is_not_waited_for(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As of subprocess.Popen and wait: under torchrun these lines find room in its pipe, without prefixes."""
    program = """
from rank import *
for number in range(1100):
    sys.stdout.write(f"{number} {'x' * 20}\\n")
"""
    with Pipe() as pipe:
        with running(tmp_path, program, *options, nproc=2, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader(paused=True)
            assert job.wait() == 0
            reader.go_on()
        assert len(reader.all().decode().splitlines()) == 2 * 1100


def test_with_tee_a_reader_that_stops_stalls_no_rank_though_there_is_no_run_directory(tmp_path: Path) -> None:
    """Under torchrun such ranks write to the log file, and only the thread that copies it waits."""
    program = """
from rank import *
for number in range(20_000):
    sys.stdout.write(f"{number} {'x' * 1000}\\n")
sys.stdout.flush()
tell("written")
"""
    logs = tmp_path / "logs"
    options = ("--run-dir", "none", "-t", "3", "--log-dir", str(logs))
    with Pipe() as pipe:
        with running(tmp_path, program, *options, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader(paused=True)
            job.hear("written")
            reader.go_on()
            assert job.wait() == 0
        (log,) = logs.rglob("stdout.log")
        kept = log.read_text().splitlines()
        assert [int(line.split()[0]) for line in kept] == list(range(20_000))
        text = reader.all().decode()
        skipped = re.findall(rf": (\d+) lines skipped here; what -t copies is in the log files in {logs}\n", text)
        assert skipped
        assert sum(map(int, skipped)) + text.count("\n") - len(skipped) == 20_000


def is_held_up(rank: int, saferun: int) -> bool:
    """Whether a rank waits for room in its pipe while saferun, which could read it, sleeps and goes on sleeping."""
    before = switches(saferun)
    held_up = is_in_write(rank) and (stat := read_stat(saferun)) is not None and stat.state == "S"
    return held_up and switches(saferun) == before


def switches(pid: int) -> list[str]:
    """How often a process has been taken off the processor."""
    return [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "ctxt_switches" in line]


def waiting_bytes(read_end: int) -> int:
    """How many bytes wait in a pipe."""
    import fcntl
    import struct
    import termios

    return int(struct.unpack("i", fcntl.ioctl(read_end, termios.FIONREAD, b"\0" * 4))[0])


def test_without_files_a_reader_that_stops_and_goes_away_stalls_no_rank(tmp_path: Path) -> None:
    """The pager that shows the first page of the output and is then closed must not hang the training."""
    program = """
from rank import *
tell("writing")
for number in range(30_000):
    sys.stdout.write(f"{number} {'x' * 1000}\\n")
"""
    with Pipe() as pipe, running(tmp_path, program, "--run-dir", "none", stdout=pipe.write_end, store=False) as job:
        pipe.close_write_end()
        (rank,) = job.hear("writing")
        until(lambda: is_held_up(rank.pid, job.process.pid), "the rank is held up")
        pipe.close_read_end()
        assert job.wait() == 0


def is_asleep(pid: int) -> bool:
    """Whether a process neither runs nor waits for a processor."""
    stat = read_stat(pid)
    return stat is not None and stat.state == "S"


def processor_share(pid: int) -> float:
    """How much of a processor a process uses for a second; waiting for one does not count."""
    before, began = read_stat(pid), time.monotonic()
    time.sleep(1.0)
    after = read_stat(pid)
    assert before is not None
    assert after is not None
    return (after.cpu_s - before.cpu_s) / (time.monotonic() - began)


def test_waiting_for_a_slow_reader_at_the_end_costs_no_cpu(tmp_path: Path) -> None:
    """A job that has ended, in front of a pager: its launcher waits, and does next to nothing."""
    program = "import sys\nfor number in range(3000): sys.stdout.write('x' * 999 + '\\n')"
    with Pipe() as pipe:
        with running(tmp_path, program, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader(paused=True)
            until(lambda: job.has_happened("OrphansGone"), "the ranks are done")
            until(lambda: is_asleep(job.process.pid), "what it still had to do is done")
            share = processor_share(job.process.pid)
            reader.go_on()
            assert job.wait() == 0
            assert share <= 0.1  # one that polls without a pause uses most of one
        assert reader.all().count(b"\n") == 3000


def test_a_signal_ends_the_wait_for_a_reader_that_never_reads(tmp_path: Path) -> None:
    program = "import sys\nfor number in range(3000): sys.stdout.write('x' * 999 + '\\n')"
    with Pipe() as pipe:
        with running(tmp_path, program, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            until(lambda: job.has_happened("OrphansGone"), "the ranks are done")
            job.send(signal.SIGINT)
            job.wait()
            assert len(job.rank_file(0, "stdout.log")) == 3_000_000
        assert waiting_bytes(pipe.read_end) > 0


NO_PATIENCE = in_saferun("import saferun.launch.console_part as part; part._DRAIN_S = 0.0")
LINES = "import sys\nfor number in range(3000): sys.stdout.write('x' * 999 + '\\n')"


@pytest.mark.parametrize("goes_away", [False, True], ids=["reads on", "goes away"])
def test_unchanged_output_is_kept_for_its_reader_for_as_long_as_that_exists(tmp_path: Path, goes_away: bool) -> None:
    """No line of it may be left out; the ranks of torchrun wait for such a reader as well."""
    environ = customized(tmp_path, NO_PATIENCE)
    with Pipe() as pipe:
        with running(tmp_path, LINES, "--prefix", "none", stdout=pipe.write_end, environ=environ, store=False) as job:
            pipe.close_write_end()
            until(lambda: job.has_happened("OrphansGone"), "the ranks are done")
            until(lambda: is_asleep(job.process.pid), "what it still had to do is done")
            assert job.process.poll() is None
            reader = None if goes_away else pipe.reader()
            pipe.close_read_end()
            assert job.wait() == 0
        assert reader is None or reader.all().count(b"\n") == 3000
        assert "stdout was not read" not in job.err


def test_what_a_reader_has_not_read_at_the_end_is_counted(tmp_path: Path) -> None:
    """Also in a file, which another process writes."""
    with Pipe() as pipe:
        environ = customized(tmp_path, NO_PATIENCE)
        with running(tmp_path, LINES, stdout=pipe.write_end, environ=environ, store=False) as job:
            pipe.close_write_end()
            assert job.wait() == 0
        found = re.search(
            r"saferun: stdout was not read to its end: (\d+) lines are missing there; all of it is in ", job.err
        )
        assert found is not None
        assert pipe.reader().all().count(b"\n") == 3000 - int(found[1])


@pytest.mark.parametrize("options", [(), ("--run-dir", "none")], ids=["with files", "without files"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_stops_the_job_also_ends_the_wait_for_a_reader_that_never_reads(
    tmp_path: Path, signum: signal.Signals, options: tuple[str, ...]
) -> None:
    """Schedulers kill what has not ended half a minute after their first signal, and the exit code is theirs then."""
    environ = customized(tmp_path, in_saferun("import saferun.launch.console_part as part; part._DRAIN_S = 1e6"))
    program = f"from rank import *\n{LINES}\nsys.stdout.flush()\ntell('written')\nstay()"
    with Pipe() as pipe:
        with running(tmp_path, program, *options, stdout=pipe.write_end, environ=environ, store=False) as job:
            pipe.close_write_end()
            job.hear("written")
            job.send(signum)
            assert job.wait() == 1
            assert "stdout was not read to its end" in job.err
        assert waiting_bytes(pipe.read_end) > 0


# ------------------------------------------------------------------------------------------ readers that are not there


def test_a_broken_pipe_does_not_end_the_job(tmp_path: Path) -> None:
    """`saferun train.py | head -1` trains on, as it would with its output in a file."""
    program = """
from rank import *
print("first", flush=True)
await_release("closed")
for number in range(20_000):
    sys.stdout.write(f"{number}\\n")
"""
    with Pipe() as pipe, running(tmp_path, program, nproc=2, stdout=pipe.write_end, store=False) as job:
        pipe.close_write_end()
        assert b"first" in os.read(pipe.read_end, 100)
        pipe.close_read_end()
        job.release("closed")
        assert job.wait() == 0
        assert job.rank_file(1, "stdout.log").count(b"\n") == 20_001


def test_closed_streams_do_not_end_the_job(tmp_path: Path) -> None:
    """Daemons are started so; and no file may take the number of the closed stream."""
    program = "import sys; print('to out'); print('to err', file=sys.stderr); print(sys.stdin.read())"
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    with running(tmp_path, program, nproc=2, before=closing, store=False) as job:
        assert job.wait() == 0
        assert job.rank_file(1, "stdout.log") == b"to out\n\n"
        assert job.rank_file(1, "stderr.log") == b"to err\n"
        assert (job.run_dir / "run.json").read_text().startswith("{")


def test_a_full_disk_behind_stdout_does_not_end_the_job(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb") as full,
        running(tmp_path, QUICK, nproc=2, stdout=full, stderr=full, store=False) as job,
    ):
        assert job.wait() == 0
        assert job.rank_file(0, "stdout.log") == b"done\n"


@pytest.mark.parametrize("options", [(), ("--run-dir", "none")])
def test_what_a_full_device_behind_stdout_misses_is_counted_on_stderr(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A reader that has gone (``| head``) has read what it wants; a full disk is a fault."""
    with (
        open("/dev/full", "wb") as full,
        running(tmp_path, "for i in range(1000): print(i)", *options, nproc=2, stdout=full, store=False) as job,
    ):
        assert job.wait() == 0
        (line,) = (line for line in job.err.splitlines() if "stdout" in line)
        said = "saferun: stdout could not be written (No space left on device): 2000 lines are missing there; "
        assert line.startswith(said)
    with Pipe() as pipe, running(tmp_path / "2", QUICK, *options, stdout=pipe.write_end, store=False) as job:
        pipe.close_write_end()
        pipe.close_read_end()
        assert job.wait() == 0
        assert "stdout" not in job.err


def test_stdout_may_be_a_socket(tmp_path: Path) -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours:
        with running(tmp_path, "print('x' * 500_000)", stdout=theirs.fileno(), store=False) as job:
            theirs.close()
            reader = Reader(os.dup(ours.fileno()))
            assert job.wait() == 0
        assert reader.all().count(b"x") == 500_000


def test_saferun_does_not_make_the_streams_it_shares_non_blocking(tmp_path: Path) -> None:
    """The shell and its next commands share the pipe; a non-blocking one makes them lose output."""
    with Pipe() as pipe, running(tmp_path, QUICK, stdout=pipe.write_end, store=False) as job:
        assert job.wait() == 0
        assert os.get_blocking(pipe.write_end)
        pipe.close_write_end()
        assert b"done" in pipe.reader().all()


# It has inherited the terminal of another user, which it may not open: all that it needs is imported before.
AFTER_SU = """
import fcntl, os, select, sys, termios
from saferun.console.target import Target
import saferun.linux.streams
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
target = Target(0, skipping=True, where=str)
for number in range(100):
    target.put(b"x" * 4000 + b"\\n")
    target.flush()
print(target.is_terminal, target.waiting_bytes > 0, os.get_blocking(0), os.get_terminal_size(target.fd).columns)
"""


def test_a_terminal_of_another_user_that_is_not_read_stalls_nothing() -> None:
    """After su, saferun waited in ``write`` where there was room for a few bytes: no signal was handled."""
    master, slave = os.openpty()
    try:
        termios.tcsetwinsize(slave, (30, 90))
        os.fchmod(slave, 0)
        command = [sys.executable, "-c", AFTER_SU]
        environ = {**os.environ, "TERM": "xterm"}
        done = subprocess.run(
            command, stdin=slave, capture_output=True, env=environ, start_new_session=True, timeout=60.0, check=True
        )
        assert done.stdout == b"True True True 90\n"
    finally:
        os.close(master)
        os.close(slave)
