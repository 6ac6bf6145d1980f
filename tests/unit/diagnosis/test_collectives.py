"""Flight Recorders laid side by side: who called something else, who did not call, who is only waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.diagnosis.collectives import compare
from saferun.evidence.job_evidence import CollectiveCall, GroupProgress, RankCollectives


def call(seq: int, op: str = "all_reduce", sizes: str = "[[3]]", *, retired: bool = True) -> CollectiveCall:
    return CollectiveCall(seq, op, sizes, retired, " " in op, 0)


def progress(
    *calls: CollectiveCall,
    group: str = "gloo:0",
    description: str = "default_pg",
    ranks: Iterable[int] = (),
    completed: int | None = None,
) -> GroupProgress:
    """As the capture derives it: complete is what lies before the first call that is not."""
    collectives = [one for one in calls if not one.is_p2p]
    enqueued = max((one.seq for one in collectives), default=-1)
    if completed is None:
        completed = min((one.seq - 1 for one in collectives if not one.retired), default=enqueued)
    return GroupProgress(group, description, tuple(ranks), enqueued, -1, completed, tuple(calls))


def at(rank: int, seq: int, op: str = "all_reduce", sizes: str = "[[3]]") -> RankCollectives:
    """A rank that has made all calls before, and waits in this one."""
    return RankCollectives(
        rank, (progress(*(call(number) for number in range(1, seq)), call(seq, op, sizes, retired=False)),)
    )


def after(rank: int, seq: int) -> RankCollectives:
    """A rank whose calls have all ended."""
    return RankCollectives(rank, (progress(*(call(number) for number in range(1, seq + 1))),))


# ------------------------------------------------------------------------------------------------------------- missing


def test_a_rank_that_did_not_call_is_missing() -> None:
    found = compare([at(0, 5), after(1, 4), at(2, 5)], range(3))
    assert found.lines == (
        "rank 1 has not called collective 5 (all_reduce) of group default_pg that ranks 0, 2 wait in; it is 1 behind",
    )
    assert found.culprits == (1,)
    assert [wait[:3] for wait in found.waiting] == [(0, "default_pg", 5), (2, "default_pg", 5)]


def test_ranks_that_are_behind_alike_share_a_line() -> None:
    found = compare([at(0, 5), after(1, 4), after(2, 2), after(3, 4)], range(4))
    assert [missing.ranks for missing in found.missing] == [(2,), (1, 3)]
    assert found.lines[1].startswith("ranks 1, 3 have not called collective 5")
    assert found.lines[1].endswith("that rank 0 waits in; they are 1 behind")


def test_a_rank_that_never_called_is_missing_from_the_start() -> None:
    """It has a recorder and nothing in it."""
    found = compare([at(0, 1, "barrier", "[]"), RankCollectives(1, ())], range(2))
    assert found.lines == (
        "rank 1 has not called collective 1 (barrier) of group default_pg that rank 0 waits in; it is 1 behind",
    )


def test_a_rank_that_waits_elsewhere_is_held_up_itself() -> None:
    """Rank 1 waits for rank 2 in their own group; so it is rank 2 that everybody waits for."""
    tp = [
        progress(call(1), group="nccl:4", description="tp", ranks=(1, 2)),
        progress(call(1), call(2, "broadcast", retired=False), group="nccl:4", description="tp", ranks=(1, 2)),
    ]
    found = compare(
        [
            at(0, 5),
            after(1, 4)._replace(groups=(*after(1, 4).groups, tp[1])),
            after(2, 4)._replace(groups=(*after(2, 4).groups, tp[0])),
        ],
        range(3),
    )
    assert found.culprits == (2,)
    assert found.lines == (
        (
            "ranks 1-2 have not called collective 5 (all_reduce) of group default_pg that rank 0 waits in; "
            "they are 1 behind; rank 1 waits in collective 2 (broadcast) of group tp"
        ),
        "rank 2 has not called collective 2 (broadcast) of group tp that rank 1 waits in; it is 1 behind",
    )


def test_two_groups_called_in_opposite_order_blame_both() -> None:
    """A true deadlock: each waits where the other is not."""

    def stand(rank: int, waits_in: str) -> RankCollectives:
        groups = [
            progress(
                call(1), *([call(2, retired=False)] if name == waits_in else []), group=f"nccl:{name}", ranks=(0, 1)
            )
            for name in ("a", "b")
        ]
        return RankCollectives(rank, tuple(group._replace(description=group.group[-1]) for group in groups))

    assert compare([stand(0, "a"), stand(1, "b")], range(2)).culprits == (0, 1)


def test_no_member_no_laggard() -> None:
    """Rank 1 is not in the group: the group's list says so, or the group is not known on it."""
    for ranks in ((0, 2), ()):
        pair = {"group": "gloo:1", "description": "pair", "ranks": ranks}
        found = compare(
            [
                RankCollectives(0, (progress(call(1), group="gloo:1", description="pair", ranks=ranks),)),
                RankCollectives(1, (progress(call(1)),)),
                RankCollectives(
                    2, (progress(call(1), call(2, retired=False), group="gloo:1", description="pair", ranks=ranks),)
                ),
            ],
            range(3),
        )
        assert found.culprits == (0,), pair
        assert len(found.lines) == 1


