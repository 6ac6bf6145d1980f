"""One rank dies, in one of many ways, while the others wait for it.

Run it:

    saferun --nproc_per_node 2 examples/crash.py --how abort

Expect exit status 1, and the last rank (or --rank; all: every rank at once) named as the cause, with what it died of
and where. The others are victims: they lose their connection to it in the second all_reduce, or are stopped there.
"""

import argparse
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


def read_through_a_null_pointer() -> None:
    """Nothing is mapped at address 0."""
    ctypes.string_at(0)


def crash_in_another_thread() -> None:
    """The same, while the main thread waits."""
    thread = threading.Thread(target=read_through_a_null_pointer, name="prefetcher")
    thread.start()
    thread.join()


def abort() -> None:
    """As a failed assertion in C++ does."""
    os.abort()


def divide_by_zero() -> None:
    """As far as the kernel is concerned."""
    signal.raise_signal(signal.SIGFPE)


def leave_without_a_word() -> None:
    """No traceback, no flush, no handlers."""
    os._exit(3)


def raise_an_exception() -> None:
    """A bug in the training script."""
    batch = {"inputs": 1}
    print(batch["labels"])


def import_what_is_not_there() -> None:
    """A package that was not installed on this host."""
    import flash_attention_of_another_planet  # type: ignore[import-not-found]  # noqa: F401


def leave_early() -> None:
    """All is well, as far as this rank is concerned; not by sys.exit, which gloo's threads may turn into an abort."""
    sys.stdout.flush()
    os._exit(0)


def fill_the_disk() -> None:
    """Every write to /dev/full fails as on a full disk."""
    with open("/dev/full", "wb", buffering=0) as checkpoint:
        checkpoint.write(b"weights")


def fill_shared_memory() -> None:
    """Wants more shared memory than there is, as many data-loader workers do. For where /dev/shm is small."""
    room = os.statvfs("/dev/shm")  # noqa: S108
    size_bytes = room.f_bavail * room.f_frsize + (8 << 20)
    if size_bytes > 1 << 30:
        sys.exit("shared memory is too large for this: try it in a container, where it often has 64 MiB")
    torch.empty(size_bytes, dtype=torch.uint8).share_memory_().fill_(1)


def open_too_many_files() -> None:
    """Forgets to close what it opens."""
    opened = []
    while True:
        opened.append(open("/dev/null", "rb"))  # noqa: SIM115 - the point


def use_a_taken_port() -> None:
    """Wants a port that is in use."""
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def eat_memory() -> None:
    """Until the kernel's OOM killer ends it; run it in a cgroup with a limit."""
    kept = []
    while True:
        kept.append(b"x" * (8 << 20))


class DatasetThatDies(Dataset[int]):
    """Its worker is killed at the third item, as by the OOM killer."""

    def __len__(self) -> int:
        """Any number."""
        return 100

    def __getitem__(self, index: int) -> int:
        """The item, or the end."""
        if index == 2:  # noqa: PLR2004
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def lose_a_loader_worker() -> None:
    """Loads from a worker that dies."""
    for _ in DataLoader(DatasetThatDies(), num_workers=1, multiprocessing_context="fork"):
        pass


def wait_to_be_killed() -> None:
    """Until it is done from outside."""
    print("waiting", flush=True)
    while True:
        signal.pause()


WAYS: dict[str, Callable[[], None]] = {
    "segv": read_through_a_null_pointer,
    "segv-thread": crash_in_another_thread,
    "abort": abort,
    "fpe": divide_by_zero,
    "exit": leave_without_a_word,
    "raise": raise_an_exception,
    "import": import_what_is_not_there,
    "early": leave_early,
    "disk": fill_the_disk,
    "shm": fill_shared_memory,
    "files": open_too_many_files,
    "port": use_a_taken_port,
    "memory": eat_memory,
    "loader": lose_a_loader_worker,
    "killed": wait_to_be_killed,
}


def main() -> None:
    """Does one all_reduce with all ranks, and a second one without the rank that dies."""
    parser = argparse.ArgumentParser(description="One rank dies.")
    parser.add_argument("--how", choices=WAYS, default="segv", help="what it dies of")
    parser.add_argument("--rank", default="-1", help="the rank that dies; -1 is the last; all")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print(f"rank {dist.get_rank()}: the first all_reduce is done", flush=True)

    if args.rank == "all" or dist.get_rank() == int(args.rank) % dist.get_world_size():
        WAYS[args.how]()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
