"""The state of GPUs: what is worth a line, and what the drivers' libraries and tools say, with stand-ins for all."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.captures.gpu_lines import gpu_lines
from saferun.captures.gpu_nvidia import capture_gpu_nvidia
from saferun.captures.wire import HostCapture
from saferun.linux.gpu_reading import families_of, owned, read_until
from saferun.model import JsonObject
from tests.unit.captures.gpu_captures import (
    GIB,
    MIB,
    soon,
)


def gpu(index: int, **facts: Any) -> JsonObject:
    """A healthy H200 that a rank keeps busy."""
    return {
        "index": index,
        "name": "NVIDIA H200",
        "pci": f"0000:{index + 16:02x}:00.0",
        "busy_percent": 100,
        "memory_used_bytes": 40 * GIB,
        "memory_total_bytes": 140 * GIB,
        "temperature_c": 60,
        "processes": [process(1000 + index)],
    } | facts


def process(pid: int, whose: str = "ours", memory_bytes: int = 40 * GIB, name: str = "python") -> JsonObject:
    return {"pid": pid, "whose": whose, "memory_bytes": memory_bytes, "name": name}


def lines(*gpus: JsonObject, **facts: Any) -> tuple[str, ...]:
    return gpu_lines({**facts, "gpus": list(gpus)})


# ------------------------------------------------------------------------------------------------- what is worth a line


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"fault": "fell off the bus (NVML: GPU is lost)"}, "fell off the bus (NVML: GPU is lost)"),
        ({"ecc_uncorrected": 2}, "uncorrectable ECC errors 2"),
        ({"remapping_failed": True, "remapping_pending": True}, "row remapping failed: the GPU needs replacing"),
        ({"retirement_pending": True}, "page retirement pending: reset needed"),
        ({"recovery": "a reset of the GPU"}, "the driver asks for a reset of the GPU"),
        ({"slowed_by": ["heat"], "temperature_c": 92}, "clocks slowed down by heat (92 °C)"),
        ({"pcie_width": 8, "pcie_width_max": 16}, "PCIe link has 8 of 16 lanes"),
        ({"nvlink_recoveries": 3}, "NVLink had to recover 3 times"),
    ],
)
def test_a_fault_is_a_line_that_says_which_board_it_is(facts: JsonObject, words: str) -> None:
    """Whoever repairs it must know the model and the slot."""
    assert lines(gpu(0), gpu(3, **facts), gpu(4)) == (f"GPU 3 (H200, 0000:13:00.0): {words}",)


def test_the_same_fault_of_several_gpus_is_one_line() -> None:
    """64 GPUs may not fill the screen."""
    gpus = [gpu(index, retirement_pending=index not in {2, 4}) for index in range(8)]
    assert lines(*gpus) == ("GPUs 0-1,3,5-7: page retirement pending: reset needed",)


def test_rows_that_the_next_reset_will_replace_are_no_hint_at_a_hang() -> None:
    """The GPU works; the checks before a job report it."""
    assert "remapping" not in " ".join(lines(gpu(0, remapping_pending=True)))


def test_the_gravest_fault_comes_first() -> None:
    found = lines(gpu(0, pcie_width=8, pcie_width_max=16), gpu(1, ecc_uncorrected=1), gpu(2, fault="lost"))
    assert [line.partition("): ")[2] for line in found] == [
        "lost",
        "uncorrectable ECC errors 1",
        "PCIe link has 8 of 16 lanes",
    ]


def test_the_idle_gpu_among_busy_ones_is_named_with_its_process() -> None:
    """Those that wait in a collective spin; the one that never came does nothing."""
    gpus = [gpu(index, busy_percent=0 if index == 3 else 97 + index % 2) for index in range(8)]
    assert lines(*gpus) == ("GPU 3: idle (pid 1003), while GPUs 0-2,4-7 are 97-98 % busy",)


def test_an_idle_gpu_of_nobody_is_not_missed() -> None:
    gpus = [gpu(0), gpu(1), gpu(2, busy_percent=0, processes=[], memory_used_bytes=0)]
    assert lines(*gpus) == (
        "GPUs 0-1 (H200): 100 % busy, memory 40 of 140 GiB used, no errors".replace("40 of 140", "40.0 of 140.0"),
    )


def test_without_process_numbers_used_memory_tells_which_gpus_matter() -> None:
    """In a container the driver's process numbers may be those of the host."""
    hidden = [process(99, "hidden")]
    gpus = [gpu(0, processes=hidden), gpu(1, busy_percent=0, processes=hidden), gpu(2, memory_used_bytes=MIB)]
    assert lines(*(one | {"processes": hidden} for one in gpus)) == ("GPU 1: idle, while GPU 0 is 100 % busy",)


