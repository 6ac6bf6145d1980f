"""torch's own breakpoint for one rank of a job: the others wait in a barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.launching import until
from tests.process.test_keyboard import asks
from tests.process.test_terminal import on_terminal

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
from rank import *
import torch.distributed as dist
dist.init_process_group("gloo")
value = 900 + RANK
dist.breakpoint(1)
print("met", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_breakpoint_has_the_keyboard_of_its_rank(tmp_path: Path) -> None:
    with on_terminal(tmp_path, PROGRAM, nproc=2, store=True) as (job, terminal):
        asks(terminal)
        terminal.type(b"up\r")
        # (The prompt is printed again when its rank has the keyboard, and before what was typed ahead is echoed.)
        until(lambda: "-> dist.breakpoint(1)\r\n" in terminal.text, "it is in the caller's frame")
        terminal.type(b"p value\r")
        until(lambda: "901\r\n" in terminal.text, "the debugger answers")
        terminal.type(b"c\r")
        assert job.wait() == 0
        until(lambda: terminal.text.count("met\r\n") == 2, "both have gone on")


RAISES = """
from rank import *
import torch.distributed as dist
dist.init_process_group("gloo")
def train(value):
    if RANK == 1:
        raise KeyError("labels")
    dist.barrier()
train(900)
"""


@pytest.mark.slow  # tests/process/test_pdb_option.py has it without a process group
def test_a_debugger_after_an_exception_comes_behind_its_traceback(tmp_path: Path) -> None:
    """In a process group tracebacks come by way of a buffer of torch; the other rank waits in its barrier."""
    with on_terminal(tmp_path, RAISES, "--pdb", nproc=2, store=True) as (job, terminal):
        asks(terminal)
        assert "KeyError: 'labels'" in terminal.text[: terminal.text.index("(Pdb) ")]
        terminal.type(b"p value + 1\r")
        until(lambda: "901\r\n" in terminal.text, "the debugger answers")
        terminal.type(b"q\r")
        assert job.wait() == 1
        until(lambda: "failed first" in terminal.text, "the report is as ever")
