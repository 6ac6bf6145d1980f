"""What the user reads of jobs on several hosts: on the console of the host that judges, on the others, in reports."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.evidence import LostHost
from saferun.diagnosis import diagnose
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import AbortReason, Capture, Evidence, HangVerdict, OomKill, StuckLink
from saferun.report import report_json
from saferun.report.console_text import failure_text, hang_text, peer_text
from saferun.report.report_json import Incident, Run, build_report
from saferun.report.report_text import build_report_text
from tests.unit.host_samples import IN_LOAD, captured, ended, failed, host_evidence, job
from tests.unit.report.report_samples import diagnosis_of

ROOT = Path(__file__).resolve().parents[3]
FILES = "/scratch/saferun-runs/7"
RUN = Run("7", "node1", ("saferun", "train.py"), 1.7e9, files=FILES)
SCHEMA = json.loads((ROOT / "saferun/report/schema/report.schema.json").read_text(encoding="utf-8"))


def text_of(evidence: Evidence) -> str:
    return "\n".join(failure_text(diagnose(evidence), files=FILES, attempt=0, max_restarts=0, restarting=False))


# ------------------------------------------------------------------------------------------------------------- console


def test_a_failure_is_told_with_the_hosts_of_all_ranks() -> None:
    """A rank's number alone sends the reader to look for its host first."""
    text = text_of(failed())
    assert text.startswith(
        "saferun: rank 5 (node3, local rank 1, pid 4001) failed first at 03:15:33, 31.4 s after the "
    )
    assert "in node3:saferun-runs/7/node3/attempt_0/rank_5/stderr.log:" in text
    assert "  stopped because of it: ranks 0-3, 6-7 on node1, node2, node4" in text
    assert "  could not be killed (uninterruptible, state D): rank 4 on node3; left behind" in text


def test_other_failures_name_their_hosts() -> None:
    """Whoever failed afterwards may tell more on his own host."""
    evidence = failed()
    late = ended(2, 2, after_s=40.0, signum=signal.SIGSEGV)
    ends = tuple(late._replace(at=600.0) if end.rank == 2 else end for end in evidence.ends)
    assert "failed after it: rank 2 on node2 (killed by SIGSEGV)" in text_of(evidence._replace(ends=ends))


def test_a_hang_is_told_with_the_host_of_the_stopped_rank() -> None:
    """And the picture is that of all ranks."""
    verdict = HangVerdict("stopped", (5,), 12.0, certain=False)
    parts = {host: host_evidence(host, capture=captured(host, states={5: "T"})) for host in range(4)}
    found = diagnose_hang(job(parts, hang=verdict))
    lines = hang_text(found, verdict, host="node1", files=FILES, on_hang="report", count=1, next_s=600.0)
    assert "rank 5 (node3)" in lines[0]
    assert lines[1] == "  suspected: rank 5 on node3 in state T (stopped by a signal) for 12 s"
    assert "  calls of all ranks, outermost first:" in lines


def test_a_picture_of_many_hosts_stays_small() -> None:
    """A thousand ranks that do the same are one line."""
    hosts, nproc = 128, 8
    parts = {
        host: host_evidence(host, nproc, capture=captured(host, nproc, frames={77: IN_LOAD}, numbers={77: 6}))
        for host in range(hosts)
    }
    evidence = job(parts, hosts=hosts, nproc=nproc, limit_bytes=4096)
    verdict = HangVerdict("quiescent", tuple(range(hosts * nproc)), 300.0, certain=True)
    found = diagnose_hang(evidence._replace(hang=verdict))
    lines = hang_text(found, verdict, host="node1", files=FILES, on_hang="report", count=1, next_s=600.0)
    assert "rank 77 (node10)" in lines[0]
    assert any("ranks 0-76,78-1023 (1023)" in line for line in lines)
    assert len(lines) < 40
    assert max(map(len, lines)) <= 300
    stopped = tuple(ended(rank, nproc, signum=15, stopped=True) for rank in range(1, hosts * nproc))
    ends = (ended(0, nproc, code=1), *stopped)
    text = text_of(evidence._replace(ends=ends))
    assert "stopped because of it: ranks 1-1023 on all 128 hosts" in text
    text = text_of(evidence._replace(ends=ends[:800]))
    assert "stopped because of it: ranks 1-799 on 100 hosts" in text


# -------------------------------------------------------------------------------------------------- all other consoles


def test_all_other_hosts_are_told_what_where_and_why() -> None:
    """Most users look at the console of some host, not of the one that judged."""
    assert peer_text(diagnose(failed()), leader="node1", files=FILES) == [
        (
            "saferun: rank 5 (node3, local rank 1, pid 4001) failed first at 03:15:33, 31.4 s after the start: "
            "ValueError: bad batch, at train.py:47 in step; exit code 1"
        ),
        "  report: node1:/scratch/saferun-runs/7/report.txt",
    ]


def test_all_other_hosts_are_told_of_a_restart() -> None:
    """It is the last line, as on the host that decides."""
    found = diagnose(failed())
    lines = peer_text(found, leader="node1", files=None, restarting=True, attempt=0, max_restarts=3)
    assert lines[-1] == "saferun: starting all ranks again, restart 1 of 3"
    assert peer_text(found, leader="node1", files=None, restarting=True)[-1] == "saferun: starting all ranks again"


