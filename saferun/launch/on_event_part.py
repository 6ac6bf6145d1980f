"""``--on-event``: has a command of the user's run at a hang, a failure, a restart, a recovery, and the end of a launch.

A helper process runs it (``event_commands``). Whatever becomes of the command, the launch goes on and ends as it would
without it; only at the very end the last event is waited for, and not for long.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from saferun.launch.event_commands import CommandLimits, serve
from saferun.launch.launch_context import LaunchContext
from saferun.linux.helper import Helper, PartBase
from saferun.report.event_json import LaunchEvent, event_json
from saferun.text.redaction import redacted_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.model import JsonObject

LOG_NAME = "on_event.log"
PATIENCE_S = 5.0
"""How long the end of a launch waits for the command."""
_STOP_S = 0.5
# The report is written first; a file system that does not answer holds up no event for longer.
_WRITTEN_S = 2.0
_MOST_WAITING = 32
_MOST_LOST = 3
_MOST_LOGGED = 64


class OnEventPart(PartBase):
    """Sends events to the process that runs the command. A part of the loop.

    Args:
        context: the launch.
        argv: the command.
        limits: what it may take.
    """

    def __init__(self, context: LaunchContext, argv: tuple[str, ...], limits: CommandLimits | None = None) -> None:
        self._context = context
        self._argv = argv
        self._limits = limits or CommandLimits()
        self._is_stopping = False
        self._waiting: list[JsonObject] = []  # for the report to be written
        self._is_new = False
        self._give_up_at: float | None = None
        self._sent: dict[int, JsonObject] = {}  # by number, until the command has ended
        self._number = 0
        self._lost = 0
        self._log: deque[str] = deque(maxlen=_MOST_LOGGED)
        self._fork()

    # ----------------------------------------------------------------------------------------------- beside the loop

    def notify(self, event: LaunchEvent) -> None:
        """Something has happened: the command gets it, if this host leads the job."""
        context = self._context
        if not self._is_sender:
            return
        if len(self._waiting) + len(self._sent) >= _MOST_WAITING:
            context.warn(f"--on-event: the command is too slow: events are left out while {_MOST_WAITING} wait")
            return
        run_dir = context.run_dir.path or ""
        run_dir = os.path.abspath(run_dir) if run_dir else ""
        host = context.investigation.log.host
        self._waiting.append(event_json(event, run_id=context.run_id, run_dir=run_dir, host=host))
        self._is_new = True

    @property
    def _is_sender(self) -> bool:
        """Whether this process sends the events of the job: the leader, or the first host while they have not met."""
        job, config = self._context.job, self._context.config
        if job.leads or job.leader:
            return job.leads
        is_first = config.hosts.node_rank == 0 if config.rendezvous.backend == "static" else job.is_endpoint_here
        return job.is_head and is_first

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: not by time."""
        return 0.0 if self._is_new else self._give_up_at

    def tick(self, now: float) -> None:
        """Send what has happened, once the report is written."""
        if self._is_new:
            self._is_new = False
            self._ask(now)
        if self._give_up_at is not None and self._give_up_at <= now:
            self._send_all()

    def close(self) -> None:
        """Nothing: it is ``finish`` that ends the process, once the last event has been sent."""

    def finish(self, is_hurried: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        """The launch is over: wait a moment for the command, and end the process.

        Args:
            is_hurried: whether the user has asked again for the end.
            on_wait: called now and then while there is something to be waited for.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        try:
            while self._waiting or self._sent:
                now = time.monotonic()
                if give_up_at <= now or is_hurried():
                    self._complain("was still running at the end of the launch, and is killed")
                    break
                self.tick(now)
                on_wait()
                self._context.poller.wait(min(give_up_at - now, 0.1))
        finally:
            self._stop(on_wait)

    # --------------------------------------------------------------------------------------------------- the process

    def _fork(self) -> None:
        context = self._context
        environ = {**context.environ, "SAFERUN_RUN_ID": context.run_id}
        argv, limits = self._argv, self._limits
        try:
            self._helper = Helper("sr-events", lambda connection: serve(connection, argv, environ, limits))
        except OSError as error:
            self._lost = _MOST_LOST
            context.warn(f"--on-event: no process that runs the command: {error.strerror}")
            return
        self._helper.attach(context.poller, lambda message: self._guarded(self._on_message, message), self._on_lost)

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """Call from a handler of the loop; what fails costs a line, and no launch."""
        try:
            call(*arguments)
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")

    def _ask(self, now: float) -> None:
        """Have the writer answer when it has written what came before."""
        files = self._context.run_dir.files
        if self._context.run_dir.path is None or files.is_stalled:
            self._send_all()
        else:
            self._give_up_at = now + _WRITTEN_S
            files.ask("make_directories", [[], []], lambda _answer: self._guarded(self._send_all))

    def _send_all(self) -> None:
        self._give_up_at = None
        events, self._waiting = self._waiting, []
        for event in events:
            if (self._helper is None or not self._helper.is_open) and self._lost < _MOST_LOST:
                self._fork()
            self._number += 1
            if self._helper is not None and self._helper.send({"number": self._number, "event": event}):
                self._sent[self._number] = event

    def _on_message(self, message: JsonObject) -> None:
        event = self._sent.pop(int(message.get("number", 0)), None)
        if event is None:
            return
        output = redacted_text(str(message.get("output", "")))
        dropped, returncode = int(message.get("dropped_bytes", 0)), int(message.get("returncode", 0))
        how = f"exit code {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"
        if message.get("error"):
            how = f"cannot be started: {message['error']}"
        elif message.get("is_stuck"):
            how = f"took longer than {self._limits.run_s:g} s, and does not end even by SIGKILL"
        elif message.get("is_late"):
            how = f"took longer than {self._limits.run_s:g} s, and was ended"
        clock = time.strftime("%Y-%m-%d %H:%M:%S")
        text = f"{clock} {event['kind']}: {how}\n" + (output if output.endswith("\n") or not output else f"{output}\n")
        self._log.append(text + (f"({dropped} more bytes)\n" if dropped else ""))
        self._context.run_dir.write_text(LOG_NAME, "".join(self._log))
        if returncode or message.get("error"):
            self._complain(how)

    def _on_lost(self) -> None:
        if self._is_stopping:
            return
        self._lost += 1
        self._sent.clear()
        self._complain("the process that runs it was ended")

    def _complain(self, what: str) -> None:
        self._context.warn(f"--on-event: {self._argv[0]}: {what}; the job does not depend on it")

    def _stop(self, on_wait: Callable[[], object]) -> None:
        """Have the process kill what runs, and end."""
        helper = self._helper
        if helper is None:
            return
        self._lost = _MOST_LOST
        # The process kills all commands, and ends.
        self._is_stopping = True
        give_up_at = time.monotonic() + (_STOP_S if helper.send({"stop": True}) else 0)
        while helper.is_open and time.monotonic() < give_up_at:
            on_wait()
            self._context.poller.wait(0.05)
        helper.kill()
