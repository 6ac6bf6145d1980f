"""The client of this host's coordinator: starts it, exchanges messages with it, and ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

from saferun.cluster.coordinator_process import CoordinatorLink
from saferun.cluster.job_values import JobCallbacks
from saferun.config import LaunchConfig
from saferun.console.lines import LineAssembler
from saferun.errors import SaferunError, suppress
from saferun.linux.children import SpawnError
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject, TorchParts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.json_lines import JsonLines

HINT = "check that this works: python -c 'import torch.distributed'"
KILLED_HINT = "find out what killed it: dmesg shows whether it was the OOM killer"
_OPTIONS_HINT = "look at --logs-specs, --event-log-handler and --numa-binding in saferun --help"
_PAUSE_S = 0.001
# More than a coordinator that has ended can have left in its socket.
_LAST_READS = 128
NOT_HERE: JsonObject = {"op": "not_here"}
"""What a task reads that has come to the coordinator of an earlier launch, which ends."""
# Messages that are of use only to the coordinator that has served the attempt.
_OF_AN_ATTEMPT = frozenset({"append", "state", "chunk", "ack", "probe", "start_stage"})


class CoordinatorClient:
    """The coordinator: a child process, or a connection to the coordinator of this host's first task.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        callbacks: of the job.
        on_message: takes each message but the answers to ``prepare``.
        on_lost: takes why the coordinator is gone, and a hint.
        torch_parts: what is needed of torch from the start, if the options need no more.
        name: what an error message calls it.
        open_link: starts the process.
        replacement: takes why the coordinator died, and returns the message that starts a replacement; None: there is
            to be none.
        connect_again: connects to the replacement that another process has started; False: there is none.
        search_again: looks for another process that starts a coordinator: the one found ends with an earlier launch.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        callbacks: JobCallbacks,
        *,
        on_message: Callable[[JsonObject], None],
        on_lost: Callable[[str, str], None],
        torch_parts: TorchParts = "store",
        name: str = "the coordinator of this host",
        open_link: Callable[..., CoordinatorLink] = CoordinatorLink,
        replacement: Callable[[str], JsonObject | None] = lambda _: None,
        connect_again: Callable[[], bool] = lambda: False,
        search_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._handler = config.event_log_handler
        self.forwards_events = self._handler != "null"  # whether the user named one of torch's event handlers
        self.serves_timers = environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        self.asks_torch = (
            config.numa_binding is not None
            or config.logs.logs_specs is not None
            or self.forwards_events
            or self.serves_timers
        )
        self.is_preparing = False
        self.unanswered: JsonObject | None = None  # the message that another coordinator gets if this one fails
        self._answers: Collection[str] = ()
        self._environ = environ
        self._poller = poller
        self._callbacks = callbacks
        self._on_message = on_message
        self._on_lost = on_lost
        self._torch_parts: TorchParts = "all" if self.asks_torch else torch_parts
        self._name = name
        self._open_link = open_link
        self._replacement = replacement
        self._connect_again = connect_again
        self._search_again = search_again
        self._was_answered = False  # a coordinator knows this launch
        self._listeners: dict[str, int] = {}
        self._link: CoordinatorLink | None = None
        self._links_opened = 0
        self._lines: JsonLines | None = None
        self._unsent: list[JsonObject] = []
        self._is_lost = False  # the coordinator of this attempt is gone, without a replacement
        self.ended_by = 0  # the signal that ended the last one
        self._stderr = LineAssembler()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a coordinator."""
        return self._link is not None or self._lines is not None

    def start(self, listeners: Mapping[str, int]) -> None:
        """Start the coordinator, unless there is one.

        Args:
            listeners: the listening sockets that it inherits, by name; ``store`` is that of the ranks' store.
        """
        if self.is_open:
            return
        self._links_opened += 1
        self._is_lost = False
        self._listeners = dict(listeners)
        fds = dict(listeners)
        try:
            link = self._open_link(
                fds.pop("store", -1), self._environ, torch_parts=self._torch_parts, more_fds=fds, poller=self._poller
            )
        except (SpawnError, OSError) as error:  # no descriptors are left, for instance
            self._lose(f"the coordinator cannot be started: {error}", HINT)
            return
        self._link = link
        self._poller.watch(link.fd, self._on_readable)
        self._poller.watch(link.stderr_fd, self._on_stderr_readable)
        self._send_unsent()

    def attach(self, lines: JsonLines) -> None:
        """Talk to the coordinator of another process."""
        self._lines = lines
        self._is_lost = False
        self._poller.watch(lines.fd, self._on_readable)
        self._send_unsent()

    def send(self, message: JsonObject, *, answers: Collection[str] = ()) -> None:
        """Send a message; before there is a coordinator it is kept.

        Args:
            message: what to send.
            answers: the messages that answer it. If the first coordinator ends before, a second one gets it as well.
        """
        if answers:
            self.unanswered, self._answers = message, answers
        if message["op"] == "join":
            self._is_lost = False  # what follows is the next attempt's
        if self._link is not None:
            self._link.send(message)
        elif self._lines is not None:
            self._lines.send(message)
        elif not self._is_closed and not (self._is_lost and message["op"] in _OF_AN_ATTEMPT):
            self._unsent.append(message)

    def prepare(self, preparation: JsonObject) -> None:
        """Ask what only torch knows of an attempt; ``on_prepared`` or ``on_prepare_failed`` follows."""
        self.is_preparing = True
        self.send({"op": "prepare", "handler": self._handler, "file_timer": self.serves_timers, **preparation})

    def forward_event(self, event: JsonObject) -> None:
        """Give an event to torch's event handlers, where the user named one."""
        if self.forwards_events:
            self.send({"op": "event", "handler": self._handler, **event})

    @property
    def pids(self) -> set[int]:
        """The coordinator's process, if this process owns one."""
        return {self._link.child.pid} if self._link is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the coordinator."""
        link = self._link
        if link is None or pid != link.child.pid:
            return False
        # Its last messages may decide what follows. A piece of a long one completes none, and the others come after it.
        for _ in range(_LAST_READS):
            messages = link.receive()
            if messages is None:
                break
            self._take(messages)
        while self._read_stderr(link):
            pass
        self._poller.unwatch(link.fd)
        self._poller.unwatch(link.stderr_fd)
        self._link = None
        reason = link.last_line()
        link.close()
        what = f"{self._name} ended ({status.description}){f': {reason}' if reason else ''}"
        message = self._replacement(what) if not self._is_closed else None
        if message is not None:
            self._unsent.insert(0, message)
            self.start(self._listeners)
        elif self.unanswered is not None and link.torch_parts != "all" and self._links_opened == 1:
            # Perhaps only the import of a part of torch is to blame, or a transient lack of memory.
            self._torch_parts = "all"
            self._unsent.append(self.unanswered)
            self.start(self._listeners)
        else:
            self.ended_by = status.signum or 0
            self._is_lost = True
            self._lose(what, KILLED_HINT if status.signum else HINT)
        return True

    def close(self, goodbye_s: float) -> None:
        """End the coordinator.

        Args:
            goodbye_s: how long it may take to send what it still has to send; 0: it is killed at once.
        """
        self._is_closed = True
        lines, self._lines = self._lines, None
        if lines is not None:
            self._poller.unwatch(lines.fd)
            lines.send({"op": "goodbye"})
            lines.drain(goodbye_s)
            lines.close()
        link, self._link = self._link, None
        if link is None:
            return
        self._poller.unwatch(link.fd)
        self._poller.unwatch(link.stderr_fd)
        if goodbye_s:
            link.send({"op": "goodbye"})
            link.lines.drain(goodbye_s)
        if not goodbye_s or not self._has_ended(link, goodbye_s):
            with suppress(ProcessLookupError):
                os.kill(link.child.pid, signal.SIGKILL)
            self._has_ended(link, goodbye_s or 5.0)
        link.close()

    def _has_ended(self, link: CoordinatorLink, timeout_s: float) -> bool:
        """Wait for a coordinator to end, and reap it. Reads its output meanwhile, so that it does not block on that."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            try:
                has_ended = os.waitpid(link.child.pid, os.WNOHANG)[0] == link.child.pid
            except ChildProcessError:
                has_ended = True
            link.receive()
            self._read_stderr(link)
            if has_ended:
                return True
            time.sleep(_PAUSE_S)
        return False

    # ----------------------------------------------------------------------------------------------------------------

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.send(message)

    def _on_readable(self) -> None:
        source = self._link or self._lines
        messages = source.receive() if source is not None else None
        if messages is not None:
            self._take(messages)
        elif source is not None:
            self._poller.unwatch(source.fd)
            if self._lines is not None:
                self._lines.close()
                self._lines = None
                self._lose_connection()
            # The exit status of our own coordinator follows, and says more.

    def _take(self, messages: Collection[JsonObject]) -> None:
        for message in messages:
            op = message.get("op")
            if op in self._answers:
                self.unanswered = None
                self._was_answered = True
            if op == NOT_HERE["op"]:
                self._leave_coordinator()
            elif op == "prepared" and self.is_preparing:
                self.is_preparing = False
                self._callbacks.on_prepared(message)
            elif op == "failed" and self.is_preparing:
                self.is_preparing = self.forwards_events = False
                exit_code = 2 if message.get("usage") else 1
                self._callbacks.on_prepare_failed(SaferunError(str(message.get("what")), _OPTIONS_HINT, exit_code))
            else:
                self._on_message(message)

    def _on_stderr_readable(self) -> None:
        link = self._link
        if link is not None and self._read_stderr(link) is None:
            self._poller.unwatch(link.stderr_fd)

    def _read_stderr(self, link: CoordinatorLink) -> bytes | None:
        """What it has written since; None at the end."""
        chunk = link.read_stderr()
        if chunk and self.forwards_events:
            self._callbacks.on_stderr(self._stderr.feed(chunk))
        return chunk

    def _lose_connection(self) -> None:
        """The other process may have replaced its coordinator; if that process is gone too, nothing listens."""
        what = f"{self._name} is gone"
        message = self._replacement(what) if not self._is_closed else None
        if message is not None:
            self._unsent.insert(0, message)
        # The process that had started it, if it lives, may start another one for the next attempt.
        is_there = not self._is_closed and self._connect_again()
        if message is not None and is_there:
            return
        if is_there:
            self._unsent.clear()
            self._lose(what, KILLED_HINT)
        else:
            self.lose_head()

    def _leave_coordinator(self) -> None:
        """It ends with an earlier launch of this step, unless this launch has met others by it."""
        lines = self._lines
        if self._was_answered or lines is None:
            return
        self._poller.unwatch(lines.fd)
        lines.close()
        self._lines = None
        self._unsent = [self.unanswered] if self.unanswered is not None else []
        self._search_again()

    def lose_head(self) -> None:
        """The process that has started the coordinator, and would start another one, is gone."""
        self._unsent.clear()
        self._is_lost = True
        self._lose("saferun of local rank 0 on this host is gone", "look at its last messages")

    def _lose(self, what: str, hint: str) -> None:
        if not self._is_closed:
            self._on_lost(what, hint)
