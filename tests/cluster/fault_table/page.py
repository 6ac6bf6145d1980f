"""Plays rows, prints what came of each, and writes the table of docs/faults.md."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.cluster.fault_table import rows_healthy, rows_networks, rows_processes, rows_starts
from tests.cluster.fault_table.stage import Result, Row, Stage
from tests.cluster.machines.cluster import REPOSITORY, Cluster

PAGE = REPOSITORY / "docs" / "faults.md"
SECTIONS = {
    "Jobs without a fault": rows_healthy.ROWS,
    "Processes that fail, are killed or stop": rows_processes.ROWS,
    "Networks and hosts": rows_networks.ROWS,
    "Starts": rows_starts.ROWS,
}
ROWS: tuple[Row, ...] = tuple(row for rows in SECTIONS.values() for row in rows)
_LONGEST_WORDS = 230
# What differs from run to run, or is where these tests are.
_FOLDERS = re.compile(r"/tmp/faults-\w+/")
_HEALTHY = ("| started by | end after (s) | exit codes | verdict |", "| --- | --- | --- | --- |")
_FAULTS = (
    "| fault | started by | message | message after (s) | end after (s) | exit codes | verdict | torchrun |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)
_INTRO = """\
# What saferun prints for which fault

`python -m tests.cluster faults` has caused each fault on real hosts and written these tables. The hosts are namespaces
with two networks each, Slurm, Open MPI, MPICH and pdsh (`tests/cluster`). Most jobs have three hosts with one rank
each, a hang timeout of 15 s (`--hang-timeout`), a host timeout of 10 s (`--host-timeout`), and wait 14 s for hosts that
do not come (`--start-timeout`).

| column | meaning |
| --- | --- |
| message | what saferun prints that names the host and the cause |
| message after (s) | seconds from the fault (or the launch, if the fault came first) to that message on a console |
| end after (s) | seconds from the same moment to the end of the last launcher |
| verdict | `right`, or what was not as expected |
| torchrun | what torchrun 2.13 did at the same fault, measured earlier; empty: not measured |

A row is right if the message, the advice, the consoles that have them and the exit codes are as expected, no other
host is blamed, no message is repeated, and no process and no file is left on any host. `tests/cluster/fault_table`
has these expectations, several where it depends on chance which host is first. Some of them, and the time limits,
were changed after a first run had been read. torchrun was measured with four hosts on the same kind of cluster with
idle processors, and watched for 180 s.

{machine}
"""


def play(row: Row, keep: Path | None = None) -> Result:
    """Play a row on a cluster of its own."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        with Cluster.start(row.hosts, slurm=row.slurm, visible=[folder]) as cluster:
            stage = Stage(cluster, folder, row)
            try:
                row.play(stage)
            except AssertionError as error:
                stage.remarks.append(f"not played to the end: {str(error).splitlines()[0]}")
            result = stage.result(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{row.name}.txt").write_text(f"{told(result)}\n{result.consoles}")
        fields = {name: value for name, value in result._asdict().items() if name not in {"row", "consoles"}}
        (keep / f"{row.name}.json").write_text(json.dumps(fields))
    return result


def told(result: Result) -> str:
    """A result in a few lines."""
    verdict = "right" if not result.wrong else "WRONG"
    seconds = f"words {_seconds(result.words_s)} s, end {_seconds(result.end_s)} s"
    figures = f"{seconds}, codes {result.codes}, load {result.load:.0f}"
    return "\n  ".join([f"{verdict} {result.row.name}: {figures}: {result.words}", *result.wrong])


def main(names: Sequence[str], keep: Path | None, *, write: bool) -> int:
    """Play these rows, by default all.

    Args:
        names: regular expressions of rows.
        keep: where what all consoles said is kept.
        write: whether docs/faults.md gets what came of these rows, and of those that are kept in ``keep``; the others
            stay as they are.
    """
    chosen = [row for row in ROWS if not names or any(re.fullmatch(name, row.name) for name in names)]
    results = []
    for row in chosen:
        results.append(play(row, keep))
        sys.stdout.write(told(results[-1]) + "\n")
        sys.stdout.flush()
    wrong = sum(bool(result.wrong) for result in results)
    sys.stdout.write(f"{len(results) - wrong} of {len(results)} rows right\n")
    if write:
        kept = {result.row.name: result for result in results}
        everything = {**(_kept(keep) if keep is not None else {}), **kept}
        PAGE.write_text(page(everything, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if wrong else 0


def _kept(keep: Path) -> dict[str, Result]:
    """What came of rows that were played before."""
    found = {}
    for row in ROWS:
        path = keep / f"{row.name}.json"
        if path.exists():
            fields: dict[str, Any] = json.loads(path.read_text())
            found[row.name] = Result(row=row, consoles="", **{**fields, "wrong": tuple(fields["wrong"])})
    return found


def page(results: dict[str, Result], before: str) -> str:
    """The document.

    Args:
        results: by name of the row; of the other rows that stays which is in the document now.
        before: the document as it is.
    """
    loads = [result.load for result in results.values()]
    loads += map(float, re.findall(r"load (\d+)-(\d+)", before)[0] if len(results) < len(ROWS) else ())
    cores = len(os.sched_getaffinity(0))
    old = before.splitlines()
    lines = {row.name: _line(row, results.get(row.name), old) for row in ROWS}
    verdicts = ["| right |" in line for line in lines.values() if line]
    versions = f"Linux {platform.release()}, Python {platform.python_version()}, torch {version('torch')}"
    machine = (
        f"{sum(verdicts)} of {len(verdicts)} rows are right. {cores} cores, load {min(loads):.0f}-{max(loads):.0f}\n"
        f"during the runs (most of it by other programs, so the seconds are upper bounds), {versions}."
    )
    parts = [_INTRO.format(machine=machine)]
    for title, rows in SECTIONS.items():
        table = [
            *(_HEALTHY if rows is rows_healthy.ROWS else _FAULTS),
            *filter(None, (lines[row.name] for row in rows)),
        ]
        parts.append(f"## {title}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _line(row: Row, result: Result | None, old: list[str]) -> str:
    """A row of a table: that of its result, else the one of the document; empty where there is neither.

    Args:
        row: which it is.
        result: what came of it, if it was played.
        old: the document's lines that belong to no other row before this one; its own is taken out.
    """
    is_healthy = row in rows_healthy.ROWS
    cells = [row.launch] if is_healthy else [row.fault, row.launch]
    begin = f"| {' | '.join(cells)} |"
    index = next((number for number, line in enumerate(old) if line.startswith(begin)), None)
    line = old.pop(index) if index is not None else ""
    if result is None:
        return line
    if is_healthy:
        cells += [_seconds(result.end_s), result.codes, _verdict(result)]
    else:
        cells.append(f"`{_short(result.words)}`" if result.words else "nothing")
        cells += [_seconds(result.words_s), _seconds(result.end_s), result.codes, _verdict(result), row.torchrun]
    return f"| {' | '.join(cells)} |"


def _verdict(result: Result) -> str:
    return "right" if not result.wrong else f"**wrong**: {'; '.join(map(_short, result.wrong))}"


def _short(text: str) -> str:
    text = _FOLDERS.sub("", text).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= _LONGEST_WORDS else f"{text[: _LONGEST_WORDS - 1]}…"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"
