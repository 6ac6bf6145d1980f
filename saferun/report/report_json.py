"""report.json: what went wrong in a launch, for programs. Pure.

The fields are described in ``docs/report.md`` and checked by ``schema/report.schema.json``. Every field is always
there. Secrets are redacted, and the size is bounded, whatever the ranks wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from saferun import __version__
from saferun.evidence import (
    Cause,
    CoreLook,
    Diagnosis,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    HostSight,
    OomKill,
    ProcessLook,
    RankCollectives,
    RankOutput,
    StuckLink,
    ToldTrouble,
)
from saferun.model import JsonObject, RankEnd, signal_name
from saferun.report.picture import Branch, branches_of, shown
from saferun.report.redaction import REDACTED, is_secret, redacted_arguments, redacted_text

SCHEMA = "saferun.report/1"
LIMIT_BYTES = 2 << 20
"""How large the report is at most, as it is written (indented by one)."""
_FIRST_INCIDENTS = 10
_LAST_INCIDENTS = 40
_RUN_BYTES = 1 << 17
_LONGEST_TEXT = 1000
_SHORTEST_TEXT = 100
_MOST = 20_000
_MOST_FRAMES = 200
# An upper bound of what an object takes besides its texts, of a name and its indentation, and of a number in a list.
_OBJECT_BYTES = 400
_FIELD_BYTES = 40
_ITEM_BYTES = 10
_LARGEST_INTEGER = (1 << 63) - 1

Kind = Literal["hang", "failure"]
Outcome = Literal["running", "succeeded", "failed", "stopped"]
Followed = Literal["continued", "recovered", "stopped", "restarted", "ended"]
_FOLLOWED = ("continued", "recovered", "stopped", "restarted", "ended")

_T = TypeVar("_T")


class Run(NamedTuple):
    """A launch, as one host sees it.

    Attributes:
        run_id: what marks its processes.
        host: the host's short name.
        command: saferun's command line.
        started_at: seconds since the epoch.
        ended_at: the same; None while it runs.
        exit_code: saferun's; None while it runs.
        outcome: ``stopped``: by the user or the scheduler.
        files: the run directory; empty where there is none.
        clock: when it started, as it is to be shown; empty where that is not wanted.
    """

    run_id: str
    host: str
    command: tuple[str, ...]
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    outcome: Outcome = "running"
    files: str = ""
    clock: str = ""


class Incident(NamedTuple):
    """A hang, or the failure of an attempt.

    Attributes:
        kind: which of them.
        attempt: 0 for the first.
        at: seconds since the epoch.
        evidence: what was seen. ``evidence.hang`` is the verdict.
        diagnosis: what follows from it.
        followed: what happened then. ``ended``: the launch failed of it.
        recovered_after_s: after ``recovered``, how long nothing had moved.
        said: what the user was told on the console.
        directory: where the capture's files are; empty where there are none.
        clock: when it was, as it is to be shown; empty where that is not wanted.
    """

    kind: Kind
    attempt: int
    at: float
    evidence: Evidence
    diagnosis: Diagnosis
    followed: Followed = "continued"
    recovered_after_s: float | None = None
    said: tuple[str, ...] = ()
    directory: str = ""
    clock: str = ""


def build_report(run: Run, incidents: Sequence[Incident]) -> JsonObject:
    """The content of report.json, at most ``LIMIT_BYTES`` large, in time that depends on that and not on the ranks.

    Each incident has the same share. Where it has more to say, lists are cut (``cut`` of the incident names them), at
    last incidents are left out (``incidents_left_out``).
    """
    kept = first_and_last(incidents)
    page = _Page(_RUN_BYTES)
    described = {
        "run_id": page.text(run.run_id),
        "host": page.text(run.host),
        "command": page.first("command", redacted_command(run.command), page.text),
        "started_at": _number(run.started_at),
        "ended_at": _number(run.ended_at),
        "exit_code": _integer(run.exit_code) if run.exit_code is not None else None,
        "outcome": run.outcome,
        "files": page.text(run.files),
    }
    room_bytes = LIMIT_BYTES - _RUN_BYTES
    entries = []
    for incident in kept:
        # A quarter is for what cannot be cut.
        share = _Page(room_bytes * 3 // (4 * len(kept)))
        content = _incident(incident, share)
        entries.append((content, share.used_bytes))
    while sum(used for _, used in entries) > room_bytes:
        del entries[len(entries) // 2]
    return {
        "schema": SCHEMA,
        "saferun": __version__,
        "run": described,
        "incidents": [content for content, _ in entries],
        "incidents_left_out": len(incidents) - len(entries),
    }


def first_and_last(incidents: Sequence[Incident]) -> list[Incident]:
    """The incidents that a report tells of: the first ten and the last forty."""
    if len(incidents) <= _FIRST_INCIDENTS + _LAST_INCIDENTS:
        return [*incidents]
    return [*incidents[:_FIRST_INCIDENTS], *incidents[-_LAST_INCIDENTS:]]


# -------------------------------------------------------------------------------------------------------------- bounds


class _Page:
    """Turns values into JSON within a number of bytes, and remembers what had to be cut.

    What is counted is at least what the values take when they are written, indented by one.

    Args:
        size_bytes: how much there may be.
    """

    def __init__(self, size_bytes: int) -> None:
        self.used_bytes = _OBJECT_BYTES * 4
        self.cut: set[str] = set()
        self._size_bytes = size_bytes
        # Names are short; a text that is not may not take more than a small part of everything.
        self._longest = max(min(_LONGEST_TEXT, size_bytes // 400), _SHORTEST_TEXT)

    def text(self, value: str) -> str:
        line = redacted_line(value, self._longest)
        self.used_bytes += len(json.dumps(line)) + _FIELD_BYTES
        return line

    def command(self, value: str) -> str:
        line = redacted_command_line(value, self._longest)
        self.used_bytes += len(json.dumps(line)) + _FIELD_BYTES
        return line

    def first(self, name: str, values: Sequence[_T], convert: Callable[[_T], Any], most: int = _MOST) -> list[Any]:
        """The first values, as many as half of the room that is left holds: there is more to come."""
        converted: list[Any] = []
        self.used_bytes += _FIELD_BYTES
        floor = (self._size_bytes - self.used_bytes) // 2
        for value in values[:most]:
            if self._size_bytes - self.used_bytes < floor + _FIELD_BYTES:
                break
            converted.append(convert(value))
        if len(converted) < len(values):
            self.cut.add(name)
        return converted

    def objects(self, name: str, values: Sequence[_T], convert: Callable[[_T], JsonObject]) -> list[Any]:
        """The same for values that become objects."""

        def counted(value: _T) -> JsonObject:
            self.used_bytes += _OBJECT_BYTES
            return convert(value)

        return self.first(name, values, counted)

    def lines(self, name: str, values: Sequence[str]) -> list[Any]:
        """The last lines."""
        return self.first(name, values[::-1], self.text)[::-1]

    def ranks(self, name: str, values: Iterable[int]) -> list[Any]:
        """Ranks in order."""

        def counted(rank: int) -> int:
            self.used_bytes += len(str(rank)) + _ITEM_BYTES
            return rank

        return self.first(name, sorted({_count(value) for value in values}), counted)

    def frames(self, name: str, frames: Sequence[Frame]) -> tuple[list[Any], int]:
        """Calls, outermost first, without their middle where there are too many; and how many are missing."""
        is_long = len(frames) > _MOST_FRAMES
        inner = frames[_MOST_FRAMES // 4 - _MOST_FRAMES :] if is_long else frames
        tail = self.first(name, inner[::-1], self._frame)[::-1]
        head = self.first(name, frames[: _MOST_FRAMES // 4], self._frame) if is_long else []
        left_out = len(frames) - len(head) - len(tail)
        if left_out:
            self.cut.add(name)
        return [*head, *tail], left_out

    def _frame(self, frame: Frame) -> JsonObject:
        self.used_bytes += _OBJECT_BYTES // 4
        return {
            "function": self.text(frame.function),
            "file": self.text(frame.file),
            "line": _count(frame.line),
            "native": bool(frame.native),
        }


def redacted_line(text: str, limit: int = 1000) -> str:
    """A text from outside as one line without control characters and secrets, at most ``limit`` characters long."""
    # A secret may stand across the limit: it is replaced first.
    line = shown(text, 2 * limit)
    if is_secret(line) or "://" in line:
        try:
            line = redacted_text(line)
        except RecursionError:
            return REDACTED
    return shown(line, limit)


def redacted_command(argv: Sequence[str]) -> list[str]:
    """A command line without the values of options that hold secrets."""
    try:
        return redacted_arguments([shown(argument, 2000) for argument in argv[:1000]])
    except RecursionError:
        return [REDACTED]


def redacted_command_line(command: str, limit: int = 1000) -> str:
    """The same for a command line that is one text."""
    return shown(" ".join(redacted_command(shown(command, 2 * limit).split(" "))), limit)


def _integer(value: int) -> int:
    return max(-_LARGEST_INTEGER, min(int(value), _LARGEST_INTEGER))


def _count(value: int) -> int:
    return max(_integer(value), 0)


def _number(value: float | None) -> float | None:
    """JSON knows neither infinity nor NaN."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 6)


