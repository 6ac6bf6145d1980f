"""What the checks found and what was decided, in the report's files: whole, bounded, without secrets."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.linux.nic import Nic
from saferun.preflight.findings_text import result_lines, table_lines
from saferun.preflight.json_report import preflight_json
from saferun.preflight.results import Cell, CheckResult, HostInfo, MatrixRow, Preflight
from saferun.report.report_json import build_report
from saferun.report.report_text import build_report_text
from saferun.supervisor.policy.decision_row import DecisionRow
from tests.unit.found_samples import FINISH, RETRY, dead_nic, found, hosts_of, infos_of
from tests.unit.report.report_checking import (
    ANY_INTEGER,
    ANY_NUMBER,
    ANY_TEXT,
    PREFLIGHT_SCHEMA,
    RUN,
    SCHEMA,
    checked,
    checked_preflight,
    tuples,
)


def test_a_report_has_the_decisions_in_their_order() -> None:
    """A launch that succeeded in the end says what it took."""
    report = checked(build_report(RUN._replace(outcome="succeeded", exit_code=0), [], decisions=[RETRY, FINISH]))
    assert report["decisions"][0] == {
        "attempt": 0,
        "time": 1.7e9 + 30,
        "next_step": "retry",
        "message": "starting again in 1.2 s (retry 1 of 3): port 29500 is in use",
        "wait_s": 1.21,
        "class": "port_in_use",
        "host": "node1",
        "spare": "",
    }
    assert [row["next_step"] for row in report["decisions"]] == ["retry", "finish"]
    text = build_report_text(RUN, [], decisions=[RETRY._replace(clock="03:15:33"), FINISH])
    assert "--- decisions\n  attempt 0 at 03:15:33 (port_in_use, node1): starting again in 1.2 s (retry 1 of 3)" in text


def test_of_many_decisions_the_first_and_the_last_are_told() -> None:
    """Restarts may be without number."""
    rows = [RETRY._replace(attempt=number, message="x" * 5000) for number in range(10_000)]
    report = checked(build_report(RUN, [], decisions=rows))
    attempts = [row["attempt"] for row in report["decisions"]]
    assert attempts == [*range(10), *range(9960, 10_000)]
    assert report["decisions_omitted"] == 9950
    assert "of 10000 decisions, the first and the last are shown, 50 in all" in build_report_text(
        RUN, [], decisions=rows
    )


def test_a_launch_that_the_checks_ended_has_a_report() -> None:
    """Nothing was started, so there is no incident; what was found is all there is."""
    report = checked(build_report(RUN, [], preflight=found()))
    checks = report["preflight"]
    assert (checks["verdict"], checks["duration_s"], checks["truncated"]) == ("fail", 0.431, [])
    assert [result["verdict"] for result in checks["results"]][:4] == ["fail", "warn", "warn", "skipped"]
    assert checks["results"][0]["host"] == "node3"
    assert checks["results"][0]["class"] == "nic_unreachable"
    assert checks["results"][0]["facts"] == [{"name": "from", "value": "3"}]
    assert checks["matrix"][0] == {
        "host": "node3",
        "interfaces": [
            {"nic": "eth0", "state": "ok", "ok": 3, "total": 3, "latency_s": 8e-05, "bytes_per_s": 1.1e9},
            {"nic": "hsn0", "state": "timeout", "ok": 0, "total": 3, "latency_s": None, "bytes_per_s": None},
        ],
    }
    text = build_report_text(RUN, [], preflight=found(), infos=infos_of())
    assert "--- preflight checks\n  fail     links          node3         hsn0 does not answer" in text
    assert build_report(RUN, [])["preflight"] is None


def test_preflight_json_has_every_result_and_what_the_hosts_are_like() -> None:
    """Good results too: what was in order is half of a diagnosis."""
    content = checked_preflight(preflight_json(found(), infos_of()))
    assert content["schema"] == PREFLIGHT_SCHEMA["properties"]["schema"]["const"]
    assert [result["verdict"] for result in content["results"]].count("ok") == 9
    assert content["truncated"] == []
    host = content["hosts"][2]
    assert (host["index"], host["name"], host["gloo"]) == (2, "node3", ["eth0"])
    assert host["names"] == [{"name": "node1", "addresses": ["10.0.0.1"]}]
    assert host["interfaces"][1]["networks"] == ["10.0.0.1/24"]
    assert {"name": "torch", "value": "2.13.0"} in host["versions"]
    assert {"name": "API_TOKEN", "value": "<redacted>"} in host["environ"]
    assert "abc123" not in json.dumps(content)


def test_checks_that_were_skipped_are_nothing_bad() -> None:
    """A healthy launch on any machine is "ok" for the programs that look."""
    skipped = CheckResult("gpus", "skipped", "the GPUs' driver could not be asked")
    assert preflight_json(Preflight((skipped,)), {})["verdict"] == "ok"


@pytest.mark.slow
def test_checks_of_ten_thousand_hosts_stay_within_the_limits() -> None:
    """What is wrong is kept, what is well is cut."""
    preflight = found(10_000)
    preflight = preflight._replace(results=(*preflight.results, *[dead_nic(host) for host in hosts_of(100)]))
    content = checked_preflight(preflight_json(preflight, infos_of(10_000)))
    assert {"hosts", "matrix", "results"} >= set(content["truncated"])
    assert content["truncated"]
    for checks in (content, checked(build_report(RUN, [], preflight=preflight))["preflight"]):
        assert [result["verdict"] for result in checks["results"]].count("fail") == 101
        assert checks["matrix"][0]["host"] == "node3"
    text = build_report_text(RUN, [], preflight=preflight, infos=infos_of(10_000))
    assert len(text) < 10_000
    assert "node3" in text


def test_both_schemas_say_the_same_of_the_checks() -> None:
    """They are two files so that each can be used alone."""
    common = set(SCHEMA["$defs"]) & set(PREFLIGHT_SCHEMA["$defs"])
    assert common == {"result", "row", "cell", "pair"}
    assert all(SCHEMA["$defs"][name] == PREFLIGHT_SCHEMA["$defs"][name] for name in common)
    for name, field in SCHEMA["$defs"]["preflight"]["properties"].items():
        assert PREFLIGHT_SCHEMA["properties"][name] == field


PAIRS = tuples(st.tuples(ANY_TEXT, ANY_TEXT))
VERDICTS = st.sampled_from(["ok", "skipped", "warn", "fail", "", "awful"])
RESULTS = st.builds(
    CheckResult, ANY_TEXT, VERDICTS, ANY_TEXT, ANY_TEXT, PAIRS, ANY_NUMBER, ANY_TEXT, st.booleans(), ANY_TEXT
)
CELLS = st.builds(Cell, ANY_TEXT, ANY_TEXT, ANY_INTEGER, ANY_INTEGER, ANY_NUMBER, ANY_NUMBER)
PREFLIGHTS = st.builds(
    Preflight,
    tuples(RESULTS, 8),
    tuples(st.builds(MatrixRow, ANY_TEXT, tuples(CELLS)), 16),
    ANY_NUMBER,
    st.just(()),
    tuples(ANY_TEXT),
)
NICS = st.builds(
    Nic,
    ANY_TEXT,
    tuples(ANY_TEXT),
    tuples(ANY_TEXT),
    st.booleans(),
    ANY_INTEGER,
    ANY_TEXT,
    ANY_INTEGER,
    tuples(ANY_TEXT),
    tuples(ANY_TEXT),
)
CARDS = st.dictionaries(
    st.integers(0, 100),
    st.builds(
        HostInfo,
        ANY_TEXT,
        ANY_NUMBER,
        tuples(NICS),
        tuples(ANY_TEXT),
        tuples(ANY_TEXT),
        tuples(ANY_TEXT),
        PAIRS,
        ANY_TEXT,
        PAIRS,
        tuples(tuples(ANY_TEXT)),
        tuples(RESULTS),
    ),
    max_size=3,
)
DECISIONS = st.builds(
    DecisionRow, ANY_INTEGER, ANY_NUMBER, ANY_TEXT, ANY_TEXT, ANY_NUMBER, ANY_TEXT, ANY_TEXT, ANY_TEXT
)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(DECISIONS, max_size=3), PREFLIGHTS, CARDS, st.integers(0, 200))
def test_whatever_the_hosts_tell_the_files_keep_their_schemas(
    decisions: list[DecisionRow], preflight: Preflight, cards: dict[int, HostInfo], width: int
) -> None:
    """What is wrong with a host may also be wrong with what it says."""
    checked(build_report(RUN, [], decisions=decisions, preflight=preflight))
    checked_preflight(preflight_json(preflight, cards))
    text = build_report_text(RUN, [], decisions=decisions, preflight=preflight, infos=cards)
    lines = [*result_lines(preflight.results), *table_lines(preflight, cards, width=width)]
    assert all(line.isprintable() for line in (*lines, *text.splitlines()))
