"""Accelerate: Accelerator() reads the variables that every rank has.

saferun --nproc-per-node 2 train_accelerate.py
"""

import gc
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator


def main(failing_rank: int) -> None:
    """Train a linear model; one rank may fail, to see what that looks like."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    for inputs, targets in loader:
        if accelerator.process_index == failing_rank:
            raise RuntimeError("this rank was asked to fail")
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    print("trained on rank", accelerator.process_index, "of", accelerator.num_processes, flush=True)


main(int(sys.argv[1]) if len(sys.argv) > 1 else -1)
# gloo's threads must be gone before Python ends, and nothing may hold the group any more.
gc.collect()
if dist.is_initialized():
    dist.destroy_process_group()
