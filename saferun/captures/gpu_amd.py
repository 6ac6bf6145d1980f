"""The state of AMD's GPUs: from ``amd-smi``, or else from ``rocm-smi``, or else from sysfs.

The tools' output differs between releases: what is missing or of an unknown form is skipped.

Source: ROCm documentation, "AMD SMI CLI tool" and "ROCm SMI".
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from saferun.captures.gpu_lines import gpu_lines
from saferun.captures.wire import HostCapture
from saferun.linux.amd_gpus import read_amd_sysfs
from saferun.linux.child_output import run_program
from saferun.linux.children import SpawnError
from saferun.linux.gpu_reading import Snapshot, families_of, owned, read_until
from saferun.model import JsonObject
from saferun.text.decoding import loads_first

_ROCM_BIN = "/opt/rocm/bin"
_OUTPUT_BYTES = 8 << 20
_ROCM_SMI = (
    *("--showuse", "--showmeminfo", "vram", "--showtemp", "--showpower", "--showbus", "--showproductname"),
    *("--showpids", "--json"),
)
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def capture_gpu_amd(
    pids: Sequence[int], deadline: float, *, sysfs_root: str = "/sys", dev_root: str = "/dev"
) -> HostCapture:
    """The state of AMD's GPUs, as far as it was read by the deadline, even if the driver blocks.

    Args:
        pids: the ranks; they and their descendants count as the job's processes.
        deadline: in monotonic seconds.
        sysfs_root: where sysfs is mounted.
        dev_root: where the device nodes are.
    """
    if not os.path.exists(f"{dev_root}/kfd"):
        return HostCapture((), {}, "no AMD GPU driver here")
    snapshot, ours = Snapshot(), families_of(pids)
    failures: list[str] = []

    def read() -> None:
        # A tool gets two thirds of the remaining time, so that some is left for the next one.
        for ask in (_read_amd_smi, _read_rocm_smi):
            until = time.monotonic() + (deadline - time.monotonic()) * 2 / 3
            failure = ask(snapshot, ours, until)
            if not failure:
                return
            failures.append(failure)
        read_amd_sysfs(snapshot, ours, sysfs_root)
        snapshot.step = ""

    done = read_until(deadline, read)
    content = snapshot.as_json()
    if not done:
        content["stuck_in"] = snapshot.step
        return HostCapture(gpu_lines(content), content, f"no answer in time: {snapshot.step}")
    return HostCapture(gpu_lines(content), content, "" if content["gpus"] else "; ".join(failures))


# ------------------------------------------------------------------------------------------------------------- amd-smi


def _read_amd_smi(snapshot: Snapshot, ours: frozenset[int], until: float) -> str:
    metric, failure = _run(snapshot, "amd-smi", ("metric", "--json"), until)
    if failure:
        return failure
    gpus = parse_amd_smi_metric(metric)
    if not gpus:
        return "amd-smi metric: no GPU in its output"
    snapshot.facts["source"] = "amd-smi"
    snapshot.gpus += gpus
    listed, failure = _run(snapshot, "amd-smi", ("process", "--json"), until)
    if not failure:
        for index, processes in parse_amd_smi_processes(listed).items():
            for gpu in gpus:
                if gpu["index"] == index:
                    gpu["processes"] = owned(processes, ours)
    static, failure = _run(snapshot, "amd-smi", ("static", "--json"), until)
    if not failure:
        add_amd_smi_static(snapshot.facts, gpus, static)
    return ""


def parse_amd_smi_metric(text: str) -> list[JsonObject]:
    """The GPUs in the output of ``amd-smi metric --json``."""
    return [gpu for entry in _entries(text) if (gpu := _from_metric(entry))]


def _from_metric(entry: JsonObject) -> JsonObject:
    index = entry.get("gpu")
    if not isinstance(index, int):
        return {}
    gpu: JsonObject = {"index": index}
    _put(gpu, "busy_percent", _value(entry, "usage", "gfx_activity"), int)
    _put(gpu, "memory_used_bytes", _value(entry, "mem_usage", "used_vram"), int)
    _put(gpu, "memory_total_bytes", _value(entry, "mem_usage", "total_vram"), int)
    _put(gpu, "temperature_c", _value(entry, "temperature", "hotspot") or _value(entry, "temperature", "edge"))
    _put(gpu, "power_w", _first_value(entry, "power", ("socket_power", "current_socket_power", "average_socket_power")))
    _put(gpu, "ecc_uncorrected", _value(entry, "ecc", "total_uncorrectable_count"), int)
    _put(gpu, "ecc_corrected", _value(entry, "ecc", "total_correctable_count"), int)
    _put(gpu, "ecc_deferred", _value(entry, "ecc", "total_deferred_count"), int)
    _put(gpu, "pcie_width", _first_value(entry, "pcie", ("width", "current_lanes")), int)
    _put(gpu, "pcie_replays", _value(entry, "pcie", "replay_count"), int)
    return gpu


def parse_amd_smi_processes(text: str) -> dict[int, list[tuple[int, int | None, str]]]:
    """The processes of each GPU (pid, bytes of its memory, name) in the output of ``amd-smi process --json``.

    Many releases list every process below every GPU: those that hold no memory of a GPU are left out.
    """
    found: dict[int, list[tuple[int, int | None, str]]] = {}
    for entry in _entries(text):
        index, listed = entry.get("gpu"), entry.get("process_list", entry.get("process_info"))
        if not isinstance(index, int) or not isinstance(listed, list):
            continue
        processes = found.setdefault(index, [])
        for item in listed:
            one = item.get("process_info", item) if isinstance(item, dict) else None
            if not isinstance(one, dict) or not isinstance(one.get("pid"), int):
                continue  # without processes there is a message in their place
            memory = _value(one, "memory_usage", "vram_mem")
            if memory is None:
                memory = _number(one.get("mem_usage", one.get("mem")))
            if memory is None or memory > 0:
                processes.append((one["pid"], None if memory is None else int(memory), _base_name(one.get("name"))))
    return found


def add_amd_smi_static(facts: JsonObject, gpus: Iterable[JsonObject], text: str) -> None:
    """Add names, addresses, link widths and the driver's version from ``amd-smi static --json``."""
    by_index = {gpu["index"]: gpu for gpu in gpus}
    for entry in _entries(text):
        gpu = by_index.get(entry.get("gpu", -1))
        if gpu is None:
            continue
        for key, section, name in (
            ("name", "asic", "market_name"),
            ("uuid", "asic", "asic_serial"),
            ("pci", "bus", "bdf"),
        ):
            word = _word(entry, section, name)
            if word:
                gpu[key] = word
        _put(gpu, "pcie_width_max", _value(entry, "bus", "max_pcie_width"), int)
        if version := _word(entry, "driver", "version") or _word(entry, "driver", "driver_version"):
            facts["driver"] = version


