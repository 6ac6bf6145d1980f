"""The signs of life in one interval, and the stacks that py-spy prints."""

from __future__ import annotations

import pytest

from saferun.captures.py_spy_json import threads_from
from saferun.evidence.job_evidence import Frame
from saferun.watchdog.signs import main_thread_signs
from tests.unit.watchdog.simulated_jobs import (
    POLLS_EVERY_MS,
    QUIET,
    SPINS,
    SPINS_ON_A_BUSY_MACHINE,
    TRAINS,
    WAITS_FOR_CHILD,
    WAITS_FOR_LOADER,
    WRITES_CHECKPOINT,
    Process,
    Rates,
)


@pytest.mark.parametrize("interval_s", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (QUIET, "quiet"),
        (POLLS_EVERY_MS, "quiet"),
        (WAITS_FOR_CHILD, "quiet"),
        (WAITS_FOR_LOADER, "quiet"),
        (SPINS, "busy"),
        (SPINS_ON_A_BUSY_MACHINE, "busy"),
        (Rates(main=0.09, wakes=8000), "busy"),
        (Rates(state="R"), "busy"),  # ready to run, without a processor all the while
        (TRAINS, "moves"),
        (WRITES_CHECKPOINT, "moves"),
        (Rates(main=0.02, wakes=3), "moves"),
    ],
)
def test_the_same_is_seen_at_short_intervals_and_at_long_ones(rates: Rates, expected: str, interval_s: float) -> None:
    """A timeout of two seconds must see what one of five minutes sees."""
    process = Process(1)
    process.live(rates, 10.0)
    before = process.live(rates, interval_s)
    assert main_thread_signs(before, process.live(rates, interval_s), interval_s) == expected


def test_what_py_spy_says_is_read() -> None:
    text = b"""[
    {"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": true, "owns_gil": false,
     "frames": [{"name": "wait", "filename": "a.py", "line": 3, "locals": null},
                {"name": "main", "filename": "b.py", "line": 9}]},
    {"pid": 7, "thread_id": 99, "thread_name": null, "os_thread_id": null, "active": false, "frames": []}]"""
    main, other = threads_from(text, 7)
    assert main.is_main
    assert main.frames == (Frame("wait", "a.py", 3), Frame("main", "b.py", 9))
    assert (other.is_main, other.tid, other.frames) == (False, 99, ())


@pytest.mark.parametrize(
    "text", [b"", b"Error: no such process", b"{}", b"[1]", b'[{"frames": 3}]', b"[" * 100_000, b"\xff", b"null"]
)
def test_what_is_no_answer_of_py_spy_is_none(text: bytes) -> None:
    """The names in it are the rank's."""
    assert threads_from(text, 7) == ()
