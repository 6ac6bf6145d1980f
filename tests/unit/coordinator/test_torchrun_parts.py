"""What torch is asked for the ranks of one process, which need not be the first of their host."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator import torchrun_parts
from saferun.coordinator.torchrun_parts import changes_of

RAW: dict[Any, Any] = {b"RAW": b"\xff", "FILE": Path("/x")}
BEFORE = {"RANK": "0", "ROLE_NAME": "default", "OMP_NUM_THREADS": "8"}


def asking(**changes: Any) -> dict[str, Any]:
    message = {"handler": "null", "logs": None, "numa": None, "file_timer": False, "run_id": "job7", "local_ranks": [0]}
    return {**message, **changes}


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun_parts, "_check_event_handler", lambda _: None)


@pytest.mark.parametrize(
    ("local_ranks", "visible", "gpus"),
    [
        ([0, 1], 8, [0, 1]),
        ([0, 1], 2, [0, 1]),
        ([1], 8, [1]),
        ([4, 5], 8, [4, 5]),
        ([1], 1, [0]),  # srun --gpus-per-task=1
        ([4, 5], 2, [0, 1]),
        ([3], 2, [3]),  # there is none: torch says so
        ([3], 0, [3]),
    ],
)
def test_each_rank_is_bound_near_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_ranks: list[int], visible: int, gpus: list[int]
) -> None:
    """Of those that the process sees, which count from 0 where a scheduler has given it its own."""
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: visible))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torchrun_parts, "numactl_prefix", lambda mode, gpu: [mode, gpu])
    answer = torchrun_parts.prepare(asking(numa="node", local_ranks=local_ranks))
    assert answer == {"op": "prepared", "numactl": [["node", gpu] for gpu in gpus]}


class Server:
    """Stands in for torch's FileTimerServer."""

    def __init__(self, *, file_path: str, **_: Any) -> None:
        self.path = file_path

    def start(self) -> None: ...

    def stop(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "local_ranks", "expected"),
    [
        ("/tmp/timer", [0, 1], "/tmp/timer"),
        ("/tmp/timer", [1], "/tmp/timer.1"),
        (None, [0], "/tmp/watchdog_timer_"),
        (None, [1], "/tmp/watchdog_timer_"),
    ],
)
def test_timers_of_two_processes_of_a_host_have_two_files(
    monkeypatch: pytest.MonkeyPatch, given: str | None, local_ranks: list[int], expected: str
) -> None:
    """Each server removes the file that is there before it."""
    name = "torch.distributed.elastic.timer.file_based_local_timer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(FileTimerServer=Server))
    for parent in ("torch", "torch.distributed", "torch.distributed.elastic", "torch.distributed.elastic.timer"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", given)
    path = torchrun_parts.prepare(asking(file_timer=True, local_ranks=local_ranks))["timer_file"]
    torchrun_parts.stop_file_timer()
    assert path == expected if given else path.startswith(expected)


@pytest.mark.parametrize(
    ("after", "changes"),
    [
        (BEFORE, {}),
        ({**BEFORE, "RANK": "1", "NEW": "x"}, {"RANK": "1", "NEW": "x"}),
        ({"RANK": "0"}, {"ROLE_NAME": None, "OMP_NUM_THREADS": None}),
        (BEFORE | RAW, {"RAW": "\udcff", "FILE": "/x"}),
    ],
)
def test_what_a_plugin_has_changed_is_reported(after: dict[Any, Any], changes: dict[str, str | None]) -> None:
    """And nothing else: what it was handed is not all that a rank gets."""
    assert changes_of(BEFORE, after) == changes


def test_a_variable_that_is_no_text_is_an_error() -> None:
    """As under torchrun, which cannot start a rank with it."""
    with pytest.raises(TypeError):
        changes_of(BEFORE, {**BEFORE, "RANK": 1})
