"""What is done with the ranks of an attempt, on this host."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.launch_context import HostAttempt
from saferun.launch.rank_actions import RankActions


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
        _reaper=None,
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


class Anything:
    """Whatever is called of it does nothing."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def __call__(self, *_: object) -> Any:
        return self
