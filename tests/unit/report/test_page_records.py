"""What ranks have recorded themselves, on the page: failure records, last calls and last steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.report.page import rendering
from saferun.report.page.building import build_page
from saferun.report.page.rendering import LIMIT_BYTES, render_page
from saferun.report.page.run_contents import FailureRecord, RunFiles
from saferun.report.page.run_reading import read_run
from saferun.text.failure_record import failure_record_from
from tests.unit.report.page_samples import HOSTILE, RECORD, hang_run, write_records
from tests.unit.report.test_page_text import Reader, acts, read


def test_the_failure_record_is_on_the_page(tmp_path: Path) -> None:
    """The exception with its causes, the locals of its frames, step and memory."""
    page = read(hang_run(tmp_path / "run"))
    for text in (
        "RuntimeError: the batch is wrong",
        "RuntimeError caused by",
        "KeyError: 'ids'",
        "float32 [8, 512] cuda:0, not finite",
        "{ids float32 [8, 512] cuda:0, not finite}",
        "str of length 12",
        "99 (loss 2.31)",
        "process 3 GiB (peak 4 GiB); torch on GPU 0 5 GiB (peak 7 GiB), with its cache 6 GiB",
        "loader",
        "torch/nn.py:9",
    ):
        assert text in page.text, text
    anchors = {attributes.get("href") for tag, attributes in page.elements if tag == "a"}
    assert {"#records", "#calls", "#steps"} <= anchors
    opened = [attributes["class"] for tag, attributes in page.elements if tag == "details" and "open" in attributes]
    assert opened.count("record") == 1
    assert opened.count("frame") == 1


def test_last_calls_and_last_steps_are_on_the_page(tmp_path: Path) -> None:
    """Those of the report; of a rank that the report has not, those of its failure record."""
    page = read(hang_run(tmp_path / "run"))
    assert "-0.125 s raise load_batch train.py:47" in " ".join(page.text.split())
    assert "the newest 0.125 s before the capture" in " ".join(page.text.split())
    assert "the newest 0.125 s before its failure record" in " ".join(page.text.split())
    assert "step 99 (loss 2.31), 4 s before" in page.text


def test_without_records_there_are_no_such_sections(tmp_path: Path) -> None:
    """As in nearly all runs."""
    folder = hang_run(tmp_path / "run")
    (folder / "node1" / "attempt_0" / "rank_3" / "failure.json").unlink()
    report = json.loads((folder / "report.json").read_text())
    report["incidents"][-1] |= {"last_calls": [], "last_steps": []}
    (folder / "report.json").write_text(json.dumps(report))
    page = read(folder)
    anchors = {attributes.get("href") for tag, attributes in page.elements if tag == "a"}
    assert not {"#records", "#calls", "#steps"} & anchors


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "huge", "deep", "text"])
def test_what_is_no_record_is_left_out(kind: str, tmp_path: Path) -> None:
    """Whoever sends a run directory may have put anything into it; nothing is followed or waited for."""
    folder = hang_run(tmp_path / "run")
    path = folder / "node1" / "attempt_0" / "rank_3" / "failure.json"
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "other").write_bytes(content)
        path.symlink_to(tmp_path / "other")
    elif kind == "fifo":
        __import__("os").mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "huge":
        path.write_bytes(content + b" " * (1 << 20))
    else:
        path.write_bytes(b"[" * 50_000 if kind == "deep" else b"no JSON")
    assert read_run(str(folder)).failure_records == ()
    assert "#records" not in {attributes.get("href") for _, attributes in read(folder).elements}


@pytest.mark.slow
def test_a_page_with_records_of_any_size_is_bounded(tmp_path: Path) -> None:
    """Characters that take five bytes on the page, wherever one may stand; of many ranks."""
    folder = hang_run(tmp_path / "run")
    local = {"name": "<" * 200, "type": "<" * 200, "items": [{"name": "&" * 60, "value": "<" * 80}] * 8}
    frame = {"function": "<" * 200, "file": "<" * 400, "line": 1, "locals": [local] * 32}
    error = {"type": "<" * 200, "message": "<" * 2000, "frames": [frame] * 12}
    for rank in range(8):
        directory = folder / "node1" / "attempt_0" / f"rank_{rank}"
        (directory / "failure.json").write_text(json.dumps({"version": 1, "exceptions": [error]}))
    report = json.loads((folder / "report.json").read_text())
    events = [{"kind": "<" * 99, "function": "<" * 300, "file": "<" * 300, "line": 1, "before_s": 1e300}] * 40
    threads = [{"tid": tid, "is_main": False, "events": events} for tid in range(3)]
    report["incidents"][-1]["last_calls"] = [{"rank": rank, "threads": threads} for rank in range(32)]
    report["incidents"][-1]["last_steps"] = [{"ranks": [rank], "text": "<" * 900} for rank in range(900)]
    (folder / "report.json").write_text(json.dumps(report))
    files = read_run(str(folder))
    assert len(files.failure_records) == 8
    assert len(rendering.render_model(build_page(files, str))) > LIMIT_BYTES
    page = render_page(files)
    assert len(page) <= LIMIT_BYTES
    assert "Failure records" in Reader(page).text
    assert acts(Reader(page)) == []


def test_only_some_records_are_read(tmp_path: Path) -> None:
    """Those of the cause first: rank 3's."""
    folder = hang_run(tmp_path / "run")
    for rank in range(40):
        directory = folder / "node1" / "attempt_0" / f"rank_{rank}"
        directory.mkdir(exist_ok=True)
        (directory / "failure.json").write_text(json.dumps(RECORD))
    ranks = [record.rank for record in read_run(str(folder)).failure_records]
    assert ranks == [3, 0, 1, 2, 4, 5, 6, 7]


