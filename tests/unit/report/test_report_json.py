"""report.json keeps its schema whatever has happened; report.txt and it are bounded, and hold no secrets."""

from __future__ import annotations

import json
import math
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.evidence import (
    AbortReason,
    Capture,
    CaptureNote,
    Cause,
    CollectiveCall,
    CoreDump,
    Diagnosis,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    HostView,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    RankOutput,
    StackDump,
    StackNode,
    StuckLink,
    ThreadStack,
    Traceback,
    WaitGroup,
)
from saferun.model import ExitStatus, RankEnd
from saferun.report import report_text
from saferun.report.report_json import Incident, Run, build_report, outcome_of
from saferun.report.report_text import build_report_text
from saferun.text.page import redacted_line
from tests.unit.report.report_checking import (
    ANY_INTEGER,
    ANY_NUMBER,
    ANY_RANKS,
    ANY_TEXT,
    PREFLIGHT_SCHEMA,
    ROOT,
    RUN,
    SCHEMA,
    VALIDATOR,
    checked,
    objects_of,
    tuples,
)
from tests.unit.report.report_samples import (
    CORE,
    EXCEPTION_EVERYWHERE,
    FILES,
    IN_ALL_REDUCE,
    MISMATCH,
    OUT_OF_MEMORY,
    SEGFAULT,
    STEP,
    dead,
    evidence_of,
    sleeping,
)

HANG = Incident(
    "hang",
    0,
    1.7e9 + 300,
    evidence_of(),
    sleeping(8),
    "recovered",
    312.4,
    ("saferun: rank 3 sleeps", "hint: look"),
    f"{FILES}/node1/attempt_0/hang_1",
    "03:20:02",
)
CRASH = Incident(
    "failure",
    1,
    1.7e9 + 500,
    evidence_of()._replace(
        hang=None,
        ends=(dead(2, signum=11), dead(3, code=1)),
        outputs=(SEGFAULT.output,) if SEGFAULT.output else (),
        cores=(CORE, CORE._replace(rank=7, threads=(), failure="truncated")),
        oom=OomKill("cgroup", 64 << 30, 61 << 30, (4002,), 1, "/sys/fs/cgroup/memory.events"),
    ),
    SEGFAULT,
    "ended",
)


# -------------------------------------------------------------------------------------------------------- the contents


def test_a_report_says_what_is_known_of_a_hang() -> None:
    report = checked(build_report(RUN, [HANG]))
    assert report["schema"] == SCHEMA["properties"]["schema"]["const"]
    assert report["run"]["outcome"] == "failed"
    (incident,) = report["incidents"]
    assert incident["kind"] == "hang"
    assert incident["host"] == "node1"
    assert incident["verdict"] == {
        "kind": "quiescent",
        "ranks": [0, 1, 2, 3, 4, 5, 6, 7],
        "stalled_s": 300.4,
        "certain": True,
        "busy_ranks": [],
    }
    assert incident["cause"]["class"] == "hang_sleep"
    assert incident["cause"]["ranks"] == [3]
    assert incident["first_failure"] is None
    assert incident["outcome"] == "recovered"
    assert incident["recovered_after_s"] == 312.4
    assert incident["timed_out"] == ["strace of rank 5"]
    assert [note["failure"] for note in incident["captures"]] == ["", "no NVIDIA driver"]
    assert [(note["rank"], note["pid"]) for note in incident["captures"]] == [(0, 4000), (None, None)]
    assert incident["collectives"][0]["groups"][0]["last_call"]["op"] == "all_reduce"
    assert incident["truncated"] == []


def test_the_tree_is_a_list_whose_entries_name_the_one_above() -> None:
    """Nesting would be limited by every reader's stack."""
    (incident,) = checked(build_report(RUN, [HANG]))["incidents"]
    tree = incident["tree"]
    assert [(branch["parent"], branch["ranks"]) for branch in tree] == [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0, [3]),
        (0, [0, 1, 2, 4, 5, 6, 7]),
    ]
    assert tree[1]["frames"] == [
        {"function": "load_batch", "file": "/home/me/project/train.py", "line": 47, "native": False}
    ]


