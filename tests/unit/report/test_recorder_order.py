"""Which ranks' Flight Recorders a report keeps of a large job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from saferun.report.recorder_order import telling_first
from tests.unit.report.page_samples import grouped_recorders, large_run

if TYPE_CHECKING:
    from pathlib import Path


def test_whoever_is_blamed_and_each_new_state_of_a_group_come_first() -> None:
    """Ranks that stand where others of their groups stand say nothing new."""
    recorders = grouped_recorders(64, 3)
    ordered = telling_first(recorders, (41,))
    assert ordered[0].rank == 41
    assert sorted(one.rank for one in ordered) == list(range(64))
    states = {(group.group, group.enqueued, group.completed) for one in recorders for group in one.groups}
    seen: set[tuple[str, int, int]] = set()
    needed = 0
    for one in ordered:
        needed += seen != states
        seen |= {(group.group, group.enqueued, group.completed) for group in one.groups}
    assert needed < 40


def test_of_a_thousand_ranks_every_process_group_is_in_the_report(tmp_path: Path) -> None:
    """The page draws its graph and its tables from these rows."""
    large_run(tmp_path / "run")
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    rows = content["incidents"][0]["collectives"]
    assert [row["rank"] for row in rows] == sorted(row["rank"] for row in rows)
    kept = {group["group"] for row in rows for group in row["groups"]}
    assert kept == {group.group for one in grouped_recorders(1024, 3) for group in one.groups}
    assert 3 in {row["rank"] for row in rows}
