"""What ranks have recorded themselves: failure records, last steps and last calls. Pure.

Records come from ranks, and are not believed: whatever is not as it should be is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from saferun.evidence.job_evidence import Frame
from saferun.model import JsonObject
from saferun.report.page.contents import EventPart, IncidentPart
from saferun.report.page.page_model import (
    LABEL_CHARACTERS,
    ExceptionView,
    Fact,
    FailureView,
    FrameView,
    RankCallsView,
    Table,
)
from saferun.report.page.run_contents import FailureRecord
from saferun.report.text_diagram import file_text, frame_text, is_user_code, rank_ranges
from saferun.text.bounded_json import shown
from saferun.text.decoding import MALFORMED, number_or, text_or_empty
from saferun.text.failure_record import local_text, memory_parts

_MOST_EXCEPTIONS, _MOST_FRAMES, _MOST_LOCALS = 12, 24, 40
_MOST_CALLS_OF_RANKS, _MOST_CALLS = 32, 40
_MOST_STEPS = 200
_LONGEST, _LONGEST_MESSAGE = 300, 2000
_LATEST = 1e11
_KINDS = {"call", "return", "raise", "line"}
_LINKS = {"cause": "caused by", "context": "while this was being handled:", "member": "in this group:"}
"""What is said before an exception that another one comes from."""


def build_failures(
    records: Sequence[FailureRecord],
    culprits: frozenset[int],
    clock: Callable[[float], str],
    scale: float,
    *,
    is_earlier: bool = False,
) -> tuple[FailureView, ...]:
    """The failure records of ranks.

    Args:
        records: as they were read, those of the cause first.
        culprits: the ranks that are the cause.
        clock: shows a moment.
        scale: how much of what there is room for is used.
        is_earlier: whether they are of other attempts than the one that is shown.
    """
    views = []
    for one in records:
        try:
            view = _failure(one, culprits, clock, scale)
            views.append(view._replace(where=f"{view.where}, attempt {one.attempt}") if is_earlier else view)
        except MALFORMED:
            continue
    return tuple(views)


def _failure(one: FailureRecord, culprits: frozenset[int], clock: Callable[[float], str], scale: float) -> FailureView:
    record = one.record
    most = max(int(_MOST_EXCEPTIONS * scale), 1)
    rows = _objects(record, "exceptions")
    exceptions = tuple(_exception(row, rows, scale) for row in rows[:most])
    where = shown(one.host, 60)
    return FailureView(
        label=f"rank {one.rank}",
        where=where,
        ranks=(one.rank,),
        is_culprit=one.rank in culprits,
        title=exceptions[0].title if exceptions else "no exception is in it",
        facts=tuple(_facts(record, clock)),
        exceptions=exceptions,
        omitted=max(len(rows) - most, 0),
    )


def _facts(record: JsonObject, clock: Callable[[float], str]) -> Iterator[Fact]:
    at = record.get("time")
    if isinstance(at, int | float) and 0 < at < _LATEST:
        yield Fact("At", clock(float(at)))
    step = number_or(-1, record.get("step"), 0, 1 << 53)
    if step >= 0:
        metrics = record.get("metrics")
        named = list(metrics.items())[:8] if isinstance(metrics, dict) else []
        text = ", ".join(f"{name[:40]} {value[:40]}" for name, value in named if isinstance(value, str))
        yield Fact("Last step", shown(f"{step} ({text})" if text else str(step)))
    thread = text_or_empty(record.get("thread"), _LONGEST)
    if thread:
        yield Fact("Thread", shown(thread))
    memory = "; ".join(memory_parts(record))
    if memory:
        yield Fact("Memory then", shown(memory, 1000))
    note = text_or_empty(record.get("gpus_note"), _LONGEST)
    if note:
        yield Fact("GPU memory", shown(note))


def _exception(row: JsonObject, rows: Sequence[JsonObject], scale: float) -> ExceptionView:
    kind = shown(text_or_empty(row.get("type"), _LONGEST)) or "?"
    message = shown(text_or_empty(row.get("message"), _LONGEST_MESSAGE), _LONGEST_MESSAGE)
    link = _LINKS.get(text_or_empty(row.get("link"), 20), "")
    of = number_or(-1, row.get("of"), 0, len(rows) - 1)
    if link and of >= 0:
        link = f"{shown(text_or_empty(rows[of].get('type'), _LONGEST), 80)} {link}"
    frames = _objects(row, "frames")[-max(int(_MOST_FRAMES * scale), 2) :]
    views = [_frame(frame) for frame in frames]
    # What is read first: the innermost frame of the user's own code, else the innermost of all.
    own = [index for index, view in enumerate(views) if view.is_user and view.locals is not None]
    with_locals = [index for index, view in enumerate(views) if view.locals is not None]
    first = (own or with_locals or [-1])[-1]
    views = [view._replace(is_first=index == first) for index, view in enumerate(views)]
    return ExceptionView(link, f"{kind}: {message}" if message else kind, tuple(views))


def _frame(row: JsonObject) -> FrameView:
    function = shown(text_or_empty(row.get("function"), _LONGEST), 160) or "?"
    file, line = text_or_empty(row.get("file"), _LONGEST), number_or(0, row.get("line"))
    location = f"{file_text(shown(file, 400))}:{line}"
    found = [(text_or_empty(one.get("name"), _LONGEST), local_text(one)) for one in _objects(row, "locals")]
    # The two together, as a name may make a secret of what follows it.
    lines = [shown(f"{name[:80]} = {text}", 400).partition(" = ") for name, text in found[:_MOST_LOCALS]]
    rows = tuple((name or "?", text) for name, _, text in lines)
    left = len(found) - len(rows)
    note = f"{left} more not shown." if left > 0 else ""
    table = Table(f"Locals of {function} ({location})", ("Name", "What"), rows, note=note) if rows else None
    return FrameView(function, location, is_user_code(Frame(function, file, max(line, 0))), table)


def build_steps(incident: IncidentPart | None, scale: float) -> Table | None:
    """The last steps that the ranks have reported."""
    found = incident.last_steps if incident is not None else ()
    most = max(int(_MOST_STEPS * scale), 8)
    rows = tuple((rank_ranges(one.ranks, LABEL_CHARACTERS), shown(one.text)) for one in found[:most] if one.text)
    note = f"{len(found) - most} more not shown." if len(found) > most else ""
    return Table("Last steps (saferun.step)", ("Ranks", "Step"), rows, note=note) if rows else None


def build_calls(
    incident: IncidentPart | None, records: Sequence[FailureRecord], scale: float
) -> tuple[RankCallsView, ...]:
    """The last calls of the ranks, those of the cause first; of a rank that was not captured as its record has them."""
    culprits = incident.culprits if incident is not None else frozenset()
    found: list[tuple[int, str, tuple[EventPart, ...], str]] = []
    for calls in incident.last_calls if incident is not None else ():
        until = "its end" if calls.has_ended else "the capture"
        for thread in calls.threads:
            whose = "" if thread.is_main else f"thread {thread.tid}"
            found.append((calls.rank, whose, thread.events, until))
        text = calls.failure or calls.note
        if text:
            found.append((calls.rank, shown(text), (), until))
    known = {rank for rank, _, events, _ in found if events}
    for record in records:
        rows = tuple(_event(row) for row in _objects(record.record, "last_calls"))
        if record.rank not in known and rows:
            found.append((record.rank, "", rows, "its failure record"))
    found.sort(key=lambda one: (one[0] not in culprits, one[0], one[1]))
    most = max(int(_MOST_CALLS_OF_RANKS * scale), 1)
    each = max(int(_MOST_CALLS * scale), 4)
    return tuple(
        RankCallsView(
            label=f"rank {rank}",
            ranks=(rank,),
            is_culprit=rank in culprits,
            note=whose,
            until=f"the newest {events[-1].before_s:.3f} s before {until}" if events else "",
            lines=tuple(map(_event_text, events[-each:])),
        )
        for rank, whose, events, until in found[:most]
    )


def _event(row: JsonObject) -> EventPart:
    before = row.get("before_s")
    seconds = float(before) if isinstance(before, int | float) and 0 <= before < _LATEST else 0.0
    kind, function, file = (text_or_empty(row.get(name), _LONGEST) for name in ("kind", "function", "file"))
    return EventPart(kind, function, file, number_or(0, row.get("line")), seconds)


def _event_text(event: EventPart) -> str:
    kind = event.kind if event.kind in _KINDS else "?"
    function = frame_text(Frame(event.function, event.file, max(event.line, 0)), 160) if event.function else "?"
    return shown(f"{-max(event.before_s, 0.0):11.3f} s  {kind:<6}  {function}", 220)


def _objects(row: JsonObject, name: str) -> list[Any]:
    found = row.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