def test_a_report_says_what_is_known_of_a_crash() -> None:
    report = checked(build_report(RUN, [HANG, CRASH]))
    incident = report["incidents"][1]
    assert incident["first_failure"]["signal"] == "SIGSEGV"
    assert incident["first_failure"]["exit_code"] is None
    assert incident["victims"] == [3]
    assert [core["rank"] for core in incident["cores"]] == [2, 7]
    assert incident["cores"][0]["crashing_thread"][0]["native"] is True
    assert incident["cores"][1]["failure"] == "truncated"
    assert incident["oom"]["limit_bytes"] == 64 << 30
    assert incident["verdict"] is None
    assert incident["recovered_after_s"] is None


def test_a_launch_that_goes_well_has_a_report_too() -> None:
    """It is written while the launch runs, and after a hang that passed."""
    running = Run("id", "node1", (), 1.0)
    report = checked(build_report(running, []))
    assert report["incidents"] == []
    assert report["run"]["ended_at"] is None
    assert report["run"]["exit_code"] is None
    assert report["run"]["outcome"] == "running"
    assert "outcome: running" in build_report_text(running, [])


@pytest.mark.parametrize(
    ("outcome", "word"),
    [("stopped", "stopped"), ("recovered after 312 s", "recovered"), ("", "continued"), ("no such", "continued")],
)
def test_what_followed_is_one_of_few_words(outcome: str, word: str) -> None:
    assert outcome_of(HANG._replace(outcome=outcome)) == word  # type: ignore[arg-type]


def test_a_report_says_how_far_the_start_had_come() -> None:
    """A retry of the start or a restart: that is what decides."""
    for start, known in (("inside", "during"), ("somewhere", "")):
        incident = CRASH._replace(diagnosis=SEGFAULT._replace(start=start))
        (entry,) = checked(build_report(RUN, [incident]))["incidents"]
        assert entry["start_stage"] == known
    assert "not all ranks had got through init_process_group" in build_report_text(
        RUN, [CRASH._replace(diagnosis=SEGFAULT._replace(start="inside"))]
    )


# --------------------------------------------------------------------------------------------------- secrets and bounds


def test_secrets_reach_neither_report() -> None:
    """Reports are attached to bug reports."""
    leak = "API_TOKEN=abc123 and https://me:abc123@host/x"
    diagnosis = sleeping(8)._replace(
        headline=leak,
        hint=leak,
        findings=(leak,),
        output=RankOutput(3, (leak,), leak, leak, 0.0, (leak,)),
        tracebacks=(Traceback((3,), (leak,)),),
        cause=Cause("unknown", leak, (3,), leak, leak, leak),
        groups=(WaitGroup("network", leak, (3,), leak),),
        core=CORE._replace(failure=leak, path=leak),
    )
    evidence = evidence_of()
    evidence = evidence._replace(
        kernel_lines=(leak,),
        outputs=(RankOutput(3, (leak,), leak, leak, 0.0, (leak,)),),
        capture=evidence.capture._replace(
            host_lines=(leak,),
            timed_out=(leak,),
            notes=(CaptureNote("py_spy", 0, 1, leak, 0.0, leak),),
            processes=tuple(process._replace(waits_on=leak) for process in evidence.capture.processes),
        ),
    )
    incident = HANG._replace(diagnosis=diagnosis, evidence=evidence, console_lines=(leak,), directory=leak)
    assert "abc123" not in json.dumps(build_report(RUN, [incident]))
    text = build_report_text(RUN, [incident])
    assert "abc123" not in text
    assert "<redacted>" in text


def test_a_secret_across_the_limit_of_a_line_is_redacted_all_the_same() -> None:
    """Half a password is too much."""
    line = redacted_line("x" * 80 + " https://me:password@host/", 100)
    assert "pass" not in line
    assert len(line) <= 100


def test_a_line_made_to_exhaust_the_redaction_costs_itself() -> None:
    """A name in a name in a name, a thousand times: the report is written all the same."""
    assert len(redacted_line("key=" * 5000)) <= 1000
    hostile = sleeping(8)._replace(findings=("key=" * 5000,))
    checked(build_report(RUN._replace(command=("key=" * 5000,)), [HANG._replace(diagnosis=hostile)]))


