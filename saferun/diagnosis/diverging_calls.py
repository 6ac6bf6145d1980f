"""Where ranks called something different, by their last calls (``--trace-calls``). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.diagnosis.frames import file_name
from saferun.evidence.call_evidence import CalledFunction, CallEvent, RankCalls
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Evidence
from saferun.text.wording import ranks_text

# So many events must agree before a difference: ranks that have been out of step for long agree nowhere for certain.
_AGREEING = 8
_MOST_GROUPS = 3
_SEVERAL = 2
_VERBS = {"call": "called", "return": "returned from", "raise": "left with an exception"}

_Step = tuple[str, str, str, int]


def with_last_calls(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """The diagnosis with the first difference between the ranks' calls among its findings, where it is known."""
    found = first_difference(evidence.capture.calls)
    return diagnosis._replace(findings=(*diagnosis.findings, found)) if found else diagnosis


def first_difference(calls: Sequence[RankCalls]) -> str:
    """The first call of the main threads in which ranks differ; empty where that is not known.

    Ranks that do the same make the same calls in the same order, so the events of a thread are compared by their
    numbers, where all ranks still have them.
    """
    known: dict[int, dict[int, _Step]] = {}
    for one in calls:
        if one.rank not in known and not one.note and (steps := _steps(one)):
            known[one.rank] = steps
    if len(known) < _SEVERAL:
        return ""
    begin = max(min(steps) for steps in known.values())
    end = min(max(steps) for steps in known.values()) + 1
    different = next(
        (number for number in range(begin, end) if len({steps[number] for steps in known.values()}) > 1), end
    )
    if different <= begin or (begin > 0 and different - begin < _AGREEING):
        return ""
    return _apart(known, different) if different < end else _behind(known, end)


def _steps(calls: RankCalls) -> dict[int, _Step]:
    """The events of the main thread by their numbers, without lines."""
    main = calls.main
    if main is None:
        return {}
    events = [event for event in main.events if event.kind in _VERBS]
    if len(events) > main.total:
        return {}
    return {main.total - len(events) + index: _step(event, calls.function(event)) for index, event in enumerate(events)}


def _step(event: CallEvent, function: CalledFunction | None) -> _Step:
    if function is None:
        return event.kind, "?", "", 0
    # Hosts may have the same file in different directories.
    return event.kind, function.name, file_name(function.file), function.line


def _apart(known: Mapping[int, Mapping[int, _Step]], number: int) -> str:
    groups: dict[_Step, list[int]] = {}
    for rank, steps in known.items():
        groups.setdefault(steps[number], []).append(rank)
    # The odd ones first.
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    parts = [f"{ranks_text(ranks)} {_text(step)}" for step, ranks in ordered[:_MOST_GROUPS]]
    more = [f"{len(ordered) - _MOST_GROUPS} more groups something else"] if len(ordered) > _MOST_GROUPS else []
    before = next(iter(known.values()))[number - 1]
    return f"the ranks' calls differ since all {_text(before)}: then {', '.join((*parts, *more))}"


def _behind(known: Mapping[int, Mapping[int, _Step]], end: int) -> str:
    behind = sorted(rank for rank, steps in known.items() if max(steps) == end - 1)
    ahead = {rank: steps[end] for rank, steps in known.items() if max(steps) >= end}
    if not ahead:
        return ""
    last = known[behind[0]][end - 1]
    steps = set(ahead.values())
    went = f"then {_text(steps.pop())}" if len(steps) == 1 else "went on"
    verb = "is" if len(behind) == 1 else "are"
    last_text = f"{ranks_text(behind)} {verb} behind the others: last {_text(last)}"
    return f"{last_text}; {ranks_text(ahead)} {went}"


def _text(step: _Step) -> str:
    kind, name, file, line = step
    location = f" ({file}:{line})" if file else ""
    return f"{_VERBS[kind]} {name}{location}"
