"""The pipes of processes that live on: kept however the attempt ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch import rank_actions
from saferun.launch.launch_context import LaunchContext
from saferun.launch.rank_actions import RankActions
from saferun.linux import left_output
from saferun.linux.children import Child


class Group:
    """One rank with a pipe, and one with none left."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self.read_end, self.write_end = read_end, write_end
        self.is_closed = False
        stream = SimpleNamespace(fd=self.read_end, is_stderr=False, is_shown=True)
        assignment = SimpleNamespace(local_rank=0, rank=0)
        self.ranks: list[Any] = [
            SimpleNamespace(assignment=assignment, streams=[stream], end=object()),
            SimpleNamespace(assignment=assignment, streams=[], end=object()),
        ]
        goals = SimpleNamespace(stdouts=("/logs/stdout.log",), stderrs=("",))
        self.plan = SimpleNamespace(position=lambda _assignment: 0, destinations=goals)

    def end_writers(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self, _at: float) -> int:
        assert not self.is_closed
        os.close(self.read_end)
        self.is_closed = True
        return 0


class Actions:
    """The ranks of a launch whose processes are left, with what is copied and what is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, read_end: int, write_end: int) -> None:
        self.group = Group(read_end, write_end)
        self.copied: list[list[tuple[bool, int, str]]] = []
        self.said: list[str] = []
        self.is_left, self.has_given_up = True, False
        ranks = self.ranks = RankActions.__new__(RankActions)
        ranks.ended_output_bytes = 0
        context: Any = SimpleNamespace(
            current=SimpleNamespace(group=self.group),
            ended_attempt=None,
            attempt=0,
            screen=SimpleNamespace(set_status=lambda *_: None),
            investigation=SimpleNamespace(attempt_ended=lambda: None),
            job=SimpleNamespace(attempt_ended=lambda: None),
            lint=SimpleNamespace(cancel=lambda: None),
            terminals=None,
            poller=SimpleNamespace(unwatch=lambda _fd: None),
            warn=self.said.append,
            post=lambda _event: None,
        )
        context.guarded = lambda what, call, *arguments: LaunchContext.guarded(context, what, call, *arguments)
        ranks.__dict__.update(
            _context=context,
            intake=SimpleNamespace(remove=lambda _stream: None),
            exec_wait=SimpleNamespace(close=lambda: None),
            segments=SimpleNamespace(sweep=lambda: None),
            orphans=self.orphans(),
        )
        monkeypatch.setattr(left_output, "copy_left_output", self.copy)

    def orphans(self) -> Any:
        actions = self

        class Orphans:
            @property
            def is_left(self) -> bool:
                return actions.is_left

            @property
            def has_given_up(self) -> bool:
                return actions.has_given_up

            def end(self) -> None:
                """Nothing to be named."""

        return Orphans()

    def copy(self, pipes: list[tuple[int, int, str]]) -> None:
        """The copies are of the group's pipe, which is closed by then."""
        assert self.group.is_closed
        written = os.fstat(self.group.write_end).st_ino
        self.copied.append([(os.fstat(fd).st_ino == written, console, path) for fd, console, path in pipes])


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actions]:
    made = Actions(monkeypatch, *os.pipe())
    yield made
    made.group.end_writers()


ENDS: dict[str, Callable[[RankActions], None]] = {
    "all are gone": lambda ranks: ranks._on_orphans_gone(()),
    "the time is over": lambda ranks: ranks.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_left_keeps_its_pipes_however_the_sweep_ends(actions: Actions, end: str) -> None:
    """Beside a process that nothing ends, an upload was killed by SIGPIPE, though saferun had said that it lives on."""
    ENDS[end](actions.ranks)
    assert actions.copied == [[(True, 1, "/logs/stdout.log")]]
    assert actions.said == []


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_left", [True, False])
def test_if_nothing_can_write_to_a_pipe_nothing_is_copied(actions: Actions, end: str, *, is_left: bool) -> None:
    actions.is_left = is_left
    actions.group.end_writers()
    ENDS[end](actions.ranks)
    assert (actions.copied, actions.said) == ([], [])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_who_holds_a_pipe_keeps_it_though_nothing_shows_that_it_is_a_rank_s(
    monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    """A process that was started with ``env -i setsid`` was killed by SIGPIPE at its next line."""
    actions = Actions(monkeypatch, *(os.openpty() if kind == "terminal" else os.pipe()))
    actions.is_left = False
    try:
        ENDS[end](actions.ranks)
        assert [copied[1:] for pipes in actions.copied for copied in pipes] == [(1, "/logs/stdout.log")]
    finally:
        actions.group.end_writers()


@pytest.mark.parametrize("what", ["a rank", "its child"])
def test_a_process_that_no_signal_ends_does_not_keep_a_pipe(actions: Actions, what: str) -> None:
    """It writes no more, and ``| tee`` would wait for it, perhaps for ever; unless others are left as well."""
    actions.is_left = False
    if what == "a rank":
        actions.group.ranks[0].end = None
        actions.group.ranks[0].child = Child(0, -1)
    else:
        actions.has_given_up = True
    actions.ranks.close()
    assert (actions.copied, actions.said) == ([], [])


def test_without_proc_whoever_holds_a_pipe_is_left_running(actions: Actions, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is not known where /proc hides other processes, or is not mounted."""
    actions.is_left, actions.has_given_up = False, True
    monkeypatch.setattr(rank_actions, "read_stat", lambda _pid: None)
    actions.ranks.close()
    assert actions.copied == [[(True, 1, "/logs/stdout.log")]]


def test_a_sweep_that_ends_twice_does_not_copy_what_has_the_numbers_now(actions: Actions) -> None:
    """A second Ctrl-C may come in the moment in which the sweep ends."""
    actions.ranks._on_orphans_gone(())
    fd = os.open(os.devnull, os.O_RDONLY)
    try:
        assert fd == actions.group.read_end
        actions.ranks._on_orphans_gone(())
        actions.ranks.close()
    finally:
        os.close(fd)
    assert len(actions.copied) == 1
    assert actions.said == []