def test_a_report_that_would_be_too_large_says_what_is_cut() -> None:
    """The ranks decide how much they write."""
    noise = tuple("\U0001f525" * 1000 for _ in range(500))
    evidence = evidence_of(8)
    evidence = evidence._replace(kernel_lines=noise, capture=evidence.capture._replace(host_lines=noise))
    diagnosis = sleeping(8)._replace(findings=noise, tracebacks=tuple(Traceback((rank,), noise) for rank in range(200)))
    report = checked(build_report(RUN, [HANG._replace(evidence=evidence, diagnosis=diagnosis)]))
    assert {"findings", "host_status", "kernel_log", "tracebacks"} <= set(report["incidents"][0]["truncated"])
    assert report["incidents"][0]["cause"]["class"] == "hang_sleep"
    assert report["incidents_omitted"] == 0


def test_a_job_that_fails_ten_thousand_times_keeps_its_first_and_last_incidents() -> None:
    """Restarts may be without number."""
    incidents = [HANG._replace(attempt=number) for number in range(10_000)]
    report = checked(build_report(RUN, incidents))
    attempts = [incident["attempt"] for incident in report["incidents"]]
    assert attempts == [*range(10), *range(9960, 10_000)]
    assert report["incidents_omitted"] == 9950
    text = build_report_text(RUN, incidents)
    assert "incidents: 10000, of which the first and the last are shown, 50 in all" in text


def test_a_thousand_ranks_that_hang_make_a_report_within_its_limits() -> None:
    count = 1000
    incident = HANG._replace(evidence=evidence_of(count), diagnosis=sleeping(count))
    report = checked(build_report(RUN, [incident] * 3))
    assert [entry["cause"]["ranks"] for entry in report["incidents"]] == [[3]] * 3
    assert len(build_report_text(RUN, [incident] * 3).encode()) <= report_text.LIMIT_BYTES


def test_many_incidents_that_all_say_too_much_stay_within_the_limit() -> None:
    """A limit is a limit: each has its share, and at last some are left out."""
    fire = "\U0001f525" * 1000
    wide, noise = tuple(range(10_000)), (fire,) * 3000
    diagnosis = sleeping(8)._replace(
        headline=fire,
        hint=fire,
        output=RankOutput(3, noise, fire, fire, 0.0, noise),
        victims=wide,
        stopped=wide,
        groups=(WaitGroup(fire, fire, wide, fire),) * 500,
        tracebacks=(Traceback(wide, noise),) * 99,
        findings=noise,
        cause=Cause(fire, fire, wide, fire, fire, fire),
    )
    incident = HANG._replace(diagnosis=diagnosis)
    report = checked(build_report(RUN, [incident] * 50))
    assert len(report["incidents"]) + report["incidents_omitted"] == 50
    assert len(report["incidents"]) > 25
    report = checked(build_report(RUN, [incident]))
    assert {"wait_groups", "tracebacks", "findings", "output"} <= set(report["incidents"][0]["truncated"])


# ------------------------------------------------------------------------------------------------------------ the text


def test_the_text_has_everything_that_the_console_had_no_room_for() -> None:
    capture = HANG.evidence.capture
    silent = (*capture.collectives, RankCollectives(3, (), "no answer within 2 s"))
    evidence = HANG.evidence._replace(capture=capture._replace(collectives=silent))
    text = build_report_text(RUN, [HANG._replace(evidence=evidence), CRASH])
    for words in (
        "run 5f2c1a on node1, started 2026-03-14 03:15:02",
        "outcome: failed (exit code 1)",
        "1. hang in attempt 0 on node1 at 03:20:02",
        "saferun: rank 3 sleeps",
        "what followed: job resumed after 312 s",
        "  class: hang_sleep",
        "  verdict: quiescent (certain), ranks 0-7, for 300 s",
        "  > rank 3             sleep: time.sleep       train.py:47 in load_batch",
        "    └─ ranks 0-2,4-7 (7)  step  train.py:52",
        "  rank 3: sleep: time.sleep  train.py:47 in load_batch",
        "  rank 2: pid 4002 python, state S, in futex, asleep in futex_wait, waits on a connection to 10.0.0.2:29500",
        "  rank 0, group 0 (default_pg): enqueued 5, started -1, completed 4",
        "    5 all_reduce [[1024, 1024]], not done",
        "  rank 3: not available: no answer within 2 s",
        "  ranks 0-2,4-7 (7), thread MainThread, by py-spy:",
        "      all_reduce  torch/…/distributed_c10d.py:3205",
        "  no stack of pid 4100 (pt_data_worker) of rank 4 by py-spy: ptrace was denied",
        "  gpu of host, 0.20 s: failed: no NVIDIA driver",
        "  strace of rank 5",
        "  GPU 0: 40 GiB of 80 GiB in use",
        "2. failure in attempt 1 on node1",
        "  rank 2, pid 4002: killed by SIGSEGV at 03:15:33, 31 s after the start (the first)",
        "  rank 3, pid 4003: exit code 1 at 03:15:33, 31 s after the start (because of another rank)",
        "  rank 2, pid 4002, signal 11, address 0x10: deleted after it had been read (172 MiB)",
        "(cgroup, limit 64 GiB, the killed process used 61 GiB, pids 4002)",
    ):
        assert words in text
    assert "abc123" not in text