# ----------------------------------------------------------------------------------------------------------- incidents


def _incident(incident: Incident, page: _Page) -> JsonObject:
    evidence, diagnosis = incident.evidence, incident.diagnosis
    capture = evidence.capture
    cause = diagnosis.cause
    followed = followed_by(incident)
    content: JsonObject = {
        "kind": incident.kind,
        "host": page.text(evidence.host),
        "attempt": _count(incident.attempt),
        "at": _number(incident.at),
        "directory": page.text(incident.directory),
        "headline": page.text(diagnosis.headline),
        "hint": page.text(diagnosis.hint),
        "verdict": _verdict(page, evidence.hang) if evidence.hang is not None else None,
        "cause": _cause(page, cause) if cause is not None else None,
        "first": _end(page, diagnosis.first) if diagnosis.first is not None else None,
        "output": _output(page, diagnosis.output) if diagnosis.output is not None else None,
        "also_failed": page.objects("also_failed", diagnosis.also_failed, lambda end: _end(page, end)),
        "victims": page.ranks("victims", diagnosis.victims),
        "stopped": page.ranks("stopped", diagnosis.stopped),
        "abandoned_local_ranks": page.ranks("abandoned_local_ranks", diagnosis.abandoned),
        "unkilled": page.ranks("unkilled", diagnosis.unkilled),
        "trouble": _trouble(page, evidence.job_trouble) if evidence.job_trouble is not None else None,
        # Where there is not room for all, those that are silent tell most.
        "hosts": page.objects("hosts", sorted(evidence.hosts, key=_is_heard), lambda host: _host(page, host)),
        "groups": page.objects(
            "groups",
            diagnosis.groups,
            lambda group: {
                "kind": page.text(group.kind),
                "what": page.text(group.what),
                "ranks": page.ranks("groups", group.ranks),
                "place": page.text(group.place),
            },
        ),
        "tree": _tree(page, branches_of(diagnosis.tree, cause.ranks if cause is not None else ())),
        "tracebacks": page.objects(
            "tracebacks",
            diagnosis.tracebacks,
            lambda traceback: {
                "ranks": page.ranks("tracebacks", traceback.ranks),
                "lines": page.lines("tracebacks", traceback.lines),
            },
        ),
        "findings": page.first("findings", diagnosis.lines, page.text),
        "cores": page.objects(
            "cores",
            cores_of(incident),
            lambda core: _core(page, core),
        ),
        "oom": _oom(page, evidence.oom) if evidence.oom is not None else None,
        "kernel_lines": page.lines("kernel_lines", evidence.kernel_lines),
        "host_lines": page.lines("host_lines", capture.host_lines),
        "links": page.objects("links", capture.links, lambda link: _link(page, link)),
        "processes": page.objects("processes", capture.looks, lambda look: _process(page, look)),
        "collectives": page.objects("collectives", capture.collectives, lambda rank: _collectives(page, rank)),
        "captures": page.objects(
            "captures",
            capture.notes,
            lambda note: {
                "capture": page.text(note.capture),
                "rank": _count(note.rank) if note.rank >= 0 else None,
                "pid": _count(note.pid) if note.pid > 0 else None,
                "file": page.text(note.path),
                "elapsed_s": _number(note.elapsed_s),
                "failure": page.text(note.failure),
                "host": page.text(note.host),
            },
        ),
        "capture_elapsed_s": _number(capture.elapsed_s),
        "unfinished": page.lines("unfinished", capture.unfinished),
        "followed": followed,
        "recovered_after_s": _number(incident.recovered_after_s) if followed == "recovered" else None,
    }
    content["cut"] = sorted(page.cut)
    return content