def test_a_rank_that_ran_ahead_does_not_make_the_others_late() -> None:
    """On a GPU calls are only queued: all of them wait in the third, however many each has queued since."""
    ahead = [
        RankCollectives(rank, (progress(call(1), call(2), *(call(seq, retired=False) for seq in range(3, 6 + rank))),))
        for rank in range(3)
    ]
    found = compare(ahead, range(3))
    assert not found.missing
    assert [stuck.seq for stuck in found.stuck] == [3]


def test_numbers_that_no_call_shows_are_not_counted() -> None:
    """A monitored barrier uses up numbers and leaves no trace."""
    waits = RankCollectives(0, (progress(call(1), call(4, retired=False), completed=3),))
    found = compare([waits, after(1, 1)], range(2))
    assert found.missing[0].seq == 4
    assert found.missing[0].behind == 1


# ---------------------------------------------------------------------------------------------------------- mismatched


def test_another_call_is_a_mismatch() -> None:
    found = compare([at(0, 5), at(1, 5), at(2, 5, "broadcast")], range(3))
    assert found.lines == (
        (
            "rank 2 called broadcast of shape [3] as collective 5 of group default_pg "
            "where ranks 0-1 called all_reduce of shape [3]"
        ),
    )
    assert found.culprits == (2,)


def test_other_sizes_are_a_mismatch() -> None:
    found = compare([at(0, 5, sizes="[[4]]"), at(1, 5), at(2, 5)], range(3))
    assert found.lines == (
        (
            "rank 0 called all_reduce of shape [4] as collective 5 of group default_pg "
            "where ranks 1-2 called all_reduce of shape [3]"
        ),
    )


@pytest.mark.parametrize("op", ["all_to_all", "scatter", "gather", "barrier", "coalesced", "something new"])
def test_where_sizes_may_differ_they_do_not_matter(op: str) -> None:
    assert not compare([at(0, 5, op, "[[4]]"), at(1, 5, op), at(2, 5, op, "[]")], range(3)).mismatched


def exchanged(*totals: tuple[int, int], unknown: int = 0) -> tuple[int, ...]:
    """Who is suspected, where ranks that hand in and get so many elements are in an all_to_all."""
    known = []
    for rank, (handed_in, taken) in enumerate(totals):
        waiting = call(1, "all_to_all", f"[[{handed_in}]]", retired=False)._replace(output_sizes=f"[[{taken}]]")
        known.append(RankCollectives(rank, (progress(waiting),)))
    return compare(known, range(len(totals) + unknown)).suspects


def test_a_rank_with_a_short_batch_is_not_the_odd_one_of_an_all_to_all() -> None:
    """It hands in less, and the others get less of it: split sizes are made for that."""
    assert exchanged((12, 10), (12, 10), (12, 10), (6, 12)) == (0, 1, 2, 3)
    # All get the same, a part of it from a rank that has fewer rows.
    assert exchanged((12, 11), (12, 11), (12, 11), (8, 11)) == (0, 1, 2, 3)


def test_a_rank_whose_all_to_all_cannot_belong_to_the_others_is_suspected_alone() -> None:
    """More is handed in than all get together; or each gets what it hands in, as without split sizes."""
    assert exchanged((12, 12), (12, 12), (12, 12), (16, 12)) == (3,)
    assert exchanged((12, 12), (12, 12), (12, 12), (16, 16)) == (3,)
    # A member of which nothing is known may get the rest.
    assert exchanged((12, 12), (12, 12), (12, 12), (16, 12), unknown=1) == (0, 1, 2, 3)