# ------------------------------------------------------------------------------------------------------------ rocm-smi


def _read_rocm_smi(snapshot: Snapshot, ours: frozenset[int], until: float) -> str:
    text, failure = _run(snapshot, "rocm-smi", _ROCM_SMI, until)
    if failure:
        return failure
    gpus, processes = parse_rocm_smi(text)
    if not gpus:
        return "rocm-smi: no GPU in its output"
    snapshot.facts["source"] = "rocm-smi"
    # It does not report a process's GPU.
    snapshot.facts["processes"] = owned(processes, ours)
    if len(gpus) == 1:
        gpus[0]["processes"] = snapshot.facts["processes"]
    snapshot.gpus += gpus
    return ""


def parse_rocm_smi(text: str) -> tuple[list[JsonObject], list[tuple[int, int | None, str]]]:
    """The GPUs and the processes (pid, bytes of GPU memory, name) in the output of ``rocm-smi --json``."""
    content = _json(text)
    gpus: list[JsonObject] = []
    processes: list[tuple[int, int | None, str]] = []
    for key, entry in content.items() if isinstance(content, dict) else ():
        if key.startswith("card") and _is_number(key[4:]) and isinstance(entry, dict):
            gpus.append(_from_card(int(key[4:]), entry))
        elif key == "system" and isinstance(entry, dict):
            for name, value in entry.items():
                pid = name.removeprefix("PID").strip()
                if name.startswith("PID") and _is_number(pid) and isinstance(value, str):
                    # Name, number of GPUs, bytes of memory, bytes of SDMA, occupancy.
                    fields = [field.strip() for field in value.rsplit(",", 4)]
                    memory = fields[2] if len(fields) > 2 else ""  # noqa: PLR2004
                    processes.append((int(pid), int(memory) if _is_number(memory) else None, fields[0]))
    return gpus, processes


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19  # noqa: PLR2004 - fits 64 bits


