"""Signals that are sent to a whole job, or to a saferun, and are no order to stop: which they are, and who gets them.

``scancel -s USR1``, ``srun --signal=USR1@120``, a batch script's ``kill -USR1`` and a scheduler's warning mean the
training script: write a checkpoint, ask for a requeue. Their default ends a process, and with it the ranks.

Signal by signal (signal(7)):

* SIGUSR1, SIGUSR2: schedulers' and users' own. SIGALRM, SIGVTALRM, SIGPROF: ``--signal`` and ``scancel`` know them too;
  saferun has no timers. SIGXCPU: the warning of SGE and LSF before the limit of CPU time, and the kernel's, which
  repeats it and ends the process at the hard limit in any case. SIGPWR: a power supply that runs out. SIGIO, SIGSTKFLT
  and the real-time signals: sent to the wrong process at most. All of these are survived, and passed on to ranks that
  handle them.
* SIGTERM, SIGINT, SIGHUP, SIGQUIT: orders to stop; ``--signals-to-handle`` says which of them stop the job, and those
  that it leaves out keep their defaults, as under torchrun.
* SIGPIPE, SIGXFSZ: Python ignores them. SIGTSTP, SIGTTIN, SIGTTOU, SIGCONT: job control of the shell. SIGSEGV, SIGBUS,
  SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT: saferun's own crashes, which must not be survived.
"""

from __future__ import annotations

import os
import signal

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
        16,  # SIGSTKFLT, whose name Python has since 3.11 and only where the C library has it
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)
"""Signals whose default would end a process, and that are not meant to end a job."""

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Orders to stop."""

JOB_SIGNALS = (*STOPPING, *sorted(SURVIVED))
"""What a scheduler may send to every process of a job. Those who look at the ranks, or speak with other hosts, are
still needed then, and ignore them."""


def survive(signums: frozenset[int]) -> None:
    """Have these signals do nothing in this process, and let programs that it starts find the defaults.

    A signal that is ignored already stays ignored, in those programs too.
    """
    for signum in signums:
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _nothing)


def witness(fd: int) -> None:
    """Write the number of each survived signal that this process gets to a pipe, as one byte, without ever waiting."""
    os.set_blocking(fd, False)
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    for signum in SURVIVED:
        signal.signal(signum, _nothing)


def caught_signals(pid: int) -> frozenset[int]:
    """The signals that a process has handlers for; none where it is gone. Source: proc(5), SigCgt."""
    return _mask_of(pid, (b"SigCgt:",))


def pending_signals(pid: int) -> frozenset[int]:
    """The signals that have been sent to a process and that it has not taken yet. Source: proc(5)."""
    return _mask_of(pid, (b"SigPnd:", b"ShdPnd:"))


def _mask_of(pid: int, names: tuple[bytes, ...]) -> frozenset[int]:
    mask = 0
    for line in read_bytes(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(names):
            mask |= int(line.split()[1], 16)
    return frozenset(number + 1 for number in range(64) if mask >> number & 1)


def _nothing(_signum: int, _frame: object) -> None:
    """The wake-up pipe tells who has to know."""
