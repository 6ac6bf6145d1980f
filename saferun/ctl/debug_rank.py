"""``saferunctl debug``: a debugger on one rank of a running job, whose hang clock stands until the rank goes on."""

from __future__ import annotations

import argparse
import os
import select
import signal
import termios
import time
from typing import TYPE_CHECKING

from saferun.captures.left_stopped import resumed_if_killed
from saferun.captures.ptrace import ptrace_denial, tracer_of
from saferun.console.stderr import print_error
from saferun.ctl.debuggers import Debugger, find_debugger
from saferun.ctl.other_host import Destination, add_here_argument, find_rank, go
from saferun.ctl.run_directory import add_run_argument, find_run
from saferun.errors import UsageError, printable, suppress
from saferun.linux.prctl import die_with_parent
from saferun.linux.procfs import read_stat
from saferun.model import JsonObject, Value, signal_name
from saferun.text.decoding import MALFORMED, display_text, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from saferun.ctl.live_run import LiveRun

_LONGEST_TEXT = 400
_READ_BYTES = 1 << 10
_CHECK_S = 0.5
# gdb says itself that the rank has ended, where it has noticed. One that is busy with symbols obeys no signal.
_NOTICES_S = 1.0
_OBEYS_S = 10.0
_NO_OPERATION = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_ENDING = frozenset({signal.SIGTERM, signal.SIGHUP})
# At SIGTERM gdb interrupts a rank that runs in it by a SIGINT, which may reach the rank when gdb has detached.
_LET_GO = signal.SIGHUP
_DEAD = frozenset({"Z", "X"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser, living_first=True)
    parser.add_argument("--rank", type=_rank, required=True, help="which rank")
    parser.add_argument(
        "--with",
        dest="debugger",
        choices=("pdb", "gdb"),
        default="",
        help="with which debugger; by default pdb where the rank's Python lets one in (3.14), else gdb",
    )
    add_here_argument(parser)


def _rank(text: str) -> str:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is not a rank number")
    return text


class RankProcess(Value):
    """The process of a rank. ``ticks``: when it started, in clock ticks since boot."""

    rank: int
    pid: int
    ticks: int

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.ticks and stat.state not in _DEAD


def run(arguments: argparse.Namespace) -> int:
    """Debug until the debugger, the rank or the attempt ends."""
    if not (os.isatty(0) and os.isatty(1)):
        what = "debug needs a terminal as stdin and stdout"
        raise UsageError(what, "run it in a terminal; over ssh with: ssh -t")
    found = find_rank(find_run(arguments.run_dir, living_first=True), arguments.rank, "locate", "pid")
    if found is None or isinstance(found, Destination):
        options = ("--with", arguments.debugger) if arguments.debugger else ()
        return go("debug", arguments.rank, found, options, stays=arguments.here)
    live, reply = found
    live.close()
    process = _process(live, _accepted(reply))
    _check(process, live.shown)
    debugger = find_debugger(arguments.debugger, process.pid, live.shown)
    live = live.again()
    try:
        why = _debug(live, process, debugger)
    finally:
        live.close()
    _report(why or f"rank {process.rank} {'goes on' if process.lives else 'has ended'}")
    return 0


def _report(text: str) -> None:
    print_error(f"saferun: {printable(text)}")


# ------------------------------------------------------------------------------------------------------ the rank


def _accepted(reply: JsonObject) -> JsonObject:
    """The answer, unless it is a refusal."""
    if "refused" not in reply:
        return reply
    try:
        what, hint = display_text(reply["refused"], _LONGEST_TEXT), display_text(reply.get("hint", ""), _LONGEST_TEXT)
    except MALFORMED:
        what, hint = "the rank cannot be debugged", ""
    raise UsageError(what, hint)


def _process(live: LiveRun, reply: JsonObject) -> RankProcess:
    try:
        return RankProcess(number(reply["rank"]), number(reply["pid"]), number(reply["ticks"]))
    except MALFORMED:
        raise UsageError(f"the answer of the saferun process of {live.shown} cannot be read", "", exit_code=1) from None


def _check(process: RankProcess, shown: str) -> None:
    """Whether a debugger can be attached, before anything is held for one.

    Raises:
        UsageError: it cannot.
    """
    who = f"rank {process.rank} (pid {process.pid})"
    if not process.lives:
        what = f"{who} cannot be seen from here: it has ended, or this shell is in another PID namespace"
        raise UsageError(what, "run saferunctl debug in the container of the job")
    if tracer := tracer_of(process.pid):
        raise UsageError(f"process {tracer} traces {who} already", "one debugger at a time: end that one first")
    try:
        # Takes the same permission as ptrace, and does nothing to the process. Source: proc(5), /proc/PID/mem.
        os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDONLY))
    except OSError:
        hint = f"saferunctl stacks {shown} shows what can be seen without it"
        raise UsageError(f"{who} cannot be debugged: {ptrace_denial(process.pid)}", hint) from None


