"""Ranks that work in step as those of gloo do: the main thread waits on a futex while another one does the network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.process.launching import Job

# Its arguments: the slow rank, and by which factor. It ends in the step in which rank 0 sees the release of "end".
IN_STEP = """
from rank import *
import queue, socket, threading

WORLD = int(os.environ["WORLD_SIZE"])
SLOW, FACTOR = int(sys.argv[1]), float(sys.argv[2])
PLACE = os.environ.get("IN_STEP_PLACE", FOLDER) + "/step"
STEP_S = 0.05

def serve(listener):
    connections = [listener.accept()[0] for _ in range(WORLD)]
    while True:
        for connection in connections:
            if not connection.recv(1):
                return
        last = b"1" if os.path.exists(FOLDER + "/release.end") else b"0"
        for connection in connections:
            connection.sendall(last)

if RANK == 0:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(PLACE + ".new")
    listener.listen(WORLD)
    os.rename(PLACE + ".new", PLACE)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
connection = socket.socket(socket.AF_UNIX)
while True:
    try:
        connection.connect(PLACE)
        break
    except OSError:
        time.sleep(0.01)
asked, answered = queue.Queue(), queue.Queue()

def exchange():
    while True:
        asked.get()
        try:
            connection.sendall(b"1")
            answered.put(connection.recv(1))
        except OSError:  # rank 0 has ended
            answered.put(b"")

threading.Thread(target=exchange, daemon=True).start()

def work(seconds):
    time.sleep(seconds)

def meet():
    asked.put(1)
    return answered.get() != b"0"

tell("ready")
while not meet():
    work(STEP_S * (FACTOR if RANK == SLOW else 1.0))
os._exit(0)
"""


def table_of(job: Job) -> dict[str, Any]:
    """What ``saferunctl status`` shows, as far as it is written."""
    path = job.run_dir / "waits.json"
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return table
