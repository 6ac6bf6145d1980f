"""One rank dies of SIGSEGV, as it would of a fault in a C++ extension, while the others wait for it.

Run it:

    saferun --nproc_per_node 2 examples/crash_segv.py

Expect exit status 1. The last rank (or --rank) is the cause: it was killed by signal 11. The others are victims: they
lose their connection to it in the second all_reduce, or are stopped there.
"""

import argparse
import ctypes

import torch
import torch.distributed as dist


def read_through_a_null_pointer() -> None:
    """Kills the process: nothing is mapped at address 0."""
    ctypes.string_at(0)


def main() -> None:
    """Does one all_reduce with all ranks, and a second one without the rank that crashes."""
    parser = argparse.ArgumentParser(description="One rank dies of SIGSEGV.")
    parser.add_argument("--rank", type=int, default=-1, help="the rank that crashes; -1 is the last")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print(f"rank {dist.get_rank()}: the first all_reduce is done", flush=True)

    if dist.get_rank() == args.rank % dist.get_world_size():
        read_through_a_null_pointer()
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
