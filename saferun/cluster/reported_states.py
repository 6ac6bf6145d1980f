"""The states that the saferuns of all hosts report to the leader, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from saferun.cluster.job_context import JobContext
from saferun.cluster.join_messages import Peer
from saferun.cluster.lines_of_others import LinesOfOthers
from saferun.cluster.lost_hosts import LostHosts
from saferun.cluster.messages import KeptErrors, task_of
from saferun.cluster.roster import Roster
from saferun.cluster.silent_hosts import SilentHosts
from saferun.cluster.task_states import TaskStates
from saferun.errors import printable
from saferun.model import RANKS_LEFT_OVER
from saferun.supervisor.events import HostsDone
from saferun.text.decoding import display_text

__all__ = ["ReportedStates"]

_LONGEST_LEFTOVERS = 300


class ReportedStates:
    """Takes the states of one attempt, on the leader.

    Args:
        context: of the job.
        roster: the hosts of the attempt.
        states: keep the last one of each saferun.
        lost_hosts: of the attempt: a state may say that its saferun is gone.
        silent_hosts: of the attempt: ranks of other hosts show whether the job makes progress without them.
        review_chunks: called when there may be no more evidence to wait for.
        on_silent_awaited: takes a text about silent hosts when only their ranks have not ended; empty: no longer.
    """

    def __init__(
        self,
        context: JobContext,
        roster: Roster,
        states: TaskStates,
        *,
        lost_hosts: LostHosts,
        silent_hosts: SilentHosts,
        review_chunks: Callable[[], None],
        on_silent_awaited: Callable[[str], None],
    ) -> None:
        self._context = context
        self._roster = roster
        self._states = states
        self._lost_hosts = lost_hosts
        self._silent_hosts = silent_hosts
        self._review_chunks = review_chunks
        self._on_silent_awaited = on_silent_awaited
        self._lines = LinesOfOthers()
        self._waits_for_silent = False

    def take(self, changed: Mapping[str, object]) -> None:
        """Take the states that have changed.

        Args:
            changed: each by its saferun: ``HOST/TASK``.

        Raises:
            One of ``MALFORMED``: one of them makes no sense. All others have been taken.
        """
        kept = KeptErrors()  # what one saferun reports hides nothing of the others
        for key, state in changed.items():
            with kept:
                host, task = task_of(key)
                peer = self._roster.peer_of(host, task)
                if peer is None or not isinstance(state, dict):
                    continue
                self._states.add(key, state)
                moved, active = self._states.progress(key, state.get("progress"))
                if moved or active:
                    self._silent_hosts.hear_progress(moved=moved)
                if isinstance(route := state.get("route"), str) and self._lines.admit(key, f"{key} route", route):
                    self._silent_hosts.note(peer.label, route)
                self._print_left_over(key, peer, state)
                self._context.reports.take_state(key, peer, self._states, state)
                if state.get("s") == "gone":
                    self._lost_hosts.add_task(host, task)
        with kept:
            self._review_chunks()
            # Silent hosts without which the job goes on have no say in whether it hangs.
            self._context.reports.on_states(self._states.of_heard(self._silent_hosts.silent_but_tolerated))
        self.check_end()
        kept.raise_first()

    def _print_left_over(self, key: str, peer: Peer, state: Mapping[str, Any]) -> None:
        """Another host waits for processes that its ranks left behind, and the job waits for that host."""
        is_left_over = state.get("s") == RANKS_LEFT_OVER and peer.host != self._roster.host
        if is_left_over and isinstance(state.get("text"), str):
            text = display_text(state["text"], _LONGEST_LEFTOVERS)
            if self._lines.admit(key, f"{key} leftovers", text):
                self._context.calls.print_line(f"saferun: {printable(peer.label)}: {printable(text)}")

    def check_end(self) -> None:
        """Post that all ranks of the job have ended well; or that only those of silent hosts have not."""
        if self._states.are_all_done():
            self._context.calls.post(HostsDone(time.monotonic(), self._context.calls.attempt()))
        else:
            self.check_silent()

    def check_silent(self) -> None:
        """Report when only the ranks of silent hosts have not ended well, and when that is over."""
        living = self._states.living()
        waits = bool(living) and living <= self._silent_hosts.silent_but_tolerated
        if waits != self._waits_for_silent:
            self._waits_for_silent = waits
            self._on_silent_awaited(self._silent_hosts.tolerated_text() if waits else "")