def followed_by(incident: Incident) -> str:
    """What followed, in one of the words that the schema knows."""
    word = incident.followed.partition(" ")[0]
    return word if word in _FOLLOWED else "continued"


def cores_of(incident: Incident) -> list[CoreLook]:
    """Every core, that of the cause first."""
    core = incident.diagnosis.core
    others = [other for other in incident.evidence.cores if other != core]
    return [core, *others] if core is not None else others


def _verdict(page: _Page, verdict: HangVerdict) -> JsonObject:
    return {
        "kind": page.text(verdict.kind),
        "ranks": page.ranks("verdict", verdict.ranks),
        "quiet_s": _number(verdict.quiet_s),
        "certain": bool(verdict.certain),
        "busy": page.ranks("verdict", verdict.busy),
    }


def _cause(page: _Page, cause: Cause) -> JsonObject:
    return {
        "class": page.text(cause.class_name),
        "words": page.text(cause.words),
        "ranks": page.ranks("cause", cause.ranks),
        "proof": page.text(cause.proof),
        "advice": page.text(cause.advice),
        "place": page.text(cause.place),
    }


def _end(page: _Page, end: RankEnd) -> JsonObject:
    signum = end.status.signum
    return {
        "rank": _count(end.rank),
        "local_rank": _count(end.local_rank),
        "pid": _count(end.pid),
        "at": _number(end.time),
        "exit_code": _integer(end.status.code) if end.status.code is not None else None,
        "signal": page.text(signal_name(signum)) if signum is not None else None,
        "core_dumped": bool(end.status.core_dumped),
        "stopped_by_saferun": bool(end.stopped_by_us),
    }


