"""The state of AMD's GPUs, as amd-smi, rocm-smi and sysfs give it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import gpu_amd, gpu_nvidia, host_captures
from saferun.captures.gpu_amd import (
    add_amd_smi_static,
    capture_gpu_amd,
    parse_amd_smi_metric,
    parse_amd_smi_processes,
    parse_rocm_smi,
)
from saferun.captures.scene import Process, Scene
from saferun.captures.wire import CaptureRequest, CaptureTarget, HostCapture
from saferun.evidence.gpu_evidence import RankGpu
from saferun.model import JsonObject
from tests.unit.captures.gpu_captures import (
    GIB,
    MIB,
    soon,
)

# ------------------------------------------------------------------------------------------------------------------ AMD

METRIC = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 97, "unit": "%"}, "umc_activity": {"value": 12, "unit": "%"}},
    "power": {"socket_power": {"value": 239, "unit": "W"}, "gfx_voltage": "N/A"},
    "temperature": {"edge": "N/A", "hotspot": {"value": 66, "unit": "C"}, "mem": {"value": 50, "unit": "C"}},
    "pcie": {"width": 16, "speed": {"value": 32, "unit": "GT/s"}, "replay_count": 3},
    "ecc": {"total_correctable_count": 5, "total_uncorrectable_count": 1, "total_deferred_count": 0},
    "mem_usage": {"total_vram": {"value": 196608, "unit": "MB"}, "used_vram": {"value": 4096, "unit": "MB"}},
    "xgmi_err": "N/A",
}

METRIC_READ = {
    "index": 0,
    "busy_percent": 97,
    "memory_used_bytes": 4 * GIB,
    "memory_total_bytes": 192 * GIB,
    "temperature_c": 66,
    "power_w": 239,
    "ecc_uncorrected": 1,
    "ecc_corrected": 5,
    "ecc_deferred": 0,
    "pcie_width": 16,
    "pcie_replays": 3,
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([METRIC]),
        json.dumps({"gpu_data": [METRIC]}, indent=4),
        "WARNING: User is missing the following required groups: render.\n" + json.dumps([METRIC], indent=4),
        "[WARNING] not in group\n" + json.dumps({"gpu_data": [METRIC]}) + "\nbye\n",
    ],
    ids=["list", "object", "warning before", "warnings around"],
)
def test_amd_smi_is_read_in_the_forms_of_its_releases(text: str) -> None:
    """A plain list until ROCm 6.3, an object around it since, and warnings about groups in front."""
    assert parse_amd_smi_metric(text) == [METRIC_READ]


def test_sizes_without_units_and_as_text_are_read() -> None:
    entry = {"gpu": 1, "usage": {"gfx_activity": 72}, "mem_usage": {"total_vram": "64 GB", "used_vram": "512 MB"}}
    assert parse_amd_smi_metric(json.dumps([entry])) == [
        {"index": 1, "busy_percent": 72, "memory_used_bytes": 512 * MIB, "memory_total_bytes": 64 * GIB}
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[",
        "{}",
        "[]",
        "null",
        "3",
        '"text"',
        "[1, null]",
        '{"gpu_data": 3}',
        '[{"gpu": "0"}]',
        "[" * 99999,
    ],
)
def test_output_of_another_kind_holds_no_gpu(text: str) -> None:
    assert parse_amd_smi_metric(text) == []
    assert parse_amd_smi_processes(text) == {}
    assert parse_rocm_smi(text) == ([], [])


def test_what_is_not_available_is_left_out() -> None:
    entry = dict.fromkeys(METRIC, "N/A") | {"gpu": 2}
    assert parse_amd_smi_metric(json.dumps([entry])) == [{"index": 2}]


def test_amd_smis_processes_are_those_that_hold_memory() -> None:
    """Many releases list every process below every GPU, with no memory where it is not."""

    def listed(pid: int, size: Any) -> JsonObject:
        return {"process_info": {"name": "/usr/bin/python3", "pid": pid, "memory_usage": {"vram_mem": size}}}

    text = json.dumps(
        [
            {"gpu": 0, "process_list": [listed(42, {"value": 2, "unit": "GB"}), listed(43, {"value": 0, "unit": "B"})]},
            {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
            {"gpu": 2, "process_list": [{"process_info": {"pid": 44, "mem_usage": {"value": 5, "unit": "B"}}}]},
            {"gpu": 3, "process_list": [{"process_info": {"pid": 45, "name": "N/A"}}]},
        ]
    )
    assert parse_amd_smi_processes(text) == {
        0: [(42, 2 * GIB, "python3")],
        1: [],
        2: [(44, 5, "")],
        3: [(45, None, "")],
    }


def test_amd_smi_static_gives_names_and_addresses() -> None:
    facts: JsonObject = {}
    gpus: list[JsonObject] = [{"index": 0}]
    static = {
        "gpu": 0,
        "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0xABC"},
        "bus": {"bdf": "0000:05:00.0", "max_pcie_width": 16},
        "driver": {"name": "amdgpu", "version": "6.16.6"},
    }
    add_amd_smi_static(facts, gpus, json.dumps({"gpu_data": [static, {"gpu": 7}]}))
    assert facts == {"driver": "6.16.6"}
    assert gpus == [
        {"index": 0, "name": "AMD Instinct MI300X", "uuid": "0xABC", "pci": "0000:05:00.0", "pcie_width_max": 16}
    ]


ROCM_SMI = {
    "card0": {
        "Temperature (Sensor edge) (C)": "35.0",
        "Temperature (Sensor junction) (C)": "66.0",
        "Current Socket Graphics Package Power (W)": "239.0",
        "GPU use (%)": "97",
        "VRAM Total Memory (B)": str(64 * GIB),
        "VRAM Total Used Memory (B)": str(4 * GIB),
        "PCI Bus": "0000:C1:00.0",
        "Card Series": "AMD Instinct MI210",
        "Card Model": "0x740f",
    },
    "system": {
        "PID1073741842": "python, 1, 4294967296, 0, unknown",
        "PID 1073741843": "python3",
        "Driver version": "6.7.0",
    },
}


def test_rocm_smi_is_read() -> None:
    assert parse_rocm_smi(json.dumps(ROCM_SMI)) == (
        [
            {
                "index": 0,
                "busy_percent": 97,
                "memory_used_bytes": 4 * GIB,
                "memory_total_bytes": 64 * GIB,
                "temperature_c": 66,
                "power_w": 239,
                "name": "AMD Instinct MI210",
                "pci": "0000:c1:00.0",
            }
        ],
        [(1073741842, 4 * GIB, "python"), (1073741843, None, "python3")],
    )


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with AMD's device node, an empty sysfs, and no tools."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "sys").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_amd, "_ROCM_BIN", str(tmp_path / "none"))
    return tmp_path


def tool(host: Path, name: str, **outputs: Any) -> None:
    """A tool that prints an answer for each first argument."""
    cases = "".join(f"  {argument}) printf '%s\\n' '{json.dumps(output)}' ;;\n" for argument, output in outputs.items())
    path = host / "bin" / name
    path.write_text(f'#!/bin/sh\ncase "${{1#--}}" in\n{cases}  *) exit 3 ;;\nesac\n')
    path.chmod(0o755)


def ask_amd(host: Path, deadline: float = 0) -> HostCapture:
    return capture_gpu_amd([os.getpid()], deadline or soon(), sysfs_root=str(host / "sys"), dev_root=str(host / "dev"))


def test_amd_smi_is_asked_first(amd: Path) -> None:
    process_info = {"pid": os.getpid(), "memory_usage": {"vram_mem": {"value": 4, "unit": "GB"}}}
    static = {"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}, "bus": {"bdf": "0000:05:00.0"}}
    tool(
        amd,
        "amd-smi",
        metric={"gpu_data": [METRIC]},
        process=[{"gpu": 0, "process_list": [{"process_info": process_info}]}],
        static=[static],
    )
    tool(amd, "rocm-smi", showuse=ROCM_SMI)
    found = ask_amd(amd)
    assert found.content["source"] == "amd-smi"
    assert found.lines == ("GPU 0 (Instinct MI300X, 0000:05:00.0): uncorrectable ECC errors 1",)
    assert [one["whose"] for one in found.content["gpus"][0]["processes"]] == ["ours"]


def test_an_amd_smi_that_only_knows_metrics_is_enough(amd: Path) -> None:
    tool(amd, "amd-smi", metric=[METRIC])
    found = ask_amd(amd)
    assert found.lines == ("GPU 0: uncorrectable ECC errors 1",)
    assert not found.failure


def test_rocm_smi_is_asked_where_amd_smi_fails(amd: Path) -> None:
    tool(amd, "amd-smi")
    tool(amd, "rocm-smi", showuse=ROCM_SMI)
    found = ask_amd(amd)
    assert found.content["source"] == "rocm-smi"
    assert "97 % busy, memory 4.0 of 64.0 GiB used" in found.lines[0]


def add_card(host: Path, number: int, vendor: str = "0x1002", **files: str) -> None:
    device = host / f"sys/devices/0000:{number + 5:02x}:00.0"
    (device / "ras").mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    for name, content in files.items():
        (device / name.replace("__", "/")).write_text(content)
    card = host / f"sys/class/drm/card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)


def test_without_tools_sysfs_is_read(amd: Path) -> None:
    add_card(amd, 0, vendor="0x1a03")  # the board's console
    add_card(
        amd,
        1,
        gpu_busy_percent="97\n",
        mem_info_vram_used=str(4 * GIB),
        mem_info_vram_total=str(64 * GIB),
        product_name="Instinct MI210\n",
        ras__umc_err_count="ue: 1\nce: 4\n",
        ras__gfx_err_count="ue: 1\nce: 0\nde: 9\n",
    )
    (amd / "sys/class/drm/card1-DP-1").mkdir()
    node = amd / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "gpu_id").write_text("46775\n")
    (node / "properties").write_text(f"domain 0\nlocation_id {6 << 8}\nsimd_count 304\n")
    for pid, used in ((os.getpid(), 4 * GIB), (1, 0)):
        folder = amd / f"sys/class/kfd/kfd/proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "vram_46775").write_text(f"{used}\n")
    found = ask_amd(amd)
    assert found.content["source"] == "sysfs"
    (one,) = found.content["gpus"]
    assert (one["pci"], one["ecc_uncorrected"], one["ecc_corrected"]) == ("0000:06:00.0", 2, 4)
    assert [(seen["pid"], seen["memory_bytes"]) for seen in one["processes"]] == [(os.getpid(), 4 * GIB)]
    assert found.lines == ("GPU 0 (Instinct MI210, 0000:06:00.0): uncorrectable ECC errors 2",)


def test_where_nothing_answers_every_reason_is_told(amd: Path) -> None:
    tool(amd, "amd-smi")
    assert ask_amd(amd).failure == "amd-smi metric: exit code 3; no rocm-smi here"


def test_no_amd_driver_is_a_quiet_failure(amd: Path) -> None:
    (amd / "dev/kfd").unlink()
    assert ask_amd(amd) == HostCapture((), {}, "no AMD GPU driver here")


def test_a_tool_that_hangs_is_ended_and_the_next_way_is_taken(amd: Path) -> None:
    slow = amd / "bin/amd-smi"
    slow.write_text("#!/bin/sh\nexec sleep 3600\n")
    slow.chmod(0o755)
    add_card(amd, 1, gpu_busy_percent="97\n")
    found = ask_amd(amd, time.monotonic() + 9)  # the tool gets two thirds of it, and a busy machine needs the rest
    assert found.content["source"] == "sysfs"
    assert found.content["gpus"][0]["busy_percent"] == 97
    assert not found.failure


def test_which_rank_has_which_gpu_is_found_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a rank has started uses the rank's GPU; others' processes are nobody's rank."""
    content = {
        "gpus": [
            {
                "index": 0,
                "pci": "0000:1b:00.0",
                "processes": [{"pid": 11, "whose": "ours"}, {"pid": 99, "whose": "other"}],
            },
            {"index": 1, "pci": "0000:43:00.0", "processes": [{"pid": 13, "whose": "ours"}]},
            {"index": 2, "processes": [{"pid": 11, "whose": "ours"}]},
        ]
    }
    monkeypatch.setattr(gpu_nvidia, "capture_gpu_nvidia", lambda _pids, _until: HostCapture((), content))
    seen: list[tuple[str, object]] = []
    processes = tuple(
        Process(rank, pid, is_rank=pid != 13, hook_prefix="", snapshot=None)  # type: ignore[arg-type]
        for rank, pid in ((0, 11), (1, 12), (1, 13))
    )
    request = CaptureRequest((CaptureTarget(0, 11), CaptureTarget(1, 12)))
    scene = Scene(request, processes, time.monotonic() + 60, lambda kind, value: seen.append((kind, value)))
    host_captures.capture_gpu_nvidia(scene)
    assert [one for kind, one in seen if kind == "gpu"] == [RankGpu(0, "0000:1b:00.0"), RankGpu(1, "0000:43:00.0")]