def test_every_distinct_stack_is_told_once() -> None:
    """A thousand ranks in the same call are one stack."""
    text = build_report_text(RUN, [HANG._replace(evidence=evidence_of(1000), diagnosis=sleeping(1000))])
    (section,) = re.findall(r"--- all threads.*?(?=\n\n)", text, re.DOTALL)
    assert section.count("all_reduce") == 1
    assert section.index("rank 3,") < section.index("ranks 0-2,4-999 (999)")


def test_a_text_that_would_be_too_large_is_cut_and_says_so() -> None:
    """Each incident has its share: the last one is told, however much the first has to say."""
    flood = tuple("\U0001f525" * 900 for _ in range(5000))
    first = HANG._replace(diagnosis=sleeping(8)._replace(findings=flood))
    text = build_report_text(RUN, [first, CRASH])
    assert len(text.encode()) <= report_text.LIMIT_BYTES
    assert "… cut here: this is as long as it may be" in text
    assert "2. failure in attempt 1" in text
    assert text.rstrip().splitlines()[-1] == "  strace of rank 5"


@pytest.mark.parametrize("diagnosis", [MISMATCH, EXCEPTION_EVERYWHERE, OUT_OF_MEMORY])
def test_other_diagnoses_are_told_too(diagnosis: Diagnosis) -> None:
    incident = CRASH._replace(diagnosis=diagnosis)
    (entry,) = checked(build_report(RUN, [incident]))["incidents"]
    assert diagnosis.cause is not None
    assert entry["cause"]["class"] == diagnosis.cause.class_name
    assert f"  class: {diagnosis.cause.class_name}" in build_report_text(RUN, [incident])


# ---------------------------------------------------------------------------------------------------------- the schema


def test_the_schemas_are_such() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator.check_schema(PREFLIGHT_SCHEMA)


