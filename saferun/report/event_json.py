"""The event that a command of the user's gets (``--on-event``): one small JSON object without secrets. Pure.

The fields are described in ``docs/programs.md``. Every field is always there.
"""

from __future__ import annotations

from saferun.model import JsonObject, Value
from saferun.text.bounded_json import Page, count, integer, number

SCHEMA = "saferun.event/1"
KINDS = ("hang", "failure", "restart", "recovery", "end")
_LIMIT_BYTES = 1 << 19
_MOST_RANKS = 1000


class LaunchEvent(Value):
    """Something that happened to a launch.

    Attributes:
        kind: one of ``KINDS``.
        attempt: 0 for the first.
        time: seconds since the epoch.
        headline: what happened, in one line.
        hint: what to do about it; may be empty.
        ranks: those that it is about: the culprits of a hang, the rank that failed first.
        exit_code: of that rank after a failure (minus the number of a signal), saferun's own at the end.
        outcome: what follows, in the terms of report.json.
        has_report: whether report.json has more about it.
    """

    kind: str
    attempt: int
    time: float
    headline: str
    hint: str = ""
    ranks: tuple[int, ...] = ()
    exit_code: int | None = None
    outcome: str = ""
    has_report: bool = False


def event_json(event: LaunchEvent, *, run_id: str, run_dir: str, host: str) -> JsonObject:
    """The event as the command gets it.

    Args:
        event: the event.
        run_id: marks the processes of the launch.
        run_dir: the run directory; empty where there is none.
        host: the host's name in the job.
    """
    page = Page(_LIMIT_BYTES)
    has_report = event.has_report and run_dir
    return {
        "schema": SCHEMA,
        "kind": event.kind,
        "run_id": page.text(run_id),
        "run_dir": page.text(run_dir),
        "host": page.text(host),
        "attempt": count(event.attempt),
        "time": number(event.time),
        "headline": page.text(event.headline),
        "hint": page.text(event.hint),
        "ranks": page.ranks("ranks", sorted(event.ranks)[:_MOST_RANKS]),
        "exit_code": integer(event.exit_code) if event.exit_code is not None else None,
        "outcome": page.text(event.outcome),
        "report": page.text(f"{run_dir}/report.json") if has_report else None,
    }
