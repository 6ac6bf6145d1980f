"""DeepSpeed: init_distributed() reads the variables that every rank has; the launcher ``deepspeed`` is not needed.

saferun --nproc-per-node 2 train_deepspeed.py

Without a GPU DeepSpeed compiles an operation of its own when it is first used, which takes half a minute.
"""

import gc
import sys

import deepspeed
import torch
import torch.distributed as dist

CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def main(failing_rank: int) -> None:
    """Train a linear model; one rank may fail, to see what that looks like."""
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for _ in range(4):
        if dist.get_rank() == failing_rank:
            raise RuntimeError("this rank was asked to fail")
        engine.backward(torch.nn.functional.mse_loss(engine(torch.randn(4, 4)), torch.randn(4, 1)))
        engine.step()
    print("trained on rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)


main(int(sys.argv[1]) if len(sys.argv) > 1 else -1)
# gloo's threads must be gone before Python ends, and nothing may hold the group any more.
gc.collect()
if dist.is_initialized():
    dist.destroy_process_group()
