"""The control path between the hosts of a job, as a supervisor sees it: who is heard, and what is made of silence.

The coordinator reports what it finds; here it is decided, by how the ranks do (``silence``). On the leader
this is about all others, on each other host about the one that leads. The ranks are those of this host; the host that
leads also asks some others how theirs do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from saferun.cluster.progress import ProgressWatch, WatchedRank
from saferun.cluster.silence import GO_ON, LOST, Progress, Unheard, judge, together
from saferun.errors import printable
from saferun.linux.netlink import route_to
from saferun.linux.nic_state import nic_state, working_nics
from saferun.linux.poller import Poller
from saferun.model import JsonObject

_LONGEST_MESSAGE = 300
_SHOWN = 4
# What several hosts report at once is one line.
_TOGETHER_S = 1.0
# Of the host timeout, how often a host that was asked says that its ranks move.
_REPORT_SHARE = 0.125
# Of the host timeout, for how long ranks are watched after a doubt that nothing came of.
_DOUBT = 2.0


class SilentHosts:
    """The control path.

    Args:
        poller: the loop's.
        host_timeout_s: for how long a host may be silent.
        hang_timeout_s: for how long nothing may move; 0: that is not checked.
        label: this host's name.
        leader: the leader's name.
        addresses: of other hosts, in numbers.
        leads: whether this host decides.
        speaks: whether this process prints messages; others of the host do not.
        ranks: returns the ranks of this host that run.
        print_line: takes a line for the user.
        on_lost: takes a host that is lost: its number, why, and a message.
        on_notice: takes a line about the route to the leader, which the leader prints.
        on_unheard: takes a message that the leader sends no heartbeats and the job goes on; empty: it does again.
        ask_others: on the leader: asks some other hosts to report progress; returns whether there are any
            whose ranks run.
        on_progress: takes what this host was asked to report: how often its ranks were seen to move, and to be active.
        has_ended: whether all ranks of this host have ended well.
        is_done: whether another host has reported that all of its ranks have.
    """

    def __init__(
        self,
        poller: Poller,
        *,
        host_timeout_s: float,
        hang_timeout_s: float,
        label: str,
        leader: str,
        addresses: Iterable[str],
        leads: bool,
        speaks: bool,
        ranks: Callable[[], Sequence[WatchedRank]],
        print_line: Callable[[str], None],
        on_lost: Callable[[int, str, str], None],
        on_notice: Callable[[str], None],
        on_unheard: Callable[[str], None],
        ask_others: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int, int], None] = lambda _moved, _active: None,
        has_ended: Callable[[], bool] = lambda: False,
        is_done: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._host_timeout_s = host_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._ranks = ranks
        self._print_line = print_line
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._on_unheard = on_unheard
        self._ask_others = ask_others
        self._on_progress = on_progress
        self._has_ended = has_ended
        self._is_done = is_done
        self._watch = ProgressWatch(host_timeout_s / 2, poller)
        self._label = label
        self._leader = leader
        self._leads = leads
        self._speaks = speaks
        self._unheard: dict[int, Unheard] = {}
        self._notices: dict[str, str] = {}  # by host
        self._unwritten: list[str] = []  # hosts with notices
        self._flush_at: float | None = None
        self._watch_until = 0.0
        self._reported_fault = ""
        # Of ranks elsewhere: since when they are watched, and when one of them moved, or was active, last.
        self._others_at: tuple[float, float, float] | None = None
        self._reports = (0, 0)
        self._report_at: float | None = None
        ways = {_nic_to(address) for address in dict.fromkeys(addresses)}
        self._nics = [name for name in working_nics() if name in ways] if ways else []

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return min((at for at in (self._watch.deadline, self._flush_at) if at is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._watch.deadline is not None and self._watch.deadline <= now:
            self._watch.tick(now, self._ranks())
            self._report(now)
            self._judge(now)
        if self._flush_at is not None and self._flush_at <= now:
            self._flush()

    def end(self) -> None:
        """The attempt ends: nothing is to be decided any more by who is heard."""
        self._watch.end()
        self._flush_at = None

    @property
    def missing(self) -> set[int]:
        """Hosts of which nothing is heard while the job goes on."""
        return {host for host, unheard in self._unheard.items() if unheard.goes_on}

    @property
    def unheard(self) -> set[int]:
        """Hosts of which nothing is heard, whatever that is going to mean."""
        return set(self._unheard)

    def missing_text(self) -> str:
        """The same in words."""
        labels = [unheard.label for unheard in self._unheard.values() if unheard.goes_on]
        return f"nothing has been heard of {_names(labels)}"

    # ---------------------------------------------------------------------------------------------------- what is heard

    def hear(self, message: JsonObject) -> None:
        """The coordinator has a doubt (``doubt``), does not hear of a host (``unheard``), or does again (``heard``)."""
        now = time.monotonic()
        match message["op"]:
            case "doubt":
                self._begin_watch(now)
            case "unheard":
                host = int(message["host"])
                known = self._unheard.get(host)
                text, why = _text(message.get("text")), str(message.get("why"))
                self._unheard[host] = Unheard(
                    host,
                    _text(message.get("label")),
                    why,
                    text,
                    known.since if known is not None else now,
                    goes_on=known is not None and known.goes_on,
                )
                self._begin_watch(now)
                self._judge(now)
            case "heard":
                self._hear_again(int(message["host"]), now)
                was, to = str(message.get("was") or ""), str(message.get("now") or "")
                if was != to and self._speaks:
                    self._on_notice(self._moved_message(printable(was), to))

    def _begin_watch(self, now: float) -> None:
        self._watch.begin(now)
        self._watch_until = now + _DOUBT * self._host_timeout_s
        if self._leads and self._others_at is None and self._ask_others():
            self._others_at = (now, now, now)

    def watch(self) -> None:
        """The leader wants to know whether the ranks of this one make progress."""
        now = time.monotonic()
        self._watch.begin(now)
        self._watch_until = now + _DOUBT * self._host_timeout_s
        self._report_at = now

    def _report(self, now: float) -> None:
        if self._report_at is None or now < self._report_at:
            return
        interval_s = max(self._host_timeout_s * _REPORT_SHARE, 0.1)
        progress = self._watch.progress(now, runs=bool(self._ranks()))
        moved, active = self._reports
        # Ranks that have only been watched from now on have not shown anything.
        seen_s = min(progress.watched_s, interval_s)
        reports = (moved + (progress.still_s < seen_s), active + (progress.quiet_s < seen_s))
        self._report_at = now + interval_s if now < self._watch_until else None
        if reports != self._reports:
            self._reports = reports
            self._on_progress(*reports)

    def hear_progress(self, *, moved: bool) -> None:
        """Ranks of another host have been seen to move, or at least to be active."""
        if self._others_at is not None:
            began_at, moved_at, _ = self._others_at
            now = time.monotonic()
            self._others_at = (began_at, now if moved else moved_at, now)

    def _verdict(self, unheard: Unheard, own: Progress, now: float) -> str:
        """By the ranks of this host; where these do not show that the job goes on, by those of others as well."""
        if self._is_done(unheard.host):
            return GO_ON  # no host waits for it, whatever has become of it
        ended = self._has_ended()
        if self._others_at is not None:
            verdict = judge(unheard, own, self._host_timeout_s, self._hang_timeout_s)
            if verdict == GO_ON and not (ended and unheard.goes_on):
                return verdict
            began_at, moved_at, active_at = self._others_at
            others = Progress(runs=True, watched_s=now - began_at, still_s=now - moved_at, quiet_s=now - active_at)
            verdict = judge(unheard, together(own, others), self._host_timeout_s, self._hang_timeout_s)
            if verdict != LOST or not ended or self._ask_others():
                return verdict
            # Theirs have ended since, and those of this host before.
            self._others_at = None
        return judge(unheard, own._replace(ended=ended), self._host_timeout_s, self._hang_timeout_s)

    def _hear_again(self, host: int, now: float) -> None:
        unheard = self._unheard.pop(host, None)
        if unheard is None or not unheard.goes_on:
            return
        self._print(f"{unheard.label} is heard again after {now - unheard.since:.0f} s")
        if not self._leads:
            self._on_unheard("")

    def note(self, label: str, text: str) -> None:
        """Another host reports what became of its way to this one."""
        if text and self._notices.get(label) != text:
            self._notices[label] = _text(text)
            self._unwritten.append(label)
            self._flush_at = self._flush_at or time.monotonic() + _TOGETHER_S

    # ---------------------------------------------------------------------------------------------------- what it means

    def _judge(self, now: float) -> None:
        progress = self._watch.progress(now, runs=bool(self._ranks()))
        going_on = []
        for unheard in list(self._unheard.values()):
            verdict = self._verdict(unheard, progress, now)
            if verdict == LOST:
                del self._unheard[unheard.host]
                own = "" if self._leads else self.own_fault()
                self._on_lost(unheard.host, "nic" if own else unheard.why, own or unheard.message)
            elif verdict == GO_ON and not unheard.goes_on:
                self._unheard[unheard.host] = unheard._replace(goes_on=True)
                going_on.append(unheard)
        if going_on:
            self._go_on(going_on)
        if self._unheard and now >= self._watch_until and self._others_at is not None:
            # Others report for a while; as long as there is something to be decided, they are asked again.
            self._watch_until = now + _DOUBT * self._host_timeout_s
            self._others_at = self._others_at if self._ask_others() else None
        elif not self._unheard and now >= self._watch_until:
            self._watch.end()
            self._others_at = self._report_at = None

    def _go_on(self, hosts: Sequence[Unheard]) -> None:
        own = self.own_fault()
        cause = f"{own}; " if own else ""
        why = "" if own else f" ({hosts[0].message})"
        names = _names([host.label for host in hosts])
        what = f"no heartbeat received from {names}" if self._leads else f"{names} cannot be reached"
        where = f"{self._label}: " if own or not self._leads else ""
        # How long that is waited for is said by whoever waits.
        sequel = "; the ranks make progress, so the job goes on"
        if all(self._is_done(host.host) for host in hosts):
            sequel = "; its ranks have ended well, so the job goes on"
        elif self._has_ended() and self._others_at is None:
            sequel = ""
        self._print(f"warning: {where}{cause}{what}{why}{sequel}")
        if not self._leads:
            self._on_unheard(what)

    def own_fault(self) -> str:
        """What is amiss with the interfaces that led to other hosts when the hosts met."""
        amiss = [(name, nic_state(name)) for name in self._nics]
        return ", ".join(f"{name} {state}" for name, state in amiss if state)

    def _moved_message(self, was: str, now: str) -> str:
        nic = _nic_to(now)
        to = f"over {nic} ({now})" if nic else f"to {now}"
        cause = self.own_fault() or f"{was} does not answer any more"
        return f"{cause}; messages to {self._leader} go {to} now"

    def _flush(self) -> None:
        """Tell what other hosts report, those with the same words together."""
        self._flush_at = None
        unsaid, self._unwritten = list(dict.fromkeys(self._unwritten)), []
        own = self.own_fault()
        if own:
            # They lost their way because of this host's own.
            if own != self._reported_fault:
                self._reported_fault = own
                self._print(
                    f"warning: {self._label}: {own}; other hosts reach it over another network; the job goes on"
                )
            return
        for text in dict.fromkeys(self._notices[label] for label in unsaid):
            labels = [label for label in unsaid if self._notices[label] == text]
            self._print(f"warning: {_names(labels)}: {text}; the job goes on")

    def _print(self, text: str) -> None:
        if self._speaks:
            self._print_line(f"saferun: {printable(text)}")


def _names(labels: Iterable[str]) -> str:
    shown = list(labels)
    if len(shown) <= _SHOWN:
        return ", ".join(shown)
    return f"{', '.join(shown[: _SHOWN - 1])} and {len(shown) - _SHOWN + 1} more hosts"


def _nic_to(address: str) -> str:
    try:
        return route_to(address).nic
    except (OSError, ValueError):
        return ""


def _text(value: object) -> str:
    """A text of another host, fit for a terminal."""
    return printable(str(value or "")[:_LONGEST_MESSAGE])
