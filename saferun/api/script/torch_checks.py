"""Checks that torch has, switched together and back: anomalies of autograd, synchronizations, values that are NaN."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Any, Self

    import torch


class ValueChecks:
    """Checks that are on; ``remove`` (or the end of a ``with``) restores what was there before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Restore what was there before."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def add(self, undo: Callable[[], object]) -> None:
        """Something to be called by ``remove``."""
        self._undo.append(undo)


def set_checks(
    *, anomaly: bool | None = None, sync: str | None = None, nan: bool | torch.nn.Module | None = None
) -> ValueChecks:
    """Switch torch's checks for this process; what is None stays as it is.

    Args:
        anomaly: ``torch.autograd.set_detect_anomaly``: the forward call of a backward error, and NaN gradients. Slows a
            small model down by several times: it notes a stack for each operation, and looks at each gradient.
        sync: ``torch.cuda.set_sync_debug_mode``: ``warn`` or ``error`` at each operation that waits for the GPU, or
            ``default``. Costs next to nothing; without CUDA nothing is done.
        nan: True, or a module whose parts alone are checked: FloatingPointError in the forward call whose result is not
            finite, with the module's name. Reads each result, so that the CPU waits for the GPU after each module.

    Returns:
        what restores the state before, by ``remove`` or as a context manager.
    """
    import torch

    checks = ValueChecks()
    if anomaly is not None:
        was, checked_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(anomaly)
        checks.add(lambda: torch.autograd.set_detect_anomaly(was, checked_nan))
    if sync is not None and torch.cuda.is_available():
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(sync)
        checks.add(lambda: torch.cuda.set_sync_debug_mode(before))
    if nan:
        names = {id(part): name for name, part in nan.named_modules()} if isinstance(nan, torch.nn.Module) else {}

        def check(module: torch.nn.Module, _inputs: object, outputs: object) -> None:
            for tensor in _tensors_in(outputs):
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    name = names.get(id(module)) or _dotted_name(module)
                    who = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
                    bad = int((~torch.isfinite(tensor)).sum())
                    raise FloatingPointError(
                        f"the result of {who} is not finite: {bad} of {tensor.numel()} elements of {list(tensor.shape)}"
                    )

        if names and isinstance(nan, torch.nn.Module):
            for part in nan.modules():
                checks.add(part.register_forward_hook(check).remove)
        else:
            checks.add(torch.nn.modules.module.register_module_forward_hook(check).remove)
    return checks


def _dotted_name(module: torch.nn.Module) -> str:
    """Its name in the outermost module that is being called; empty where it is that one itself."""
    import torch

    root, call = module, torch.nn.Module._call_impl.__code__  # noqa: SLF001 - what runs the hooks
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented
    while frame is not None:
        if frame.f_code is call and isinstance(found := frame.f_locals.get("self"), torch.nn.Module):
            root = found
        frame = frame.f_back
    return next((name for name, part in root.named_modules() if part is module), "")


def _tensors_in(value: Any) -> list[torch.Tensor]:  # noqa: ANN401 - what a module returns
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []
