"""The lines about a slow rank, as the page on hangs shows them, and the table of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saferun.ctl.status import table_lines
from saferun.report.report_json import SlowRow, build_report
from saferun.report.report_text import build_report_text
from saferun.report.slow_text import slow_lines
from saferun.text.decoding import MALFORMED
from saferun.watchdog.stragglers import Straggler, WaitCount
from tests.unit.report.report_checking import RUN, VALIDATOR

PAGE = (Path(__file__).parents[3] / "docs/hangs.md").read_text(encoding="utf-8")
SHARES = [0.22, 0.23, 0.21, 0.01, 0.23, 0.22]


def counts_of(shares: list[float]) -> dict[int, WaitCount]:
    return {rank: WaitCount(rank, 100, round(share * 100), 100, 4, 100) for rank, share in enumerate(shares)}


HOSTS = {rank: "node1" if rank < 2 else "node2" for rank in range(6)}
LINES = slow_lines(Straggler((3,), 0.01, 0.23, 60.0), counts_of(SHARES), HOSTS, ["eth0: 17 rx_errors since it came up"])


def test_the_page_shows_what_is_printed() -> None:
    assert "\n".join(["```text", *LINES, "```"]) in PAGE


def test_a_slow_host_is_named_with_its_ranks() -> None:
    lines = slow_lines(Straggler((2, 3, 4, 5), 0.02, 0.3, 180.0), counts_of([0.3, 0.3, 0.0, 0.0, 0.0, 0.02]), HOSTS, [])
    assert lines[0] == (
        "saferun: node2 (ranks 2-5) is slow: the other ranks spent 30 % of the last 180 s waiting, they only 2 %"
    )
    assert lines[-1].startswith("hint: saferunctl stacks shows where they are; ")


def test_several_slow_ranks_are_named_together() -> None:
    lines = slow_lines(Straggler((2, 3), 0.02, 0.3, 60.0), counts_of([0.3, 0.3, 0.0, 0.0, 0.2, 0.3]), HOSTS, [])
    assert lines[0].startswith("saferun: ranks 2-3 (node2) are slow: ")
    assert lines[1] == "  ranks 4-5 on the same host: 20-30 %"


def test_the_table_is_as_on_the_page() -> None:
    rows = [{"rank": rank, "host": HOSTS[rank], "waited": share} for rank, share in enumerate(SHARES)]
    lines = table_lines({"time": 1000.0, "attempt": 0, "window_s": 60.0, "ranks": rows, "slow": [3]}, 1003.2)
    assert "\n".join(lines) in PAGE


def test_a_table_without_ranks_says_why() -> None:
    (_, line) = table_lines({"time": 1.0, "attempt": 0, "window_s": 60.0, "ranks": [], "slow": []}, 2.0)
    assert "GPUs" in line


@pytest.mark.parametrize("change", [{"ranks": 7}, {"ranks": [{}]}, {"time": "x"}, {"slow": None}])
def test_a_malformed_table_is_an_error_for_the_user(change: dict[str, Any]) -> None:
    content = {"time": 1.0, "attempt": 0, "window_s": 60.0, "ranks": [], "slow": []} | change
    with pytest.raises(MALFORMED):
        list(table_lines(content, 2.0))


ROW = SlowRow(5.0, 0, "node2", tuple(LINES), "2026-01-01 00:00:00", (3,), 0.01, 0.23, 60.0)


def test_the_report_has_them() -> None:
    report = build_report(RUN, [], slow=[ROW])
    VALIDATOR.validate(report)
    (row,) = report["slow_ranks"]
    assert (row["ranks"], row["host"], row["console_lines"]) == ([3], "node2", LINES)
    text = build_report_text(RUN, [], slow=[ROW])
    assert "--- slow ranks\n  2026-01-01 00:00:00\n    rank 3 (node2) is slow: " in text


def test_the_report_is_bounded_whatever_they_are() -> None:
    many = ROW._replace(ranks=tuple(range(100_000)), host="x" * 100_000, console_lines=("y" * 100_000,) * 1000)
    report = build_report(RUN, [], slow=[many] * 20)
    VALIDATOR.validate(report)
    assert len(str(report)) < 1 << 18


def test_the_page_shows_what_is_printed_of_ranks_that_use_gpus() -> None:
    found = Straggler((3,), 0.01, 0.23, 1200.0, "durations")
    counts = {rank: counts_of(SHARES)[rank] for rank in (0, 1, 3)}
    lines = slow_lines(found, counts, HOSTS, ["GPU 3: clock 990 of 1980 MHz, 91 °C"])
    assert "\n".join(["```text", *lines, "```"]) in PAGE
