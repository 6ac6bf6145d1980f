"""What report.json holds, as far as both programs (``saferun.read_report``) and the page of a run take it. Pure.

No file of a run directory is trusted: whoever sends it may have written them. What does not fit is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from saferun.model import Value
from saferun.text.typed_json import fit_or, list_of, number_of

MOST_RANKS = 1 << 17
_HIGHEST_RANK = 1 << 24

if TYPE_CHECKING:
    Ranks = tuple[int, ...]
else:
    Ranks = Annotated[tuple, list_of(Annotated[int, number_of(_HIGHEST_RANK)], MOST_RANKS, skips=True)]


def class_named(raw: object) -> object:
    """An object of JSON with names that Python can have: ``class`` is ``class_name``."""
    if isinstance(raw, dict) and "class" in raw:
        return {("class_name" if name == "class" else name): item for name, item in raw.items()}
    return raw


def _decode_cause(raw: object) -> Cause | None:
    cause: Cause | None = fit_or(Cause, class_named(raw), None)
    return cause


class Launch(Value):
    """The launch. ``exit_code`` and ``ended_at`` are None while it runs."""

    run_id: str = ""
    host: str = ""
    command: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    run_dir: str = ""


class Decision(Value):
    """What followed a failed attempt: ``next_step`` is ``retry``, ``restart``, ``replace`` or ``finish``."""

    attempt: int = 0
    time: float | None = None
    next_step: str = ""
    message: str = ""
    wait_s: float | None = None
    class_name: str = ""
    host: str = ""
    spare: str = ""


class BadHostRow(Value):
    """A host whose own hardware or system is at fault; ``found_by`` is ``checks`` or ``failure``."""

    host: str
    time: float | None = None
    attempt: int = 0
    kind: str = ""
    reason: str = ""
    found_by: str = ""
    proof: str = ""


class Cause(Value):
    """Why: ``class_name`` is the class of the cause, ``ranks`` those that caused it."""

    class_name: str = ""
    message: str = ""
    ranks: Ranks = ()
    proof: str = ""
    advice: str = ""
    location: str = ""


CauseOrNone = Annotated[Cause | None, _decode_cause]


class RankFailure(Value):
    """How a rank ended. ``signal`` is the name of the signal that killed it."""

    rank: int = -1
    local_rank: int = -1
    pid: int = 0
    time: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    core_dumped: bool = False
    stopped_by_saferun: bool = False
