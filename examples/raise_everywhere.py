"""All ranks raise the same exception at the same place, as they do for a wrong setting.

Run it:

    saferun --nproc_per_node 2 examples/raise_everywhere.py

Expect exit status 1 and the same ValueError from every rank: there is one cause, it is in the script, and no rank is
the victim of another.
"""

import argparse

import torch
import torch.distributed as dist


def check_learning_rate(learning_rate: float) -> None:
    """Refuses a learning rate that cannot be meant."""
    if learning_rate <= 0:
        message = f"the learning rate must be positive, not {learning_rate}"
        raise ValueError(message)


def build_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Makes the optimizer for a model."""
    check_learning_rate(learning_rate)
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


def main() -> None:
    """Meets the other ranks, and fails with all of them."""
    parser = argparse.ArgumentParser(description="All ranks raise the same exception.")
    parser.add_argument("--learning-rate", type=float, default=-0.1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    build_optimizer(torch.nn.Linear(4, 4), args.learning_rate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
