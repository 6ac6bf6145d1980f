"""Sections of the page: the verdict, output, and differences between hosts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.wire import NOT_READ
from saferun.report.page.building import build_page
from saferun.report.page.contents import (
    CellPart,
    CoreSection,
    HostInfoPart,
    IncidentPart,
    MatrixRowPart,
    PairPart,
    PreflightSection,
    ReportPart,
    ResultPart,
)
from saferun.report.page.host_rows import build_matrix, build_versions
from saferun.report.page.outputs import build_outputs, pieces_of, tail_lines
from saferun.report.page.run_contents import RankTail, RunFiles
from saferun.report.report_values import Launch


def test_a_launch_that_the_checks_refused_says_so_first() -> None:
    """There was no rank, and so no incident."""
    failed = ResultPart("links", "fail", "node3", "hsn0 does not answer", "check the cable")
    other = ResultPart("ports", "fail", "node1", "port 29500 is in use", "free it")
    run = Launch("5f2c1a", outcome="failed", exit_code=2)
    report = ReportPart(run=run, preflight=PreflightSection("fail", results=(failed, other)))
    page = build_page(RunFiles("run", report), str)
    assert (page.verdict.tone, page.verdict.kind) == ("bad", "Preflight checks failed")
    assert page.verdict.headline == "node3: hsn0 does not answer"
    assert page.verdict.hints == ("check the cable", "free it")
    assert page.verdict.lines == ("node1: port 29500 is in use",)
    assert page.checks is not None
    assert page.checks.odd == {0, 1}


@pytest.mark.parametrize(
    ("outcome", "kind", "tone"),
    [
        ("succeeded", "Succeeded", "good"),
        ("stopped", "Stopped", "warn"),
        ("failed", "Failed", "bad"),
        ("left", "Left", "plain"),
        ("running", "Running", "plain"),
    ],
)
def test_without_an_incident_the_outcome_is_the_verdict(outcome: str, kind: str, tone: str) -> None:
    page = build_page(RunFiles("run", ReportPart(run=Launch("5f2c1a", outcome=outcome, exit_code=0))), str)
    assert (page.verdict.kind, page.verdict.tone) == (kind, tone)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tool": "", "failure": NOT_READ}, f"{NOT_READ}, kept as /data/core.71 (172 MiB)"),
        (
            {"failure": "it stays where it is: Read-only file system"},
            "it stays where it is: Read-only file system, kept as /data/core.71 (172 MiB)",
        ),
        ({}, "read by gdb, kept as /data/core.71 (172 MiB)"),
        ({"kept": False}, "read by gdb, deleted after it had been read (172 MiB)"),
        ({"kept": False, "failure": "gdb found no stacks"}, "gdb found no stacks"),
        ({"kept": False, "path": "", "size_bytes": 0, "failure": "the limit is 0"}, "the limit is 0"),
    ],
)
def test_a_core_that_is_there_has_its_path_and_size(changed: dict[str, Any], expected: str) -> None:
    """Above all one that was not read: it stays where it is, and the report is what names it."""
    core = CoreSection(2, 71, "SIGSEGV", "/data/core.71", 172 << 20, kept=True, tool="gdb")
    incident = IncidentPart("failure", cores=(core._replace(**changed),))
    page = build_page(RunFiles("run", ReportPart(run=Launch("5f2c1a"), incidents=(incident,))), str)
    assert page.main is not None
    assert page.main.cores == ((f"rank 2, pid 71, SIGSEGV: {expected}", ()),)


def test_a_hang_and_the_failure_that_it_became_are_one_incident() -> None:
    """They have the same evidence; the story has both."""
    hang = IncidentPart("hang", time=1.0, capture_dir="a/hang_1", headline="the job hangs", outcome="stopped")
    failure = hang._replace(kind="failure", time=2.0, outcome="ended")
    earlier = hang._replace(capture_dir="a/hang_0", time=0.5, outcome="recovered")
    page = build_page(RunFiles("run", ReportPart(incidents=(earlier, hang, failure))), str)
    assert page.main is not None
    assert page.main.outcome == "The launch ended."
    assert [one.outcome for one in page.earlier] == ["The job recovered."]
    assert page.story is not None
    assert len(page.story.rows) == 3


# --------------------------------------------------------------------------------------------------------------- output


def tail(content: bytes, rank: int = 0, omitted_bytes: int = 0) -> RankTail:
    return RankTail("node1", 0, rank, "stderr", content, omitted_bytes)


def test_output_is_readable_lines() -> None:
    content = b"\x1b[1;31mred\x1b[0m\r\n10%\r50%\r100%\ntab\there\x00\n\x1b]0;title\x07last \xff\n"
    assert tail_lines(tail(content), 1000, 40) == ["red", "100%", "tab     here?", "last \ufffd"]


def test_of_a_file_that_was_cut_the_first_line_is_left_out() -> None:
    """It is not whole, and may be half of a secret."""
    assert tail_lines(tail(b"LUE_OF_A_SECRET\nfine\n", omitted_bytes=100), 1000, 40) == ["fine"]


def test_output_has_no_secrets_not_even_over_several_lines() -> None:
    key = b"-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabcdefghij\n-----END RSA PRIVATE KEY-----\n"
    text = "\n".join(
        tail_lines(tail(b"start\n" + key + b"HF_TOKEN=hf_abcdefghijklmnop0123456789abcd\nend\n"), 9000, 40)
    )
    assert "MIIEpAIBAAKCAQEA" not in text
    assert "hf_abc" not in text
    assert text.startswith("start")
    assert text.endswith("end")


@pytest.mark.parametrize(("omitted_bytes", "words"), [(0, ""), (1, "1 byte comes before"), (2, "2 bytes come before")])
def test_how_much_comes_before_is_counted(omitted_bytes: int, words: str) -> None:
    found = build_outputs([tail(b"x\nfine\n", omitted_bytes=omitted_bytes)], frozenset())
    assert [block.omitted for block in found.blocks] == [words]


def test_ranks_that_wrote_the_same_are_one_block_and_the_cause_comes_first() -> None:
    tails = [tail(f"[rank{rank}]: loss 1\n".encode(), rank) for rank in range(6)]
    tails[4] = tail(b"loss nan\n", 4)
    found = build_outputs(tails, frozenset({4}))
    assert [(block.label, block.is_culprit) for block in found.blocks] == [("rank 4", True), ("ranks 0-3,5 (5)", False)]
    assert found.omitted == ""


def test_tracebacks_are_folded_to_their_exception() -> None:
    lines = [
        "before",
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "    f()",
        "KeyError: 'a'",
        "after",
    ]
    found = list(pieces_of(lines))
    assert [piece.summary for piece in found] == ["", "KeyError: 'a'  (4 lines)", ""]
    assert [line for piece in found for line in piece.lines] == lines


@given(
    st.lists(
        st.sampled_from(["Traceback (most recent call last):", "  in", "", "E: x", "[rank1]: Fatal Python error: y"])
    )
)
def test_folding_loses_no_line(lines: list[str]) -> None:
    assert [line for piece in pieces_of(lines) for line in piece.lines] == lines


# ---------------------------------------------------------------------------------------------------------------- hosts


def test_what_differs_between_hosts_stands_out() -> None:
    hosts = [HostInfoPart(f"node{n}", (PairPart("torch", "2.13.0"), PairPart("python", "3.11"))) for n in range(5)]
    hosts[3] = HostInfoPart("node3", (PairPart("torch", "2.12.0"), PairPart("python", "3.11")))
    table = build_versions(PreflightSection(hosts=tuple(hosts)), None)
    assert table is not None
    assert table.rows[0] == ("torch", "2.12.0", "node3")
    assert table.odd == {0}
    assert ("python", "3.11", "all hosts") in table.rows


def test_of_many_hosts_the_matrix_shows_those_with_problems() -> None:
    rows = [MatrixRowPart(f"node{n}", (CellPart("eth0", "timeout" if n == 77 else "ok", 0, 3),)) for n in range(200)]
    matrix = build_matrix(rows)
    assert matrix is not None
    assert [host for host, _ in matrix.rows] == ["node77"]
    assert matrix.rows[0][1][0].tone == "bad"
    assert matrix.folded.startswith("199 hosts with all interfaces reachable")
