"""What the ranks write arrives: whole, in order, in the files and on the console, whatever becomes of its readers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from tests.process.launching import read_stat, running, until
from tests.process.reading import Pipe, Reader

QUICK = "print('done')"

# Lines that prove themselves: rank, number, checksum of a text whose length differs from line to line.
CHECKED_LINES = """
import os, sys
from random import Random
from zlib import crc32
rank, count, stream = os.environ["RANK"], int(sys.argv[1]), sys.stdout if len(sys.argv) < 3 else sys.stderr
random = Random(rank)
text = "".join(chr(random.randrange(33, 127)) for _ in range(2000))
for number in range(count):
    body = f"{rank} {number} {text[:random.randrange(200)]}"
    stream.write(f"{body} {crc32(body.encode()):08x}\\n")
    if random.random() < 0.01:
        stream.flush()
"""


def numbers_by_rank(lines: list[str]) -> dict[int, list[int]]:
    """The numbers of checked lines, by rank; a line that was cut, joined or changed fails."""
    found: dict[int, list[int]] = {}
    for line in lines:
        match = re.fullmatch(r"\[[^]:]+:(\d+)\] ((\d+) (\d+) (?:\S* )?)([0-9a-f]{8})", line)
        assert match is not None, line
        body = match[2].removesuffix(" ")
        assert crc32(body.encode()) == int(match[5], 16) or crc32(match[2].encode()) == int(match[5], 16), line
        assert match[1] == match[3], line
        found.setdefault(int(match[1]), []).append(int(match[4]))
    return found


# --------------------------------------------------------------------------------------------------------- whole lines


def test_each_line_has_its_prefix_and_each_stream_stays_itself(tmp_path: Path) -> None:
    program = "import sys; print('to out'); print('to err', file=sys.stderr)"
    with running(tmp_path, program, nproc=2) as job:
        assert job.wait() == 0
        host = os.uname().nodename.split(".")[0]
        assert sorted(job.out.splitlines()) == [f"[{host}:{rank}] to out" for rank in range(2)]
        assert sorted(job.err.splitlines()) == [f"[{host}:{rank}] to err" for rank in range(2)]
        assert job.rank_file(1, "stdout.log") == b"to out\n"
        assert job.rank_file(1, "stderr.log") == b"to err\n"


def test_lines_of_eight_writers_are_never_joined_lost_or_reordered(tmp_path: Path) -> None:
    """With --tee torchrun loses, doubles and glues lines of two ranks already."""
    with running(tmp_path, CHECKED_LINES, nproc=8, arguments=["1500"], store=False) as job:
        assert job.wait() == 0
        assert numbers_by_rank(job.out.splitlines()) == {rank: list(range(1500)) for rank in range(8)}


def test_print_under_dash_u_never_glues_lines(tmp_path: Path) -> None:
    """Python -u writes the text and its line feed apart: two ranks on one pipe glue their lines together."""
    program = "import os\nfor number in range(400): print(os.environ['RANK'], number)"
    with running(tmp_path, program, nproc=4, store=False) as job:
        assert job.wait() == 0
        lines = [line.split("] ")[1] for line in job.out.splitlines()]
        assert sorted(lines) == sorted(f"{rank} {number}" for rank in range(4) for number in range(400))


def test_a_hundred_thousand_lines_arrive_through_a_pipe(tmp_path: Path) -> None:
    program = "import sys\nsys.stdout.write(''.join(f'{n}\\n' for n in range(100_000)))"
    with Pipe() as pipe, running(tmp_path, program, stdout=pipe.write_end, store=False) as job:
        pipe.close_write_end()
        reader = pipe.reader()
        assert job.wait() == 0
        lines = reader.all().decode().splitlines()
        assert [line.split("] ")[1] for line in lines] == [str(number) for number in range(100_000)]
        assert job.rank_file(0, "stdout.log").count(b"\n") == 100_000


def test_stdout_and_stderr_in_one_file_keep_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    """`2>&1`: what a rank wrote to one stream before the other stands before it, once saferun has had time to read."""
    program = """
from rank import *
for number in range(20):
    stream = sys.stderr if number % 2 else sys.stdout
    print(number, file=stream, flush=True)
    tell("wrote")
    await_release(str(number))