def test_where_there_is_no_report_the_host_that_knows_more_is_named() -> None:
    """A line alone would leave the reader without a way on."""
    assert peer_text(diagnosis_of("it failed"), leader="node1", files=None) == [
        "saferun: it failed",
        "  the console of node1 has more",
    ]


@given(st.text(max_size=3000), st.text(max_size=3000), st.text(max_size=50), st.none() | st.text(max_size=3000))
def test_lines_for_other_hosts_are_bounded(headline: str, advice: str, leader: str, files: str | None) -> None:
    """They travel through the job's log to thousands of hosts."""
    found = diagnosis_of(headline, cause=Cause("unknown", "", (), "", advice))
    lines = peer_text(found, leader=leader, files=files, restarting=True)
    assert 2 <= len(lines) <= 4
    for line in lines:
        assert len(line.encode()) <= 1024
        assert line.isprintable()


def test_wide_characters_are_counted_as_what_they_take() -> None:
    """A thousand of them are three kilobytes."""
    (line, *_) = peer_text(diagnosis_of("漢" * 2000), leader="node1", files=None)
    assert 1000 < len(line.encode()) <= 1024
    assert line.endswith("…")


# -------------------------------------------------------------------------------------------------------------- report


def incident_of(evidence: Evidence) -> Incident:
    return Incident("failure", 0, 1.7e9, evidence, diagnose(evidence), "ended")


def test_the_report_lists_the_hosts() -> None:
    """Who was lost, whose evidence is missing, and what is one host's only."""
    lost = [LostHost(3, "node4", "gone", "refuses connections", (6, 7))]
    links = (StuckLink(0, "10.0.0.1:4000", "10.0.0.4:5000", "ESTABLISHED", 4096, 8),)
    parts = {
        0: host_evidence(0, capture=Capture(links=links)),
        1: host_evidence(1, abandoned=(1,), oom=OomKill("host", 0, 0, (), 1, "kernel log")),
    }
    evidence = job(parts, lost=lost, trouble=AbortReason("lost", "node1", "node4 is lost"))
    report = build_report(RUN, [incident_of(evidence)])
    jsonschema.Draft202012Validator(SCHEMA).validate(report)
    (incident,) = report["incidents"]
    assert [(host["name"], host["has_evidence"], host["lost_reason"]) for host in incident["hosts"]] == [
        ("node3", False, ""),
        ("node4", False, "gone"),
        ("node1", True, ""),
        ("node2", True, ""),
    ]
    assert incident["hosts"][1]["lost_message"] == "refuses connections"
    assert incident["hosts"][3]["oom"]["host"] == "node2"
    assert incident["abandoned_ranks"] == [3]
    assert incident["abort_reason"]["reason"] == "lost"
    assert incident["stuck_connections"][0]["remote"] == "10.0.0.4:5000"
    text = build_report_text(RUN, [incident_of(evidence)])
    assert "1. failure in attempt 0 on 4 hosts" in text
    assert "node4 (10.0.0.4, 192.168.0.4): ranks 6-7 (2), lost (gone): refuses connections, no evidence from it" in text
    assert "rank 0: 10.0.0.1:4000 -> 10.0.0.4:5000, ESTABLISHED, 4096 bytes unacknowledged, 8 retransmits" in text
    assert "1 killed by the kernel's OOM killer on node2" in text


def test_the_report_of_one_host_has_no_hosts() -> None:
    """What it says is said of ``host``."""
    evidence = host_evidence(0, ends=[ended(0, 2, code=1)], capture=captured(0))
    (incident,) = build_report(RUN, [incident_of(evidence)])["incidents"]
    assert incident["hosts"] == []
    assert incident["abort_reason"] is None
    assert incident["host"] == "node1"


def test_the_report_of_ten_thousand_hosts_is_bounded_and_has_the_silent_ones() -> None:
    """Where there is not room for all, those that are well are left out first."""
    from saferun.cluster.evidence import HostPart, merge_parts
    from tests.unit.host_samples import peers_of

    lost = [LostHost(9998, "node9999", "unreachable", "no address answers", ())]
    parts = [HostPart(host, 0, f"node{host + 1}", 0.0, host_evidence(host, 1)) for host in range(9998)]
    evidence = merge_parts(parts, lost, world_size=10000, peers=peers_of(10000, 1))
    report = build_report(RUN, [incident_of(evidence)])
    assert len(json.dumps(report, indent=1)) <= report_json.LIMIT_BYTES
    (incident,) = report["incidents"]
    assert incident["hosts"][0]["name"] == "node9999"
    assert "hosts" in incident["truncated"]


@pytest.mark.parametrize("line", ["report: node1:/scratch/saferun-runs/7/report.txt", "rank 5 (node3, local rank 1"])
def test_the_page_shows_what_is_told_of_several_hosts(line: str) -> None:
    """An example that is no longer true is worse than none."""
    page = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    assert line in page
    assert "\n".join(peer_text(diagnose(failed()), leader="node1", files=FILES)) in page


def test_the_other_hosts_hear_what_was_decided() -> None:
    """With the reason, in the words of the host that decides."""
    decided = "not started again: the same failure twice in a row (syntax_error, rank 3, train.py:12)"
    lines = peer_text(diagnosis_of(), leader="node1", files=FILES, restarting=True, decided=decided)
    assert lines[-1] == f"saferun: {decided}"
    assert not any("starting all ranks again" in line for line in lines)
