"""The ports and the Unix socket that a host of a job listens on, from before anything else starts to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.config import LaunchConfig
from saferun.errors import SaferunError, printable
from saferun.linux.bare_socket import Socket
from saferun.linux.listen_port import hold_first, hold_port
from saferun.linux.task_sockets import TaskSockets, answer_tasks
from saferun.model import JsonObject


class HostPorts:
    """The listening sockets of this host; its coordinator inherits them.

    Args:
        config: the launch.
        is_head: whether this process listens for the host; the other tasks of the host only look for its socket.
        on_stderr: takes lines for the user.
    """

    def __init__(self, config: LaunchConfig, on_stderr: Callable[[bytes], None], *, is_head: bool) -> None:
        self._config = config
        self._is_head = is_head
        self._on_stderr = on_stderr
        self._listeners: dict[str, Socket] = {}
        self._tasks_path = ""
        self.task_sockets: TaskSockets | None = None
        """Where the tasks of this host meet; None: there are no others."""
        self.store = 0
        """The port of the ranks' store; 0: there is none here."""
        self.control = 0
        """The port of liveness probes."""

    def bind(self, *, is_endpoint_here: bool) -> None:
        """Bind and listen on every port of this host; they stay bound to the end.

        First where the other tasks of this host come: they hear there why this one gives up if a port cannot be had.

        Args:
            is_endpoint_here: whether the endpoint of torch's rendezvous is this host, as far as is known.

        Raises:
            SaferunError: one cannot be had.
        """
        task = self._config.hosts.task
        if task is not None and self.task_sockets is None:
            self.task_sockets = TaskSockets(task.key)
        if not self._is_head:
            return
        if self.task_sockets is not None and "tasks" not in self._listeners:
            self._listeners["tasks"], self._tasks_path = self.task_sockets.listen()
            for line in self.task_sockets.squatted:
                self._on_stderr(f"saferun: {printable(line)}\n".encode(errors="backslashreplace"))
        try:
            self._bind_ports(is_endpoint_here=is_endpoint_here)
        except SaferunError:
            for name in self._listeners.keys() - {"tasks"}:
                self._listeners.pop(name).close()  # another try binds all of them again
            raise
        if "store" in self._listeners:
            self.store = self._listeners["store"].getsockname()[1]
        self.control = self._listeners["control"].getsockname()[1]

    def _bind_ports(self, *, is_endpoint_here: bool) -> None:
        rendezvous = self._config.rendezvous
        if rendezvous.backend == "static" and self._config.hosts.node_rank == 0:
            self._listeners["store"] = hold_first(
                rendezvous.ports or (rendezvous.master_port or 0,), rendezvous.port_source
            )
        elif rendezvous.backend != "static":
            self._listeners["store"] = hold_port(None)
            if is_endpoint_here:
                self.bind_endpoint()
        elif self._config.moves_leader:
            self._listeners["store"] = self._hold_spare_port(rendezvous.ports or (rendezvous.master_port or 0,))
        self._listeners["control"] = self._hold_control_port(rendezvous.control)

    def bind_endpoint(self) -> None:
        """Listen at the endpoint, which is this host, for torch's rendezvous store if its backend has one.

        No socket is made if another process of the job listens there.

        Raises:
            SaferunError: the port cannot be had, and the options say that this host serves it.
        """
        rendezvous = self._config.rendezvous
        if rendezvous.backend != "c10d":
            return
        try:
            port = rendezvous.address[1] if rendezvous.address is not None else None
            self._listeners["endpoint"] = hold_port(port, source=rendezvous.port_source)
        except SaferunError:
            if dict(rendezvous.conf).get("is_host"):
                raise
            # Perhaps another saferun of this job on this host was quicker; whoever it is, the meeting finds out.

    def _hold_spare_port(self, ports: Sequence[int]) -> Socket:
        """For the ranks' store, should this host lead one day: the same number as elsewhere, if that is free here."""
        try:
            return hold_first(ports, self._config.rendezvous.port_source)
        except SaferunError:
            return hold_port(None)

    def _hold_control_port(self, wanted: str) -> Socket:
        """The port for the job's own messages, which others look for where the first host is; elsewhere any will do."""
        is_another = self._config.rendezvous.backend == "static" and (self._config.hosts.node_rank or 0) > 0
        if not wanted.isdigit() or is_another:
            return hold_port(None)  # several of them on one machine leave it to the first
        try:
            return hold_port(int(wanted))
        except SaferunError as error:
            if self._config.hosts.node_rank == 0:
                raise SaferunError(error.what, "stop that process, or pass another --control-port") from None
            return hold_port(None)

    @property
    def fds(self) -> dict[str, int]:
        """The descriptors of all sockets, by name, for the coordinator to inherit."""
        return {name: listener.fileno() for name, listener in self._listeners.items()}

    @property
    def known_to_others(self) -> list[Socket]:
        """The sockets at which the other hosts look for this one."""
        return [self._listeners[name] for name in ("store", "control") if name in self._listeners]

    def refuse_tasks(self, answer: JsonObject | None = None, wait_s: float = 0.0) -> None:
        """Take no more tasks of this host.

        Args:
            answer: what those read that have connected, and that the coordinator has not accepted; None: nothing.
            wait_s: how long the tasks of this host that have not connected yet are waited for.
        """
        task = self._config.hosts.task
        if "tasks" not in self._listeners or self.task_sockets is None or task is None:
            return
        listener = self._listeners["tasks"]
        if answer is not None and wait_s:
            answer_tasks(listener, answer, task.local_world_size - 1, wait_s)
        self.task_sockets.refuse(listener, self._tasks_path)
        if answer is not None:
            answer_tasks(listener, answer)

    def close(self) -> None:
        """Give the ports back."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
