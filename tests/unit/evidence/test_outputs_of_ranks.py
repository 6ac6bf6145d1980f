"""Whose output it is: what was captured says so by rank, by local rank, or by its place alone."""

from __future__ import annotations

from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import RankEnd
from tests.unit.samples import end_of


def output(text: str, *, rank: int = -1, local_rank: int = 0) -> RankOutput:
    """What a rank left behind."""
    return RankOutput(local_rank, (text,), "", "", 0.0, rank=rank)


def evidence(*outputs: RankOutput, ends: tuple[RankEnd, ...] = (), ranks: tuple[int, ...] = ()) -> Evidence:
    """What one host knows."""
    return Evidence("node1", 0.0, ends, outputs, (), None, ranks=ranks)


def lines(known: Evidence) -> dict[int, str]:
    """The last line of each rank."""
    return {rank: found.last_lines[-1] for rank, found in known.outputs_by_rank.items()}


def test_a_rank_that_is_given_counts_for_more_than_the_local_rank() -> None:
    ends = (end_of(0, code=1), end_of(1, code=1))
    assert lines(evidence(output("a", rank=9, local_rank=1), output("b", local_rank=0), ends=ends)) == {9: "a", 0: "b"}


def test_a_local_rank_is_that_of_the_rank_that_ended_with_it() -> None:
    """Ranks of a second host begin at another number."""
    ends = (end_of(0, code=1)._replace(rank=8), end_of(1, code=1)._replace(rank=9))
    assert lines(evidence(output("a", local_rank=1), output("b", local_rank=0), ends=ends)) == {9: "a", 8: "b"}


def test_where_no_rank_has_ended_the_place_among_the_ranks_decides() -> None:
    assert lines(evidence(output("a"), output("b", local_rank=1), ranks=(4, 6))) == {4: "a", 6: "b"}


def test_output_beyond_the_known_ranks_has_its_local_rank() -> None:
    """A host whose list of ranks was cut on its way loses none."""
    assert lines(evidence(output("a"), output("b", local_rank=3), ranks=(4,))) == {4: "a", 3: "b"}
