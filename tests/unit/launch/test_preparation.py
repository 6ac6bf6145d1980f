"""What torch is asked about an attempt, for the ranks of this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from saferun.launch.attempt_setup import AttemptSetup
from saferun.model import Placement, RankAssignment
from tests.unit.samples import CONFIG, logs_of


@pytest.mark.parametrize(
    ("local_ranks", "redirects", "tee", "shown"),
    [((0, 1), [1, 2], [3, 0], [1, 7]), ((0,), [1], [3], [1, 7]), ((1,), [2], [0], [0, 6])],
    ids=["the whole host", "the first task", "the second task"],
)
def test_torch_is_asked_for_the_local_ranks_of_this_process(
    local_ranks: tuple[int, ...], redirects: list[int], tee: list[int], shown: list[int]
) -> None:
    """A plugin for logs counts them from 0; an option names the ranks of the host."""
    setup = AttemptSetup.__new__(AttemptSetup)
    logs = logs_of(redirects=(1, 2), tee=(3, 0), shown=frozenset({1, 7}))._replace(logs_specs="mine")
    setup.__dict__.update(_config=CONFIG._replace(logs=logs), _context=SimpleNamespace(environ={}))
    ranks = tuple(RankAssignment(local_rank, local_rank, local_rank) for local_rank in local_ranks)
    preparation = setup._preparation(Placement(0, 1, 2, 2, ranks, "node0", 29500, "job7", local_world_size=2))
    asked = preparation["logs"]
    assert preparation["local_ranks"] == list(local_ranks)
    assert (asked["redirects"], asked["tee"], asked["local_ranks_filter"]) == (redirects, tee, shown)
