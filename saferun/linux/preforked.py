"""Processes that are forked while saferun is small, and become ranks once the ranks' settings are known.

Forking a process, making its session and resetting its signals takes longer the larger the parent is, and delays the
ranks. They do that in parallel with the supervisor's own start. A rank's settings arrive in one message with its
descriptors; then only exec is left. Without a preforked process a rank is forked as usual: see ``begin_spawn``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in `children`
import marshal
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.bare_socket import AF_UNIX, SOCK_SEQPACKET, Socket, receive_fds, send_fds, socketpair
from saferun.linux.children import ALL_SIGNALS, KILLED_S, Child, await_exits, report_error, reset_signals
from saferun.linux.core_limits import RankPreparation, prepare_rank
from saferun.linux.descriptors import close_all_but
from saferun.linux.limits import restore_files
from saferun.linux.pidfd import open_pidfd
from saferun.linux.prctl import die_with_parent
from saferun.linux.signals import ignore_as_before

# A message of this size fits into the socket at once: the supervisor never waits for a preforked process.
_LONGEST_BYTES = 64 << 10
_DESCRIPTORS = 4


class PreforkedProcesses:
    """Preforked processes: each leads a session of its own, and dies with the calling thread.

    Args:
        count: how many to fork; there are fewer if the system refuses.
    """

    def __init__(self, count: int) -> None:
        self._waiting: deque[tuple[int, Socket]] = deque()
        with suppress(OSError):
            for _ in range(count):
                self._waiting.append(_fork_one())

    @property
    def pids(self) -> list[int]:
        """The unused ones, in the order in which they are taken."""
        return [pid for pid, _ in self._waiting]

    def begin_spawn(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdin: int = 0,
        stdout: int,
        stderr: int,
        preparation: RankPreparation | None,
        files: tuple[int, int] | None,
    ) -> tuple[Child, int] | None:
        """As ``children.begin_spawn``, with a process that exists already.

        Args:
            argv: see there.
            environ: see there.
            stdin: see there.
            stdout: see there.
            stderr: see there.
            preparation: prepares the process before the program starts.
            files: its limits on open files, if they are to be changed.

        Returns:
            As there; None: there is no usable preforked process.
        """
        if not self._waiting:
            return None
        # It was forked before the caller had handlers, and may have inherited these signals as ignored.
        handled = [signum for signum in ALL_SIGNALS if callable(_signal.getsignal(signum))]
        prepared = None if preparation is None else tuple(preparation)
        message = marshal.dumps((list(argv), dict(environ), prepared, files, handled))  # type: ignore[arg-type]
        if len(message) > _LONGEST_BYTES:
            return None
        pid, connection = self._waiting.popleft()
        error_read, error_write = os.pipe()
        try:
            send_fds(connection, message, [stdout, stderr, error_write, *([stdin] if stdin else [])])
        except OSError:  # it was killed
            os.close(error_read)
            _end([pid])
            return None
        finally:
            os.close(error_write)
            connection.close()
        os.set_blocking(error_read, False)
        return Child(pid, open_pidfd(pid)), error_read

    def release(self) -> None:
        """Let the unused ones exit; they are reaped with other children."""
        while self._waiting:
            self._waiting.popleft()[1].close()

    def close(self) -> None:
        """Kill and reap the unused ones."""
        pids = self.pids
        self.release()
        _end(pids)


def _end(pids: Sequence[int]) -> None:
    killed: set[int] = set()
    for pid in pids:
        with suppress(ChildProcessError):  # already reaped; its pid may have been reused
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    await_exits(killed, KILLED_S)


def _fork_one() -> tuple[int, Socket]:
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    parent_pid = os.getpid()
    mask = _signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _wait(theirs, mask, parent_pid)
    except OSError:
        ours.close()
        raise
    finally:
        _signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    ours.setblocking(False)
    return pid, ours


def _wait(connection: Socket, mask: set[int | signal.Signals], parent_pid: int) -> None:
    """Wait for the message, and start the program. Never returns."""
    error_write = -1
    where = "setsid"
    try:
        die_with_parent(parent_pid)
        reset_signals(mask)
        os.setsid()
        close_all_but(connection.fileno())
        message, fds = receive_fds(connection, _LONGEST_BYTES, _DESCRIPTORS)
        if not message:
            os._exit(0)  # it is not needed
        stdout, stderr, error_write, *own_stdin = fds
        where = "dup2"
        os.set_inheritable(0, True)
        if own_stdin:
            os.dup2(own_stdin[0], 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        argv, environ, preparation, files, handled = marshal.loads(message)  # noqa: S302 - from the parent process
        for signum in handled:
            with suppress(OSError, ValueError):
                signal.signal(signum, signal.SIG_DFL)
        ignore_as_before()
        where = "prepare"
        if preparation is not None:
            prepare_rank(RankPreparation(*preparation))
        if files is not None:
            restore_files(files)
        where = "exec"
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        report_error(error_write, f"{error.errno} {where}")
    except BaseException:
        report_error(error_write, f"22 {where}")
    finally:
        os._exit(127)
