"""Jobs of two gloo ranks, of which rank 0 waits for something outside the job, or for what never comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

QUIET_S = 15.0
"""How long rank 0 waits: not until just when a hang that goes on is reported again, after 2, 4, 8 and 16 s or so."""
TIMEOUT_S = 2.0
"""After which a job hangs: far less."""

BEGIN = """
import os, queue, select, socket, subprocess, sys, threading, time
import torch
import torch.distributed as dist
PORT, FOLDER, QUIET = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def ask(what):
    connection = socket.create_connection(("127.0.0.1", PORT))
    connection.sendall(what.encode() + b"\\n")
    return connection
def meet():
    dist.all_reduce(torch.ones(1))
dist.init_process_group("gloo")
RANK = dist.get_rank()
meet()
"""
END = """
meet()
print("well", flush=True)
os._exit(0)
"""
WAITS = {
    "time.sleep": "time.sleep(QUIET)",
    "a query whose answer has not begun": "ask('answer').recv(100)",
    "bursts": """
connection = ask('bursts')
while connection.recv(1 << 20): pass
""",
    "a trickle": """
connection = ask('trickle')
while connection.recv(1 << 20): pass
""",
    "a file lock of another job": """
import fcntl
ask('unlock').close()
with open(FOLDER + "/lock") as file: fcntl.flock(file, fcntl.LOCK_EX)
""",
    "a child that sleeps": "subprocess.run(['sleep', str(QUIET)], check=True)",
    "a shell whose child sleeps": "subprocess.run(['sh', '-c', f'sleep {QUIET}; true'], check=True)",
    "select of a child's pipe": """
child = subprocess.Popen(["sh", "-c", f"sleep {QUIET}; echo"], stdout=subprocess.PIPE)
select.select([child.stdout], [], [])
""",
    "poll of a child's pipe": """
child = subprocess.Popen(["sh", "-c", f"sleep {QUIET}; echo"], stdout=subprocess.PIPE)
poll = select.poll()
poll.register(child.stdout, select.POLLIN)
while not poll.poll(5000): pass
""",
    "a queue that another process feeds": """
import multiprocessing
context = multiprocessing.get_context("spawn" if "spawn" in sys.argv else "fork")
results = context.Queue()
def feed():
    time.sleep(QUIET)
    results.put(1)
process = context.Process(target=feed)
process.start()
results.get()
""",
    "a lock file that is polled": """
ask('unlock').close()
while os.path.exists(FOLDER + "/lock"): time.sleep(0.3)
""",
    "a process pool": """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool: pool.map(time.sleep, [QUIET, 0.1])
""",
    "a thread of a pool that sleeps": """
import concurrent.futures
def fetch(): time.sleep(QUIET)
with concurrent.futures.ThreadPoolExecutor(1) as pool: pool.submit(fetch).result()
""",
    "a call of a library in a thread of a pool": """
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor(1) as pool: pool.submit(time.sleep, QUIET).result()
""",
    "a pool of threads": """
import multiprocessing.pool
with multiprocessing.pool.ThreadPool(2) as pool: pool.map(time.sleep, [QUIET, 0.1])
""",
    "asyncio.to_thread": """
import asyncio
asyncio.run(asyncio.to_thread(time.sleep, QUIET))
""",
    "a FIFO that is opened": """
os.mkfifo(FOLDER + "/fifo")
child = subprocess.Popen(["sh", "-c", f"sleep {QUIET}; echo > {FOLDER}/fifo"])
open(FOLDER + "/fifo").read()
""",
    "a queue that a thread with a download feeds": """
results = queue.Queue()
def fetch(): results.put(ask('answer').recv(100))
threading.Thread(target=fetch).start()
results.get()
""",
    "an event that a thread sets after a while": """
ready = threading.Event()
def fetch():
    time.sleep(QUIET)
    ready.set()
threading.Thread(target=fetch).start()
ready.wait()
""",
    "a lock of a thread that sleeps": """
lock, has_lock = threading.Lock(), threading.Event()
def fetch():
    with lock:
        has_lock.set()
        time.sleep(QUIET)