# -------------------------------------------------------------------------------------------------- the debugger


def _debug(live: LiveRun, process: RankProcess, debugger: Debugger) -> str:
    """Run the debugger on this terminal. Returns why it was ended; empty: the user has ended it."""
    terminal = termios.tcgetattr(0)
    wake_end, signal_end = os.pipe()
    os.set_blocking(signal_end, False)
    os.set_blocking(wake_end, False)
    # A handler, unlike what is ignored, is not inherited: the debugger has its own Ctrl-C.
    before = {signum: signal.signal(signum, lambda *_: None) for signum in _NO_OPERATION}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    signal.set_wakeup_fd(signal_end, warn_on_full_buffer=False)
    try:
        with resumed_if_killed((process.pid,)):
            _accepted(live.ask("debug", rank=str(process.rank)))
            _report(f"rank {process.rank} of {live.shown} (pid {process.pid}) {debugger.remark}")
            return _RunningDebugger(live, process, debugger, wake_end).wait()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, terminal)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(wake_end)
        os.close(signal_end)


class _RunningDebugger:
    """A debugger at work."""

    def __init__(self, live: LiveRun, process: RankProcess, debugger: Debugger, wake_end: int) -> None:
        self._name = debugger.name
        self._live = live
        self._process = process
        self._wake_end = wake_end
        self._why = ""
        self._kill_at: float | None = None
        self._died_at: float | None = None
        self._is_connected = True
        import subprocess  # slow, and not needed for --help

        own = os.getpid()
        self._child = subprocess.Popen(
            debugger.command,
            preexec_fn=lambda: die_with_parent(own, _LET_GO),  # noqa: PLW1509 - there are no threads
        )

    def wait(self) -> str:
        """Wait for its end. Returns why it was ended; empty: the user has ended it.

        Raises:
            UsageError: it was killed, or has failed.
        """
        try:
            while (status := self._status()) is None:
                for why in self._reasons():
                    self._end(why)
                if self._kill_at is not None and self._kill_at <= time.monotonic():
                    self._child.kill()
        except BaseException:
            self._child.kill()
            raise
        if status < 0 and not (self._why and status == -_LET_GO):  # what it has left stopped is continued
            what = f"{self._name} was ended by {signal_name(-status)}"
            raise UsageError(what, f"rank {self._process.rank} goes on without it", exit_code=1)
        return self._why

    def _status(self) -> int | None:
        """Its exit code, negative where a signal has ended it. It is continued where it has stopped."""
        pid, status = os.waitpid(self._child.pid, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return None
        if os.WIFSTOPPED(status):
            self._child.send_signal(signal.SIGCONT)  # no shell could bring it back: it is this process's
            return None
        self._child.returncode = os.waitstatus_to_exitcode(status)
        return self._child.returncode

    def _reasons(self) -> Iterator[str]:
        """Wait for one thing to happen, and return what ends the debugger."""
        if self._live.has_pending:
            yield from self._heard()
        poll = select.poll()
        poll.register(self._wake_end, select.POLLIN)
        if self._is_connected:
            poll.register(self._live.fileno(), select.POLLIN)
        for fd, _ in poll.poll(_CHECK_S * 1000):
            if fd == self._wake_end:
                if _ENDING.intersection(os.read(fd, _READ_BYTES)):
                    yield f"rank {self._process.rank} goes on"
            else:
                yield from self._heard()
        if self._died_at is None and not self._process.lives:
            self._died_at = time.monotonic()
        if self._died_at is not None and time.monotonic() - self._died_at >= _NOTICES_S:
            yield f"rank {self._process.rank} has ended"

    def _heard(self) -> Iterator[str]:
        messages = self._live.receive()
        if messages is None:
            self._is_connected = False
            yield f"the saferun process of rank {self._process.rank} has closed the connection"
        for message in messages or ():
            with suppress(*MALFORMED):
                yield display_text(message.get("ended", "the launch has ended"), _LONGEST_TEXT)

    def _end(self, why: str) -> None:
        """Have it let go of the rank. One that is killed may leave its breakpoints in it."""
        if self._kill_at is None:
            self._why, self._kill_at = why, time.monotonic() + _OBEYS_S
            self._child.send_signal(_LET_GO)
            self._child.send_signal(signal.SIGCONT)
