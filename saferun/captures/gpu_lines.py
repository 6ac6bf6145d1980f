"""The lines about the state of the GPUs in reports of hangs and crashes. Pure.

A snapshot is plain JSON: ``{"driver": "580.95", "runtime": "CUDA 13.0", "stuck_in": "", "gpus": [...]}``. A GPU has
these keys, except for values that are unknown:

``index``; ``name``; ``pci`` (``0000:1b:00.0``); ``fault`` (why it cannot be used); ``busy_percent``;
``memory_used_bytes``, ``memory_total_bytes``; ``temperature_c``; ``slowed_by`` (causes); ``ecc_uncorrected``
(since the driver was loaded); ``remapping_pending``, ``remapping_failed``, ``retirement_pending``; ``recovery`` (the
action that the driver asks for); ``pcie_width``, ``pcie_width_max``; ``nvlinks_up``; ``nvlink_recoveries``; ``mig``;
``processes`` (``pid``, ``memory_bytes``, ``name``, and ``whose``: ``ours``, ``other``, or ``hidden`` if the pid is not
visible in this pid namespace).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from saferun.model import JsonObject
from saferun.text.wording import rank_spans

_IDLE_PERCENT = 5
_BUSY_PERCENT = 90
_GIB = 1 << 30
# A CUDA context alone takes some hundred MiB: a process with less than this shares a GPU, but has not filled it.
_NOTABLE_BYTES = 64 << 20
_NOTABLE_SHARE = 0.05
_NAMED_PROCESSES = 3


def gpu_lines(snapshot: JsonObject) -> tuple[str, ...]:
    """One line for each fault, the gravest first; one line for all GPUs if there is none.

    GPUs with the same fault share a line.
    """
    gpus: list[JsonObject] = snapshot.get("gpus", [])
    lines = [f"the GPU driver does not answer ({stuck})"] if (stuck := snapshot.get("stuck_in")) else []
    for rule in _FAULTS:
        lines += _merged(((gpu, rule(gpu)) for gpu in gpus), with_names=True)
    lines += _missing_links(gpus)
    lines += _foreign_lines(gpus)
    lines += _load_lines(gpus)
    return tuple(lines or _summary(snapshot, gpus))


# ----------------------------------------------------------------------------------------------- faults of a single GPU


def _fault(gpu: JsonObject) -> str:
    return str(gpu.get("fault", ""))


def _ecc(gpu: JsonObject) -> str:
    count = gpu.get("ecc_uncorrected") or 0
    return f"uncorrectable ECC errors {count}" if count else ""


def _remapping(gpu: JsonObject) -> str:
    # A pending one is no hint at a hang: the GPU works, and the row is replaced at its next reset.
    return "row remapping failed: the GPU needs replacing" if gpu.get("remapping_failed") else ""


def _retirement(gpu: JsonObject) -> str:
    return "page retirement pending: reset needed" if gpu.get("retirement_pending") else ""


def _recovery(gpu: JsonObject) -> str:
    wanted = gpu.get("recovery")
    return f"the driver asks for {wanted}" if wanted else ""


def _slowed(gpu: JsonObject) -> str:
    causes = gpu.get("slowed_by")
    if not causes:
        return ""
    celsius = gpu.get("temperature_c")
    return f"clocks slowed down by {' and '.join(causes)}" + (f" ({celsius:.0f} °C)" if celsius else "")


def _pcie(gpu: JsonObject) -> str:
    width, width_max = gpu.get("pcie_width"), gpu.get("pcie_width_max")
    return f"PCIe link has {width} of {width_max} lanes" if width and width_max and width < width_max else ""


def _link_recoveries(gpu: JsonObject) -> str:
    count = gpu.get("nvlink_recoveries") or 0
    return f"NVLink had to recover {count} times" if count else ""


_FAULTS: tuple[Callable[[JsonObject], str], ...] = (
    _fault,
    _ecc,
    _remapping,
    _retirement,
    _recovery,
    _slowed,
    _pcie,
    _link_recoveries,
)


# -------------------------------------------------------------------------------------------------------- GPUs compared


def _missing_links(gpus: Sequence[JsonObject]) -> list[str]:
    # The number of wired links depends on the board, so only GPUs of one kind are compared.
    found: list[tuple[JsonObject, str]] = []
    for name in dict.fromkeys(gpu.get("name") for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.get("name") == name and "nvlinks_up" in gpu and not gpu.get("mig")]
        most = max((gpu["nvlinks_up"] for gpu in alike), default=0)
        fewer = [gpu for gpu in alike if gpu["nvlinks_up"] < most]
        if 2 * len(fewer) < len(alike):
            found += [(gpu, f"{gpu['nvlinks_up']} NVLinks up, the others have {most}") for gpu in fewer]
    return _merged(found, with_names=True)


def _foreign_lines(gpus: Sequence[JsonObject]) -> list[str]:
    used_by_us = [gpu for gpu in gpus if _pids(gpu, "ours")]
    found: list[tuple[JsonObject, str]] = []
    for gpu in used_by_us or gpus:
        total = gpu.get("memory_total_bytes", 0)
        least = _NOTABLE_BYTES if used_by_us else max(_NOTABLE_BYTES, total * _NOTABLE_SHARE)
        # Pids of an outer namespace may be our own ranks, unless those are visible by their own pids.
        strange = ("other", "hidden") if used_by_us else ("other",)
        foreign = [one for one in gpu.get("processes", ()) if one["whose"] in strange]
        taken = sum(one.get("memory_bytes", 0) for one in foreign)
        if taken >= least:
            used = f"memory {_gib(gpu.get('memory_used_bytes', 0))} of {_gib(total)} GiB used, {_gib(taken)} GiB of it"
            found.append((gpu, f"{used} by {_named(foreign)}"))
    return _merged(found)


def _named(processes: Sequence[JsonObject]) -> str:
    most = sorted(processes, key=lambda one: -one.get("memory_bytes", 0))
    text = [
        f"pid {one['pid']} ({'not visible from here' if one['whose'] == 'hidden' else _not_ours(one)})"
        for one in most[:_NAMED_PROCESSES]
    ]
    if len(most) > _NAMED_PROCESSES:
        text.append(f"{len(most) - _NAMED_PROCESSES} more")
    return ", ".join(text)


def _not_ours(process: JsonObject) -> str:
    return f"not ours: {process['name']}" if process.get("name") else "not ours"


def _load_lines(gpus: Sequence[JsonObject]) -> list[str]:
    """Ranks that wait in a collective keep their GPUs busy: an idle GPU is that of a missing rank."""
    known = [gpu for gpu in _in_use(gpus) if "busy_percent" in gpu]
    busy = [gpu for gpu in known if gpu["busy_percent"] >= _BUSY_PERCENT]
    idle = [gpu for gpu in known if gpu["busy_percent"] <= _IDLE_PERCENT]
    if not busy or not idle:
        return []
    pids = [pid for gpu in idle for pid in _pids(gpu, "ours")]
    owners = f" (pid {', '.join(map(str, pids[:_NAMED_PROCESSES]))})" if 0 < len(pids) <= _NAMED_PROCESSES else ""
    percent = _span([gpu["busy_percent"] for gpu in busy], "{:.0f}")
    verb = "is" if len(busy) == 1 else "are"
    return [f"{_which(idle)}: idle{owners}, while {_which(busy)} {verb} {percent} % busy"]


def _in_use(gpus: Sequence[JsonObject]) -> Sequence[JsonObject]:
    return [gpu for gpu in gpus if _pids(gpu, "ours")] or [
        gpu for gpu in gpus if gpu.get("memory_used_bytes", 0) >= _GIB
    ]


def _summary(snapshot: JsonObject, gpus: Sequence[JsonObject]) -> list[str]:
    shown = _in_use(gpus) or gpus
    if not shown:
        return []
    names = list(dict.fromkeys(_short_name(gpu) for gpu in shown))
    kind = ", ".join([*filter(None, names[:1] if len(names) == 1 else []), *filter(None, [_versions(snapshot)])])
    parts = []
    if busy := [gpu["busy_percent"] for gpu in shown if "busy_percent" in gpu]:
        parts.append(f"{_span(busy, '{:.0f}')} % busy")
    if memory := [gpu for gpu in shown if gpu.get("memory_total_bytes")]:
        used = _span([gpu["memory_used_bytes"] / _GIB for gpu in memory if "memory_used_bytes" in gpu], "{:.1f}")
        total = _span([gpu["memory_total_bytes"] / _GIB for gpu in memory], "{:.1f}")
        parts.append(f"memory {used} of {total} GiB used" if used else f"memory {total} GiB")
    return [f"{_which(shown)}{f' ({kind})' if kind else ''}: {', '.join([*parts, 'no errors'])}"]


def _versions(snapshot: JsonObject) -> str:
    driver, runtime = snapshot.get("driver"), snapshot.get("runtime")
    return ", ".join([*([f"driver {driver}"] if driver else []), *([str(runtime)] if runtime else [])])


# ------------------------------------------------------------------------------------------------------------ wording


def _merged(found: Iterable[tuple[JsonObject, str]], *, with_names: bool = False) -> list[str]:
    by_text: dict[str, list[JsonObject]] = {}
    for gpu, text in found:
        if text:
            by_text.setdefault(text, []).append(gpu)
    return [f"{_which(gpus, with_names=with_names)}: {text}" for text, gpus in by_text.items()]


def _which(gpus: Sequence[JsonObject], *, with_names: bool = False) -> str:
    """``GPU 3``, ``GPUs 0-2,5``; with names ``GPU 3 (H200, 0000:1b:00.0)``, for repairs."""
    numbers = sorted(gpu["index"] for gpu in gpus)
    if len(numbers) > 1:
        return f"GPUs {','.join(rank_spans(numbers)[0])}"
    known = ", ".join(filter(None, (_short_name(gpus[0]), gpus[0].get("pci", ""))))
    return f"GPU {numbers[0]}" + (f" ({known})" if with_names and known else "")


def _short_name(gpu: JsonObject) -> str:
    name = str(gpu.get("name", ""))
    for maker in ("NVIDIA ", "AMD "):
        name = name.removeprefix(maker)
    return name


def _span(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least}-{most}"


def _pids(gpu: JsonObject, whose: str) -> list[Any]:
    return [one["pid"] for one in gpu.get("processes", ()) if one["whose"] == whose]


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f}".removesuffix(".0")
