r"""On a terminal the ranks find one too: bars, prompts, colours, widths and Ctrl-C work as without a launcher."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import sys
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.breadth import slow_but
from tests.process.launching import Job, running, until
from tests.process.reading import Pipe, Reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS, COLUMNS = 30, 90
# Makes stdin the controlling terminal of the session that Popen has made, so that Ctrl-C sends a signal.
TAKE_TERMINAL = [
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
]


class Terminal:
    """A terminal with a saferun in its foreground."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.resize(ROWS, COLUMNS)
        self.reader = Reader(os.dup(self.master))

    def resize(self, rows: int, columns: int) -> None:
        """The user pulls at the window."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: bytes) -> None:
        """The user types."""
        os.write(self.master, text)

    @property
    def text(self) -> str:
        """Everything that was ever written to it."""
        return self.reader.so_far().decode(errors="replace")

    @property
    def rows(self) -> list[str]:
        """What stands on it now."""
        return rows_shown(self.text)

    def close(self) -> None:
        """The window is closed."""
        self.reader.stop()
        for name in ("master", "slave"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def rows_shown(text: str) -> list[str]:
    """The rows of a terminal, without limits of size, that understands what saferun and bars send."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif piece == "\x1b[J":
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
        elif match := re.fullmatch(r"\x1b\[(\d*)A", piece):
            row = max(row - int(match[1] or 1), 0)
        elif piece.startswith("\x1b"):
            assert piece[-1] in "mhl", repr(piece)
        else:
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
            column += len(piece)
    return rows


@contextmanager
def on_terminal(
    folder: Path, program: str, *options: str, nproc: int = 1, **others: Any
) -> Iterator[tuple[Job, Terminal]]:
    """A launch in the foreground of a terminal."""
    terminal = Terminal()
    streams = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    try:
        with running(
            folder,
            program,
            *options,
            nproc=nproc,
            before=TAKE_TERMINAL,
            start_new_session=True,
            **{"store": False, **streams, **others},
        ) as job:
            yield job, terminal
    finally:
        terminal.close()


WIDTH = "import os; print('size', *os.get_terminal_size(1), *os.get_terminal_size(2), os.isatty(1), os.isatty(2))"


def test_ranks_see_a_terminal_that_is_narrower_by_the_prefix(tmp_path: Path) -> None:
    """A bar that fills the width it is told must still fit once the prefix stands before it."""
    with on_terminal(tmp_path, WIDTH, "--prefix", "[{rank}] ", nproc=2) as (job, terminal):
        assert job.wait() == 0
        width = COLUMNS - len("[0] ")
        until(lambda: terminal.text.count(f"size {width} {ROWS} {width} {ROWS} True True") == 2, "both say their size")


def test_line_ends_are_not_doubled(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "print('one'); print('two')", nproc=2) as (job, terminal):
        assert job.wait() == 0
        until(lambda: terminal.text.count("two\r\n") == 2, "all lines are there")
        assert "one\r\n" in terminal.text
        assert "\r\r" not in terminal.text
        assert job.rank_file(0, "stdout.log") == b"one\ntwo\n"


def test_a_new_size_is_passed_on(tmp_path: Path) -> None:
    program = """
from rank import *
tell("ready")
while os.get_terminal_size(1).columns != 60 or os.get_terminal_size(2).columns != 60:
    time.sleep(0.005)
tell("resized")
"""
    with on_terminal(tmp_path, program, "--prefix", "{rank}:", nproc=2) as (job, terminal):
        job.hear("ready", 2)
        terminal.resize(20, 62)
        job.hear("resized", 2)
        assert job.wait() == 0


BARS = r"""
from rank import *
for step in range(101):
    sys.stderr.write(f"\r{step:3d}%|{'#' * (step // 2):50}|")
    sys.stderr.flush()
    if step == 50:
        print("halfway", RANK)
        tell("halfway")
        await_release("go on")
sys.stderr.write("\n")
"""


def test_each_bar_is_one_row_below_the_lines(tmp_path: Path) -> None:
    with on_terminal(tmp_path, BARS, "--prefix", "[{rank}] ", nproc=2) as (job, terminal):
        job.hear("halfway", 2)
        half = [f"[{rank}]  50%|{'#' * 25:50}|" for rank in range(2)]
        until(lambda: sorted(terminal.rows[-2:]) == half, "both bars stand at the bottom")
        assert sorted(terminal.rows[:-2]) == ["[0] halfway 0", "[1] halfway 1"]
        job.release("go on")
        assert job.wait() == 0
        done = [f"[{rank}] 100%|{'#' * 50}|" for rank in range(2)]
        until(lambda: sorted(row for row in terminal.rows if "100%" in row) == done, "both bars are full")
        assert sorted(terminal.rows) == sorted(["", *done, "[0] halfway 0", "[1] halfway 1"])


def test_a_bar_wider_than_the_terminal_stays_one_row(tmp_path: Path) -> None:
    program = r"""
from rank import *
for step in range(5):
    sys.stderr.write("\r" + str(step) * 200)
    sys.stderr.flush()
tell("drawn")
await_release("end")
"""
    with on_terminal(tmp_path, program) as (job, terminal):
        job.hear("drawn")
        until(lambda: "4" * 200 in terminal.text, "the bar is drawn")
        # Where the terminal wraps, the cursor does not come back to the row that a later state has to overwrite.
        assert "\x1b[?7l" in terminal.text[: terminal.text.index("4" * 200)]
        job.release("end")
        assert job.wait() == 0
        until(lambda: terminal.text.rindex("\x1b[?7h") > terminal.text.rindex("\x1b[?7l"), "wrapping is on again")


def test_a_prompt_is_seen_and_its_answer_reaches_the_rank(tmp_path: Path) -> None:
    """pdb.set_trace() and input() in a job of one rank are how people debug."""
    program = "answer = input('your name? '); print('hello', answer)"
    with on_terminal(tmp_path, program) as (job, terminal):
        until(lambda: "your name? " in terminal.text, "the prompt is seen")
        terminal.type(b"Ada\n")
        assert job.wait() == 0
        until(lambda: "hello Ada" in terminal.text, "the answer has arrived")


@pytest.mark.slow
def test_a_debugger_works_in_a_rank(tmp_path: Path) -> None:
    program = "secret = 6 * 7\nbreakpoint()\nprint('over')"
    with on_terminal(tmp_path, program) as (job, terminal):
        until(lambda: "(Pdb) " in terminal.text, "the debugger asks")
        terminal.type(b"p secret + 1000\n")
        until(lambda: "1042" in terminal.text, "the debugger answers")
        terminal.type(b"c\n")
        assert job.wait() == 0
        until(lambda: "over" in terminal.text, "the rank has gone on")


def test_ctrl_c_reaches_each_rank_exactly_once(tmp_path: Path) -> None:
    """Two would abort the saving of a checkpoint that the first has begun."""
    program = """
from rank import *
tell_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
tell("ready")
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=3) as (job, terminal):
        job.hear("ready", 3)
        terminal.type(b"\x03")
        assert {said.rank for said in job.hear("SIGINT", 3)} == {0, 1, 2}
        job.release("end")
        assert job.wait() == 1
        assert [said for name in ("SIGINT", "SIGTERM", "SIGHUP") for said in job.said(name)] == []


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    program = "from rank import *\nignore(signal.SIGINT)\ntell('ready')\nstay()"
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        job.hear("ready", 2)
        terminal.type(b"\x03")
        until(lambda: "SIGINT: stopping" in terminal.text, "the first is taken in")
        terminal.type(b"\x03")
        assert job.wait() == 1


def test_the_first_ctrl_c_says_what_a_second_one_does(tmp_path: Path) -> None:
    program = "from rank import *\nignore(signal.SIGINT)\ntell('ready')\nstay()"
    with on_terminal(tmp_path, program) as (job, terminal):
        job.hear("ready")
        terminal.type(b"\x03")
        said = "saferun: SIGINT: stopping 1 rank, SIGKILL follows in 30 s or at the next Ctrl-C"
        until(lambda: said in " ".join(terminal.rows), "it is said")
        # The terminal's echo of the key is not left before it.
        assert any(row.startswith("saferun: SIGINT") for row in terminal.rows)
        time.sleep(0.6)  # two at the same moment are one
        terminal.type(b"\x03")
        assert job.wait() == 1


# The shell of an interactive session: its jobs have process groups of their own.
SHELL_WITH_A_BACKGROUND_JOB = """
import contextlib, fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.execv(sys.argv[1], sys.argv[1:])
# Both set it, as shells do; once the child has executed its program, only its own call counts.
with contextlib.suppress(PermissionError):
    os.setpgid(pid, pid)
typed = os.read(0, 1000)
os.write(1, b"the shell read " + typed)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_background_job_leaves_the_keyboard_to_the_shell(tmp_path: Path) -> None:
    """What is typed at the shell's prompt once went to whatever a rank was reading for."""
    program = """
from rank import *
import threading
def read():
    tell("read " + repr(os.read(0, 1000)))
threading.Thread(target=read, daemon=True).start()
tell("ready " + str(os.isatty(0)))
await_release("end")
"""
    terminal = Terminal()
    streams = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    shell = [sys.executable, "-c", SHELL_WITH_A_BACKGROUND_JOB]
    try:
        with running(tmp_path, program, before=shell, start_new_session=True, store=False, **streams) as job:  # type: ignore[arg-type]
            job.hear("ready True")
            terminal.type(b"echo one\n")
            until(lambda: "the shell read echo one" in terminal.text, "the shell has its line")
            job.release("end")
            assert job.wait() == 0
            assert not [said for said in job.said() if said.word.startswith("read ")]
    finally:
        terminal.close()


def test_a_background_job_is_not_stopped_where_the_shell_has_those_stopped_that_write(tmp_path: Path) -> None:
    """``stty tostop``: the ranks of torchrun write there from sessions of their own, and none is stopped."""
    program = """
from rank import *
import signal
tell("ready " + str(signal.getsignal(signal.SIGTTOU) is signal.SIG_DFL))
print("a line of the rank", flush=True)
await_release("end")
"""
    terminal = Terminal()
    settings = termios.tcgetattr(terminal.slave)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(terminal.slave, termios.TCSANOW, settings)
    streams = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    shell = [sys.executable, "-c", SHELL_WITH_A_BACKGROUND_JOB]
    try:
        with running(tmp_path, program, before=shell, start_new_session=True, store=False, **streams) as job:  # type: ignore[arg-type]
            job.hear("ready True")
            until(lambda: "a line of the rank" in terminal.text, "the line of the rank")
            terminal.type(b"\n")
            job.release("end")
            assert job.wait() == 0
    finally:
        terminal.close()


def test_ranks_are_told_the_width_in_every_way(tmp_path: Path) -> None:
    """Rich asks stdin before stdout, and stdin is the whole terminal."""
    program = "import os, shutil; print('width', os.environ['COLUMNS'], shutil.get_terminal_size().columns)"
    with on_terminal(tmp_path, program, "--prefix", "[{rank}] ", environ={"COLUMNS": str(COLUMNS)}) as (job, terminal):
        assert job.wait() == 0
        width = COLUMNS - len("[0] ")
        until(lambda: f"width {width} {width}" in terminal.text, "both are narrower by the prefix")


def test_torchs_own_prefix_is_left_out_behind_ours(tmp_path: Path) -> None:
    program = r"""
import os, sys
rank = os.environ["RANK"]
os.write(2, f"[rank{rank}]: Traceback\n[rank{rank}]:[W1122 10:00] warning\n[rank7]: of another\n".encode())
"""
    with on_terminal(tmp_path, program, "--prefix", "[h:{rank}] ", "--color", "never", nproc=2) as (job, terminal):
        assert job.wait() == 0
        for rank in range(2):
            wanted = [f"[h:{rank}] Traceback", f"[h:{rank}] [W1122 10:00] warning", f"[h:{rank}] [rank7]: of another"]
            until(lambda wanted=wanted: all(row in terminal.rows for row in wanted), "all are shown")  # type: ignore[misc]
            assert f"[rank{rank}]: Traceback".encode() in job.rank_file(rank, "stderr.log")


def test_the_end_of_the_terminal_ends_the_job(tmp_path: Path) -> None:
    """A closed window or a broken ssh: the signal is SIGHUP, and the report has nowhere to go but the files."""
    program = "from rank import *\ntell('ready')\nwhile True:\n    print('busy')\n    time.sleep(0.01)"
    with on_terminal(tmp_path, program, "--shutdown-timeout", "1", nproc=2) as (job, terminal):
        job.hear("ready", 2)
        terminal.close()
        assert job.wait() == 1
        assert job.has_happened("SignalReceived", signum=signal.SIGHUP)


def test_with_pty_off_the_ranks_get_pipes(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "import os; print(os.isatty(1), os.isatty(2))", "--pty", "off") as (job, terminal):
        assert job.wait() == 0
        until(lambda: "False False" in terminal.text, "the rank has spoken")


def test_with_pty_on_the_ranks_get_terminals_also_without_one(tmp_path: Path) -> None:
    with running(
        tmp_path, "import os; print(os.isatty(1), os.isatty(2)); print('x' * 10_000)", "--pty", "on", store=False
    ) as job:
        assert job.wait() == 0
        assert "True True\n" in job.out
        assert "x" * 10_000 + "\n" in job.out
        assert "\r" not in job.out


def test_only_the_stream_on_the_terminal_is_a_terminal_for_the_ranks(tmp_path: Path) -> None:
    """`saferun … | tee log`: the pipe gets plain text, the bars on stderr stay bars."""
    program = WIDTH.replace("get_terminal_size(1)", "get_terminal_size(2)")
    with Pipe() as pipe, on_terminal(tmp_path, program, stdout=pipe.write_end) as (job, _):
        pipe.close_write_end()
        assert job.wait() == 0
        text = pipe.reader().all()
        assert b" False True\n" in text
        assert b"\x1b" not in text


def test_a_stream_that_is_teed_is_no_terminal_for_the_ranks(tmp_path: Path) -> None:
    """Under torchrun such ranks write to a file: what bars and colours write to terminals is not in it."""
    program = "import os; print(os.isatty(1), os.isatty(2))"
    options = ("--log-dir", str(tmp_path / "logs"))
    with on_terminal(tmp_path, program, "-t", "1", *options) as (job, terminal):
        assert job.wait() == 0
        until(lambda: "False True" in terminal.text, "the line is on the terminal")
        (log,) = (tmp_path / "logs").rglob("stdout.log")
        assert log.read_text() == "False True\n"


@pytest.mark.parametrize("option", [("--pty", "on"), pytest.param(("--attach", "0"), marks=pytest.mark.slow)])
def test_a_teed_stream_is_a_terminal_for_ranks_where_that_is_asked_for(tmp_path: Path, option: tuple[str, ...]) -> None:
    """Prompts and line editors work in a rank to which the user types."""
    with on_terminal(tmp_path, WIDTH, "-t", "3", "--log-dir", str(tmp_path / "logs"), *option) as (job, terminal):
        assert job.wait() == 0
        until(lambda: "True True" in terminal.text, "the rank has a terminal")


def test_prefixes_are_coloured_by_rank(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "print('hi')", "--prefix", "p", nproc=2) as (job, terminal):
        assert job.wait() == 0
        until(lambda: terminal.text.count("hi") == 2, "both have spoken")
        assert len(set(re.findall(r"\x1b\[(\d+)mp\x1b\[0mhi", terminal.text))) == 2


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ((), {"NO_COLOR": "1"}),
        pytest.param(("--color", "never"), {}, marks=pytest.mark.slow),
        pytest.param(("--prefix", "none"), {}, marks=pytest.mark.slow),
    ],
)
def test_no_colours_where_none_are_wanted(tmp_path: Path, options: tuple[str, ...], environ: dict[str, str]) -> None:
    # In one piece: print writes text and line feed apart, and a line that stays unfinished for long is drawn anew.
    program = r"import os; os.write(1, b'hi\n')"
    with on_terminal(tmp_path, program, *options, environ=environ) as (job, terminal):
        assert job.wait() == 0
        until(lambda: "hi" in terminal.text, "the rank has spoken")
        assert "\x1b" not in terminal.text


