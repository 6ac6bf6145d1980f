"""What a launch has left in its run directory, and in its output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saferun.api.rank_function import read_private
from saferun.errors import suppress
from saferun.files.run_dir import BASE
from saferun.files.run_files import host_names, names_in, open_run, read_run_record
from saferun.files.run_index import index_path, read_index
from saferun.files.run_removal import open_base, run_names
from saferun.text.decoding import MALFORMED, loads

_LONGEST_EVENTS = 64 << 20
_CANDIDATES = 50
_CLOCK_S = 5.0
_LONGEST_PRINTED = 1 << 20
_HEADLINE, _HINT = "saferun: ", "hint: "


def run_dir(pid: int, began: float, options: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The run directory of a launch; None: there is none.

    Args:
        pid: of its supervisor.
        began: not later than its start, in seconds since the epoch.
        options: those of its command line.
        environ: its environment.
    """
    for path in _candidates(options, environ):
        with suppress(OSError):
            fd = open_run(path)
            try:
                record = read_run_record(fd)
            finally:
                os.close(fd)
            is_it = record is not None and record.process is not None and record.process.pid == pid
            if is_it and record is not None and record.started_at >= began - _CLOCK_S:
                return os.path.abspath(path)
    return None


def _candidates(options: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    named = environ.get("SAFERUN_RUN_DIR", "")
    for option, value in zip(options, [*options[1:], ""], strict=False):
        flag, equals, rest = option.replace("_", "-").partition("=")
        if flag == "--run-dir":
            named = option.partition("=")[2] if equals and rest else value
    if named:
        yield named
    with suppress(OSError):
        fd = open_base(BASE)
        try:
            names = run_names(fd)
        finally:
            os.close(fd)
        yield from (os.path.join(BASE, name) for name in names[:_CANDIDATES])
    yield from (entry.path for entry in read_index(index_path(environ))[:_CANDIDATES])


def rank_exit_codes(path: str) -> dict[int, int]:
    """How the ranks of the last attempt ended, as the events of the run say."""
    codes: dict[int, dict[int, int]] = {}
    with suppress(OSError):
        fd = open_run(path)
        try:
            for host in host_names(fd):
                ranks: dict[tuple[int, int], int] = {}
                for event in _events(fd, host):
                    with suppress(*MALFORMED):
                        _take(event, ranks, codes)
        finally:
            os.close(fd)
    return dict(sorted(codes[max(codes)].items())) if codes else {}


def _take(event: dict[str, Any], ranks: dict[tuple[int, int], int], codes: dict[int, dict[int, int]]) -> None:
    attempt = int(event["attempt"])
    if event["event"] == "HostsJoined":
        for assignment in event["placement"]["ranks"]:
            ranks[attempt, int(assignment["local_rank"])] = int(assignment["rank"])
    elif event["event"] == "RankExited":
        status, local_rank = event["status"], int(event["local_rank"])
        code = int(status["code"]) if status["code"] is not None else -int(status["signum"])
        codes.setdefault(attempt, {})[ranks.get((attempt, local_rank), local_rank)] = code


def printed_failure(stderr: str) -> tuple[str, str]:
    """The headline and the hint of a launch that has failed, as it has printed them.

    Warnings are single lines, before it and after it. What says why a launch has failed has more of them.

    Args:
        stderr: what the launch has printed there; at most the last MiB is read.

    Returns:
        The two, without ``saferun:`` and ``hint:``; empty where there is none.
    """
    messages: list[list[str]] = []
    is_open = False
    for line in stderr[-_LONGEST_PRINTED:].splitlines():
        if line.startswith(_HEADLINE):
            messages.append([line])
        elif is_open and line.startswith((_HINT, "  ")):
            messages[-1].append(line)
        else:
            is_open = False
            continue
        is_open = True
    if not messages:
        return "", ""
    first, *rest = next((message for message in reversed(messages) if len(message) > 1), messages[-1])
    hint = next((line for line in rest if line.startswith(_HINT)), "")
    return first.removeprefix(_HEADLINE), hint.removeprefix(_HINT)


def _events(fd: int, host: str) -> Iterator[dict[str, Any]]:
    below = os.open(host, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        for name in names_in(below, _CANDIDATES):
            if name.startswith("events") and name.endswith(".jsonl"):
                content = read_private(name, below)[:_LONGEST_EVENTS]
                for line in content.splitlines():
                    if b'"RankExited"' in line or b'"HostsJoined"' in line:
                        with suppress(*MALFORMED):
                            yield loads(line)
    finally:
        os.close(below)
