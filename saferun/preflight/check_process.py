"""The check process beside a launch: forked before the ranks are started, read without ever waiting.

It is forked rather than started: an interpreter takes longer to start than all checks of a healthy host. And it is
forked as soon as the command line has been read, so that it imports what it needs beside the supervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from saferun.linux.bare_socket import Socket
from saferun.linux.helper import Helper, PartBase
from saferun.linux.limits import check_spare_files
from saferun.linux.poller import Poller
from saferun.model import JsonObject
from saferun.preflight.results import CheckResult

if TYPE_CHECKING:
    from saferun.preflight.checks.context import CheckContext

# Beyond what any check may take, its patience at a retry included.
_GIVE_UP_S = 45.0
FULL_S = 140.0
"""How much longer they may take with ``--health full``, where torch is imported for them."""
# Less than the ranks get, and enough to be done soon where other programs take all CPUs.
_IDLE_NICE = 5
_ANSWER_S = 1.0


class CheckProcess(Helper):
    """A check process that has been forked, and learns later what to check.

    Args:
        beside: whether ranks are running, from which it takes no CPU time that they want.

    Raises:
        OSError: it cannot be forked.
    """

    def __init__(self, *, beside: bool = False) -> None:
        def serve(connection: Socket) -> None:
            if beside:
                os.nice(_IDLE_NICE)
            import socket

            from saferun.preflight.checks.server import answer

            answer(socket.socket(fileno=connection.detach()))

        super().__init__("sr-checks", serve)


class HostChecks(PartBase):
    """The checks of this host in one attempt; then its process probes other hosts. A Part of the loop.

    Args:
        poller: the loop's.
        on_done: called once: the results are there, or as many as there will be.
        warn: takes one line about a check process that is lost.
    """

    def __init__(self, poller: Poller, *, on_done: Callable[[], None], warn: Callable[[str], None]) -> None:
        self.results: list[CheckResult] = []
        self.info = ""
        """What other hosts learn of this one, encoded."""
        self.endpoint = ""
        """Where they can probe it, encoded."""
        self.duration_s = 0.0
        self.deadline: float | None = None
        self._poller = poller
        self._on_done: Callable[[], None] | None = on_done
        self._warn = warn
        self._helper: CheckProcess | None = None
        self._began_at = 0.0
        self._round = 0
        self._on_probed: Callable[[str], None] | None = None

    def start(
        self,
        context: CheckContext,
        process: CheckProcess | None,
        *,
        is_probed: bool,
        beside: bool,
        give_up_s: float = 0.0,
    ) -> None:
        """Have this host checked.

        Args:
            context: what the checks are given.
            process: one that has been forked already.
            is_probed: whether other hosts are to probe this one.
            beside: whether ranks are running meanwhile.
            give_up_s: how long they may take in all; 0: as long as a launch waits for them.
        """
        self._began_at = time.monotonic()
        try:
            if beside:
                check_spare_files()
            self._helper = process or CheckProcess(beside=beside)
        except OSError as error:
            self._lose(f"the check process cannot be started: {error.strerror}")
            return
        self._helper.attach(self._poller, self._on_message, lambda: self._lose("the check process ended early"))
        self._helper.send({"is_probed": is_probed, "context": context._asdict()})
        self.deadline = self._began_at + (give_up_s or _GIVE_UP_S) + (FULL_S if context.health == "full" else 0.0)

    def probe(
        self,
        host: int,
        endpoints: Sequence[tuple[int, str, str]],
        within_s: float,
        on_probed: Callable[[str], None],
        *,
        limit_bytes: int,
    ) -> None:
        """Probe other hosts.

        Args:
            host: this host's number.
            endpoints: whom to probe: number, name, and where, encoded.
            within_s: how long it may take.
            on_probed: takes what came of it, encoded; empty: the process is lost.
            limit_bytes: how long that may be, as in ``encode_probes``.
        """
        if self._helper is None or not self._helper.is_open:
            on_probed("")
            return
        self._round += 1
        self._on_probed = on_probed
        self.deadline = time.monotonic() + within_s + _ANSWER_S
        order = {"op": "probe", "round": self._round, "host": host, "endpoints": list(endpoints), "within_s": within_s}
        self._helper.send({**order, "limit_bytes": limit_bytes})

    def settle(self) -> None:
        """The launch is over: what has been found by now counts."""
        if self._helper is not None:
            self._helper.receive()
        if self._on_done is not None:
            self.results.append(CheckResult("others", "skipped", "the launch was over before the other checks were"))
            self._done()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.deadline is not None and self.deadline <= now:
            self._lose("the checks took too long")

    def close(self) -> None:
        """End the process; nothing more is reported."""
        self.deadline = None
        if self._helper is not None:
            self._helper.kill()

    def _on_message(self, message: JsonObject) -> None:
        try:
            self._take(message)
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"what the checks say cannot be read: {type(error).__name__}: {error}")

    def _take(self, message: JsonObject) -> None:
        match message.get("op"):
            case "result":
                # From a fork of this process.
                self.results.append(CheckResult(*message["result"]))
            case "ready":
                self.info, self.endpoint = str(message["info"]), str(message["endpoint"])
                self._done()
            case "probes" if message["round"] == self._round:
                self._probed(str(message["text"]))

    def _lose(self, message: str) -> None:
        """The process can say no more: what it has found so far counts."""
        self.close()
        self.endpoint = ""  # nothing listens there any more
        self._warn(f"preflight checks: {message}")
        self._done()
        self._probed("")

    def _done(self) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            self.deadline = None
            self.duration_s = time.monotonic() - self._began_at
            on_done()

    def _probed(self, text: str) -> None:
        on_probed, self._on_probed = self._on_probed, None
        if on_probed is not None:
            self.deadline = None
            on_probed(text)
