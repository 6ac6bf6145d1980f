r"""On a terminal the keyboard goes to the rank that asks for input: debuggers and prompts in jobs of several ranks."""

from __future__ import annotations

import os
import re
import signal
import termios
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.launch.stdin_terminals import open_stdin
from saferun.linux import keyboard
from tests.breadth import slow_but
from tests.process.launching import customized, in_saferun, running, until
from tests.process.somebody import as_user, needs_root
from tests.process.test_terminal import Terminal, on_terminal

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "(Pdb) "
ONE_ASKS = """
from rank import *
if RANK == 1:
    secret = 41
    breakpoint()
    tell("went on")
else:
    await_release("print")
    print("printed by", RANK, flush=True)
    tell("printed")
await_release("end")
"""


# A rank keeps the screen for a moment after its prompt: for its answer, which takes longer on a loaded machine.
PATIENT = in_saferun("import saferun.launch.rank_terminals as part; part._SCREEN_S = 10.0")


def prompts(terminal: Terminal, count: int = 1) -> None:
    """Wait until the debugger has asked so many times."""
    until(lambda: terminal.text.count(PROMPT) >= count, f"{count} prompts")


def is_raw(terminal: Terminal) -> bool:
    """Whether a rank has the keyboard."""
    return not termios.tcgetattr(terminal.slave)[3] & termios.ISIG


def asks(terminal: Terminal, count: int = 1) -> None:
    """Wait until the debugger has asked, and its rank has the keyboard."""
    prompts(terminal, count)
    until(lambda: is_raw(terminal), "the rank has the keyboard")


def test_the_rank_that_asks_has_the_keyboard_and_line_editing(tmp_path: Path) -> None:
    """The prompt begins its row, and the arrow keys bring back what was typed before, as in plain Python."""
    environ = customized(tmp_path, PATIENT)
    with on_terminal(tmp_path, ONE_ASKS, nproc=3, environ=environ) as (job, terminal):
        asks(terminal)
        terminal.type(b"p secret + 1000\r")
        until(lambda: "\n1041\r\n" in terminal.text, "the debugger answers")
        prompts(terminal, 2)
        terminal.type(b"\x1b[A\x1b[D2\r")
        until(lambda: "\n10061\r\n" in terminal.text, "the line was edited")
        assert f"\n{PROMPT}p secret" in terminal.text
        terminal.type(b"c\r")
        job.hear("went on")
        job.release("print")
        job.release("end")
        assert job.wait() == 0
        assert terminal.text.count("rank 1 has the keyboard") == 1


def test_what_other_ranks_print_waits_for_the_one_that_asks(tmp_path: Path) -> None:
    environ = customized(tmp_path, PATIENT)
    with on_terminal(tmp_path, ONE_ASKS, nproc=3, environ=environ) as (job, terminal):
        asks(terminal)
        job.release("print")
        job.hear("printed", 2)
        terminal.type(b"p secret + 1000\r")
        until(lambda: "\n1041\r\n" in terminal.text, "the debugger answers")
        path = "*/attempt_0/rank_0/stdout.log"
        until(lambda: [b for b in job.run_dir.glob(path) if b"printed" in b.read_bytes()], "the files do not wait")
        assert "printed by" not in terminal.text
        terminal.type(b"c\r")
        until(lambda: terminal.text.count("printed by") == 2, "it is shown when the rank goes on")
        job.release("end")
        assert job.wait() == 0


def test_a_plain_prompt_of_one_of_several_ranks_is_answered_with_an_echo(tmp_path: Path) -> None:
    program = """
from rank import *
if RANK == 2:
    sys.stdout.write("your name? ")
    sys.stdout.flush()
    tell("heard " + sys.stdin.readline().strip())
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=3) as (job, terminal):
        until(lambda: "your name? " in terminal.text and is_raw(terminal), "it asks")
        terminal.type(b"Adx\x7fa\r")
        job.hear("heard Ada")
        until(lambda: "your name? Ad" in terminal.text, "the terminal has echoed it")
        job.release("end")
        assert job.wait() == 0


def test_a_rank_that_reads_without_a_prompt_gets_what_is_typed(tmp_path: Path) -> None:
    program = """
