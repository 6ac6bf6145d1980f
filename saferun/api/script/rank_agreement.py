"""Do all ranks have the same? Tensors and random states, compared by hashes in the store."""

from __future__ import annotations

import hashlib
import json
import random
import sys

from saferun.api.script.rank_meeting import StoreMeeting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

_MOST_TENSORS = 20_000
_LONGEST_NAME = 200


def compare_across_ranks(
    what: torch.nn.Module | torch.Tensor | Mapping[str, object] | Sequence[object],
    group: ProcessGroup | None = None,
    timeout_s: float = 300.0,
) -> str:
    """Whether tensors are the same on all ranks, bit by bit: parameters after a step of DDP, say.

    All ranks of the group call it. Each tensor is copied to the host, one at a time, and hashed (some 1 GB/s); 16 bytes
    a rank go to the store, and where they differ, 8 more for each tensor. Shards of a DTensor differ by nature, and
    are left out, as is what has no bits of its own to compare: meta, sparse and nested tensors, and other values.

    Args:
        what: a module (its parameters and buffers), a tensor, or several. NaNs of the same bits are the same.
        group: the group; None: all ranks.
        timeout_s: how long others are waited for, each of two times.

    Returns:
        An empty text where all have the same, else the first tensor that differs, and which ranks have the same.

    Raises:
        RanksMissingError: some ranks did not call it.
    """
    hashes = {name[:_LONGEST_NAME]: _hash(tensor) for name, tensor in _tensors(what)}
    return _difference(hashes, "compare_across_ranks", group, timeout_s)


def assert_same_rng(group: ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
    """Raise AssertionError if random numbers will differ between ranks: of Python, NumPy, torch, and the current GPU.

    Data-parallel ranks usually want different ones for their data, and the same for the initialization. All ranks call
    it. Costs a message to the store, and reading the GPU's state waits for that GPU.
    """
    import torch

    states = {"random": repr(random.getstate()).encode(), "torch": bytes(torch.get_rng_state().numpy())}
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state(legacy=False)
        states["numpy"] = repr({**state, "state": {**state["state"], "key": state["state"]["key"].tobytes()}}).encode()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch.cuda"] = bytes(torch.cuda.get_rng_state().numpy())
    hashes = {name: _digest(state) for name, state in states.items()}
    difference = _difference(hashes, "assert_same_rng", group, timeout_s)
    if difference:
        raise AssertionError(f"random states differ: {difference}")


def _difference(hashes: dict[str, str], purpose: str, group: ProcessGroup | None, timeout_s: float) -> str:
    content = json.dumps(list(hashes.items())[:_MOST_TENSORS]).encode()
    whole = StoreMeeting(purpose, group, timeout_s)
    whole.leave(_digest(content).encode())
    whole.await_all()
    if len({whole.read(rank) for rank in whole.ranks}) <= 1:
        return ""
    details = StoreMeeting(f"{purpose}, details", group, timeout_s)
    details.leave(content)
    details.await_all()
    found = {rank: dict(json.loads(details.read(rank))) for rank in details.ranks}
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    differ = [name for name in names if len({one.get(name, "") for one in found.values()}) > 1]
    if not differ:
        return "the order of the tensors differs"
    groups: dict[str, list[int]] = {}
    for rank, one in found.items():
        groups.setdefault(one.get(differ[0], ""), []).append(rank)
    shown = "; ".join(f"{_ranks(ranks)}{': missing' if not digest else ''}" for digest, ranks in groups.items())
    return f"{differ[0]!r} is the first of {len(differ)} of {len(names)} that differ; the same have: {shown}"


def _ranks(ranks: list[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _tensors(what: object) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    named: list[tuple[str, object]]
    if isinstance(what, torch.nn.Module):
        named = [*what.named_parameters(), *what.named_buffers()]
    elif isinstance(what, torch.Tensor):
        named = [("tensor", what)]
    elif hasattr(what, "items"):
        named = [(str(name), tensor) for name, tensor in what.items()]
    else:
        named = [(str(number), tensor) for number, tensor in enumerate(what)]  # type: ignore[arg-type,var-annotated]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "placements"):
            continue
        if tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested):
            yield name, tensor


def _hash(tensor: torch.Tensor) -> str:
    import torch

    whole = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    shape = f"{whole.dtype}{list(whole.shape)}".encode()
    return _digest(shape, whole.reshape(-1).view(torch.uint8).numpy() if whole.numel() else b"")


def _digest(*parts: object) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(part)  # type: ignore[arg-type]
    return hashed.hexdigest()
