"""Errors that stand behind a progress bar, in its line."""

from __future__ import annotations

import re
import signal
from functools import partial
from typing import Any

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import cause_of, role_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.diagnosis.progress_bars import is_bar, without_bars
from saferun.diagnosis.tracebacks import clean_lines, ends_with_traceback, find_python_error
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import RankOutput
from saferun.model import ExitStatus
from tests.unit.diagnosis.failed_jobs import RECORDED, class_of, evidence
from tests.unit.operations import operations
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
BAR = "Training:  45%|####5     | 45/100 [00:02<00:02, 20.0it/s]"
BARS = (
    BAR,
    f"{BAR}      ",
    f"{BAR}\x1b[0m",
    "45it [00:02, ?it/s]",
    "  3%|3 | 3/90 [00:09<04:21,  3.01s/it, loss=0.31]",
    "model.safetensors:  12%|#2  | 1.2G/9.9G [00:04<00:31, 290MB/s]",
    "7.1kB [00:00, 3.2MB/s]",
    "12batch [00:01,  9.1batch/s]",
)
BEGINNINGS = (
    HEAD,
    f"[rank0]: {HEAD}",
    "Fatal Python error: Segmentation fault",
    "Exception in thread Thread-1 (poll):",
    "Exception ignored in: <function f>",
    "terminate called without an active exception",
)


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("line", BEGINNINGS)
def test_an_error_behind_a_bar_has_a_line_of_its_own(bar: str, line: str) -> None:
    assert is_bar(bar)
    assert without_bars([bar + line])[1:] == [line]
    assert without_bars(without_bars([bar + line])) == without_bars([bar + line])
    assert len(clean_lines([bar + line])) == 2


@pytest.mark.parametrize(
    "line",
    [
        BAR,
        f"[data] {HEAD}",
        f"[2026-11-26 12:00:00] {HEAD}",
        f"{BAR} the end",
        f"read a/b [x]{HEAD}",
        HEAD,
        "[rank0]: x",
    ],
)
def test_other_lines_are_left_alone(line: str) -> None:
    """What a logger puts before each line of a traceback is no bar."""
    assert without_bars([line]) == [line]


MARKS = (HEAD, "Fatal Python error:", "terminate called", "Exception in thread", "Exception ignored")


def judged(lines: list[str], status: str) -> Cause:
    number = status.rpartition(" ")[2]
    if status.startswith("code"):
        ended = ExitStatus(int(number), None)
    else:
        ended = ExitStatus(None, int(number) if number.isdigit() else int(getattr(signal, number)))
    end = end_of(1, code=1)._replace(status=ended)
    output = RankOutput(1, tuple(lines), "", "", 0.0)
    return cause_of(read_failure(evidence(end, outputs=(output,)), end, output))


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.txt")))
def test_a_bar_before_a_recorded_failure_changes_nothing(name: str) -> None:
    head, _, text = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("--- stderr\n")
    found = re.search(r"status: (.*)", head)
    assert found is not None
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    plain = judged(lines, found[1])
    for mark in MARKS:
        indexes = [
            index for index, line in enumerate(lines) if line.lstrip("\0").startswith((mark, f"[rank1]: {mark}"))
        ]
        for index in indexes[:1]:
            changed = [*lines[:index], BAR + lines[index], *lines[index + 1 :]]
            behind = judged(changed, found[1])
            assert (behind.class_name, role_of(behind), behind.message) == (
                plain.class_name,
                role_of(plain),
                plain.message,
            )


def test_a_line_of_brackets_and_blanks_is_read_once() -> None:
    """From each bracket the blanks behind it were read, forwards and back."""
    texts = ("]" + " " * 398, "]" + "\x1b[0m" * 99, f"] x{HEAD}", f"] [rank0]: {HEAD}")
    for text in texts:
        short, long = ((text * number)[:most] + HEAD for number, most in ((40, 900), (400, 3600)))
        assert without_bars([long]) == [long]
        few, many = (operations(partial(without_bars, [line])) for line in (short, long))
        assert many < 8 * few


MARKED = tuple(f"[rank0]: {line}" for line in (HEAD, STEP, "ValueError: bad batch"))
BEHIND_BAR = (BAR + MARKED[0], *MARKED[1:])
WANDB = (BAR, *(f"wandb: {number}" for number in range(4)))


@pytest.mark.parametrize(
    ("after", "how"),
    [
        (("terminate called without an active exception",), {"signum": 6}),
        (
            ("Process SpawnProcess-1:", HEAD, '  File "/home/user/job/data.py", line 9, in serve', "EOFError"),
            {"code": 1},
        ),
        (WANDB, {"code": 3}),
    ],
)
def test_the_mark_of_torchs_hook_counts_behind_a_bar(after: tuple[str, ...], how: dict[str, Any]) -> None:
    output = RankOutput(0, (*BEHIND_BAR, *after), "", "", 0.0)
    found = diagnose(evidence(end_of(0, **how), outputs=(output,)))
    assert (class_of(found), found.cause and found.cause.message) == ("python_exception", "ValueError: bad batch")


def test_a_traceback_behind_a_bar_is_the_last_thing_that_was_printed() -> None:
    assert ends_with_traceback([*BEHIND_BAR, *WANDB])
    error = find_python_error(BEHIND_BAR)
    assert error is not None
    assert error.is_uncaught
    assert error.lines == (HEAD, STEP, "ValueError: bad batch")
    assert error.before == BAR