def test_memory_that_others_hold_is_told_with_their_names() -> None:
    shared = [process(1001), process(99, "other", 30 * GIB)]
    found = lines(gpu(0), gpu(1, processes=shared, memory_used_bytes=int(79.6 * GIB), memory_total_bytes=80 * GIB))
    assert found == ("GPU 1: memory 79.6 of 80 GiB used, 30 GiB of it by pid 99 (not ours: python)",)


def test_many_strangers_are_counted() -> None:
    strangers = [process(90 + number, "other", (number + 1) * GIB, name="") for number in range(5)]
    (line,) = lines(gpu(0, processes=[process(1000), *strangers]))
    assert line.endswith("15 GiB of it by pid 94 (not ours), pid 93 (not ours), pid 92 (not ours), 2 more")


def test_strangers_on_gpus_that_are_not_used_by_the_job_are_nobodys_business() -> None:
    assert "no errors" in lines(gpu(0), gpu(1, processes=[process(99, "other")]))[0]


def test_once_the_ranks_are_dead_strangers_count_everywhere() -> None:
    (line,) = lines(gpu(0, processes=[process(99, "other", 70 * GIB)], memory_used_bytes=70 * GIB))
    assert line == "GPU 0: memory 70 of 140 GiB used, 70 GiB of it by pid 99 (not ours: python)"


def test_processes_that_cannot_be_seen_are_strangers_only_beside_our_own() -> None:
    """Where our own ranks are not recognised either, an unknown number may well be one of them."""
    hidden = process(99, "hidden", 30 * GIB)
    assert "no errors" in lines(gpu(0, processes=[hidden]))[0]
    assert "pid 99 (not visible from here)" in lines(gpu(0, processes=[process(1000), hidden]))[0]


def test_a_link_that_only_one_gpu_lacks_is_down() -> None:
    gpus = [gpu(index, nvlinks_up=17 if index == 5 else 18) for index in range(8)]
    assert lines(*gpus) == ("GPU 5 (H200, 0000:15:00.0): 17 NVLinks up, the others have 18",)


def test_boards_that_are_wired_differently_are_no_fault() -> None:
    gpus = [gpu(0, nvlinks_up=12), gpu(1, nvlinks_up=12), gpu(2, nvlinks_up=0), gpu(3, nvlinks_up=0)]
    assert "no errors" in lines(*gpus)[0]


def test_where_nothing_is_wrong_one_line_says_so() -> None:
    gpus = [gpu(index, memory_used_bytes=(40 + index) * GIB) for index in range(8)]
    assert lines(*gpus, driver="580.95", runtime="CUDA 13.0") == (
        "GPUs 0-7 (H200, driver 580.95, CUDA 13.0): 100 % busy, memory 40.0-47.0 of 140.0 GiB used, no errors",
    )


def test_a_driver_that_does_not_answer_is_the_first_line() -> None:
    assert lines(gpu(0, ecc_uncorrected=1), stuck_in="nvmlDeviceGetMemoryInfo of GPU 0")[0] == (
        "the GPU driver does not answer (nvmlDeviceGetMemoryInfo of GPU 0)"
    )


def test_without_gpus_there_are_no_lines() -> None:
    assert lines() == ()


def test_a_gpu_of_which_nothing_is_known_is_no_error() -> None:
    assert lines({"index": 0}) == ("GPU 0: no errors",)


# --------------------------------------------------------------------------------------------------------------- NVIDIA


class NvmlError(Exception):
    def __init__(self, value: int, words: str) -> None:
        super().__init__(words)
        self.value = value


NOT_SUPPORTED = NvmlError(3, "Not Supported")
LOST = NvmlError(15, "GPU is lost")


class Nvml:
    """NVIDIA's library with healthy GPUs.

    ``wrong`` replaces answers: by call, or by (call, GPU). An exception is raised, a function is called.
    """

    def __init__(self, count: int = 2, wrong: dict[Any, Any] | None = None) -> None:
        self.count = count
        self.wrong = wrong or {}
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": b"580.95.05",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetCount": count,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": b"GPU-aa11",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:1B:00.0"),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=100, memory=30),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=40 * GIB, total=140 * GIB),
            "nvmlDeviceGetTemperature": 60,
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=40 * GIB)],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (1, 0, 0, 0),
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetFieldValues": [],
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetMigMode": [0, 0],
        }

    def __getattr__(self, call: str) -> Callable[..., Any]:
        if call.startswith("c_nvml") and call not in self.answers:
            raise AttributeError(call)  # a structure of newer releases

        def answer(*arguments: Any) -> Any:
            index = arguments[0] if arguments else None
            given = self.wrong.get((call, index), self.wrong.get(call, self.answers.get(call, NOT_SUPPORTED)))
            if call == "nvmlDeviceGetHandleByIndex" and given is NOT_SUPPORTED:
                return index
            if call == "nvmlDeviceGetNvLinkState" and given is NOT_SUPPORTED and arguments[1] < 18:
                return 1
            if isinstance(given, Exception):
                raise given
            return given(*arguments) if callable(given) else given

        return answer


