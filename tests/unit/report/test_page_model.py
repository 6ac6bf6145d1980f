"""The model of the page: timelines, stacks, who waits for whom, and traces for other viewers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.report.page.building import PHASES, build_page
from saferun.report.page.contents import (
    BranchPart,
    CallPart,
    FramePart,
    HostSection,
    IncidentPart,
    PairPart,
    PreflightSection,
    ProgressPart,
    RecorderPart,
    ReportPart,
    ResultPart,
    VerdictPart,
    WaitGroupPart,
)
from saferun.report.page.exports import perfetto, speedscope
from saferun.report.page.page_model import Mark, Timeline
from saferun.report.page.run_contents import HostEvents, RunFiles, decode_events
from saferun.report.page.run_reading import read_run
from saferun.report.page.stack_tree import build_stacks
from saferun.report.page.timeline import build_timelines
from saferun.report.page.wait_graph import build_group_tables, build_wait_graph, kind_of
from saferun.report.report_values import Cause, Launch, RankFailure
from tests.unit.report.page_samples import START, crash_events, crash_run, event, exited, hang_events, hang_run, joined
from tests.unit.report.trace_schemas import SPEEDSCOPE, TRACE_EVENTS

NOBODY = ReportPart()


def events_of(host: str, lines: list[dict[str, object]]) -> HostEvents:
    """The events of a host, as they are read."""
    return HostEvents(host, tuple(decode_events("\n".join(map(json.dumps, lines)).encode())))


def phases(timeline: Timeline | None) -> list[tuple[str, list[tuple[str, float, float]], list[str]]]:
    """Each row: its ranks, its phases with their times after the start, and its marks."""
    assert timeline is not None
    return [
        (
            row.label,
            [(s.kind, round(s.start - START, 1), round(s.end - START, 1)) for s in row.segments],
            [mark.kind for mark in row.marks],
        )
        for row in timeline.rows
    ]


# --------------------------------------------------------------------------------------------------------- the timeline


def test_the_timeline_of_a_hang_shows_who_waits_and_who_is_the_cause() -> None:
    hang = IncidentPart("hang", cause=Cause(ranks=(3,)))
    whole, closing = build_timelines(
        [events_of("node1", hang_events(range(8), 8))], ReportPart(incidents=(hang,)), None
    )
    assert phases(whole) == [
        (
            "rank 3",
            [
                ("start", 1.0, 1.5),
                ("run", 1.5, 8.0),
                ("work", 8.0, 10.0),
                ("stuck", 10.0, 311.0),
                ("stopping", 311.0, 311.5),
            ],
            ["exit-stopped"],
        ),
        (
            "ranks 0-2,4-7 (7)",
            [
                ("start", 1.0, 1.5),
                ("run", 1.5, 8.0),
                ("work", 8.0, 10.0),
                ("wait", 10.0, 311.0),
                ("stopping", 311.0, 311.5),
            ],
            ["exit-stopped"],
        ),
    ]
    assert whole is not None
    assert whole.rows[0].is_culprit
    assert [mark.kind for mark in whole.marks] == ["hang"]
    assert closing is not None
    assert closing.start > START + 300


def test_the_timeline_of_a_crash_shows_what_ended_whom() -> None:
    failure = IncidentPart("failure", cause=Cause(ranks=(2,)))
    lines = crash_events(range(4), 2)
    whole, closing = build_timelines([events_of("node1", lines)], ReportPart(incidents=(failure,)), None)
    assert phases(closing)[0] == ("rank 2", [("run", 30.8, 31.0)], ["exit-bad"])
    assert {marks[0] for label, _, marks in phases(closing) if label != "rank 2"} == {"exit-stopped"}
    segments = [segment for _, row, _ in phases(closing) for segment in row]
    assert ("ending", 31.0, 31.4) in segments
    assert ("stopping", 31.4, 32.0) in segments
    assert len(phases(whole)) == 2  # hundredths of a second are nothing in half a minute


def test_ranks_of_hosts_whose_files_are_elsewhere_are_drawn_by_the_report() -> None:
    """Without shared files the leader has its own events only, and a timeline without the cause says nothing."""
    hosts = (HostSection("node1", tuple(range(4))), HostSection("node2", tuple(range(4, 8))))
    hang = IncidentPart(
        "hang",
        time=START + 310,
        cause=Cause(ranks=(5,)),
        hosts=hosts,
        verdict=VerdictPart("quiescent", stalled_s=300.0),
        outcome="ended",
    )
    events = [events_of("node1", hang_events(range(4), 8))]
    whole, _ = build_timelines(events, ReportPart(incidents=(hang,)), None)
    assert whole is not None
    assert [(row.label, row.where, row.is_culprit) for row in whole.rows] == [
        ("rank 5", "node2", True),
        ("ranks 0-3 (4)", "node1", False),
        ("ranks 4,6-7 (3)", "node2", False),
    ]
    assert phases(whole)[0][1] == [("start", 1.0, 1.5), ("run", 1.5, 10.0), ("stuck", 10.0, 311.5)]
    assert "The files of node2 are not here" in whole.note
    failed = RankFailure(6, time=START + 31.0, exit_code=1)
    failure = IncidentPart("failure", hosts=hosts, first_failure=failed, outcome="ended")
    whole, _ = build_timelines([events_of("node1", crash_events(range(4), 2))], ReportPart(incidents=(failure,)), None)
    assert whole is not None
    assert next(row.marks for row in whole.rows if row.label == "rank 6") == (
        Mark("exit-bad", START + 31.0, "exit code 1"),
    )


def test_clocks_are_corrected_by_what_the_checks_measured() -> None:
    """A host whose clock is an hour ahead did not do everything an hour later."""
    late = [line | {"time": line["time"] + 3600} for line in hang_events(range(8, 16), 16)]
    late[3]["times"] = [time + 3600 for time in late[3]["times"]]
    hosts = [events_of("node1", hang_events(range(8), 16)), events_of("node2", late)]
    clock = ResultPart("clock", "warn", "node2", facts=(PairPart("ahead_s", "3600.0"),))
    whole, _ = build_timelines(hosts, NOBODY, PreflightSection(results=(clock,)))
    assert [label for label, _, _ in phases(whole)] == ["ranks 0-15 (16)"]
    assert whole is not None
    assert "node2 are corrected" in whole.note
    uncorrected, _ = build_timelines(hosts, NOBODY, None)
    assert len(phases(uncorrected)) == 2


def test_clocks_are_corrected_by_what_the_hosts_measured() -> None:
    """Each relative to the leader, whose events have no measurement; what the checks found is not as exact."""
    late = [line | {"time": line["time"] + 3600} for line in hang_events(range(8, 16), 16)]
    late[3]["times"] = [time + 3600 for time in late[3]["times"]]
    late.append(event("ClockMeasured", 3601.0) | {"ahead_s": 3600.0, "error_s": 0.001})
    hosts = [events_of("node1", hang_events(range(8), 16)), events_of("node2", late)]
    clock = ResultPart("clock", "warn", "node1", facts=(PairPart("ahead_s", "-3599.0"),))
    whole, _ = build_timelines(hosts, NOBODY, PreflightSection(results=(clock,)))
    assert [label for label, _, _ in phases(whole)] == ["ranks 0-15 (16)"]
    assert whole is not None
    assert whole.note == "The clocks of node2 are corrected by what messages between the hosts measured."
    late[-1]["ahead_s"] = 0.0002
    alike, _ = build_timelines([hosts[0], events_of("node2", late)], NOBODY, None)
    assert alike is not None
    assert alike.note == "The clocks of the hosts are less than a millisecond apart."


def test_of_a_hang_that_resolved_itself_the_wait_ends() -> None:
    lines = hang_events(range(2), 2)[:5]
    lines += [event("EvidenceCaptured", 311.0, state="running"), exited(600.0, 0, code=0), exited(601.0, 1, code=0)]
    recovered = IncidentPart("hang", outcome="recovered")
    whole, _ = build_timelines([events_of("node1", lines)], ReportPart(incidents=(recovered,)), None)
    kinds = [kind for kind, _, _ in phases(whole)[0][1]]
    assert kinds == ["start", "run", "work", "wait", "work"]
    assert phases(whole)[0][2] == ["exit-ok"]


def test_signals_aborts_slow_ranks_and_retries_are_marks_of_the_job() -> None:
    lines = [
        joined(1.0, range(2), 2),
        event("RanksStarted", 1.5),
        event("RanksSlow", 20.0, ranks=[1]),
        event("SignalReceived", 30.0, signum=15),
        event("JobAborted", 40.0, reason="lost", message="node2 is silent", host="node2"),
        event("Decision", 50.0, next_step="restart", message="starting again"),
        event("Decision", 60.0, next_step="finish", message="not started again"),
        event("CheckpointRequested", 70.0, signum=10, by="saferunctl stop by ann"),
        event("StopRequested", 80.0, by="saferunctl stop by ann"),
        event("RestartRequested", 90.0, by=""),
    ]
    whole, _ = build_timelines([events_of("node1", lines), events_of("node2", lines)], NOBODY, None)
    assert whole is not None
    assert [mark.text for mark in whole.marks] == [
        "the others wait for rank 1",
        "saferun received SIGTERM",
        "the attempt was aborted: node2 is silent (node2)",
        "starting again",
        "a user asked for a checkpoint and the end of the job (saferunctl stop by ann)",
        "a user asked for the end of the job (saferunctl stop by ann)",
        "a user asked for a restart of the ranks",
    ]


OF_SINGLE_RANKS = ("stopped", "uninterruptible", "heartbeat", "overdue")


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("kind", [*OF_SINGLE_RANKS, "spinning", "stuck_collective", "quiescent", "of a later version"])
def test_of_a_hang_the_page_says_no_more_than_is_known(kind: str, *, certain: bool) -> None:
    """Other ranks than those that a verdict is about may have made progress, and a suspicion is no hang."""
    verdict = {"kind": kind, "ranks": [1], "quiet_s": 5.0, "certain": certain, "busy": []}
    lines = [joined(1.0, range(2), 2), event("RanksStarted", 1.5), event("HangSuspected", 20.0, verdict=verdict)]
    hang = IncidentPart(
        "hang",
        time=START + 20.0,
        headline="rank 1 waits",
        verdict=VerdictPart(kind, (1,), 5.0, certain),
        cause=Cause("hang", "x", (1,)),
        outcome="recovered",
        recovered_after_s=31.0,
    )
    report = ReportPart(run=Launch("id"), incidents=(hang,))
    page = build_page(RunFiles("run", report, hosts=(events_of("node1", [*lines, event("X", 30.0)]),)), str)
    (line,) = page.verdict.lines
    assert line.endswith(" (suspected, not certain).") != certain
    assert "5.0 s" in line
    assert ("rank 1" in line.lower()) == (kind in {*OF_SINGLE_RANKS, "spinning"})
    assert ("No rank had made progress" in line) == (kind == "quiescent")
    assert page.main is not None
    assert page.main.outcome == "The job recovered after 31 s."
    assert page.timeline is not None
    (mark,) = page.timeline.marks
    assert mark.text.endswith(": the job hangs" if certain else ": the job may hang")
    assert mark.text.startswith("no progress for 5.0 s") != (kind in OF_SINGLE_RANKS)
    first, last = ([segment.kind for segment in row.segments] for row in page.timeline.rows)
    assert (first, last) == (["start", "run", "stuck"], ["start", "run"] + ["wait"] * (kind not in OF_SINGLE_RANKS))


def test_of_hosts_without_files_only_the_ranks_of_a_verdict_stand_still() -> None:
    """What the leader knows of them."""
    hang = IncidentPart(
        "hang",
        time=START + 310.0,
        cause=Cause(ranks=(5,)),
        hosts=(HostSection("node2", ranks=(4, 5)),),
        verdict=VerdictPart("stopped", (5,), 300.0),
        outcome="continued",
    )
    whole, _ = build_timelines([events_of("node1", hang_events(range(4), 8))], ReportPart(incidents=(hang,)), None)
    assert whole is not None
    kinds = {row.ranks: [segment.kind for segment in row.segments] for row in whole.rows}
    assert kinds[4,] == ["start", "run"]
    assert kinds[5,] == ["start", "run", "stuck"]


def test_a_launch_that_was_stopped_need_not_have_got_a_signal() -> None:
    """``saferunctl stop``, or the end of the parent process."""
    page = build_page(RunFiles("run", ReportPart(run=Launch("id", outcome="stopped", exit_code=143))), str)
    assert page.verdict.headline == "The launch was stopped by a user or the scheduler."


def test_when_ranks_had_a_process_group_may_be_known_only_after_their_end() -> None:
    """The event is written when the attempt is over."""
    lines = [joined(1.0, range(2), 2), event("RanksStarted", 1.5), exited(20.0, 0, code=0), exited(20.0, 1, code=0)]
    lines.append(event("RanksInitialized", 21.0, ranks=[0, 1, 99], times=[START + 5.0, START + 5.0, START]))
    whole, _ = build_timelines([events_of("node1", lines)], NOBODY, None)
    assert phases(whole) == [
        ("ranks 0-1 (2)", [("start", 1.0, 1.5), ("run", 1.5, 5.0), ("work", 5.0, 20.0)], ["exit-ok"]),
    ]


def test_many_rows_become_few_and_no_rank_is_lost() -> None:
    """A thousand ranks that end one after the other."""
    lines = [joined(1.0, range(1000), 1000), event("RanksStarted", 1.5)]
    lines += [exited(10.0 + local / 20, local, code=0) for local in range(1000)]
    whole, _ = build_timelines([events_of("node1", lines)], NOBODY, None)
    assert whole is not None
    assert len(whole.rows) <= 64
    assert sorted(rank for row in whole.rows for rank in row.ranks) == list(range(1000))
    each, _ = build_timelines([events_of("node1", lines)], NOBODY, None, folds=False)
    assert each is not None
    assert len(each.rows) == 1000


@given(
    st.lists(
        st.builds(
            lambda name, at, fields: event(name, at, **fields),
            st.sampled_from(
                [
                    *("HostsJoined", "RanksStarted", "RankExited", "HangSuspected", "RanksInitialized", "JobAborted"),
                    "StepsReported",
                ]
            ),
            st.floats(-1e12, 1e12),
            st.fixed_dictionaries(
                {},
                optional={
                    "local_rank": st.integers(-5, 5),
                    "status": st.fixed_dictionaries({"signum": st.integers(-99, 99) | st.none(), "code": st.none()}),
                    "placement": st.just({"world_size": 2, "ranks": [{"local_rank": 0, "rank": 7}]}),
                    "verdict": st.fixed_dictionaries({"quiet_s": st.floats(-1e9, 1e9), "ranks": st.just([7])}),
                    "ranks": st.just([7]),
                    "times": st.lists(st.floats(-1e12, 1e12), max_size=2),
                    "steps": st.lists(st.integers(-(1 << 62), 1 << 62), max_size=2),
                    "state": st.sampled_from(["running", "stopping", ""]),
                },
            ),
        ),
        max_size=20,
    )
)
def test_events_in_any_order_make_a_timeline_or_none(lines: list[dict[str, object]]) -> None:
    """Whoever writes them."""
    whole, closing = build_timelines([events_of("node1", lines)], NOBODY, None)
    for timeline in (whole, closing):
        if timeline is not None:
            assert timeline.start <= timeline.end
            assert all(s.start <= s.end for row in timeline.rows for s in row.segments)


def test_lines_that_are_no_events_are_passed_over() -> None:
    good = json.dumps(event("RanksStarted", 1.0)).encode()
    lines = [b"not JSON", b"[]", b'{"event": 1, "time": 2}', b'{"event": "X"}', b"\xff\xfe", b"{" * 5000, good]
    assert [found.event for found in decode_events(b"\n".join(lines))] == ["RanksStarted"]


# ----------------------------------------------------------------------------------------------------------- the stacks


def frames(*names: str) -> tuple[FramePart, ...]:
    return tuple(FramePart(name, "/home/me/train.py", 7) for name in names)


def test_a_box_of_the_flame_view_is_as_wide_as_its_ranks() -> None:
    tree = (
        BranchPart(None, tuple(range(8)), frames("main")),
        BranchPart(0, (3,), frames("load")),
        BranchPart(0, (0, 1, 2, 4, 5, 6, 7), frames("step", "all_reduce")),
    )
    stacks = build_stacks(tree, frozenset({3}))
    assert stacks is not None
    assert [(box.level, box.offset, box.width, box.name) for box in stacks.flame] == [
        (0, 0.0, 8.0, "main"),
        (1, 0.0, 1.0, "load"),
        (1, 1.0, 7.0, "step"),
        (2, 1.0, 7.0, "all_reduce"),
    ]
    assert [branch.is_culprit for branch in stacks.branches] == [False, True, False]
    assert stacks.branches[0].children == (1, 2)


def test_a_tree_of_any_shape_is_drawn_without_endless_nesting() -> None:
    """Parents that come later, themselves, or a thousand deep."""
    deep = [BranchPart(index - 1 if index else None, (index,), frames("f" * 300)) for index in range(1000)]
    odd = [BranchPart(5, (1,), ()), BranchPart(1, (2,), ()), BranchPart(-3, (), frames("x"))]
    for tree in (deep, odd):
        stacks = build_stacks(tree, frozenset())
        assert stacks is not None
        assert max(branch.depth for branch in stacks.branches) <= 24
        assert len(stacks.branches) + stacks.omitted == len(tree)


# --------------------------------------------------------------------------------------------------- who waits for whom


def progress(group: str, seq: int, *, waits: bool, op: str = "all_reduce", p2p: bool = False) -> ProgressPart:
    done = seq - 1 if waits else seq
    return ProgressPart(group, group, seq, -1, done, CallPart(seq, op, "[[4]]", retired=not waits, is_p2p=p2p))


def test_the_graph_leads_from_those_who_wait_to_the_cause_by_way_of_groups() -> None:
    """Ranks 2 and 3 wait for rank 3's tensor group; rank 0 and 1 wait, in their data groups, for those two."""
    recorders = (
        RecorderPart(0, groups=(progress("tp_0", 5, waits=False), progress("dp_0", 3, waits=True))),
        RecorderPart(1, groups=(progress("tp_0", 5, waits=False), progress("dp_1", 3, waits=True))),
        RecorderPart(2, groups=(progress("tp_1", 5, waits=True), progress("dp_0", 2, waits=False))),
        RecorderPart(3, groups=(progress("tp_1", 4, waits=False), progress("dp_1", 2, waits=False))),
    )
    graph = build_wait_graph(
        IncidentPart(
            "hang",
            cause=Cause(ranks=(3,)),
            collectives=recorders,
            wait_groups=(
                WaitGroupPart("sleep", "time.sleep", (3,), "train.py:1"),
                WaitGroupPart("collective", "all_reduce", (0, 1, 2), "train.py:2"),
            ),
        )
    )
    assert graph is not None
    assert [(node.label, node.is_root) for node in graph.nodes] == [
        ("rank 3", True),
        ("ranks 1-2 (2)", False),
        ("rank 0", False),
    ]
    assert [edge.text for edge in graph.edges] == [
        "ranks 1-2 wait for rank 3 in data parallel, tensor parallel",
        "rank 0 waits for ranks 1-2 in data parallel",
    ]
    assert graph.nodes[0].y < graph.nodes[1].y < graph.nodes[2].y


