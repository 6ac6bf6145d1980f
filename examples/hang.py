"""One rank stops taking part in a collective, and all the others wait for it.

Run it:

    saferun --nproc_per_node 2 examples/hang.py

Expect a few steps, then silence: the last rank (or --rank) waits in `wait_for_a_batch_that_never_comes`, the others in
`all_reduce`. Left alone, the others give up after the process group's time-out (--timeout-s, half an hour). Ctrl-C ends
it at once.
"""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist

POLL_S = 0.1


def wait_for_a_batch_that_never_comes() -> None:
    """Waits for ever, as on a queue whose other end is dead."""
    while True:
        time.sleep(POLL_S)


def main() -> None:
    """Takes --steps steps with all ranks, and then one without the rank that stays away."""
    parser = argparse.ArgumentParser(description="One rank stops taking part in a collective.")
    parser.add_argument("--rank", type=int, default=-1, help="the rank that stays away; -1 is the last")
    parser.add_argument("--steps", type=int, default=3, help="steps that all ranks take before that")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="the process group's time-out")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout_s))
    for step in range(args.steps):
        dist.all_reduce(torch.ones(1))
        print(f"rank {dist.get_rank()}: step {step} is done", flush=True)

    if dist.get_rank() == args.rank % dist.get_world_size():
        wait_for_a_batch_that_never_comes()
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
