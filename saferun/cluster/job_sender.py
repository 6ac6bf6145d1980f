"""What this process sends to the other hosts of the job, by way of its coordinator."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from saferun.cluster.job_channel import JobChannel
from saferun.cluster.leader_clock import LeaderClock
from saferun.cluster.messages import LONGEST_MESSAGE, MOST_LINES
from saferun.cluster.roster import Roster
from saferun.model import RANKS_DONE, RANKS_LEFT_OVER, RANKS_RUN, JsonObject
from saferun.supervisor.actions import BroadcastDecision

if TYPE_CHECKING:
    from saferun.model import AbortKind

_MOST_UNREAD = 16


class JobSender:
    """Sends messages, each in the name of the current attempt.

    Args:
        channel: to the coordinator.
        attempt: returns the attempt that is current.
        roster: this host's place among the others.
        clock: this host's and the leader's.
    """

    def __init__(self, channel: JobChannel, attempt: Callable[[], int], roster: Roster, clock: LeaderClock) -> None:
        self._channel = channel
        self._attempt = attempt
        self.roster = roster
        self.on_end: Callable[[bool], object] = _nothing  # called when this host's part of an attempt ends, well or not
        self.joined_attempt = -1  # the last attempt for which the hosts have met
        self.aborted_attempt = -1  # the last one that this process has announced the end of
        self.leader_clock = clock
        # What this process has broadcast and not read in the log yet; of what never gets there, the newest.
        self._unread: deque[JsonObject] = deque(maxlen=_MOST_UNREAD)

    def join_attempt(self, number: int, roster: Roster) -> None:
        """The hosts have met for an attempt."""
        self.joined_attempt, self.roster = number, roster

    def abort_attempt(
        self,
        reason: AbortKind,
        text: str,
        *,
        hint: str = "",
        ranks: Sequence[int] = (),
        signum: int = 0,
        lost_task: int | None = None,
    ) -> None:
        """This attempt is to end on all hosts."""
        self.broadcast(
            "abort",
            reason=reason,
            text=_for_others(text),
            hint=_for_others(hint),
            ranks=list(ranks)[:MOST_LINES],
            signum=signum,
            lost_task=lost_task,
            time=time.time(),
        )
        self.aborted_attempt = self._number
        self.on_end(False)

    def broadcast_cause(self) -> None:
        """A rank of this host has shown the cause of a victim's failure, which ended the attempt."""
        self.broadcast("cause")

    def broadcast_request(self, by: str, *, at_once: bool) -> None:
        """The user has asked this host for the end of the job.

        Until the hosts have met for an attempt, they read the log of the previous one.
        """
        self.broadcast("request", attempt=self.joined_attempt, text=self.asked_here(by), at_once=at_once)

    def broadcast_checkpoint(self, by: str, signum: int) -> None:
        """The user wants the ranks to save a checkpoint and to end."""
        self.broadcast("checkpoint", text=self.asked_here(by), signum=signum)

    def asked_here(self, by: str) -> str:
        """Who asked for something, for other hosts."""
        label = self.roster.label
        return _for_others(by if label in by else f"{by} on {label}")

    def broadcast_decision(self, action: BroadcastDecision, texts: Sequence[str]) -> None:
        """What follows a failed attempt, on all hosts."""
        self.broadcast(
            "decision",
            next=action.next_step,
            exit_code=action.exit_code,
            wait_s=action.wait_s,
            restarts=action.restarts,
            text=[_for_others(line) for line in list(texts)[:MOST_LINES]],
            excluded=action.excluded,
            replaced=action.replaced,
        )

    def broadcast_judgement(self, number: int, headline: str, *, certain: bool) -> None:
        """What this host has found out about a hang of the job."""
        self.broadcast("judgement", n=number, text=_for_others(headline), certain=certain)

    def broadcast_preflight(self, message: JsonObject) -> None:
        """What the preflight checks came to, or whom to probe again."""
        self.broadcast("preflight", **message)

    def ask_for_progress(self, hosts: Sequence[int]) -> None:
        """These hosts are to report whether their ranks make progress."""
        self.broadcast("watch", hosts=list(hosts))

    def share(
        self, name: str, evidence: str, *, attempt: int | None = None, moved: bool = False, stopped: bool = False
    ) -> None:
        """Hand a chunk of evidence to the leader. ``attempt``: that it is of; of one that is over nothing is sent."""
        if attempt is not None and attempt != self._attempt():
            return
        chunk: JsonObject = {"time": time.time(), "moved": moved, "stopped": stopped, "evidence": evidence}
        behind_s = self.leader_clock.behind_s
        if behind_s is not None:
            chunk["behind_s"] = behind_s
        self._send("chunk", name=name, text=json.dumps(chunk))

    def send_state(self, state: JsonObject) -> None:
        """How the ranks of this process do, for the leader."""
        self._send("state", state=state)

    def acknowledge(self, attempt: int | None = None) -> None:
        """The decision has been taken in. ``attempt``: in whose log it is; None: the current attempt's."""
        self._send("ack", attempt=self._number if attempt is None else attempt)

    def probe(self, hosts: list[int], awaits_heartbeat: bool) -> None:  # noqa: FBT001 - by the collection
        """Have hosts probed.

        ``awaits_heartbeat``: none is lost because it does not answer (see ``Liveness.probe``).
        """
        self._send("probe", hosts=hosts, patient=awaits_heartbeat)

    def request_start_stage(self) -> None:
        """Ask how far the ranks have come, as their store shows it."""
        self._send("start_stage")

    def broadcast(self, kind: str, *, attempt: int | None = None, **fields: object) -> None:
        """Append an entry to the job's log, which all hosts read.

        Args:
            kind: what it says.
            attempt: whose log it is; None: the current attempt's.
            fields: of the entry.
        """
        who = {"host": self.roster.host, "task": self.roster.task, "label": self.roster.label}
        number = self._number if attempt is None else attempt
        message = {"kind": kind, **fields, "attempt": number, **who}
        self._unread.append(message)
        self._send("append", attempt=number, message=message)

    def note_read(self, entry: JsonObject) -> None:
        """An entry of this host's is in the log."""
        as_text = _sorted(entry)
        self._unread = deque((one for one in self._unread if _sorted(one) != as_text), maxlen=_MOST_UNREAD)

    def repeat_unread(self, attempt: int) -> None:
        """Append what a coordinator that has ended may have had, and not written."""
        for message in self._unread:
            if message["attempt"] == attempt:
                self._send("append", attempt=attempt, message=message, repeated=True)

    def _send(self, op: str, **fields: object) -> None:
        self._channel.send({"op": op, "attempt": self._number, **fields})

    @property
    def _number(self) -> int:
        """The attempt that messages are of: a host that joins a running job takes part before its supervisor knows."""
        return max(self._attempt(), self.joined_attempt)


