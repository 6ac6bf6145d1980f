"""What follows when no heartbeats come from another host: is it lost, or only the route to it? Pure.

If only the control path of a host is cut, its ranks train on over the other network, and so does the job; likewise if
its saferun was stopped (SIGSTOP). If the host is dead, all ranks that wait for its ranks stand still. So the ranks that
can be observed tell the two apart: while they make progress the job goes on, and a verdict is due only when they stop.

A rank whose script has announced a long phase (``saferun.expect``) may do nothing that can be seen, and the others wait
for it: while one is in such a phase, that counts as progress. If the silent host is known to be gone, only the phases
that other hosts report count.

A host may also be paused for a while (a virtual machine that is moved), or a switch may restart: then all ranks stand
still and go on later. Where an early end would gain nothing, since no other attempt could follow it, such a host is
waited for until the job counts as hung.
"""

from __future__ import annotations

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Literal, TypeAlias

    Verdict: TypeAlias = Literal["wait", "go on", "hold out", "lost"]

__all__ = [
    "CUT",
    "ENDED",
    "FROZEN",
    "GONE",
    "GO_ON",
    "HOLD_OUT",
    "LOST",
    "REACHED",
    "UNKNOWN",
    "UNREACHABLE",
    "WAIT",
    "Progress",
    "SilentHost",
    "judge",
    "together",
    "with_phases",
]

# Why a host is silent, as the liveness probe finds out (``coordinator/liveness_probe.py``).
GONE = "gone"
REACHED = "reached"
CUT = "cut"
FROZEN = "frozen"
UNREACHABLE = "unreachable"
UNKNOWN = "unknown"
ENDED = "ended"

WAIT: Final = "wait"
GO_ON: Final = "go on"
HOLD_OUT: Final = "hold out"
LOST: Final = "lost"

# Certain: its saferun does not run there any more, and its ranks end with it.
_CERTAIN = frozenset({GONE})
# It is certain that the host is up.
_UP = frozenset({CUT, FROZEN})
# Ranks must have stood still for this share of the host timeout before a silent host is taken to be the reason.
_STILL_SHARE = 0.5


class SilentHost(Value):
    """A host of which nothing is heard.

    ``why``: ``gone``, ``unreachable``, ``cut``, ``frozen``, ``unknown``. ``since``: when that was found, in monotonic
    seconds. ``goes_on``: the job has gone on without hearing of it.
    """

    host: int
    label: str
    why: str
    message: str
    since: float
    goes_on: bool = False


class Progress(Value):
    """How the ranks do: those of this host, and of others that can be asked.

    Attributes:
        runs: whether there are any.
        watched_s: for how long they have been watched for this.
        still_s: for how long none of them has moved: output, reading, work in bursts. A loop that waits does not count.
        quiet_s: for how long none has moved or used its processor.
        ended: whether all of this host have ended well, and there are no others that can be asked.
        unannounced_s: for how long none of them has been in a phase that its script announced.
    """

    runs: bool
    watched_s: float
    still_s: float
    quiet_s: float
    ended: bool = False
    unannounced_s: float = float("inf")


def with_phases(progress: Progress) -> Progress:
    """The same if ranks in a phase that their scripts announced count as ranks that move."""
    return progress._replace(
        still_s=min(progress.still_s, progress.unannounced_s), quiet_s=min(progress.quiet_s, progress.unannounced_s)
    )


def judge(
    silent: SilentHost,
    progress: Progress,
    silence_limit_s: float,
    hang_timeout_s: float,
    *,
    is_patient: bool = False,
    has_successor: bool = False,
) -> Verdict:
    """What to do about a host of which nothing is heard.

    ``WAIT`` a moment, ``GO_ON`` without it, ``HOLD_OUT`` although nothing moves, or it is ``LOST``.

    Args:
        silent: what is known of it.
        progress: of the ranks of this host.
        silence_limit_s: for how long a host may be silent before its ranks decide.
        hang_timeout_s: for how long nothing may move; 0: that is not checked.
        is_patient: whether ranks that stand still are no reason before they have for so long.
        has_successor: whether the silent host is a leader whose place a spare can take: the others meet there, and need
            this host also if its ranks have failed.
    """
    if silent.why not in _CERTAIN:
        progress = with_phases(progress)
    if silent.goes_on:
        may_return = is_patient and silent.why not in _CERTAIN
        show_nothing = not progress.runs and (progress.ended or not has_successor)
        if may_return or show_nothing or progress.quiet_s < silence_limit_s:
            return _while_it_goes_on(progress, silence_limit_s, hang_timeout_s)
        return LOST
    if silent.why in _CERTAIN:
        return LOST
    if progress.ended:
        # Nothing here can show how the ranks of that host do. It may be at work, and is waited for within bounds.
        return GO_ON
    enough_s = silence_limit_s * _STILL_SHARE
    # A host that answers somewhere is alive, so that ranks that are at work are enough.
    still_s = progress.quiet_s if silent.why in _UP else progress.still_s
    if still_s < min(enough_s, progress.watched_s):
        return GO_ON
    if progress.watched_s < enough_s:
        return WAIT
    return HOLD_OUT if is_patient else LOST


def together(own: Progress, others: Progress | None) -> Progress:
    """How the ranks do that can be seen, those of other hosts included.

    Args:
        own: of the ranks of this host.
        others: of ranks elsewhere; None: there are none that could be asked.
    """
    if others is None:
        return own
    return Progress(
        own.runs or others.runs,
        # None of them has been watched for longer than those that were asked last.
        min(own.watched_s, others.watched_s),
        min(own.still_s, others.still_s),
        min(own.quiet_s, others.quiet_s),
        unannounced_s=min(own.unannounced_s, others.unannounced_s),
    )


def _while_it_goes_on(progress: Progress, silence_limit_s: float, hang_timeout_s: float) -> Verdict:
    longest_s = max(silence_limit_s, hang_timeout_s)
    return LOST if progress.runs and hang_timeout_s > 0 and progress.still_s >= longest_s else GO_ON
