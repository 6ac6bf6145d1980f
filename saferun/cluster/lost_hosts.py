"""The hosts and saferuns of a job that are gone in an attempt: nothing of them is waited for any more."""

from __future__ import annotations

import time

from saferun.cluster.job_context import JobContext
from saferun.cluster.job_values import LostHost
from saferun.cluster.join_messages import Peer
from saferun.cluster.messages import LONGEST_MESSAGE, MOST_HOSTS
from saferun.cluster.roster import Roster
from saferun.cluster.silence import GONE, UNKNOWN, UNREACHABLE
from saferun.cluster.task_states import TaskStates
from saferun.model import JsonObject
from saferun.supervisor.events import SpareLost
from saferun.text.decoding import display_text, number

__all__ = ["LostHosts", "why_of"]

_LONGEST_NAME = 255

_MOST_RANKS = 100_000
_LOST_IF = (GONE, UNREACHABLE)


class LostHosts:
    """Who is lost in an attempt.

    Args:
        context: of the job.
        roster: the hosts of the attempt.
        states: know whose ranks have ended well.

    Attributes:
        hosts: the lost hosts with ranks, by their numbers.
        spares: the numbers of the lost ones without.
    """

    def __init__(self, context: JobContext, roster: Roster, states: TaskStates) -> None:
        self.hosts: dict[int, LostHost] = {}
        self.spares: set[int] = set()
        self._context = context
        self._roster = roster
        self._states = states
        self._left: set[int] = set()  # hosts that are gone, and whose ranks had ended well
        self._tasks: set[tuple[int, int]] = set()

    def add_task(self, host: int, task: int) -> None:
        """One of several saferuns of a host is gone."""
        self._tasks.add((host, task))

    def has(self, host: int, task: int) -> bool:
        """Whether a saferun is gone, alone or with its host."""
        return host in self.hosts or host in self._left or (host, task) in self._tasks

    def take(self, message: JsonObject, *, is_ending: bool) -> bool:
        """Take in that a host does not answer, which ends the attempt if its ranks have not ended well.

        Args:
            message: the coordinator's, about a host that is lost or has been probed.
            is_ending: whether the attempt ends already.

        Returns:
            Whether a host with ranks is gone now.

        Raises:
            One of ``MALFORMED``: the message makes no sense.
        """
        if message.get("op") == "probed" and message.get("why") not in _LOST_IF:
            return False
        host = number(message["host"], 0, MOST_HOSTS)
        if host in self._roster.spares:
            self._take_spare(self._roster.spares[host], message)
            return False
        peer = self._roster.peers.get(host)
        if peer is None or host in self.hosts or host in self._left or host == self._roster.host:
            return False
        text = _text_of(message)
        if self._states.is_done(host) and not is_ending:
            # The job no longer needs it. Should the hosts meet again, the rendezvous finds that it is missing.
            self._left.add(host)
            self._context.warn(f"{text}; the ranks of {peer.label} have ended well, so the job goes on")
        else:
            ranks = tuple(range(peer.base_rank, peer.base_rank + min(peer.ranks, _MOST_RANKS)))
            self.hosts[host] = LostHost(host, peer.label, why_of(message), text, ranks)
            if not is_ending:
                self._context.sender.abort_attempt("lost", f"{peer.label}: {text}")
        return True

    def _take_spare(self, spare: Peer, message: JsonObject) -> None:
        """A host without ranks is gone."""
        if spare.host not in self.spares:
            self.spares.add(spare.host)
            calls = self._context.calls
            calls.post(SpareLost(time.monotonic(), calls.attempt(), spare.label, _text_of(message)))


def why_of(message: JsonObject) -> str:
    """Why a host does not answer, as the coordinator has found out."""
    return display_text(message.get("why") or UNKNOWN, _LONGEST_NAME)


def _text_of(message: JsonObject) -> str:
    return display_text(message.get("text") or "it does not answer", LONGEST_MESSAGE)
