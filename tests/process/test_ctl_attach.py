"""``saferunctl attach``: the terminal of another shell becomes that of one rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import termios
from typing import TYPE_CHECKING

import pytest

from tests.process.control_clients import connected, control_command, control_socket, described, saferunctl
from tests.process.launching import kill, running, two_lines, until
from tests.process.test_keyboard import ONE_ASKS, asks, is_raw
from tests.process.test_terminal import TAKE_TERMINAL, Terminal, on_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.process.launching import Job

QUIET = ("--preflight", "off")
ANY = (*QUIET, "--attach", "any")


class Shell(Terminal):
    """A terminal with a saferunctl in it, attach unless another verb is given."""

    def __init__(self, job: Job, *arguments: str, verb: str = "attach") -> None:
        super().__init__()
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [*TAKE_TERMINAL, *control_command(verb, *arguments)],
            cwd=job.folder / "job",
            env=job.environ,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )


@contextlib.contextmanager
def attached(job: Job, *arguments: str, verb: str = "attach") -> Iterator[Shell]:
    """Attach from another shell."""
    shell = Shell(job, *arguments, verb=verb)
    try:
        yield shell
    finally:
        with contextlib.suppress(ProcessLookupError):
            shell.process.kill()
        shell.process.wait()
        shell.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_a_debugger_is_used_from_another_shell_with_line_editing(folder: Path) -> None:
    """Where saferun has no terminal: under srun, in the background."""
    with running(folder, ONE_ASKS, *ANY, nproc=2, store=False) as job:
        until(lambda: "rank 1 waits for input: saferunctl attach" in job.err, "it is said that the rank waits")
        control_socket(job)
        with attached(job, "latest", "--rank", "1") as shell:
            until(lambda: "(Pdb) " in shell.text, "what was printed last is shown")
            assert 'tell("went on")' in shell.text
            shell.type(b"p secret + 1000\r")
            until(lambda: "\n1041\r\n" in shell.text, "the debugger answers")
            shell.type(b"\x1b[A\x1b[D2\r")
            until(lambda: "\n10061\r\n" in shell.text, "the line was edited")
            shell.type(b"6 *\x03")
            until(lambda: "--KeyboardInterrupt--" in shell.text, "Ctrl-C goes to the debugger")
            shell.type(b"c\r")
            job.hear("went on")
            job.release("print")
            job.release("end")
            until(lambda: "rank 1 has ended" in shell.text, "it is said that the rank has ended")
            assert shell.process.wait() == 0
            assert termios.tcgetattr(shell.slave) == shell.before
        assert job.wait() == 0


@pytest.mark.slow
def test_who_detaches_leaves_the_rank_at_its_prompt_and_may_come_back(folder: Path) -> None:
    with running(folder, ONE_ASKS, *ANY, nproc=2, store=False) as job:
        control_socket(job)
        until(lambda: "rank 1 waits for input" in job.err, "the rank asks")
        with attached(job) as shell:
            until(lambda: "(Pdb) " in shell.text, "without a number it is the rank that asks")
            shell.type(b"p secret + 1000\r")
            until(lambda: "\n1041\r\n" in shell.text, "the debugger answers")
            shell.type(b"\x1d")
            assert shell.process.wait() == 0
            assert termios.tcgetattr(shell.slave) == shell.before
            until(lambda: "detached from rank 1, which goes on" in shell.text, "it is said")
        with attached(job) as shell:
            until(lambda: "1041" in shell.text, "what was printed last is shown")
            shell.type(b"c\r")
            job.hear("went on")
            job.release("print")
            job.release("end")
        assert job.wait() == 0


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_the_rank_to_the_next_one(folder: Path) -> None:
    with running(folder, ONE_ASKS, *ANY, nproc=2, store=False) as job:
        control_socket(job)
        until(lambda: "rank 1 waits for input" in job.err, "the rank asks")
        with attached(job) as shell:
            until(lambda: "(Pdb) " in shell.text, "attached")
            with attached(job, "latest", "--rank", "1") as second:
                until(lambda: "another shell is attached to rank 1" in second.text, "one at a time")
                assert second.process.wait() == 1
            kill(shell.process.pid, signal.SIGKILL)
            shell.process.wait()
        with attached(job) as shell:
            until(lambda: "(Pdb) " in shell.text, "attached")
            shell.type(b"c\r")
            job.hear("went on")
            job.release("print")
            job.release("end")
        assert job.wait() == 0


def test_another_shell_takes_the_rank_from_saferuns_own_terminal_and_gives_it_back(folder: Path) -> None:
    with on_terminal(folder, ONE_ASKS, *QUIET, nproc=2) as (job, terminal):
        asks(terminal)
        control_socket(job)
        with attached(job, "latest", "--rank", "1") as shell:
            until(lambda: "(Pdb) " in shell.text, "attached")
            until(lambda: not is_raw(terminal), "saferun has its keyboard back")
            shell.type(b"p secret + 1000\r")
            until(lambda: "\n1041\r\n" in shell.text, "the debugger answers")
        until(lambda: is_raw(terminal), "the rank has the keyboard again")
        terminal.type(b"p secret + 2000\r")
        until(lambda: "2041" in terminal.text, "the debugger answers")
        terminal.type(b"c\r")
        job.hear("went on")
        job.release("print")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.slow
def test_control_sequences_of_a_rank_do_not_reach_the_other_shell(folder: Path) -> None:
    program = r"""