def test_the_schema_is_strict() -> None:
    """A field that is misspelt, or forgotten, is an error and not a field that nobody reads."""
    for schema in (*objects_of(SCHEMA), *objects_of(PREFLIGHT_SCHEMA)):
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])
    report = build_report(RUN, [HANG])
    for wrong in ({**report, "more": 1}, {**report, "schema": "saferun.report/0"}, {**report, "incidents": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(wrong)


def test_the_page_describes_every_field() -> None:
    """What is not described is guessed at."""
    page = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`([a-z0-9_]+)`", page))
    fields = {
        name for schema in (SCHEMA, PREFLIGHT_SCHEMA) for part in objects_of(schema) for name in part["properties"]
    }
    assert fields - described == set()


# ------------------------------------------------------------------------------------------------------ whatever comes

FRAMES = st.builds(Frame, ANY_TEXT, ANY_TEXT, ANY_INTEGER, st.booleans())
THREADS = st.builds(ThreadStack, ANY_TEXT, ANY_INTEGER, st.booleans(), st.booleans(), st.booleans(), tuples(FRAMES, 12))
ENDS = st.builds(
    RankEnd,
    ANY_INTEGER,
    ANY_INTEGER,
    ANY_INTEGER,
    st.one_of(
        st.builds(ExitStatus, st.integers(0, 255), st.none()),
        st.builds(ExitStatus, st.none(), st.integers(0, 200), st.booleans()),
    ),
    ANY_NUMBER,
    ANY_NUMBER,
    st.booleans(),
    ANY_TEXT,
)
OUTPUTS = st.builds(RankOutput, ANY_INTEGER, tuples(ANY_TEXT), ANY_TEXT, ANY_TEXT, ANY_NUMBER, tuples(ANY_TEXT))
CORES = st.builds(
    CoreDump,
    ANY_INTEGER,
    ANY_INTEGER,
    st.integers(-1, 200),
    ANY_TEXT,
    ANY_INTEGER,
    st.booleans(),
    ANY_TEXT,
    tuples(THREADS),
    ANY_INTEGER,
    ANY_TEXT,
    ANY_TEXT,
)
CALLS = st.builds(
    CollectiveCall, ANY_INTEGER, ANY_TEXT, ANY_TEXT, st.booleans(), st.booleans(), ANY_INTEGER, tuples(FRAMES)
)
CAPTURES = st.builds(
    Capture,
    tuples(
        st.builds(
            ProcessSnapshot,
            *[ANY_INTEGER] * 3,
            st.booleans(),
            *[ANY_TEXT] * 5,
            *[ANY_INTEGER] * 2,
            st.booleans(),
            ANY_INTEGER,
            ANY_TEXT,
            ANY_NUMBER,
        )
    ),
    tuples(
        st.builds(StackDump, ANY_INTEGER, ANY_INTEGER, st.booleans(), ANY_TEXT, ANY_TEXT, tuples(THREADS), ANY_TEXT)
    ),
    tuples(
        st.builds(
            RankCollectives,
            ANY_INTEGER,
            tuples(
                st.builds(
                    GroupProgress,
                    ANY_TEXT,
                    ANY_TEXT,
                    ANY_RANKS,
                    ANY_INTEGER,
                    ANY_INTEGER,
                    ANY_INTEGER,
                    tuples(CALLS),
                )
            ),
            ANY_TEXT,
        )
    ),
    tuples(ANY_TEXT),
    tuples(st.builds(CaptureNote, ANY_TEXT, ANY_INTEGER, ANY_INTEGER, ANY_TEXT, ANY_NUMBER, ANY_TEXT, ANY_TEXT)),
    tuples(ANY_TEXT),
    ANY_NUMBER,
    tuples(st.builds(StuckLink, ANY_INTEGER, ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_INTEGER, ANY_INTEGER)),
)
OOM_KILLS = st.none() | st.builds(
    OomKill, ANY_TEXT, ANY_INTEGER, ANY_INTEGER, ANY_RANKS, ANY_INTEGER, ANY_TEXT, ANY_TEXT
)
HOSTS = st.builds(
    HostView,
    ANY_INTEGER,
    ANY_TEXT,
    ANY_RANKS,
    tuples(ANY_TEXT),
    ANY_TEXT,
    ANY_TEXT,
    st.booleans(),
    ANY_TEXT,
    ANY_TEXT,
    ANY_RANKS,
    OOM_KILLS,
    tuples(ANY_TEXT),
    ANY_RANKS,
)
EVIDENCE = st.builds(
    Evidence,
    host=ANY_TEXT,
    started_at=ANY_NUMBER,
    ends=tuples(ENDS),
    outputs=tuples(OUTPUTS),
    abandoned=ANY_RANKS,
    stop_signum=st.none(),
    capture=CAPTURES,
    hang=st.none() | st.builds(HangVerdict, ANY_TEXT, ANY_RANKS, ANY_NUMBER, certain=st.booleans(), busy=ANY_RANKS),
    cores=tuples(CORES),
    oom=OOM_KILLS,
    kernel_lines=tuples(ANY_TEXT),
    hosts=tuples(HOSTS),
    abort_reason=st.none() | st.builds(AbortReason, ANY_TEXT, ANY_TEXT, ANY_TEXT, st.none() | ANY_INTEGER, ANY_TEXT),
)
NODES = st.recursive(
    st.builds(StackNode, FRAMES, ANY_RANKS, st.just(())),
    lambda below: st.builds(StackNode, FRAMES, ANY_RANKS, tuples(below)),
    max_leaves=20,
)
DIAGNOSES = st.builds(
    Diagnosis,
    ANY_TEXT,
    st.none() | ENDS,
    st.none() | OUTPUTS,
    tuples(ENDS),
    ANY_RANKS,
    ANY_RANKS,
    ANY_TEXT,
    st.none() | st.builds(Cause, ANY_TEXT, ANY_TEXT, ANY_RANKS, ANY_TEXT, ANY_TEXT, ANY_TEXT),
    ANY_RANKS,
    tuples(st.builds(WaitGroup, ANY_TEXT, ANY_TEXT, ANY_RANKS, ANY_TEXT)),
    tuples(NODES),
    tuples(st.builds(Traceback, ANY_RANKS, tuples(ANY_TEXT))),
    st.none() | CORES,
    tuples(ANY_TEXT),
    ANY_RANKS,
    tuples(HOSTS),
    ANY_TEXT,
)
INCIDENTS = st.builds(
    Incident,
    st.sampled_from(["hang", "failure"]),
    ANY_INTEGER,
    ANY_NUMBER,
    EVIDENCE,
    DIAGNOSES,
    st.sampled_from(["continued", "recovered", "stopped", "restarted", "ended"]),
    st.none() | ANY_NUMBER,
    tuples(ANY_TEXT),
    ANY_TEXT,
    ANY_TEXT,
)
RUNS = st.builds(
    Run,
    ANY_TEXT,
    ANY_TEXT,
    tuples(ANY_TEXT),
    ANY_NUMBER,
    st.none() | ANY_NUMBER,
    st.none() | st.integers(0, 255),
    st.sampled_from(["running", "succeeded", "failed", "stopped"]),
    ANY_TEXT,
    ANY_TEXT,
)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(RUNS, st.lists(INCIDENTS, max_size=2))
def test_whatever_comes_the_report_keeps_its_schema(run: Run, incidents: list[Incident]) -> None:
    """Names, numbers and lines come from processes that may be broken, and from tools that may be."""
    checked(build_report(run, incidents))
    text = build_report_text(run, incidents)
    assert len(text.encode()) <= report_text.LIMIT_BYTES
    assert text.replace("\n", "").isprintable()


def test_every_value_of_the_evidence_is_known_to_the_test_above() -> None:
    """A new kind of value is made by the strategies too, or this page does not know it."""
    import saferun.evidence as module

    values = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, tuple) and name not in {"Value", "RankEnd", "DecisionRow"}
    }
    assert values <= set(globals())


