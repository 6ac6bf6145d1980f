"""``saferunctl status``: the ranks of a run, and how long each waits for the others."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.run_directory import add_run_argument, find_run
from saferun.errors import UsageError
from saferun.files.run_dir import shorter_path
from saferun.model import JsonObject
from saferun.text.decoding import MALFORMED, display_text, loads, measure, number
from saferun.text.wording import duration_text

_MOST_BYTES = 64 << 20
_LONGEST_NAME = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    directory = find_run(arguments.run_dir, living_first=True)
    shown = shorter_path(str(directory))
    hint = "it is written a quarter of --slow-window after the start, by the first host; not with --hang-timeout 0"
    content = _read(directory / "waits.json")
    if content is None:
        raise UsageError(f"there is no table of the ranks in {shown}", hint)
    try:
        lines = list(table_lines(content, time.time()))
    except MALFORMED:
        raise UsageError(f"waits.json in {shown} cannot be read", hint) from None
    if arguments.json:
        answer_json(content)
        return 0
    outcome = _outcome(directory)
    answer("\n".join([f"{shown}{f': {outcome}' if outcome else ''}", *lines]) + "\n")
    return 0


def table_lines(content: JsonObject, now: float) -> Iterator[str]:
    """The lines of the table.

    Args:
        content: of waits.json.
        now: seconds since the epoch.

    Raises:
        One of ``MALFORMED``: it is no such content.
    """
    age, window = duration_text(max(0.0, now - measure(content["time"]))), duration_text(measure(content["window_s"]))
    rows = [
        (number(row["rank"]), display_text(row["host"], _LONGEST_NAME), measure(row["waited"]))
        for row in content["ranks"]
    ]
    slow = {number(rank) for rank in content["slow"]}
    by = ", by Flight Recorders" if content.get("by", "samples") != "samples" else ""
    yield f"{age} ago, attempt {number(content['attempt'])}, waits in the last {window}{by}:"
    if not rows:
        yield "  nothing is known of waits: the ranks use GPUs, or do not wait in step"
        return
    width = max(len("host"), *(len(host) for _, host, _ in rows))
    yield f"  {'rank':>5}  {'host':<{width}}  waits"
    for rank, host, waited in rows:
        note = "  slow: the others wait for it" if rank in slow else ""
        yield f"  {rank:>5}  {host:<{width}}  {waited * 100:4.0f} %{note}"


def _outcome(directory: Path) -> str:
    report = _read(directory / "report.json")
    found: Any = report.get("run") if report is not None else None
    return display_text(found.get("outcome", ""), _LONGEST_NAME) if isinstance(found, dict) else ""


def _read(path: Path) -> JsonObject | None:
    try:
        content = loads(path.read_bytes(), longest=_MOST_BYTES)
    except (OSError, *MALFORMED):
        return None
    return content if isinstance(content, dict) else None