@pytest.mark.parametrize("term", slow_but(["dumb", ""], "dumb"))
def test_a_dumb_terminal_gets_neither_colours_nor_cursor_movements(tmp_path: Path, term: str) -> None:
    """The terminal of an editor, or of a build server, shows them as letters."""
    program = r"""
import os, sys
sys.stderr.write("\rbar 1")
sys.stderr.flush()
os.write(1, b"hi\n")
sys.stderr.write("\rbar 2\n")
"""
    with on_terminal(tmp_path, program, nproc=2, environ={"TERM": term}) as (job, terminal):
        assert job.wait() == 0
        until(lambda: terminal.text.count("bar 2") == 2, "both have spoken")
        assert terminal.text.count("hi") == 2
        assert "\x1b" not in terminal.text


@pytest.mark.parametrize("end", slow_but(["well", "killed"], "killed"))
def test_the_terminal_is_left_as_it_was(tmp_path: Path, end: str) -> None:
    """A terminal without echo or line wrapping is a broken one to its user."""
    program = r"""
from rank import *
sys.stderr.write("\rbar")
sys.stderr.flush()
tell("ready")
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2, sweeps=False) as (job, terminal):
        before = termios.tcgetattr(terminal.slave)
        job.hear("ready", 2)
        until(lambda: "bar" in terminal.text, "the bar is drawn")
        if end == "killed":
            job.send(signal.SIGKILL)
        job.release("end")
        job.wait()
        until(lambda: not job.processes(), "all are gone")
        assert termios.tcgetattr(terminal.slave) == before
        assert os.get_blocking(terminal.slave)
        until(lambda: terminal.text.rfind("\x1b[?7h") >= terminal.text.rfind("\x1b[?7l"), "wrapping is on again")


def test_nothing_a_rank_writes_last_is_lost_on_a_terminal(tmp_path: Path) -> None:
    """A pseudo-terminal's buffer is emptied by the kernel in its own time."""
    program = "import os\nos.write(1, b'x' * 20_000 + b'\\nlast of ' + os.environ['RANK'].encode())\nos._exit(0)"
    with on_terminal(tmp_path, program, nproc=4) as (job, terminal):
        assert job.wait() == 0
        for rank in range(4):
            assert job.rank_file(rank, "stdout.log") == b"x" * 20_000 + b"\nlast of %d" % rank
            until(lambda wanted=f"last of {rank}\r\n": wanted in terminal.text, "the last words")  # type: ignore[misc]


def test_a_terminal_that_saferun_was_not_started_on_is_written_to_like_a_pipe(tmp_path: Path) -> None:
    """Open MPI gives each of its tasks one, and copies what comes out of them to where its own output goes."""
    terminal = Terminal()
    program = "import os, sys\nprint(os.isatty(1), flush=True)\nprint('half', end='\\rwhole\\n', flush=True)"
    try:
        with running(
            tmp_path,
            program,
            nproc=2,
            start_new_session=True,
            store=False,
            stdout=terminal.slave,
            stderr=terminal.slave,
        ) as job:
            assert job.wait() == 0
            until(lambda: terminal.text.count("whole") == 2, "all of it has been written")
        assert "\x1b" not in terminal.text
        assert terminal.text.count("False") == 2
    finally:
        terminal.close()