@pytest.fixture
def dev(tmp_path: Path) -> str:
    """A directory of device nodes with NVIDIA's."""
    (tmp_path / "nvidiactl").touch()
    return str(tmp_path)


def capture(dev: str, wrong: dict[Any, Any] | None = None, *, count: int = 2, deadline: float = 0) -> HostCapture:
    return capture_gpu_nvidia([os.getpid()], deadline or soon(), nvml=Nvml(count, wrong), dev_root=dev)


def test_all_that_the_library_tells_is_in_the_content(dev: str) -> None:
    found = capture(dev, count=1)
    assert not found.failure
    content = json.loads(json.dumps(found.content))
    assert (content["driver"], content["runtime"]) == ("580.95.05", "CUDA 13.0")
    (one,) = content["gpus"]
    expected = {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-aa11",
        "pci": "0000:1b:00.0",
        "busy_percent": 100,
        "memory_busy_percent": 30,
        "power_w": 350,
        "power_limit_w": 700,
        "ecc_uncorrected": 0,
        "ecc_corrected_ever": 0,
        "remapped_rows": [1, 0],
        "remapping_pending": False,
        "pcie_generation": 5,
        "nvlinks": 18,
        "nvlinks_up": 18,
        "persistence": True,
        "mig": False,
    }
    assert {key: one.get(key) for key in expected} == expected
    assert [(seen["pid"], seen["whose"]) for seen in one["processes"]] == [(os.getpid(), "ours")]
    assert found.lines == (
        "GPU 0 (H200, driver 580.95.05, CUDA 13.0): 100 % busy, memory 40.0 of 140.0 GiB used, no errors",
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({("nvmlDeviceGetHandleByIndex", 1): LOST}, "GPU 1: fell off the bus (NVML: GPU is lost)"),
        ({("nvmlDeviceGetMemoryInfo", 1): LOST}, "GPU 1 (H200, 0000:1b:00.0): fell off the bus (NVML: GPU is lost)"),
        (
            {("nvmlDeviceGetUtilizationRates", 1): NvmlError(16, "GPU requires restart")},
            "GPU 1 (H200, 0000:1b:00.0): reset needed (NVML: GPU requires restart)",
        ),
        (
            {("nvmlDeviceGetHandleByIndex", 1): NvmlError(999, "Unknown Error")},
            "GPU 1: does not answer (NVML: Unknown Error)",
        ),
        ({("nvmlDeviceGetTotalEccErrors", 1): 2}, "GPU 1 (H200, 0000:1b:00.0): uncorrectable ECC errors 2"),
        (
            {("nvmlDeviceGetRemappedRows", 1): (0, 1, 1, 1)},
            "GPU 1 (H200, 0000:1b:00.0): row remapping failed: the GPU needs replacing",
        ),
        (
            {("nvmlDeviceGetCurrentClocksThrottleReasons", 1): 0x48},
            "GPU 1 (H200, 0000:1b:00.0): clocks slowed down by heat (60 °C)",
        ),
    ],
)
def test_a_faulty_gpu_is_found_and_the_others_are_still_read(dev: str, wrong: dict[Any, Any], words: str) -> None:
    found = capture(dev, wrong)
    assert found.lines == (words,)
    assert found.content["gpus"][0]["memory_used_bytes"] == 40 * GIB
    assert not found.failure


def test_an_old_gpu_tells_of_retired_pages(dev: str) -> None:
    found = capture(
        dev,
        {
            "nvmlDeviceGetRemappedRows": NOT_SUPPORTED,
            "nvmlDeviceGetRetiredPages": [1, 2],
            "nvmlDeviceGetRetiredPagesPendingStatus": 1,
        },
    )
    assert found.lines == ("GPUs 0-1: page retirement pending: reset needed",)
    assert found.content["gpus"][0]["retired_pages"] == [2, 2]


