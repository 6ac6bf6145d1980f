"""The last calls of ranks as text (``--trace-calls``). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from saferun.evidence.call_evidence import CALL_KINDS, CallEvent, RankCalls, ThreadCalls
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Frame
from saferun.report.text_diagram import frame_text
from saferun.text.bounded_json import shown

_ON_CONSOLE = 6
_OF_MAIN, _OF_OTHERS = 60, 8
_WIDTH = 78
_WIDEST = 200


def console_calls(diagnosis: Diagnosis, calls: Sequence[RankCalls], *, has_traceback: bool = False) -> list[str]:
    """The last calls of the rank that is the cause; nothing where its traceback is shown, or it has recorded none."""
    blamed = diagnosis.cause.ranks if diagnosis.cause is not None else ()
    first = (diagnosis.first_failure.rank,) if diagnosis.first_failure is not None else ()
    for rank in () if has_traceback else (*first, *blamed):
        for one in calls:
            if one.rank == rank and one.main is not None and one.main.events:
                return [f"  {_title(one, one.main)}:", *_event_lines(one, one.main, _ON_CONSOLE, "  | ", _WIDTH)]
    return []


def report_calls(calls: Sequence[RankCalls]) -> Iterator[str]:
    """The last calls of all ranks."""
    for one in calls:
        for thread in (thread for thread in one.threads if thread.events):
            yield f"  {_title(one, thread)}:"
            yield from _event_lines(one, thread, _OF_MAIN if thread.is_main else _OF_OTHERS, "      ", _WIDEST)
        if one.failure:
            yield f"  rank {one.rank}, pid {one.pid}: {shown(one.failure)}"
        if one.note:
            yield f"  rank {one.rank}, pid {one.pid}: {shown(one.note)}"


def _title(calls: RankCalls, thread: ThreadCalls) -> str:
    until = "its end" if calls.is_dead else "the capture"
    who = "" if thread.is_main else f", thread {thread.tid}"
    return f"last calls of rank {calls.rank}{who} (the last one {thread.events[-1].before_s:.3f} s before {until})"


def _event_lines(calls: RankCalls, thread: ThreadCalls, most: int, indent: str, width: int) -> list[str]:
    return [f"{indent}{_event_text(calls, event, width - len(indent) - 22)}" for event in thread.events[-most:]]


def _event_text(calls: RankCalls, event: CallEvent, width: int) -> str:
    function = calls.function(event)
    frame = Frame(function.name, function.file, event.line or function.line) if function is not None else None
    kind = event.kind if event.kind in CALL_KINDS else "?"
    return f"{-event.before_s:11.3f} s  {kind:<6}  {frame_text(frame, width) if frame is not None else '?'}"
