"""Reports of whatever comes: report.txt and report.json are bounded, and keep their schema."""

from __future__ import annotations

import math
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.evidence.call_evidence import CALL_KINDS, CalledFunction, CallEvent, RankCalls, ThreadCalls
from saferun.evidence.diagnosis_values import Cause, Diagnosis, LostPeer, StackNode, Traceback, WaitGroup
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess, RankGpu
from saferun.evidence.job_evidence import (
    AbortReason,
    Capture,
    CaptureNote,
    CollectiveCall,
    CoreDump,
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
    StuckLink,
    ThreadStack,
)
from saferun.evidence.wait_evidence import JobPorts, ThreadWait
from saferun.model import ExitStatus, RankEnd
from saferun.report import report_text
from saferun.report.report_json import Incident, Run, build_report
from saferun.report.report_text import build_report_text
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
    EXCEPTION_EVERYWHERE,
    IN_ALL_REDUCE,
    MISMATCH,
    OUT_OF_MEMORY,
    STEP,
    evidence_of,
    sleeping,
)
from tests.unit.report.report_steps import (
    CRASH,
    HANG,
)

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
    assert "… truncated at the size limit; the capture files have the rest" in text
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
            tuples(st.builds(ThreadWait, ANY_INTEGER)),
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
    tuples(st.builds(RankGpu, ANY_INTEGER, ANY_TEXT)),
    tuples(ANY_TEXT),
    tuples(
        st.builds(
            NcclOutlier,
            ANY_TEXT,
            ANY_INTEGER,
            ANY_TEXT,
            tuples(st.builds(NcclProcess, ANY_INTEGER, ANY_TEXT, ANY_INTEGER)),
            ANY_INTEGER,
            ANY_TEXT,
            st.booleans(),
        )
    ),
    tuples(st.builds(JobPorts, ANY_RANKS, ANY_RANKS, st.booleans())),
    tuples(
        st.builds(
            RankCalls,
            ANY_INTEGER,
            ANY_INTEGER,
            tuples(st.builds(CalledFunction, ANY_TEXT, ANY_TEXT, ANY_INTEGER)),
            tuples(
                st.builds(
                    ThreadCalls,
                    ANY_INTEGER,
                    st.booleans(),
                    ANY_INTEGER,
                    tuples(
                        st.builds(
                            CallEvent,
                            ANY_TEXT | st.sampled_from(CALL_KINDS),
                            st.integers(-1, 3) | ANY_INTEGER,
                            ANY_NUMBER,
                            ANY_INTEGER,
                        )
                    ),
                )
            ),
            st.booleans(),
            ANY_TEXT,
            ANY_TEXT,
        )
    ),
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
    tuples(st.builds(LostPeer, ANY_RANKS, ANY_TEXT, ANY_TEXT, ANY_TEXT)),
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
    st.sampled_from(["running", "succeeded", "failed", "stopped", "left"]),
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
    from saferun.evidence import diagnosis_values, job_evidence

    values = {
        name
        for module in (job_evidence, diagnosis_values)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, tuple) and name not in {"Value", "RankEnd"}
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


def test_the_command_of_report_txt_can_be_pasted_into_a_shell() -> None:
    command = ("saferun", "--nproc-per-node", "2", "tr \u00e4in 1.py", "a", "$b")
    lines = build_report_text(RUN._replace(command=command), []).splitlines()
    assert "command: saferun --nproc-per-node 2 'tr \u00e4in 1.py' a '$b'" in lines


def test_in_report_txt_a_traceback_that_is_above_on_the_console_stands_below() -> None:
    line = "the traceback of rank 1, and of 6 others"
    crash = CRASH._replace(diagnosis=EXCEPTION_EVERYWHERE, console_lines=("saferun: x", f"  above: {line}"))
    text = build_report_text(RUN, [crash])
    assert f"  below: {line}\n" in text
    assert f"  above: {line}" not in text
    assert text.index("  below: ") < text.index("--- tracebacks")