def test_without_a_flight_recorder_those_in_a_collective_wait_for_the_cause() -> None:
    waits = (WaitGroupPart("collective", "all_reduce", (0, 1), ""), WaitGroupPart("sleep", "", (2,), ""))
    graph = build_wait_graph(IncidentPart("hang", cause=Cause(ranks=(2,)), wait_groups=waits))
    assert graph is not None
    assert [edge.text for edge in graph.edges] == ["ranks 0-1 wait for rank 2 in all_reduce"]
    assert build_wait_graph(IncidentPart("hang", wait_groups=waits)) is None


def test_a_circle_of_waits_and_a_receive_have_a_root_as_well() -> None:
    circle = (
        RecorderPart(0, groups=(progress("a", 2, waits=True), progress("b", 1, waits=False))),
        RecorderPart(1, groups=(progress("a", 1, waits=False), progress("b", 2, waits=True))),
    )
    graph = build_wait_graph(IncidentPart("hang", collectives=circle))
    assert graph is not None
    assert sum(node.is_root for node in graph.nodes) == 1
    pair = (
        RecorderPart(0, groups=(progress("pp", 1, waits=True, op="recv 0<-1", p2p=True),)),
        RecorderPart(1, groups=(progress("pp", 1, waits=False),)),
    )
    received = build_wait_graph(IncidentPart("hang", collectives=pair))
    assert received is not None
    assert [edge.text for edge in received.edges] == ["rank 0 waits for rank 1 in pipeline parallel"]


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("mesh_tp", "tensor parallel"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor parallel"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline parallel"),
        ("mesh_dp_shard", "data parallel"),
        ("default_pg", ""),
        ("http", ""),
    ],
)
def test_a_group_is_named_after_what_it_is_for(description: str, kind: str) -> None:
    assert kind_of(description) == kind