from rank import *
tell("ready")
if RANK == 1:
    tell("heard " + sys.stdin.readline().strip())
    tell("heard " + sys.stdin.readline().strip())
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        job.hear("ready", 2)
        terminal.type(b"one\n")
        job.hear("heard one")
        terminal.type(b"two\r")
        job.hear("heard two")
        job.release("end")
        assert job.wait() == 0


def test_what_is_typed_reaches_a_rank_that_reads_in_another_thread(tmp_path: Path) -> None:
    """As Enter that ends a training early; the other threads are torch's."""
    program = """
from rank import *
import threading
def read():
    tell("read " + sys.stdin.readline().strip())
for _ in range(20):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if RANK == 1:
    threading.Thread(target=read, daemon=True).start()
tell("ready")
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        job.hear("ready", 2)
        terminal.type(b"stop\n")
        assert [said.rank for said in job.hear("read stop")] == [1]
        job.release("end")
        assert job.wait() == 0
        assert "has the keyboard" not in terminal.text


@pytest.mark.parametrize("asks", [True, False], ids=["a rank asks", "none asks"])
def test_what_is_typed_ahead_stays_for_the_rank_that_asks_or_for_the_shell(tmp_path: Path, asks: bool) -> None:
    """However long it takes: under torchrun the first reader gets it."""
    program = """
from rank import *
tell("ready")
await_release("ask")
if RANK == 1 and sys.argv[1] == "asks":
    tell("read " + sys.stdin.readline().strip())
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2, arguments=["asks" if asks else ""]) as (job, terminal):
        job.hear("ready", 2)
        terminal.type(b"ahead\n")
        time.sleep(4.0)  # saferun has looked for a reader several times
        job.release("ask")
        assert not asks or [said.rank for said in job.hear("read ahead")] == [1]
        job.release("end")
        assert job.wait() == 0
        os.set_blocking(terminal.slave, False)
        assert asks or os.read(terminal.slave, 100) == b"ahead\n"


def test_ctrl_c_stops_a_start_that_does_not_end_though_a_rank_has_the_keyboard(tmp_path: Path) -> None:
    """The program of another rank may come from a file system that hangs."""
    stays = customized(tmp_path, in_saferun("import saferun.launch.exec_wait as part; part.ExecWait._conclude = print"))
    program = "from rank import *\nignore(signal.SIGINT)\ntell('ready')\nstay()"
    with on_terminal(tmp_path, program, "--attach", "0", nproc=2, environ=stays) as (job, terminal):
        job.hear("ready", 2)
        until(lambda: is_raw(terminal), "the rank has the keyboard")
        terminal.type(b"\x1c")
        assert job.wait() != 0


