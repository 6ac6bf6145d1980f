"""By what a process is known to be a rank's: its session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from saferun.linux.procfs import read_stat
from saferun.linux.sessions import Sessions


@contextmanager
def child(*, session: bool) -> Iterator[int]:
    """A child that waits to be killed, in a session of its own or in this one."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if session:
                os.setsid()
            os.write(write_end, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    try:
        assert os.read(read_end, 1)
        yield pid
    finally:
        os.close(read_end)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def test_whoever_lives_in_a_ranks_session_is_a_ranks() -> None:
    sessions = Sessions()
    with child(session=True) as rank, child(session=False) as foreign:
        assert sessions.session_of(rank) is None
        sessions.add(rank)
        assert sessions.session_of(rank) == rank
        assert sessions.session_of(foreign) is None
        assert sessions.living([rank, foreign]) == {rank}
        sessions.discard(rank)
        assert sessions.session_of(rank) is None


def test_a_session_whose_number_was_given_to_another_process_is_no_ranks() -> None:
    """A rank that ended hours ago: its pid may be a login shell's by now."""
    sessions = Sessions()
    with child(session=True) as shell:
        stat = read_stat(shell)
        assert stat is not None
        sessions.add(shell, stat.start_ticks - 1)
        assert sessions.session_of(shell) is None
        sessions.add(shell, stat.start_ticks)
        assert sessions.session_of(shell) == shell


def test_a_process_that_is_gone_is_nobodys() -> None:
    sessions = Sessions()
    with child(session=True) as rank:
        sessions.add(rank)
    assert sessions.session_of(rank) is None
    assert sessions.add(rank) == 0


def test_of_several_sessions_only_those_that_are_named_are_kept() -> None:
    sessions = Sessions()
    assert not sessions
    with child(session=True) as one, child(session=True) as other:
        sessions.add(one)
        sessions.add(other)
        sessions.keep({one})
        assert sessions
        assert (sessions.session_of(one), sessions.session_of(other)) == (one, None)
