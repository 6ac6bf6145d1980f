"""One rank stops taking part in collectives, in one of many ways, and all the others wait for it.

Run it:

    saferun --nproc_per_node 2 --hang-timeout 10 examples/hang.py --how lock

Expect a few steps, then silence, and after --hang-timeout seconds a picture of the hang: the last rank (or --rank) is
the cause, and where it stands is shown with its function and line. Left alone, the others give up after the process
group's time-out (--timeout-s, half an hour). Ctrl-C ends it at once.
"""

import argparse
import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

POLL_S = 0.1
LONG_S = 100_000


def wait_for_a_batch_that_never_comes() -> None:
    """Looks every now and then, as at a queue whose other end is dead."""
    while True:
        time.sleep(POLL_S)


def sleep_for_long() -> None:
    """Sleeps."""
    time.sleep(LONG_S)


def wait_for_a_lock() -> None:
    """Takes a lock that this thread holds already."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_a_queue() -> None:
    """Waits for a thread that has died."""
    queue.Queue[int]().get()


def spin_in_python() -> None:
    """Waits for a flag that is never set, with all of a processor."""
    done = False
    while not done:
        pass


def block_in_c() -> None:
    """Calls C code that never returns and holds the GIL, so that no Python thread runs any more."""
    ctypes.PyDLL(None).sleep(LONG_S)


def read_from_a_fifo() -> None:
    """Opens a FIFO without a writer."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "fifo")
        os.mkfifo(path)
        with open(path, encoding="utf-8") as fifo:
            fifo.read()


def stop_itself() -> None:
    """Is stopped, as by a debugger that was left, or by Ctrl-Z."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_subprocess() -> None:
    """Starts a program that never ends."""
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({LONG_S})"], check=True)


def run_out_of_batches() -> None:
    """Has one batch fewer than the others, and goes on to what comes after the last one."""
    dist.barrier()


def wait_in_the_store() -> None:
    """Leaves the collectives out and waits for a message that is sent after them."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - where torch keeps it
    store.wait(["results"], timedelta(seconds=LONG_S))


class DatasetThatDeadlocks(Dataset[int]):
    """Its third item needs a lock that is never released, as a copy of a lock held in the parent is not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        """Any number."""
        return 100

    def __getitem__(self, index: int) -> int:
        """The item, or a deadlock."""
        if index == 2:  # noqa: PLR2004
            self.lock.acquire()
        with self.lock:
            return index


def load_from_a_worker_that_deadlocks() -> None:
    """Waits for a data-loader worker that waits forever."""
    for _ in DataLoader(DatasetThatDeadlocks(), num_workers=1, multiprocessing_context="fork"):
        pass


WAYS: dict[str, Callable[[], None]] = {
    "poll": wait_for_a_batch_that_never_comes,
    "sleep": sleep_for_long,
    "lock": wait_for_a_lock,
    "queue": wait_for_a_queue,
    "spin": spin_in_python,
    "c": block_in_c,
    "fifo": read_from_a_fifo,
    "stop": stop_itself,
    "subprocess": wait_for_a_subprocess,
    "mismatch": run_out_of_batches,
    "missing": wait_in_the_store,
    "loader": load_from_a_worker_that_deadlocks,
}


def main() -> None:
    """Takes --steps steps with all ranks, and then one without the rank that stays away."""
    parser = argparse.ArgumentParser(description="One rank stops taking part in collectives.")
    parser.add_argument("--how", choices=WAYS, default="poll", help="what it does instead")
    parser.add_argument("--rank", type=int, default=-1, help="the rank that stays away; -1 is the last")
    parser.add_argument("--steps", type=int, default=3, help="steps that all ranks take before that")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="the process group's time-out")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout_s))
    for step in range(args.steps):
        dist.all_reduce(torch.ones(1))
        print(f"rank {dist.get_rank()}: step {step} is done", flush=True)

    if dist.get_rank() == args.rank % dist.get_world_size():
        WAYS[args.how]()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