def test_two_ranks_that_ask_have_the_keyboard_one_after_the_other(tmp_path: Path) -> None:
    program = """
from rank import *
breakpoint()
tell("went on")
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        asks(terminal)
        until(lambda: "waits for input, too" in terminal.text, "the other one is announced")
        terminal.type(b"p RANK + 700\r")
        until(lambda: "\n700\r\n" in terminal.text or "\n701\r\n" in terminal.text, "one answers")
        first = 0 if "\n700\r\n" in terminal.text else 1
        terminal.type(b"c\r")
        job.hear("went on")
        until(lambda: f"rank {1 - first} has the keyboard" in terminal.text, "it is the other one's turn")
        asks(terminal, 3)
        terminal.type(b"p RANK + 700\r")
        until(lambda: f"\n{701 - first}\r\n" in terminal.text, "the other one answers")
        terminal.type(b"c\r")
        job.hear("went on")
        job.release("end")
        assert job.wait() == 0


def announced(terminal: Terminal) -> list[str]:
    """The ranks that have had the keyboard, one after the other."""
    return re.findall(r"rank (\d) has the keyboard", terminal.text)


def test_a_key_gives_the_keyboard_to_the_next_rank_that_asks(tmp_path: Path) -> None:
    program = "from rank import *\nbreakpoint()\ntell('went on')\nawait_release('end')"
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        asks(terminal)
        until(lambda: "waits for input, too" in terminal.text, "the other one is announced")
        for _ in range(2):
            before = len(announced(terminal))
            terminal.type(b"\x1d")
            until(lambda before=before: len(announced(terminal)) > before, "the next one has it")  # type: ignore[misc]
        terminal.type(b"c\r")
        (said,) = job.hear("went on")
        until(lambda: announced(terminal)[-1] != str(said.rank), "it is the turn of the other one")
        terminal.type(b"c\r")
        job.hear("went on")
        job.release("end")
        assert job.wait() == 0


def test_ctrl_c_at_a_prompt_is_for_the_debugger(tmp_path: Path) -> None:
    """Who interrupts a command of the debugger does not want to lose the job."""
    with on_terminal(tmp_path, ONE_ASKS, nproc=2) as (job, terminal):
        asks(terminal)
        terminal.type(b"p 6 *\x03")
        until(lambda: "--KeyboardInterrupt--" in terminal.text, "the debugger has it")
        prompts(terminal, 2)
        terminal.type(b"c\r")
        job.hear("went on")
        job.release("print")
        job.release("end")
        assert job.wait() == 0
        assert not job.has_happened("SignalReceived")


@pytest.mark.parametrize("keys", [b"\x03\x03", pytest.param(b"\x1c", marks=pytest.mark.slow)])
def test_ctrl_c_twice_or_ctrl_backslash_stops_the_launch_from_a_prompt(tmp_path: Path, keys: bytes) -> None:
    with on_terminal(tmp_path, ONE_ASKS, "--shutdown-timeout", "1", nproc=2) as (job, terminal):
        before = termios.tcgetattr(terminal.slave)
        asks(terminal)
        terminal.type(keys)
        assert job.wait() == 1
        assert job.has_happened("SignalReceived", signum=signal.SIGINT if keys[0] == 3 else signal.SIGQUIT)
        assert termios.tcgetattr(terminal.slave) == before


@pytest.mark.slow
def test_ctrl_c_stops_the_launch_where_no_rank_asks(tmp_path: Path) -> None:
    with on_terminal(tmp_path, ONE_ASKS, "--shutdown-timeout", "1", nproc=2) as (job, terminal):
        asks(terminal)
        terminal.type(b"c\r")
        job.hear("went on")
        until(lambda: not is_raw(terminal), "the keyboard is saferun's own again")
        terminal.type(b"\x03")
        assert job.wait() == 1
        assert job.has_happened("SignalReceived", signum=signal.SIGINT)


@pytest.mark.parametrize("victim", slow_but(["rank", "saferun"], "saferun"))
def test_the_terminal_is_left_as_it_was_when_a_process_dies_at_a_prompt(tmp_path: Path, victim: str) -> None:
    with on_terminal(tmp_path, ONE_ASKS, nproc=2, sweeps=False) as (job, terminal):
        before = termios.tcgetattr(terminal.slave)
        asks(terminal)
        if victim == "rank":
            (pid,) = [pid for pid in job.processes() if os.path.exists(f"/proc/{pid}/fd/0") and is_rank(pid, 1)]
            os.kill(pid, signal.SIGKILL)
            assert job.wait() == 1
        else:
            job.send(signal.SIGKILL)
            job.wait()
        until(lambda: not job.processes(), "all are gone")
        until(lambda: termios.tcgetattr(terminal.slave) == before, "the terminal is as before")


def is_rank(pid: int, rank: int) -> bool:
    """Whether a process is this rank."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0RANK={rank}\0".encode() in b"\0" + file.read()
    except OSError:
        return False