@pytest.mark.parametrize("sizes", ["[[1, 3]]", "[[3, 1]]", "no sizes", "[3]", "[[-3]]", "[[", "", "[[1.5]]"])
def test_only_numbers_of_elements_that_are_known_and_differ_are_told(sizes: str) -> None:
    """The same elements in another shape are sent alike."""
    assert not compare([at(0, 5, sizes=sizes), at(1, 5), at(2, 5)], range(3)).mismatched


def test_two_against_each_other_are_both_named() -> None:
    found = compare([at(0, 2), at(1, 2, "barrier", "[]")], range(2))
    assert found.lines == (
        "rank 0 called all_reduce of shape [3] and rank 1 called barrier as collective 2 of group default_pg",
    )
    assert found.mismatched[0].is_tie
    assert found.culprits == (0, 1)


def test_the_first_difference_is_told_and_no_other() -> None:
    """A rank that left out one call is out of step ever after."""
    calls = [call(seq, op) for seq, op in enumerate(("all_reduce", "barrier", "broadcast", "gather"), start=1)]
    skipped = [one._replace(seq=one.seq - 1) for one in calls[1:]]
    waiting = calls[-1]._replace(retired=False)
    found = compare(
        [
            RankCollectives(0, (progress(*calls[:-1], waiting),)),
            RankCollectives(1, (progress(*calls[:-1], waiting),)),
            RankCollectives(2, (progress(*skipped),)),
        ],
        range(3),
    )
    assert [(mismatch.seq, mismatch.ranks) for mismatch in found.mismatched] == [(1, (2,))]
    assert not found.missing


def test_what_has_worked_was_no_mismatch() -> None:
    works = [RankCollectives(rank, (progress(call(1, op), call(2)),)) for rank, op in enumerate(("gather", "scatter"))]
    assert compare(works, range(2)).lines == ()


def test_a_coalesced_call_is_not_taken_apart() -> None:
    """Its members have one number, in whatever order each rank gives them."""
    members = [call(1, "_broadcast_oop", retired=False), call(1, "coalesced", retired=False)]
    found = compare(
        [RankCollectives(0, (progress(*members),)), RankCollectives(1, (progress(*members[::-1]),))], range(2)
    )
    assert not found.mismatched


# --------------------------------------------------------------------------------------------------------------- stuck


def test_where_all_have_called_and_none_ends_it_is_stuck() -> None:
    found = compare([at(rank, 5) for rank in range(3)], range(3))
    assert found.lines == (
        (
            "ranks 0-2 wait in collective 5 (all_reduce) of group default_pg, "
            "which all members have called and none has completed"
        ),
    )
    assert found.culprits == ()


def test_what_is_not_known_is_said() -> None:
    """Of a rank that does not answer nothing is claimed."""
    silent = RankCollectives(1, (), "it does not answer")
    found = compare([at(0, 5), silent, at(2, 5)], range(4))
    assert found.unavailable == (1, 3)
    assert found.culprits == ()
    assert found.lines == (
        "ranks 0, 2 wait in collective 5 (all_reduce) of group default_pg; nothing is known of ranks 1, 3",
    )


def test_of_a_group_whose_members_nobody_tells_no_more_is_claimed() -> None:
    waits = progress(call(1, retired=False), group="gloo:1", description="undefined")
    found = compare([RankCollectives(0, (waits,)), RankCollectives(1, ())], range(2))
    assert found.lines == (
        "rank 0 waits in collective 1 (all_reduce) of group 1; who else belongs to the group is not known",
    )


def test_a_collective_that_ended_on_others_is_told_with_them() -> None:
    found = compare([at(0, 5), at(1, 4), at(2, 5)], range(3))
    assert found.lines == (
        "rank 1 waits in collective 4 (all_reduce) of group default_pg, which has ended on ranks 0, 2",
    )


# --------------------------------------------------------------------------------------------------- sends and receives


