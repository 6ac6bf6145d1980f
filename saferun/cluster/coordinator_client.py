"""The line to the other hosts of a job: listening sockets, and the coordinator behind them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from saferun.cluster.coordinator_process import CoordinatorLink, connect_to_task
from saferun.config import LaunchConfig
from saferun.console.lines import LineAssembler
from saferun.errors import SaferunError, printable
from saferun.linux.children import SpawnError
from saferun.linux.json_lines import JsonLines
from saferun.linux.names import DEADLINE_S, OwnName, known_at_once
from saferun.linux.net import hold_port
from saferun.linux.poller import Poller
from saferun.linux.task_sockets import TaskSockets
from saferun.model import ExitStatus, JsonObject

_HINT = "check that this works: python -c 'import torch.distributed'"
_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 0.5
_NAME_HINT = "look at --rdzv-endpoint, and at /etc/hosts and the name servers of this host"
# How often it is said that a name is still waited for.
_TELL_EVERY_S = 30.0
_IS_TRUE = frozenset({"1", "true", "t", "yes", "y"})
# The coordinator waits for the other hosts' last words; it does so for ten seconds at most.
_GOODBYE_S = 12.0


class JobLine:
    """Messages to and from the coordinator of this host.

    The head of a host (its only process, or the one with local rank 0) has a coordinator of its own; the other tasks of
    the host talk to that one over a Unix socket.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        on_message: takes each message.
        on_lost: told, once, that the line is gone, and why.
        on_words: gets whole lines that torch's event handlers write to stderr.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        on_message: Callable[[JsonObject], None],
        on_lost: Callable[[str, str], None],
        on_words: Callable[[bytes], None],
    ) -> None:
        self._retry_at: float | None = None  # when the head of this host is looked for again
        self.is_endpoint_here = False  # whether the endpoint of torch's rendezvous is this host, as far as is known
        self.port = 0  # of the ranks' store
        self.control_port = 0  # where others knock
        self._config = config
        sharing = config.sign_messages if config.shares_secret else "off"
        self._environ = {**environ, "SAFERUN_SIGN_MESSAGES": sharing}
        self._poller = poller
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_words = on_words
        self._hands_on_events = config.event_log_handler != "null"
        static = config.rendezvous.backend == "static"
        self._whole_torch = (
            not static
            or config.numa_binding is not None
            or config.logs.logs_specs is not None
            or self._hands_on_events
            or environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        )
        task = config.hosts.task
        self.is_head = task is None or task.local_rank == 0
        self._listeners: dict[str, socket.socket] = {}
        self._task_sockets: TaskSockets | None = None
        self._task_path = ""
        self._link: CoordinatorLink | None = None
        self._links_opened = 0
        self._lines: JsonLines | None = None
        self._retry_s = _FIRST_RETRY_S
        self._unsent: list[JsonObject] = []
        self._joining: JsonObject | None = None
        self._name: OwnName | None = None  # the question whether the endpoint's name is this host's
        self._on_found: Callable[[], None] | None = None
        self._needs_name = False  # the coordinator cannot be started before it is known who serves the endpoint
        self._is_wanted = False  # it is to be started then
        self._tell_at: float | None = None
        self._give_up_at: float | None = None
        self._words = LineAssembler()
        self._is_closed = False

    # ----------------------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Bind and listen on every port of this host, before anything else starts; they stay bound to the end.

        Raises:
            SaferunError: one cannot be had.
        """
        task, rendezvous = self._config.hosts.task, self._config.rendezvous
        if task is not None:
            self._task_sockets = TaskSockets(task.key)
        if not self.is_head:
            return
        if rendezvous.backend == "static" and self._config.hosts.node_rank == 0:
            self._listeners["store"] = _first_free(rendezvous.ports or (rendezvous.master_port or 0,))
        elif rendezvous.backend != "static":
            self._listeners["store"] = hold_port(None)
            self._bind_endpoint()
        self._listeners["control"] = self._hold_control_port(rendezvous.control)
        if self._task_sockets is not None:
            self._listeners["tasks"], self._task_path = self._task_sockets.listen()
            for words in self._task_sockets.squatted:
                self._on_words(f"saferun: {printable(words)}\n".encode(errors="backslashreplace"))
        if "store" in self._listeners:
            self.port = self._listeners["store"].getsockname()[1]
        self.control_port = self._listeners["control"].getsockname()[1]

    def _hold_control_port(self, wanted: str) -> socket.socket:
        """The port for the job's own messages, which others look for where the first host is; elsewhere any will do."""
        if not wanted.isdigit():
            return hold_port(None)
        try:
            return hold_port(int(wanted))
        except SaferunError as error:
            if self._config.hosts.node_rank == 0:
                raise SaferunError(error.what, "stop that process, or pass another --control-port") from None
            return hold_port(None)

    def find_endpoint(self, on_found: Callable[[], None]) -> None:
        """Find out whether the endpoint of torch's rendezvous is this host; ``bind`` may be called after that.

        Args:
            on_found: called soon: where the name service has nothing to say, without an answer, which is waited for
                before the coordinator is started. Until it knows the name, no host can be met there.
        """
        rendezvous = self._config.rendezvous
        host, conf = split_endpoint(rendezvous.endpoint)[0], dict(rendezvous.conf)
        wanted = conf.get("is_host", "").lower()
        known: bool | None = False
        if self.is_head and rendezvous.backend != "static" and conf.get("store_type", "tcp") == "tcp":
            known = wanted in _IS_TRUE if wanted else known_at_once(host)
        if known is not None:
            self.is_endpoint_here = known
            on_found()
            return
        self._on_found = on_found
        self._needs_name = rendezvous.backend == "c10d"
        self._name = OwnName(host, self._poller, self._on_name, self._on_doubt)

    def _on_doubt(self) -> None:
        """There is no answer yet."""
        if self._needs_name and self._name is not None:
            self._tell_at = self._name.began_at + DEADLINE_S
        self._go_on()

    def _go_on(self) -> None:
        on_found, self._on_found = self._on_found, None
        if on_found is not None:
            on_found()

    def _on_name(self, is_here: bool) -> None:  # noqa: FBT001 - by the question
        self.is_endpoint_here = is_here
        self._needs_name = False
        self._tell_at = self._give_up_at = None
        if self._on_found is not None:
            self._go_on()
            return
        if not self._is_closed:
            self._bind_endpoint()
            if self._is_wanted:
                self.open()

    def _bind_endpoint(self) -> None:
        """Serve torch's rendezvous store where the endpoint is this host, and nobody else of the job does so here."""
        rendezvous = self._config.rendezvous
        if rendezvous.backend != "c10d" or not self.is_endpoint_here:
            return
        try:
            self._listeners["endpoint"] = hold_port(split_endpoint(rendezvous.endpoint)[1])
        except SaferunError:
            if dict(rendezvous.conf).get("is_host"):
                raise
            # Perhaps another saferun of this job on this host was quicker; whoever it is, the meeting finds out.

    def send(self, message: JsonObject) -> None:
        """Send a message; before there is a line it is kept."""
        if message["op"] == "join":
            self._joining = message
            if self._needs_name:
                self._give_up_at = time.monotonic() + (message["connect_s"] or message["timeout_s"])
        if self._link is not None:
            self._link.send(message)
        elif self._lines is not None:
            self._lines.send(message)
        elif not self._is_closed:
            self._unsent.append(message)

    def open(self) -> None:
        """Make the line, if there is none."""
        self._is_wanted = True
        if self._link is None and self._lines is None and not self._needs_name:
            if self.is_head:
                self._open_link()
            else:
                self.tick(time.monotonic())

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        name = self._name.deadline if self._name is not None else None
        moments = (self._retry_at, name, self._tell_at, self._give_up_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Look again whether the head of this host is there, and whether the endpoint's name is known."""
        if self._name is not None:
            self._name.tick(now)
        if self._needs_name:
            self._wait_for_name(now)
        if self.is_head or self._lines is not None or self._is_closed:
            self._retry_at = None
            return
        paths = self._task_sockets.paths() if self._task_sockets is not None else ()
        found = (connect_to_task(path, self._poller) for path in paths)
        lines = next((lines for lines in found if lines is not None), None)
        if lines is None:
            self._retry_at = now + self._retry_s
            self._retry_s = min(self._retry_s * 1.5, _LAST_RETRY_S)
            return
        self._retry_at = None
        self._lines = lines
        self._poller.watch(lines.fd, self._on_readable)
        self._send_unsent()

    def _wait_for_name(self, now: float) -> None:
        """Say what is waited for, as the coordinator would; give up after the time that it would wait."""
        assert self._name is not None  # noqa: S101 - it is needed
        if self._give_up_at is not None and self._give_up_at <= now:
            joining, self._joining, self._tell_at, self._give_up_at = self._joining, None, None, None
            waited_s = (joining["connect_s"] or joining["timeout_s"]) if joining is not None else 0.0
            what = f"{self._name.words}, for {waited_s:.0f} s" if self._name.is_unknown else self._name.words
            self._on_message({"op": "join_failed", "what": what, "hint": _NAME_HINT})
        elif self._tell_at is not None and self._tell_at <= now:
            self._tell_at = now + _TELL_EVERY_S
            seconds = f" ({now - self._name.began_at:.0f} s)" if self._name.is_unknown else ""
            self._on_message({"op": "waiting", "words": f"{self._name.words}{seconds}"})

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.send(message)

    @property
    def pid(self) -> int | None:
        """The coordinator's process, if this process owns one."""
        return self._link.child.pid if self._link is not None else None

    @property
    def helpers(self) -> set[int]:
        """The process that asks for the endpoint's name."""
        return self._name.pids if self._name is not None else set()

    def on_helper_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Whether it was that process."""
        return self._name is not None and self._name.on_exit(pid, status)

    # ----------------------------------------------------------------------------------------------------------------

    def _open_link(self) -> None:
        self._links_opened += 1
        fds = {name: listener.fileno() for name, listener in self._listeners.items()}
        try:
            self._link = CoordinatorLink(
                fds.pop("store", -1),
                self._environ,
                whole_torch=self._whole_torch,
                more_fds=fds,
                poller=self._poller,
            )
        except (SpawnError, OSError) as error:  # no descriptors left, for one
            self._lose(f"the coordinator cannot be started: {error}", _HINT)
            return
        self._poller.watch(self._link.fd, self._on_readable)
        self._poller.watch(self._link.stderr_fd, self._on_stderr)
        self._send_unsent()

    def _on_readable(self) -> None:
        source = self._link or self._lines
        messages = source.receive() if source is not None else None
        if source is None or messages is None:
            if source is not None:
                self._poller.unwatch(source.fd)
            if self._lines is not None:
                self._lines.close()
                self._lines = None
                self._lose("saferun of local rank 0 on this host is gone", "look at what it said last")
            # Of a coordinator of ours the exit follows, and says more.
            return
        for message in messages:
            if message.get("op") in {"joined", "join_failed"}:
                self._joining = None
            self._on_message(message)

    def _on_stderr(self) -> None:
        link = self._link
        chunk = link.read_stderr() if link is not None else None
        if link is None:
            return
        if chunk is None:
            self._poller.unwatch(link.stderr_fd)
        elif self._hands_on_events:
            self._on_words(self._words.feed(chunk))

    def on_exit(self, words: str) -> None:
        """The coordinator has ended; ``words`` say how."""
        link = self._link
        if link is None:
            return
        # What it said last may decide what follows.
        while messages := link.receive():
            for message in messages:
                self._on_message(message)
        while link.read_stderr():
            pass
        self._poller.unwatch(link.fd)
        self._poller.unwatch(link.stderr_fd)
        self._link = None
        reason = link.last_line()
        link.close()
        if self._joining is not None and not link.whole_torch and self._links_opened == 1:
            # Perhaps only the short cut to the store is to blame, or a passing lack of memory.
            self._whole_torch = True
            self._unsent.append(self._joining)
            self._open_link()
            return
        self._lose(f"the coordinator of this host ended ({words}){f': {reason}' if reason else ''}", _HINT)

    def _lose(self, what: str, hint: str) -> None:
        if not self._is_closed:
            self._on_lost(what, hint)

    # ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, wait until that has been heard, and give the ports back."""
        self._is_closed = True
        self._retry_at = self._tell_at = self._give_up_at = None
        self._needs_name = False
        if self._name is not None:
            self._name.close()
        if self._lines is not None:
            self._poller.unwatch(self._lines.fd)
            self._lines.send({"op": "goodbye"})
            self._lines.drain(_GOODBYE_S)
            self._lines.close()
            self._lines = None
        if self._link is not None:
            self._end_link(self._link)
            self._link = None
        for listener in self._listeners.values():
            listener.close()
        if "tasks" in self._listeners:
            with suppress(OSError, ValueError):  # an abstract name is no file
                os.unlink(self._task_path)
        self._listeners.clear()

    def _end_link(self, link: CoordinatorLink) -> None:
        self._poller.unwatch(link.fd)
        self._poller.unwatch(link.stderr_fd)
        link.send({"op": "goodbye"})
        link.lines.drain(_GOODBYE_S)
        if not _waited_for(link, _GOODBYE_S):
            with suppress(ProcessLookupError):
                os.kill(link.child.pid, signal.SIGKILL)
            _waited_for(link, _GOODBYE_S)
        link.close()


def _waited_for(link: CoordinatorLink, timeout_s: float) -> bool:
    """Wait for a coordinator to end, and reap it; what it says meanwhile is read, so that nothing holds it up."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        try:
            if os.waitpid(link.child.pid, os.WNOHANG)[0] == link.child.pid:
                return True
        except ChildProcessError:
            return True
        link.receive()
        link.read_stderr()
        time.sleep(0.002)
    return False


def _first_free(ports: tuple[int, ...]) -> socket.socket:
    """A listening socket on the first of these ports that can be had.

    Raises:
        SaferunError: none can; it tells of the first.
    """
    first: SaferunError | None = None
    for port in ports:
        try:
            return hold_port(port)
        except SaferunError as error:
            first = first or error
    assert first is not None  # noqa: S101 - there is a port
    raise first


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """``HOST[:PORT]`` as torch's c10d rendezvous reads it: 29400 where there is no port."""
    if endpoint.startswith("[") and endpoint.endswith("]"):
        return endpoint[1:-1], 29400
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        return endpoint, 29400
    return (host[1:-1] if host.startswith("[") else host) or "localhost", int(port)
