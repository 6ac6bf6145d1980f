"""What a person sees in a real terminal emulator, and what the jobs of a real shell do in it: tmux and bash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import REPOSITORY, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed"
)
ROWS, COLUMNS = 40, 90
# As short as commands are that people type: the shell breaks longer ones.
SAFERUN = f"exec {shlex.quote(sys.executable)} -m saferun --run-dir none --prefix '[{{rank}}] ' \"$@\""
SHELL = "env PS1='$ ' bash --norc --noprofile -i"


class Tmux:
    """A tmux of this test's own, with one window.

    Args:
        folder: where its socket is, and its working directory.
        command: what runs in the window.
    """

    def __init__(self, folder: Path, command: str) -> None:
        self._folder = folder
        (folder / "saferun.sh").write_text(SAFERUN)
        self._begin = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        environ = {name: value for name, value in os.environ.items() if name not in {"TMUX", "COLUMNS", "LINES"}}
        environ |= {"PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8", "HISTFILE": "/dev/null"}
        self._ask("new-session", "-d", *size, command, ";", "set", "-g", "remain-on-exit", "on", environ=environ)

    def _ask(self, *words: str, environ: dict[str, str] | None = None) -> str:
        command = [*self._begin, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self._folder, env=environ)
        return done.stdout

    def type(self, *keys: str) -> None:
        """The user types: text, or names of keys such as ``Enter`` and ``C-c``."""
        self._ask("send-keys", *keys)

    def resize(self, columns: int) -> None:
        """The user pulls at the window."""
        self._ask("resize-window", "-x", str(columns), "-y", str(ROWS))

    @property
    def lines(self) -> list[str]:
        """All rows that are not blank, those that have scrolled away too."""
        return [line for row in self._ask("capture-pane", "-p", "-S", "-").splitlines() if (line := row.rstrip())]

    def close(self) -> None:
        """The window is closed, and what runs in it gets SIGHUP."""
        self._ask("kill-server")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    yield tmp_path
    if (tmp_path / "tmux").exists():
        subprocess.run(["tmux", "-S", str(tmp_path / "tmux"), "kill-server"], capture_output=True, check=False)


BARS = """
import os, time
from tqdm import tqdm
for step in tqdm(range(10), desc="steps", mininterval=0, dynamic_ncols=True):
    print(f"line {step}", flush=True)
    while not os.path.exists(f"go.{step}") or os.get_terminal_size(2).columns != int(open(f"go.{step}").read() or 0):
        time.sleep(0.005)
"""


def test_bars_of_two_ranks_stand_below_their_lines_also_after_the_window_was_resized(folder: Path) -> None:
    """A terminal that wraps the old bars when it becomes narrower may keep one; no line is lost, and none is twice."""
    (folder / "bars.py").write_text(BARS)
    tmux = Tmux(folder, "sh saferun.sh --nproc-per-node 2 bars.py; echo ended with $?")

    def show_step(step: int, columns: int) -> None:
        """Both bars at this step, in this width, below all lines up to this step."""

        def is_shown() -> bool:
            lines = tmux.lines
            bars = [line for line in lines[-2:] if f"| {step}/10 [" in line]
            wanted = {f"[{rank}] line {i}" for rank in (0, 1) for i in range(step + 1)}
            return (
                sorted(line[:11] for line in bars) == ["[0] steps: ", "[1] steps: "]
                and all(columns - 2 <= len(line) <= columns for line in bars)
                and sorted(line for line in lines if "line" in line) == sorted(wanted)
            )

        until(is_shown, f"step {step} in {columns} columns")

    columns = COLUMNS
    for step in range(10):
        show_step(step, columns)
        if step in {2, 5}:
            columns = 60 if step == 2 else 110
            tmux.resize(columns)
        # It goes on when it has heard of the new size.
        (folder / f"go.{step}").write_text(str(columns - len("[0] ")))
    until(lambda: "ended with 0" in tmux.lines, "the end")
    lines = tmux.lines
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[{rank}] line")] == [
            f"[{rank}] line {i}" for i in range(10)
        ]
    # One more at most for each rank: the one of the wide window, which the narrow one has wrapped.
    assert 2 <= sum("steps: " in line for line in lines) <= 4
    end = lines.index("ended with 0")
    assert all("| 10/10 [" in line for line in lines[end - 2 : end])
    tmux.close()


PROGRESS = """
import os, time
step = 0
while not os.path.exists("end"):
    step += 1
    print(f"\\rstep {step}", end="", flush=True)
    if step == 20:
        open("drawn", "w").close()
    time.sleep(0.02)
