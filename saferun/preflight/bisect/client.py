"""The trials of this host beside a search for bad parts: a process that runs them, read without ever waiting.

It imports torch once and is used for one trial after the other. One that does not answer is killed, and the next trial
starts another.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from saferun.linux.children import JOB_SIGNALS, Child, SpawnError, spawn_unawaited
from saferun.linux.json_lines import JsonLines
from saferun.linux.poller import Poller
from saferun.model import JsonObject, Value
from saferun.preflight.bisect import Group, Member, Outcome, Trial

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PROGRAM = os.path.join(_PACKAGE, "coordinator", "trial_server.py")
SIZES_BYTES = (4, 64 << 10, 4 << 20)
# For importing torch, where the process has not done that yet.
IMPORT_S = 90.0
# The process ends its members at the trial's deadline, and they have to die.
MARGIN_S = 10.0
_KINDS = frozenset({"ok", "timeout", "error"})
_WORDS_AT_MOST = 500


class TrialPlace(Value):
    """Where the members of this host meet the others.

    Attributes:
        host: this host's number in the trials.
        backend: ``gloo`` or ``nccl`` (which is RCCL on AMD GPUs).
        store_address, store_port: of a TCPStore that outlives the trials, as this host reaches it. Groups of one host
            have a store of their own.
        prefix: of all keys; no two searches with the same store may have the same.
    """

    host: int
    backend: str
    store_address: str = ""
    store_port: int = 0
    prefix: str = "saferun-trials"


class TrialRun:
    """Runs the share of one host in trials.

    Args:
        place: where its members meet the others.
        environ: of the process and of the members: that of the ranks.
        poller: the loop's.
        on_ready: told once per process what is in the way of running trials; empty: nothing, torch is imported.
        on_done: told exactly once for each trial that was started how the members of this host did; those who failed
            first come first. It may be called from within ``start``.
    """

    def __init__(
        self,
        place: TrialPlace,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        on_ready: Callable[[str], None],
        on_done: Callable[[Trial, tuple[Outcome, ...]], None],
    ) -> None:
        self.deadline: float | None = None
        self._place = place
        self._environ = dict(environ)
        self._poller = poller
        self._on_ready = on_ready
        self._on_done = on_done
        self._child: Child | None = None
        self._lines: JsonLines | None = None
        self._is_ready = False
        self._broken = ""
        self._trial: Trial | None = None
        self._where: dict[int, str] = {}
        self._outcomes: dict[int, Outcome] = {}

    @property
    def pid(self) -> int | None:
        """The process; None: there is none, or its end was ordered."""
        return self._child.pid if self._child is not None else None

    @property
    def is_busy(self) -> bool:
        """Whether a trial is going on."""
        return self._trial is not None

    def prepare(self, now: float) -> None:
        """Start the process, so that torch is there when the first trial is asked for.

        Args:
            now: monotonic seconds. Call ``expire`` when ``deadline`` has passed.
        """
        if self._lines is not None:
            return
        self.deadline = now + IMPORT_S
        try:
            self._spawn()
        except (OSError, SpawnError) as error:
            self.deadline = None
            self._give_up(f"the trial process cannot be started: {error}")

    def start(self, trial: Trial, now: float, pretend: Mapping[int, str] | None = None) -> None:
        """Run this host's share of a trial. One that is still going on is given up, and told.

        Args:
            trial: of which members may be of this host, or none.
            now: monotonic seconds. Call ``expire`` when ``deadline`` has passed.
            pretend: what members do wrong in tests, by local rank.
        """
        if self._trial is not None:
            self._finish("another trial was asked for")
        self._trial = trial
        self._where = {}
        self._outcomes = {}
        if not self._members():
            self._finish("")
            return
        self.prepare(now)
        if self._lines is None:
            return
        self.deadline = now + trial.deadline_s + MARGIN_S + (0.0 if self._is_ready else IMPORT_S)
        self._lines.send(request_of(trial, self._place, pretend or {}))

    def expire(self) -> None:
        """The deadline has passed: what has come is all there is, and the process goes."""
        ready = self._is_ready
        self.close()
        self._give_up("" if ready else f"torch was not imported within {IMPORT_S:g} s")

    def on_exit(self, words: str = "") -> None:
        """The process ``pid`` has been reaped. ``words``: how it ended: ``killed by SIGSEGV``."""
        self._forget_child()
        self._broken = self._broken or f"the trial process ended{f' ({words})' if words else ''}"
        # What it said before is still in the socket.
        self._on_readable()

    def close(self) -> None:
        """End the process, and its members with it. Nobody is told; whoever reaps children reaps it."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
        self._forget_child()
        self._stop_reading()

    # -------------------------------------------------------------------------------------------------------- within

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        argv = [sys.executable, "-P", _PROGRAM, str(theirs.fileno())]
        keep = [theirs.fileno()]
        self._is_ready = False
        self._broken = ""
        try:
            self._child = spawn_unawaited(
                argv, self._environ, stdin=null, stdout=null, stderr=null, keep=keep, ignored=JOB_SIGNALS
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(null)
        self._lines = JsonLines(ours, self._poller)
        self._poller.watch(self._lines.fd, self._on_readable)

    def _forget_child(self) -> None:
        if self._child is not None and self._child.pidfd >= 0:
            os.close(self._child.pidfd)
        self._child = None

    def _stop_reading(self) -> None:
        self.deadline = None
        if self._lines is not None:
            self._poller.unwatch(self._lines.fd)
            self._lines.close()
            self._lines = None

    def _on_readable(self) -> None:
        lines = self._lines
        while lines is not None and lines is self._lines:
            messages = lines.receive()
            if messages is None:
                self.close()
                self._give_up(self._broken or "the trial process ended")
                return
            if not messages:
                return
            for message in messages:
                self._on_message(message)

    def _on_message(self, message: JsonObject) -> None:
        match message.get("op"):
            case "ready":
                self._is_ready = True
                if self._trial is None:
                    self.deadline = None
                self._on_ready("")
            case "broken":
                self._broken = str(message.get("words", ""))[:_WORDS_AT_MOST]
            case "step" if self._is_of_trial(message):
                self._where[message["local_rank"]] = str(message.get("step", ""))
            case "outcome" if self._is_of_trial(message) and message.get("kind") in _KINDS:
                member = Member(self._place.host, message["local_rank"])
                words, where = (str(message.get(name, ""))[:_WORDS_AT_MOST] for name in ("words", "where"))
                self._outcomes[member.local_rank] = Outcome(member, message["kind"], words, where)
            case "done" if self._trial is not None and message.get("number") == self._trial.number:
                self.deadline = None
                self._finish("the trial process forgot it")

    def _is_of_trial(self, message: JsonObject) -> bool:
        return (
            self._trial is not None
            and message.get("number") == self._trial.number
            and Member(self._place.host, message.get("local_rank", -1)) in self._members()
        )

    def _members(self) -> Group:
        groups = self._trial.groups if self._trial is not None else ()
        return tuple(member for group in groups for member in group if member.host == self._place.host)

    def _give_up(self, words: str) -> None:
        """No more will come from this process."""
        if not self._is_ready:
            self._on_ready(words)
        self._is_ready = False
        self._finish(words)

    def _finish(self, words: str) -> None:
        """Tell how the trial went; members that have not answered did not come to an end."""
        trial = self._trial
        if trial is None:
            return
        for member in self._members():
            if member.local_rank not in self._outcomes:
                where = self._where.get(member.local_rank, "before joining")
                kind = "error" if words else "timeout"
                self._outcomes[member.local_rank] = Outcome(member, kind, words, where)
        outcomes = tuple(self._outcomes.values())
        self._trial = None
        self._on_done(trial, outcomes)


def request_of(trial: Trial, place: TrialPlace, pretend: Mapping[int, str]) -> JsonObject:
    """A host's share of a trial, as the process is asked for it."""
    groups = []
    for number, group in enumerate(trial.groups):
        members = [[member.local_rank, rank] for rank, member in enumerate(group) if member.host == place.host]
        if members:
            groups.append(
                {
                    "prefix": f"{place.prefix}/{trial.number}.{number}",
                    "world_size": len(group),
                    "is_local": len(members) == len(group),
                    "members": members,
                }
            )
    return {
        "op": "trial",
        "number": trial.number,
        "backend": place.backend,
        "deadline_s": trial.deadline_s,
        "interface": trial.interface,
        "store": [place.store_address, place.store_port],
        "sizes_bytes": list(SIZES_BYTES),
        "pretend": {str(local_rank): what for local_rank, what in pretend.items()},
        "groups": groups,
    }
