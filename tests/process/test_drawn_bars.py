"""Progress bars of real libraries, on a terminal that several ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.launching import until
from tests.process.test_terminal import COLUMNS, ROWS, Terminal, on_terminal
from tests.shown import Shown

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 20


def shown_lines(terminal: Terminal) -> list[str]:
    shown = Shown(COLUMNS, ROWS)
    shown.feed(terminal.text.encode())
    return shown.lines


RICH = """
import os
from rank import *
if RANK == 0:
    from rich.progress import Progress
    with Progress(refresh_per_second=1000) as progress:
        tasks = [progress.add_task(f"task{i}", total=20) for i in range(3)]
        for step in range(20):
            for task in tasks:
                progress.advance(task)
            if step == 10:
                progress.console.print("printed beside the bars", os.get_terminal_size(1).columns)
            progress.refresh()
            tell("step")
            await_release(f"step {step}")
else:
    for step in range(20):
        await_release(f"line {step}")
        print(f"IMPORTANT line {step}", flush=True)
        tell("line")
"""


def test_rich_progress_leaves_the_lines_of_other_ranks_alone(tmp_path: Path) -> None:
    """Three bars of one rank once erased all but one of another rank's twenty lines."""
    with on_terminal(tmp_path, RICH, "--prefix", "[{rank}] ", nproc=2) as (job, terminal):
        for step in range(STEPS):
            job.hear("step")
            job.release(f"line {step}")
            job.hear("line")
            until(lambda step=step: f"IMPORTANT line {step}\r" in terminal.text, "the line is shown")  # type: ignore[misc]
            job.release(f"step {step}")
        assert job.wait() == 0
        until(lambda: sum("100%" in line for line in shown_lines(terminal)) == 3, "all three bars are full")
        lines = shown_lines(terminal)
        assert [line for line in lines if line.startswith("[1]")] == [f"[1] IMPORTANT line {i}" for i in range(STEPS)]
        bars = [line for line in lines if line.startswith("[0]") and "task" in line]
        assert [line.split()[1] for line in bars] == ["task0", "task1", "task2"]
        assert f"[0] printed beside the bars {COLUMNS - 4}" in lines
        assert all(line.startswith(("[0]", "[1]")) for line in lines if line)


TQDM = """
from rank import *
from tqdm import tqdm
for epoch in tqdm(range(3), desc=f"epochs", mininterval=0):
    for step in tqdm(range(5), desc="steps", mininterval=0, leave=False):
        if epoch == 1 and step == 2:
            tell("within")
            await_release("go on")
"""


def test_a_bar_within_a_bar_is_two_rows_for_each_rank(tmp_path: Path) -> None:
    with on_terminal(tmp_path, TQDM, "--prefix", "[{rank}] ", nproc=2) as (job, terminal):
        job.hear("within", 2)

        def rows() -> list[str]:
            return [" ".join(line.split()[:3]).partition("|")[0] for line in shown_lines(terminal)[-4:]]

        wanted = sorted(f"[{rank}] {row}" for rank in range(2) for row in ("epochs: 33%", "steps: 40%"))
        until(lambda: sorted(rows()) == wanted, "two rows for each rank")
        job.release("go on")
        assert job.wait() == 0
        until(lambda: sum("100%" in line for line in shown_lines(terminal)) == 2, "the outer bars stay")
        assert not any("steps" in line for line in shown_lines(terminal))


CURSES = """
import curses
from rank import *
def main(screen):
    screen.box()
    screen.addstr(2, 3, "hello")
    screen.refresh()
    screen.addstr(3, 3, "second")
    screen.refresh()
    tell("drawn")
    await_release("end")
print("before", flush=True)
curses.wrapper(main)
print("after", flush=True)
"""


def test_a_program_that_takes_the_whole_screen_leaves_its_last_picture(tmp_path: Path) -> None:
    environ = {"TERM": "xterm-256color"}
    with on_terminal(tmp_path, CURSES, "--prefix", "[{rank}] ", nproc=2, environ=environ) as (job, terminal):
        job.hear("drawn", 2)
        job.release("end")
        assert job.wait() == 0
        until(lambda: sum("after" in line for line in shown_lines(terminal)) == 2, "both have ended")
        for rank in range(2):
            lines = [line[4:] for line in shown_lines(terminal) if line.startswith(f"[{rank}]")]
            assert lines[:2] == ["before", f"┌{'─' * (COLUMNS - 6)}┐"]
            assert lines[3:5] == [f"│  {word:<{COLUMNS - 8}}│" for word in ("hello", "second")]
            # curses itself erases the last row when it ends.
            assert lines[-2:] == [f"│{' ' * (COLUMNS - 6)}│", "after"]


DIES = """
from rank import *
from rich.progress import Progress
with Progress(refresh_per_second=1000) as progress:
    tasks = [progress.add_task(f"task{i}", total=20) for i in range(3)]
    for step in range(5):
        for task in tasks:
            progress.advance(task)
        progress.refresh()
    os.write(1, b"\\x1b[44;1mhalf a pic")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_rank_that_dies_while_it_draws_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """The report quotes its last lines without the cursor movements among them."""
    with on_terminal(tmp_path, DIES, "--prefix", "[{rank}] ") as (job, terminal):
        assert job.wait() == 1
        until(lambda: "files: " in terminal.text, "the report is there")
        shown = Shown(COLUMNS, ROWS)
        shown.feed(terminal.text.encode())
        assert shown.is_plain
        assert any(line.startswith("  | half a pic") or line.endswith("half a pic") for line in shown.lines)
        assert not any("[2K" in line or "[1A" in line or "[44" in line for line in shown.lines)