def test_a_send_that_nobody_receives_is_told() -> None:
    def stand(rank: int, *ops: tuple[str, bool]) -> RankCollectives:
        calls = [call(number, op, retired=retired) for number, (op, retired) in enumerate(ops)]
        return RankCollectives(rank, (progress(*calls, group="nccl:2", description="pp", ranks=(4, 6)),))

    found = compare([stand(4, ("send 0->1", False)), stand(6, ("recv 1<-0", True))], range(8))
    assert found.lines == ("rank 4 waits in a send to rank 6 in group pp, and rank 6 is in no recv from it",)
    assert found.culprits == (6,)
    assert not compare([stand(4, ("send 0->1", False)), stand(6, ("recv 1<-0", False))], range(8)).unpaired
    assert not compare([stand(4, ("send 0->9", False)), stand(6)], range(8)).unpaired
    over = stand(4, ("send 0->1", False), ("send 0->1", True))
    assert not compare([over, stand(6)], range(8)).unpaired


# --------------------------------------------------------------------------------------------------------------- words


def test_groups_of_one_name_are_told_apart() -> None:
    groups = (progress(call(1)), progress(call(1), group="nccl:0"))
    found = compare([RankCollectives(0, groups)], range(1))
    assert [stand.group for stand in found.groups] == ["default_pg (gloo:0)", "default_pg (nccl:0)"]


# ----------------------------------------------------------------------------------------------------------- properties

OPS = ("all_reduce", "broadcast", "barrier", "all_gather")
PROGRAMS = st.lists(st.sampled_from(OPS), min_size=1, max_size=12)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[str], int]:
    """Number of ranks, what all of them call, and the position of the call that goes wrong."""
    program = draw(PROGRAMS)
    return draw(st.integers(3, 9)), program, draw(st.integers(0, len(program) - 1))


def made(program: Sequence[str], end: int, *, waits: bool) -> tuple[GroupProgress, ...]:
    calls = [call(seq, op) for seq, op in enumerate(program[:end], start=1)]
    if waits:
        calls.append(call(end + 1, program[end], retired=False))
    return (progress(*calls),) if calls else ()


@given(job=jobs(), behind=st.integers(0, 3), pick=st.randoms(use_true_random=False))
def test_whoever_stays_away_is_named_and_nobody_else(
    job: tuple[int, list[str], int], behind: int, pick: Random
) -> None:
    """Also where it stopped several calls earlier, because the others had only queued theirs."""
    number, program, position = job
    culprit = pick.randrange(number)
    stopped = max(0, position - behind)
    queued = [
        *(call(seq, op) for seq, op in enumerate(program[:stopped], start=1)),
        *(call(seq, op, retired=False) for seq, op in enumerate(program[stopped : position + 1], start=stopped + 1)),
    ]
    found = compare(
        [
            RankCollectives(rank, made(program, stopped, waits=False) if rank == culprit else (progress(*queued),))
            for rank in range(number)
        ],
        range(number),
    )
    assert found.culprits == (culprit,)
    assert not found.mismatched
    assert not found.stuck
    assert [missing.seq for missing in found.missing] == [stopped + 1]
    assert found.missing[0].behind == position + 1 - stopped


@given(job=jobs(), rank=st.integers(0, 8), other=st.sampled_from(OPS))
def test_whoever_calls_something_else_is_named_and_nobody_else(
    job: tuple[int, list[str], int], rank: int, other: str
) -> None:
    number, program, position = job
    culprit = rank % number
    strange = [*program[:position], "gather" if other == program[position] else other]
    found = compare(
        [
            RankCollectives(one, made(strange if one == culprit else program, position, waits=True))
            for one in range(number)
        ],
        range(number),
    )
    assert found.culprits == (culprit,)
    assert [mismatch.seq for mismatch in found.mismatched] == [position + 1]
    assert not found.missing
    assert not found.stuck


@given(job=jobs())
def test_where_all_do_the_same_nobody_is_named(job: tuple[int, list[str], int]) -> None:
    number, program, position = job
    found = compare(
        [RankCollectives(rank, made(program, position, waits=True)) for rank in range(number)], range(number)
    )
    assert found.culprits == ()
    assert [stuck.waiting for stuck in found.stuck] == [tuple(range(number))]