def _from_card(index: int, entry: JsonObject) -> JsonObject:
    gpu: JsonObject = {"index": index}
    # Upper and lower case differ between releases.
    fields = {str(name).lower(): value for name, value in entry.items()}
    _put(gpu, "busy_percent", _number(fields.get("gpu use (%)")), int)
    _put(gpu, "memory_used_bytes", _number(fields.get("vram total used memory (b)")), int)
    _put(gpu, "memory_total_bytes", _number(fields.get("vram total memory (b)")), int)
    for sensor in ("junction", "edge"):
        if "temperature_c" not in gpu:
            _put(gpu, "temperature_c", _number(fields.get(f"temperature (sensor {sensor}) (c)")))
    for kind in ("average graphics package power (w)", "current socket graphics package power (w)"):
        if "power_w" not in gpu:
            _put(gpu, "power_w", _number(fields.get(kind)))
    for name in ("card series", "card model"):
        word = fields.get(name)
        if "name" not in gpu and isinstance(word, str) and word not in {"", "N/A"} and not word.startswith("0x"):
            gpu["name"] = word
    if isinstance(bus := fields.get("pci bus"), str):
        gpu["pci"] = bus.lower()
    return gpu


# --------------------------------------------------------------------------------------------------------------- tools


def _run(snapshot: Snapshot, tool: str, arguments: Sequence[str], until: float) -> tuple[str, str]:
    """A tool's output, and why there is none."""
    import shutil

    path = shutil.which(tool) or shutil.which(tool, path=_ROCM_BIN)
    if path is None:
        return "", f"no {tool} here"
    snapshot.step = f"{tool} {arguments[0]}" if not arguments[0].startswith("-") else tool
    timeout_s = max(0.1, until - time.monotonic())
    try:
        output, status = run_program([path, *arguments], os.environ, timeout_s, kept_bytes=_OUTPUT_BYTES)
    except SpawnError as error:
        return "", f"{snapshot.step}: {os.strerror(error.errno)}"
    if status is None:
        return "", f"{snapshot.step} did not answer in time"
    step, snapshot.step = snapshot.step, ""
    if status.code != 0 and not output.strip():
        return "", f"{step}: {status.description}"
    return output.decode(errors="replace"), ""


def _entries(text: str) -> list[JsonObject]:
    """The entries for each GPU: a list, or, since ROCm 6.4, an object around one."""
    content = _json(text)
    if isinstance(content, dict):
        content = next((content[key] for key in ("gpu_data", "gpu") if isinstance(content.get(key), list)), [content])
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _json(text: str) -> Any:  # noqa: ANN401 - JSON
    """The JSON in a tool's output, which warnings may precede or follow."""
    for match in re.finditer(r"^\s*(?=[\[{])", text, re.MULTILINE):
        try:
            return loads_first(text, match.end())
        except ValueError:
            continue
    return None


def _value(entry: JsonObject, section: str, name: str) -> float | None:
    part = entry.get(section)
    return _number(part.get(name)) if isinstance(part, dict) else None


def _first_value(entry: JsonObject, section: str, names: Iterable[str]) -> float | None:
    return next((value for name in names if (value := _value(entry, section, name)) is not None), None)


def _number(raw: Any) -> float | None:  # noqa: ANN401 - JSON
    """A number with or without its unit (sizes in bytes then); None for ``N/A`` and the like."""
    unit: Any = ""
    if isinstance(raw, dict):
        raw, unit = raw.get("value"), raw.get("unit", "")
    if isinstance(raw, str):
        match = _NUMBER.match(raw.strip())
        if match is None:
            return None
        unit = unit or raw.strip()[match.end() :].strip()
        raw = float(match[0])
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        return None
    number = float(raw) * _UNITS.get(str(unit).upper(), 1)
    return number if math.isfinite(number) else None


def _put(gpu: JsonObject, key: str, value: float | None, kind: type[int | float] = float) -> None:
    if value is not None:
        gpu[key] = kind(value)


def _word(entry: JsonObject, section: str, name: str) -> str:
    part = entry.get(section)
    word = part.get(name) if isinstance(part, dict) else None
    return word if isinstance(word, str) and word != "N/A" else ""


def _base_name(raw: Any) -> str:  # noqa: ANN401 - JSON
    return os.path.basename(raw) if isinstance(raw, str) and raw != "N/A" else ""
