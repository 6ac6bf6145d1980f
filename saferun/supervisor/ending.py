"""Why an attempt ends: one value, and one rule for which of two reasons prevails. Pure."""

from __future__ import annotations

import signal

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.supervisor.events import StartFailed
    from saferun.supervisor.policy.faulty_hosts import FaultyHost


class Failed(Value):
    """A rank failed, or the ranks cannot go on. ``local_rank``: the first of this host that did; -1: none of them."""

    local_rank: int = -1


class Hung(Value):
    """The ranks are ended because they hang. ``is_final``: there is to be no other attempt."""

    is_final: bool = False


class Stopped(Value):
    """The user or the scheduler stopped the job.

    ``host``: on which other host; empty: on this one. ``by``: who, if it was by saferunctl and not by a signal.
    """

    signum: int
    host: str = ""
    by: str = ""


class Regroup(Value):
    """Other hosts form the job from now on, this one among them: it is no failure.

    ``by``: who asked for another attempt of the same hosts, by saferunctl; empty: no user did. ``is_counted``: whether
    it uses a restart, because the job has to wait for a host that takes the place of one.
    """

    message: str
    by: str = ""
    is_counted: bool = False


class Leave(Value):
    """This host was sent a signal, and the job goes on without it."""

    signum: int


class StoreLost(Value):
    """The process that served the ranks' store is gone."""

    what: str
    hint: str


class NotStarted(Value):
    """The attempt could not be started.

    Attributes:
        what: could not be done.
        hint: what to do about it.
        exit_code: what saferun ends with for it.
        class_name: the class of the cause, where another try may help; empty: it would not.
        by_checks: whether the preflight checks of all hosts found it.
        faulty: hosts that are themselves at fault, whose places spares are to take.
        may_go_on: whether the ranks could be started with these all the same.
    """

    what: str
    hint: str
    exit_code: int
    class_name: str = ""
    by_checks: bool = False
    faulty: tuple[FaultyHost, ...] = ()
    may_go_on: bool = False

    @classmethod
    def of(cls, event: StartFailed, *, by_checks: bool) -> NotStarted:
        """The ending that follows from the event."""
        return cls(
            event.what,
            event.hint,
            event.exit_code,
            event.class_name,
            by_checks=by_checks,
            faulty=event.faulty,
            may_go_on=event.may_go_on,
        )


Ending = Failed | Hung | Stopped | Regroup | Leave | StoreLost | NotStarted

# What explains more weighs more.
_WEIGHT: dict[type, int] = {Failed: 0, Stopped: 0, Hung: 1, StoreLost: 2, NotStarted: 3, Regroup: 4}


def prevailing(earlier: Ending | None, later: Ending) -> Ending:
    """Which of two reasons an attempt ends for.

    A signal to this host stands, whatever the ranks do on their way out, and only a regrouping gives way to it, and a
    signal to another host, since a scheduler sends one to all of them: what had failed before was not its doing.
    Of all else the reason that explains more prevails, and of two that explain as much the later one; but of failures
    the first. What this host sees fail while the hosts regroup are ranks that others have left.
    Where a user had the job stopped, and then killed, because its ranks did not end, both of it is the reason.
    """
    if earlier is None:
        return later
    if isinstance(earlier, Stopped) and isinstance(later, Stopped) and _is_killed_after(earlier, later):
        # An order to this host stays one.
        host = later.host if earlier.host else ""
        return later._replace(by=f"{earlier.by}, then {later.by}", host=host)
    if _is_order(earlier):
        return earlier
    if _is_order(later):
        is_of_scheduler = isinstance(earlier, Stopped) and not earlier.by
        return later if is_of_scheduler or isinstance(earlier, Regroup) else earlier
    weight = _WEIGHT[type(later)]
    return later if weight and weight >= _WEIGHT[type(earlier)] else earlier


def signum_of(ending: Ending | None) -> int | None:
    """The signal to this host that ends the attempt, if one does."""
    return ending.signum if isinstance(ending, Stopped | Leave) and _is_order(ending) else None


def explanation(ending: Ending | None) -> tuple[str, str]:
    """What happened and a hint, where saferun itself could not do something; empty texts where a rank knows more."""
    return (ending.what, ending.hint) if isinstance(ending, StoreLost | NotStarted) else ("", "")


def is_final(ending: Ending | None) -> bool:
    """Whether there is no other attempt after it, whatever the policy says."""
    return (isinstance(ending, Hung) and ending.is_final) or (isinstance(ending, NotStarted) and not ending.class_name)


def _is_killed_after(earlier: Stopped, later: Stopped) -> bool:
    return bool(earlier.by and later.by) and later.signum == signal.SIGKILL != earlier.signum


def _is_order(ending: Ending) -> bool:
    """Whether it is an order to this host to stop."""
    return isinstance(ending, Leave) or (isinstance(ending, Stopped) and not ending.host)