def test_the_records_of_ranks_that_ended_earlier_attempts_are_there_with_their_attempt(tmp_path: Path) -> None:
    """A job that was restarted may have had another cause each time. Of other ranks of those attempts there is none."""
    folder = hang_run(tmp_path / "run")
    report = json.loads((folder / "report.json").read_text())
    last = report["incidents"][-1]
    report["incidents"] = [{**last, "attempt": 0}, {**last, "attempt": 1}, {**last, "attempt": 2}]
    (folder / "report.json").write_text(json.dumps(report))
    for attempt, ranks in ((0, (2, 3)), (1, (3,)), (2, (3,))):
        for rank in ranks:
            directory = folder / "node1" / f"attempt_{attempt}" / f"rank_{rank}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "failure.json").write_text(json.dumps(RECORD))
    files = read_run(str(folder))
    assert [(one.attempt, one.rank) for one in files.failure_records] == [(2, 3)]
    assert [(one.attempt, one.rank) for one in files.earlier_failure_records] == [(1, 3), (0, 3)]
    failures = build_page(files, str).failures
    assert [(one.where, one.is_culprit) for one in failures] == [
        ("node1", True),
        ("node1, attempt 1", False),
        ("node1, attempt 0", False),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*RECORD, "of", "link"]), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(list(RECORD)), JSON), st.lists(JSON, max_size=3))
def test_whatever_a_record_holds_harms_nothing(record: dict[str, Any], exceptions: list[Any]) -> None:
    """It is shown as text, or left out."""
    content = json.dumps({**record, "version": 1, "exceptions": exceptions}).encode()
    found = failure_record_from(content)
    records = (FailureRecord("node1", 0, 3, found),) if found is not None else ()
    page = Reader(rendering.render_model(build_page(RunFiles("run", failure_records=records), str)))
    assert acts(page) == []


def test_a_secret_in_a_record_is_not_shown(tmp_path: Path) -> None:
    """Somebody may have copied a record that saferun has not written."""
    error = {
        "type": "E",
        "message": "token=hf_abcdefghijklmnopqrstuvwxyz0123456789",
        "frames": [
            {
                "function": "f",
                "file": "t.py",
                "line": 1,
                "locals": [{"name": "api_key", "type": "int", "value": "7531902"}],
            }
        ],
    }
    folder = write_records(hang_run(tmp_path / "run"), exceptions=[error])
    text = read(folder).text
    assert "hf_abc" not in text
    assert "7531902" not in text
