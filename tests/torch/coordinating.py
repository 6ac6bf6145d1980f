"""Coordinator processes of several hosts, all on this machine, driven by a stand-in for their supervisors.

A ``Host`` is one coordinator with the sockets that a supervisor would pass to it. What it says is read in order;
``expect`` waits for a message and keeps what came before it for later. Nothing sleeps: every wait is for something, and
is bounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.torch.forked_coordinators import Forked

if TYPE_CHECKING:
    from saferun.model import TorchParts

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "saferun" / "coordinator" / "__main__.py"
# Only what fails waits for so long: a dozen imports of torch beside each other on a busy machine take most of a minute.
DEADLINE_S = 180.0
HOST_TIMEOUT_S = 3.0

Message = dict[str, Any]

# What hosts tell all others: what cannot be read is not passed on.
TROUBLE: Message = {
    "kind": "abort",
    "host": 1,
    "task": 0,
    "label": "node1",
    "reason": "failure",
    "text": "rank 2 died",
    "ranks": [2],
    "signum": 0,
    "lost_task": None,
}
DECISION: Message = {
    "kind": "decision",
    "host": 0,
    "task": 0,
    "next": "finish",
    "exit_code": 1,
    "wait_s": 0,
    "restarts": 0,
    "text": [],
    "excluded": -1,
}


def listening(address: str = "127.0.0.1") -> socket.socket:
    """A listening socket on a port of its own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def _keep_free(address: tuple[str, int]) -> socket.socket:
    """Hold a port on which nothing listens any more: the kernel could give it to another test's coordinator."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # there may be connections in TIME_WAIT
    held.bind(address)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


class Line:
    """One task's connection to its coordinator."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.kept: list[Message] = []
        self._received = b""

    def send(self, op: str, **fields: Any) -> None:
        self.socket.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")

    def expect(self, op: str, timeout_s: float = DEADLINE_S, **fields: Any) -> Message:
        """The next message with this name and these fields; others are kept for later."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            for message in self.kept:
                if message["op"] == op and all(message.get(key) == value for key, value in fields.items()):
                    self.kept.remove(message)
                    return message
            remaining_s = give_up_at - time.monotonic()
            assert remaining_s > 0, f"no {op} {fields} within {timeout_s} s; there was {self.kept}"
            assert self._read(remaining_s), f"the coordinator ended before {op} {fields}; there was {self.kept}"

    def read_all(self) -> list[Message]:
        """Everything that has arrived, kept and new."""
        while select.select([self.socket], [], [], 0)[0] and self._read(1.0):
            pass
        found, self.kept = self.kept, []
        return found

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self.socket], [], [], timeout_s)[0]:
            return True
        try:
            chunk = self.socket.recv(1 << 20)
        except ConnectionResetError:
            return False
        *lines, self._received = (self._received + chunk).split(b"\n")
        self.kept += [json.loads(line) for line in lines]
        return bool(chunk)

    def wait_closed(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until the coordinator has closed its end."""
        give_up_at = time.monotonic() + timeout_s
        while self._read(max(0.0, give_up_at - time.monotonic())):
            assert time.monotonic() < give_up_at, "the coordinator did not end"


