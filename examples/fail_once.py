"""The first attempt fails in the middle of its work, the second one succeeds.

Run it:

    saferun --nproc_per_node 2 --max-restarts 1 examples/fail_once.py

Expect a ConnectionError of the last rank (or --rank), a restart of all ranks, and exit status 0. The ranks talk to each
other in both attempts: the second one may find nothing of the first in its way.
"""

import argparse
import os

import torch
import torch.distributed as dist


def sum_of_ranks() -> torch.Tensor:
    """Adds up the ranks' numbers with a real all_reduce."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return total


def main() -> None:
    """Does one all_reduce, fails if this is the first attempt, and does another one if not."""
    parser = argparse.ArgumentParser(description="Fail in the first attempt only.")
    parser.add_argument("--rank", type=int, default=-1, help="the rank that fails; -1 is the last")
    args = parser.parse_args()

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Both tensors live until the group is destroyed: in torch 2.4, a rank can deadlock there if gloo's thread has the
    # last reference to one.
    first = sum_of_ranks()
    print(f"rank {rank}: attempt {attempt}, sum of the ranks {first.item()}", flush=True)

    if attempt == 0 and rank == args.rank % world_size:
        message = "the storage went away (it will be back for the next attempt)"
        raise ConnectionError(message)

    second = sum_of_ranks()
    print(f"rank {rank}: attempt {attempt} is done, sum of the ranks {second.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
