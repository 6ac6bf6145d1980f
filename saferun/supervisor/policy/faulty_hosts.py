"""Hosts that are themselves at fault, and which of them another attempt leaves out. Pure."""

from __future__ import annotations

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from saferun.supervisor.policy.attempts import Decision

__all__ = ["FLAPPING_S", "FaultyHost", "FaultyHosts", "decision_before_ranks", "may_replace", "one_living"]

FLAPPING_S = 300.0
"""A link that is lost twice within this time is the fault of its host; once, it may have been anything."""
_MOST_REMEMBERED = 10_000
_MOST_NAMED = 4


class FaultyHost(Value):
    """A host whose own hardware or system failed.

    Attributes:
        host: its number in the attempt.
        label: its name.
        why: what failed, to follow the name: ``GPU 3 has fallen off the bus``.
        may_pass: whether it may have been something else, unless it comes again soon: a link that was lost.
        is_lost: whether the host is gone, so that it comes to no other attempt.
    """

    host: int
    label: str
    why: str
    may_pass: bool = False
    is_lost: bool = False


class FaultyHosts:
    """What is remembered of such hosts over all attempts."""

    def __init__(self) -> None:
        self._seen_at: dict[str, float] = {}  # when the link of a host was lost last

    def at_fault(self, faults: Sequence[FaultyHost], at: float) -> tuple[FaultyHost, ...]:
        """The hosts that are not to take part in another attempt. To be called once for each attempt that failed.

        Args:
            faults: what is known of the attempt.
            at: when it failed, in monotonic seconds.
        """
        found = []
        for fault in faults:
            if fault.may_pass and not fault.is_lost:
                before = self._seen_at.get(fault.label)
                if len(self._seen_at) < _MOST_REMEMBERED:
                    self._seen_at[fault.label] = at
                if before is None or at - before > FLAPPING_S:
                    continue
                fault = fault._replace(why=f"{fault.why}, twice within {FLAPPING_S / 60:.0f} minutes")  # noqa: PLW2901
            found.append(fault)
        return tuple(found)


def may_replace(faults: Sequence[FaultyHost], spares: Sequence[str], *, moves_leader: bool) -> bool:
    """Whether spares can take the places of all these hosts. ``moves_leader``: of the leader, too."""
    return 0 < len(faults) <= len(spares) and (moves_leader or all(fault.host for fault in faults))


def one_living(faults: Sequence[FaultyHost]) -> tuple[tuple[FaultyHost, ...], int | None]:
    """Those of the hosts that are replaced at once, and the number of the one that has to hear of it; None: none.

    A decision names one host that leaves the job; the leader first, since all others have to know. Another one that
    lives is replaced when it is found at fault again. Those that are lost do not come anyway.
    """
    living = min((fault for fault in faults if not fault.is_lost), key=lambda fault: fault.host > 0, default=None)
    return tuple(f for f in faults if f.is_lost or f is living), living.host if living is not None else None


def decision_before_ranks(
    faults: Sequence[FaultyHost], spares: Sequence[str], *, moves_leader: bool, may_go_on: bool
) -> Decision | None:
    """What follows where checks have found hosts at fault before any rank was started; None: as for any failed start.

    Args:
        faults: whose places spares were to take.
        spares: the names of those that are there by now.
        moves_leader: whether they can take that of the leader, too.
        may_go_on: whether the ranks can be started all the same.
    """
    from saferun.supervisor.policy.attempts import Decision

    if may_replace(faults, spares, moves_leader=moves_leader):
        faulty, living = one_living(faults)
        reason, message = replaced_text(faulty, spares)
        return Decision("replace", 0.0, message, exclude=living, reason=reason, faulty=faulty)
    if not (faults and may_go_on):
        return None
    reason = f"no spare is left that could take the place of {faults[0].label}"
    return Decision("retry", 0.0, f"starting again: {reason}", reason=reason)


def replaced_text(faults: Sequence[FaultyHost], spares: Sequence[str]) -> tuple[str, str]:
    """Why spares take the places of these hosts, and the same with what follows.

    ``node5 is left out (GPU 3 has fallen off the bus); node66, a spare, takes its place; 1 spare is left``
    """
    reason = _reason(faults, spares)
    return reason, f"starting again: {reason}"


def _reason(faults: Sequence[FaultyHost], spares: Sequence[str]) -> str:
    rest = len(spares) - len(faults)
    left = "no spare is left" if rest == 0 else "1 spare is left" if rest == 1 else f"{rest} spares are left"
    if len(faults) == 1:
        fault = faults[0]
        return f"{fault.label} is left out ({fault.why}); {spares[0]}, a spare, takes its place; {left}"
    named = "; ".join(f"{fault.label}: {fault.why}" for fault in faults[:_MOST_NAMED])
    more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
    return f"{len(faults)} hosts are left out ({named}{more}); spares take their places; {left}"
