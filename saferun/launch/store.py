"""The store of a launch: its listening socket, and the coordinator that serves it and whatever else needs torch."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping

from saferun.cluster.coordinator_process import CoordinatorLink
from saferun.config import LaunchConfig
from saferun.console.lines import LineAssembler
from saferun.errors import suppress
from saferun.linux.children import SpawnError
from saferun.linux.net import hold_port
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.events import Event, StartFailed, StoreServed, StoreUnavailable

# The ranks get this head start. A rank that wants the store has torch to import first, which takes it much longer;
# ranks that are done sooner never wanted one, and then no coordinator is started at all.
_HEAD_START_S = 0.05
_GOODBYE_S = 5.0
_HINT = "check that this works: python -c 'import torch.distributed'"


class StoreService:
    """The store, from the bound port to the last goodbye.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        post: takes events.
        attempt: tells the attempt that is current.
        on_ready: called when an attempt's preparations are done, with what only torch could answer.
        on_torch: told torch's version, once.
        on_words: gets whole lines that torch's event handlers write to stderr.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        post: Callable[[Event], None],
        attempt: Callable[[], int],
        on_ready: Callable[[JsonObject], None],
        on_torch: Callable[[str], None],
        on_words: Callable[[bytes], None],
    ) -> None:
        self.hands_on_events = config.event_log_handler != "null"  # whether the user named one of torch's handlers
        self.deadline: float | None = None  # when ``serve`` is due, in monotonic seconds
        self._config = config
        self._environ = environ
        self._poller = poller
        self._post = post
        self._attempt = attempt
        self._on_ready = on_ready
        self._on_torch = on_torch
        self._on_words = on_words
        self._port: socket.socket | None = None  # bound to the end
        self._listener: socket.socket | None = None  # the same, where the coordinator serves the store on it
        self._link: CoordinatorLink | None = None
        self._links_opened = 0
        self._preparing = False
        self._serve_sent = False
        self.start_stage: JsonObject | None = None  # how far the ranks have come, as their store showed it
        self._words = LineAssembler()
        self._serves_timers = environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        self._whole_torch = self._needs_whole_torch = (
            config.numa_binding is not None
            or config.logs.logs_specs is not None
            or self.hands_on_events
            or self._serves_timers
        )

    def bind(self) -> int:
        """Bind and listen on the store's port, which stays bound to the end of the launch. Returns the port.

        Raises:
            SaferunError: it cannot be had.
        """
        rendezvous = self._config.rendezvous
        # Without an agent store rank 0 serves the store itself, on a port that is only held for it.
        self._port = hold_port(rendezvous.master_port, listening=rendezvous.agent_store)
        self._listener = self._port if rendezvous.agent_store else None
        port: int = self._port.getsockname()[1]
        return port

    def release(self) -> None:
        """Give the port back, for another one to be bound; only where rank 0 serves the store itself."""
        if self._port is not None and self._listener is None:
            self._port.close()
            self._port = None

    @property
    def pids(self) -> set[int]:
        """The coordinator's process, if there is one."""
        return {self._link.child.pid} if self._link is not None else set()

    def tick(self, now: float) -> None:
        """Serve the store when the head start of the ranks is over."""
        if self.deadline is not None and self.deadline <= now:
            self.serve()

    def prepare(self, preparation: JsonObject) -> None:
        """Make everything ready for the ranks of an attempt, then call ``on_ready``.

        Args:
            preparation: what only torch can answer about the attempt, if anything.
        """
        self.start_stage = None
        if self._listener is not None:
            # What the attempt before missed, the next one gets anew.
            self._poller.unwatch(self._listener.fileno())
        if self._needs_whole_torch:
            self._preparing = True
            self._open_link()
            if self._link is not None:
                self._link.serving = None
                self._link.send({"op": "drop"})
                asked = {"handler": self._config.event_log_handler, "file_timer": self._serves_timers}
                self._link.send({"op": "prepare", **asked, **preparation})
        elif self._link is not None and self._serve_sent:
            # Nothing of the attempt before may be found in the store: keys, or the addresses that gloo left there.
            # Also where it is not served yet, the order to serve it must be taken back before new ranks connect.
            self._preparing = True
            self._serve_sent = False
            self._link.serving = None
            self._link.send({"op": "drop"})
        else:
            self._on_ready({})

    def serve_soon(self) -> None:
        """The ranks have been started: serve them, unless they are done at once."""
        if self._listener is not None:
            self.deadline = time.monotonic() + (0.0 if self._link is not None else _HEAD_START_S)

    def serve(self) -> None:
        """Have the coordinator serve the store of the current attempt."""
        self.deadline = None
        self._open_link()
        if self._link is not None:
            self._serve_sent = True
            self._link.send({"op": "serve", "attempt": self._attempt()})

    def ask_start_stage(self, world_size: int) -> None:
        """How far have the ranks come? ``start_stage`` has the answer, soon; an attempt is asked about once."""
        if self.start_stage is not None:
            return
        self.start_stage = {}
        if self._link is not None and self._serve_sent:
            self._link.send({"op": "start_stage", "attempt": self._attempt(), "world_size": world_size})

    def hand_on(self, event: JsonObject) -> None:
        """Give an event to torch's event handlers, where the user named one."""
        if self.hands_on_events and self._link is not None:
            self._link.send({"op": "event", "handler": self._config.event_log_handler, **event})

    # ----------------------------------------------------------------------------------------------------------------

    def _open_link(self) -> None:
        if self._link is not None:
            return
        self._links_opened += 1
        listen_fd = self._listener.fileno() if self._listener is not None else -1
        try:
            self._link = CoordinatorLink(listen_fd, self._environ, whole_torch=self._whole_torch, poller=self._poller)
        except (SpawnError, OSError) as error:  # no descriptors left, for one
            self._on_lost(f"the coordinator cannot be started: {error}")
            return
        self._poller.watch(self._link.fd, self._on_readable)
        self._poller.watch(self._link.stderr_fd, self._on_stderr)

    def _on_readable(self) -> None:
        link = self._link
        messages = link.receive() if link is not None else None
        if link is None or messages is None:
            # Its exit follows, and says more.
            if link is not None:
                self._poller.unwatch(link.fd)
            return
        for message in messages:
            match message.get("op"):
                case "serving" if message.get("attempt") == self._attempt():
                    link.serving = self._attempt()
                    self._on_torch(str(message.get("torch")))
                    self._post(StoreServed(time.monotonic(), self._attempt()))
                case "start_stage" if message.get("attempt") == self._attempt():
                    self.start_stage = message
                case "dropped" if self._preparing and not self._needs_whole_torch:
                    self._preparing = False
                    self._on_ready({})
                case "prepared" if self._preparing:
                    self._preparing = False
                    self._on_ready(message)
                case "failed" if self._preparing:
                    self._preparing = False
                    self.hands_on_events = False
                    hint = "look at --logs-specs, --event-log-handler and --numa-binding in saferun --help"
                    exit_code = 2 if message.get("usage") else 1
                    what = str(message.get("what"))
                    self._post(StartFailed(time.monotonic(), self._attempt(), what, hint, exit_code))

    def _on_stderr(self) -> None:
        link = self._link
        if link is None:
            return
        chunk = link.read_stderr()
        if chunk is None:
            self._poller.unwatch(link.stderr_fd)
        elif self.hands_on_events:
            self._on_words(self._words.feed(chunk))

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the coordinator."""
        if pid not in self.pids:
            return False
        self._on_coordinator_exit(status.description)
        return True

    def _on_coordinator_exit(self, words: str) -> None:
        link = self._link
        if link is None:
            return
        while link.read_stderr():
            pass
        self._poller.unwatch(link.fd)
        self._poller.unwatch(link.stderr_fd)
        self._link = None
        self._serve_sent = False
        reason = link.last_line()
        link.close()
        if self._preparing and not self._needs_whole_torch:
            # There was an old store to be dropped, and that is gone now. The next one gets a coordinator of its own.
            self._preparing = False
            self._on_ready({})
            return
        if link.serving is None and not link.whole_torch and self._links_opened == 1:
            # Perhaps only the short cut to the store is to blame, or a passing lack of memory.
            self._whole_torch = True
            self.serve()
            return
        self._on_lost(f"the store's process ended ({words}){f': {reason}' if reason else ''}")

    def _on_lost(self, what: str) -> None:
        """Nobody serves the store. Ranks that never ask for it go on; one that asks would wait for ever."""
        if self._preparing:
            self._preparing = False
            self._post(StartFailed(time.monotonic(), self._attempt(), what, _HINT, 1))
            return
        listener = self._listener
        if listener is None or self._poller.is_watched(listener.fileno()):
            return

        def on_asked() -> None:
            self._poller.unwatch(listener.fileno())
            self._post(StoreUnavailable(time.monotonic(), self._attempt(), what, _HINT))

        self._poller.watch(listener.fileno(), on_asked)

    # ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the coordinator and give the port back. Events that are on their way are let through first."""
        if self._link is not None:
            self._end_link(self._link)
        if self._port is not None:
            self._port.close()

    def _end_link(self, link: CoordinatorLink) -> None:
        if self.hands_on_events or self._serves_timers:
            link.send({"op": "goodbye"})
            link.lines.drain(_GOODBYE_S)
            if _waited_for(link.child.pid, _GOODBYE_S):
                self._on_stderr()
                link.close()
                return
        with suppress(ProcessLookupError):
            os.kill(link.child.pid, signal.SIGKILL)
        _waited_for(link.child.pid, _GOODBYE_S)
        link.close()


def _waited_for(pid: int, timeout_s: float) -> bool:
    """Wait for a child to end and reap it; False when it does not end in time."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            return True
        time.sleep(0.001)
    return False