"""
    with running(tmp_path, program, stderr=subprocess.STDOUT, store=False) as job:
        for number in range(20):
            job.hear("wrote")
            until(lambda wanted=number: f"] {wanted}\n" in job.out, "the line is out")  # type: ignore[misc]
            job.release(str(number))
        assert job.wait() == 0
        assert [line.split("] ")[1] for line in job.out.splitlines()] == [str(number) for number in range(20)]


def test_with_stdout_and_stderr_in_one_pipe_no_line_lands_within_another(tmp_path: Path) -> None:
    program = CHECKED_LINES + "stream = sys.stderr\nfor number in range(count): print('error', file=stream)"
    with Pipe() as pipe:
        with running(
            tmp_path, program, nproc=3, arguments=["800"], stdout=pipe.write_end, stderr=pipe.write_end, store=False
        ) as job:
            pipe.close_write_end()
            reader = pipe.reader()
            assert job.wait() == 0
        lines = reader.all().decode().splitlines()
        assert len(lines) == 2 * 3 * 800
        assert numbers_by_rank([line for line in lines if not line.endswith("] error")]).keys() == {0, 1, 2}


def test_a_last_line_without_its_end_is_shown_whole(tmp_path: Path) -> None:
    program = "import sys; sys.stdout.write('one\\ntwo'); sys.stderr.write('three')"
    with running(tmp_path, program, nproc=2) as job:
        assert job.wait() == 0
        assert job.out.count("] two\n") == 2
        assert job.err.count("] three\n") == 2
        assert job.rank_file(0, "stdout.log") == b"one\ntwo"


def test_an_unfinished_line_appears_before_it_is_finished(tmp_path: Path) -> None:
    """A prompt, or a `loading... ` before a hang, is worth most while it is unfinished."""
    program = "from rank import *\nprint('loading...', end='', flush=True)\nawait_release('end')\nprint('done')"
    with running(tmp_path, program, store=False) as job:
        until(lambda: "] loading...\n" in job.out, "the unfinished line appears")
        job.release("end")
        assert job.wait() == 0
        assert job.rank_file(0, "stdout.log") == b"loading...done\n"


def test_any_bytes_reach_the_files_and_the_console(tmp_path: Path) -> None:
    content = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"")
    program = f"import sys; sys.stdout.buffer.write({content!r} + b'\\n' + b'\\0' * 5000 + b'\\n\\n' + b'\\xff\\xfe')"
    with running(tmp_path, program, "--prefix", "p ", store=False) as job:
        assert job.wait() == 0
        whole = (tmp_path / "stdout").read_bytes()
        assert whole == b"p " + content + b"\np " + b"\0" * 5000 + b"\np \np \xff\xfe\n"
        assert job.rank_file(0, "stdout.log") == content + b"\n" + b"\0" * 5000 + b"\n\n\xff\xfe"


def test_a_huge_line_arrives_in_pieces_and_fills_no_memory(tmp_path: Path) -> None:
    program = """
import sys
for number in range(8 << 7):
    sys.stdout.write(f"{number:08}" * 128)
"""
    expected = b"".join(b"%08d" % number * 128 for number in range(8 << 7))
    with running(tmp_path, program, "--prefix", "p ", nproc=2, store=False) as job:
        assert job.wait() == 0
        assert job.rank_file(0, "stdout.log") == expected
        assert job.rank_file(1, "stdout.log") == expected
        shown = (tmp_path / "stdout").read_bytes()
        assert shown.endswith(b"\n")
        assert len(shown.replace(b"\np ", b"").removeprefix(b"p ").rstrip(b"\n")) == 2 * len(expected)


def test_a_progress_bar_on_a_pipe_is_a_line_now_and_then(tmp_path: Path) -> None:
    """Ten thousand states of a bar in a log file are noise; the last one is what a reader wants."""
    program = r"""
import sys
for step in range(2001):
    sys.stderr.write(f"\rstep {step}/2000")
    sys.stderr.flush()
