"""The metrics: their format, and that documents and the dashboard name those that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from saferun.report.metrics_text import METRICS, Sample, metrics_text

ROOT = Path(__file__).parents[3]
_NAME = re.compile(r"\bsaferun_[a-z_]+\b")


def test_values_have_labels_a_type_and_a_help() -> None:
    samples = [Sample("saferun_incidents_total", 2, (("kind", "hang"),)), Sample("saferun_info", 1)]
    text = metrics_text(samples, run_id="5f2c1a", host="node1")
    info, incidents = text.splitlines()[2], text.splitlines()[5]
    assert re.fullmatch(r'saferun_info\{run_id="5f2c1a",host="node1",version="[^"]+"\} 1', info)
    assert incidents == 'saferun_incidents_total{run_id="5f2c1a",host="node1",kind="hang"} 2'
    assert "# TYPE saferun_incidents_total counter" in text
    assert text.endswith("\n")


def test_a_label_cannot_break_out_of_its_quotes() -> None:
    text = metrics_text([Sample("saferun_up", 1)], run_id='a"b\\c\nd', host="node1")
    assert text.splitlines()[2] == 'saferun_up{run_id="a\\"b\\\\c\\nd",host="node1"} 1'


def test_counters_end_in_total_and_only_they() -> None:
    assert all(name.endswith("_total") is (kind == "counter") for name, (kind, _) in METRICS.items())


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((ROOT / "examples/grafana/saferun.json").read_text())
    shown = {
        name for panel in dashboard["panels"] for target in panel["targets"] for name in _NAME.findall(target["expr"])
    }
    assert shown == set(METRICS)
    used = {name for entry in dashboard["templating"]["list"] for name in _NAME.findall(entry["query"])}
    assert used <= set(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_the_document_explains_it(name: str) -> None:
    kind, text = METRICS[name]
    assert f"| `{name}` | {kind} | {text} |" in (ROOT / "docs/programs.md").read_text()


def test_openmetrics_names_counters_without_total_and_marks_the_end() -> None:
    samples = [Sample("saferun_up", 1), Sample("saferun_restarts_total", 2)]
    lines = metrics_text(samples, run_id="5f2c1a", host="node1", is_openmetrics=True).splitlines()
    assert "# TYPE saferun_up gauge" in lines
    assert "# TYPE saferun_restarts counter" in lines
    assert 'saferun_restarts_total{run_id="5f2c1a",host="node1"} 2' in lines
    assert lines[-1] == "# EOF"
