"""The schemas of the report's files, and what any process may put into them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import strategies as st

from saferun.model import JsonObject
from saferun.preflight import json_report
from saferun.report import report_json
from saferun.report.report_json import Run
from tests.unit.report.report_samples import FILES

ROOT = Path(__file__).resolve().parents[3]
SCHEMA: JsonObject = json.loads((ROOT / "saferun/report/schema/report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PREFLIGHT_SCHEMA: JsonObject = json.loads(
    (ROOT / "saferun/report/schema/preflight.schema.json").read_text(encoding="utf-8")
)
PREFLIGHT_VALIDATOR = jsonschema.Draft202012Validator(PREFLIGHT_SCHEMA)
RUN = Run(
    "5f2c1a",
    "node1",
    ("saferun", "--nproc-per-node", "8", "train.py", "--api-key", "abc123"),
    1.7e9,
    1.7e9 + 600,
    1,
    "failed",
    FILES,
    "2026-03-14 03:15:02",
)


def checked(report: JsonObject) -> JsonObject:
    """The report as a program reads it, after it has been found to keep the schema and the limit."""
    text = json.dumps(report, indent=1, allow_nan=False)
    assert len(text) <= report_json.LIMIT_BYTES
    read: JsonObject = json.loads(text)
    VALIDATOR.validate(read)
    return read


def checked_preflight(content: JsonObject) -> JsonObject:
    """preflight.json as a program reads it, likewise."""
    text = json.dumps(content, indent=1, allow_nan=False)
    assert len(text) <= json_report.LIMIT_BYTES
    read: JsonObject = json.loads(text)
    PREFLIGHT_VALIDATOR.validate(read)
    return read


def objects_of(schema: object) -> Iterator[JsonObject]:
    """All schemas of objects in a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from objects_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects_of(value)


ANY_TEXT = st.one_of(
    st.text(st.characters(codec=None, categories=None), max_size=60),
    st.sampled_from(["TOKEN=x", "a=b" * 800, "\ud800", "\x00\x1b[31m", "https://u:p@h", "\u2028"]),
)
ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True)
ANY_INTEGER = st.one_of(st.integers(-5, 100), st.sampled_from([10**300, -(10**30), 1 << 63]))
ANY_RANKS = st.lists(st.integers(-1, 5000), max_size=8).map(tuple)


def tuples(values: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=most).map(tuple)
