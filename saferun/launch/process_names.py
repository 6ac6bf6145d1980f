"""How processes are named in a line for the user: how many, and their command lines, short and without secrets."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.linux.procfs import read_cmdline

MOST_NAMED = 4
_LONGEST_NAME = 60


def process_count(pids: list[int]) -> str:
    """``1 process``, ``2 processes``."""
    return "1 process" if len(pids) == 1 else f"{len(pids)} processes"


def process_names(pids: list[int], name_of: Mapping[int, str] | None = None) -> str:
    """``aws s3 sync … (pid 12), sleep 600 (pid 13, 14)``. ``name_of``: the names, where they have been read."""
    by_name: dict[str, list[int]] = {}
    for pid in pids:
        by_name.setdefault(name_of[pid] if name_of is not None else process_name(pid), []).append(pid)
    return _listed(by_name)


def _listed(by_name: Mapping[str, list[int]]) -> str:
    shown = [
        f"{name} (pid {', '.join(map(str, pids[:MOST_NAMED]))}{', …' if len(pids) > MOST_NAMED else ''})"
        for name, pids in list(by_name.items())[:MOST_NAMED]
    ]
    return ", ".join([*shown, *(["…"] if len(by_name) > MOST_NAMED else [])])


def process_name(pid: int) -> str:
    """A process's command line, short, without secrets and on one line."""
    arguments = read_cmdline(pid)
    try:
        from saferun.text.redaction import redacted_arguments

        arguments = redacted_arguments(arguments)
    except ImportError:  # its file cannot be read, and what follows the program's name may be secret
        arguments = arguments[:1]
    text = " ".join(arguments) or "a process without a command line"
    text = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"