def test_deep_stacks_are_no_danger() -> None:
    """A program that recursed without end has as many calls as it likes."""
    node = StackNode(STEP, (0,), ())
    for depth in range(3000):
        node = StackNode(STEP, tuple(range(depth % 3 + 1)), (node,))
    incident = HANG._replace(diagnosis=sleeping(8)._replace(tree=(node,)))
    report = checked(build_report(RUN, [incident]))
    assert "tree" in report["incidents"][0]["truncated"]
    assert len(build_report_text(RUN, [incident]).encode()) <= report_text.LIMIT_BYTES


def test_numbers_that_json_does_not_know_are_null() -> None:
    incident = HANG._replace(time=math.nan, recovered_after_s=math.inf)
    (entry,) = checked(build_report(RUN, [incident]))["incidents"]
    assert entry["time"] is None
    assert entry["recovered_after_s"] is None


def test_a_stack_without_end_keeps_both_its_ends() -> None:
    """The calls of the user's program are outside, what it waits for is inside."""
    frames = (*IN_ALL_REDUCE[:3], *[Frame("again", "train.py", 1)] * 1000, IN_ALL_REDUCE[-1])
    node = StackNode(frames[-1], (0,), ())
    for frame in reversed(frames[:-1]):
        node = StackNode(frame, (0,), (node,))
    (entry,) = checked(build_report(RUN, [HANG._replace(diagnosis=sleeping(8)._replace(tree=(node,)))]))["incidents"]
    (branch,) = entry["tree"]
    assert branch["frames_omitted"] == len(frames) - len(branch["frames"])
    assert branch["frames"][0]["function"] == "<module>"
    assert branch["frames"][-1]["function"] == "all_reduce"
