"""What sound hosts show of their GPUs, which blames none of them: NVML, /dev and sysfs are stand-ins."""

# ruff: noqa: N802 - a stand-in has the names of what it stands for

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.diagnosis.host_fault import HostFault, found_faults
from saferun.linux.nvidia_gpus import read_nvidia_state
from saferun.preflight.check_process import HostChecks
from saferun.preflight.checks import gpus
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.gpus import check_gpus
from saferun.preflight.driver import PreflightRun
from saferun.preflight.outcome import findings_of
from saferun.preflight.results import UNUSABLE, CheckResult
from tests.unit.preflight.fake_nvml import GIB, NO_DRIVER, OTHER, Gpu, Nvml, NvmlError, launch
from tests.unit.preflight.host_roots import Root

DENIED = NvmlError(4, "Insufficient Permissions")
TORCH = "__version__ = '2.13.0+cu130'\ncuda = '13.0'\nhip = None\n"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path)
    root.write("dev/nvidiactl")
    root.write("venv/pyvenv.cfg", "version = 3.12.1\n")
    root.write("venv/lib/python3.12/site-packages/torch/version.py", TORCH)
    return root


def blamed(result: CheckResult) -> tuple[HostFault, ...]:
    """What ``saferunctl health`` would take the host out of use for."""
    return found_faults(findings_of([result._replace(name="gpus")]), 1, is_launch=False)


class Granted(Nvml):
    """The first GPU is the job's."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if index:
            raise DENIED
        return super().nvmlDeviceGetHandleByIndex(index)


# ----------------------------------------------------------------------------------------------------------- permission


def test_a_call_that_only_root_may_make_takes_no_gpu_away(root: Root) -> None:
    """With MIG on, others than root are not told the memory of the whole GPU, and CUDA works."""

    class Divided(Nvml):
        def nvmlDeviceGetMemoryInfo(self, _gpu: Gpu) -> Any:
            raise DENIED

    result = check_gpus(launch(root, gpus=2), nvml=Divided(Gpu(), Gpu()))
    assert (result.verdict, result.message) == ("ok", "2 GPUs (NVIDIA H200)")


def test_a_gpu_that_was_not_granted_is_none_of_the_job_s(root: Root) -> None:
    result = check_gpus(launch(root, nproc=1), nvml=Granted(Gpu(), Gpu(uncorrected=3)))
    assert (result.verdict, result.message) == ("ok", "1 GPU (NVIDIA H200)")


# --------------------------------------------------------------------------------------------------------- slow drivers


def test_a_driver_that_sets_up_one_gpu_after_the_other_is_slow_and_not_broken(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs without persistence mode take longer than a check may."""
    state = {"gpus": [{"index": 0}, {"index": 1}], "stuck_in": "nvmlDeviceGetHandleByIndex of GPU 2", "stuck_s": 4.0}
    monkeypatch.setattr(gpus, "_ask_nvidia", lambda _nvml: state)
    result = check_gpus(launch(root, nproc=8, gpus=8))
    assert (result.verdict, result.class_name, blamed(result)) == ("warn", "", ())
    assert result.message == "the GPUs' driver is slow (nvmlDeviceGetHandleByIndex of GPU 2)"
    assert "nvidia-smi -pm 1" in result.hint
    assert UNUSABLE not in dict(result.facts), "the other GPUs have not been read yet"


def test_one_call_that_lasts_blames_the_host(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"gpus": [], "stuck_in": "nvmlInit", "stuck_s": 20.0}
    monkeypatch.setattr(gpus, "_ask_nvidia", lambda _nvml: state)
    result = check_gpus(launch(root, nproc=1, gpus=8))
    assert (result.class_name, result.message) == ("gpu_hardware_error", "the GPUs' driver does not answer (nvmlInit)")
    assert blamed(result)
    assert dict(result.facts)[UNUSABLE] == "the driver"
    of_cpus = launch(root, nproc=1)._replace(environ={"CUDA_VISIBLE_DEVICES": ""})
    assert UNUSABLE not in dict(check_gpus(of_cpus).facts)


