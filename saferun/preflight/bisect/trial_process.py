"""The trials of this host: a process that runs its members, read without ever waiting.

It imports torch once and is used for one trial after the other. One that does not answer is killed, and the next trial
starts another.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from saferun.linux.bare_socket import Socket
from saferun.linux.helper import Helper
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject, Value
from saferun.preflight.bisect import Group, Member, Trial, TrialResult

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PROGRAM = os.path.join(_PACKAGE, "coordinator", "trial_server.py")
SIZES_BYTES = (4, 64 << 10, 4 << 20)
# For importing torch, where the process has not done that yet.
IMPORT_S = 90.0
# The process ends its members at the trial's deadline, and they have to die.
MARGIN_S = 10.0
_KINDS = frozenset({"ok", "timeout", "error"})
_LONGEST_MESSAGE = 500
LOST = "the trial process "
"""How a result begins that is not about its member: the process that runs all of them was ended."""


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
    """Runs the share of one host in trials. A Part of the loop.

    Args:
        place: where its members meet the others.
        environ: of the process and of the members: that of the ranks.
        poller: the loop's.
        on_ready: called once per process with what prevents it from running trials; empty: torch is imported.
        on_done: called exactly once for each trial that was started, with how the members of this host did; those that
            failed first come first. It may be called from within ``start``.
    """

    def __init__(
        self,
        place: TrialPlace,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        on_ready: Callable[[str], None],
        on_done: Callable[[Trial, tuple[TrialResult, ...]], None],
    ) -> None:
        self.deadline: float | None = None
        self._place = place
        self._environ = dict(environ)
        self._poller = poller
        self._on_ready = on_ready
        self._on_done = on_done
        self._process: Helper | None = None
        self._ended: list[Helper] = []  # and not reaped yet
        self._is_ready = False
        self._broken = ""
        self._trial: Trial | None = None
        self._where: dict[int, str] = {}
        self._outcomes: dict[int, TrialResult] = {}

    def prepare(self) -> None:
        """Start the process, so that torch is there when the first trial is asked for."""
        if self._process is not None:
            return
        self._is_ready, self._broken = False, ""
        try:
            self._process = Helper("sr-trials", self._become_server)
        except OSError as error:
            self._give_up(f"{LOST}cannot be started: {error}")
            return
        self._process.attach(self._poller, self._on_message, self._on_lost)
        self.deadline = time.monotonic() + IMPORT_S

    def start(self, trial: Trial, pretend: Mapping[int, str] | None = None) -> None:
        """Run this host's share of a trial. One that is still going on is given up, and reported.

        Args:
            trial: of which members may be of this host, or none.
            pretend: what members do wrong in tests, by local rank.
        """
        self._finish("another trial was asked for")
        self._trial, self._where, self._outcomes = trial, {}, {}
        if not self._members():
            self._finish("")
            return
        self.prepare()
        if self._process is not None:
            importing_s = 0.0 if self._is_ready else IMPORT_S
            self.deadline = time.monotonic() + trial.deadline_s + MARGIN_S + importing_s
            self._process.send(request_of(trial, self._place, pretend or {}))

    def tick(self, now: float) -> None:
        """At the deadline what has come is all there is, and the process goes."""
        if self.deadline is not None and self.deadline <= now:
            late = "" if self._is_ready else f"torch was not imported within {IMPORT_S:g} s"
            self._stop()
            self._give_up(late)

    @property
    def pids(self) -> set[int]:
        """The process, and those before it that have not been reaped."""
        return set[int]().union(*(process.pids for process in self._processes()))

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the process."""
        for process in self._processes():
            if process.on_exit(pid, status):
                if process is self._process:
                    self._broken = self._broken or f"{LOST}ended ({status.description})"
                    process.receive()  # what it said before
                else:
                    self._ended.remove(process)
                return True
        return False

    def close(self) -> None:
        """End the process, and its members with it; nothing is reported."""
        self._stop()

    def _stop(self) -> None:
        self.deadline = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._ended += [process] if process.pids else []

    # -------------------------------------------------------------------------------------------------------- within

    def _become_server(self, connection: Socket) -> None:
        """In the child: run the program that has torch. Where it cannot be run, the process ends."""
        os.set_inheritable(connection.fileno(), True)
        os.execve(sys.executable, [sys.executable, "-P", _PROGRAM, str(connection.fileno())], self._environ)

    def _processes(self) -> list[Helper]:
        return [*self._ended, *([self._process] if self._process is not None else [])]

    def _on_lost(self) -> None:
        self._stop()
        self._give_up(self._broken or f"{LOST}ended")

    def _on_message(self, message: JsonObject) -> None:
        match message.get("op"):
            case "ready":
                self._is_ready = True
                if self._trial is None:
                    self.deadline = None
                self._on_ready("")
            case "broken":
                self._broken = str(message.get("message", ""))[:_LONGEST_MESSAGE]
            case "step" if self._is_of_trial(message):
                self._where[message["local_rank"]] = str(message.get("step", ""))
            case "outcome" if self._is_of_trial(message) and message.get("kind") in _KINDS:
                member = Member(self._place.host, message["local_rank"])
                details, where = (str(message.get(name, ""))[:_LONGEST_MESSAGE] for name in ("message", "where"))
                self._outcomes[member.local_rank] = TrialResult(member, message["kind"], details, where)
            case "done" if self._trial is not None and message.get("number") == self._trial.number:
                self.deadline = None
                self._finish(f"{LOST}forgot it")

    def _is_of_trial(self, message: JsonObject) -> bool:
        return (
            self._trial is not None
            and message.get("number") == self._trial.number
            and Member(self._place.host, message.get("local_rank", -1)) in self._members()
        )

    def _members(self) -> Group:
        groups = self._trial.groups if self._trial is not None else ()
        return tuple(member for group in groups for member in group if member.host == self._place.host)

    def _give_up(self, message: str) -> None:
        """No more will come from this process."""
        if not self._is_ready:
            self._on_ready(message)
        self._is_ready = False
        self._finish(message)

    def _finish(self, message: str) -> None:
        """Report how the trial went; members that have not answered did not come to an end."""
        trial = self._trial
        if trial is None:
            return
        for member in self._members():
            if member.local_rank not in self._outcomes:
                where = self._where.get(member.local_rank, "before joining")
                kind = "error" if message else "timeout"
                self._outcomes[member.local_rank] = TrialResult(member, kind, message, where)
        self._trial = None
        self._on_done(trial, tuple(self._outcomes.values()))


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
        "compute_s": trial.compute_s,
        "store": [place.store_address, place.store_port],
        "sizes_bytes": list(SIZES_BYTES),
        "pretend": {str(local_rank): what for local_rank, what in pretend.items()},
        "groups": groups,
    }