CALLS = st.builds(
    CollectiveCall,
    st.integers(-1, 6),
    st.sampled_from([*OPS, "send 0->1", "recv 1<-0", "send ->", "coalesced", ""]),
    st.sampled_from(["[[3]]", "[[4]]", "[]", "?", "[[3], [2, 2]]"]),
    st.booleans(),
    st.booleans(),
    st.just(0),
)
NUMBERS = st.integers(-1, 8)
PROGRESS = st.builds(
    GroupProgress,
    st.sampled_from(["gloo:0", "nccl:0", "nccl:1", "odd", ""]),
    st.sampled_from(["default_pg", "undefined", "", "tp"]),
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.lists(CALLS, max_size=5).map(tuple),
)
RANKS = st.builds(
    RankCollectives, st.integers(0, 5), st.lists(PROGRESS, max_size=3).map(tuple), st.sampled_from(["", "", "gone"])
)


def test_whoever_has_not_called_the_very_first_is_behind() -> None:
    """Numbers begin with 1 today; one that begins with 0 makes nobody "0 behind"."""
    first = GroupProgress("gloo:0", "default_pg", (0, 1), 0, 0, -1, ())
    none = GroupProgress("gloo:0", "default_pg", (0, 1), -1, -1, -1, ())
    (missing,) = compare([RankCollectives(0, (first,), ""), RankCollectives(1, (none,), "")], [0, 1]).missing
    assert (missing.ranks, missing.waiting, missing.behind) == ((1,), (0,), 1)


@given(collectives=st.lists(RANKS, max_size=5), world=st.lists(st.integers(0, 6), max_size=6, unique=True))
def test_any_evidence_can_be_compared(collectives: list[RankCollectives], world: list[int]) -> None:
    """What came over the socket may contradict itself; and nobody is named of whom nothing is known."""
    found = compare(collectives, world)
    known = {one.rank for one in collectives if not one.failure}
    assert {*found.culprits} <= known
    assert {wait.rank for wait in found.waiting} <= known
    assert not {*found.unavailable} & known
    kinds = (found.mismatched, found.missing, found.stuck, found.circles, found.unpaired)
    assert len(found.lines) == sum(map(len, kinds))
    for missing in found.missing:
        assert not {*missing.ranks} & {*missing.waiting}
        assert missing.behind > 0


# ------------------------------------------------------------------------------------------------------------- circles


def between(name: str, *, waits: bool) -> GroupProgress:
    """A group of ranks 1 and 2, known by who has called in it, which waits in the third call or has made two."""
    calls = [call(1), call(2), *([call(3, retired=False)] if waits else [])]
    return progress(*calls, group=f"gloo:{name}", description="undefined", ranks=(1, 2))


def test_groups_that_are_entered_in_different_orders_are_a_circle() -> None:
    ranks = [
        at(0, 5),
        RankCollectives(1, (between("a", waits=True), between("b", waits=False), *after(1, 4).groups)),
        RankCollectives(2, (between("a", waits=False), between("b", waits=True), *after(2, 4).groups)),
    ]
    found = compare(ranks, range(3))
    assert found.culprits == (1, 2)
    (circle,) = found.circles
    assert circle.message == (
        "ranks 1-2 wait for each other: rank 1 in collective 3 (all_reduce) of group a for rank 2, "
        "rank 2 in collective 3 (all_reduce) of group b for rank 1"
    )
    assert found.lines[0] == circle.message


def test_many_ranks_in_a_circle_are_a_line_of_bounded_length() -> None:
    ranks = []
    for rank in range(40):
        waits = progress(
            call(1), call(2, retired=False), group=f"nccl:{rank}", ranks=(rank, (rank + 1) % 40), description=""
        )
        last = (rank - 1) % 40
        done = progress(call(1), group=f"nccl:{last}", ranks=(last, rank), description="")
        ranks.append(RankCollectives(rank, (waits, done)))
    (circle,) = compare(ranks, range(40)).circles
    assert circle.ranks == tuple(range(40))
    assert len(circle.message) < 500
    assert circle.steps.endswith("rank 39 in collective 2 (all_reduce) of group 39 for rank 0")


def test_a_call_of_a_group_of_unknown_members_is_not_said_to_be_made_by_all() -> None:
    ranks = [
        at(0, 5),
        *(
            RankCollectives(
                rank, (progress(call(1, retired=False), group=f"gloo:{rank}", description=""), *after(rank, 4).groups)
            )
            for rank in (1, 2)
        ),
    ]
    assert not any(stuck.is_complete for stuck in compare(ranks, range(3)).stuck)
