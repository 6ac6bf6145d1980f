"""The verdicts of all hosts as one: a job hangs when every host that still has ranks says so. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from saferun.evidence import HangVerdict

__all__ = ["combine", "packed", "verdict_from"]

# What the job's verdict is called where hosts say different things: what is about single ranks first.
_KINDS = ("stopped", "uninterruptible", "heartbeat", "spinning", "stuck_collective", "quiescent")
# What is told of one rank while the others still move; it is a suspicion then.
_OF_SINGLE_RANKS = frozenset({"stopped", "uninterruptible", "heartbeat"})
_MOST_RANKS = 1 << 20


def combine(
    states: Mapping[Any, object],
    *,
    now: float | None = None,
    ranks_of: Mapping[Any, Collection[int]] | None = None,
) -> HangVerdict | None:
    """The verdict of the job; None while it is well, as far as anybody knows.

    A stopped or uninterruptible rank and a missing heartbeat are suspicions while other hosts are still at work.

    Args:
        states: what each host, or each process of one, said last: an object with ``s`` (``run``, ``done``,
            ``leftovers``, ``quiet``) and, where it is quiet, ``kind``, ``quiet_s``, ``since``, ``ranks``, ``busy`` and
            ``certain``. Whatever does not fit is taken for a host at work.
        now: seconds since the epoch; with it, what was quiet when it was told has been so since ``since``.
        ranks_of: the ranks of each of them; others that it names are left out.
    """
    verdicts: list[HangVerdict] = []
    at_work = False
    for who, state in states.items():
        if isinstance(state, Mapping) and state.get("s") in ("done", "leftovers"):
            continue
        verdict = _verdict(state, now, ranks_of.get(who, ()) if ranks_of is not None else None)
        if verdict is None:
            at_work = True
        else:
            verdicts.append(verdict)
    if at_work:
        verdicts = [verdict for verdict in verdicts if verdict.kind in _OF_SINGLE_RANKS]
    if not verdicts:
        return None
    kind = min((verdict.kind for verdict in verdicts), key=_KINDS.index)
    alike = [verdict for verdict in verdicts if verdict.kind == kind]
    return HangVerdict(
        kind,
        _together(verdict.ranks for verdict in alike),
        min(verdict.quiet_s for verdict in (alike if at_work else verdicts)),
        certain=not at_work and all(verdict.certain for verdict in verdicts),
        busy=_together(verdict.busy for verdict in verdicts),
    )


def packed(verdict: HangVerdict) -> dict[str, Any]:
    """A verdict as ``verdict_from`` reads it, short however many ranks it names: first and last of those in a row."""
    return {**verdict._asdict(), "ranks": _packed_ranks(verdict.ranks), "busy": _packed_ranks(verdict.busy)}


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
        raw: an object with the fields of :class:`~saferun.evidence.HangVerdict`; those that are missing are empty.
        own: the only ranks that it may name; None: any.
    """
    if not isinstance(raw, Mapping):
        return None
    kind = raw.get("kind", "quiescent")
    if kind not in _KINDS:
        return None
    ranks, busy = _ranks(raw.get("ranks"), own), _ranks(raw.get("busy"), own)
    return HangVerdict(str(kind), ranks, _seconds(raw.get("quiet_s")), raw.get("certain") is True, busy)


def _verdict(state: object, now: float | None, own: Collection[int] | None) -> HangVerdict | None:
    if not isinstance(state, Mapping) or state.get("s") != "quiet":
        return None
    verdict = verdict_from(state, own=own)
    since = _seconds(state.get("since"))
    if verdict is None or now is None or since <= 0:
        return verdict
    return verdict._replace(quiet_s=max(verdict.quiet_s, now - since))


def _seconds(raw: object) -> float:
    """A finite number that is not negative; 0.0 for everything else."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        return 0.0
    try:
        seconds = float(raw)
    except OverflowError:
        return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _ranks(raw: object, own: Collection[int] | None) -> tuple[int, ...]:
    if not isinstance(raw, (list, tuple)):
        return ()
    ranks: set[int] = set()
    for told in raw[:_MOST_RANKS]:
        pair = told if isinstance(told, list) else (told, told)
        if len(pair) != len(("first", "last")) or any(type(rank) is not int for rank in pair):
            continue
        first, last = max(pair[0], 0), min(pair[1], (1 << 31) - 1)
        ranks.update(range(first, min(last + 1, first + _MOST_RANKS - len(ranks))))
    return tuple(sorted(ranks if own is None else ranks.intersection(own)))


def _together(ranks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for some in ranks for rank in some}))
