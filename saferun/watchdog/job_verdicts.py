"""The verdicts of all hosts as one: a job hangs when every host that still has ranks reports it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from saferun.evidence.job_evidence import HangVerdict
from saferun.model import RANKS_DONE, RANKS_LEFT_OVER, RANKS_QUIET
from saferun.text.decoding import MALFORMED, display_text, measure

_ENDED = (RANKS_DONE, RANKS_LEFT_OVER)

# If the kinds of the hosts' verdicts differ, the job's has the first of these: those about single ranks come first.
_KINDS = ("stopped", "uninterruptible", "heartbeat", "overdue", "spinning", "stuck_collective", "quiescent")
# Reported of one rank while others still move; then suspected only.
_OF_SINGLE_RANKS = frozenset({"stopped", "uninterruptible", "heartbeat", "overdue"})
_MOST_RANKS = 1 << 20
_LONGEST_PHRASE = 200


def combine(
    states: Mapping[Any, object], *, ranks_of: Mapping[Any, Collection[int]] | None = None
) -> HangVerdict | None:
    """The verdict of the job; None while there is no sign of a hang.

    A stopped or uninterruptible rank and a missing heartbeat are only suspected while other hosts are still at work.

    Args:
        states: the last state of each host, or of each process of one: an object with ``s`` (``run``, ``held``,
            ``done``, ``leftovers``, ``quiet``) and, if quiet, ``kind``, ``quiet_s``, ``ranks``, ``busy`` and
            ``certain``. A malformed state counts as a host at work.
        ranks_of: the ranks that each of them may name; others are left out. None: any.
    """
    verdicts: list[HangVerdict] = []
    at_work = False
    for who, state in states.items():
        if isinstance(state, Mapping) and state.get("s") in _ENDED:
            continue
        is_quiet = isinstance(state, Mapping) and state.get("s") == RANKS_QUIET
        own = ranks_of.get(who, ()) if ranks_of is not None else None
        verdict = verdict_from(state, own=own) if is_quiet else None
        if verdict is None:
            at_work = True
        else:
            verdicts.append(verdict)
    if at_work:
        verdicts = [verdict for verdict in verdicts if verdict.kind in _OF_SINGLE_RANKS and verdict.ranks]
    if not verdicts:
        return None
    kind = min((verdict.kind for verdict in verdicts), key=_KINDS.index)
    alike = [verdict for verdict in verdicts if verdict.kind == kind]
    return HangVerdict(
        kind,
        _together(verdict.ranks for verdict in alike),
        min(verdict.lasted_s for verdict in (alike if at_work else verdicts)),
        certain=not at_work and all(verdict.certain for verdict in verdicts),
        busy=_together(verdict.busy for verdict in verdicts),
        overdue=next((verdict.overdue for verdict in (*alike, *verdicts) if verdict.overdue), ""),
    )


def packed(verdict: HangVerdict, most_runs: int | None = None) -> dict[str, Any]:
    """A verdict as ``verdict_from`` reads it, short however many ranks it names: first and last of those in a row.

    Args:
        verdict: what is known.
        most_runs: how many runs of ranks it may have; None: any number. The first ones are kept.
    """
    return {
        "kind": verdict.kind,
        "ranks": _packed_ranks(verdict.ranks)[:most_runs],
        "quiet_s": verdict.lasted_s,
        "certain": verdict.certain,
        "busy": _packed_ranks(verdict.busy)[:most_runs],
        "overdue": verdict.overdue,
    }


def _packed_ranks(ranks: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank <= runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def verdict_from(raw: object, *, own: Collection[int] | None = None) -> HangVerdict | None:
    """The verdict that another host sent; None where it is none.

    Args:
        raw: an object with the fields of :class:`~saferun.evidence.job_evidence.HangVerdict`, ``lasted_s`` as
            ``quiet_s``; those that are missing are empty.
        own: the only ranks that it may name; None: any.
    """
    if not isinstance(raw, Mapping):
        return None
    kind = raw.get("kind", "quiescent")
    if kind not in _KINDS:
        return None
    ranks, busy = _ranks(raw.get("ranks"), own), _ranks(raw.get("busy"), own)
    try:
        overdue = display_text(raw.get("overdue", ""), _LONGEST_PHRASE)
    except MALFORMED:
        overdue = ""
    return HangVerdict(str(kind), ranks, seconds(raw.get("quiet_s")), raw.get("certain") is True, busy, overdue)


def seconds(raw: object) -> float:
    """What another host sent for a number of seconds; 0.0 where it is none."""
    try:
        return measure(raw)
    except ValueError:
        return 0.0


def _ranks(raw: object, own: Collection[int] | None) -> tuple[int, ...]:
    if not isinstance(raw, (list, tuple)):
        return ()
    ranks: set[int] = set()
    for item in raw[:_MOST_RANKS]:
        pair = item if isinstance(item, list) else (item, item)
        if len(pair) != len(("first", "last")) or any(type(rank) is not int for rank in pair):
            continue
        first, last = max(pair[0], 0), min(pair[1], (1 << 31) - 1)
        ranks.update(range(first, min(last + 1, first + _MOST_RANKS - len(ranks))))
    return tuple(sorted(ranks if own is None else ranks.intersection(own)))


def _together(ranks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for some in ranks for rank in some}))
