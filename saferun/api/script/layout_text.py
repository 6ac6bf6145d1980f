"""Device meshes, DTensors and what FSDP covers, as text. Nothing is communicated, and no GPU is waited for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

_MOST_NAMES = 20


def describe_mesh(mesh: Any) -> str:  # noqa: ANN401 - a DeviceMesh, of whichever release
    """A device mesh as text: its dimensions, where this rank is, and with whom it is in a group.

    Costs microseconds.
    """
    import torch.distributed as dist

    shape = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"dim {number}" for number in range(len(shape)))
    sizes = ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
    lines = [f"mesh of {mesh.mesh.numel()} ranks on {mesh.device_type}: {sizes}"]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return "\n".join([*lines, f"  rank {dist.get_rank()} is not in it"])
    at = ", ".join(f"{name} {number}" for name, number in zip(names, coordinate, strict=True))
    lines.append(f"  rank {dist.get_rank()} is at {at}")
    for dimension, name in enumerate(names):
        index = tuple(slice(None) if other == dimension else number for other, number in enumerate(coordinate))
        lines.append(f"  {name}: in a group with ranks {', '.join(map(str, mesh.mesh[index].tolist()))}")
    return "\n".join(lines)


def describe_dtensor(tensor: Any) -> str:  # noqa: ANN401 - a DTensor, or a plain tensor
    """A DTensor as text: its whole shape, how it is placed on its mesh, and the part that this rank has.

    Costs microseconds; the tensor is not gathered.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if not hasattr(tensor, "placements"):
        return f"plain tensor {list(tensor.shape)} {kind} on {tensor.device}"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim {number}" for number in range(mesh.mesh.ndim))
    placed = ", ".join(
        f"{_placed(placement)} over {name} ({size})"
        for placement, name, size in zip(tensor.placements, names, mesh.mesh.shape, strict=True)
    )
    local = list(tensor.to_local().shape)
    return f"DTensor {list(tensor.shape)} {kind}: {placed}; this rank has {local}"


def _placed(placement: Any) -> str:  # noqa: ANN401 - of a DTensor
    if placement.is_shard():
        return f"sharded by dimension {placement.dim}"
    return "replicated" if placement.is_replicate() else "partial sums"


def fsdp_coverage(module: torch.nn.Module) -> str:
    """Which parameters FSDP shards, which are whole on each rank, and which it leaves out; with names and sizes.

    For FSDP2 (``fully_shard``) and FSDP1. Costs microseconds a parameter.
    """
    kinds: dict[str, list[tuple[str, int]]] = {"sharded": [], "replicated": [], "left out": []}
    for name, parameter in module.named_parameters():
        placements = getattr(parameter, "placements", None)
        if placements is not None:
            kind = "sharded" if any(one.is_shard() for one in placements) else "replicated"
        else:
            kind = "sharded" if type(parameter).__name__ == "FlatParameter" or _is_flat(parameter) else "left out"
        kinds[kind].append((name, parameter.numel()))
    total = sum(size for found in kinds.values() for _, size in found)
    lines = []
    for kind, found in kinds.items():
        size = sum(size for _, size in found)
        share = 100 * size / total if total else 0.0
        lines.append(f"{kind}: {len(found)} parameters, {size} elements ({share:.1f} %)")
        if kind != "sharded":
            lines += [f"  {name}: {size}" for name, size in found[:_MOST_NAMES]]
            lines += [f"  … and {len(found) - _MOST_NAMES} more"] if len(found) > _MOST_NAMES else []
    return "\n".join(lines)


def _is_flat(parameter: object) -> bool:
    """FSDP1's flat parameters, also those that it shows by their own names."""
    return bool(getattr(parameter, "_is_flat_param", False))
