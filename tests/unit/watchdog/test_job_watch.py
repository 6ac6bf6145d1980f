"""Whether the job hangs, from what the tasks of all hosts say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from saferun.evidence.job_evidence import HangVerdict
from saferun.watchdog.job_detector import JobDetector
from saferun.watchdog.verdicts import LONGEST_PAUSE_S

TIMEOUT_S = 100.0
RUN = {"s": "run"}
DONE = {"s": "done"}


def quiet(ranks: list[int], kind: str = "quiescent", quiet_s: float = 100.0, *, certain: bool = True) -> dict[str, Any]:
    return {"s": "quiet", "kind": kind, "quiet_s": quiet_s, "ranks": ranks, "busy": [], "certain": certain}


class Watched:
    """A watch, and what it told."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.now = 1000.0
        self.hangs: list[tuple[HangVerdict, int]] = []
        self.recovered: list[float] = []
        self.watch = JobDetector(
            timeout_s, on_hang=lambda verdict, n: self.hangs.append((verdict, n)), on_recovery=self.recovered.append
        )

    def feed(self, *states: dict[str, Any]) -> None:
        self.watch.feed({f"{i}/0": state for i, state in enumerate(states)}, self.now)

    def later(self, seconds: float) -> None:
        """Time passes; what is due is done."""
        end = self.now + seconds
        while self.watch.deadline is not None and self.watch.deadline <= end:
            self.now = self.watch.deadline
            self.watch.tick(self.now)
        self.now = end
        self.watch.tick(end)


def test_a_host_that_waits_for_another_is_no_hang() -> None:
    """Rank 0 evaluates on the first host, and all the others wait for it, for as long as it takes."""
    watched = Watched()
    watched.feed(RUN, quiet([1]), quiet([2]))
    watched.later(50 * TIMEOUT_S)
    assert watched.hangs == []


def test_the_job_hangs_when_the_last_host_is_quiet() -> None:
    """All ranks are named, and how long it has lasted is the shortest of them."""
    watched = Watched()
    watched.feed(quiet([0], quiet_s=300.0), quiet([1]), RUN)
    watched.feed(quiet([0], quiet_s=300.0), quiet([1]), quiet([2], quiet_s=120.0))
    ((verdict, number),) = watched.hangs
    assert (verdict.kind, verdict.ranks, verdict.certain, number) == ("quiescent", (0, 1, 2), True, 1)
    assert verdict.lasted_s == 100.0


def test_hosts_that_are_done_do_not_count() -> None:
    """Nobody waits for them, and they wait for the others."""
    watched = Watched()
    watched.feed(DONE, quiet([1]))
    ((verdict, _),) = watched.hangs
    assert verdict.ranks == (1,)
    everybody = Watched()
    everybody.feed(DONE, DONE)
    assert everybody.hangs == []


def test_a_hang_is_told_again_at_growing_intervals() -> None:
    """As on one host: the second time after the timeout, the third after twice that, then at most an hour apart."""
    watched = Watched()
    watched.feed(quiet([0]), quiet([1]))
    assert len(watched.hangs) == 1
    watched.watch.captured(watched.now + 1)
    watched.later(0.9 * TIMEOUT_S)
    assert len(watched.hangs) == 1
    watched.later(0.5 * TIMEOUT_S)
    assert len(watched.hangs) == 2
    moments = [watched.now]
    while len(moments) < 9:
        watched.watch.captured(watched.now)
        watched.later(TIMEOUT_S / 4)
        if len(watched.hangs) > len(moments) + 1:
            moments.append(watched.now)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(moments)]
    expected_s = [min(TIMEOUT_S * factor, LONGEST_PAUSE_S) for factor in (2, 4, 8, 16, 32, 64, 64, 64)]
    assert gaps_s == pytest.approx(expected_s, abs=TIMEOUT_S)
    assert [number for _, number in watched.hangs] == list(range(1, len(watched.hangs) + 1))


def test_a_capture_that_takes_longer_than_the_timeout_is_of_one_hang() -> None:
    """Until it ends; one that never does is given up after a minute."""
    watched = Watched(timeout_s=3.0)
    watched.feed(quiet([0]), quiet([1]))
    watched.later(20.0)
    assert len(watched.hangs) == 1
    watched.watch.captured(watched.now)
    watched.later(4.0)
    assert len(watched.hangs) == 2
    watched.later(61.0)
    assert len(watched.hangs) == 3