print(flush=True)
"""


def test_a_background_job_draws_nothing_over_the_shells_prompt(folder: Path) -> None:
    """Also a job that was stopped by Ctrl-Z and goes on in the background; in the foreground its bar is back."""
    (folder / "bar.py").write_text(PROGRESS)
    tmux = Tmux(folder, SHELL)
    tmux.type("sh saferun.sh --bar-interval 600 bar.py", "Enter")
    until(lambda: "".join(tmux.lines[-1:]).startswith("[0] step "), "its bar is drawn")
    tmux.type("C-z")
    until(lambda: tmux.lines[-1:] == ["$"], "the shell has the terminal")
    tmux.type("bg", "Enter")
    until(lambda: any("[1]+ sh saferun.sh" in line for line in tmux.lines), "it goes on in the background")
    tmux.type("echo one $((1 + 1))", "Enter")
    until(lambda: "one 2" in tmux.lines, "the shell has its line")
    tmux.type("(sleep 1; echo two $((1 + 1)))", "Enter")
    until(lambda: "two 2" in tmux.lines, "a while has passed")
    lines = tmux.lines
    assert [line for line in lines if "Stopped" in line], lines
    assert sum("[0] step " in line for line in lines) <= 2, lines
    assert "$ (sleep 1; echo two $((1 + 1)))" in lines, lines
    tmux.type("fg", "Enter")
    until(lambda: "".join(tmux.lines[-1:]).startswith("[0] step "), "its bar is drawn again")
    (folder / "end").touch()
    until(lambda: tmux.lines[-1:] == ["$"], "the shell is back")
    assert sum("[0] step " in line for line in tmux.lines) <= 3, tmux.lines
    tmux.close()


READS = """
import os, signal, sys, threading
def read():
    print("read", os.read(0, 100), flush=True)
def end(*_):
    print("got SIGINT", flush=True)
    os._exit(0)
signal.signal(signal.SIGINT, end)
threading.Thread(target=read, daemon=True).start()
print("ready", os.isatty(0), os.get_terminal_size(1).columns, flush=True)
while True:
    signal.pause()
"""


@pytest.mark.slow
def test_a_background_job_in_the_foreground_has_the_keyboard_and_is_ended_by_ctrl_c(folder: Path) -> None:
    """In the background the shell has the keys; after ``fg`` the rank that reads has them."""
    (folder / "reads.py").write_text(READS)
    tmux = Tmux(folder, SHELL)
    tmux.type("sh saferun.sh reads.py &", "Enter")
    until(lambda: any(f"[0] ready True {COLUMNS - 4}" in line for line in tmux.lines), "the rank runs")
    tmux.type("echo one $((1 + 1))", "Enter")
    until(lambda: "one 2" in tmux.lines, "the shell has its line")
    tmux.type("fg", "Enter")
    until(lambda: "sh saferun.sh reads.py" in tmux.lines, "it is in the foreground")
    tmux.type("for the rank", "Enter")
    until(lambda: any("[0] read b'for the rank" in line for line in tmux.lines), "the rank has read it")
    tmux.type("C-c")
    until(lambda: any("[0] got SIGINT" in line for line in tmux.lines), "the rank has the signal")
    until(lambda: tmux.lines[-1:] == ["$"], "the shell is back")
    tmux.type("echo three $((3 + 3))", "Enter")
    until(lambda: "three 6" in tmux.lines, "it runs commands")
    assert not [line for line in tmux.lines if "] read b'echo" in line]
    tmux.close()


ASKS = """
import os, sys, time
if os.environ["RANK"] == "1":
    secret = 41
    breakpoint()
    print("rank 1 goes on", flush=True)