def test_the_time_of_a_call_begins_with_the_call() -> None:
    class Slow(Nvml):
        def nvmlInit(self) -> None:
            time.sleep(0.5)

        def nvmlDeviceGetCount(self) -> int:
            threading.Event().wait()
            return 0

    began_at = time.monotonic()
    state = read_nvidia_state(began_at + 3.0, nvml=Slow())
    assert state["stuck_in"] == "nvmlDeviceGetCount"
    assert 0 <= state["stuck_s"] <= time.monotonic() - began_at - 0.4
    assert "stuck_s" not in read_nvidia_state(time.monotonic() + 30.0, nvml=Nvml(Gpu()))


# ----------------------------------------------------------------------------------------------- a library that is mute


@pytest.mark.parametrize(("code", "words"), [(999, "Unknown Error"), (12, "NVML Shared Library Not Found")])
def test_gpus_that_nobody_could_ask_for_are_not_missing(root: Root, code: int, words: str) -> None:
    """``--gpus 8`` where the library is not on the loader's path, or the scheduler keeps the devices to itself."""
    result = check_gpus(launch(root, gpus=8), nvml=Nvml(start=NvmlError(code, words)))
    assert (result.verdict, blamed(result)) == ("skipped", ())


@pytest.mark.parametrize(
    ("code", "words"), [(10, "Interrupt Request Issue"), (15, "GPU is lost"), (16, "reset required")]
)
def test_a_fault_that_keeps_the_library_from_starting_blames_the_host(root: Root, code: int, words: str) -> None:
    result = check_gpus(launch(root, gpus=8), nvml=Nvml(start=NvmlError(code, words)))
    assert (result.verdict, result.message) == ("warn", "the driver shows 0 GPUs, and 8 are expected")
    assert blamed(result)


def test_a_lost_gpu_that_keeps_the_library_from_counting_blames_the_host(root: Root) -> None:
    class Lost(Nvml):
        def nvmlDeviceGetCount(self) -> int:
            raise NvmlError(15, "GPU is lost")

    assert blamed(check_gpus(launch(root, gpus=8), nvml=Lost(Gpu())))


def test_without_the_python_library_no_gpu_is_missing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"gpus": [], "failure": "pynvml cannot be imported: No module named 'pynvml'"}
    monkeypatch.setattr(gpus, "_ask_nvidia", lambda _nvml: state)
    result = check_gpus(launch(root, gpus=8))
    assert (result.verdict, blamed(result)) == ("skipped", ())


def test_a_library_that_does_not_count_the_gpus_misses_none(root: Root) -> None:
    class Mute(Nvml):
        def nvmlDeviceGetCount(self) -> int:
            raise NvmlError(999, "Unknown Error")

    result = check_gpus(launch(root, gpus=8), nvml=Mute())
    assert (result.verdict, blamed(result)) == ("skipped", ())


def test_gpus_that_were_granted_to_others_are_not_missing(root: Root) -> None:
    """``--gpus 2`` within a job that was given one of them."""
    result = check_gpus(launch(root, nproc=1, gpus=2), nvml=Granted(Gpu(), Gpu()))
    assert (result.verdict, result.message) == ("ok", "1 GPU (NVIDIA H200)")
    assert blamed(check_gpus(launch(root, nproc=1, gpus=3), nvml=Granted(Gpu(), Gpu())))


def test_gpus_whose_driver_is_not_loaded_are_missing(root: Root) -> None:
    result = check_gpus(launch(root, gpus=8), nvml=Nvml(start=NO_DRIVER))
    assert result.message == "the driver shows 0 GPUs, and 8 are expected"
    assert blamed(result)


# ----------------------------------------------------------------------------------------------------- in whose use


def test_ranks_that_run_already_are_not_called_another_job(root: Root) -> None:
    """On one host the checks run beside the ranks, and in a container the driver names pids of the host."""
    busy = Gpu(used=61 * GIB, processes=[(4_100_001, 60 * GIB)])
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(busy)).class_name == "gpu_busy"
    assert check_gpus(launch(root, nproc=1, beside=True), nvml=Nvml(busy)).verdict == "ok"
    assert check_gpus(launch(root, nproc=1, beside=True), nvml=Nvml(Gpu(lost=True))).verdict == "warn"