sys.stderr.write("\n")
"""
    with running(tmp_path, program, nproc=2, store=False) as job:
        assert job.wait() == 0
        lines = job.err.splitlines()
        assert len([line for line in lines if line.endswith("] step 2000/2000")]) == 2
        assert len(lines) <= 2 * 12
        assert "\r" not in job.err
        assert job.rank_file(0, "stderr.log").count(b"\r") == 2001


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


def is_held_up(rank: int, saferun: int) -> bool:
    """Whether a rank waits for room in its pipe while saferun, which could read it, sleeps and goes on sleeping."""
    before = switches(saferun)
    held_up = is_in_write(rank) and (stat := read_stat(saferun)) is not None and stat.state == "S"
    return held_up and switches(saferun) == before


def is_in_write(pid: int) -> bool:
    """Whether a process sleeps in a write to a full pipe."""
    try:
        return "pipe_write" in Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False


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


def looks(count: int) -> Iterator[None]:
    """So many moments, one after the other."""
    for _ in range(count):
        time.sleep(0.01)
        yield


def test_waiting_for_a_slow_reader_at_the_end_costs_no_cpu(tmp_path: Path) -> None:
    """A job that has ended, in front of a pager: its launcher waits, and is asleep nearly whenever it is looked at."""
    program = "import sys\nfor number in range(3000): sys.stdout.write('x' * 999 + '\\n')"
    with Pipe() as pipe:
        with running(tmp_path, program, stdout=pipe.write_end, store=False) as job:
            pipe.close_write_end()
            reader = pipe.reader(paused=True)
            until(lambda: job.has_happened("OrphansGone"), "the ranks are done")
            until(lambda: is_asleep(job.process.pid), "what it still had to do is done")
            awake = sum(not is_asleep(job.process.pid) for _ in looks(100))
            reader.go_on()
            assert job.wait() == 0
            assert awake <= 10
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
    with running(tmp_path, program, nproc=2, before=closing) as job:
        assert job.wait() == 0
        assert job.rank_file(1, "stdout.log") == b"to out\n\n"
        assert job.rank_file(1, "stderr.log") == b"to err\n"
        assert (job.run_dir / "run.json").read_text().startswith("{")


def test_a_full_disk_behind_stdout_does_not_end_the_job(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, running(tmp_path, QUICK, nproc=2, stdout=full, stderr=full) as job:
        assert job.wait() == 0
        assert job.rank_file(0, "stdout.log") == b"done\n"


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


# -------------------------------------------------------------------------------------------------------- pass-through


def test_without_prefix_and_files_the_streams_are_passed_straight_through(tmp_path: Path) -> None:
    """No pipe in between: the same file, the same terminal, no cost."""
    program = "import os; open('identity', 'w').write(' '.join(str(os.fstat(fd).st_ino) for fd in (0, 1, 2)))"
    with running(tmp_path, program, "--run-dir", "none", "--prefix", "none") as job:
        assert job.wait() == 0
        inodes = (tmp_path / "job" / "identity").read_text().split()
        assert inodes[1:] == [str((tmp_path / name).stat().st_ino) for name in ("stdout", "stderr")]
        assert inodes[0] == str(os.stat(os.devnull).st_ino)


def test_ranks_inherit_stdin(tmp_path: Path) -> None:
    source = tmp_path / "answer"
    source.write_text("forty-two\n")
    with source.open() as stdin, running(tmp_path / "run", "print(input())", stdin=stdin) as job:
        assert job.wait() == 0
        assert "forty-two" in job.out


def test_ranks_get_no_descriptors_but_the_standard_ones(tmp_path: Path) -> None:
    """A leaked descriptor keeps a pipe open, or a port taken, for as long as the slowest grandchild lives."""
    program = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])"
    with running(tmp_path, program, "--no-inject", nproc=2, pass_fds=[os.open(os.devnull, os.O_RDONLY)]) as job:
        assert job.wait() == 0
        assert job.out.count("] [0, 1, 2]\n") == 2


def test_a_rank_may_close_its_streams_and_go_on(tmp_path: Path) -> None:
    program = """
from rank import *
print("going silent", flush=True)
os.close(1)
os.close(2)
tell("silent")
await_release("end")
os._exit(0)
"""
    with running(tmp_path, program, nproc=2, store=False) as job:
        job.hear("silent", 2)
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("going silent") == 2


def test_a_grandchild_that_holds_the_pipe_open_does_not_keep_saferun(tmp_path: Path) -> None:
    program = """
