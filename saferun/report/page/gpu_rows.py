"""The state of the GPUs when the ranks were captured, as the captures of the hosts have it. Pure.

``captures/gpu_lines.py`` has the form of a snapshot. Files of a run directory are not believed: what is not as it
should be is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from saferun.model import JsonObject, Value
from saferun.report.page.page_model import Table
from saferun.report.page.run_contents import HostGpus
from saferun.text.bounded_json import shown
from saferun.text.decoding import text_or_empty
from saferun.text.wording import rank_spans, size_text

_MOST_ROWS, _LEAST_ROWS = 64, 8
_MOST_GPUS = 64
_HIGHEST_GPU = 4096
_LARGEST = 1e18
_IDLE_PERCENT, _BUSY_PERCENT = 5, 90
# nvmlClocksThrottleReasons, beside those of a slowdown, which the capture names.
_POWER_CAP = 0x04
_FAULT_FLAGS: tuple[tuple[str, str], ...] = (
    ("remapping_failed", "row remapping failed"),
    ("remapping_pending", "row remapping pending"),
    ("retirement_pending", "page retirement pending"),
)
_HEAD = ("GPUs", "Model", "Busy", "Memory used", "Temperature", "Clock", "Power", "ECC errors", "What stands out")


class _Gpu(Value):
    """One GPU. ``load``: idle, busy or between; ``fault``: what is wrong with it, ``remark``: what is not usual."""

    host: str
    number: int
    model: str
    load: str
    fault: str
    remark: str
    values: JsonObject


def build_gpus(hosts: Sequence[HostGpus], scale: float) -> Table | None:
    """A row for GPUs that do alike, those with something wrong first; None where no GPU was captured."""
    groups: dict[tuple[str, ...], list[_Gpu]] = {}
    for host in hosts:
        listed = host.content.get("gpus")
        for raw in listed[:_MOST_GPUS] if isinstance(listed, list) else ():
            gpu = _gpu_of(shown(host.host, 60), raw) if isinstance(raw, dict) else None
            if gpu is not None:
                groups.setdefault((gpu.fault, gpu.remark, gpu.load, gpu.model), []).append(gpu)
    if not groups:
        return None
    ordered = sorted(groups.values(), key=lambda group: (not group[0].fault, not group[0].remark, len(group)))
    most = max(int(_MOST_ROWS * scale), _LEAST_ROWS)
    rows = tuple(map(_row, ordered[:most]))
    odd = frozenset(number for number, group in enumerate(ordered[:most]) if group[0].fault)
    left = sum(map(len, ordered[most:]))
    return Table("GPUs, when the ranks were captured", _HEAD, rows, odd, f"{left} more not shown." if left else "")


def _gpu_of(host: str, raw: JsonObject) -> _Gpu | None:
    number = _number(raw, "index")
    if number is None or number > _HIGHEST_GPU:
        return None
    busy = _number(raw, "busy_percent")
    load = "" if busy is None else "idle" if busy < _IDLE_PERCENT else "busy" if busy >= _BUSY_PERCENT else "between"
    faults = [text_or_empty(raw.get("fault"), 200)]
    slowed = raw.get("slowed_by")
    causes = [cause for cause in slowed[:4] if isinstance(cause, str)] if isinstance(slowed, list) else []
    faults += [f"slowed down by {', '.join(causes)}"] if causes else []
    faults += [text for name, text in _FAULT_FLAGS if raw.get(name) is True]
    faults += ["uncorrectable ECC errors"] if _number(raw, "ecc_uncorrected") else []
    recovery = text_or_empty(raw.get("recovery"), 100)
    faults += [f"the driver asks for {recovery}"] if recovery else []
    bits = int(_number(raw, "clock_reasons") or 0)
    remark = "clock limited by the power cap" if bits & _POWER_CAP else ""
    model = shown(text_or_empty(raw.get("name"), 100), 60)
    return _Gpu(host, int(number), model, load, shown("; ".join(filter(None, faults)), 300), remark, raw)


def _row(group: Sequence[_Gpu]) -> tuple[str, ...]:
    first = group[0]
    return (
        _which(group),
        first.model or "-",
        _span(group, "busy_percent", lambda value: f"{value:.0f} %"),
        _of(_span(group, "memory_used_bytes", size_text), _span(group, "memory_total_bytes", size_text)),
        _span(group, "temperature_c", lambda value: f"{value:.0f} °C"),
        _of(_span(group, "clock_mhz", _mhz), _span(group, "clock_max_mhz", _mhz)),
        _of(_span(group, "power_w", _watts), _span(group, "power_limit_w", _watts)),
        _ecc(group),
        "; ".join(filter(None, (first.fault, first.remark))) or "-",
    )


def _which(group: Sequence[_Gpu]) -> str:
    """``GPUs 0-7 of node1``; of many hosts how many they are."""
    by_host: dict[str, list[int]] = {}
    for gpu in group:
        by_host.setdefault(gpu.host, []).append(gpu.number)
    if len(by_host) > 2:  # noqa: PLR2004 - more would not be read
        return f"{len(group)} GPUs of {len(by_host)} hosts"
    named = ((",".join(rank_spans(numbers)[0]), len(numbers), host) for host, numbers in by_host.items())
    return "; ".join(f"GPU{'s' if count > 1 else ''} {spans} of {host}" for spans, count, host in named)


def _ecc(group: Sequence[_Gpu]) -> str:
    """Since the driver was loaded."""
    bad = _span(group, "ecc_uncorrected", lambda value: f"{value:.0f}")
    corrected = _span(group, "ecc_corrected", lambda value: f"{value:.0f}")
    parts = ([f"{bad} uncorrected"] if bad != "-" else []) + ([f"{corrected} corrected"] if corrected != "-" else [])
    return ", ".join(parts) or "-"


def _span(group: Sequence[_Gpu], name: str, text: Callable[[float], str]) -> str:
    values = [value for gpu in group if (value := _number(gpu.values, name)) is not None]
    if not values:
        return "-"
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} … {high}"


def _of(used: str, total: str) -> str:
    return used if total == "-" or used == "-" else f"{used} of {total}"


def _mhz(value: float) -> str:
    return f"{value:.0f} MHz"


def _watts(value: float) -> str:
    return f"{value:.0f} W"


def _number(raw: JsonObject, name: str) -> float | None:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value < _LARGEST else None
