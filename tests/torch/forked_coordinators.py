"""Coordinators as forks of one process that has imported torch: the import is what would cost, not the coordinator.

``Forked`` is such a coordinator, and has of ``subprocess.Popen`` what the tests use. One process for each flavour of
torch's import is started by the first coordinator that needs it, forks all others, and ends with this process.
"""

from __future__ import annotations

import array
import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saferun.model import TorchParts

REPOSITORY = Path(__file__).parents[2]
_MOST_FDS = 16
_MESSAGE_BYTES = 1 << 12

# Receives a list of words and descriptors, forks the coordinator, and answers with its pid; or waits for one's end.
_FORKS = """
import array, json, os, signal, socket, sys

repository, fd, torch_parts = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.append(repository)
from saferun.coordinator import __main__ as program, service

# As the coordinator has it, which sets it before it imports torch.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
clients = service.import_store_class(torch_parts, serves=False) if torch_parts == "store" else None
servers = service.import_store_class(torch_parts)
# Of saferun nothing more: a coordinator begins with values of its own, such as those that tell two of them apart.
if torch_parts == "all":
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    import torch.distributed.elastic.rendezvous.registry
assert len(os.listdir("/proc/self/task")) == 1
# It is imported once.
service.import_store_class = lambda torch_parts, *, serves: servers if serves else clients or servers

connection = socket.socket(fileno=fd)
while True:
    content, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * MOST_FDS))
    if not content:
        os._exit(0)
    order = json.loads(content)
    fds = array.array("i")
    for _, _, more in ancillary:
        fds.frombytes(more)
    if "wait" in order:
        pid, status = os.waitpid(order["wait"], 0 if order["is_dying"] else os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
        answer = os.fork()
        if not answer:
            connection.close()
            names = order["names"]
            ranks = fds[1] if order["serves"] else -1
            if ranks < 0:
                os.close(fds[1])
            sys.argv = ["", str(fds[0]), str(ranks), torch_parts, json.dumps(dict(zip(names, fds[2:])))]
            program.main()
            os._exit(0)
        for fd in fds:
            os.close(fd)
    connection.sendall(json.dumps(answer).encode())
""".replace("MESSAGE_BYTES", str(_MESSAGE_BYTES)).replace("MOST_FDS", str(_MOST_FDS))


class _Forks:
    """The process that forks coordinators."""

    def __init__(self, torch_parts: TorchParts) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", _FORKS, str(REPOSITORY), str(theirs.fileno())),
                torch_parts,
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if "COORDINATING_STDERR" not in os.environ else None,
            # A process that forks has no threads, nor has numpy any in it.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        atexit.register(self._end)

    def ask(self, order: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        """Send an order with descriptors, and return its answer."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._connection.sendmsg([json.dumps(order).encode()], ancillary)
        answer = self._connection.recv(_MESSAGE_BYTES)
        assert answer, "the process that forks coordinators has ended"
        return json.loads(answer)

    def _end(self) -> None:
        self._connection.close()
        self._process.wait()


@functools.cache
def _forks(torch_parts: TorchParts) -> _Forks:
    return _Forks(torch_parts)


class Forked:
    """A coordinator.

    Args:
        supervisor: the descriptor of its end of the connection to its supervisor.
        ranks: that of the ranks' store's listening socket.
        listeners: those of more listening sockets, by name.
        torch_parts: what it has of torch.
        serves: whether the ranks' store may be served there.
    """

    stderr = None

    def __init__(
        self, supervisor: int, ranks: int, listeners: dict[str, int], torch_parts: TorchParts, *, serves: bool
    ) -> None:
        self._forks = _forks(torch_parts)
        fds = [supervisor, ranks, *listeners.values()]
        self.pid = int(self._forks.ask({"names": list(listeners), "serves": serves}, fds))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._reap(is_dying=False)

    def wait(self) -> int | None:
        """Its exit code, once it has ended. It has to be about to."""
        return self._reap(is_dying=True)

    def _reap(self, *, is_dying: bool) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask({"wait": self.pid, "is_dying": is_dying})
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)
