"""A training loop that reports its steps to saferun, and announces a phase that takes long.

    saferun --nproc-per-node 2 --hang-timeout 10 examples/report_progress.py
    saferun --nproc-per-node 2 --hang-timeout 10 examples/report_progress.py --save-s 60  # longer than announced
    saferunctl status  # from another shell: the steps

It runs without saferun too (``python``, ``torchrun``), where the calls do nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import time

import saferun


def main() -> None:
    """Pretend to train, and to save a checkpoint at half of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05, help="how long a step takes")
    parser.add_argument("--save-s", type=float, default=3.0, help="how long the checkpoint takes")
    parser.add_argument("--nan-at", type=int, default=-1, help="the step in which rank 0 has a loss that is no number")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    loss = math.inf
    for step in range(args.steps):
        time.sleep(args.step_s)
        loss = math.nan if rank == 0 and 0 <= args.nan_at <= step else 1.0 / (step + 1)
        saferun.step(step, loss=loss)
        if step == args.steps // 2:
            with saferun.expect(20, "saving the checkpoint"):
                time.sleep(args.save_s)
    print(f"rank {rank}: {args.steps} steps, last loss {loss:.4f}")


if __name__ == "__main__":
    main()