threading.Thread(target=fetch).start()
has_lock.wait()
lock.acquire()
""",
    "a lock that a timer gives back": """
lock = threading.Lock()
lock.acquire()
threading.Timer(QUIET, lock.release).start()
lock.acquire()
""",
    "an event with a timeout": "threading.Event().wait(QUIET)",
    "asyncio.sleep": """
import asyncio
asyncio.run(asyncio.sleep(QUIET))
""",
    "a loader whose worker sleeps": """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, index):
        time.sleep(QUIET)
        return torch.ones(1)
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"): pass
""",
}
DEADLOCKS = {
    "two threads with two locks": """
first, second, has_second = threading.Lock(), threading.Lock(), threading.Event()
def other():
    with second:
        has_second.set()
        first.acquire()
with first:
    threading.Thread(target=other, daemon=True).start()
    has_second.wait()
    second.acquire()
""",
    "a queue that nobody feeds": "queue.Queue().get()",
    "a queue between processes that nobody feeds": """
import multiprocessing
multiprocessing.Queue().get()
""",
    "a call that holds the GIL": """
import ctypes
ctypes.PyDLL(None).sleep(1000)
""",
    "a forked child in a lock": """
lock = threading.Lock()
lock.acquire()
pid = os.fork()
if pid == 0: lock.acquire()
os.waitpid(pid, 0)
""",
    "another group's collective": "dist.broadcast(torch.ones(1), 0); dist.barrier()",
    "the store": "dist.distributed_c10d._get_default_store().wait(['never'])",
}
"""Rank 0 does these."""
OF_BOTH = {
    "a rank that has exited": """
if RANK == 0: os._exit(0)
dist.distributed_c10d._get_default_store().wait(["never"])
""",
    "a socket to the other rank": """
if RANK == 0:
    listener = socket.create_server(("127.0.0.1", 0))
    open(FOLDER + "/port.new", "w").write(str(listener.getsockname()[1]))
    os.rename(FOLDER + "/port.new", FOLDER + "/port")
    connection, _ = listener.accept()
else:
    while not os.path.exists(FOLDER + "/port"): time.sleep(0.05)
    connection = socket.create_connection(("127.0.0.1", int(open(FOLDER + "/port").read())))
if RANK == 1: connection.recv(1)
""",
    "a file lock that the other rank holds": """
import fcntl
file = open(FOLDER + "/own-lock", "w")
if RANK == 0: fcntl.flock(file, fcntl.LOCK_EX)
meet()
if RANK == 1: fcntl.flock(file, fcntl.LOCK_EX)
""",
}
"""Both do these."""


class Outside:
    """What is not of the job: a server on this host, and a lock. ``port`` is the server's, ``folder`` has the lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            asked = connection.makefile().readline().strip()
            ways: dict[str, Callable[[socket.socket], None]] = {
                "answer": self._later,
                "bursts": self._bursts,
                "trickle": self._trickle,
                "unlock": self._unlock,
            }
            ways[asked](connection)

    @staticmethod
    def _later(connection: socket.socket) -> None:
        time.sleep(QUIET_S)
        connection.sendall(b"answer")

    @staticmethod
    def _bursts(connection: socket.socket) -> None:
        for _ in range(8):
            time.sleep(TIMEOUT_S * 1.4)
            connection.sendall(bytes(60_000))

    @staticmethod
    def _trickle(connection: socket.socket) -> None:
        end = time.monotonic() + QUIET_S + 10
        while time.monotonic() < end:
            connection.sendall(bytes(417))
            time.sleep(1.0)

    def _unlock(self, _connection: socket.socket) -> None:
        time.sleep(QUIET_S)
        os.unlink(self.folder / "lock")
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """End the server; the lock is free."""
        self._listener.close()
        os.close(self._lock)


@contextlib.contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    """What is not of the job, for as long as a test lasts."""
    folder.mkdir(exist_ok=True)
    found = Outside(folder)
    try:
        yield found
    finally:
        found.close()
