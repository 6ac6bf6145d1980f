"""One rank has the terminal for itself: the keys are its own, Ctrl-C too, and what the other ranks write waits."""

from __future__ import annotations

import os
import signal
import time

from saferun.console.held_output import HeldOutput
from saferun.errors import suppress
from saferun.launch.stdin_terminals import size_beside_prefix
from saferun.linux.children import signal_child
from saferun.linux.keyboard import Keyboard, StdinTerminal
from saferun.linux.streams import terminal_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank import Rank

TWICE_S = 1.0
"""Ctrl-C twice within this time stops the launch."""
INTERRUPT, QUIT = b"\x03", b"\x1c"
_LONGEST_LINE_BYTES = 4 << 10
# Typed ahead; beyond that keys are lost, as in any terminal.
_MOST_WAITING_BYTES = 64 << 10


class TypedKeys:
    """Keys for one rank: typed into its terminal as it has room, but for Ctrl-C, which is a signal to the rank.

    Args:
        rank: the rank.
        terminal: its stdin.
        stop: stops the launch by a signal, as the keys do without a debugger; None: these keys never do.
    """

    def __init__(self, rank: Rank, terminal: StdinTerminal, stop: Callable[[int], None] | None) -> None:
        self._rank = rank
        self._terminal = terminal
        self._stop = stop
        self._waiting = b""
        self._interrupted_at = float("-inf")

    def take(self, typed: bytes) -> None:
        """Take in what has been typed."""
        for piece in _pieces(typed):
            if piece == QUIT and self._stop is not None:
                self._stop(signal.SIGQUIT)
            elif piece != INTERRUPT:
                self._waiting = (self._waiting + piece)[:_MOST_WAITING_BYTES]
            elif self._stop is not None and time.monotonic() < self._interrupted_at + TWICE_S:
                self._stop(signal.SIGINT)
            else:
                self._interrupted_at = time.monotonic()
                self._waiting = b""
                if self._rank.end is None:  # else its number may be another process's by now
                    signal_child(self._rank.receiver or self._rank.child, signal.SIGINT)
        self.flush()

    def flush(self) -> None:
        """Type what there is room for."""
        if self._waiting:
            self._waiting = self._waiting[self._terminal.write(self._waiting) :]

    @property
    def has_waiting(self) -> bool:
        """Whether something waits for room."""
        return bool(self._waiting)


def _pieces(typed: bytes) -> list[bytes]:
    pieces: list[bytes] = []
    while typed:
        at = min((found for key in (INTERRUPT, QUIT) if (found := typed.find(key)) >= 0), default=-1)
        if at < 0:
            return [*pieces, typed]
        pieces += [typed[:at], typed[at : at + 1]] if at else [typed[:1]]
        typed = typed[at + 1 :]
    return pieces


class KeyboardSession:
    """The terminal of saferun itself belongs to one rank, from the making of this object to ``close``.

    Args:
        context: the launch.
        rank: the rank.
        terminal: its stdin.
        keyboard: of the terminal.

    Attributes:
        asked_at: when the rank was last seen to ask, in monotonic seconds.
        is_given_up: the next rank that asks gets the keyboard, though this one asks.
    """

    def __init__(self, context: LaunchContext, rank: Rank, terminal: StdinTerminal, keyboard: Keyboard) -> None:
        self.rank = rank
        self.keys = TypedKeys(rank, terminal, self._stop)
        self.asked_at = 0.0
        self.is_given_up = False
        self._context = context
        self._keyboard = keyboard
        self._held: list[HeldOutput] = []
        self._terminal = terminal

    def hold(self) -> None:
        """The rank asks: the terminal is its own."""
        self._keyboard.take()
        if self._held:
            return
        for pane in self._context.screen.panes:
            if not pane.target.is_terminal:
                continue
            held = HeldOutput(pane, lambda: self._context.run_dir.keeps_all)
            self._held.append(held)
            for stream in self.rank.streams:
                own = self._context.screen.err if stream.is_stderr else self._context.screen.out
                if own is not pane or stream.console is None:
                    continue

                def show(chunk: bytes, held: HeldOutput = held, source: object = stream) -> None:
                    held.show(source, chunk)

                was_open = stream.console.divert(show)
                if was_open or not stream.is_stderr:
                    begun = stream.last_bytes(_LONGEST_LINE_BYTES)
                    show(begun[begun.rfind(b"\n") + 1 :])
        self.resize()

    def resize(self) -> None:
        """While the rank asks, its terminal is as wide as saferun's: no prefix stands before what is typed."""
        if not self._held:
            return
        size = terminal_size(self._keyboard.fd)
        if self._terminal.is_edited and size != terminal_size(self._terminal.fd):
            self._terminal.resize(*size)
            signal_child(self.rank.receiver or self.rank.child, signal.SIGWINCH)  # a line editor knows the old one

    def echo(self, text: bytes) -> None:
        """Show what the rank's terminal echoes."""
        if self._held:
            self._held[0].show(self, text)

    def release(self) -> None:
        """The rank goes on: lines of all ranks are shown."""
        held, self._held = self._held, []
        if held:
            for stream in self.rank.streams:
                if stream.console is not None:
                    stream.console.divert(None)
            for one in held:
                one.release(f"they are in {self._context.run_dir.path}")

    def close(self) -> None:
        """The terminal is saferun's own again."""
        self.release()
        self._terminal.resize(*size_beside_prefix(self.rank.streams))
        self._keyboard.give_back()

    def _stop(self, signum: int) -> None:
        """As the terminal does it where no rank has it: a signal to all processes of its foreground."""
        self.close()
        with suppress(OSError):
            os.killpg(0, signum)
