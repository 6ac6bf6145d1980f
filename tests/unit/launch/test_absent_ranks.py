"""What another shell hears of a rank that does not run on this host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.attached_viewer import absent_rank, rank_number
from tests.unit.supervisor.fake_world import placement_of


@pytest.mark.parametrize(
    ("wanted", "number"), [("0", 0), ("12", 12), ("", None), ("-1", None), ("x", None), ("²", None)]
)
def test_only_digits_are_a_number(wanted: str, number: int | None) -> None:
    assert rank_number(wanted) == number


@pytest.mark.parametrize("key", ["error", "refused"])
def test_a_rank_that_is_not_here_is_on_another_host_or_nowhere(key: str) -> None:
    placement = placement_of(2)._replace(world_size=4)
    peers = {1: SimpleNamespace(base_rank=2, ranks=2, label="node2")}
    context: Any = SimpleNamespace(job=SimpleNamespace(peers=peers))
    assert absent_rank(context, placement, 1, key) == {}
    assert absent_rank(context, placement, 3, key) == {"elsewhere": "node2"}
    assert absent_rank(context, placement, 4, key) == {key: "the job has no rank 4", "hint": "its ranks are 0-3"}
    assert absent_rank(context, placement, -1, key) == {key: "the job has no rank -1", "hint": "its ranks are 0-3"}