def test_the_end_of_a_hang_is_told_once() -> None:
    """With how long it lasted."""
    watched = Watched()
    watched.feed(quiet([0]), quiet([1]))
    watched.watch.captured(watched.now)
    watched.later(50.0)
    watched.feed(RUN, quiet([1]))
    watched.later(10.0)
    assert len(watched.recovered) == 1
    assert 100.0 <= watched.recovered[0] <= 200.0


def test_what_a_capture_stirs_up_is_no_recovery() -> None:
    """Ranks that are looked at may use a few milliseconds of their processor."""
    watched = Watched()
    watched.feed(quiet([0]), quiet([1]))
    watched.feed(RUN, quiet([1]))
    watched.feed(quiet([0]), quiet([1]))
    watched.watch.captured(watched.now)
    watched.later(5.0)
    assert watched.recovered == []


def test_a_suspicion_is_told_while_others_move() -> None:
    """A stopped rank stands out by itself; it is told, and never acted upon."""
    watched = Watched()
    watched.feed(quiet([0], "stopped", certain=False), RUN)
    ((verdict, _),) = watched.hangs
    assert (verdict.kind, verdict.ranks, verdict.certain) == ("stopped", (0,), False)


def test_states_that_make_no_sense_change_nothing() -> None:
    """They come from other hosts."""
    watched = Watched()
    for state in ({}, {"s": 7}, {"s": "quiet"}, {"s": "quiet", "kind": [], "quiet_s": "x", "ranks": {}}):
        watched.feed(state, RUN)
        watched.later(TIMEOUT_S)
    assert watched.hangs == []


def test_a_suspicion_of_anothers_ranks_is_not_reported() -> None:
    """A host speaks for its own ranks only."""
    watched = Watched()
    states = {"0/0": quiet([1], "stopped", certain=False), "1/0": RUN}
    watched.watch.feed(states, watched.now, {"0/0": range(1), "1/0": range(1, 2)})
    assert watched.hangs == []
    watched.watch.feed(states, watched.now, {"0/0": range(2), "1/0": range(2, 3)})
    assert [verdict.ranks for verdict, _ in watched.hangs] == [(1,)]


def test_a_hang_of_the_job_that_is_doubted_is_captured_again_when_it_is_to_be_certain() -> None:
    """The leader's capture shows a rank of another host that waits for a server."""
    watched = Watched()
    watched.feed(quiet([0]), quiet([1]))
    ((first, _),) = watched.hangs
    watched.watch.downgrade_to_suspected(first, 25 * TIMEOUT_S)
    watched.watch.captured(watched.now)
    assert watched.watch.repeat(first).next_s == TIMEOUT_S
    for _ in range(4 * 26):
        known = len(watched.hangs)
        watched.later(TIMEOUT_S / 4)
        for again, _ in watched.hangs[known:]:
            if again.lasted_s < 25 * TIMEOUT_S:
                watched.watch.downgrade_to_suspected(again, 25 * TIMEOUT_S)
    times = [verdict.lasted_s / TIMEOUT_S for verdict, _ in watched.hangs]
    assert times == pytest.approx([1, 2, 4, 8, 16, 25], abs=1.5), "at the usual intervals, and at the bound"
    assert times[-1] >= 25


def test_while_a_user_holds_a_rank_nothing_is_judged() -> None:
    """A rank in a debugger: neither do its job's hosts hang, nor does a hang that was reported end with that."""
    held = {"s": "held"}
    watched = Watched()
    watched.feed(held, quiet([1]))
    watched.later(50 * TIMEOUT_S)
    assert watched.hangs == []
    watched.feed(quiet([0]), quiet([1]))
    assert len(watched.hangs) == 1
    watched.watch.captured(watched.now)
    watched.feed(held, quiet([1]))
    watched.later(50 * TIMEOUT_S)
    assert (len(watched.hangs), watched.recovered) == (1, [])
    watched.feed(RUN, quiet([1]))
    assert len(watched.recovered) == 1
