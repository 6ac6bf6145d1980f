"""Starting processes and learning how they ended.

``subprocess`` is not used: the supervisor needs PR_SET_PDEATHSIG between fork and exec, a pidfd, and one place that
reaps, and it must not pay for the import.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.descriptors import close_all_but
from saferun.linux.pidfd import open_pidfd, send_signal
from saferun.linux.prctl import die_with_parent
from saferun.linux.signals import JOB_SIGNALS
from saferun.model import ExitStatus, Value

ALL_SIGNALS = signal.valid_signals()
_AWAITED_MS = 1000
_REAP_AGAIN_S = 0.001
# Python ignores these two; a program expects their defaults (as subprocess's restore_signals does).
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Child(Value):
    """A process of ours. ``pidfd`` is -1 where there is none to be had."""

    pid: int
    pidfd: int


class SpawnError(Exception):
    """A program could not be started. ``errno`` is that of the call that failed; ``where`` names it."""

    def __init__(self, errno: int, where: str) -> None:
        super().__init__(f"{where}: {os.strerror(errno)}")
        self.errno = errno
        self.where = where


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdin: int = 0,
    stdout: int = 1,
    stderr: int = 2,
    keep: Sequence[int] = (),
    ignored: Sequence[int] = (),
    prepare: Callable[[], None] | None = None,
) -> Child:
    """Start a program, and wait until it has been started. Where the loop cannot wait: :func:`begin_spawn`.

    The program leads a session of its own and does not outlive the calling thread. For the arguments see
    :func:`begin_spawn`.

    Raises:
        SpawnError: the program cannot be started; no process is left.
    """
    child, report = begin_spawn(
        argv, environ, stdin=stdin, stdout=stdout, stderr=stderr, keep=keep, ignored=ignored, prepare=prepare
    )
    os.set_blocking(report, True)
    error = spawn_error(report)
    if error is None:
        return child
    _bury(child)
    raise error


def spawn_unawaited(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    keep: Sequence[int] = (),
    ignored: Sequence[int] = (),
) -> Child:
    """Start a program of saferun's own, and do not wait for it: a file system may never answer.

    Where it cannot be started the process ends with exit code 127, which its owner sees at its end of the pipes. For
    the arguments see :func:`begin_spawn`.

    Raises:
        SpawnError: no process can be made.
    """
    child, report = begin_spawn(argv, environ, stdin=stdin, stdout=stdout, stderr=stderr, keep=keep, ignored=ignored)
    os.close(report)
    return child


def begin_spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdin: int = 0,
    stdout: int = 1,
    stderr: int = 2,
    keep: Sequence[int] = (),
    ignored: Sequence[int] = (),
    prepare: Callable[[], None] | None = None,
) -> tuple[Child, int]:
    """Begin to start a program as leader of a session of its own that does not outlive the calling thread.

    Args:
        argv: the program (looked up in the PATH of ``environ`` unless it holds a slash) and its arguments.
        environ: its whole environment.
        stdin: descriptor that becomes its standard input.
        stdout: descriptor that becomes its standard output.
        stderr: descriptor that becomes its standard error.
        keep: further descriptors that it inherits under their own numbers. All others are closed.
        ignored: signals that it ignores from its first moment on, as do the programs that it starts in turn.
        prepare: called in the child before the program starts; may raise OSError.

    Returns:
        The process, and a descriptor that becomes readable when the program has been started or cannot be:
        :func:`spawn_error` tells which. That may take for ever where the program's file system does not answer.

    Raises:
        SpawnError: no process can be made.
    """
    error_read, error_write = os.pipe()
    parent_pid = os.getpid()
    # With signals blocked, none can run a Python handler, or write to the wake-up pipe that the child shares with us,
    # before the child has put the default dispositions back.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _become(argv, environ, (stdin, stdout, stderr), keep, error_write, mask, ignored, parent_pid, prepare)
    except OSError as error:
        os.close(error_read)
        os.close(error_write)
        raise SpawnError(error.errno or 0, "fork") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(error_write)
    os.set_blocking(error_read, False)
    return Child(pid, open_pidfd(pid)), error_read


def await_report(child: Child, report: int) -> int:
    """Wait for the answer of :func:`begin_spawn`, though not for ever, so that it takes no descriptor any more.

    Returns:
        The descriptor, where there is no answer yet; -1: the program has been started.

    Raises:
        SpawnError: it cannot be; no process is left.
    """
    poll = select.poll()
    poll.register(report, select.POLLIN)
    if not poll.poll(_AWAITED_MS):
        return report
    error = spawn_error(report)
    if error is None:
        return -1
    _bury(child)
    raise error


def _bury(child: Child) -> None:
    if child.pidfd >= 0:
        os.close(child.pidfd)
    os.waitpid(child.pid, 0)


def spawn_error(report: int) -> SpawnError | None:
    """Why a process did not become its program, which has been found out by now; None: it did.

    Args:
        report: the descriptor of :func:`begin_spawn`. It is closed.

    Raises:
        BlockingIOError: it has not been found out yet; the descriptor stays open.
    """
    text = os.read(report, 64)
    os.close(report)
    if not text:
        return None
    errno, _, where = text.decode().partition(" ")
    return SpawnError(int(errno), where)


def _become(
    argv: Sequence[str],
    environ: Mapping[str, str],
    streams: tuple[int, int, int],
    keep: Sequence[int],
    error_write: int,
    mask: set[int | signal.Signals],
    ignored: Sequence[int],
    parent_pid: int,
    prepare: Callable[[], None] | None,
) -> None:
    """Turn the forked child into the program. Never returns."""
    where = "setsid"
    try:
        die_with_parent(parent_pid)
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)
        reset_signals(mask)
        os.setsid()
        where = "dup2"
        # Numbers above the standard ones first, so that no stream is overwritten before it has been copied.
        lifted = [os.dup(fd) if fd <= 2 else fd for fd in streams]  # noqa: PLR2004
        for target, fd in enumerate(lifted):
            os.dup2(fd, target, inheritable=True)
        for fd in keep:
            os.set_inheritable(fd, True)
        close_all_but(error_write, *keep)
        where = "prepare"
        if prepare is not None:
            prepare()
        where = "exec"
        os.execvpe(argv[0], list(argv), environ)
    except OSError as error:
        report_error(error_write, f"{error.errno} {where}")
    except BaseException:
        report_error(error_write, f"22 {where}")
    finally:
        os._exit(127)


def report_error(fd: int, text: str) -> None:
    """In a forked child: say why it does not become its program, as :func:`spawn_error` reads it."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # it may be that nobody reads
    with suppress(OSError):
        os.write(fd, text.encode())


