"""Which hangs hold of the ranks of one host now. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

from saferun.evidence.job_evidence import HangVerdict
from saferun.text.wording import count_text, duration_text
from saferun.watchdog.rank_histories import RankHistories
from saferun.watchdog.rank_history import RankHistory

DUMPS = 30
"""How many dumps it takes to suspect a hang."""
DUMPS_IN_COLLECTIVE = 5
"""How many it takes of a rank in a collective, whose sequence numbers are known."""
# In parts of the hang timeout: how long the dumps have to span, and how long the numbers of collectives to stand still.
_DUMPS_SPAN_SHARE = 0.4
_FROZEN_SHARE = 0.7
_UNINTERRUPTIBLE_S = 60.0
_STOPPED_SAMPLES = 2

_Role: TypeAlias = Literal["quiet", "in_collective", "spins", "works"]


def all_hang(ranks: RankHistories) -> HangVerdict | None:
    """The hang of all ranks; None: one may be working."""
    if not ranks.all or min(map(ranks.still_s, ranks.all)) < ranks.timeout_s:
        return None
    found: dict[_Role, list[int]] = {"quiet": [], "in_collective": [], "spins": [], "works": []}
    for history in ranks.all:
        found[_role(ranks, history)].append(history.rank)
    if found["works"]:
        return None
    busy = tuple(sorted((*found["in_collective"], *found["spins"])))
    still_s = min(map(ranks.still_s, ranks.all))
    # (That ranks in a collective are busy means nothing: its numbers and their stacks stand still.)
    certain = not any(ranks.is_doubted(history) for history in ranks.all if history.rank not in busy)
    if not busy:
        return HangVerdict("quiescent", tuple(sorted(found["quiet"])), min(map(ranks.quiet_s, ranks.all)), certain)
    if not found["spins"]:
        about = tuple(sorted(history.rank for history in ranks.all if history.numbers.is_in_collective))
        return HangVerdict("stuck_collective", about, still_s, certain, busy)
    if (
        not found["in_collective"]
        and not found["quiet"]
        and not all(one.numbers.was_in_collective for one in ranks.all)
    ):
        # No rank waits for them. (Where all were in a collective when they last answered, they may be in it still.)
        return None
    return HangVerdict("spinning", tuple(sorted(found["spins"])), still_s, certain=False, busy=busy)


def _role(ranks: RankHistories, history: RankHistory) -> _Role:
    """What a rank that has not moved does."""
    if ranks.quiet_s(history) >= ranks.timeout_s:
        return "quiet"
    if not history.busy_pids:
        # It has been quiet, but not for long enough.
        return "works"
    span_s = _DUMPS_SPAN_SHARE * ranks.timeout_s
    if history.numbers.is_in_collective and history.numbers.frozen_s(ranks.clock_s) >= _FROZEN_SHARE * ranks.timeout_s:
        alike = not ranks.can_dump or history.dumps_alike(DUMPS_IN_COLLECTIVE, span_s)
        return "in_collective" if alike else "works"
    return "spins" if ranks.can_dump and history.dumps_alike(DUMPS, span_s) else "works"


def some_hang(ranks: RankHistories) -> tuple[HangVerdict, ...]:
    """What holds of single ranks, the worst first."""
    found = (_heartbeat(ranks), _stopped(ranks), _uninterruptible(ranks), _overdue(ranks))
    return tuple(verdict for verdict in found if verdict is not None)


def _heartbeat(ranks: RankHistories) -> HangVerdict | None:
    if ranks.in_announced_phase:
        return None  # it may wait for the rank in the phase
    late = [one for one in ranks.all if one.beat_ns > 0 and ranks.beatless_s(one) >= ranks.timeout_s]
    if not late:
        return None
    # While something still moves it is reported, and not acted upon: they may wait for the rank that does.
    certain = not any(ranks.still_s(one) < ranks.timeout_s / 2 for one in ranks.all)
    certain = certain and not any(map(ranks.is_doubted, late))
    about = tuple(sorted(history.rank for history in late))
    return HangVerdict("heartbeat", about, min(map(ranks.beatless_s, late)), certain, ranks.busy)


def _stopped(ranks: RankHistories) -> HangVerdict | None:
    since = {one.rank: one.stopped_since for one in ranks.all if one.stopped_samples >= _STOPPED_SAMPLES}
    return _lasting(ranks, "stopped", since, 0.0)


def _uninterruptible(ranks: RankHistories) -> HangVerdict | None:
    if ranks.in_announced_phase:
        return None
    since = {history.rank: history.uninterruptible_since for history in ranks.all}
    return _lasting(ranks, "uninterruptible", since, min(_UNINTERRUPTIBLE_S, ranks.timeout_s))


def _overdue(ranks: RankHistories) -> HangVerdict | None:
    """What a script has said is not proof enough to act upon: it may only have underestimated its work."""
    late = [(one.rank, one.phase) for one in ranks.all if one.phase is not None and one.is_overdue]
    if not late:
        return None
    about = tuple(sorted(rank for rank, _ in late))
    lasted_s = max(ranks.at - phase.since for _, phase in late)
    return HangVerdict("overdue", about, lasted_s, certain=False, busy=ranks.busy)


def with_long_waits(verdict: HangVerdict, ranks: RankHistories) -> HangVerdict:
    """The verdict with ``overdue``: the phase or core dump that takes longer than expected, as text.

    While a core is being written no hang is certain.
    """
    texts = filter(None, (_overdue_text(ranks), _cores_text(ranks)))
    return verdict._replace(overdue="; ".join(texts), certain=verdict.certain and not ranks.cores_since)


def _cores_text(ranks: RankHistories) -> str:
    if not ranks.cores_since:
        return ""
    since, rank = min((since, rank) for rank, since in ranks.cores_since.items())
    others = len(ranks.cores_since) - 1
    more = f" (and {'that' if others == 1 else 'those'} of {count_text(others, 'other rank')})" if others else ""
    return f"the core of rank {rank}{more} is still being written after {duration_text(ranks.at - since)}"


def _overdue_text(ranks: RankHistories) -> str:
    """The phase that is the longest over its time, in words; empty: none is."""
    late = [(one.phase.until, one.rank, one.phase) for one in ranks.all if one.phase is not None and one.is_overdue]
    if not late:
        return ""
    _, rank, phase = min(late)
    others = len(late) - 1
    more = f" ({count_text(others, 'other rank')} {'is' if others == 1 else 'are'} late, too)" if others else ""
    expected_s = duration_text(phase.until - phase.since)
    return f"rank {rank} has been in {phase.what!r} longer than the expected {expected_s}{more}"


def _lasting(ranks: RankHistories, kind: str, since: dict[int, float | None], at_least_s: float) -> HangVerdict | None:
    lasted = {rank: ranks.clock_s - since_s for rank, since_s in since.items() if since_s is not None}
    about = tuple(sorted(rank for rank, lasted_s in lasted.items() if lasted_s >= at_least_s))
    if not about:
        return None
    return HangVerdict(kind, about, max(lasted.values()), certain=False, busy=ranks.busy)
