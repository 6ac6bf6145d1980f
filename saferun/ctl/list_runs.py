"""``saferunctl list``: the runs of this user, one line each."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterable
from itertools import islice

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.run_directory import FoundRun, known_runs, runs_here
from saferun.errors import UsageError
from saferun.files.run_files import RunState, open_run, read_state, size_bytes
from saferun.model import JsonObject, Value
from saferun.text.wording import size_text

_SHOWN = 30
# Sizes of large directories on slow file systems.
_COUNTING_S = 10.0
_LONGEST_OUTCOME = 120
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


class ListedRun(Value):
    """A run as it is listed. ``size_bytes`` is None where it could not be counted in time."""

    run: FoundRun
    state: RunState
    age_s: float
    size_bytes: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument("-n", type=int, default=_SHOWN, metavar="N", help=f"the newest N (default: {_SHOWN}); 0: all")
    parser.add_argument("--here", action="store_true", help="only those in ./saferun-runs")
    parser.add_argument("--running", action="store_true", help="only those that run")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    if arguments.n < 0:
        raise UsageError(f"-n {arguments.n} is negative", "use 0 for all runs")
    now = time.time()
    known = runs_here() if arguments.here else known_runs()
    runs = sorted(known, key=lambda run: (run.date, run.name), reverse=True)
    rows: Iterable[ListedRun] = _rows(runs, now)
    if arguments.running:
        rows = (row for row in rows if row.state.is_living)
    shown = list(islice(rows, arguments.n or None))
    # How many others run is not counted: that takes a look at each.
    others = "" if arguments.running else f" of {len(runs)}"
    if arguments.json:
        answer_json({"runs": [_as_json(row) for row in shown]})
        return 0
    lines = list_lines(shown)
    if not shown:
        lines = ["no runs" + (" here" if arguments.here else "") + (" that are running" if arguments.running else "")]
    # First of all what is known: further runs may be on a file system that does not answer.
    answer("".join(f"{line}\n" for line in lines))
    if (
        shown
        and len(runs) > len(shown)
        and len(shown) == arguments.n
        and (not arguments.running or next(iter(rows), 0))
    ):
        answer(f"the newest {len(shown)}{others} (all: -n 0)\n")
    return 0


def _rows(runs: Iterable[FoundRun], now: float) -> Iterable[ListedRun]:
    until = time.monotonic() + _COUNTING_S
    for run in runs:
        try:
            fd = open_run(run.path)
        except OSError:
            continue
        try:
            state = read_state(fd, now)
            size, is_all = size_bytes(fd, until)
            record = state.record
            started_at = record.started_at if record is not None else 0.0
            age_s = now - (started_at or os.fstat(fd).st_mtime)
        finally:
            os.close(fd)
        yield ListedRun(run, state, max(age_s, 0.0), size if is_all else None)


def list_lines(rows: Iterable[ListedRun]) -> list[str]:
    """The table: state, age, size, directory, and what went wrong, or else the command."""
    table = [
        (
            row.state.name,
            age_text(row.age_s),
            size_text(row.size_bytes) if row.size_bytes is not None else "?",
            row.run.shown,
            outcome_text(row.state),
        )
        for row in rows
    ]
    widths = [max((len(line[column]) for line in table), default=0) for column in range(4)]
    return [
        f"{state:<{widths[0]}}  {age:>{widths[1]}}  {size:>{widths[2]}}  {path:<{widths[3]}}  {outcome}".rstrip()
        for state, age, size, path, outcome in table
    ]


def age_text(age_s: float) -> str:
    """``45 s``, ``12 min``, ``5 h``, ``3 d``: one unit is enough."""
    if age_s < 2 * _MINUTE_S:
        return f"{age_s:.0f} s"
    if age_s < 2 * _HOUR_S:
        return f"{age_s / _MINUTE_S:.0f} min"
    return f"{age_s / _HOUR_S:.0f} h" if age_s < 2 * _DAY_S else f"{age_s / _DAY_S:.0f} d"


def outcome_text(state: RunState) -> str:
    """What went wrong, or else the command."""
    record = state.record
    text = state.headline or (f"saferun {shlex.join(record.command)}" if record is not None else "")
    if record is not None and record.end is not None and record.end.exit_code and not state.headline:
        text = f"exit code {record.end.exit_code}: {text}"
    return text if len(text) <= _LONGEST_OUTCOME else text[: _LONGEST_OUTCOME - 1] + "…"


def _as_json(row: ListedRun) -> JsonObject:
    record = row.state.record
    end = record.end if record is not None else None
    return {
        "path": row.run.path,
        "run_id": record.run_id if record is not None else row.run.run_id,
        "state": row.state.name,
        "started_at": record.started_at if record is not None else None,
        "ended_at": end.time if end is not None else None,
        "exit_code": end.exit_code if end is not None else None,
        "age_s": row.age_s,
        "size_bytes": row.size_bytes,
        "headline": row.state.headline,
        "command": list(record.command) if record is not None else [],
        "host": record.host if record is not None else "",
    }
