"""Programs for hosts that want to know whether they reach each other, and what they are told."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.machines.faults import Host
    from tests.cluster.machines.process import Process

# Connects to every `name:port`, and says how that went.
CONNECT = """
import errno, socket, sys
for where in sys.argv[1:]:
    name, port = where.rsplit(":", 1)
    try:
        socket.create_connection((name, int(port)), 8.0 if port == "22" else 1.0).close()
    except TimeoutError as error:
        print(where, "silence" if error.errno is None else errno.errorcode[error.errno])
    except socket.gaierror as error:
        print(where, "EAI_NONAME" if error.errno == socket.EAI_NONAME else error)
    except OSError as error:
        print(where, errno.errorcode[error.errno])
    else:
        print(where, "ok")
"""
# Serves a connection: what is sent comes back.
ECHO = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
connection, _ = listener.accept()
while received := connection.recv(1 << 16):
    connection.sendall(received)
"""
# Keeps a connection: says `told` and every answer, and how the connection ended.
TALK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
for line in sys.stdin:
    connection.sendall(line.encode())
    try:
        answer = connection.recv(100)
    except OSError as error:
        answer = type(error).__name__.encode()
    print("answer", answer.decode().strip() or "end", flush=True)
"""


def python(source: str, *arguments: object) -> list[str]:
    return [sys.executable, "-S", "-c", source, *map(str, arguments)]


def connect(host: Host, *where: str) -> dict[str, str]:
    """What a host is told when it connects."""
    done = host.run(python(CONNECT, *where), check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def talk(here: Host, there: Host) -> Process:
    """An open connection between two hosts; what is written to its stdin is sent, and answered."""
    there.popen(python(ECHO, 7777)).wait_for("^listening$")
    client = here.popen(python(TALK, f"{there.name}-data", 7777), stdin=subprocess.PIPE)
    client.wait_for("^connected$")
    return client


def say(client: Process, word: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{word}\n".encode())
    client.stdin.flush()