class StateReport:
    """The state of this process's ranks in one attempt, as the leader is to see it.

    Args:
        sender: sends it.
    """

    def __init__(self, sender: JobSender) -> None:
        self._sender = sender
        self._state: JsonObject = {"s": RANKS_RUN}
        self._more: JsonObject = {}

    @property
    def has_ended(self) -> bool:
        """Whether all ranks of this process have ended well."""
        return self._state.get("s") in {RANKS_DONE, RANKS_LEFT_OVER}

    def set(self, state: JsonObject) -> None:
        """How the ranks do."""
        if state != self._state:
            self._state = state
            self._send()
            if state.get("s") == RANKS_DONE:
                self._sender.on_end(True)

    def set_route(self, text: str) -> None:
        """What became of this host's route to the leader, whose user is to know."""
        self._more["route"] = text
        self._send()

    def set_more(self, name: str, value: JsonObject) -> None:
        """Something that the leader is to know beside the state."""
        self._more[name] = value
        self._send()

    def send_once(self, name: str, value: JsonObject) -> None:
        """Something that the leader wants to know now. No later state has it: what is too long for one is dropped."""
        self._sender.send_state({**self._state, **self._more, name: value})

    def repeat(self) -> None:
        """Send the state once more."""
        self._send()

    def set_progress(self, moved: int, active: int) -> None:
        """How often the ranks were seen to move, and to be active: the leader has asked."""
        self._more["progress"] = [moved, active]
        self._send()

    def _send(self) -> None:
        self._sender.send_state({**self._state, **self._more})


def _nothing(_is_done: bool) -> None:  # noqa: FBT001 - as it is called
    """The default of a callback."""


def _sorted(message: JsonObject) -> str:
    return json.dumps(message, sort_keys=True)


def _for_others(text: str) -> str:
    """A text as it leaves this host: without secrets, since whoever reaches the store can read it."""
    try:
        from saferun.text.redaction import redacted_text
    except ImportError:  # from a file system that does not answer: what follows from the message matters more
        return ""
    return redacted_text(text[: 4 * LONGEST_MESSAGE])[:LONGEST_MESSAGE]
