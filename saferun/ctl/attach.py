"""``saferunctl attach``: this terminal becomes the terminal of one rank, for a debugger or a prompt."""

from __future__ import annotations

import argparse
import os
import select
import signal
import termios
from typing import TYPE_CHECKING

from saferun.console.harmless import HarmlessText
from saferun.console.stderr import print_error
from saferun.ctl.other_host import Destination, add_here_argument, find_rank, go
from saferun.ctl.run_directory import add_run_argument, find_run
from saferun.errors import UsageError, printable, suppress
from saferun.linux.streams import terminal_size
from saferun.linux.terminal_mode import raw_mode

if TYPE_CHECKING:
    from saferun.ctl.live_run import LiveRun
    from saferun.model import JsonObject

_DETACH = b"\x1d"
_READ_BYTES = 1 << 10
_DETACHED = "detached from rank {rank}, which goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser, living_first=True)
    parser.add_argument("--rank", type=_rank, help="which rank; without it the one that asks for input")
    add_here_argument(parser)


def _rank(text: str) -> str:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is not a rank number")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Attach until the user detaches or the rank ends."""
    if not (os.isatty(0) and os.isatty(1)):
        what = "attach needs a terminal as stdin and stdout"
        raise UsageError(what, "run it in a terminal; over ssh with: ssh -t")
    wanted = arguments.rank or ""
    found = find_rank(find_run(arguments.run_dir, living_first=True), wanted, "attach", "rank")
    if found is None or isinstance(found, Destination):
        return go("attach", wanted, found, stays=arguments.here)
    live, reply = found
    rank = reply["rank"]
    try:
        _report(f"rank {rank} of {live.shown}: Ctrl-] detaches, Ctrl-C goes to the rank")
        how = _Terminal(live).pass_keys()
    finally:
        live.close()
    _report(how.format(rank=rank))
    return 0


def _report(text: str) -> None:
    print_error(f"saferun: {printable(text)}")


class _Terminal:
    """This terminal, while a rank has it."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._harmless = HarmlessText()
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def pass_keys(self) -> str:
        """Pass keys and output on; returns how it ended, in words."""
        before = termios.tcgetattr(0)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for signum in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)
        try:
            termios.tcsetattr(0, termios.TCSANOW, raw_mode(before))
            self._send_size()
            while (ended := self._step()) is None:
                pass
            return ended
        finally:
            signal.set_wakeup_fd(-1)
            with suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSANOW, before)
            with suppress(OSError):
                os.write(1, b"\n")

    def _send_size(self) -> None:
        self._live.send({"size": list(terminal_size(0))})

    def _step(self) -> str | None:
        """Wait for one thing to happen; returns how it ended, None where it goes on."""
        if self._live.has_pending:
            return self._show()
        poll = select.poll()
        for fd in (0, self._signals, self._live.fileno()):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            ended = self._show() if fd == self._live.fileno() else self._type() if fd == 0 else self._obey()
            if ended is not None:
                return ended
        return None

    def _obey(self) -> str | None:
        """Signals have come."""
        if any(signum != signal.SIGWINCH for signum in os.read(self._signals, _READ_BYTES)):
            return _DETACHED
        self._send_size()
        return None

    def _show(self) -> str | None:
        """Something has come from the saferun."""
        messages = self._live.receive()
        if messages is None:
            return "the saferun process of rank {rank} has closed the connection"
        return next((ended for message in messages if (ended := self._take(message)) is not None), None)

    def _type(self) -> str | None:
        """Keys have been typed, or the terminal is gone."""
        try:
            typed = os.read(0, _READ_BYTES)
        except OSError:
            typed = b""
        keys, detach, _ = typed.partition(_DETACH)
        if keys:
            self._live.send({"keys": keys.decode("latin-1")})
        return _DETACHED if detach or not typed else None

    def _take(self, message: JsonObject) -> str | None:
        if isinstance(text := message.get("text"), str):
            content = self._harmless.feed(text.encode("latin-1", "replace"))
            while content:
                content = content[os.write(1, content) :]
        return None if "text" in message else "rank {rank} has ended"
