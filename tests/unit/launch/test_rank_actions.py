"""What is done with the ranks of an attempt, on this host."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.launch_context import HostAttempt, LaunchContext
from saferun.launch.rank_actions import RankActions
from saferun.launch.rank_group import RankGroup
from saferun.linux.children import Child
from saferun.linux.keyboard import StdinTerminal
from saferun.linux.pidfd import open_pidfd
from saferun.linux.poller import Poller
from saferun.model import ExitStatus
from saferun.supervisor.machine import State
from tests.descriptors import open_descriptors


@pytest.mark.parametrize("step_s", [3600.0, -3600.0], ids=["forward", "back"])
def test_shared_memory_is_the_ranks_since_their_start_whatever_the_clock_did(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """A suspended machine: its clock goes on, and the monotonic one does not. What the ranks had made was left."""
    attempt = HostAttempt()
    began: list[float] = []
    noted: list[float] = []
    rank = SimpleNamespace(child=SimpleNamespace(pid=os.getpid(), pidfd=-1), end=None)
    attempt.plan = SimpleNamespace()  # type: ignore[assignment]

    class Group:
        def __init__(self, *_: object, **_more: object) -> None:
            self.ranks: list[Any] = []

        def start(self) -> tuple[list[Any], None]:
            began.append(time.time())
            return [], None

        def begin_folding(self) -> None:
            """Nothing is printed."""

    monkeypatch.setattr("saferun.launch.rank_actions.RankGroup", Group)
    ranks = RankActions.__new__(RankActions)
    context: Any = SimpleNamespace(current=attempt, cores=SimpleNamespace(preparation=None), wrapped=None)
    context.guarded = lambda _what, call, *arguments: call(*arguments)
    for name in ("investigation", "imports", "examiner", "log"):
        setattr(context, name, Anything())
    context.cores.ranks_started = Anything()
    ranks.__dict__.update(
        _context=context,
        _reaper=Anything(),
        _preforked=None,
        exec_wait=Anything(),
        orphans=Anything(),
        segments=SimpleNamespace(note=lambda _pids, since: noted.append(since)),
    )
    action: Any = None
    ranks.start(action)
    attempt.group.ranks.append(rank)  # type: ignore[union-attr, arg-type]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + step_s)
    ranks._note_shared_memory()
    assert noted[0] <= began[0]


def test_a_rank_that_no_signal_ends_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was lost with each such rank of each attempt; the rank is signalled and reaped by its pid all the same."""
    before = open_descriptors()
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    ended: list[ExitStatus] = []
    unwatched: list[int] = []
    fd = open_pidfd(pid)
    rank: Any = SimpleNamespace(child=Child(pid, fd), wrapped=None, receiver=None, streams=[], end=None, pid=pid)
    rank.assignment = SimpleNamespace(local_rank=0, rank=0)
    rank.signals, rank.last_lines = {signal.SIGKILL}, lambda **_: ()
    rank.output_bytes = lambda: 7
    group = RankGroup.__new__(RankGroup)
    group.__dict__.update(ranks=[rank], by_pid={pid: rank}, is_closed=False, _last_lines={}, _streams=Anything())
    group.__dict__["_guarded"] = lambda _what, call: call()
    group.__dict__["_config"] = SimpleNamespace(command=SimpleNamespace(run_path=False))
    monkeypatch.setattr(group, "note_exit", lambda _rank, status, **_: ended.append(status))
    context: Any = Anything()
    context.current, context.terminals, context.wrapped, context.attempt = HostAttempt(), None, None, 0
    context.current.group = group
    context.poller = SimpleNamespace(unwatch=unwatched.append)
    ranks = RankActions.__new__(RankActions)
    orphans = SimpleNamespace(end=bool, is_left=False)
    exec_wait = SimpleNamespace(close=bool, take_failed=lambda _pid: False)
    ranks.__dict__.update(
        _context=context, _reaper=Anything(), exec_wait=exec_wait, orphans=orphans, ended_output_bytes=0
    )
    try:
        ranks.close()
        assert (unwatched, rank.child) == ([fd], Child(pid, -1))
        assert ranks.ended_output_bytes == 7
        assert open_descriptors() == before
    finally:
        group.signal([0], signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert ranks.on_exit(pid, ExitStatus(None, os.WTERMSIG(status)))
    assert [one.signum for one in ended] == [signal.SIGKILL]


def test_the_terminal_of_a_rank_that_could_not_start_is_not_watched_any_more() -> None:
    """Whoever gets its number next was taken for watched: the control socket of the next attempt, for instance."""
    stdin, poller = StdinTerminal(80, 24), Poller()
    fd, (owner,) = stdin.fd, stdin.owner.pids
    rank: Any = SimpleNamespace(child=Child(77, -1), streams=[], end=None, terminal=stdin)
    rank.assignment = SimpleNamespace(local_rank=0, rank=0)
    group = RankGroup.__new__(RankGroup)
    group.__dict__.update(ranks=[rank], by_pid={77: rank})
    context: Any = Anything()
    context.current, context.poller, context.terminals = HostAttempt(), poller, None
    context.guarded = lambda what, call, *arguments: LaunchContext.guarded(context, what, call, *arguments)
    context.supervisor = SimpleNamespace(state=State.STARTING)
    context.screen = SimpleNamespace(panes=())
    context.current.group = group
    ranks = RankActions.__new__(RankActions)
    exec_wait = SimpleNamespace(take_failed=lambda _pid: True)
    ranks.__dict__.update(_context=context, _reaper=Anything(), exec_wait=exec_wait, intake=Anything())
    try:
        ranks._begin_terminals(group)
        assert poller.is_watched(fd)
        assert ranks.on_exit(77, ExitStatus(127, None))
        assert not poller.is_watched(fd)
        assert not context.terminals.has_any
    finally:
        stdin.close()
        os.waitpid(owner, 0)
        poller.close()


class Anything:
    """Whatever is called of it does nothing."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def __call__(self, *_: object) -> Any:
        return self
