"""``saferunctl status``: what the ranks of a run do now, and how long each waits for the others.

A run that lives is asked by its control socket; of all others, and of one that cannot be asked, the run directory says
how it ended. The waits are those that the first host has written last.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.live_run import ask_living
from saferun.ctl.run_directory import add_run_argument, find_run, state_of
from saferun.errors import SaferunError, UsageError, suppress
from saferun.files.run_dir import shorter_path
from saferun.files.run_files import RunState, open_run, read_json
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED, display_text, measure, number
from saferun.text.wording import duration_text

_MOST_BYTES = 64 << 20
_LONGEST_NAME = 100
_INTERVAL_S = 2.0
_LONGEST_S = 1e6
# Hosts that do not answer are left out after some seconds.
_COLLECTED_S = 40.0
# What the terminal has scrolled off stays.
_CLEAR = "\x1b[H\x1b[2J"


class Status(Value):
    """What is known of a run. ``live``: what its saferun answers; ``waits``: the content of waits.json."""

    directory: Path
    state: RunState
    live: JsonObject | None = None
    unanswered: str = ""
    waits: JsonObject | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser, living_first=True)
    parser.add_argument(
        "-w",
        "--watch",
        nargs="?",
        type=_seconds,
        const=_INTERVAL_S,
        metavar="SECONDS",
        help="show it again every few seconds (2 by default) until the run ends; off a terminal the lines are repeated",
    )
    parser.add_argument("--json", action="store_true", help="as JSON; with -w an object a line")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < _LONGEST_S:
            return seconds
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0 and below {_LONGEST_S:.0f}")


def run(arguments: argparse.Namespace) -> int:
    """Print the status, again and again where that is wanted."""
    directory = find_run(arguments.run_dir, living_first=True)
    redraws = arguments.watch is not None and not arguments.json and sys.stdout.isatty()
    while True:
        status = read_status(directory)
        if arguments.json and arguments.watch is not None:
            answer_json(as_json(status), in_one_line=True)
        elif arguments.json:
            answer_json(as_json(status))
        else:
            text = "\n".join(status_lines(status, time.time())) + "\n"
            if redraws:
                sys.stdout.write(_CLEAR)
            answer(text)
        if arguments.watch is None or not status.state.is_living:
            return 0
        time.sleep(arguments.watch)


def read_status(directory: Path) -> Status:
    """What is known of a run now.

    Raises:
        UsageError: there is no run in the directory.
    """
    state = state_of(directory)
    if state.name == "unknown":
        raise UsageError(f"{shorter_path(str(directory))} has no run.json that can be read", "see saferunctl list")
    status = Status(directory, state, waits=_read(directory, "waits.json"))
    if not state.is_living:
        return status
    try:
        live, reply = ask_living(directory, "status", patience_s=_COLLECTED_S)
        live.close()
        return status._replace(live=reply)
    except SaferunError as error:
        # A run that ends while it is asked gives no answer, and needs none.
        state = state_of(directory)
        return status._replace(state=state, unanswered=error.what if state.is_living else "")


def as_json(status: Status) -> JsonObject:
    """The same for programs."""
    record = status.state.record
    end = record.end if record is not None else None
    return {
        "run": str(status.directory),
        "run_id": record.run_id if record is not None else None,
        "state": status.state.name,
        "headline": status.state.headline,
        "started_at": record.started_at if record is not None else None,
        "exit_code": end.exit_code if end is not None else None,
        "live": status.live,
        "waits": status.waits,
    }


def status_lines(status: Status, now: float) -> Iterator[str]:
    """The lines for people. ``now``: seconds since the epoch."""
    record = status.state.record
    line = f"{shorter_path(str(status.directory))}: {status.state.name}"
    end = record.end if record is not None else None
    if end is not None:
        line += f" {duration_text(max(0.0, now - end.time))} ago, exit code {end.exit_code}"
    elif record is not None and record.started_at:
        line += f", started {duration_text(max(0.0, now - record.started_at))} ago"
    yield line
    if status.state.headline:
        yield f"  {status.state.headline}"
    if status.live is not None:
        from saferun.ctl.live_table import live_lines

        try:
            yield from list(live_lines(status.live))
        except MALFORMED:
            yield "  the answer of its saferun process cannot be read: use the saferunctl of the same version"
    elif status.unanswered:
        yield f"  {status.unanswered}"
    if status.waits is not None:
        try:
            yield from list(table_lines(status.waits, now))
        except MALFORMED:
            yield "  waits.json cannot be read"


def table_lines(content: JsonObject, now: float) -> Iterator[str]:
    """The lines of the table of waits.

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
        yield "  no waits to show: the ranks use GPUs, or do not wait in step"
        return
    width = max(len("host"), *(len(host) for _, host, _ in rows))
    yield f"  {'rank':>5}  {'host':<{width}}  waits"
    for rank, host, waited in rows:
        note = "  slow: the others wait for it" if rank in slow else ""
        yield f"  {rank:>5}  {host:<{width}}  {waited * 100:4.0f} %{note}"


def _read(directory: Path, name: str) -> JsonObject | None:
    try:
        fd = open_run(str(directory))
        try:
            content = read_json(fd, name, _MOST_BYTES)
        finally:
            os.close(fd)
    except (OSError, *MALFORMED):
        return None
    return content if isinstance(content, dict) else None