@pytest.mark.slow
def test_the_end_of_the_terminal_ends_a_job_in_a_debugger(tmp_path: Path) -> None:
    with on_terminal(tmp_path, ONE_ASKS, "--shutdown-timeout", "1", nproc=2) as (job, terminal):
        asks(terminal)
        terminal.close()
        assert job.wait() == 1
        assert job.has_happened("SignalReceived", signum=signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_flood_of_another_rank_does_not_wait_for_the_debugger_and_is_bounded(tmp_path: Path, megabytes: int) -> None:
    program = """
from rank import *
if RANK == 1:
    breakpoint()
else:
    for number in range(int(sys.argv[1])):
        os.write(1, (b"x" * 99 + b"\\n") * 10_000)
    print("the last line", flush=True)
    tell("flooded")
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2, arguments=[str(megabytes)]) as (job, terminal):
        asks(terminal)
        # A pseudo-terminal gives a few kilobytes at a time: on a busy machine 100 MB take more than a minute.
        job.hear("flooded", timeout_s=600.0)
        size = megabytes * 1_000_000 + len("the last line\n")
        (log,) = job.run_dir.glob("*/attempt_0/rank_0/stdout.log")
        until(lambda: log.stat().st_size == size, "the file has all of it")
        assert "the last line" not in terminal.text
        terminal.type(b"c\r")
        until(lambda: "the last line" in terminal.text, "the newest lines are shown")
        assert "lines of other ranks are not shown; they are in" in " ".join(terminal.text.split())
        assert len(terminal.text) < 4 << 20
        job.release("end")
        assert job.wait() == 0


@pytest.mark.slow
def test_a_rank_in_a_debugger_is_no_hang(tmp_path: Path) -> None:
    """The others wait for it, for as long as the user thinks."""
    program = """
from rank import *
if RANK == 1:
    breakpoint()
    tell("went on")
else:
    time.sleep(6)
    tell("slept")
stay()
"""
    options = ("--hang-timeout", "1", "--on-hang", "stop", "--external-wait-timeout", "0")
    with on_terminal(tmp_path, program, *options, nproc=2) as (job, terminal):
        asks(terminal)
        job.hear("slept")
        assert not job.has_happened("HangSuspected")
        terminal.type(b"c\r")
        job.hear("went on")
        assert job.wait() == 1
        assert job.has_happened("HangSuspected")


def test_with_attach_off_all_ranks_have_the_terminal_itself(tmp_path: Path) -> None:
    program = "import os; print('stdin', os.ttyname(0))"
    with on_terminal(tmp_path, program, "--attach", "off", nproc=2) as (job, terminal):
        assert job.wait() == 0
        until(lambda: terminal.text.count(f"stdin {os.ttyname(terminal.slave)}") == 2, "both have it")


def test_without_a_terminal_the_ranks_have_saferuns_stdin(tmp_path: Path) -> None:
    """A script that reads a pipe reads it as under torchrun."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"piped\n")
    os.close(write_end)
    with running(tmp_path, "import sys; print(sys.stdin.isatty(), sys.stdin.read())", stdin=read_end) as job:
        os.close(read_end)
        assert job.wait() == 0
        assert "False piped" in job.out


def test_attach_gives_the_keyboard_to_one_rank_from_the_beginning(tmp_path: Path) -> None:
    program = """
from rank import *
tell("ready")
if RANK == 1:
    await_release("read")
tell("heard " + sys.stdin.readline().strip())
"""
    with on_terminal(tmp_path, program, "--attach", "1", nproc=2) as (job, terminal):
        job.hear("ready", 2)
        until(lambda: is_raw(terminal), "the rank has the keyboard")
        terminal.type(b"ahead\r")
        job.release("read")
        (said,) = job.hear("heard ahead")
        assert said.rank == 1
        until(lambda: not is_raw(terminal), "its end gives the keyboard back")
        terminal.type(b"\x1c")
        assert job.wait() == 1


def test_stdin_is_as_wide_as_the_output_and_a_rank_hears_of_a_new_size(tmp_path: Path) -> None:
    """Programs ask stdin (rich, ``stty size``), stdout or the environment, and curses waits for SIGWINCH."""
    program = """
from rank import *
import shutil
def sizes():
    return os.get_terminal_size(0), os.get_terminal_size(1), shutil.get_terminal_size()
signal.signal(signal.SIGWINCH, lambda *_: tell("resized %d %d %d" % tuple(size.columns for size in sizes())))
tell("size %d %d %d" % tuple(size.columns for size in sizes()))
await_release("end")
"""
    with on_terminal(tmp_path, program, "--prefix", "[{rank}] ", nproc=2) as (job, terminal):
        job.hear("size 86 86 86", 2)
        terminal.resize(20, 61)
        job.hear("resized 57 57 57", 2)
        job.release("end")
        assert job.wait() == 0


def test_a_rank_that_asks_again_and_again_has_the_keyboard_all_the_time(tmp_path: Path) -> None:
    """Each step of a debugger goes on for a moment; keys that are typed ahead are for the rank as well."""
    program = """
from rank import *
if RANK == 0:
    breakpoint()
    time.sleep(0.6)
    value = 17
    tell("stepped")
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        asks(terminal)
        terminal.type(b"n\rn\rn\rp value + 3000\r")
        job.hear("stepped")
        until(lambda: "3017\r\n" in terminal.text, "all of it has been typed")
        assert is_raw(terminal)
        terminal.type(b"c\r")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize("wrapped", slow_but([True, False], "True"), ids=["script", "child"])
def test_no_shell_takes_the_terminal_of_a_rank_and_its_upload_goes_on(tmp_path: Path, wrapped: bool) -> None:
    """bash, as the leader of a session, opens the terminal that is its stdin; the end of it would end the upload.

    With torchrun that terminal is of the user's session, and nobody else's.
    """
    upload = '(sleep 0.7; echo whole > "$OUT") & sleep 0.2'
    program = f"""
from rank import *
import subprocess
os.environ["OUT"] = f"{{FOLDER}}/uploaded.{{RANK}}"
if {wrapped}:
    os.execvp("bash", ["bash", "-c", {upload!r}])
subprocess.Popen(["bash", "-c", {upload!r}], start_new_session=True)
"""
    with on_terminal(tmp_path, program, nproc=2) as (job, _):
        assert job.wait() == 0
        assert [(tmp_path / f"uploaded.{rank}").read_text() for rank in (0, 1)] == ["whole\n"] * 2


def test_where_no_process_can_own_a_terminal_the_ranks_have_saferuns_stdin(tmp_path: Path) -> None:
    """As under torchrun, with one line."""
    fails = "import saferun.linux.keyboard as keyboard\n    def fail(_): raise OSError(11, 'no more processes')\n"
    fails += "    keyboard.own_terminal = fail"
    program = "from rank import *\ntell(os.readlink('/proc/self/fd/0'))\nawait_release('end')"
    environ = customized(tmp_path, in_saferun(fails))
    with on_terminal(tmp_path / "launch", program, nproc=2, environ=environ) as (job, terminal):
        until(lambda: len(job.said()) == 2, "the ranks run")
        assert {word.word for word in job.said()} == {os.ttyname(terminal.slave)}
        job.release("end")
        assert job.wait() == 0
        assert terminal.text.count("no pseudo-terminal for the input of rank") == 2


def test_the_program_of_a_shell_script_asks_for_its_rank(tmp_path: Path) -> None:
    """The rank itself waits for its child."""
    program = """
from rank import *
import subprocess
if RANK == 0:
    ask = "import sys; print('name? ', end='', flush=True); print('heard', sys.stdin.readline().strip())"
    tell(subprocess.run([sys.executable, "-c", ask], stdout=2).returncode)
await_release("end")
"""
    with on_terminal(tmp_path, program, nproc=2) as (job, terminal):
        until(lambda: "name? " in terminal.text and is_raw(terminal), "it has the keyboard")
        terminal.type(b"Ada\r")
        until(lambda: "heard Ada" in terminal.text, "it has got what was typed")
        job.release("end")
        assert job.wait() == 0


@needs_root
def test_a_terminal_of_another_user_stays_the_stdin_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After su: saferun has inherited the terminal, and may not open it; nobody would feed another one."""
    monkeypatch.setattr(keyboard, "may_get_keyboard", lambda: True)
    monkeypatch.setattr(keyboard, "has_keyboard", lambda: False)
    config: Any = SimpleNamespace(output=SimpleNamespace(attach="auto"))
    master, slave = os.openpty()
    before = os.dup(0)
    try:
        os.fchmod(slave, 0o600)
        os.dup2(slave, 0)
        assert as_user(lambda: repr(open_stdin(config, 0, (), print))) == "(None, 0)"
        terminal, stdin = open_stdin(config, 0, (), print)
        assert terminal is not None
        terminal.close()
        os.close(stdin)
    finally:
        os.dup2(before, 0)
        for fd in (before, master, slave):
            os.close(fd)


def test_a_search_for_prompts_that_fails_is_said_once_and_costs_nothing_else(tmp_path: Path) -> None:
    fails = "import saferun.launch.rank_terminals as part; part.RankTerminals._on_chunk = None"
    program = (
        "from rank import *\nfor number in range(3):\n    print('printed', number, flush=True)\n    time.sleep(0.1)\n"
    )
    environ = customized(tmp_path, in_saferun(fails))
    with on_terminal(tmp_path / "run", program, nproc=2, environ=environ) as (job, terminal):
        assert job.wait() == 0
        until(lambda: terminal.text.count("printed 2") == 2, "everything is shown")
        assert terminal.text.count("cannot look for a prompt") == 1
