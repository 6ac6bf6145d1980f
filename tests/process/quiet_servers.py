"""A server for ranks that send, receive and wait: each connection says in its first line what it wants."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.process.launching import REPOSITORY


class QuietServers:
    """Listens on a TCP port of this host and on a Unix socket.

    ``drip N S`` sends N bytes every S seconds; ``sink N S`` reads N bytes every S seconds; ``answer N`` sends N bytes
    for each piece that comes; ``compute S`` computes in a child for so long, and sends a byte then. A datagram has
    100 bytes sent back every 0.1 s.
    """

    def __init__(self, folder: Path) -> None:
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(folder / "server.sock"))
        self._unix.listen()
        self.port = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", self.port))
        threading.Thread(target=self._serve_datagrams, daemon=True).start()
        self._tcp6 = socket.create_server(("::1", self.port), family=socket.AF_INET6) if _has_ipv6() else self._tcp
        for listener in {self._tcp, self._tcp6, self._unix}:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve_datagrams(self) -> None:
        callers: set[tuple[str, int]] = set()
        self._udp.settimeout(0.1)
        while True:
            with contextlib.suppress(OSError):
                _, caller = self._udp.recvfrom(64)
                callers.add(caller)
            for caller in callers:
                with contextlib.suppress(OSError):
                    self._udp.sendto(bytes(100), caller)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(60)
            wanted = b""
            while not wanted.endswith(b"\n"):
                wanted += connection.recv(1)
            verb, *numbers = wanted.decode().split()
            size = int(numbers[0])
            if verb == "compute":
                _compute(size)
                connection.sendall(b"x")
                return
            if verb == "sink":
                # A window that opens a little at a time, as that of a slow network.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            while True:
                if verb == "answer":
                    if not connection.recv(1 << 16):
                        return
                    connection.sendall(bytes(size))
                    continue
                if verb == "drip":
                    connection.sendall(bytes(size))
                elif not connection.recv(size):
                    return
                time.sleep(float(numbers[1]))


def _compute(seconds: int) -> None:
    program = f"import os, time; end = time.monotonic() + {seconds}; parent = os.getppid()\n"
    program += "while time.monotonic() < end and os.getppid() == parent: pass"
    subprocess.run([sys.executable, "-S", "-c", program], check=True)


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


class ServersProcess:
    """The servers in a process of their own, whose CPU time is theirs alone."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.path = str(folder / "server.sock")

    @property
    def environ(self) -> dict[str, str]:
        """Where ranks find them."""
        return {"SERVER_PORT": str(self.port), "SERVER_PATH": self.path}

    def close(self) -> None:
        """End all connections."""
        # What computes notices the end of the process that wants it.
        self._process.kill()
        self._process.communicate()


_PROGRAM = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.process.quiet_servers import QuietServers
print(QuietServers(Path(sys.argv[1])).port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def quiet_servers(folder: Path) -> Iterator[ServersProcess]:
    """The servers, for the time of a with block."""
    servers = ServersProcess(folder)
    try:
        yield servers
    finally:
        servers.close()


CALL = """
import os, socket, time, threading
def call(wanted, unix=False, address="127.0.0.1", **options):
    if unix:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ["SERVER_PATH"])
    else:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        for name, value in options.items(): connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        connection.connect((address, int(os.environ["SERVER_PORT"])))
    connection.sendall(wanted.encode() + b"\\n")
    return connection
def drain(connection):
    while True: connection.recv(1 << 16)
def ask(connection, size_bytes, every_s):
    while True:
        connection.sendall(bytes(size_bytes))
        connection.recv(1 << 16)
        time.sleep(every_s)
def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
"""
"""What ranks begin with that use it."""
