"""Lightning: the Trainer finds the ranks that there are, and starts none itself.

saferun --nproc-per-node 2 train_lightning.py

``devices`` is what ``--nproc-per-node`` is, and ``num_nodes`` the number of hosts.
"""

import gc
import os
import sys

import lightning
import torch
import torch.distributed as dist


class Model(lightning.LightningModule):
    """A linear model; one rank may fail, to see what that looks like."""

    def __init__(self, failing_rank: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.failing_rank = failing_rank

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """The loss of a batch."""
        if self.global_rank == self.failing_rank:
            raise RuntimeError("this rank was asked to fail")
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), 0.1)


def main(failing_rank: int) -> None:
    """Train on the CPU."""
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=local,
        num_nodes=world // local,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(failing_rank), torch.utils.data.DataLoader(data, batch_size=4))
    print("trained on rank", trainer.global_rank, "of", trainer.world_size, flush=True)


main(int(sys.argv[1]) if len(sys.argv) > 1 else -1)
# gloo's threads must be gone before Python ends, and nothing may hold the group any more.
gc.collect()
if dist.is_initialized():
    dist.destroy_process_group()