@pytest.mark.parametrize("beside", [True, False])
def test_the_checks_know_whether_ranks_run(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    seen: list[CheckContext] = []
    monkeypatch.setattr(HostChecks, "start", lambda _self, context, _process, **_: seen.append(context))
    config: Any = SimpleNamespace(hosts=SimpleNamespace(spans_hosts=False))
    nothing: Any = None
    run = PreflightRun(config, nothing, job=nothing, environ={}, print_message=print, warn=print)
    run.check(CheckContext(), print, beside=beside)
    assert [context.beside for context in seen] == [beside]


def test_memory_counts_as_unowned_only_where_the_owners_are_known(root: Root) -> None:
    """Not where they cannot be listed."""
    context = launch(root, nproc=1, attempt=1, old_pids=(4_100_000,))
    assert check_gpus(context, nvml=Nvml(Gpu(used=61 * GIB))).class_name == "gpu_busy"
    assert check_gpus(context, nvml=Nvml(Gpu(used=61 * GIB, processes=None))).verdict == "ok"


def test_an_exclusive_gpu_that_mps_shares_is_not_taken(root: Root) -> None:
    """Its server may be outside of the container, where its name cannot be seen."""
    server = Gpu(mode=3, processes=[(4_100_001, 30 << 20)])
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(server)).verdict == "ok"
    holder = Gpu(mode=3, processes=[(OTHER, 30 << 20)])
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(holder)).class_name == "gpu_busy"
    assert check_gpus(launch(root, {"CUDA_MPS_PIPE_DIRECTORY": "/mps"}, nproc=1), nvml=Nvml(holder)).verdict == "ok"
    mine = launch(root, nproc=1, attempt=1, old_pids=(4_100_001,))
    assert check_gpus(mine, nvml=Nvml(server)).class_name == "gpu_busy", "a rank of the previous attempt is dying"


# ------------------------------------------------------------------------------------------------- between the GPUs


def test_a_gpu_that_belongs_to_no_fabric_has_no_broken_one(root: Root) -> None:
    """The library says "completed", and that the fabric is not supported; and one GPU alone needs none."""
    none = Nvml(*(Gpu(fabric=(3, 3, b"")) for _ in "01"))
    assert check_gpus(launch(root), nvml=none).verdict == "ok"
    failed = [Gpu(fabric=(3, 999, b"")) for _ in "01"]
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(*failed)).verdict == "ok"
    assert check_gpus(launch(root, nproc=1, is_of_host=True), nvml=Nvml(failed[0])).verdict == "ok"
    assert check_gpus(launch(root), nvml=Nvml(*failed)).class_name == "gpu_fabric"


@pytest.mark.parametrize("status", [1, 2, 3, 4])
def test_a_gpu_that_the_board_keeps_apart_is_in_order(root: Root, status: int) -> None:
    """Three behind one PCI switch and one elsewhere: chipset, GPU, topology or the driver's settings."""
    machine = [Gpu(), Gpu(), Gpu(), Gpu(alone=status)]
    assert check_gpus(launch(root, nproc=4), nvml=Nvml(*machine)).verdict == "ok"


@pytest.mark.parametrize("status", [5, 6])
def test_direct_access_is_missed_only_where_there_are_nvlinks(root: Root, status: int) -> None:
    def found(*links: tuple[int, ...]) -> str:
        machine = [Gpu(links=some) for some in links[:3]]
        result = check_gpus(launch(root, nproc=4), nvml=Nvml(*machine, Gpu(links=links[3], alone=status)))
        return result.class_name

    assert found((1, 1), (1, 1), (1, 1), (0, 0)) == "gpu_fabric"
    assert found((), (), (), ()) == ""
    assert found((0, 0), (0, 0), (0, 0), (0, 0)) == "", "no bridge is plugged in"
    assert found((1, 1), (1, 1), (1, 1), ()) == "", "it has no links that could be broken"


def test_only_hosts_that_nvlink_joins_need_an_imex_channel(root: Root) -> None:
    """HGX H100 boards have the UUID of a cluster as well."""
    for name, verdict in (
        ("NVIDIA H100 80GB HBM3", "ok"),
        ("NVIDIA B200", "ok"),
        ("NVIDIA GB200", "warn"),
        ("NVIDIA GB300", "warn"),
        ("NVIDIA GH200 144G HBM3e", "warn"),
    ):
        nvml = Nvml(*(Gpu(name=name, fabric=(3, 0, bytes(range(1, 17)))) for _ in "01"))
        assert check_gpus(launch(root, spans_hosts=True), nvml=nvml).verdict == verdict, name
