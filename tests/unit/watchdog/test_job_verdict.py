"""The verdicts of all hosts as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saferun.evidence.job_evidence import HangVerdict
from saferun.watchdog.job_verdicts import combine, packed, verdict_from


def quiet(*ranks: int, kind: str = "quiescent", quiet_s: float = 300.0, certain: bool = True, **more: Any) -> Any:
    """What a quiet host says."""
    return {"s": "quiet", "kind": kind, "quiet_s": quiet_s, "ranks": [*ranks], "certain": certain, **more}


RUN = {"s": "run"}
DONE = {"s": "done"}


def test_a_job_hangs_only_when_every_host_says_so() -> None:
    """A host whose ranks wait for another host's looks as if it hung."""
    assert combine({0: quiet(0, 1), 1: RUN}) is None
    assert combine({0: quiet(0, 1), 1: quiet(2, 3, quiet_s=120.0)}) == HangVerdict(
        "quiescent", (0, 1, 2, 3), 120.0, certain=True
    )


def test_hosts_that_are_done_do_not_count() -> None:
    """Ranks that have ended well move no more, and hold nobody back from saying that the rest hangs."""
    assert combine({0: DONE, 1: quiet(2, 3)}) == HangVerdict("quiescent", (2, 3), 300.0, certain=True)
    assert combine({0: DONE, 1: DONE}) is None
    assert combine({}) is None


@pytest.mark.parametrize("kind", ["stopped", "uninterruptible", "heartbeat", "spinning", "stuck_collective"])
def test_the_kind_that_tells_most_is_the_jobs(kind: str) -> None:
    """All others are quiet because of it."""
    verdict = combine({0: quiet(0, 1), 1: quiet(3, kind=kind, busy=[2])})
    assert verdict == HangVerdict(kind, (3,), 300.0, certain=True, busy=(2,))


def test_a_verdict_is_certain_only_if_all_are() -> None:
    """What is acted upon must hold everywhere."""
    verdict = combine({0: quiet(0), 1: quiet(1, kind="spinning", certain=False)})
    assert verdict is not None
    assert not verdict.certain


@pytest.mark.parametrize("kind", ["stopped", "uninterruptible", "heartbeat"])
def test_a_stopped_rank_is_told_while_others_still_move(kind: str) -> None:
    """On one host it is told at once as well; acted upon it is not."""
    verdict = combine({0: RUN, 1: quiet(3, kind=kind), 2: quiet(4, 5, quiet_s=1.0)})
    assert verdict == HangVerdict(kind, (3,), 300.0, certain=False)


@pytest.mark.parametrize("kind", ["quiescent", "stuck_collective", "spinning", "anything"])
def test_what_others_may_wait_for_is_not_told_while_they_move(kind: str) -> None:
    """A host whose ranks are in a collective waits for those that are not."""
    assert combine({0: RUN, 1: quiet(3, kind=kind)}) is None


def test_a_host_speaks_of_its_own_ranks_only() -> None:
    """The job's verdict names ranks that are then shown as the cause."""
    verdict = combine({"0/0": quiet(0, 7), "1/0": quiet(7, busy=[0, 7])}, ranks_of={"0/0": (0,), "1/0": (7,)})
    assert verdict is not None
    assert verdict.ranks == (0, 7)
    assert verdict.busy == (7,)


def test_the_names_that_a_verdict_has_on_its_way_are_those_of_other_versions() -> None:
    verdict = HangVerdict("stopped", (3,), 7.5, certain=True, busy=(1, 2))
    raw = {"kind": "stopped", "ranks": [[3, 3]], "quiet_s": 7.5, "certain": True, "busy": [[1, 2]], "overdue": ""}
    assert packed(verdict) == raw


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["s", "kind", "quiet_s", "ranks", "busy", "certain"]), HOSTILE))
@example({"s": []})
def test_whatever_a_host_says_is_no_exception(state: dict[str, Any]) -> None:
    """States come from other hosts."""
    for said in (state, {**state, "s": "quiet"}, {**state, "s": "quiet", "kind": "stopped"}):
        verdict = combine({0: quiet(0), 1: said})
        if verdict is not None:
            assert all(isinstance(rank, int) for rank in (*verdict.ranks, *verdict.busy))
            assert verdict.lasted_s >= 0
    assert combine({0: state["s"]} if "s" in state else {0: None}) is None


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1, 2, 7, 9, 10), tuple(range(80_000))], ids=len)
def test_a_verdict_is_short_however_many_ranks_it_names(ranks: tuple[int, ...]) -> None:
    """A message that is too long is told to nobody, and a job of ten thousand ranks would hang unseen."""
    verdict = HangVerdict("quiescent", ranks, 300.0, certain=True, busy=ranks)
    text = json.dumps(packed(verdict))
    assert len(text) < 300
    assert verdict_from(json.loads(text)) == verdict


@pytest.mark.parametrize("pair", [[0, 10**400], [0], [0, 1, 2], ["a", 1], [True, 3], [5, 1], [-3, -1]])
def test_a_row_of_ranks_that_makes_no_sense_names_few(pair: list[object]) -> None:
    """And takes no more memory than a list of ranks could."""
    verdict = verdict_from({"kind": "quiescent", "ranks": [pair, pair, pair]})
    assert verdict is not None
    assert len(verdict.ranks) <= 1 << 20