from rank import *
# In one piece with the prompt: what stands for long without its line end is shown as a line.
os.write(1, b"before\x1b]0;title\x07\x1b[6n\x1b]52;c;aGk=\x07\x1b[31mred\x1b[0m after go? ")
input()
os.write(1, b"\x1b[cmore\x1b]0;title\x07 end? ")
input()
"""
    with running(folder, program, *ANY, store=False) as job:
        # What it has printed by then is shown to whoever comes later.
        until(lambda: "rank 0 waits for input: saferunctl attach" in job.err, "the rank asks")
        control_socket(job)
        with attached(job, "latest", "--rank", "0") as shell:
            until(lambda: "go? " in shell.text, "attached")
            assert "before\x1b[31mred\x1b[0m after " in shell.text
            shell.type(b"\r")
            until(lambda: "end? " in shell.text, "it goes on")
            assert "title" not in shell.text
            assert "\x1b[c" not in shell.text
            shell.type(b"\r")
            assert shell.process.wait() == 0
        assert job.wait() == 0


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_no_rank(folder: Path) -> None:
    program = """
from rank import *
await_release("flood")
for _ in range(300):
    os.write(1, (b"x" * 99 + b"\\n") * 100)
tell("flooded")
await_release("end")
"""
    with running(folder, program, *ANY, store=False) as job, connected(control_socket(job)) as connection:
        connection.sendall(b'{"op": "attach", "rank": "0"}\n')
        assert json.loads(connection.recv(1 << 12)) == {"ok": True, "rank": 0}
        connection.sendall(b'{"size": [80, 24]}\n')
        job.release("flood")
        job.hear("flooded")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize(
    "message",
    [
        b'{"size": [1e999, 1]}\n',
        *(
            pytest.param(message, marks=pytest.mark.slow)
            for message in (
                b'{"size": ["x", {}]}\n',
                b'{"keys": "\\u2603"}\n',
                b'{"keys": 1, "size": 2}\n',
                b"[]\n",
                b"x\n",
                b"{}\n" * 50,
            )
        ),
    ],
)
def test_malformed_messages_end_at_most_the_connection(folder: Path, message: bytes) -> None:
    program = "from rank import *\ntell('heard ' + input('? '))"
    with running(folder, program, *ANY, store=False) as job:
        with connected(control_socket(job)) as connection:
            connection.sendall(b'{"op": "attach", "rank": "0"}\n')
            assert json.loads(connection.recv(1 << 12))["ok"]
            connection.sendall(message)
        with attached(job, "latest", "--rank", "0") as shell:
            until(lambda: "? " in shell.text, "attached")
            shell.type(b"fine\r")
            job.hear("heard fine")
        assert job.wait() == 0


@pytest.mark.slow
def test_what_cannot_be_attached_is_refused_in_two_lines(folder: Path) -> None:
    with running(folder, "from rank import *\nawait_release('end')", *QUIET, store=False) as job:
        control_socket(job)
        for arguments, wanted in (
            (
                ("latest", "--rank", "0"),
                ("rank 0 has no terminal of its own, or has ended", "start the job with --attach any"),
            ),
            (("latest", "--rank", "7"), ("the job has no rank 7", "its ranks are 0-0")),
        ):
            with attached(job, *arguments) as shell:
                assert shell.process.wait() == 1
                for text in wanted:
                    until(lambda text=text: text in " ".join(shell.text.split()), text)  # type: ignore[misc]
        done = saferunctl(job, "attach", "latest", "--rank", "0")
        assert done.returncode == 2
        assert two_lines(done.stderr)[0].startswith("attach needs a terminal")
        job.release("end")
        assert job.wait() == 0
    assert described(job)


@pytest.mark.slow
def test_a_rank_that_dies_at_its_prompt_ends_the_attachment(folder: Path) -> None:
    with running(folder, "from rank import *\ntell('ready')\ninput('? ')", *ANY, store=False) as job:
        (said,) = job.hear("ready")
        control_socket(job)
        with attached(job) as shell:
            until(lambda: "? " in shell.text, "attached")
            os.kill(said.pid, signal.SIGKILL)
            assert shell.process.wait() == 0
            until(lambda: "rank 0 has ended" in shell.text, "it is said")
        assert job.wait() == 1


def test_what_is_asked_after_an_attached_rank_has_ended_is_done(folder: Path) -> None:
    """Ranks that are to save a checkpoint first, and do not end, are stopped in time."""
    program = """
from rank import *
if RANK == 0:
    tell("heard " + input("? "))
else:
    signal.signal(signal.SIGUSR1, lambda *_: tell("saves"))
    tell("ready")
    stay()
"""
    with running(folder, program, *ANY, nproc=2, store=False) as job:
        job.hear("ready")
        control_socket(job)
        with attached(job, "latest", "--rank", "0") as shell:
            until(lambda: "? " in shell.text, "attached")
            shell.type(b"fine\r")
            job.hear("heard fine")
            assert shell.process.wait() == 0
        assert "exit code" in saferunctl(job, "stop", "latest", "--after-checkpoint", "--timeout", "1s").stdout
        job.hear("saves")
        assert job.wait() != 0
        assert "goes on without it" not in job.err
