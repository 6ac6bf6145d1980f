"""What a finished launch left to be seen, in comparable form.

Random parts are replaced by their names, and only where they have the form they should have: a port in the range of
ports, a run's folder with its eight random characters, an error file in a folder that can be written to. What has not
that form stays as it is, and so shows as a difference.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Observation = dict[str, Any]

# torch makes a number of it where the given run id is empty.
UUID_AS_NUMBER = re.compile(r"\d{30,39}")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
RUN_FOLDER = re.compile(r"^([a-z0-9-]+)_[a-z0-9_]{8}$")
SPOKEN = re.compile(r"probe: [^;\n]*;")
# A failed rank's last lines, which the report after an attempt repeats, the very last one in its first line too.
QUOTED = re.compile(r"^\s+\| .*$|^saferun: rank .*$|^  proof: .*$", re.MULTILINE)
EVENT = re.compile(r'^\{"name": "torchelastic\..*\}$', re.MULTILINE)
FRAME = re.compile(r'File "([^"]*)", line (\d+), in (\S+)')
# What of an event differs from launch to launch.
EVENT_CHANCE = {"run_id", "worker_id", "duration_ms", "total_run_time", "metadata.worker_pid"}
FIRST_USER_PORT, LAST_PORT = 1024, 65535


def observe(job: Path, port: int, launchers: set[int], *, lines: bool, events: bool) -> Observation:
    """Everything that is to be seen of a launch in its scratch folder.

    Args:
        job: the scratch folder, laid out as ``differential.py`` does.
        port: the port that the case may have named.
        launchers: the pids of the launchers.
        lines: keep the console's whole lines.
        events: keep the events on the console.
    """
    seen = console(job, lines=lines, events=events)
    seen |= records(job, port, launchers)
    seen |= log_folder(job)
    seen["working folder"] = sorted(set(os.listdir(job / "work")) - {"saferun-runs"})
    seen["launcher's error file"] = error_report(job / "report.json", job)
    return seen


def console(job: Path, *, lines: bool, events: bool) -> Observation:
    """What reached the launchers' streams. The order between ranks is chance, and so is not kept."""
    seen: Observation = {}
    for path in sorted(job.glob("console_*")):
        text = QUOTED.sub("", path.read_text(errors="backslashreplace"))
        if lines:
            seen[f"{path.name}: lines"] = sorted(line for line in text.splitlines() if "probe:" in line)
        seen[f"{path.name}: words"] = sorted(SPOKEN.findall(text))
        for event in map(json.loads, EVENT.findall(text) if events else ()):
            fields = event.pop("metadata")
            # The fields of one worker are lists of one.
            details = {f"metadata.{name}": value for name, value in json.loads(fields.pop("metadata")).items()}
            who = f"{event.pop('source')} {fields['state']} of rank {fields['global_rank']}, {fields['agent_restarts']}"
            for name, value in (event | fields | details).items():
                seen[f"{path.name} event {who}: {name}"] = type(value).__name__ if name in EVENT_CHANCE else value
    return seen


def records(job: Path, port: int, launchers: set[int]) -> Observation:
    """What every rank of every attempt wrote down, and what the ranks of an attempt have to agree on."""
    seen: Observation = {}
    meetings: dict[str, set[tuple[str, ...]]] = {}
    for path in sorted((job / "records").glob("*.json")):
        attempt, rank = path.stem.removeprefix("attempt_").split("-rank_")
        record = json.loads(path.read_text())
        env = record.pop("environment")
        meeting = tuple(env.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
        meetings.setdefault(f"attempt {attempt}: ranks agree where to meet", set()).add(meeting)
        named = {f"environment: {name}": value for name, value in with_names(env, record, port).items()}
        record["parent is the launcher"] = record.pop("parent") in launchers
        record["stdin"] = re.sub(r":\[\d+\]|(?<=/dev/pts/)\d+", "", record["stdin"])
        seen |= {f"rank {rank} attempt {attempt}: {name}": value for name, value in (named | record).items()}
    seen["ranks that wrote a record"] = len(list((job / "records").glob("*.json")))
    return seen | {path: len(meeting) == 1 for path, meeting in meetings.items()}


def with_names(env: dict[str, str], record: dict[str, Any], port: int) -> dict[str, str]:
    """An environment with names in the place of what is random in it."""
    named = {name: UUID.sub("<uuid>", value) for name, value in env.items()}
    if UUID_AS_NUMBER.fullmatch(env.get("TORCHELASTIC_RUN_ID", "")):
        named["TORCHELASTIC_RUN_ID"] = "<uuid as number>"
    if (found := env.get("MASTER_PORT", "")) == str(port):
        named["MASTER_PORT"] = "<the case's port>"
    elif found.isdecimal() and FIRST_USER_PORT <= int(found) <= LAST_PORT:
        named["MASTER_PORT"] = "<free port>"
    # Where the file lies, the ranks are told; that what they write reaches the log folder, the log folder shows.
    if record["error file can be written"] and env["TORCHELASTIC_ERROR_FILE"].endswith("/error.json"):
        named["TORCHELASTIC_ERROR_FILE"] = "<folder>/error.json"
    return named


def log_folder(job: Path) -> Observation:
    """All folders and files below the folder given to ``--log-dir``."""
    seen: Observation = {}
    root = job / "logs"
    for path in sorted(root.rglob("*")):
        names = [UUID.sub("<uuid>", RUN_FOLDER.sub(r"\1_<random>", name)) for name in path.relative_to(root).parts]
        seen["logs: " + "/".join(names)] = "(folder)" if path.is_dir() else contents(path, job)
    return seen


def contents(path: Path, job: Path) -> Any:
    """What a log file holds."""
    if path.name == "error.json":
        return error_report(path, job)
    text = path.read_text(errors="backslashreplace")
    # One file for all ranks: the order between them is chance.
    return sorted(text.splitlines(keepends=True)) if path.name.startswith("filtered_") else text


def error_report(path: Path, job: Path) -> Any:
    """An error file: the message, and of the call stack the part that belongs to the job."""
    if not path.exists():
        return "(no file)"
    text = path.read_text()
    try:
        report = json.loads(text)
    except ValueError:
        return text
    message = report.get("message")
    if isinstance(message, dict):
        message["message"] = re.sub(r"Process \d+", "Process <pid>", message["message"])
        extra = message.get("extraInfo", {})
        if extra.get("timestamp", "").isdecimal():
            extra["timestamp"] = "<time>"
        if stack := extra.get("py_callstack"):
            own = [list(frame) for frame in FRAME.findall(stack) if frame[0].startswith(str(job))]
            # A launcher's own stack is its own affair.
            extra["py_callstack"] = [*own, stack.splitlines()[-1]] if own else "<the launcher's>"
    return report
