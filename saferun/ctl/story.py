"""``saferunctl story``: the last events of a run in which something went wrong, and what saferun did about them."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.run_directory import add_run_argument, find_run
from saferun.errors import UsageError, suppress
from saferun.files.run_dir import shorter_path
from saferun.files.run_files import host_names, names_in, open_below, open_run
from saferun.linux.ownership import CAREFULLY, check_regular
from saferun.model import JsonObject
from saferun.text.decoding import MALFORMED, loads

_INDENT = " " * 14
_MOST_NAMES = 100_000
_MOST_BYTES = 16 << 20
_LONGEST_LINE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="as JSON: the entries of each file")


def run(arguments: argparse.Namespace) -> int:
    """Print the story of each host."""
    directory = find_run(arguments.run_dir)
    paths = _paths(directory)
    if not paths:
        raise UsageError(
            f"there is no story in {shorter_path(str(directory))}",
            "one is written when something goes wrong: a failure, a hang, an error of saferun itself",
        )
    if arguments.json:
        answer_json({"stories": [{"file": str(path), "entries": list(_entries(path))} for path in paths]})
        return 0
    answer("\n".join("\n".join((f"{shorter_path(str(path))}:", *_lines(path), "")) for path in paths))
    return 0


def _paths(directory: Path) -> list[Path]:
    try:
        fd = open_run(str(directory))
    except OSError:
        return []
    found: list[Path] = []
    try:
        for host in host_names(fd):
            below = open_below(fd, host)
            if below < 0:
                continue
            try:
                names = sorted(names_in(below, _MOST_NAMES))
            finally:
                os.close(below)
            found += [directory / host / name for name in names if name.startswith("story") and name.endswith(".jsonl")]
    finally:
        os.close(fd)
    return found


def _read(path: Path) -> Iterator[str]:
    """The lines of a file, up to a bound.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | CAREFULLY)
    with open(fd, "rb") as file:
        check_regular(os.fstat(fd), str(path))
        left = _MOST_BYTES
        while left > 0 and (line := file.readline(_LONGEST_LINE)):
            left -= len(line)
            yield line.rstrip(b"\n").decode(errors="replace")


def _entries(path: Path) -> Iterator[JsonObject]:
    with suppress(OSError):
        for line in _read(path):
            with suppress(*MALFORMED):
                yield loads(line)


def _lines(path: Path) -> Iterator[str]:
    try:
        for line in _read(path):
            try:
                yield from list(_entry_lines(loads(line)))
            except (OSError, *MALFORMED):
                yield f"{_INDENT}(a line that cannot be read)"
    except OSError as error:
        yield f"cannot be read: {error.strerror}"


def _entry_lines(entry: JsonObject) -> Iterator[str]:
    seconds = float(entry["time"])
    clock = time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}"
    before, after = str(entry["before"]), str(entry["after"])
    states = before if before == after else f"{before} -> {after}"
    remark = f"  ({entry['remark']})" if entry.get("remark") else ""
    yield f"{clock}  attempt {entry['attempt']}  {states}: {_call(entry['event'])}{remark}"
    for action in entry["actions"]:
        yield f"{_INDENT}{_call(action)}"


def _call(value: JsonObject) -> str:
    fields = {name: json.dumps(item, ensure_ascii=False) for name, item in value.items() if name != "name"}
    return f"{value['name']}({', '.join(f'{name}={text}' for name, text in fields.items())})"
