"""The state of a host's GPUs from NVIDIA's management library (NVML).

Source: NVML API Reference Guide, docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from saferun.linux.gpu_reading import Snapshot, owned, read_until
from saferun.model import JsonObject

# Return codes of the library.
_NOT_SUPPORTED = frozenset({3, 13, 21, 25})  # not supported, function not found, no data, argument version mismatch
_NO_PERMISSION = 4
_DRIVER_NOT_LOADED = 9
_IRQ_ISSUE = 10
_LIBRARY_NOT_FOUND = 12
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_VERSION_MISMATCH = 18
_OF_THE_HOST = frozenset({_IRQ_ISSUE, _GPU_IS_LOST, _RESET_REQUIRED})

# Arguments: kinds of memory errors, counters, sensors, causes of retired pages.
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_TEMPERATURE_GPU = 0
_CLOCK_SM = 1
_RETIRED_CAUSES = (0, 1)

# Clock throttle reasons that mean a fault; the software power cap is normal.
_SLOWDOWNS = ((0x20 | 0x40, "heat"), (0x80, "the power supply (power brake)"))
_HW_SLOWDOWN = 0x08

# Field identifiers, the scope being all links of the GPU.
_CRC_FLIT_ERRORS, _CRC_DATA_ERRORS, _REPLAYS, _RECOVERIES = 38, 45, 52, 59
_RECOVERY_ACTION = 230
_FIELDS = {
    "nvlink_crc_flit_errors": _CRC_FLIT_ERRORS,
    "nvlink_crc_data_errors": _CRC_DATA_ERRORS,
    "nvlink_replays": _REPLAYS,
    "nvlink_recoveries": _RECOVERIES,
    "recovery_action": _RECOVERY_ACTION,
}
_RECOVERY_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the host",
    3: "peer-to-peer traffic to be drained",
    4: "the GPU to be drained and reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of the bus",
    7: "a reboot of the system",
}
# nvmlGpuFabricState_t; 0: the GPU is behind no NVSwitch.
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}
_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ
_MOST_COMPARED = 16  # GPUs, each with each
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
# The members of a field's value, by its type.
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_MAX_LINKS = 36
_GET_HANDLE = "nvmlDeviceGetHandleByIndex"

# A new process, not a fork: the caller has threads, and a fork may inherit a lock of the loader that one of them holds.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from saferun.linux.nvidia_gpus import print_state; "
    "print_state(float(sys.argv[1]))"
)
_MOST_PROCESSES = 32
_REST_S = 0.3  # for the answer, after the deadline


def read_nvidia_state(deadline: float, ours: frozenset[int] = frozenset(), *, nvml: Any = None) -> JsonObject:  # noqa: ANN401
    """Query the library until a deadline, in this process: the facts, ``gpus``, ``stuck_in``, ``failure``.

    ``stuck_s`` is how long the call in ``stuck_in`` has lasted by then. If CUDA cannot work, ``unusable`` is true, and
    ``failure`` says why; if that is a fault of the host, ``broken`` is true.

    Args:
        deadline: in monotonic seconds. A call that has not returned by then is named in ``stuck_in``.
        ours: the pids of the job.
        nvml: a stand-in for ``pynvml``.
    """
    if nvml is None:
        try:
            import pynvml as nvml  # type: ignore[import-untyped,no-redef,unused-ignore]
        except Exception as error:
            return {"gpus": [], "failure": f"pynvml cannot be imported: {error_text(error)}"}
    reader = NvidiaReader(nvml, ours)
    done = read_until(deadline, reader.read)
    content = reader.snapshot.as_json()
    if not done:
        content.update(reader.snapshot.stuck("NVML"))
    if reader.is_broken:
        content["broken"] = True
    if reader.lines:
        return {**content, "failure": reader.lines[0], "unusable": True}
    return {**content, "failure": reader.failure} if reader.failure else content


def read_nvidia_state_apart(timeout_s: float) -> JsonObject | None:
    """``read_nvidia_state`` in a separate process, which a driver may block forever; None: no answer.

    No process on the GPUs counts as the job's.

    Args:
        timeout_s: how long it may take, in seconds. An answer that names a hanging call comes just before.
    """
    import json

    from saferun.linux.child_output import run_program
    from saferun.linux.children import SpawnError

    argv = [sys.executable, "-c", _PROGRAM, str(time.monotonic() + timeout_s - _REST_S), *sys.path]
    try:
        content = json.loads(run_program(argv, os.environ, timeout_s)[0])
    except (SpawnError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("gpus"), list) else None


def print_state(deadline: float) -> None:
    """Print what is known by a deadline (monotonic seconds) as JSON, and exit even if a driver call hangs."""
    import json

    content = read_nvidia_state(deadline)
    for gpu in content["gpus"]:
        if "processes" in gpu:
            gpu["processes"] = gpu["processes"][:_MOST_PROCESSES]
    os.write(1, json.dumps(content).encode())
    os._exit(0)


class NvidiaReader:
    """Queries the library. Every call may fail on its own; unexpected failures are recorded.

    Args:
        nvml: ``pynvml`` or a stand-in.
        ours: the pids of the job.

    Attributes:
        snapshot: what has been read so far.
        failure: why the library could not be initialized, or tells of no GPU.
        lines: the same for users, if more is known.
        is_broken: whether that is a fault of the host: the driver is not loaded, or a GPU is lost.
    """

    def __init__(self, nvml: Any, ours: frozenset[int]) -> None:  # noqa: ANN401
        self.snapshot = Snapshot()
        self.failure = ""
        self.lines: tuple[str, ...] = ()
        self.is_broken = False
        self._nvml = nvml
        self._ours = ours

    def read(self) -> None:
        """Fill the snapshot."""
        self.snapshot.step = "nvmlInit"
        try:
            self._nvml.nvmlInit()
        except Exception as error:
            self._explain_start(error)
            return
        facts = self.snapshot.facts
        if driver := self._ask(facts, "nvmlSystemGetDriverVersion"):
            facts["driver"] = _text(driver)
        if cuda := self._ask(facts, "nvmlSystemGetCudaDriverVersion"):
            facts["runtime"] = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
        handles: dict[int, Any] = {}
        count = self._ask(facts, "nvmlDeviceGetCount")
        if count is None:
            self.failure = "NVML does not tell how many GPUs there are"
            self.is_broken = "fault" in facts
        for index in range(count or 0):
            gpu: dict[str, Any] = {"index": index}
            self.snapshot.gpus.append(gpu)
            handle = self._ask(gpu, _GET_HANDLE, index)
            if handle is not None:
                handles[index] = handle
                self._read_gpu(gpu, handle)
            elif "denied" not in gpu:
                gpu.setdefault("fault", f"does not answer (NVML: {_first(gpu.get('errors'))})")
        self._guarded(facts, self._read_direct_access, handles)
        self.snapshot.step = ""
        self._ask(facts, "nvmlShutdown")
        self.snapshot.step = ""

    def _explain_start(self, error: Exception) -> None:
        code = getattr(error, "value", None)
        if code in {_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED}:
            self.failure = "no NVIDIA driver here"
            self.is_broken = code == _DRIVER_NOT_LOADED
            return
        self.is_broken = code in _OF_THE_HOST
        self.failure = f"NVML: {error_text(error)}"
        if code == _VERSION_MISMATCH:
            self.lines = ("NVIDIA's library and kernel module are of different versions: reload the driver or reboot",)

    def _read_gpu(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401 - an opaque pointer
        for read in (self._read_identity, self._read_load, self._read_processes, self._read_memory_errors,
                     self._read_links, self._read_modes, self._read_fabric):  # fmt: skip
            if "fault" in gpu:
                return
            self._guarded(gpu, read, handle)

    def _guarded(self, noted: dict[str, Any], read: Callable[[dict[str, Any], Any], None], argument: Any) -> None:  # noqa: ANN401
        """An answer of the library that makes no sense costs what was to be read, and no other GPU."""
        try:
            read(noted, argument)
        except Exception as error:
            noted["errors"] = {**noted.get("errors", {}), read.__name__.lstrip("_"): error_text(error)}

    def _read_identity(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        self._put(gpu, "name", _text, "nvmlDeviceGetName", handle)
        self._put(gpu, "uuid", _text, "nvmlDeviceGetUUID", handle)
        # The library writes the domain with eight digits, all others with four.
        self._put(gpu, "pci", lambda pci: _text(pci.busId).lower().removeprefix("0000"), "nvmlDeviceGetPciInfo", handle)

    def _read_load(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        if (rates := self._ask(gpu, "nvmlDeviceGetUtilizationRates", handle)) is not None:
            gpu["busy_percent"], gpu["memory_busy_percent"] = int(rates.gpu), int(rates.memory)
        if (memory := self._ask(gpu, "nvmlDeviceGetMemoryInfo", handle)) is not None:
            gpu["memory_used_bytes"], gpu["memory_total_bytes"] = int(memory.used), int(memory.total)
        self._put(gpu, "temperature_c", None, "nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU)
        self._put(gpu, "clock_mhz", None, "nvmlDeviceGetClockInfo", handle, _CLOCK_SM)
        self._put(gpu, "clock_max_mhz", None, "nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM)
        self._put(gpu, "power_w", _thousandths, "nvmlDeviceGetPowerUsage", handle)
        self._put(gpu, "power_limit_w", _thousandths, "nvmlDeviceGetEnforcedPowerLimit", handle)
        if (bits := self._ask(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)) is not None:
            gpu["clock_reasons"] = bits
            causes = [cause for mask, cause in _SLOWDOWNS if bits & mask]
            if causes or bits & _HW_SLOWDOWN:
                gpu["slowed_by"] = causes or ["the hardware"]

    def _read_processes(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        listed = self._ask(gpu, "nvmlDeviceGetComputeRunningProcesses", handle)
        if listed is not None:
            gpu["processes"] = owned([(int(one.pid), one.usedGpuMemory, "") for one in listed], self._ours)

    def _read_memory_errors(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        for key, kind, counter in (
            ("ecc_uncorrected", _UNCORRECTED, _VOLATILE),
            ("ecc_corrected", _CORRECTED, _VOLATILE),
            ("ecc_uncorrected_ever", _UNCORRECTED, _AGGREGATE),
            ("ecc_corrected_ever", _CORRECTED, _AGGREGATE),
        ):
            self._put(gpu, key, None, "nvmlDeviceGetTotalEccErrors", handle, kind, counter)
        if (rows := self._ask(gpu, "nvmlDeviceGetRemappedRows", handle)) is not None:
            corrected, uncorrected, pending, failed = rows
            gpu["remapped_rows"] = [corrected, uncorrected]
            gpu["remapping_pending"], gpu["remapping_failed"] = bool(pending), bool(failed)
            return  # where rows are remapped, pages are not retired
        pages = [self._ask(gpu, "nvmlDeviceGetRetiredPages", handle, cause) for cause in _RETIRED_CAUSES]
        if None not in pages:
            gpu["retired_pages"] = [len(some) for some in pages]
        self._put(gpu, "retirement_pending", bool, "nvmlDeviceGetRetiredPagesPendingStatus", handle)

    def _read_links(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        for key, call in (
            ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
            ("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
            ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
            ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
        ):
            self._put(gpu, key, None, call, handle)
        states: list[int] = []
        for link in range(_MAX_LINKS):
            state = self._ask(gpu, "nvmlDeviceGetNvLinkState", handle, link, quiet=True)
            if state is None:
                break
            states.append(state)
        if states:
            gpu["nvlinks"], gpu["nvlinks_up"] = len(states), sum(map(bool, states))
        self._read_fields(gpu, handle)

    def _read_fields(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        values = self._ask(gpu, "nvmlDeviceGetFieldValues", handle, list(_FIELDS.values()))
        for key, value in zip(_FIELDS, values or (), strict=False):
            if value.nvmlReturn == 0 and 0 <= value.valueType < len(_VALUE_MEMBERS):
                gpu[key] = getattr(value.value, _VALUE_MEMBERS[value.valueType])
        if wanted := gpu.get("recovery_action"):
            gpu["recovery"] = _RECOVERY_ACTIONS.get(wanted, f"recovery action {wanted}")

    def _read_modes(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        self._put(gpu, "persistence", bool, "nvmlDeviceGetPersistenceMode", handle)
        self._put(gpu, "mig", lambda modes: bool(modes[0]), "nvmlDeviceGetMigMode", handle)
        self._put(
            gpu, "compute_mode", lambda mode: _COMPUTE_MODES.get(mode, str(mode)), "nvmlDeviceGetComputeMode", handle
        )

    def _read_fabric(self, gpu: dict[str, Any], handle: Any) -> None:  # noqa: ANN401
        """The state of NVLink behind NVSwitches, from Hopper on."""
        # From CUDA 14 on only the second one is left.
        for version in ("", "V"):
            shape = getattr(self._nvml, f"c_nvmlGpuFabricInfo{version}_t", None)
            info = shape and shape()
            if info and self._ask_into(gpu, f"nvmlDeviceGetGpuFabricInfo{version}", handle, info):
                break
        else:
            return
        state = _FABRIC_STATES.get(int(info.state))
        if state is not None:
            gpu["fabric_state"], gpu["fabric_status"] = state, int(info.status)
            gpu["fabric_cluster"] = bytes(info.clusterUuid).hex() if any(info.clusterUuid) else ""

    def _ask_into(self, gpu: dict[str, Any], name: str, handle: Any, info: Any) -> bool:  # noqa: ANN401
        import ctypes

        return self._ask(gpu, name, handle, ctypes.byref(info), quiet=True) is not None

    def _read_direct_access(self, facts: dict[str, Any], handles: dict[int, Any]) -> None:
        """The pairs of GPUs that cannot read each other's memory."""
        missing = []
        numbers = list(handles)[:_MOST_COMPARED]
        for index, one in enumerate(numbers):
            for other in numbers[index + 1 :]:
                pair = handles[one], handles[other]
                status = self._ask({}, "nvmlDeviceGetP2PStatus", *pair, _P2P_READ, quiet=True)
                if status is None:
                    return
                if status:
                    missing.append([one, other, int(status)])
        if missing:
            facts["p2p_missing"] = missing

    def _put(
        self,
        gpu: dict[str, Any],
        key: str,
        convert: Callable[[Any], Any] | None,
        call: str,
        *arguments: Any,  # noqa: ANN401
    ) -> None:
        """Store the result of a call under a key, if there is one."""
        answer = self._ask(gpu, call, *arguments)
        if answer is not None:
            gpu[key] = answer if convert is None else convert(answer)

    def _ask(self, noted: dict[str, Any], call: str, *arguments: Any, quiet: bool = False) -> Any:  # noqa: ANN401
        """The result of a call, or None. Errors other than "not supported" are recorded."""
        index = noted.get("index")
        self.snapshot.step = call if index is None else f"{call} of GPU {index}"
        try:
            return getattr(self._nvml, call)(*arguments)
        except Exception as error:
            code = getattr(error, "value", None)
            if code == _GPU_IS_LOST:
                noted["fault"] = f"fell off the bus (NVML: {error_text(error)})"
            elif code == _RESET_REQUIRED:
                noted["fault"] = f"reset needed (NVML: {error_text(error)})"
            elif code == _NO_PERMISSION:
                # Others than root are refused single facts, of GPUs that CUDA may use: a divided GPU's memory.
                if call == _GET_HANDLE:
                    noted["denied"] = True  # not granted by the container runtime or the scheduler
            elif not quiet and code not in _NOT_SUPPORTED and not isinstance(error, AttributeError):
                noted["errors"] = {**noted.get("errors", {}), call: error_text(error)}
            return None


def _thousandths(value: int) -> float:
    return value / 1000


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def error_text(error: Exception) -> str:
    """The message of an error of the library."""
    return str(error) or type(error).__name__


def _first(errors: dict[str, str] | None) -> str:
    return next(iter((errors or {}).values()), "no handle")
