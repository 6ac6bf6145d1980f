"""The metrics as the parsers of Prometheus' own Python client read them."""

from __future__ import annotations

import io
import math
import string
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_fd_to_metric_families as openmetrics_families
from prometheus_client.parser import text_fd_to_metric_families as text_families

from saferun import __version__
from saferun.report.metrics_text import METRICS, Sample, metrics_text

if TYPE_CHECKING:
    from prometheus_client import Metric

SAMPLES = [
    Sample("saferun_info", 1),
    Sample("saferun_up", True),
    Sample("saferun_progress_age_seconds", 0.1 + 0.2),
    Sample("saferun_incidents_total", 2, (("kind", "hang"),)),
    Sample("saferun_incidents_total", 1, (("kind", "failure"),)),
    Sample("saferun_restarts_total", 0),
    Sample("saferun_output_bytes_total", 2**60),
    Sample("saferun_exit_code", -1),
]
HOSTILE = (
    'a"b\\c\nd',
    '"} 1\nsaferun_up 0\n# EOF',
    "\\",
    "\\n",
    '\\"',
    "{}=,",
    "a\rb\x00c\x1b[2J\x7f",
    "\x85\u2028\u2029",
    "\udcff\ud800",
    "Rechner-ä-机器",
    "",
    " # HELP x",
    "x" * 100_000,
)


def as_text(content: bytes) -> Iterable[Metric]:
    """By the parser of the text format, as from a file."""
    found: Iterable[Metric] = text_families(io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="\n"))
    return found


def as_openmetrics(content: bytes) -> Iterable[Metric]:
    """By the parser of OpenMetrics, which is strict about order, names and the end."""
    stream = io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="\n")
    found: Iterable[Metric] = openmetrics_families(stream)
    return found


PARSERS = [pytest.param(as_text, False, id="text"), pytest.param(as_openmetrics, True, id="openmetrics")]
Parse = Callable[[bytes], Iterable["Metric"]]


def read(parse: Parse, *, is_openmetrics: bool, run_id: str, host: str) -> dict[tuple[str, str], float]:
    """What a parser finds, by name and ``kind``. All have the labels that were given, as far as they can be written."""
    content = metrics_text(SAMPLES, run_id=run_id, host=host, is_openmetrics=is_openmetrics).encode()
    found = {}
    shown = {"run_id": as_shown(run_id), "host": as_shown(host)}
    for family in parse(content):
        for sample in family.samples:
            assert {name: sample.labels[name] for name in shown} == shown
            found[sample.name, sample.labels.get("kind", "")] = float(sample.value)
    return found


def as_shown(value: str) -> str:
    return value[:200].encode(errors="replace").decode()


WANTED = {(sample.name, dict(sample.labels).get("kind", "")): float(sample.value) for sample in SAMPLES}


@pytest.mark.parametrize(("parse", "is_openmetrics"), PARSERS)
def test_a_parser_reads_types_helps_and_values(parse: Parse, is_openmetrics: bool) -> None:
    content = metrics_text(SAMPLES, run_id="5f2c1a", host="node1", is_openmetrics=is_openmetrics).encode()
    families = {family.name: family for family in parse(content)}
    for sample in SAMPLES:
        kind, text = METRICS[sample.name]
        family = families[sample.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (kind, text)
    assert families["saferun_info"].samples[0].labels["version"] == __version__
    assert read(parse, is_openmetrics=is_openmetrics, run_id="5f2c1a", host="node1") == WANTED


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize(("parse", "is_openmetrics"), PARSERS)
def test_a_name_that_looks_like_metrics_is_a_label_and_nothing_else(
    parse: Parse, is_openmetrics: bool, name: str
) -> None:
    """Names of hosts and runs come from outside; nothing of them gets out of its label, or keeps metrics away."""
    assert read(parse, is_openmetrics=is_openmetrics, run_id=name, host="node1") == WANTED
    assert read(parse, is_openmetrics=is_openmetrics, run_id="5f2c1a", host=name) == WANTED


@given(st.text(st.sampled_from(string.printable + "\ud800\x85\u2028ä"), max_size=30), st.booleans())
def test_any_name_can_be_read_back(name: str, is_openmetrics: bool) -> None:
    parse = as_openmetrics if is_openmetrics else as_text
    assert read(parse, is_openmetrics=is_openmetrics, run_id=name, host=name) == WANTED


@given(st.floats())
def test_any_number_can_be_read_back(value: float) -> None:
    samples = [Sample("saferun_progress_age_seconds", value)]
    for parse, is_openmetrics in ((as_text, False), (as_openmetrics, True)):
        content = metrics_text(samples, run_id="r", host="h", is_openmetrics=is_openmetrics).encode()
        (family,) = parse(content)
        (sample,) = family.samples
        assert sample.value == value or math.isnan(value)
