"""Signals that are meant for the training script: saferun survives them, and passes them on where that is wanted.

A scheduler sends such a signal to every process of the job, ranks included; a batch script's ``kill`` reaches saferun
alone. The difference matters: a rank that gets the signal twice writes two checkpoints and asks for two requeues. So
another process of saferun's, which stands to the sender as the ranks do (a child in a session of its own), is the
witness: what it got as well, the ranks have got. Only what it did not get is passed on, and only to ranks that handle
it: it would end the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from saferun.launch.launch_context import LaunchContext
from saferun.linux.children import signal_child
from saferun.linux.helper import PartBase
from saferun.linux.signals import SURVIVED, caught_signals, pending_signals, survive
from saferun.model import signal_name

# How long the witness may take to be reached: a sender signals many processes one after the other. A witness
# that has been reached and does not get a processor is known by what is pending.
_WITNESS_S = 0.25
_READ_BYTES = 4096


class PassedSignals(PartBase):
    """The signals of a launch that do not end it.

    Args:
        context: the launch.
        witness_pid: the process that gets what the ranks get.
        witness_fd: the pipe on which it reports what it got, as :func:`saferun.linux.signals.witness` does.
    """

    def __init__(self, context: LaunchContext, witness_pid: int, witness_fd: int) -> None:
        self._context = context
        self._witness_pid = witness_pid
        self._witness_fd = witness_fd
        self._is_open = False
        self._due: dict[int, float] = {}  # signals that came, and when it is decided who else got them
        self._witnessed: dict[int, float] = {}  # when the witness last got one
        self._reported: set[str] = set()

    def open(self, handled: Sequence[int]) -> None:
        """Survive the signals from now on. ``handled``: those that stop the job instead."""
        survive(SURVIVED.difference(handled))
        self._is_open = True
        self._watch_witness()

    def set_witness(self, pid: int, fd: int) -> None:
        """Another process is the witness from now on."""
        if self._is_open:
            self.close()
        self._witness_pid, self._witness_fd = pid, fd
        if self._is_open:
            self._watch_witness()

    def _watch_witness(self) -> None:
        if self._witness_fd >= 0:
            os.set_blocking(self._witness_fd, False)
            self._context.guarded_poller.watch(self._witness_fd, self._on_witness)

    def take(self, signum: int, now: float) -> None:
        """This process has got one."""
        if signum in SURVIVED:
            self._due.setdefault(signum, now + _WITNESS_S)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return min(self._due.values(), default=None)

    def tick(self, now: float) -> None:
        """Pass on what is to be passed on by now."""
        for signum in [signum for signum, due in self._due.items() if due <= now]:
            came_at = self._due.pop(signum) - _WITNESS_S
            if self._witness_fd < 0:
                # Who else got it is not known, and twice is worse than not at all.
                self._report_once(f"{signal_name(signum)}: the job goes on")
            elif self._have_all_got(signum, came_at):
                # Ranks that it has ended say that themselves.
                if self._context.current.living():
                    self._report_once(f"{signal_name(signum)} was sent to saferun and its ranks; the job goes on")
            else:
                self._pass_on(signum)

    def _have_all_got(self, signum: int, came_at: float) -> bool:
        if self._witnessed.get(signum, float("-inf")) >= came_at - _WITNESS_S:
            return True
        return signum in pending_signals(self._witness_pid)

    def _pass_on(self, signum: int) -> None:
        ranks = [rank for rank in self._context.current.living() if signum in caught_signals(rank.pid)]
        for rank in ranks:
            if (receiver := rank.receiver) is not None:
                signal_child(receiver, signum)
        name = signal_name(signum)
        if ranks:
            count = "1 rank that handles it" if len(ranks) == 1 else f"{len(ranks)} ranks that handle it"
            self._context.report(f"{name}: passed on to {count}")
        else:
            self._report_once(f"{name}: no rank handles it, and the job goes on (--signals-to-handle)")

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._context.report_signal(text)  # a scheduler sends it to all hosts

    def _on_witness(self) -> None:
        content = b""
        try:
            content = os.read(self._witness_fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            pass
        if not content:
            self.close()  # the witness is gone
            return
        now = time.monotonic()
        self._witnessed.update(dict.fromkeys(content, now))

    def close(self) -> None:
        """The launch is over, or the witness is gone."""
        if self._witness_fd >= 0:
            self._context.guarded_poller.unwatch(self._witness_fd)
            os.close(self._witness_fd)
            self._witness_fd = -1
