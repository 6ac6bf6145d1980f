"""How often the user hears of files that cannot be written."""

from __future__ import annotations

import errno
import os

import pytest

from saferun.errors import UsageError
from saferun.files.write_errors import WHAT_REMAINS, WriteErrors

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(name="lines")
def _lines() -> list[tuple[str, ...]]:
    return []


@pytest.fixture(name="errors")
def _errors(lines: list[tuple[str, ...]]) -> WriteErrors:
    return WriteErrors(lambda *line: lines.append(line))


def test_the_first_file_that_cannot_be_written_is_one_line(errors: WriteErrors, lines: list[tuple[str, ...]]) -> None:
    """A full disk concerns a thousand files."""
    for number in range(3):
        errors.on_failed(f"/run/{number}", FULL, is_tried_again=True)
    errors.warn_once("/run/3", FULL, "make room", "and so on")
    assert lines == [(f"/run/0: No space left on device; {WHAT_REMAINS}",)]
    assert [errors.has(f"/run/{number}") for number in range(4)] == [True, True, True, False]


def test_what_is_to_be_done_about_it_is_passed_on(errors: WriteErrors, lines: list[tuple[str, ...]]) -> None:
    errors.warn_once("no run directory: /run", FULL, "make room", "the job runs without it")
    assert lines == [("no run directory: /run: No space left on device; the job runs without it", "make room")]


def test_a_file_that_is_given_up_is_not_waited_for(errors: WriteErrors) -> None:
    """Only one that is tried again may be written later."""
    errors.on_failed("/run/a", FULL, is_tried_again=False)
    assert not errors.has_any
    errors.add("/run/b")
    assert errors.has_any


def test_that_all_files_are_written_again_is_said_once_with_what_is_missing(
    errors: WriteErrors, lines: list[tuple[str, ...]]
) -> None:
    """A file system that fails again and again is not worth a line each time."""
    for path in ("/run/a", "/run/b"):
        errors.on_failed(path, FULL, is_tried_again=True)
    errors.on_written("/run/a", 5)
    assert len(lines) == 1
    errors.on_written("/run/b", 2)
    for _ in range(2):
        errors.on_failed("/run/a", FULL, is_tried_again=True)
        errors.on_written("/run/a", 1)
    assert not errors.has_any
    again = "/run/b: files are written again; 7 bytes are missing in them, which they note"
    assert lines[1:] == [(again,)]


def test_files_that_only_came_late_miss_nothing(errors: WriteErrors, lines: list[tuple[str, ...]]) -> None:
    errors.add("/run/a")
    errors.on_written("/run/a", 0)
    assert lines == [("/run/a: files are written again; nothing is missing in them",)]


def test_a_launch_that_is_refused_has_no_line_about_files(errors: WriteErrors, lines: list[tuple[str, ...]]) -> None:
    """The refusal names the directory, and there is nothing to be written."""
    errors.refusal = UsageError("--run-dir /theirs: another user's", "pass another --run-dir")
    errors.on_failed("/theirs/events.jsonl", FULL, is_tried_again=False)
    assert not lines
