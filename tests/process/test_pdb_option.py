"""``--pdb``: a debugger at the exception of the first rank that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.control_clients import control_socket
from tests.process.launching import running, two_lines, until
from tests.process.test_ctl_attach import attached
from tests.process.test_keyboard import asks
from tests.process.test_terminal import on_terminal

if TYPE_CHECKING:
    from pathlib import Path

QUIET = ("--preflight", "off")
RAISES = """
from rank import *
import sys
def train(value):
    if RANK == 1:
        raise KeyError("labels")
    await_release("fail")
    tell("failing")
    raise ValueError("also")
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
tell("ready")
train(41)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_the_first_rank_that_fails_is_debugged_and_the_failure_goes_its_way(folder: Path) -> None:
    """Ranks that fail meanwhile wait, so that they do not end the debugger."""
    with on_terminal(folder, RAISES, *QUIET, "--pdb", "--cause-wait", "0", nproc=2) as (job, terminal):
        asks(terminal)
        job.release("fail")
        job.hear("failing")
        terminal.type(b"p value + 1000\r")
        until(lambda: "1041\r\n" in terminal.text, "the debugger answers")  # on a loaded machine behind a prefix
        assert not job.has_happened("RankExited")
        terminal.type(b"q\r")
        assert job.wait() == 1
        until(lambda: "rank 1 (" in terminal.text and "failed first" in terminal.text, "the report is as ever")
        assert "KeyError: 'labels'" in terminal.text
        assert terminal.text.count("is in the debugger") == 1


@pytest.mark.slow
def test_without_a_terminal_the_debugger_waits_for_saferunctl(folder: Path) -> None:
    with running(folder, RAISES, *QUIET, "--pdb", "--cause-wait", "0", nproc=2, store=False) as job:
        until(lambda: "rank 1 waits for input: saferunctl attach" in job.err, "it is said how to get there")
        control_socket(job)
        with attached(job) as shell:
            until(lambda: "(Pdb) " in shell.text, "attached")
            assert "KeyError: 'labels'" in shell.text
            shell.type(b"p value + 1000\r")
            until(lambda: "\n1041\r\n" in shell.text, "the debugger answers")
            shell.type(b"\x04")
            until(lambda: "rank 1 has ended" in shell.text, "it has ended")
        assert job.wait() == 1


@pytest.mark.slow
def test_a_debugger_in_which_nothing_is_typed_ends(folder: Path) -> None:
    with running(
        folder, RAISES, *QUIET, "--pdb", "--pdb-timeout", "1", "--cause-wait", "0", nproc=2, store=False
    ) as job:
        assert job.wait() == 1
        assert "nothing was typed for 1 s: the debugger of rank 1 ends" in job.err
        assert "KeyError: 'labels'" in job.err


@pytest.mark.slow
def test_an_exit_code_of_the_script_is_no_exception(folder: Path) -> None:
    with running(folder, RAISES, *QUIET, "--pdb", nproc=2, arguments=["3"], store=False) as job:
        assert job.wait() == 1
        assert "debugger" not in job.err
        assert "exit code 3" in job.err


def test_it_takes_the_hook(folder: Path) -> None:
    with running(folder, RAISES, *QUIET, "--pdb", "--no-inject", nproc=1, store=False) as job:
        assert job.wait() == 2
        assert two_lines(job.err)[0].startswith("--pdb")
