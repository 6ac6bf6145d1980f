"""The failure record of a rank, as a report shows it: whatever a rank may have written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.text.failure_record import LONGEST_BYTES, failure_lines, failure_record_from, traceback_lines


def record_of(*frames: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "exceptions": [{"type": "ValueError", "message": "", "frames": list(frames)}], **more}


def frame_of(*rows: dict[str, Any], function: str = "step", file: str = "/x/train.py") -> dict[str, Any]:
    return {"function": function, "file": file, "line": 42, "locals": list(rows)}


TENSOR: dict[str, Any] = {"name": "x", "shape": [8, 512], "dtype": "float32", "device": "cuda:0"}


def test_a_frames_tensors_come_first_then_numbers() -> None:
    """And what has only a type is left out."""
    batch = {
        "name": "batch",
        "type": "dict",
        "length": 1,
        "items": [{"name": "ids", "shape": [3], "dtype": "int64", "device": "cpu"}],
    }
    frame = frame_of(
        {"name": "n", "type": "int", "value": "3"},
        {"name": "s", "type": "str", "length": 4},
        batch,
        {**TENSOR, "finite": False},
    )
    assert failure_lines(record_of(frame)) == (
        "locals of step (train.py:42): x float32 [8, 512] cuda:0, not finite; batch {ids int64 [3] cpu}; n = 3",
    )


def test_the_users_own_frame_is_shown_before_the_innermost_one() -> None:
    """The mistake is usually in the script, the exception in a library."""
    inner = frame_of(TENSOR, function="linear", file="/venv/lib/python3.11/site-packages/torch/functional.py")
    lines = failure_lines(record_of(frame_of(TENSOR), inner))
    assert [line.partition(":")[0] for line in lines] == ["locals of step (train.py", "locals of linear (functional.py"]


def test_the_traceback_is_that_of_python() -> None:
    """Also of what it was raised from, whose order is the other way round."""
    rows: list[Any] = [
        {"type": "__main__.StepError", "message": "two\nlines", "frames": [frame_of(function="Run.<locals>.step")]},
        {
            "type": "ValueError",
            "message": "",
            "link": "context",
            "of": 0,
            "frames": [{"file": "a.py", "line": 7}, None],
        },
        {"type": "KeyError", "message": "'x'", "link": "cause", "of": 1},
        "nothing",
    ]
    found = traceback_lines({"version": 1, "exceptions": rows})
    assert (
        "\n".join(found)
        == """Traceback (most recent call last):
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 7, in \n\
ValueError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/train.py", line 42, in step
StepError: two
lines"""
    )


@pytest.mark.parametrize(
    "rows",
    [[], [None], [{}], [{"type": 3, "message": [], "frames": {}}], [{"type": "A", "link": "cause", "of": 0}] * 3],
)
def test_a_traceback_of_whatever_a_rank_has_written(rows: list[Any]) -> None:
    assert len(traceback_lines({"version": 1, "exceptions": rows})) < 20


def test_memory_is_a_line_of_its_own() -> None:
    """Of the process, and of torch's allocator."""
    gpu = {"device": 0, "allocated_bytes": 3 << 30, "peak_allocated_bytes": 4 << 30, "reserved_bytes": 5 << 30}
    record = record_of(memory={"rss_bytes": 2 << 30, "peak_rss_bytes": 3 << 30}, gpus=[gpu])
    assert failure_lines(record) == (
        "memory then: process 2 GiB (peak 3 GiB); torch on GPU 0 3 GiB (peak 4 GiB), with its cache 5 GiB",
    )


def test_control_characters_and_secrets_do_not_reach_the_report() -> None:
    """Names come from the script."""
    secret = {"name": "password", "type": "int", "value": "hunter2"}
    (line,) = failure_lines(record_of(frame_of({**TENSOR, "name": "a\x1b[31m\nb"}, secret)))
    assert "\x1b" not in line
    assert "\n" not in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\x80",
        b"[]",
        b"{}",
        b'{"version": 2, "exceptions": []}',
        b'{"version": 1, "exceptions": {}}',
        b'{"version": 1, "exceptions": [' + b"[" * 100 + b"]" * 100 + b"]}",
        b'{"version": 1, "exceptions": [' + b"1," * 60_000 + b"1]}",
        b'{"version": 1, "exceptions": [], "x": "' + b"y" * LONGEST_BYTES + b'"}',
        b'{"version": 1, "exceptions": [1e999]}',
    ],
    ids=["empty", "binary", "list", "object", "version", "types", "deep", "many", "long", "infinite"],
)
def test_what_is_no_record_is_none(content: bytes) -> None:
    """A rank may have written anything."""
    assert failure_record_from(content) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["frames", "locals", "items", "shape", "name", "value", "dtype", "file", "line", "finite"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=30,
)


@given(ANYTHING, ANYTHING, ANYTHING)
def test_a_record_of_the_wrong_types_has_the_lines_that_it_can_have(one: Any, other: Any, third: Any) -> None:
    """And never raises; a line is printable and bounded."""
    frames = {"frames": [one, {"function": other, "file": third, "line": one, "locals": [other, one]}]}
    record = {"version": 1, "exceptions": [frames, one], "memory": other, "gpus": [third, one]}
    found = failure_record_from(json.dumps(record).encode())
    lines = failure_lines(found) if found is not None else ()
    assert all(line.isprintable() and len(line) <= 1000 for line in lines)
