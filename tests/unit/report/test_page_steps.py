"""How far the ranks were, on the timeline of the page: steps in events, and the last ones in the report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from saferun.report.page.building import PHASES, build_page
from saferun.report.page.contents import HostSection, IncidentPart, ReportPart, StepPart
from saferun.report.page.exports import perfetto
from saferun.report.page.rendering import LIMIT_BYTES, render_page
from saferun.report.page.run_contents import HostEvents, decode_events
from saferun.report.page.run_reading import read_run
from saferun.report.page.timeline import build_timelines
from saferun.report.report_values import Cause
from tests.unit.report.page_samples import START, event, exited, hang_events, hang_run, joined, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from saferun.model import JsonObject
    from saferun.report.page.page_model import Mark, TimelineRow

NOTHING = ReportPart()


def stepped(at: float, steps: dict[int, int], *, before_s: float = 0.0) -> JsonObject:
    """Ranks have reported these steps; ``before_s``: how long before."""
    times = [START + at - before_s] * len(steps)
    return event("StepsReported", at, ranks=list(steps), steps=list(steps.values()), times=times)


def rows_of(
    lines: list[JsonObject], report: ReportPart = NOTHING, *more: list[JsonObject], folds: bool = True
) -> tuple[TimelineRow, ...]:
    """The rows of a timeline; each list of events is of a host."""
    hosts = [
        HostEvents(f"node{number}", tuple(decode_events("\n".join(map(json.dumps, one)).encode())))
        for number, one in enumerate((lines, *more), 1)
    ]
    whole, _ = build_timelines(hosts, report, None, folds=folds)
    assert whole is not None
    return whole.rows


def steps_of(row: TimelineRow) -> list[tuple[float, str]]:
    """When, after the start, which step is marked."""
    return [(round(mark.time - START, 1), mark.text) for mark in row.marks if mark.kind == "step"]


def begun(ranks: int) -> list[JsonObject]:
    return [joined(1.0, range(ranks), ranks), event("RanksStarted", 1.5)]


def test_ranks_in_step_with_each_other_have_one_row_with_their_progress() -> None:
    """The moment of a sample may be between the steps of two of them."""
    lines = begun(4)
    lines += [stepped(100.0, {0: 10, 1: 10, 2: 10, 3: 10}, before_s=2.0), stepped(200.0, {0: 21, 1: 21, 2: 20, 3: 21})]
    lines += [exited(300.0, local, code=0) for local in range(4)]
    (row,) = rows_of(lines)
    assert row.label == "ranks 0-3 (4)"
    assert row.steps == "steps 20-21"
    assert steps_of(row) == [(98.0, "step 10 of rank 0"), (200.0, "step 21 of rank 0")]


def test_a_rank_that_is_behind_has_a_row_of_its_own() -> None:
    lines = [*begun(4), stepped(100.0, {0: 40, 1: 40, 2: 12, 3: 40}), stepped(200.0, {0: 41})]
    rows = rows_of(lines)
    assert [(row.label, row.steps) for row in rows] == [("ranks 0-1,3 (3)", "steps 40-41"), ("rank 2", "step 12")]
    assert steps_of(rows[1]) == [(100.0, "step 12")]


def test_of_many_steps_some_are_marked_and_the_last_one_is() -> None:
    lines = begun(1)
    lines += [stepped(2.0 + number, {0: number}) for number in range(500)]
    lines.append(exited(510.0, 0, code=0))
    (row,) = rows_of(lines)
    marked = steps_of(row)
    assert len(marked) <= 13
    assert marked[-1] == (501.0, "step 499")
    (each,) = rows_of(lines, folds=False)
    assert len(steps_of(each)) == 500


def test_the_last_steps_of_the_report_are_marked_where_the_ranks_were_when_they_ended() -> None:
    """Their age is that at the end of the rank, and in a hang that at the report."""
    hang = IncidentPart(
        "hang",
        time=START + 310,
        cause=Cause(ranks=(3,)),
        last_steps=(StepPart((0, 1, 2), "step 11 (loss 0.5), 40 s before"), StepPart((3,), "step 10, 41 s before")),
    )
    lines = [*hang_events(range(4), 4), stepped(50.0, {0: 2, 1: 2, 2: 2, 3: 2})]
    culprit, others = rows_of(lines, ReportPart(incidents=(hang,)))
    assert (culprit.steps, others.steps) == ("step 10", "step 11")
    assert steps_of(culprit) == [(50.0, "step 2"), (269.0, "step 10")]
    assert steps_of(others) == [(50.0, "step 2 of rank 0"), (270.0, "step 11 (loss 0.5) of rank 0")]


def test_a_last_step_that_events_have_gets_its_metrics() -> None:
    failure = IncidentPart("failure", time=START + 90, last_steps=(StepPart((0,), "step 7 (loss nan), 3 s before"),))
    lines = [*begun(1), stepped(50.0, {0: 7}, before_s=1.0), exited(53.0, 0, code=1)]
    (row,) = rows_of(lines, ReportPart(incidents=(failure,)))
    assert steps_of(row) == [(49.0, "step 7 (loss nan)")]


def test_ranks_of_hosts_whose_files_are_elsewhere_have_the_steps_of_the_report() -> None:
    hosts = (HostSection("node1", (0, 1)), HostSection("node2", (2, 3)))
    hang = IncidentPart("hang", time=START + 310, hosts=hosts, last_steps=(StepPart((2, 3), "step 5, 9 s before"),))
    rows = rows_of(hang_events(range(2), 4), ReportPart(incidents=(hang,)))
    (there,) = [row for row in rows if row.where == "node2"]
    assert steps_of(there) == [(301.0, "step 5 of rank 2")]


def test_the_clocks_of_hosts_are_corrected_for_steps_as_well() -> None:
    late = [*begun(2), stepped(100.0, {0: 3}), event("ClockMeasured", 200.0) | {"ahead_s": 3600.0}]
    late = [line | {"time": line["time"] + 3600} for line in late]
    late[2]["times"] = [late[2]["times"][0] + 3600]
    late[0] |= {"placement": {"world_size": 4, "ranks": [{"local_rank": 0, "rank": 2}]}}
    late[2]["ranks"] = [2]
    rows = rows_of([*begun(2), stepped(100.0, {0: 3})], NOTHING, late)
    assert {steps_of(row)[0][0] for row in rows if row.steps} == {100.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"ranks": [0, 1], "steps": [5], "times": [START]},
        {"ranks": [0], "steps": [-1], "times": [START]},
        {"ranks": [0], "steps": [1 << 60], "times": [START]},
        {"ranks": [99], "steps": [5], "times": [START]},
        {"ranks": ["0"], "steps": [5], "times": [START]},
        {"ranks": [0], "steps": ["5"], "times": [START]},
        {"ranks": [0], "steps": [[5]], "times": ["now"]},
    ],
)
def test_steps_that_cannot_be_are_none(fields: dict[str, Any]) -> None:
    lines = [*begun(1), event("StepsReported", 50.0, **fields), exited(60.0, 0, code=0)]
    (row,) = rows_of(lines)
    assert (row.steps, steps_of(row)) == ("", [])


@pytest.mark.parametrize("text", ["", "step", "step x, 4 s before", "step 5, x s before", "5", "step " + "9" * 400])
def test_a_last_step_of_another_form_is_not_marked(text: str) -> None:
    """It stands in its table as it is."""
    failure = IncidentPart("failure", time=START + 60, last_steps=(StepPart((0,), text),))
    (row,) = rows_of([*begun(1), exited(60.0, 0, code=1)], ReportPart(incidents=(failure,)))
    assert steps_of(row) == []


def test_what_a_rank_calls_its_metrics_does_not_act_on_the_page(tmp_path: Path) -> None:
    folder = hang_run(tmp_path / "run")
    report = json.loads((folder / "report.json").read_text())
    report["incidents"][-1]["last_steps"] = [{"ranks": [0], "text": "step 5 (<img src=x> 1), 4 s before"}]
    (folder / "report.json").write_text(json.dumps(report))
    page = render_page(read_run(str(folder))).decode()
    assert "step 5 (&lt;img src=x&gt; 1)" in page
    assert "<img" not in page
    assert 'class="mark step"' in page
    assert "a reported step" in page


def test_a_thousand_ranks_with_steps_are_a_small_page(tmp_path: Path) -> None:
    """None of them is in step with another one."""
    events = {}
    for host in range(128):
        ranks = range(8 * host, 8 * host + 8)
        lines = hang_events(ranks, 1024)
        lines += [stepped(20.0 + at, {rank: at * 1000 + 37 * rank for rank in ranks}) for at in range(30)]
        events[f"node{host}"] = lines
    page = render_page(read_run(str(write_run(tmp_path / "run", (), events))))
    assert len(page) < LIMIT_BYTES / 4
    assert page.count(b'class="row') <= 2 * 64


def test_a_trace_for_perfetto_has_the_steps(tmp_path: Path) -> None:
    lines = [*begun(2), stepped(100.0, {0: 10, 1: 11}), exited(200.0, 0, code=0), exited(200.0, 1, code=0)]
    page = build_page(read_run(str(write_run(tmp_path / "run", (), {"node1": lines}))), str, folds=False)
    found = [(row["tid"], row["name"]) for row in perfetto(page, PHASES)["traceEvents"] if row.get("cat") == "step"]
    assert found == [(0, "step 10"), (1, "step 11")]


def test_marks_of_steps_are_moments_like_any_other() -> None:
    lines = [*begun(1), stepped(100.0, {0: 10}), exited(200.0, 0, code=0)]
    (row,) = rows_of(lines)
    marks: tuple[Mark, ...] = row.marks
    assert [mark.kind for mark in marks] == ["step", "exit-ok"]
