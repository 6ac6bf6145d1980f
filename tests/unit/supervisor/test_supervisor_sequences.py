"""The state machine and any sequence of events at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saferun.supervisor.actions import Finish, ReportRestart
from saferun.supervisor.machine import State
from saferun.supervisor.policy import HangPolicy
from tests.examples import examples
from tests.unit.supervisor.fake_world import (
    OK,
    Step,
    World,
    fail_and_back_off,
    running,
)

KINDS = (
    *(
        "answer",
        "answer",
        "answer",
        "exit",
        "again",
        "never",
        "old",
        "signal",
        "store",
        "request",
        "restart",
        "checkpoint",
    ),
    *("start fails", "deadline", "hang", "dump", "tool", "suspects"),
)
HANG_POLICIES = st.builds(HangPolicy, st.sampled_from(["report", "stop", "restart"]), st.booleans())
STEPS = st.lists(st.builds(Step, st.sampled_from(KINDS), st.integers(0, 59)), max_size=40)


@examples(500)
@given(
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
    STEPS,
    st.booleans(),
    st.booleans(),
    HANG_POLICIES,
)
def test_whatever_happens_every_launch_ends(
    ranks: int,
    max_restarts: int,
    failures: int,
    answers: int,
    steps: list[Step],
    answering: bool,
    obedient: bool,
    hang_policy: HangPolicy,
) -> None:
    """No sequence of events raises, breaks a law, or leaves the machine in a state that nothing ends."""
    world = World(ranks, max_restarts, hang_policy)
    world.launch()
    # The adventures begin anywhere: after some attempts that failed in an orderly way, and some good answers.
    for _ in range(min(failures, max_restarts)):
        world.answer_until(State.RUNNING)
        fail_and_back_off(world)
        world.expire()
    for _ in range(answers):
        if world.answers:
            world.answer()
    for step in steps:
        world.take(step)
    # From here on deadlines fire and ranks end; whether anything else is answered is up to the example.
    for _ in range(16 * (max_restarts + 1) + 4 * ranks):
        if world.state is State.DONE:
            break
        if answering and world.answers:
            world.answer()
        elif world.alive and (obedient or world.state is State.RUNNING):
            world.exit(min(world.alive), OK)
        else:
            world.expire()
    assert world.state is State.DONE
    assert sum(isinstance(action, Finish) for action in world.actions) == 1
    assert world.finish is not None
    if world.finish.exit_code == 0:
        assert not world.told_to_stop
        assert world.statuses == dict.fromkeys(range(ranks), OK)
    requested = sum(isinstance(action, ReportRestart) for action in world.actions)
    assert world.attempt <= max_restarts + requested


@given(st.integers(1, 4), st.permutations(range(4)))
def test_the_order_in_which_good_ranks_end_does_not_matter(ranks: int, order: list[int]) -> None:
    """Only that all of them have."""
    world = running(ranks)
    for rank in [rank for rank in order if rank < ranks]:
        assert world.state is State.RUNNING
        world.exit(rank)
    world.answer()
    assert world.finish == Finish(0)