def _output(page: _Page, output: RankOutput) -> JsonObject:
    return {
        "local_rank": _count(output.local_rank),
        "stderr_path": page.text(output.stderr_path),
        "last_lines": page.lines("output", output.last_lines),
        "last_stdout_lines": page.lines("output", output.last_stdout_lines),
        "error_message": page.text(output.error_message),
        "rank": _count(output.rank) if output.rank >= 0 else None,
    }


def _tree(page: _Page, branches: Sequence[Branch]) -> list[Any]:
    # The place of a branch's parent is always before its own: a list that is cut is still a tree.
    return page.objects("tree", branches, lambda branch: _branch(page, branch))


def _branch(page: _Page, branch: Branch) -> JsonObject:
    frames, left_out = page.frames("tree", branch.frames)
    return {
        "parent": branch.parent if branch.parent >= 0 else None,
        "ranks": page.ranks("tree", branch.ranks),
        "frames": frames,
        "frames_left_out": left_out,
    }


def _core(page: _Page, core: CoreLook) -> JsonObject:
    frames, left_out = page.frames("cores", core.threads[0].frames[::-1] if core.threads else ())
    return {
        "rank": _count(core.rank),
        "pid": _count(core.pid),
        "signal": page.text(signal_name(core.signum)),
        "path": page.text(core.path),
        "size_bytes": _count(core.size_bytes),
        "kept": bool(core.kept),
        "tool": page.text(core.tool),
        "crashing_thread": frames[::-1],
        "frames_left_out": left_out,
        "sender_pid": _count(core.sender_pid) if core.sender_pid > 0 else None,
        "address": page.text(core.address),
        "failure": page.text(core.failure),
    }


