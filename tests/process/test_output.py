"""What the ranks write arrives: whole, in order, in the files and on the console, whatever becomes of its readers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from zlib import crc32

import pytest

from tests.breadth import slow_but
from tests.process.launching import running, until
from tests.process.reading import Pipe

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
    with running(tmp_path, program, nproc=2, store=False) as job:
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
    with running(tmp_path, program, nproc=2, store=False) as job:
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


# -------------------------------------------------------------------------------------------------------- pass-through


def test_without_prefix_and_files_the_streams_are_passed_straight_through(tmp_path: Path) -> None:
    """No pipe in between: the same file, the same terminal, no cost."""
    program = "import os; open('identity', 'w').write(' '.join(str(os.fstat(fd).st_ino) for fd in (0, 1, 2)))"
    with running(tmp_path, program, "--run-dir", "none", "--prefix", "none", store=False) as job:
        assert job.wait() == 0
        inodes = (tmp_path / "job" / "identity").read_text().split()
        assert inodes[1:] == [str((tmp_path / name).stat().st_ino) for name in ("stdout", "stderr")]
        assert inodes[0] == str(os.stat(os.devnull).st_ino)


def test_ranks_inherit_stdin(tmp_path: Path) -> None:
    source = tmp_path / "answer"
    source.write_text("forty-two\n")
    with source.open() as stdin, running(tmp_path / "run", "print(input())", stdin=stdin, store=False) as job:
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
    options = ("--leftovers", "end", "--shutdown-timeout", "1")
    with running(tmp_path, program, *options, nproc=2, store=False) as job:
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
        pytest.param(["--prefix", "{{{rank:03d}}}"], {}, "{000}done\n", marks=pytest.mark.slow),
        (["--prefix", "none"], {}, "done\n"),
        pytest.param(["--prefix", ""], {}, "done\n", marks=pytest.mark.slow),
        (["--prefix", "{rank} ", "--role", "actor"], {"PET_ROLE": "critic"}, "0 done\n"),
        ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}-${rank}-${local_rank}|"}, "default-0-0|done\n"),
        pytest.param(
            ["--prefix", "own "],
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "$rank|"},
            "own done\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--log-line-prefix-template", "${hostname}:${rank}: "],
            {},
            f"{os.uname().nodename}:0: done\n",
            marks=pytest.mark.slow,
        ),
        pytest.param([], {"PET_LOG_LINE_PREFIX_TEMPLATE": "$local_rank;"}, "0;done\n", marks=pytest.mark.slow),
        (["--color", "always", "--prefix", "p "], {}, "\x1b[36mp \x1b[0mdone\n"),
        (["--color", "always", "--prefix", "p "], {"NO_COLOR": "1"}, "\x1b[36mp \x1b[0mdone\n"),
        pytest.param(["--color", "auto", "--prefix", "p "], {}, "p done\n", marks=pytest.mark.slow),
    ],
)
def test_the_prefix_is_what_was_asked_for(
    tmp_path: Path, options: list[str], environ: dict[str, str], expected: str
) -> None:
    with running(tmp_path, QUICK, *options, environ=environ, store=False) as job:
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
    with running(tmp_path, ONE_TRACEBACK, nproc=4, store=False) as job:
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


@pytest.mark.parametrize(
    "options",
    slow_but(
        [
            pytest.param(("--fold", "off"), id="fold"),
            pytest.param(("--run-dir", "none"), id="run-dir"),
            pytest.param(("--prefix", "none"), id="prefix"),
            pytest.param(("--log-line-prefix-template", "x"), id="template"),
            # As under torchrun: what is on the console is in its files as well, and nothing else.
            pytest.param(("--tee", "3"), id="tee"),
            pytest.param(("--redirects", "0:1"), id="redirects"),
        ],
        "fold",
    ),
)
def test_where_lines_are_not_folded_every_copy_is_on_the_console(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running(tmp_path, ONE_TRACEBACK, *options, nproc=2, store=False) as job:
        assert job.wait() == 1
        assert job.err.count("Traceback (most recent call last):") >= 2
        assert "the same as" not in job.err


WITH_CPP_FRAMES = r"""
import os, sys
frames = "".join(f"frame #{i}: c10::f(int) + 0x96 (0x7fd28217abf6 in libc10.so)\n" for i in range(31))
head = "before\nException raised from meta at LinearAlgebra.cpp:182 (most recent call first):\n"
os.write(2, (head + frames).encode())
os.write(2, b"after\n")
"""


@pytest.mark.parametrize("options", [(), ("--fold", "off"), ("--tee", "2")])
def test_cpp_frames_are_one_line_on_the_console_and_whole_in_the_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running(tmp_path, WITH_CPP_FRAMES, *options, store=False) as job:
        assert job.wait() == 0
        lines = job.err.splitlines()
        assert sum("frame #" in line for line in lines) == (31 if options else 0)
        assert ("(31 lines of C++ frames: in the rank's stderr.log)" in job.err) is (not options)
        if not options:
            assert job.rank_file(0, "stderr.log").count(b"\nframe #") == 31