class Host(Line):
    """A host: its coordinator, its sockets, and its head's connection.

    Args:
        name: what the job knows it by.
        ranks: the listening socket of the ranks' store; None: one of its own.
        control: the one that its control store would be served on; None: one of its own.
        endpoint: the listening socket of the rendezvous' store, if it is here.
        tasks_path: where other tasks of the host connect, if there are any.
        torch_parts: what is needed of torch.
        serves: whether it may have to serve the ranks' store. Where it need not, its coordinator has nothing of torch.
        environ: more of the coordinator's environment; with it the coordinator is a program of its own, and no fork.
    """

    def __init__(
        self,
        name: str,
        *,
        ranks: socket.socket | None = None,
        control: socket.socket | None = None,
        endpoint: socket.socket | None = None,
        tasks_path: Path | None = None,
        torch_parts: TorchParts = "store",
        serves: bool = True,
        environ: dict[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.name = name
        self.ranks = ranks or listening()
        self.control = control or listening()
        self._listeners = [self.ranks, self.control]
        self._kept_free: list[socket.socket] = []
        fds = {"control": self.control.fileno()}
        if endpoint is not None:
            fds["endpoint"] = endpoint.fileno()
            self._listeners.append(endpoint)
        if tasks_path is not None:
            tasks = socket.socket(socket.AF_UNIX)
            tasks.bind(str(tasks_path))
            tasks.listen(64)
            self._listeners.append(tasks)
            fds["tasks"] = tasks.fileno()
        self.process: subprocess.Popen[bytes] | Forked
        if environ is None:
            self.process = Forked(theirs.fileno(), self.ranks.fileno(), fds, torch_parts, serves=serves)
        else:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", str(PROGRAM), str(theirs.fileno())),
                    *(str(self.ranks.fileno() if serves else -1), torch_parts, json.dumps(fds)),
                ],
                pass_fds=[theirs.fileno(), *(listener.fileno() for listener in self._listeners)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if "COORDINATING_STDERR" not in os.environ else None,
                env={**os.environ, **environ},
            )
        theirs.close()

    @property
    def control_port(self) -> int:
        return port_of(self.control)

    def join(self, **fields: Any) -> None:
        """Join as the head; what is not said is that of a static job of one host."""
        self.send("join", **joining(self, **fields))

    def vanish(self) -> None:
        """What is left when somebody has killed the supervisor: nothing."""
        addresses = [one.getsockname() for one in self._listeners if one.family == socket.AF_INET]
        for listener in self._listeners:
            listener.close()
        self.process.kill()
        self.process.wait()
        self._kept_free += map(_keep_free, addresses)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        for listener in (*self._listeners, *self._kept_free):
            listener.close()
        self.socket.close()


def joining(host: Host, **fields: Any) -> Message:
    """The fields of a ``join``."""
    record = {
        "nproc": 2,
        "role": "default",
        "pid": os.getpid(),
        "addresses": ["127.0.0.1"],
        "port": host.control_port,
        "files": f"/runs/{host.name}",
        "max_restarts": 0,
    }
    standard = {
        "attempt": 0,
        "restarts": 0,
        "task": 0,
        "tasks": 1,
        "backend": "static",
        "node_rank": 0,
        "least": 1,
        "most": 1,
        "master": ["127.0.0.1", [port_of(host.ranks)]],
        "endpoint": "",
        "conf": {},
        "run_id": "job7",
        "local_addr": None,
        "timeout_s": 30.0,
        "probe_after_s": HOST_TIMEOUT_S,
        "elastic": False,
        "expected": [],
        "name": host.name,
    }
    return standard | fields | {"record": record | fields.get("record", {})}


@contextlib.contextmanager
def hosts(*names: str, **options: Any) -> Iterator[list[Host]]:
    """Coordinators of hosts, ended whichever way the test goes. Of a static job the first one serves the stores."""
    static = options.get("torch_parts", "store") == "store"
    started = [Host(name, **{"serves": not static or not number, **options}) for number, name in enumerate(names)]
    try:
        yield started
    finally:
        for host in started:
            host.close()


def join_all(joining_hosts: list[Host], **fields: Any) -> list[Message]:
    """All hosts join one static job, the first of them as node rank 0. Returns their ``joined``."""
    for rank, host in enumerate(joining_hosts):
        own = {"node_rank": rank, "most": len(joining_hosts), "least": len(joining_hosts)}
        host.join(**{**own, "master": ["127.0.0.1", [port_of(joining_hosts[0].ranks)]], **fields})
    return [host.expect("joined") for host in joining_hosts]


def until(is_so: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until something is so that cannot be waited for in another way."""
    give_up_at = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up_at, f"never: {what}"
        time.sleep(0.005)


def ranks_store(joined: Message) -> Any:
    """A client of the ranks' store, as a rank has one."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        joined["master_addr"],
        joined["master_port"],
        is_master=False,
        timeout=timedelta(seconds=10),
        wait_for_workers=False,
    )


def states_until(leader: Host, wanted: dict[str, Any]) -> dict[str, Any]:
    """All states that the leader has been told of, once the wanted ones are among them."""
    seen: dict[str, Any] = {}
    while any(seen.get(task) != state for task, state in wanted.items()):
        seen |= leader.expect("states")["changed"]
    return seen


def until_words(host: Host, words: str) -> str:
    """The first ``waiting`` that says this."""
    while True:
        waiting = host.expect("waiting")
        said = f"{waiting['text']} ({waiting['waited_s']} s)"
        if words in said:
            return said


def count_operations(host: Host) -> int:
    host.send("counts")
    operations: int = host.expect("counts")["operations"]
    return operations


def connections_to(pid: int, port: int) -> Iterator[socket.socket]:
    """All connections of a process to a port, one after the other, as this process has them for a moment."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, IndexError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=_stolen(pidfd, int(name))) as connection:
                    if connection.getpeername()[1] == port:
                        yield connection
    finally:
        os.close(pidfd)


def cut_connections(pid: int, port: int) -> None:
    """Shut down all connections of a process to a port, from outside."""
    for connection in connections_to(pid, port):
        connection.shutdown(socket.SHUT_RDWR)


def silence(connection: socket.socket) -> None:
    """Let nothing arrive on a connection any more, as behind a firewall that has forgotten it."""
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF_RET, 0 bytes
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    so_attach_filter = 26
    connection.setsockopt(socket.SOL_SOCKET, so_attach_filter, program)


def _stolen(pidfd: int, fd: int) -> int:
    pidfd_getfd = 438
    stolen = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, pidfd, fd, 0)
    if stolen < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(stolen)