def test_the_drivers_wish_for_a_reset_is_passed_on(dev: str) -> None:
    def field(value: int, code: int = 0) -> Any:
        return SimpleNamespace(nvmlReturn=code, valueType=1, value=SimpleNamespace(uiVal=value))

    found = capture(dev, {"nvmlDeviceGetFieldValues": [field(0), field(7), field(9, 3), field(0), field(1)]})
    assert found.lines == ("GPUs 0-1: the driver asks for a reset of the GPU",)
    one = found.content["gpus"][0]
    assert (one["nvlink_crc_data_errors"], "nvlink_replays" in one) == (7, False)


def test_a_structure_that_cannot_be_made_costs_no_other_gpu(dev: str) -> None:
    """What a newer release changes is unknown today."""
    nvml = Nvml(2)
    nvml.answers["c_nvmlGpuFabricInfo_t"] = ValueError("no such field")
    found = capture_gpu_nvidia([os.getpid()], soon(), nvml=nvml, dev_root=dev)
    assert [gpu["index"] for gpu in found.content["gpus"]] == [0, 1]
    assert found.content["gpus"][1]["errors"] == {"read_fabric": "no such field"}


def test_every_call_may_fail_by_itself(dev: str) -> None:
    """What one call does not tell, another may."""
    for call in Nvml().answers:
        if call in {"nvmlInit", "nvmlDeviceGetCount"}:
            continue
        found = capture(dev, {call: NvmlError(999, "Unknown Error")})
        assert len(found.content["gpus"]) == 2, call
        assert not found.failure, call
        assert found.lines, call


def test_a_library_that_knows_fewer_calls_is_no_error(dev: str) -> None:
    class Old(Nvml):
        def __getattr__(self, call: str) -> Callable[..., Any]:
            if call in {"nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMigMode"}:
                raise AttributeError(call)
            return super().__getattr__(call)

    found = capture_gpu_nvidia([], soon(), nvml=Old(1), dev_root=dev)
    assert not found.failure
    assert "errors" not in found.content["gpus"][0]


def test_a_gpu_that_was_not_granted_is_no_fault(dev: str) -> None:
    found = capture(dev, {("nvmlDeviceGetHandleByIndex", 1): NvmlError(4, "Insufficient Permissions")})
    assert found.lines[0].startswith("GPU 0 (H200")
    assert "no errors" in found.lines[0]


def test_no_driver_is_a_quiet_failure(dev: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert capture(str(empty)) == HostCapture((), {}, "no NVIDIA driver here")
    for code in (9, 12):
        found = capture(dev, {"nvmlInit": NvmlError(code, "not there")})
        assert (found.lines, found.failure) == ((), "no NVIDIA driver here")


def test_a_driver_and_a_library_that_do_not_fit_are_explained(dev: str) -> None:
    """It happens after an update of the driver without a reboot, and CUDA fails with it."""
    found = capture(dev, {"nvmlInit": NvmlError(18, "RM has detected an NVML/RM version mismatch.")})
    assert "reload the driver or reboot" in found.lines[0]
    assert "mismatch" in found.failure


def test_a_driver_that_never_returns_costs_only_its_own_part(dev: str) -> None:
    """A GPU that hangs the driver is the very thing to be found: what was read before it counts."""
    release = threading.Event()
    found = capture(
        dev,
        {("nvmlDeviceGetMemoryInfo", 1): lambda *_: release.wait() and LOST},
        deadline=time.monotonic() + 3.0,
    )
    release.set()
    assert found.failure == "nvmlDeviceGetMemoryInfo of GPU 1 does not return"
    assert found.lines == ("the GPU driver does not answer (nvmlDeviceGetMemoryInfo of GPU 1)",)
    assert found.content["gpus"][0]["memory_used_bytes"] == 40 * GIB
    assert found.content["gpus"][1]["busy_percent"] == 100


def test_a_deadline_that_has_passed_is_kept(dev: str) -> None:
    release = threading.Event()
    found = capture(dev, {"nvmlInit": lambda *_: release.wait()}, deadline=time.monotonic() - 1)
    release.set()
    assert found.failure.endswith("does not return")


def test_without_the_python_library_the_reason_is_told(dev: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    found = capture_gpu_nvidia([], soon(), dev_root=dev)
    assert found.failure.startswith("pynvml cannot be imported: ")


# ------------------------------------------------------------------------------------------------------------ processes


def test_processes_are_ours_somebodys_or_not_to_be_seen() -> None:
    parent = os.getppid()
    found = owned([(os.getpid(), 5, ""), (parent, None, ""), (1 << 30, 7, "driver's name")], families_of([os.getpid()]))
    assert [(one["whose"], one.get("memory_bytes")) for one in found] == [("ours", 5), ("other", None), ("hidden", 7)]
    assert found[2]["name"] == "driver's name"


def test_an_exception_while_reading_ends_nothing() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    assert read_until(soon(), fail)
