"""A small transformer trained by every rank with DistributedDataParallel: gloo on CPUs, NCCL on GPUs.

Run it:

    saferun --nproc_per_node 2 examples/train_ddp.py

Expect a bar for every epoch and a loss that falls from about 3.5 to about 1.9, next to the entropy of the data. With a
checkpoint, a job that was stopped or killed goes on where it was, and so does a restart:

    saferun --nproc_per_node 2 --max-restarts 3 examples/train_ddp.py --checkpoint /tmp/model.pt
"""

import argparse
import gc
import math
import os
import sys
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY_SIZE = 32
SEQUENCE_LENGTH = 32
BAR_WIDTH = 30
BAR_INTERVAL_S = 0.1


def make_sequences(count: int, seed: int) -> tuple[Tensor, float]:
    """Makes the training set: sequences of tokens in which each token depends on the one before (a Markov chain).

    Args:
        count: how many sequences.
        seed: the same seed gives the same sequences, on every rank and every host.

    Returns:
        The tokens, shaped (count, SEQUENCE_LENGTH + 1), and the chain's entropy in nats a token: the loss of a model
        that has learnt all there is to learn.
    """
    generator = torch.Generator().manual_seed(seed)
    transitions = torch.softmax(2 * torch.randn(VOCABULARY_SIZE, VOCABULARY_SIZE, generator=generator), dim=1)
    tokens = torch.randint(VOCABULARY_SIZE, (count, 1), generator=generator)
    for _ in range(SEQUENCE_LENGTH):
        following = torch.multinomial(transitions[tokens[:, -1]], 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    surprise = -(transitions * transitions.log()).sum(dim=1)
    return tokens, surprise[tokens[:, :-1]].mean().item()


class TinyTransformer(nn.Module):
    """Predicts every next token of a sequence from the tokens before it."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.position_embedding = nn.Embedding(SEQUENCE_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY_SIZE)
        self.register_buffer("causal_mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE_LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Gives the logits, shaped (batch, SEQUENCE_LENGTH, VOCABULARY_SIZE), for tokens (batch, SEQUENCE_LENGTH)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        logits: Tensor = self.head(self.layers(hidden, mask=self.causal_mask, is_causal=True))
        return logits


def save_checkpoint(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replaces the checkpoint in one go: whoever reads it, whenever, finds the old one or the new one, whole."""
    unfinished = f"{path}.tmp"
    with open(unfinished, "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def load_checkpoint(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Brings model and optimizer to where the checkpoint left them.

    Returns:
        The number of steps that were done; 0 if there is no checkpoint yet.

    Raises:
        RuntimeError: on every rank alike, if the ranks do not see the same checkpoint.
    """
    step = 0
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = int(checkpoint["step"])

    # DDP makes the ranks' weights equal, but not their optimizers and not their step counters.
    lowest_and_highest = torch.tensor([-step, step], device=device)
    dist.all_reduce(lowest_and_highest, op=dist.ReduceOp.MAX)
    lowest, highest = -int(lowest_and_highest[0]), int(lowest_and_highest[1])
    if lowest != highest:
        message = f"{path} is at step {lowest} for one rank and at step {highest} for another: do all hosts share it?"
        raise RuntimeError(message)
    return step


class ProgressBar:
    """A bar on stderr that is drawn over itself with a carriage return."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.drawn_at = -math.inf

    def is_due(self, done: int) -> bool:
        """Tells whether to draw now: not so often that the drawing costs anything, but always at the end."""
        return done == self.total or time.monotonic() - self.drawn_at >= BAR_INTERVAL_S

    def draw(self, done: int, note: str) -> None:
        """Draws the bar over the one before."""
        self.drawn_at = time.monotonic()
        filled = BAR_WIDTH * done // self.total
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        sys.stderr.write(f"\r{self.title} [{bar}] {done:>{len(str(self.total))}}/{self.total}  {note}")
        sys.stderr.flush()

    def finish(self) -> None:
        """Ends the line, so that what comes next starts on one of its own."""
        sys.stderr.write("\n")
        sys.stderr.flush()


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a small transformer with DistributedDataParallel.")
    parser.add_argument("--epochs", type=int, default=5, help="how often to go through the data")
    parser.add_argument("--steps", type=int, help="stop after so many steps in all (default: no limit)")
    parser.add_argument("--sequences", type=int, default=8192, help="size of the data set that is made")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a rank and step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", metavar="PATH", help="save here, and go on from here if the file exists")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


def choose_device(wish: str) -> torch.device:
    """Gives the GPU with this rank's local number if there is one for every local rank, else the CPU."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if wish == "cuda" or (wish == "auto" and torch.cuda.device_count() >= local_world_size):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains from the checkpoint, or from the beginning, to the end."""
    world_size = dist.get_world_size()
    is_first_rank = dist.get_rank() == 0

    # Every rank makes all sequences, and the sampler gives each rank a share of its own.
    sequences, entropy = make_sequences(args.sequences, args.seed)
    dataset = TensorDataset(sequences)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    steps_per_epoch = len(loader)
    total_steps = args.epochs * steps_per_epoch
    if args.steps is not None:
        total_steps = min(total_steps, args.steps)

    torch.manual_seed(args.seed)
    model = TinyTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    first_step = load_checkpoint(args.checkpoint, model, optimizer, device) if args.checkpoint else 0
    ddp_model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    if is_first_rank:
        print(
            f"{world_size} ranks on {device.type} ({dist.get_backend()}), steps {first_step} to {total_steps}",
            flush=True,
        )

    step = first_step
    while step < total_steps:
        # The step counter alone says where the training is: in which epoch, and how many of its batches are behind it.
        epoch, steps_behind = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        bar = ProgressBar(f"epoch {epoch + 1}", steps_per_epoch)
        loss_sum = torch.zeros((), device=device)
        steps_here = min(steps_per_epoch - steps_behind, total_steps - step)
        started_at = time.monotonic()

        for (batch,) in islice(loader, steps_behind, steps_behind + steps_here):
            tokens = batch.to(device)
            logits = ddp_model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            step += 1
            loss_sum += loss.detach()
            if is_first_rank:
                steps_of_epoch = step - epoch * steps_per_epoch
                if bar.is_due(steps_of_epoch):  # reading the loss makes the host wait for the GPU
                    bar.draw(steps_of_epoch, f"loss {loss.item():.3f}")
                if args.checkpoint and (step % args.checkpoint_every == 0 or step == total_steps):
                    save_checkpoint(args.checkpoint, model, optimizer, step)

        dist.all_reduce(loss_sum)
        if is_first_rank:
            bar.finish()
            mean_loss = loss_sum.item() / (steps_here * world_size)
            rate = steps_here / (time.monotonic() - started_at)
            print(f"epoch {epoch + 1}: mean loss {mean_loss:.3f}, {rate:.1f} steps/s", flush=True)

    if is_first_rank:
        print(f"done: {step} steps; the entropy of the data is {entropy:.3f}", flush=True)


def main() -> None:
    """Sets up the process group, trains, and takes the group down."""
    args = parse_args()
    device = choose_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    train(args, device)
    # DDP refers to itself, so the model lives on, and with it the process group and gloo's threads. One of them may
    # still drop a tensor while the interpreter shuts down, and that aborts the process: "terminate called without an
    # active exception".
    gc.collect()
    # Not in a `finally`: a rank that has failed shall end with its traceback, not wait here for the others.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
