"""The same computation on two devices: the first module whose results differ."""

from __future__ import annotations

import copy

from saferun.api.script.torch_checks import _tensors_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    import torch


def compare_devices(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    devices: Sequence[str] = ("cpu", "cuda"),
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> str:
    """Compute the same on each device, and compare with the first one.

    A module is copied to each device, and the results of all its parts are kept on the host: it takes that memory, and
    as long as its forward calls. Random numbers are seeded alike, though devices have different ones; use ``eval()``.

    Args:
        fn: a module, whose first differing part is named, or a function of which only the results are compared.
        inputs: its arguments; tensors in them are moved.
        devices: two or more.
        rtol: how far elements may differ, relative to the first device's; together with ``atol``.
        atol: the same, absolute.

    Returns:
        An empty text where they agree, else what differs first, and by how much.
    """
    first, *others = devices
    wanted = _results(fn, inputs, first)
    for device in others:
        found = _results(fn, inputs, device)
        for (name, expected), (_, got) in zip(wanted, found, strict=False):
            for one, other in zip(expected, got, strict=False):
                difference = _difference(one, other, rtol, atol)
                if difference:
                    return f"{name} differs first between {first} and {device}: {difference}"
        if [name for name, _ in wanted] != [name for name, _ in found]:
            return f"not the same modules ran on {first} and {device}"
    return ""


def _results(fn: Callable[..., Any], inputs: Sequence[Any], device: str) -> list[tuple[str, list[torch.Tensor]]]:
    import torch

    results: list[tuple[str, list[torch.Tensor]]] = []

    def keep(name: str, value: object) -> None:
        results.append((name, [tensor.detach().to("cpu", copy=True) for tensor in _tensors_in(value)]))

    def hook_of(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        return lambda module, _inputs, outputs: keep(f"{name!r} ({type(module).__name__})", outputs)

    handles = []
    if isinstance(fn, torch.nn.Module):
        fn = copy.deepcopy(fn).to(device)
        handles = [part.register_forward_hook(hook_of(name)) for name, part in fn.named_modules() if name]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            keep("the result", fn(*(_moved(value, device) for value in inputs)))
    finally:
        for handle in handles:
            handle.remove()
    return results


def _moved(value: Any, device: str) -> Any:  # noqa: ANN401 - what the user passes
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
    if isinstance(value, list | tuple):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return {name: _moved(item, device) for name, item in value.items()} if isinstance(value, dict) else value


def _difference(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> str:
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    same = torch.isclose(other.double(), one.double(), rtol=rtol, atol=atol, equal_nan=True)
    if bool(same.all()):
        return ""
    apart = (other.double() - one.double()).abs().nan_to_num(float("inf"))
    return f"{int((~same).sum())} of {same.numel()} elements of {list(one.shape)}, by {float(apart.max()):.3g} at most"
