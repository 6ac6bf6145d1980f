"""A decision as the report has it. Pure."""

from __future__ import annotations

from saferun.model import Value


class DecisionRow(Value):
    """What followed a failed attempt, and why, as the report has it.

    Attributes:
        attempt: the one that failed; 0 for the first.
        time: seconds since the epoch.
        next_step: ``retry`` (the start is tried again), ``restart`` (it uses up a restart), ``replace`` (a spare takes
            the place of a host, which uses up neither) or ``finish``.
        message: what follows and why, as it is printed: "starting again in 1.2 s (retry 1 of 3): port 29500 is in use".
        wait_s: before the next attempt.
        class_name: the class of the failure's cause, in the diagnosis' terms.
        host: the host that caused it, or that leaves the job because of it; empty: none, or there is one host.
        clock: the time as it is to be shown; empty where that is not wanted.
        spare: the spare host that takes the place of ``host``; empty: none.
    """

    attempt: int
    time: float
    next_step: str
    message: str
    wait_s: float = 0.0
    class_name: str = ""
    host: str = ""
    clock: str = ""
    spare: str = ""