else:
    while not os.path.exists("printed"):
        time.sleep(0.01)
    print("a line of rank 0", flush=True)
while not os.path.exists("end"):
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_debugger_of_a_background_job_is_used_after_fg(folder: Path) -> None:
    """It asked while the keys were the shell's."""
    (folder / "asks.py").write_text(ASKS)
    tmux = Tmux(folder, SHELL)
    tmux.type("sh saferun.sh --nproc-per-node 2 asks.py &", "Enter")
    until(lambda: any("rank 1 waits for input" in line for line in tmux.lines), "it says that a rank asks")
    tmux.type("echo one $((1 + 1))", "Enter")
    until(lambda: "one 2" in tmux.lines, "the shell has its line")
    tmux.type("fg", "Enter")
    until(lambda: any("rank 1 has the keyboard" in line for line in tmux.lines), "the rank has the keyboard")
    tmux.type("p secret + 1000", "Enter")
    until(lambda: "1041" in tmux.lines, "the debugger answers")
    tmux.type("c", "Enter")
    until(lambda: any("rank 1 goes on" in line for line in tmux.lines), "the rank goes on")
    (folder / "printed").touch()
    (folder / "end").touch()
    until(lambda: tmux.lines[-1:] == ["$"], "the shell is back")
    tmux.type("echo two $((1 + 1))", "Enter")
    until(lambda: "two 2" in tmux.lines and "$ echo two $((1 + 1))" in tmux.lines, "it echoes what is typed")
    tmux.close()


def test_a_debugger_in_one_of_two_ranks_is_used_as_in_plain_python(folder: Path) -> None:
    """Its prompt begins the row, arrow keys edit, lines of the other rank wait, and the shell has its terminal back."""
    (folder / "asks.py").write_text(ASKS)
    tmux = Tmux(folder, SHELL)
    tmux.type("sh saferun.sh --nproc-per-node 2 asks.py", "Enter")
    until(lambda: tmux.lines[-1:] == ["(Pdb)"], "the debugger asks")
    tmux.type("p secret + 1000", "Enter")
    until(lambda: tmux.lines[-2:] == ["1041", "(Pdb)"], "it answers")
    (folder / "printed").touch()
    tmux.type("Up", "BSpace", "1", "Enter")
    until(lambda: tmux.lines[-3:] == ["(Pdb) p secret + 1001", "1042", "(Pdb)"], "the line was edited")
    # No prefix stands before what is typed, so the line has the whole width, to the line editor, too.
    number = "7" * (COLUMNS - len("(Pdb) p secret + "))
    tmux.type(f"p secret + {number}8", "Home", "Right", "Right", "1", "+", "Enter")
    full = f"(Pdb) p 1+secret + {number}8"
    shown = [full[:COLUMNS], full[COLUMNS:], str(42 + int(f"{number}8")), "(Pdb)"]
    until(lambda: tmux.lines[-4:] == shown, "a line of two rows was edited")
    tmux.type("C-c")
    until(lambda: tmux.lines[-2:] == ["(Pdb) --KeyboardInterrupt--", "(Pdb)"], "Ctrl-C is for the debugger")
    assert not any("a line of rank 0" in line for line in tmux.lines)
    tmux.type("c", "Enter")
    until(lambda: any("[0] a line of rank 0" in line for line in tmux.lines), "the other rank's line is shown")
    (folder / "end").touch()
    until(lambda: tmux.lines[-1:] == ["$"], "the shell is back")
    tmux.type("echo two $((1 + 1))", "Enter")
    until(lambda: "two 2" in tmux.lines, "it echoes what is typed, and runs it")
    assert "$ echo two $((1 + 1))" in tmux.lines
    tmux.close()