def reset_signals(mask: set[int | signal.Signals], *, is_program: bool = True) -> None:
    """In a forked child: Python's handlers off, the defaults that programs expect on, and the mask as it was.

    Args:
        mask: which signals are to be blocked.
        is_program: whether a program follows; if not, a limit on the size of files is an error of a call, and no end.
    """
    signal.set_wakeup_fd(-1)
    for signum in ALL_SIGNALS:
        if callable(signal.getsignal(signum)):
            with suppress(OSError, ValueError):
                signal.signal(signum, signal.SIG_DFL)
    for signum in _IGNORED_BY_PYTHON if is_program else (signal.SIGPIPE,):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def fork(run: Callable[[], None]) -> int:
    """Fork a helper that runs ``run`` in this interpreter, in a session of its own, and ends. Returns its pid.

    The helper does not die with its parent, and ignores what a scheduler sends to every process of a job.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                # What it shares with its parent is looked through by nobody, and so stays shared.
                gc.freeze()
                gc.enable()
                os.setsid()
                for signum in JOB_SIGNALS:
                    signal.signal(signum, signal.SIG_IGN)
                reset_signals(mask, is_program=False)
                run()
            finally:
                os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def signal_child(child: Child, signum: int) -> None:
    """Send a signal to a child that has not been reaped; one that is gone is left alone."""
    with suppress(ProcessLookupError, PermissionError):
        send_signal(child.pid, child.pidfd, signum)


def signal_group(child: Child, signum: int) -> None:
    """Send a signal to the process group that a child of ours leads, as torchrun does.

    Call it only while the child has not been reaped: until then its number can belong to nobody else.
    """
    try:
        os.killpg(child.pid, signum)
    except ProcessLookupError:
        signal_child(child, signum)  # it has been forked only just now, and has no group of its own yet
    except PermissionError:
        pass


def reap() -> list[tuple[int, ExitStatus]]:
    """Collect every child that has ended: ranks, helpers, and orphans that were handed to this process."""
    ended: list[tuple[int, ExitStatus]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        ended.append((pid, exit_status(status)))
    return ended


def await_exits(pids: set[int], within_s: float) -> set[int]:
    """Reap these children, which are about to end. Returns those that have not ended in time."""
    left = set(pids)
    give_up_at = time.monotonic() + within_s
    while left and time.monotonic() < give_up_at:
        for pid in pids & left:
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            left.discard(pid)
        if left:
            time.sleep(_REAP_AGAIN_S)
    return left


def exit_status(status: int) -> ExitStatus:
    """A wait status as a value. Source: wait(2)."""
    if os.WIFSIGNALED(status):
        return ExitStatus(None, os.WTERMSIG(status), os.WCOREDUMP(status))
    return ExitStatus(os.WEXITSTATUS(status), None)
