"""The channel to the other hosts of a job: this host's listening sockets, and the coordinator that gets them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from saferun.cluster.coordinator_client import NOT_HERE, CoordinatorClient
from saferun.cluster.end_answers import EndAnswers
from saferun.cluster.endpoint_name import EndpointName
from saferun.cluster.head_notice import HeadNotice
from saferun.cluster.host_ports import HostPorts
from saferun.cluster.job_values import JobCallbacks
from saferun.cluster.torch_process import TorchProcess
from saferun.config import LaunchConfig
from saferun.errors import EXIT_USAGE, SaferunError
from saferun.linux.bare_socket import short_host_name
from saferun.linux.poller import Poller
from saferun.linux.task_sockets import connect_to_task, has_ended
from saferun.model import ExitStatus, JsonObject, TorchParts

# By rendezvous backend; any other one is torch's or a package's, and may import what it likes.
_TORCH_PARTS: dict[str, TorchParts] = {"static": "store", "c10d": "c10d"}
_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 0.5
# The coordinator waits for the last messages of the other hosts; it does so for ten seconds at most.
_GOODBYE_S = 12.0
# How long a head that gives up waits for tasks of its host that come later.
_LATE_TASKS_S = 5.0


class JobChannel:
    """Messages to and from the coordinator of this host.

    The head of a host (its only process, or the one with local rank 0) has a coordinator of its own; the other tasks of
    the host talk to that one over a Unix socket. What only torch knows each task asks a process of its own.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        callbacks: of the job.
        on_message: takes each message.
        on_lost: takes, once, why the channel is gone.
        replacement: as in ``CoordinatorClient``.
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
        replacement: Callable[[str], JsonObject | None] = lambda _: None,
    ) -> None:
        self._retry_at: float | None = None  # when the head of this host is looked for again
        sharing = config.sign_messages if config.shares_secret else "off"
        self.client = CoordinatorClient(
            config,
            {**environ, "SAFERUN_SIGN_MESSAGES": sharing},
            poller,
            callbacks,
            on_message=self._hear,
            on_lost=on_lost,
            torch_parts=_TORCH_PARTS.get(config.rendezvous.backend, "all"),
            name=f"the coordinator of {short_host_name()}",
            replacement=replacement,
            connect_again=self._connect_again,
            search_again=self._search_again,
        )
        self._poller = poller
        self._endpoint = EndpointName(
            config.rendezvous,
            poller,
            on_late=self._on_late_name,
            on_waiting=on_message,
            on_given_up=self._on_name_given_up,
        )
        self._on_message = on_message
        task = config.hosts.task
        self.is_head = task is None or task.local_rank == 0
        self.torch = self.client  # what is asked for what only torch knows
        self._torch_process: TorchProcess | None = None
        if task is not None and not self.is_head and self.client.asks_torch:
            self.torch = self._torch_process = TorchProcess(config, environ, poller, callbacks, task.local_rank)
        self._ports = HostPorts(config, callbacks.on_stderr, is_head=self.is_head)
        self._head_pid = 0  # of the process to whose coordinator there is, or was, a connection
        self._head_path = ""  # where that was
        self._head_notice = HeadNotice(on_message)
        self._cannot_bind: SaferunError | None = None  # why this head has no ports
        self._retry_s = _FIRST_RETRY_S
        self._has_joined = False  # has been asked to
        self._has_met = False  # this launch has met other tasks or hosts
        self._is_wanted = False  # the coordinator is to be started as soon as it is known who serves the endpoint
        self._is_closed = False
        self._end_answers: EndAnswers | None = None

    # ----------------------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Bind and listen on every port of this host, before anything else starts; they stay bound to the end.

        Raises:
            SaferunError: one cannot be had.
        """
        self._cannot_bind = None
        try:
            self._ports.bind(is_endpoint_here=self._endpoint.is_here)
        except SaferunError as error:
            self._cannot_bind = error
            raise

    @property
    def port(self) -> int:
        """The port of the ranks' store; 0: there is none here."""
        return self._ports.store

    @property
    def control_port(self) -> int:
        """The port of liveness probes."""
        return self._ports.control

    def find_endpoint(self, on_found: Callable[[], None]) -> None:
        """Find out whether the endpoint of torch's rendezvous is this host; ``bind`` may be called after that.

        Args:
            on_found: called soon: where the name service has nothing to say, without an answer, which is waited for
                before the coordinator is started. Until it knows the name, no host can be met there.
        """
        if self.is_head:
            self._endpoint.find(on_found)
        else:
            on_found()

    @property
    def is_endpoint_here(self) -> bool:
        """Whether the endpoint of torch's rendezvous is this host, as far as is known."""
        return self._endpoint.is_here

    def _on_late_name(self) -> None:
        if not self._is_closed:
            if self._endpoint.is_here:
                self._ports.bind_endpoint()
            if self._is_wanted:
                self.open()

    def _on_name_given_up(self, message: JsonObject) -> None:
        self.client.unanswered = None
        self._on_message(message)

    def send(self, message: JsonObject) -> None:
        """Send a message; before there is a channel it is kept."""
        joins = message["op"] == "join"
        if joins and self._endpoint.is_awaited:
            self._endpoint.limit(message["connect_s"] or message["timeout_s"])
        if joins and not self.is_head:
            self._head_notice.begin(time.monotonic())
        self._has_joined = self._has_joined or joins
        self.client.send(message, answers=("joined", "join_failed") if joins else ())

    def _hear(self, message: JsonObject) -> None:
        self._head_notice.end()
        self._has_met = self._has_met or message.get("op") == "joined"
        self._on_message(message)

    def open(self) -> None:
        """Make the channel, if there is none."""
        self._is_wanted = True
        if self._torch_process is not None:
            self._torch_process.open()
        if self._endpoint.is_awaited or self.client.is_open:
            return
        if self.is_head:
            self._stop_answering()
            self.client.start(self._ports.fds)
        elif self._has_joined:
            self.tick(time.monotonic())  # not before: what the head answers would not be expected

    def answer_end(self) -> None:
        """Let whoever asks know how the coordinator of this host has ended, until there is another one."""
        if self.is_head and self._end_answers is None:
            self._end_answers = EndAnswers(self._ports.known_to_others, self.client.ended_by, self._poller)

    def _stop_answering(self) -> None:
        answers, self._end_answers = self._end_answers, None
        if answers is not None:
            answers.close()

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = (self._retry_at, self._endpoint.deadline, self._head_notice.deadline)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Look again whether the head of this host is there, and whether the endpoint's name is known."""
        self._endpoint.tick(now)
        self._head_notice.tick(now, is_connected=self.client.is_open)
        if self.is_head or self.client.is_open or self._is_closed:
            self._retry_at = None
            return
        if self._ports.task_sockets is not None and self._connect(self._ports.task_sockets.paths()):
            self._retry_at = None
        elif has_ended(self._head_pid):
            self._retry_at = None
            self._head_notice.end()
            self.client.lose_head()
        else:
            self._retry_at = now + self._retry_s
            self._retry_s = min(self._retry_s * 1.5, _LAST_RETRY_S)

    def _connect(self, paths: Iterable[str]) -> bool:
        """Connect to the coordinator of the host's head, if that is there."""
        for path in paths:
            found = connect_to_task(path, self._poller)
            if found is not None:
                self._head_pid, self._head_path = found.pid, path
                self.client.attach(found.lines)
                return True
        return False

    def _connect_again(self) -> bool:
        """The same after the connection was lost, and ranks run.

        No directory is searched: one of them may be on a file system that does not answer.
        """
        self._retry_at = None
        self._head_notice.end()
        return not self._is_closed and (
            self.client.is_open or (self._head_path != "" and self._connect([self._head_path]))
        )

    def _search_again(self) -> None:
        """The head that was found ends with an earlier launch of this step; that of this launch has yet to come."""
        now = time.monotonic()
        self._head_pid, self._head_path = 0, ""
        self._retry_s = _FIRST_RETRY_S
        self._retry_at = now + _FIRST_RETRY_S
        self._head_notice.begin(now)

    @property
    def pids(self) -> set[int]:
        """The coordinator, the process that asks for the endpoint's name, and that which has torch for another task."""
        return self.client.pids | self.torch.pids | self._endpoint.pids

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was one of these."""
        if self._torch_process is not None and self._torch_process.on_exit(pid, status):
            return True
        return self.client.on_exit(pid, status) or self._endpoint.on_exit(pid, status)

    # ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, wait until that has been heard, and give the ports back."""
        self._is_closed = True
        self._retry_at = None
        self._endpoint.close()
        self._head_notice.end()
        if self._cannot_bind is not None:
            self._ports.refuse_tasks(_join_failed(self._cannot_bind), _LATE_TASKS_S)
        else:
            # Who comes while the coordinator waits for other hosts belongs to the next launch of this step.
            is_over = self._has_met and self.client.unanswered is None
            self._ports.refuse_tasks(NOT_HERE if is_over else None)
        self.client.close(_GOODBYE_S)
        if self._torch_process is not None:
            self._torch_process.close()
        self._stop_answering()
        self._ports.close()


def _join_failed(error: SaferunError) -> JsonObject:
    """What a coordinator would send. This process prints the error itself."""
    is_usage = error.exit_code == EXIT_USAGE
    return {"op": "join_failed", "what": error.what, "hint": error.hint, "usage": is_usage, "published": True}