def test_of_collectives_those_that_differ_come_first() -> None:
    recorders = [RecorderPart(rank, groups=(progress("same", 7, waits=False),)) for rank in range(4)]
    recorders += [
        RecorderPart(rank, groups=(progress("dp", 4 if rank == 6 else 5, waits=rank != 6),)) for rank in range(4, 8)
    ]
    tables = build_group_tables(IncidentPart("hang", collectives=tuple(recorders)))
    assert [(table.name, table.is_odd) for table in tables] == [("dp", True), ("same", False)]
    assert tables[0].table.rows[0][:2] == ("rank 6", "4")
    assert tables[0].table.odd == {0}
    assert tables[1].table.rows == (("ranks 0-3 (4)", "7", "-", "7", "7: all_reduce [[4]]", "done"),)


# -------------------------------------------------------------------------------------------------------------- exports


def test_the_stacks_are_a_profile_for_speedscope(tmp_path: Path) -> None:
    content = speedscope(build_page(read_run(str(crash_run(tmp_path / "run"))), str))
    jsonschema.validate(content, SPEEDSCOPE)
    assert len(content["profiles"]) == 2
    hang = content["profiles"][1]
    names = [frame["name"] for frame in content["shared"]["frames"]]
    stacks = {
        tuple(names[number] for number in sample): weight
        for sample, weight in zip(hang["samples"], hang["weights"], strict=True)
    }
    assert stacks["<module>", "main", "load_batch"] == 1
    assert sum(stacks.values()) == hang["endValue"] == 8
    assert all(max(sample) < len(names) for profile in content["profiles"] for sample in profile["samples"])


def test_the_timeline_is_a_trace_for_perfetto(tmp_path: Path) -> None:
    """Each rank is a thread; times are microseconds; spans of a thread do not overlap."""
    page = build_page(read_run(str(hang_run(tmp_path / "run"))), str, folds=False)
    content = json.loads(json.dumps(perfetto(page, PHASES), allow_nan=False))
    jsonschema.validate(content, TRACE_EVENTS)
    rows = content["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "i"}
    named = {(row["pid"], row["tid"]) for row in rows if row["name"] in {"process_name", "thread_name"}}
    assert {(row["pid"], row["tid"]) for row in rows} <= named
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert names[3] == "rank 3 (the cause)"
    assert names[0] == "rank 0"
    assert len(names) == 8
    for rank in range(8):
        spans = [(row["ts"], row["ts"] + row["dur"]) for row in rows if row["ph"] == "X" and row["tid"] == rank]
        assert len(spans) == 5
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(spans))
    assert all(row["s"] in {"g", "t"} for row in rows if row["ph"] == "i")
