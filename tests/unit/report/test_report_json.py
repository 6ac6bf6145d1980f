"""report.json keeps its schema whatever has happened; report.txt and it are bounded, and hold no secrets."""

from __future__ import annotations

import json

import pytest

from saferun.evidence.diagnosis_values import Cause, Traceback, WaitGroup
from saferun.evidence.job_evidence import CaptureNote, RankOutput
from saferun.report import report_text
from saferun.report.report_json import Run, build_report, outcome_of
from saferun.report.report_text import build_report_text
from saferun.text.bounded_json import redacted_line
from tests.unit.report.report_checking import (
    RUN,
    SCHEMA,
    checked,
)
from tests.unit.report.report_samples import (
    CORE,
    SEGFAULT,
    evidence_of,
    sleeping,
)
from tests.unit.report.report_steps import (
    CRASH,
    HANG,
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
        "overdue": "",
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
