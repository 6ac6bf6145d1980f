"""What torch is asked for the ranks of one process, which need not be the first of their host."""

from __future__ import annotations

import enum
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from saferun.coordinator import torchrun_parts
from saferun.coordinator.torchrun_parts import changes_of, log_destinations

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


class Std(enum.IntFlag):
    """As torch's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class Specs:
    """An entry point for ``--logs-specs``, which keeps some streams only, and names its files by ``pathlib``."""

    given: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        Specs.given = given

    def reify(self, envs: dict[int, dict[str, str]]) -> SimpleNamespace:
        return SimpleNamespace(
            stdouts={i: Path("/logs/out") if i == 0 else None for i in envs},
            stderrs={i: b"/logs/err" if i == 0 else "" for i in envs},
            tee_stdouts={},
            tee_stderrs={},
            error_files={},
            filtered_stdout=None,
            filtered_stderr=Path("/logs/filtered"),
        )


@pytest.fixture(name="plugin")
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing", SimpleNamespace(Std=Std))
    point = SimpleNamespace(load=lambda: Specs)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    monkeypatch.setattr(torchrun_parts, "_SPECS", {})


def settings(*masks: int) -> dict[str, Any]:
    """What the launcher asks."""
    return {"name": "mine", "log_dir": None, "redirects": list(masks), "tee": [0, 0], "local_ranks_filter": []}


@pytest.mark.usefixtures("plugin")
def test_an_entry_point_may_name_no_file_or_a_path_and_no_error_files() -> None:
    """Torch opens what is there, and asks for the error file of a rank that has failed only."""
    logs, _ = log_destinations(settings(0, 0), [{"RANK": "0"}, {"RANK": "1"}])
    assert logs == {
        "stdouts": ["/logs/out", ""],
        "stderrs": ["/logs/err", ""],
        "tee_stdouts": [],
        "tee_stderrs": [],
        "error_files": ["", ""],
        "filtered_stdout": "",
        "filtered_stderr": "/logs/filtered",
    }


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(("masks", "given"), [((0, 0), Std.NONE), ((3, 3), Std.ALL), ((0, 1), {1: Std.OUT})])
def test_an_entry_point_gets_the_masks_of_streams_as_torchrun_has_them(masks: tuple[int, ...], given: object) -> None:
    """One may compare them, or refuse what it does not do."""
    log_destinations(settings(*masks), [{}, {}])
    assert Specs.given["redirects"] == given
    assert type(Specs.given["redirects"]) is type(given)
    assert Specs.given["tee"] is Std.NONE
