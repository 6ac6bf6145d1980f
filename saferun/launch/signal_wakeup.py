"""Signals: what each of those that this process gets leads to. A pipe wakes the loop, which reads them there."""

from __future__ import annotations

import os
import signal
import time

from saferun.launch.launch_context import LaunchContext
from saferun.launch.passed_signals import PassedSignals
from saferun.linux.signals import not_ignored, write_from_background
from saferun.model import signal_name
from saferun.supervisor.events import SignalReceived

_READ_BYTES = 4096
# SIGINT as Python has it, and as saferun's own command leaves it (``saferun/__main__.py``).
_PYTHONS = (signal.SIG_DFL, signal.default_int_handler)


class Wakeup:
    """The signals of a launch.

    Args:
        context: the launch.
        passed: takes those that do not end it.

    Attributes:
        is_stopped: whether an order to stop has come.
        is_interrupted: whether one has come by a SIGINT that ``--signals-to-handle`` leaves out.
    """

    def __init__(self, context: LaunchContext, passed: PassedSignals) -> None:
        self.fd = -1  # readable when a signal has come
        self._context = context
        self._stopping = frozenset(context.config.signals)
        self._passed = passed
        self.is_stopped = False
        self.is_interrupted = False
        self._interrupts = False  # SIGINT is such a signal

    def open(self) -> None:
        """Handle signals from now on."""
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._context.poller.watch_first(self.fd, self._take_in)
        signal.signal(signal.SIGCHLD, _ignore)
        if any(pane.target.is_terminal for pane in self._context.screen.panes):
            signal.signal(signal.SIGWINCH, _ignore)
            signal.signal(signal.SIGCONT, _ignore)
        write_from_background()  # also to a terminal that is written like a file
        if signal.SIGINT not in self._stopping and signal.getsignal(signal.SIGINT) in _PYTHONS:
            # torchrun ends like any Python program then, and its ranks have their grace on the way out.
            self._stopping |= {signal.SIGINT}
            self._interrupts = True
            signal.signal(signal.SIGINT, _ignore)
        for signum in not_ignored(self._context.config.signals):
            try:
                signal.signal(signum, _ignore)
            except (OSError, ValueError):
                self._context.warn(f"{signal_name(signum)} cannot be handled")
        self._passed.open(self._context.config.signals)
        if self._context.config.hosts.stop_with_parent:
            from saferun.linux.ancestors import Ancestors

            Ancestors(self._context.poller, self._on_parent_exit)

    def _take_in(self) -> bool:
        """Take in the signals that have come. Returns whether nothing else is to be done before they are obeyed."""
        is_first = False
        for signum in os.read(self.fd, _READ_BYTES):
            if signum == signal.SIGCHLD:
                self._context.loop.reap()
            elif signum == signal.SIGWINCH:
                self._context.guarded("resize the ranks' terminals", self._resize)
            elif signum == signal.SIGCONT:
                self._context.screen.forget_rows()
            elif signum in self._stopping:
                is_first = self._stop(signum) or is_first
            else:
                self._passed.take(signum, time.monotonic())
        return is_first

    def _resize(self) -> None:
        """The window has another size."""
        group, terminals = self._context.current.group, self._context.terminals
        if group is not None:
            group.resize()
            if terminals is not None:
                terminals.resize()
            group.note_size()

    def _on_parent_exit(self, why: str) -> None:
        """Ranks whose launcher is gone would train on forever: nothing could stop them."""
        self._stop(signal.SIGTERM, why)

    def _stop(self, signum: int, why: str = "") -> bool:
        """Post the order to stop. The first one is obeyed at once: a flood of them holds the loop up no further."""
        is_first, self.is_stopped = not self.is_stopped, True
        self.is_interrupted |= self._interrupts and signum == signal.SIGINT
        if is_first:
            self._context.loop.is_interrupted = True
        idle_s = self._context.investigation.hangs.strict_idle_s()
        self._context.post(SignalReceived(time.monotonic(), self._context.attempt, signum, why, idle_s))
        return is_first

    def is_hurried(self) -> bool:
        """Whether an order to stop has come that was not obeyed: the launch was over."""
        return any(isinstance(event, SignalReceived) for event in self._context.events)

    def read_stop(self) -> bool:
        """Read the signals that have come after the loop's end. Returns whether one is an order to stop."""
        return any(signum in self._stopping for signum in os.read(self.fd, _READ_BYTES))

    @staticmethod
    def close() -> None:
        """Hear of no more signals."""
        signal.set_wakeup_fd(-1)


def _ignore(_signum: int, _frame: object) -> None:
    """The wake-up pipe wakes the loop."""