from rank import *
if os.fork() == 0:
    os.setsid()
    ignore(signal.SIGTERM)
    tell("holding")
    stay()
await_release("end")
print("last words")
"""
    # Idle processes that ranks leave behind have the shutdown timeout.
    with running(tmp_path, program, "--shutdown-timeout", "1", nproc=2, store=False) as job:
        job.hear("holding", 2)
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("last words") == 2


def test_a_stranger_that_holds_the_pipe_open_does_not_keep_saferun(tmp_path: Path) -> None:
    """A debugger, or a log collector outside of the job, may have opened a rank's stream."""
    program = "from rank import *\ntell('ready')\nawait_release('end')\nprint('last words')"
    with running(tmp_path, program, store=False) as job:
        (rank,) = job.hear("ready")
        with open(f"/proc/{rank.pid}/fd/1", "wb"):
            job.release("end")
            assert job.wait() == 0
        assert "last words" in job.out


# ------------------------------------------------------------------------------------------------------------ prefixes


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        (["--prefix", "<{rank}/{local_rank}/{role}> "], {}, "<0/0/default> done\n"),
        (["--prefix", "{{{rank:03d}}}"], {}, "{000}done\n"),
        (["--prefix", "none"], {}, "done\n"),
        (["--prefix", ""], {}, "done\n"),
        (["--prefix", "{rank} ", "--role", "actor"], {"PET_ROLE": "critic"}, "0 done\n"),
        ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}-${rank}-${local_rank}|"}, "default-0-0|done\n"),
        (["--prefix", "own "], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "$rank|"}, "own done\n"),
        (["--log-line-prefix-template", "${hostname}:${rank}: "], {}, f"{os.uname().nodename}:0: done\n"),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": "$local_rank;"}, "0;done\n"),
        (["--color", "always", "--prefix", "p "], {}, "\x1b[36mp \x1b[0mdone\n"),
        (["--color", "always", "--prefix", "p "], {"NO_COLOR": "1"}, "\x1b[36mp \x1b[0mdone\n"),
        (["--color", "auto", "--prefix", "p "], {}, "p done\n"),
    ],
)
def test_the_prefix_is_what_was_asked_for(
    tmp_path: Path, options: list[str], environ: dict[str, str], expected: str
) -> None:
    with running(tmp_path, QUICK, *options, environ=environ) as job:
        assert job.wait() == 0
        assert job.out == expected


# ---------------------------------------------------------------------------------------------------------- tracebacks

# In one write: on a busy machine a traceback in several pieces may take longer than it is held back for.
ONE_TRACEBACK = r"""
import os, time
text = "Traceback (most recent call last):\n  File 'train.py', line 1, in <module>\nKeyError: 'labels'\n"
os.write(2, text.replace("'train.py'", '"train.py"').encode())
# None ends, whereupon the others are stopped, before all have written.
open("written." + os.environ["RANK"], "w").close()
while not all(os.path.exists(f"written.{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
os._exit(1)
"""


def test_a_traceback_of_several_ranks_is_on_the_console_once(tmp_path: Path) -> None:
    """The files keep every copy."""
    with running(tmp_path, ONE_TRACEBACK, nproc=4) as job:
        assert job.wait() == 1
        notes = re.findall(
            r"^saferun: ranks? ([0-9, -]+): the same as rank (\d): KeyError: 'labels'$", job.err, re.MULTILINE
        )
        shown = job.err.count("Traceback (most recent call last):")
        assert shown == 1
        assert notes
        assert "  above: the traceback of" in job.err
        for rank in range(4):
            assert job.rank_file(rank, "stderr.log").count(b"KeyError: 'labels'\n") == 1
    for options in (
        ("--fold", "off"),
        ("--run-dir", "none"),
        ("--prefix", "none"),
        ("--log-line-prefix-template", "x"),
    ):
        folder = tmp_path / options[0]
        folder.mkdir()
        with running(folder, ONE_TRACEBACK, *options, nproc=2) as job:
            assert job.wait() == 1
            assert job.err.count("Traceback (most recent call last):") >= 2
            assert "the same as" not in job.err
