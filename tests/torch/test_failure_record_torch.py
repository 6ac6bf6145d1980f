"""Tensors in failure records: what is said of them, and that no code but torch's own in C is run for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saferun.inject.saferun_failure import described
from saferun.inject.saferun_written import as_json, is_secret

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage.*", "ignore:Sparse.*")


def described_as(value: object) -> dict[str, Any]:
    """What a record says of a local."""
    frame = record_of(value)["exceptions"][0]["frames"][-1]
    found: dict[str, Any] = frame["locals"][0]
    assert found.pop("name") == "local"
    return found


def record_of(value: object = None) -> dict[str, Any]:
    """The record of a function with this local."""

    def step(local: object) -> None:
        raise ValueError(str(type(local)))

    with pytest.raises(ValueError, match="class") as caught:
        step(value)
    record: dict[str, Any] = json.loads(described(caught.value, is_secret=is_secret, as_json=as_json))
    return record


def tensor(shape: list[int], dtype: str = "float32", device: str = "cpu", **more: object) -> dict[str, Any]:
    return {"type": "torch.Tensor", "shape": shape, "dtype": dtype, "device": device, **more}


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.ones(3, 4), tensor([3, 4], finite=True)),
        (lambda: torch.tensor(NAN), tensor([], finite=False)),
        (lambda: torch.tensor([1.0, float("-inf")], dtype=torch.float64), tensor([2], "float64", finite=False)),
        (lambda: torch.full((9,), NAN, dtype=torch.bfloat16), tensor([9], "bfloat16", finite=False)),
        (lambda: torch.ones(9, dtype=torch.float16), tensor([9], "float16", finite=True)),
        (lambda: torch.tensor([0.0, NAN, 0.0])[2:], tensor([1], finite=True)),
        (lambda: torch.arange(5), tensor([5], "int64")),
        (lambda: torch.ones(4, 4).t(), tensor([4, 4])),
        (lambda: torch.ones(1 << 17), tensor([1 << 17])),
        (lambda: torch.ones(0), tensor([0])),
        (lambda: torch.ones(3, device="meta"), tensor([3], device="meta")),
        (lambda: torch.ones(3, 3).to_sparse(), tensor([3, 3])),
        (lambda: torch.ones(3, dtype=torch.complex64), tensor([3], "complex64")),
        (
            lambda: torch.nn.Parameter(torch.ones(3)),
            {**tensor([3], finite=True), "type": "torch.nn.parameter.Parameter"},
        ),
    ],
    ids=lambda value: "" if callable(value) else str(value["shape"]),
)
def test_a_tensor_is_described(make: Callable[[], torch.Tensor], expected: dict[str, Any]) -> None:
    """Whether it is finite only where that is read from the process's own memory."""
    assert described_as(make()) == expected


def test_a_tensor_whose_storage_was_freed_is_not_read() -> None:
    """FSDP frees storages and keeps the tensors."""
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    assert described_as(freed) == tensor([1000])


def test_a_tensor_in_a_file_is_not_read(tmp_path: Path) -> None:
    """Its file system may hang."""
    (tmp_path / "f").write_bytes(bytes(4096))
    assert described_as(torch.from_file(str(tmp_path / "f"), shared=True, size=1024)) == tensor([1024])
    assert described_as(torch.from_file(str(tmp_path / "f"), shared=False, size=1024)) == tensor([1024])


def test_a_shape_a_device_and_tensors_in_containers_are_described() -> None:
    """A batch is usually a dictionary of tensors."""
    assert described_as(torch.Size([3, 4])) == {"type": "torch.Size", "value": "[3, 4]"} | {"value": "(3, 4)"}
    assert described_as(torch.device("cuda:1"))["value"] == "device(type='cuda', index=1)"
    assert described_as(torch.float16)["value"] == "torch.float16"
    assert described_as([torch.ones(2)])["items"] == [tensor([2], finite=True)]
    batch = {"ids": torch.arange(3), "hunter 2": torch.ones(3), 3: torch.ones(3), "text": "hunter2"}
    assert described_as(batch)["items"] == [{"name": "ids", **tensor([3], "int64")}]


class _Blocks(torch.Tensor):
    """A subclass that must not be asked anything."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> object:
        time.sleep(1000)
        return None


class _BlockingFunctions(TorchFunctionMode):
    def __torch_function__(self, *_: object, **__: object) -> object:
        time.sleep(1000)
        return None


class _BlockingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, *_: object, **__: object) -> object:
        time.sleep(1000)
        return None


def test_a_subclass_is_only_named() -> None:
    """Its functions are the script's."""
    value = torch.ones(3).as_subclass(_Blocks)
    assert described_as(value) == {"type": f"{__name__}._Blocks"}


@pytest.mark.parametrize("mode", [_BlockingFunctions, _BlockingDispatch])
def test_modes_of_the_script_are_not_called(mode: Callable[[], Any]) -> None:
    """``with torch.device(...)`` is one."""
    value = torch.ones(3)
    with mode():
        found = described_as(value)
    assert found == tensor([3], finite=True)


def test_tensors_within_transformations_do_no_harm() -> None:
    """They are no plain tensors, though of the same type."""
    seen: list[dict[str, Any]] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        seen.append(described_as(value))
        return value * 2

    torch.func.vmap(function)(torch.ones(3, 4))
    torch.func.grad(lambda value: function(value).sum())(torch.ones(3))
    assert [one["shape"] for one in seen] == [[4], [3]]


def test_a_fake_tensor_is_only_named() -> None:
    """As torch.compile has them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        value = torch.ones(3)
    assert "shape" not in described_as(value)


def test_no_gpu_is_asked_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one where torch has not begun to use it: that would take memory of it."""
    assert not {"gpus", "gpus_note"} & record_of().keys()
    monkeypatch.setattr(torch, "_C", _Cuda)
    monkeypatch.setattr(_Cuda, "_cuda_getDevice", None)
    assert not {"gpus", "gpus_note"} & record_of().keys()
    assert not torch.cuda.is_initialized()


class _Cuda:
    """What of torch's C extension is asked about the allocator."""

    TensorBase = torch._C.TensorBase
    DisableTorchFunction = torch._C.DisableTorchFunction

    @staticmethod
    def _cuda_getDevice() -> int:  # noqa: N802 - torch's
        return 1

    @staticmethod
    def _cuda_memoryStats(device: int) -> dict[str, Any]:  # noqa: N802 - torch's
        assert device == 1
        return {
            "allocated_bytes": {"all": {"current": 5, "peak": 6, "allocated": 7, "freed": 8}},
            "reserved_bytes": {"all": {"current": 9, "peak": 10}},
        }


def test_the_allocators_counters_are_read_only_where_no_other_thread_can_hold_its_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for a GPU: the counters as torch has them."""
    monkeypatch.setattr(torch, "_C", _Cuda)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    for threads, expected in ((1, True), (2, False)):
        monkeypatch.setattr("sys._current_frames", lambda threads=threads: dict.fromkeys(range(threads)))
        record = record_of()
        assert ("gpus" in record, "gpus_note" in record) == (expected, not expected)
        if expected:
            assert record["gpus"] == [
                {
                    "device": 1,
                    "allocated_bytes": 5,
                    "peak_allocated_bytes": 6,
                    "reserved_bytes": 9,
                    "peak_reserved_bytes": 10,
                }
            ]
