"""Where the calls of ranks differ: named where it can be told, and not where it cannot."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.diverging_calls import first_difference
from saferun.evidence.call_evidence import CalledFunction, CallEvent, RankCalls, ThreadCalls

FUNCTIONS = ("main", "step", "load", "evaluate", "save")


def rank(
    number: int, steps: Sequence[str], *, total: int = 0, note: str = "", path: str = "/job/train.py"
) -> RankCalls:
    """``+step`` is a call, ``-step`` its end, ``12`` a line; ``total``: the number of all events, of these if 0."""
    events = []
    for step in steps:
        if step.isdecimal():
            events.append(CallEvent("line", 0, 1.0, int(step)))
        else:
            events.append(CallEvent("call" if step[0] == "+" else "return", FUNCTIONS.index(step[1:]), 1.0))
    count = total or sum(event.kind != "line" for event in events)
    functions = tuple(CalledFunction(name, path, index + 1) for index, name in enumerate(FUNCTIONS))
    return RankCalls(
        number, 100 + number, functions, (ThreadCalls(100 + number, True, count, tuple(events)),), note=note
    )


ALIKE = ["+main", *["+step", "-step"] * 6]


def test_the_first_call_in_which_ranks_differ_is_named() -> None:
    """The odd ones first."""
    calls = [rank(0, [*ALIKE, "+step"]), rank(1, [*ALIKE, "+evaluate", "-evaluate"]), rank(2, [*ALIKE, "+step"])]
    assert first_difference(calls) == (
        "the ranks' calls differ since all returned from step (train.py:2): then rank 1 called evaluate (train.py:4), "
        "ranks 0, 2 called step (train.py:2)"
    )


def test_a_rank_that_has_come_less_far_is_behind() -> None:
    """It is still in its last call."""
    calls = [rank(0, [*ALIKE, "+load", "-load", "+save"]), rank(1, [*ALIKE, "+load"])]
    assert first_difference(calls) == (
        "rank 1 is behind the others: last called load (train.py:3); rank 0 then returned from load (train.py:3)"
    )


def test_events_are_compared_by_their_numbers() -> None:
    """Each ring begins somewhere else; files may be in other directories on other hosts."""
    calls = [
        rank(0, [*ALIKE[3:], "+save"], total=1000),
        rank(1, [*ALIKE[1:], "+load"], total=1000, path="/other/train.py"),
    ]
    assert "then rank 0 called save" in first_difference(calls)


def test_lines_of_one_rank_do_not_count() -> None:
    """Only one rank records them."""
    with_lines = [part for step in ALIKE for part in (step, "7", "8")]
    calls = [rank(0, [*with_lines, "+load"]), rank(1, [*ALIKE, "+save"])]
    assert "then rank 0 called load" in first_difference(calls)


def test_ranks_that_are_out_of_step_for_long_are_not_compared() -> None:
    """Rank 0 writes logs: its numbers are others. A few events that agree mean nothing."""
    assert first_difference([rank(0, ALIKE, total=1000), rank(1, ALIKE, total=999)]) == ""
    few = [rank(0, ["+step", "-step", "+save"], total=1000), rank(1, ["+step", "-step", "+load"], total=1000)]
    assert first_difference(few) == ""


def test_rings_without_a_common_part_are_not_compared() -> None:
    """One rank has gone on for long."""
    assert first_difference([rank(0, ALIKE, total=1000), rank(1, ALIKE, total=5000)]) == ""


def test_ranks_that_agree_to_the_end_are_no_finding() -> None:
    """Nor is one rank alone, or one whose record is not complete."""
    assert first_difference([rank(0, ALIKE), rank(1, ALIKE)]) == ""
    assert first_difference([rank(0, ALIKE)]) == ""
    assert first_difference([]) == ""
    assert first_difference([rank(0, [*ALIKE, "+load"]), rank(1, [*ALIKE, "+save"], note="ended early")]) == ""
