"""The timeline for Perfetto and chrome://tracing, and the stacks for speedscope, as JSON. Pure.

Formats: "Trace Event Format" (Google, 2016), which https://ui.perfetto.dev reads; ``report/speedscope.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from saferun.model import JsonObject
from saferun.report.page.page_model import IncidentRow, PageModel, Stacks, Timeline
from saferun.report.speedscope import SpeedscopeFile

_IN_THAT_CALL = "(in that call itself)"
_JOB_PID = 0


def perfetto(page: PageModel, phases: Mapping[str, str]) -> JsonObject:
    """A trace of the run: a process for each attempt and host, a thread for each rank.

    Args:
        page: the page; made with ``unfolded`` timelines, each rank has a row of its own.
        phases: the names of the phases.
    """
    timeline = page.timeline
    events = list(_trace(timeline, phases)) if timeline is not None else []
    other = {"verdict": page.verdict.headline, "saferun_version": page.version, "command": page.command}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _trace(timeline: Timeline, phases: Mapping[str, str]) -> Iterator[JsonObject]:
    def micros(seconds: float) -> float:
        return round(max(seconds - timeline.start, 0.0) * 1e6, 1)

    places = list(dict.fromkeys((row.attempt, row.where) for row in timeline.rows))
    pids = {place: number for number, place in enumerate(places, 1)}
    yield _named("process_name", _JOB_PID, 0, "job")
    for (attempt, where), pid in pids.items():
        yield _named("process_name", pid, 0, f"{where or 'host'}, attempt {attempt}")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for mark in timeline.marks:
        yield {
            "ph": "i",
            "s": "g",
            "name": mark.text,
            "cat": mark.kind,
            "ts": micros(mark.time),
            "pid": _JOB_PID,
            "tid": 0,
        }
    for row in timeline.rows:
        pid = pids[row.attempt, row.where]
        for rank in row.ranks:
            name = f"rank {rank}{' (the cause)' if row.is_culprit else ''}"
            yield _named("thread_name", pid, rank, name)
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": {"sort_index": rank}}
            for segment in row.segments:
                begin = micros(segment.start)
                yield {
                    "ph": "X",
                    "name": phases.get(segment.kind, segment.kind),
                    "cat": segment.kind,
                    "ts": begin,
                    "dur": round(micros(segment.end) - begin, 1),
                    "pid": pid,
                    "tid": rank,
                }
            for mark in row.marks:
                yield {
                    "ph": "i",
                    "s": "t",
                    "name": mark.text,
                    "cat": mark.kind,
                    "ts": micros(mark.time),
                    "pid": pid,
                    "tid": rank,
                }


def _named(kind: str, pid: int, tid: int, name: str) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


# ---------------------------------------------------------------------------------------------------------- speedscope


def speedscope(page: PageModel) -> JsonObject:
    """The merged stacks, a profile for each incident: the weight of a stack is the number of ranks that are in it."""
    file = SpeedscopeFile(page.title, page.version)
    for incident in (page.main, *reversed(page.earlier)):
        if incident is not None and incident.stacks is not None:
            _add_profile(incident, incident.stacks, file)
    return file.as_json()


def _add_profile(incident: IncidentRow, stacks: Stacks, file: SpeedscopeFile) -> None:
    samples: list[list[int]] = []
    weights: list[int] = []
    above: dict[int, list[int]] = {-1: []}
    for branch in stacks.branches:
        own = [file.number(call.function or "?", call.file, call.line) for call in branch.calls]
        if not own and not branch.children:
            own = [file.number(_IN_THAT_CALL)]
        above[branch.position] = [*above[branch.parent], *own]
        if not branch.children:
            samples.append(above[branch.position])
            weights.append(len(branch.ranks))
    name = f"{incident.verdict.kind.lower()} in attempt {incident.attempt}: ranks by where they are"
    file.add_profile(name, samples, weights)
