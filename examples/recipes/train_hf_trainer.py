"""Trainer of Hugging Face's transformers: TrainingArguments reads the variables that every rank has.

saferun --nproc-per-node 2 train_hf_trainer.py
"""

import gc
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    """A linear model; one rank may fail, to see what that looks like."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fails = fails

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a batch, as the Trainer wants it."""
        if self.fails:
            raise RuntimeError("this rank was asked to fail")
        return {"loss": torch.nn.functional.mse_loss(self.layer(inputs), targets)}


def main(failing_rank: int) -> None:
    """Train on the CPU."""
    data = [{"inputs": torch.randn(4), "targets": torch.randn(1)} for _ in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(Model(fails=arguments.process_index == failing_rank), arguments, train_dataset=data).train()
        print("trained on rank", arguments.process_index, "of", arguments.world_size, flush=True)


main(int(sys.argv[1]) if len(sys.argv) > 1 else -1)
# gloo's threads must be gone before Python ends, and nothing may hold the group any more.
gc.collect()
if dist.is_initialized():
    dist.destroy_process_group()
