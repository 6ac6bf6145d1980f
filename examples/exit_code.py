"""One rank ends with an exit code of its own and says nothing, while the others wait for it.

Run it:

    saferun --nproc_per_node 2 examples/exit_code.py

Expect exit status 1. The last rank (or --rank) is the cause: it ended with exit code 3 (or --code). The others are
victims: they lose their connection to it in the second all_reduce, or are stopped there.
"""

import argparse
import sys

import torch
import torch.distributed as dist


def main() -> None:
    """Does one all_reduce with all ranks, and a second one without the rank that exits."""
    parser = argparse.ArgumentParser(description="One rank ends with an exit code of its own.")
    parser.add_argument("--rank", type=int, default=-1, help="the rank that exits; -1 is the last")
    parser.add_argument("--code", type=int, default=3, help="its exit code")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print(f"rank {dist.get_rank()}: the first all_reduce is done", flush=True)

    if dist.get_rank() == args.rank % dist.get_world_size():
        sys.exit(args.code)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
