"""Starting processes and reaping them.

``subprocess`` is not used: the supervisor needs PR_SET_PDEATHSIG between fork and exec, a pidfd, and a single place
that reaps, and the import takes too long.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes members of enumerations of all numbers, at every call
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
from saferun.linux.procfs import descendants_of
from saferun.linux.signals import JOB_SIGNALS, ignored_here
from saferun.model import ExitStatus, Value

ALL_SIGNALS: frozenset[int] = frozenset(_signal.valid_signals())
_AWAITED_MS = 1000
_REAP_AGAIN_S = 0.001
# How long a process that was killed is waited for: no signal ends one that waits for a file system.
KILLED_S = 0.5
# Python ignores these two; a program expects their defaults (as subprocess's restore_signals does).
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Child(Value):
    """A child process. ``pidfd`` is -1 if the system has none."""

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
    """Start a program, and wait until it has been started. The loop, which cannot wait, uses :func:`begin_spawn`.

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
    """Start a program of saferun itself without waiting for it: a file system may never respond.

    If it cannot be started the process exits with code 127, which closes its pipes. For the arguments see
    :func:`begin_spawn`.

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
        stdin: the descriptor of its standard input.
        stdout: the descriptor of its standard output.
        stderr: the descriptor of its standard error.
        keep: further descriptors that it inherits under their own numbers. All others are closed.
        ignored: signals that it, and the programs that it starts, ignore from the beginning.
        prepare: called in the child before the program starts; may raise OSError.

    Returns:
        The process, and a descriptor that becomes readable when the program has been started or cannot be:
        :func:`spawn_error` returns which. That may take forever if the program's file system does not respond.

    Raises:
        SpawnError: no process can be made.
    """
    error_read, error_write = os.pipe()
    parent_pid = os.getpid()
    # With signals blocked, none can run a Python handler, or write to the wake-up pipe that the child shares with us,
    # before the child has restored the default dispositions.
    mask = _signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _become(argv, environ, (stdin, stdout, stderr), keep, error_write, mask, ignored, parent_pid, prepare)
    except OSError as error:
        os.close(error_read)
        os.close(error_write)
        raise SpawnError(error.errno or 0, "fork") from None
    finally:
        _signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(error_write)
    os.set_blocking(error_read, False)
    return Child(pid, open_pidfd(pid)), error_read


def await_report(child: Child, report: int) -> int:
    """Wait for the result of :func:`begin_spawn` for a bounded time, to free its descriptor.

    Returns:
        The descriptor if there is no result yet; -1: the program has been started.

    Raises:
        SpawnError: the program cannot be started; no process is left.
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
    await_exits({child.pid}, KILLED_S)  # it is about to exit; the loop reaps it if not


def spawn_error(report: int) -> SpawnError | None:
    """Why a program could not be started; None: it was started.

    Args:
        report: the descriptor of :func:`begin_spawn`. It is closed.

    Raises:
        BlockingIOError: it is not known yet; the descriptor stays open.
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
        # The parent may have as many open as a process can.
        close_all_but(error_write, *keep, *streams)
        # Move them above the standard numbers first, so that no stream is overwritten before it has been copied.
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
        if "" in environ:  # Python's execve refuses it
            environ = {name: value for name, value in environ.items() if name}
        os.execvpe(argv[0], list(argv), environ)
    except OSError as error:
        report_error(error_write, f"{error.errno} {where}")
    except BaseException:
        report_error(error_write, f"22 {where}")
    finally:
        os._exit(127)


def report_error(fd: int, text: str) -> None:
    """In a forked child: report why the program cannot be started, for :func:`spawn_error`."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the reader may have gone
    with suppress(OSError):
        os.write(fd, text.encode())


def reset_signals(mask: set[int | signal.Signals], *, is_program: bool = True) -> None:
    """In a forked child: remove Python's handlers, restore the defaults that programs expect, and the signal mask.

    Args:
        mask: the signals to block.
        is_program: whether a program will be started; if not, SIGXFSZ stays ignored, so that writes past a file size
            limit fail with an error.
    """
    signal.set_wakeup_fd(-1)
    for signum in ALL_SIGNALS:
        if callable(_signal.getsignal(signum)):
            with suppress(OSError, ValueError):
                signal.signal(signum, signal.SIG_DFL)
    for signum in (*(_IGNORED_BY_PYTHON if is_program else (signal.SIGPIPE,)), *ignored_here):
        signal.signal(signum, signal.SIG_DFL)
    _signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def fork(run: Callable[[], None]) -> int:
    """Fork a helper process that calls ``run``, in a session of its own, and exits. Returns its pid.

    The helper does not die with its parent, and ignores signals that a scheduler sends to every process of a job.
    """
    mask = _signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                # The collector does not touch the parent's objects, so their memory stays shared.
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
        _signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def without_descriptor(child: Child) -> Child:
    """The same child with its descriptor closed: signals reach it by its pid."""
    if child.pidfd >= 0:
        os.close(child.pidfd)
    return child._replace(pidfd=-1)


def signal_child(child: Child, signum: int) -> None:
    """Send a signal to a child that has not been reaped; one that has exited is no error."""
    with suppress(ProcessLookupError, PermissionError):
        send_signal(child.pid, child.pidfd, signum)


def signal_group(child: Child, signum: int) -> None:
    """Send a signal to the process group that a child of ours leads, as torchrun does.

    Call it only while the child has not been reaped: until then its pid cannot be reused.
    """
    try:
        os.killpg(child.pid, signum)
    except ProcessLookupError:
        signal_child(child, signum)  # forked only just now, without a group of its own yet
    except PermissionError:
        pass


def signal_family(child: Child, signum: int) -> None:
    """Send a signal to a process and to its descendants of the same process group, which it need not lead.

    The group may hold others, which do not get it: a tool that the process runs under.
    """
    try:
        group = os.getpgid(child.pid)
    except OSError:
        group = -1
    # All of them are found before the first may end, after which its children are another's; parents come first.
    family = [Child(pid, open_pidfd(pid)) for pid in descendants_of(child.pid)]
    try:
        signal_child(child, signum)
        for one in family:
            with suppress(OSError):  # it has ended
                if os.getpgid(one.pid) == group:
                    signal_child(one, signum)
    finally:
        for one in family:
            if one.pidfd >= 0:
                os.close(one.pidfd)


def reap() -> list[tuple[int, ExitStatus]]:
    """Reap every child that has exited: ranks, helpers, and orphans that were reparented to this process."""
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
    """Reap these children, which are about to exit. Returns those that have not exited in time."""
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
