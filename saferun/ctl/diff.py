"""``saferunctl diff``: how two runs differ, in what they were asked to do, where they ran, and how they ended."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.run_directory import PLAIN_RUN_HELP, find_run
from saferun.errors import UsageError
from saferun.files.run_dir import BASE, shorter_path
from saferun.files.run_files import RUN_JSON, host_names, open_run, read_json, read_state
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED
from saferun.text.wording import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LONGEST = 400
_ABSENT = "(not set)"
# Of each run its own, whatever it was asked to do.
_OWN = frozenset({"MASTER_PORT", "rdzv_id", "run_dir", "show_config", "dry_run"})


class Side(Value):
    """One of the two runs: the rows of each section, by name."""

    path: str
    sections: Mapping[str, Mapping[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument("first", metavar="RUN", help=PLAIN_RUN_HELP)
    parser.add_argument("second", metavar="OTHER", help="the run to compare it with, named in the same way")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what differs."""
    first, second = (_read(str(find_run(word))) for word in (arguments.first, arguments.second))
    if arguments.json:
        answer_json(
            {
                "first": first.path,
                "second": second.path,
                "differences": {
                    section: {name: [before, after] for name, before, after in rows}
                    for section, rows in differences(first, second)
                },
            }
        )
        return 0
    lines = [f"- {shorter_path(first.path)}", f"+ {shorter_path(second.path)}"]
    for section, rows in differences(first, second):
        lines += ["", f"{section}:"]
        for name, before, after in rows:
            lines += [f"  - {name}: {_shown(before)}", f"  + {name}: {_shown(after)}"]
    if len(lines) == 2:  # noqa: PLR2004 - the names of the two
        lines += ["", "no differences"]
    answer("".join(f"{line}\n" for line in lines))
    return 0


def differences(first: Side, second: Side) -> Iterator[tuple[str, list[tuple[str, str | None, str | None]]]]:
    """The sections in which two runs differ, each with the name, the first value and the second of what differs."""
    for section in dict.fromkeys([*first.sections, *second.sections]):
        before, after = first.sections.get(section, {}), second.sections.get(section, {})
        names = dict.fromkeys([*before, *after])
        rows = [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
        if rows:
            yield section, rows


def _shown(value: str | None) -> str:
    if value is None:
        return _ABSENT
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"


def _read(path: str) -> Side:
    try:
        fd = open_run(path)
        try:
            return Side(path, _sections(read_json(fd, RUN_JSON), fd, path))
        finally:
            os.close(fd)
    except OSError as error:
        raise UsageError(f"{shorter_path(path)}/{RUN_JSON}: {error.strerror}", "name another run") from None
    except MALFORMED:
        raise UsageError(f"{shorter_path(path)}/{RUN_JSON} cannot be read", "name another run") from None


def _sections(content: JsonObject, fd: int, path: str) -> dict[str, dict[str, str]]:
    state = read_state(fd)
    end = state.record.end if state.record is not None else None
    outcome = {"state": state.name}
    if end is not None and state.record is not None:
        outcome["exit code"] = str(end.exit_code)
        if state.record.started_at:
            outcome["duration"] = duration_text(max(end.time - state.record.started_at, 0.0))
    if state.headline:
        outcome["headline"] = state.headline
    settings = content.get("settings") or {}
    paths = (path, _earlier_path(content, settings))
    return {
        "outcome": outcome,
        "command": {
            "saferun": " ".join(map(str, content["command"])),
            "rank": " ".join(map(str, content.get("rank_command") or [])),
            "directory": str(content.get("cwd")),
        },
        "versions": {name: _text(value, paths) for name, value in dict(content.get("versions") or {}).items()},
        "settings": {
            str(name): _text(setting["value"], paths) for name, setting in settings.items() if name not in _OWN
        },
        "hosts": {
            "hosts": " ".join(host_names(fd)),
            "ranks per host": str(content.get("nproc_per_node")),
        },
        "environment": {
            str(name): _text(value, paths)
            for name, value in dict(content.get("environment") or {}).items()
            if name not in _OWN
        },
    }


def _earlier_path(content: JsonObject, settings: JsonObject) -> str:
    """Where a run directory was while its run lasted: it may have been moved since. Empty: that is not known."""
    chosen, name = (settings.get("run_dir") or {}).get("value"), content.get("directory")
    place = str(chosen) if chosen else os.path.join(BASE, str(name)) if name else ""
    return os.path.normpath(os.path.join(str(content.get("cwd") or ""), place)) if place else ""


def _text(value: Any, paths: Iterable[str]) -> str:  # noqa: ANN401 - JSON
    """A value, with the run directory as {run_dir}: each run has another one."""
    text = value if isinstance(value, str) else json.dumps(value)
    for path in filter(None, paths):
        text = text.replace(path, "{run_dir}")
    return text
