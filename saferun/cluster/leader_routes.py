"""Routes to the leader that have changed while the job goes on, and what is wrong with this host's own interfaces.

A host that no longer reaches the leader over one network sends over another one. It reports that to the leader, which
prints it: hosts that report the same in one line, and none of them if the cause is the leader's own interface.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from saferun.errors import printable
from saferun.linux.netlink import route_to
from saferun.linux.nic_state import nic_state, working_nics
from saferun.text.wording import hosts_text

_LONGEST_NOTICE = 300
# Notices that come from several hosts within this time are printed as one line.
_TOGETHER_S = 1.0


class LeaderRoutes:
    """The route of this host to the leader; on the leader, those of the other hosts.

    Args:
        label: this host's name.
        leader: the leader's name.
        addresses: of other hosts, in numbers, before any route has changed.
        print_line: takes a line for the user.
        on_notice: takes a line about this host's route, which the leader prints.
    """

    def __init__(
        self,
        label: str,
        leader: str,
        addresses: Iterable[str],
        *,
        print_line: Callable[[str], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self._label = label
        self._leader = leader
        self._print_line = print_line
        self._on_notice = on_notice
        self._notices: dict[str, str] = {}  # by host
        self._unwritten: list[str] = []  # hosts with notices
        self._reported_fault = ""
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""
        interfaces = {_nic_to(address) for address in dict.fromkeys(addresses)}
        self._nics = [name for name in working_nics() if name in interfaces] if interfaces else []

    def own_nic_fault(self) -> str:
        """The faults of this host's own interfaces, of those that led to other hosts when the hosts met."""
        amiss = [(name, nic_state(name)) for name in self._nics]
        return ", ".join(f"{name} {state}" for name, state in amiss if state)

    def report(self, was: str, now: str) -> None:
        """Report that this host sends its messages to another address of the leader: from ``was`` to ``now``."""
        nic = _nic_to(now)
        to = f"over {nic} ({now})" if nic else f"to {now}"
        cause = self.own_nic_fault() or f"{was} does not answer any more"
        self._on_notice(f"{cause}; messages to {self._leader} go {to} now")

    def note(self, label: str, text: str) -> None:
        """Another host reports over which route it reaches this one from now on."""
        if text and self._notices.get(label) != text:
            self._notices[label] = printable(text[:_LONGEST_NOTICE])
            self._unwritten.append(label)
            self.deadline = self.deadline or time.monotonic() + _TOGETHER_S

    def tick(self, now: float) -> None:
        """Print the notices of other hosts if that is due, equal ones as one line."""
        if self.deadline is None or now < self.deadline:
            return
        self.deadline = None
        unwritten, self._unwritten = list(dict.fromkeys(self._unwritten)), []
        own = self.own_nic_fault()
        if own:
            # Their routes failed because of this host's own interface, which is the one fault to print.
            if own != self._reported_fault:
                self._reported_fault = own
                self._print_line(
                    f"warning: {self._label}: {own}; other hosts reach it over another network; the job goes on"
                )
            return
        for text in dict.fromkeys(self._notices[label] for label in unwritten):
            labels = [label for label in unwritten if self._notices[label] == text]
            self._print_line(f"warning: {hosts_text(labels)}: {text}; the job goes on")

    def end(self) -> None:
        """The attempt ends: notices are not printed any more."""
        self.deadline = None


def _nic_to(address: str) -> str:
    try:
        return route_to(address).nic
    except (OSError, ValueError):
        return ""
