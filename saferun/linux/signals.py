"""Signals that are sent to a whole job, or to saferun, and are not meant to stop it.

``scancel -s USR1``, ``srun --signal=USR1@120``, a batch script's ``kill -USR1`` and a scheduler's warning are meant for
the training script: write a checkpoint, request a requeue. Their default action would end saferun, and with it the
ranks.

Signal by signal (signal(7)):

* SIGUSR1, SIGUSR2: schedulers' and users' own. SIGALRM, SIGVTALRM, SIGPROF: ``--signal`` and ``scancel`` know them too;
  saferun has no timers. SIGXCPU: the warning of SGE and LSF before the limit of CPU time, and the kernel's, which
  repeats it and ends the process at the hard limit in any case. SIGPWR: a power failure. SIGIO, SIGSTKFLT and the
  real-time signals: only sent by mistake. saferun survives all of these, and forwards them to ranks that handle them.
* SIGTERM, SIGINT, SIGHUP, SIGQUIT: requests to stop; ``--signals-to-handle`` says which of them stop the job, and those
  that it leaves out keep their defaults, as under torchrun: Python's of SIGINT (``launch/signal_wakeup.py``).
* SIGPIPE, SIGXFSZ: Python ignores them. SIGTSTP, SIGTTIN, SIGCONT: job control of the shell. SIGTTOU is ignored
  (``write_from_background``). SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT: saferun's own crashes, which
  must not be survived.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from saferun.linux.small_files import read_bytes

SURVIVED = frozenset(
    {
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGXCPU,
        signal.SIGPWR,
        signal.SIGIO,
        16,  # SIGSTKFLT, whose name Python has since 3.11, if the C library does
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)
"""Signals whose default action would end a process, but that are not meant to end a job."""

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Requests to stop."""

ignored_here: set[int] = set()
"""Signals that saferun ignores and that programs which it starts get as it got them: with their default actions."""

JOB_SIGNALS = (*STOPPING, *sorted(SURVIVED))
"""Signals that a scheduler may send to every process of a job. Helper processes are still needed then, and ignore
them."""

_ignored_before: set[int] = set()
"""Signals that were ignored when saferun was started; it does not ignore them, but its ranks do."""


def see_children_end() -> None:
    """Where SIGCHLD is ignored, take its default: the kernel would reap children, and keep to itself how they ended.

    To be called before anything is forked. Some daemons start their children so, and torchrun's ranks inherit it.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _ignored_before.add(signal.SIGCHLD)


def ignore_as_before() -> None:
    """In a rank's process, before its program starts: ignore what it would ignore under torchrun."""
    for signum in _ignored_before:
        signal.signal(signum, signal.SIG_IGN)


def not_ignored(signums: Sequence[int]) -> tuple[int, ...]:
    """The signals that stop a launch, without SIGHUP under nohup, which means: outlive the terminal."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(signum for signum in signums if signum != signal.SIGHUP or not is_ignored)


def survive(signums: frozenset[int]) -> None:
    """Handle these signals without effect in this process, so that programs that it starts get the defaults.

    A signal that is already ignored stays so, in those programs too.
    """
    for signum in signums:
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _nothing)


def write_from_background() -> None:
    """Let this process write to its terminal in the background after ``stty tostop``, too.

    torchrun's ranks write there themselves, from sessions of their own, and are not stopped. saferun writes what its
    ranks print: were it stopped, they would be as soon as their pipes are full.
    """
    if signal.getsignal(signal.SIGTTOU) is signal.SIG_DFL:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        ignored_here.add(signal.SIGTTOU)


def witness(fd: int) -> None:
    """Write the number of each survived signal that this process receives to a pipe, as one byte, non-blocking."""
    os.set_blocking(fd, False)
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    for signum in SURVIVED:
        signal.signal(signum, _nothing)


def caught_signals(pid: int) -> frozenset[int]:
    """The signals that a process has handlers for; none if it has exited. Source: proc(5), SigCgt."""
    return _mask_of(pid, (b"SigCgt:",))


def pending_signals(pid: int) -> frozenset[int]:
    """The signals that are pending for a process. Source: proc(5)."""
    return _mask_of(pid, (b"SigPnd:", b"ShdPnd:"))


def _mask_of(pid: int, names: tuple[bytes, ...]) -> frozenset[int]:
    mask = 0
    for line in read_bytes(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(names):
            mask |= int(line.split()[1], 16)
    return frozenset(number + 1 for number in range(64) if mask >> number & 1)


def _nothing(_signum: int, _frame: object) -> None:
    """The wake-up pipe reports the signal."""
