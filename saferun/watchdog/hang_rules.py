"""Which hangs hold of the ranks of one host now. Pure."""

from __future__ import annotations

from saferun.evidence.job_evidence import HangVerdict
from saferun.text.wording import duration_text
from saferun.watchdog.watched import Watched
from saferun.watchdog.watched_ranks import WatchedRanks

DUMPS = 30
"""How many dumps it takes to suspect a hang."""
DUMPS_IN_COLLECTIVE = 5
"""How many it takes of a rank in a collective, whose sequence numbers are known."""
_DUMPS_SPAN = 0.4
_FROZEN = 0.7
_UNINTERRUPTIBLE_S = 60.0
_STOPPED_SAMPLES = 2


def all_hang(ranks: WatchedRanks) -> HangVerdict | None:
    """The hang of all ranks; None: one may be working."""
    if not ranks.all or min(map(ranks.silent_s, ranks.all)) < ranks.timeout_s:
        return None
    found: dict[str, list[int]] = {"quiet": [], "waits": [], "spins": [], "works": []}
    for watched in ranks.all:
        found[_role(ranks, watched)].append(watched.rank)
    if found["works"]:
        return None
    busy = tuple(sorted((*found["waits"], *found["spins"])))
    silent_s = min(map(ranks.silent_s, ranks.all))
    # (That ranks in a collective are busy means nothing: its numbers and their stacks stand still.)
    certain = not any(ranks.is_doubted(watched) for watched in ranks.all if watched.rank not in busy)
    if not busy:
        return HangVerdict("quiescent", tuple(sorted(found["quiet"])), min(map(ranks.quiet_s, ranks.all)), certain)
    if not found["spins"]:
        about = tuple(sorted(watched.rank for watched in ranks.all if watched.is_in_collective))
        return HangVerdict("stuck_collective", about, silent_s, certain, busy)
    if not found["waits"] and not found["quiet"] and not all(one.was_in_collective for one in ranks.all):
        # No rank waits for them. (Where all were in a collective when they last answered, they may be in it still.)
        return None
    return HangVerdict("spinning", tuple(sorted(found["spins"])), silent_s, certain=False, busy=busy)


def _role(ranks: WatchedRanks, watched: Watched) -> str:
    """What a rank that has not moved does: ``quiet``, ``waits``, ``spins`` or ``works``."""
    if ranks.quiet_s(watched) >= ranks.timeout_s:
        return "quiet"
    if not watched.busy_pids:
        # It has been quiet, but not for long enough.
        return "works"
    span_s = _DUMPS_SPAN * ranks.timeout_s
    if watched.is_in_collective and watched.frozen_s(ranks.clock_s) >= _FROZEN * ranks.timeout_s:
        alike = not ranks.can_dump or watched.dumps_alike(DUMPS_IN_COLLECTIVE, span_s)
        return "waits" if alike else "works"
    return "spins" if ranks.can_dump and watched.dumps_alike(DUMPS, span_s) else "works"


def some_hang(ranks: WatchedRanks) -> tuple[HangVerdict, ...]:
    """What holds of single ranks, the worst first."""
    found = (_heartbeat(ranks), _stopped(ranks), _uninterruptible(ranks), _overdue(ranks))
    return tuple(verdict for verdict in found if verdict is not None)


def _heartbeat(ranks: WatchedRanks) -> HangVerdict | None:
    if ranks.are_expected:
        return None  # it may wait for the rank in the phase
    late = [one for one in ranks.all if one.beat_ns > 0 and ranks.beatless_s(one) >= ranks.timeout_s]
    if not late:
        return None
    # While something still moves it is reported, and not acted upon: they may wait for the rank that does.
    certain = not any(ranks.silent_s(one) < ranks.timeout_s / 2 for one in ranks.all)
    certain = certain and not any(map(ranks.is_doubted, late))
    about = tuple(sorted(watched.rank for watched in late))
    return HangVerdict("heartbeat", about, min(map(ranks.beatless_s, late)), certain, ranks.busy)


def _stopped(ranks: WatchedRanks) -> HangVerdict | None:
    since = {one.rank: one.stopped_s for one in ranks.all if one.stopped_samples >= _STOPPED_SAMPLES}
    return _lasting(ranks, "stopped", since, 0.0)


def _uninterruptible(ranks: WatchedRanks) -> HangVerdict | None:
    if ranks.are_expected:
        return None
    since = {watched.rank: watched.uninterruptible_s for watched in ranks.all}
    return _lasting(ranks, "uninterruptible", since, min(_UNINTERRUPTIBLE_S, ranks.timeout_s))


def _overdue(ranks: WatchedRanks) -> HangVerdict | None:
    """What a script has said is not proof enough to act upon: it may only have underestimated its work."""
    late = [(one.rank, one.phase) for one in ranks.all if one.phase is not None and one.is_overdue]
    if not late:
        return None
    about = tuple(sorted(rank for rank, _ in late))
    lasted_s = max(ranks.at - phase.since for _, phase in late)
    return HangVerdict("overdue", about, lasted_s, certain=False, busy=ranks.busy)


def with_long_waits(verdict: HangVerdict, ranks: WatchedRanks) -> HangVerdict:
    """The verdict with what takes long in words. While a core is being written no hang is certain."""
    texts = filter(None, (_overdue_text(ranks), _cores_text(ranks)))
    return verdict._replace(overdue="; ".join(texts), certain=verdict.certain and not ranks.cores_since)


def _cores_text(ranks: WatchedRanks) -> str:
    if not ranks.cores_since:
        return ""
    since, rank = min((since, rank) for rank, since in ranks.cores_since.items())
    more = f" (and those of {len(ranks.cores_since) - 1} more)" if len(ranks.cores_since) > 1 else ""
    return f"the core of rank {rank}{more} is still being written after {duration_text(ranks.at - since)}"


def _overdue_text(ranks: WatchedRanks) -> str:
    """The phase that is the longest over its time, in words; empty: none is."""
    late = [(one.phase.until, one.rank, one.phase) for one in ranks.all if one.phase is not None and one.is_overdue]
    if not late:
        return ""
    _, rank, phase = min(late)
    more = f" (and {len(late) - 1} more ranks in theirs)" if len(late) > 1 else ""
    expected_s = duration_text(phase.until - phase.since)
    return f"rank {rank} has been in {phase.what!r} longer than the expected {expected_s}{more}"


def _lasting(ranks: WatchedRanks, kind: str, since: dict[int, float | None], at_least_s: float) -> HangVerdict | None:
    lasted = {rank: ranks.clock_s - since_s for rank, since_s in since.items() if since_s is not None}
    about = tuple(sorted(rank for rank, lasted_s in lasted.items() if lasted_s >= at_least_s))
    if not about:
        return None
    return HangVerdict(kind, about, max(lasted.values()), certain=False, busy=ranks.busy)
