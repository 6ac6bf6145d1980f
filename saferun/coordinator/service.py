"""What the coordinator does for its supervisor, message by message.

The supervisor sends JSON lines, each with ``op``:

* ``serve {attempt}``: serve the store of this attempt; answered by ``serving {attempt, torch}``.
* ``drop``: end the store of the previous attempt, with all its keys and connections; answered by ``dropped``.
* ``prepare {numa, local_ranks, logs, environs, handler, file_timer, run_id}``: numactl commands, log destinations, a
  timer; answered by ``prepared`` or ``failed``.
* ``start_stage {attempt, world_size}``: how far the ranks have come, as their store shows it; answered by
  ``start_stage {attempt, stage, arrived, world_size}``, with an empty stage where that store is not served.
* ``event {…}``: hand an event to torch's event handlers.
* ``goodbye``: end.

A job of several hosts (the supervisor passes more sockets then) has more messages, and more processes that send them:
``host_coordinator.py``. ``prepare`` and ``event`` come from the head only: other tasks have a process of their own for
that (``cluster/torch_process.py``), which serves no store and has no other hosts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from saferun.coordinator.torch_store import import_store_class, loopback_address, open_store

if TYPE_CHECKING:
    from saferun.coordinator.secret_process import SecretProcess
    from saferun.model import TorchParts


def serve(
    socket_fd: int,
    listen_fd: int,
    fds: dict[str, int],
    *,
    torch_parts: TorchParts,
    sharing: SecretProcess | None = None,
) -> None:
    """Import what is needed of torch, then answer messages until goodbye or the end of the supervisor. Does not return.

    Args:
        socket_fd: the connection to the supervisor.
        listen_fd: the store's listening socket; -1: there is none.
        fds: the sockets of a job of several hosts: ``control``, ``endpoint``, ``tasks``, each a listening one, each
            optional.
        torch_parts: what is needed of torch.
        sharing: how a job secret gets to the other hosts, if it is to.

    Raises:
        ImportError: there is no torch that can be used.
    """
    try:
        store_class, torch_version = import_store_class(torch_parts, serves=listen_fd >= 0)
    except ModuleNotFoundError:
        raise
    except ImportError:
        if torch_parts == "all":
            raise
        # Half of torch is loaded; only a fresh interpreter can load all of it.
        for fd in (socket_fd, listen_fd, *fds.values()):
            if fd >= 0:
                os.set_inheritable(fd, True)
        again = [sys.argv[0], str(socket_fd), str(listen_fd), "all", json.dumps(fds)]
        os.execv(sys.executable, [sys.executable, "-P", *again])
    service = _Service(store_class, torch_version, listen_fd)
    if fds:
        _serve_several(service, store_class, socket_fd, listen_fd, fds, sharing)
    with socket.socket(fileno=socket_fd) as connection, connection.makefile("rb") as incoming:
        for line in incoming:
            message = json.loads(line)
            if message["op"] == "goodbye":
                service.close()
                break
            answer = service.handle(message)
            if answer is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")
    # Without the interpreter's shutdown: torch's threads still run.
    sys.stderr.flush()
    os._exit(0)


def _serve_several(
    service: _Service,
    store_class: Any,  # noqa: ANN401
    socket_fd: int,
    listen_fd: int,
    fds: dict[str, int],
    sharing: SecretProcess | None,
) -> None:
    """The same for a job of several hosts. Does not return."""
    import resource

    from saferun.coordinator.host_coordinator import HostCoordinator, exit_now
    from saferun.coordinator.served_stores import ServedStores
    from saferun.coordinator.tasks import Message, TaskConnection, Tasks

    # Every host has two connections to the control store, every rank one to its own.
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def listener(name: str) -> socket.socket | None:
        return socket.socket(fileno=os.dup(fds[name])) if name in fds else None

    tasks = Tasks(socket.socket(fileno=socket_fd), listener("tasks"), listener("control"))
    stores = ServedStores(store_class, listen_fd, fds.get("control", -1), tasks.answer_probes)
    if sharing is not None:
        # What encrypts takes a while to import, and the hosts have yet to be checked.
        threading.Thread(target=_import_cipher, daemon=True).start()
    host = HostCoordinator(tasks, stores, fds.get("endpoint", -1), sharing)

    def end() -> None:
        service.close()
        exit_now(sharing)

    def on_message(connection: TaskConnection, message: Message) -> None:
        if message.get("op") == "goodbye":
            connection.is_leaving = True
            if connection.is_head:
                host.farewell(end)
        elif not host.handle(connection, message) and connection.is_head:
            answer = service.handle(message)
            if answer is not None:
                connection.send(answer)

    tasks.run(on_message, host.lose_task, host.tick)
    exit_now(sharing)


def _import_cipher() -> None:
    from saferun.cluster.secret import JobSecret
    from saferun.cluster.signed import CannotSealError, Signer
    from saferun.linux.heap import trim_heap

    with suppress(CannotSealError):
        Signer(JobSecret(bytes(32)), "").protect("r0/host/0", b"")  # with all that it imports
    trim_heap()


class _Service:
    """The coordinator between two messages."""

    def __init__(self, store_class: Any, torch_version: str, listen_fd: int) -> None:  # noqa: ANN401
        self._store_class = store_class
        self.torch_version = torch_version
        self._listen_fd = listen_fd
        self._store: Any = None
        self._attempt = -1  # whose store it is

    def close(self) -> None:
        """Take away what would stay behind."""
        if "saferun.coordinator.torchrun_parts" in sys.modules:
            from saferun.coordinator.torchrun_parts import stop_file_timer

            stop_file_timer()

    def handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Do what a message asks for and return the answer, if it has one."""
        match message.get("op"):
            case "serve":
                self._store = None  # the server of the previous attempt ends before the next one begins
                self._store = open_store(self._store_class, self._listen_fd)
                self._attempt = int(message["attempt"])
                return {"op": "serving", "attempt": message["attempt"], "torch": self.torch_version}
            case "drop":
                self._store = None
                return {"op": "dropped"}
            case "start_stage":
                return self._start_stage(int(message["attempt"]), int(message.get("world_size", 0)))
            case "prepare":
                from saferun.coordinator.torchrun_parts import prepare

                return prepare(message)
            case "event":
                from saferun.coordinator.torchrun_parts import record_event

                record_event(message)
        return None

    def _start_stage(self, attempt: int, world_size: int) -> dict[str, Any]:
        from saferun.coordinator.init_progress import Stage, start_stage

        found = Stage("", -1, world_size)
        if self._store is not None and attempt == self._attempt:
            found = start_stage(self._store, loopback_address(self._listen_fd), world_size)
        return {"op": "start_stage", "attempt": attempt, **found._asdict()}
