"""What the page takes from run.json and events.jsonl, as values; and all that is read of a run together. Pure."""

from __future__ import annotations

from typing import Annotated

from saferun.model import JsonObject, Value
from saferun.report.page.contents import (
    MOST_ROWS,
    PairPart,
    PreflightSection,
    ReportPart,
    decoded_object,
)
from saferun.report.report_values import MOST_RANKS, Ranks
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit, fit_or, list_of

_LONGEST_EVENT = 1 << 20
_HIGHEST_RANK = 1 << 24
_DIAGNOSED = b'{"event": "Diagnosed"'
_RUN_FIELDS = frozenset({"command", "rank_command", "cwd", "run_id", "host", "started_at", "end"})

# ------------------------------------------------------------------------------------------------------------- run.json


class SettingPart(Value):
    """A setting and where it comes from."""

    name: str
    value: str
    origin: str


class EndPart(Value):
    """How a launch ended."""

    time: float
    exit_code: int
    outcome: str = ""


class RunJson(Value):
    """run.json. ``started_at`` is in seconds since the epoch; ``end`` is None while it runs."""

    command: tuple[str, ...] = ()
    rank_command: tuple[str, ...] = ()
    cwd: str = ""
    run_id: str = ""
    host: str = ""
    started_at: float | None = None
    end: EndPart | None = None
    settings: tuple[SettingPart, ...] = ()
    versions: tuple[PairPart, ...] = ()


# --------------------------------------------------------------------------------------------------------- events.jsonl


class StatusPart(Value):
    """The exit status of a rank."""

    code: int | None = None
    signum: int | None = None
    core_dumped: bool = False


class AssignmentPart(Value):
    """A rank's numbers."""

    local_rank: int
    rank: int


class RanksPart(Value):
    """The ranks of a host."""

    world_size: int = 0
    ranks: Annotated[tuple[AssignmentPart, ...], list_of(AssignmentPart, MOST_RANKS, skips=True)] = ()


def _ranks(value: object) -> tuple[int, ...]:
    """Ranks, quickly: each of very many hosts names all of the job."""
    items = value[:MOST_RANKS] if isinstance(value, list) else []
    return tuple([item for item in items if type(item) is int and 0 <= item <= _HIGHEST_RANK])


class QuietPart(Value):
    """The verdict of a hang in an event."""

    quiet_s: float = 0.0
    kind: str = ""
    ranks: Annotated[tuple[int, ...], _ranks] = ()
    certain: bool = False


class EventLine(Value):
    """A line of events.jsonl, as far as a timeline takes it."""

    event: str
    time: float
    attempt: int = 0
    local_rank: int = -1
    status: StatusPart | None = None
    placement: RanksPart | None = None
    verdict: QuietPart | None = None
    signum: int = 0
    ranks: Ranks = ()
    times: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    message: str = ""
    reason: str = ""
    host: str = ""
    by: str = ""
    next_step: str = ""
    state: str = ""
    ahead_s: float = 0.0


class HostEvents(Value):
    """The events of a host, in the order of time by its own clock."""

    host: str
    events: tuple[EventLine, ...]


class RankTail(Value):
    """The end of what a rank wrote. ``omitted_bytes``: how much of the file comes before."""

    host: str
    attempt: int
    rank: int
    stream: str
    content: bytes
    omitted_bytes: int


class FailureRecord(Value):
    """The failure record of a rank: decoded JSON, of which nothing is believed."""

    host: str
    attempt: int
    rank: int
    record: JsonObject


class HostGpus(Value):
    """The state of a host's GPUs: decoded JSON, of which nothing is believed."""

    host: str
    content: JsonObject


class RunFiles(Value):
    """What there is of a run.

    Attributes:
        failure_records: of ranks of the attempt whose output is there.
        earlier_failure_records: of ranks that were the cause of the end of attempts before it, the newest first.
        gpus: of the hosts, as they were captured last in that attempt.
        notes: what could not be read, one line each.
        owner: the user whose directory it is; -1: not known.
    """

    name: str
    report: ReportPart | None = None
    preflight: PreflightSection | None = None
    run: RunJson | None = None
    hosts: tuple[HostEvents, ...] = ()
    tails: tuple[RankTail, ...] = ()
    failure_records: tuple[FailureRecord, ...] = ()
    earlier_failure_records: tuple[FailureRecord, ...] = ()
    gpus: tuple[HostGpus, ...] = ()
    notes: tuple[str, ...] = ()
    owner: int = -1


def decode_run_json(content: bytes) -> RunJson | None:
    """run.json; None where it is none."""
    raw = decoded_object(content)
    if raw is None:
        return None
    settings = raw.pop("settings", None)
    versions = raw.pop("versions", None)
    found = fit_or(RunJson, {name: item for name, item in raw.items() if name in _RUN_FIELDS}, RunJson())
    rows = []
    for name, setting in settings.items() if isinstance(settings, dict) else ():
        if isinstance(setting, dict):
            rows.append(SettingPart(str(name), _as_text(setting.get("value")), _as_text(setting.get("origin"))))
    pairs = versions.items() if isinstance(versions, dict) else ()
    known = tuple(PairPart(str(name), _as_text(value)) for name, value in pairs if value is not None)
    return found._replace(settings=tuple(rows[:MOST_ROWS]), versions=known[:100])  # type: ignore[no-any-return]


def decode_events(content: bytes) -> list[EventLine]:
    """The lines of events.jsonl that can be read, in the order of time."""
    events = []
    for line in content.split(b"\n"):
        # A diagnosis is large, and stands in the report.
        if not line or len(line) > _LONGEST_EVENT or line.startswith(_DIAGNOSED):
            continue
        try:
            events.append(fit(EventLine, loads(line, longest=_LONGEST_EVENT)))
        except MALFORMED:
            continue
    events.sort(key=lambda event: event.time)
    return events


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_as_text, value[:1000]))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else "…"
