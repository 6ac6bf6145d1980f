"""The end of a launch never waits for a process that no signal ends: one in uninterruptible sleep outlives SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from saferun.files.writer_client import WriterClient
from saferun.linux import reaper as reaper_module
from saferun.linux.bare_socket import Socket
from saferun.linux.children import SpawnError, spawn
from saferun.linux.helper import Helper
from saferun.linux.preforked import PreforkedProcesses
from saferun.linux.reaper import Reaper

KILL, WAITPID = os.kill, os.waitpid


@pytest.fixture(autouse=True)
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """SIGKILL ends nothing for as long as a test lasts, and no wait may be without end. What was signalled."""
    signalled: set[int] = set()

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        assert options & os.WNOHANG, "a wait without end"
        return WAITPID(pid, options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, _signum: signalled.add(pid))
        patch.setattr(os, "waitpid", waitpid)
        yield signalled
    for pid in signalled:
        KILL(pid, signal.SIGKILL)
        WAITPID(pid, 0)


def pause(connection: Socket) -> None:
    signal.pause()
    connection.close()


def discarded_helper() -> set[int]:
    helper = Helper("sr-test", pause)
    pids = helper.pids
    helper.discard()
    return pids


def discarded_writer() -> set[int]:
    writer = WriterClient(print)
    pids = writer.pids
    for pid in pids:
        KILL(pid, signal.SIGSTOP)
    writer.discard()
    assert writer._inbox is not None
    writer._inbox.close()
    return pids


def dismissed_reaper() -> set[int]:
    reaper = Reaper("run")
    KILL(reaper.pid, signal.SIGSTOP)
    reaper.dismiss()
    os.close(reaper.witness_fd)
    return {reaper.pid}


def unused_preforked_processes() -> set[int]:
    preforked = PreforkedProcesses(3)
    pids = preforked.pids
    for pid in pids:
        KILL(pid, signal.SIGSTOP)
    preforked.close()
    return set(pids)


@pytest.mark.parametrize(
    "end",
    [discarded_helper, discarded_writer, dismissed_reaper, unused_preforked_processes],
    ids=lambda end: end.__name__,
)
def test_one_that_does_not_end_is_left(
    end: Callable[[], set[int]], unkillable: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module, "_EXIT_S", 0.01)
    pids = end()
    assert pids
    assert unkillable == pids


def test_a_program_that_cannot_be_started_is_not_waited_for_without_end() -> None:
    with pytest.raises(SpawnError):
        spawn(["/nonexistent"], {}, stdout=1, stderr=2)
