"""The control path between the hosts of a job, as a supervisor sees it: which hosts are silent, and what follows.

The coordinator reports what it finds; what follows is decided here, by the progress of the ranks (``silence``). The
leader decides about all other hosts, each other host about the leader. Each judges by its own ranks; the leader also
asks some other hosts about theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from saferun.cluster.asked_progress import ProgressOfOthers, ProgressReports
from saferun.cluster.leader_routes import LeaderRoutes
from saferun.cluster.progress import ObservedRank, ProgressWatch
from saferun.cluster.silence import GO_ON, HOLD_OUT, LOST, Progress, SilentHost, judge, together, with_phases
from saferun.errors import printable
from saferun.linux.poller import Poller
from saferun.model import JsonObject, Value
from saferun.text.wording import hosts_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.silence import Verdict

_LONGEST_MESSAGE = 300
# A host that was asked about the progress of its ranks reports so often, as a share of the host timeout.
_REPORT_SHARE = 0.125
# After a doubt about another host, ranks are watched for so many host timeouts, also if the doubt comes to nothing.
_WATCHED_TIMEOUTS = 2.0


class SilenceLimits(Value):
    """How long to wait.

    Attributes:
        probe_after_s: for how long a host may be silent before it is probed.
        hang_timeout_s: for how long nothing may move; 0: that is not checked.
        patience_after_s: from when on a silent host is waited for as long, although the ranks stand still.
        has_successor: whether a spare can take the place of the leader, which this host waits for.
    """

    probe_after_s: float
    hang_timeout_s: float
    patience_after_s: float
    has_successor: bool = False


class ThisHost(Value):
    """This host, and this process on it.

    Attributes:
        label: this host's name.
        leader: the leader's name.
        leads: whether this host decides.
        is_head: whether this process prints messages; others of the host do not.
        addresses: of other hosts, in numbers.
    """

    label: str
    leader: str
    leads: bool
    is_head: bool
    addresses: tuple[str, ...]


class SilentHosts:
    """The hosts from which no heartbeats come, and what follows.

    Args:
        poller: the loop's.
        limits: how long to wait.
        this_host: this host, and this process on it.
        ranks: returns the ranks of this host that run.
        print_line: takes a line for the user.
        on_lost: takes a host that is lost: its number, why, and a message.
        on_notice: takes a line about the route to the leader, which the leader prints.
        on_leader_silence: takes the message that the leader is silent while the job goes on; empty: it answers again.
        ask_others: on the leader: asks some other hosts to report progress; returns whether there are any
            whose ranks run.
        on_progress: takes this host's answer to the leader: how often its ranks were seen to move, and to be active.
        has_ended: whether all ranks of this host have ended well.
        is_done: whether another host has reported that all of its ranks have.
    """

    def __init__(
        self,
        poller: Poller,
        limits: SilenceLimits,
        this_host: ThisHost,
        *,
        ranks: Callable[[], Sequence[ObservedRank]],
        print_line: Callable[[str], None],
        on_lost: Callable[[int, str, str], None],
        on_notice: Callable[[str], None],
        on_leader_silence: Callable[[str], None],
        ask_others: Callable[[], bool],
        on_progress: Callable[[int, int], None],
        has_ended: Callable[[], bool],
        is_done: Callable[[int], bool],
    ) -> None:
        self._limits = limits
        self._patient_from = time.monotonic() + limits.patience_after_s
        self._this_host = this_host
        self._ranks = ranks
        self._print_line = print_line
        self._on_lost = on_lost
        self._on_leader_silence = on_leader_silence
        self._has_ended = has_ended
        self._is_done = is_done
        self._watch = ProgressWatch(limits.probe_after_s / 2, poller)
        self._silent: dict[int, SilentHost] = {}
        self._watch_until = 0.0
        self._others = ProgressOfOthers(ask_others)
        self._reports = ProgressReports(max(limits.probe_after_s * _REPORT_SHARE, 0.1), on_progress)
        self._routes = LeaderRoutes(
            this_host.label, this_host.leader, this_host.addresses, print_line=self._print, on_notice=on_notice
        )

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return min((at for at in (self._watch.deadline, self._routes.deadline) if at is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._watch.deadline is not None and self._watch.deadline <= now:
            self._watch.tick(now, self._ranks())
            self._report(now)
            self._judge(now)
        self._routes.tick(now)

    def end(self) -> None:
        """The attempt ends: silent hosts no longer matter."""
        self._watch.end()
        self._routes.end()

    @property
    def silent_but_tolerated(self) -> set[int]:
        """Silent hosts without which the job goes on."""
        return {host for host, silent in self._silent.items() if silent.goes_on}

    @property
    def silent(self) -> set[int]:
        """All silent hosts, those included about which nothing is decided yet."""
        return set(self._silent)

    def tolerated_text(self) -> str:
        """The message that names the ``silent_but_tolerated`` hosts."""
        labels = [silent.label for silent in self._silent.values() if silent.goes_on]
        return f"no answer from {hosts_text(labels)}"

    # -------------------------------------------------------------------------------------- messages of the coordinator

    def hear(self, message: JsonObject) -> None:
        """Take a message of the coordinator.

        ``late``: heartbeats of a host are late; ``silent``: a host is silent; ``returned``: no longer.
        """
        now = time.monotonic()
        match message["op"]:
            case "late":
                self._begin_watch(now)
            case "silent":
                host = int(message["host"])
                known = self._silent.get(host)
                text, why = _text(message.get("text")), str(message.get("why"))
                self._silent[host] = SilentHost(
                    host,
                    _text(message.get("label")),
                    why,
                    text,
                    known.since if known is not None else now,
                    goes_on=known is not None and known.goes_on,
                )
                self._begin_watch(now)
                self._judge(now)
            case "returned":
                self._hear_again(int(message["host"]), now)
                was, to = str(message.get("was") or ""), str(message.get("now") or "")
                if was != to and self._this_host.is_head:
                    self._routes.report(printable(was), to)

    def _begin_watch(self, now: float) -> None:
        self._watch.begin(now)
        self._watch_until = now + _WATCHED_TIMEOUTS * self._limits.probe_after_s
        if self._this_host.leads:
            self._others.begin(now)

    def watch(self) -> None:
        """The leader asks whether the ranks of this host make progress: watch them, and report it for a while."""
        now = time.monotonic()
        self._watch.begin(now)
        self._watch_until = now + _WATCHED_TIMEOUTS * self._limits.probe_after_s
        self._reports.begin(now)

    def _report(self, now: float) -> None:
        if self._reports.is_due(now):
            progress = with_phases(self._watch.progress(now, runs=bool(self._ranks())))
            self._reports.report(progress, now, self._watch_until)

    def hear_progress(self, *, moved: bool) -> None:
        """Another host reports that its ranks moved, or at least were active."""
        self._others.hear(time.monotonic(), moved=moved)

    def _verdict(self, silent: SilentHost, own: Progress, now: float) -> Verdict:
        """What to do about a silent host: by the ranks of this host, and if these do not suffice, of others as well."""
        if self._is_done(silent.host):
            return GO_ON  # its ranks have ended well, so that no host waits for it
        ended = self._has_ended()
        judge_one = partial(
            judge,
            silent,
            silence_limit_s=self._limits.probe_after_s,
            hang_timeout_s=self._limits.hang_timeout_s,
            is_patient=now >= self._patient_from,
            has_successor=self._limits.has_successor,
        )
        others = self._others.progress(now)
        if others is not None:
            verdict = judge_one(own)
            if verdict == GO_ON and not (ended and silent.goes_on):
                return verdict
            verdict = judge_one(together(own, others))
            if verdict != LOST or not ended or self._others.ask_again():
                return verdict
            # The ranks of this host ended before, and those of the others have ended since.
        return judge_one(own._replace(ended=ended))

    def _hear_again(self, host: int, now: float) -> None:
        silent = self._silent.pop(host, None)
        if silent is None or not silent.goes_on:
            return
        self._print(f"{silent.label} answers again after {now - silent.since:.0f} s")
        if not self._this_host.leads:
            self._on_leader_silence("")

    def note(self, label: str, text: str) -> None:
        """Another host reports over which route it reaches this one from now on."""
        self._routes.note(label, text)

    def own_nic_fault(self) -> str:
        """The faults of this host's own interfaces, of those that led to other hosts when the hosts met."""
        return self._routes.own_nic_fault()

    # ---------------------------------------------------------------------------------------------------- what it means

    def _judge(self, now: float) -> None:
        progress = self._watch.progress(now, runs=bool(self._ranks()))
        going_on: dict[Verdict, list[SilentHost]] = {}
        for silent in list(self._silent.values()):
            verdict = self._verdict(silent, progress, now)
            if verdict == LOST:
                del self._silent[silent.host]
                own = "" if self._this_host.leads else self.own_nic_fault()
                self._on_lost(silent.host, "nic" if own else silent.why, own or silent.message)
            elif verdict in {GO_ON, HOLD_OUT} and not silent.goes_on:
                self._silent[silent.host] = silent._replace(goes_on=True)
                going_on.setdefault(verdict, []).append(silent)
        for verdict, hosts in going_on.items():
            self._go_on(hosts, verdict)
        if self._silent and now >= self._watch_until and self._others.are_asked:
            # Others report for a limited time only; while a host is silent, they are asked again.
            self._watch_until = now + _WATCHED_TIMEOUTS * self._limits.probe_after_s
            self._others.ask_again()
        elif not self._silent and now >= self._watch_until:
            self._watch.end()
            self._others.end()
            self._reports.end()

    def _go_on(self, hosts: Sequence[SilentHost], verdict: Verdict) -> None:
        own = self.own_nic_fault()
        cause = f"{own}; " if own else ""
        why = "" if own else f" ({hosts[0].message})"
        names = hosts_text([host.label for host in hosts])
        what = f"no heartbeat received from {names}" if self._this_host.leads else f"{names} cannot be reached"
        where = f"{self._this_host.label}: " if own or not self._this_host.leads else ""
        # The supervisor prints how long it waits.
        sequel = "; the ranks make progress, so the job goes on"
        if verdict == HOLD_OUT:
            sequel = self._hold_out_text()
        elif all(self._is_done(host.host) for host in hosts):
            sequel = "; its ranks have ended well, so the job goes on"
        elif self._has_ended() and not self._others.are_asked:
            sequel = ""
        self._print(f"warning: {where}{cause}{what}{why}{sequel}")
        if not self._this_host.leads:
            self._on_leader_silence(what)

    def _hold_out_text(self) -> str:
        if self._limits.hang_timeout_s <= 0:
            return "; no rank makes progress, and the job waits"
        longest_s = max(self._limits.probe_after_s, self._limits.hang_timeout_s)
        return f"; the job ends if no rank makes progress for {longest_s:g} s (sooner with --host-timeout)"

    def _print(self, text: str) -> None:
        if self._this_host.is_head:
            self._print_line(f"saferun: {printable(text)}")


def _text(value: object) -> str:
    """A text of another host, made printable."""
    return printable(str(value or "")[:_LONGEST_MESSAGE])