def _oom(page: _Page, oom: OomKill) -> JsonObject:
    return {
        "scope": page.text(oom.scope),
        "limit_bytes": _count(oom.limit_bytes) if oom.limit_bytes > 0 else None,
        "rss_bytes": _count(oom.rss_bytes) if oom.rss_bytes > 0 else None,
        "pids": page.ranks("oom", oom.pids),
        "kills": _count(oom.kills),
        "source": page.text(oom.source),
        "host": page.text(oom.host),
    }


def _trouble(page: _Page, told: ToldTrouble) -> JsonObject:
    return {
        "reason": page.text(told.reason),
        "label": page.text(told.label),
        "words": page.text(told.words),
        "rank": _count(told.rank) if told.rank is not None and told.rank >= 0 else None,
        "why": page.text(told.why),
    }


def _is_heard(host: HostSight) -> bool:
    return host.has_part and not host.why


def _host(page: _Page, host: HostSight) -> JsonObject:
    return {
        "host": _count(host.host),
        "label": page.text(host.label),
        "ranks": page.ranks("hosts", host.ranks),
        "has_part": bool(host.has_part),
        "lost": page.text(host.why),
        "lost_words": page.text(host.lost_words),
        "unkilled": page.ranks("hosts", host.unkilled),
        "oom": _oom(page, host.oom) if host.oom is not None else None,
    }


def _link(page: _Page, link: StuckLink) -> JsonObject:
    return {
        "rank": _count(link.rank),
        "local": page.text(link.local),
        "remote": page.text(link.remote),
        "state": page.text(link.state),
        "unsent_bytes": _count(link.unsent_bytes),
        "retries": _count(link.retries),
    }


def _process(page: _Page, look: ProcessLook) -> JsonObject:
    return {
        "rank": _count(look.rank),
        "pid": _count(look.pid),
        "ppid": _count(look.ppid),
        "is_rank": bool(look.is_rank),
        "name": page.text(look.name),
        "command": page.command(look.command),
        "state": page.text(look.state),
        "wchan": page.text(look.wchan),
        "syscall": page.text(look.syscall),
        "waits_on": page.text(look.waits_on),
        "threads": _count(look.threads),
        "tracer_pid": _count(look.tracer_pid) if look.tracer_pid > 0 else None,
        "core_dumping": bool(look.core_dumping),
        "rss_bytes": _count(look.rss_bytes),
        "cpu_s": _number(look.cpu_s),
    }


def _collectives(page: _Page, rank: RankCollectives) -> JsonObject:
    return {
        "rank": _count(rank.rank),
        "failure": page.text(rank.failure),
        "groups": page.objects("collectives", rank.groups, lambda group: _progress(page, group)),
    }


def _progress(page: _Page, group: GroupProgress) -> JsonObject:
    last = group.calls[-1] if group.calls else None
    return {
        "group": page.text(group.group),
        "description": page.text(group.description),
        "enqueued": _integer(group.enqueued),
        "started": _integer(group.started),
        "completed": _integer(group.completed),
        "last_call": {
            "seq": _integer(last.seq),
            "op": page.text(last.op),
            "sizes": page.text(last.sizes),
            "retired": bool(last.retired),
            "is_p2p": bool(last.is_p2p),
        }
        if last is not None
        else None,
    }
