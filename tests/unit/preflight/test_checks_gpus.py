"""What the state of the GPUs means for a launch: NVML, /dev and sysfs are stand-ins."""

# ruff: noqa: N815 - a stand-in has the names of what it stands for

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from saferun.diagnosis.host_fault import found_faults
from saferun.linux import nvidia_gpus
from saferun.linux.nvidia_gpus import read_nvidia_state, read_nvidia_state_apart
from saferun.preflight.checks import gpus
from saferun.preflight.checks.gpus import check_gpus
from saferun.preflight.outcome import findings_of
from saferun.preflight.results import UNUSABLE
from tests.unit.preflight.fake_nvml import GIB, MIB, MISMATCH, NO_DRIVER, OTHER, FabricInfo, Gpu, Nvml, launch
from tests.unit.preflight.host_roots import Root

CLUSTER = bytes(range(1, 17))
SET_UP = (3, 0, b"")
NO_DIRECT_ACCESS = 5  # NVML_P2P_STATUS_NOT_SUPPORTED


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path)
    root.write("dev/nvidiactl")
    # The ranks' torch: that of an interpreter which is not run.
    root.write("venv/pyvenv.cfg", "version = 3.12.1\n")
    root.write(
        "venv/lib/python3.12/site-packages/torch/version.py",
        "__version__ = '2.13.0+cu130'\ncuda = '13.0'\nhip = None\n",
    )
    return root


# ----------------------------------------------------------------------------------------------------------- no trouble


def test_without_a_device_node_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On most hosts this check is two looks at the file system."""
    monkeypatch.setattr(gpus, "_ask_nvidia", lambda nvml: pytest.fail(f"asked {nvml}"))
    result = check_gpus(Root(tmp_path).context())
    assert (result.verdict, result.facts) == ("ok", (("gpus", "0"),))


def test_healthy_gpus_are_counted_and_named(root: Root) -> None:
    result = check_gpus(launch(root), nvml=Nvml(Gpu(), Gpu()))
    assert (result.verdict, result.message) == ("ok", "2 GPUs (NVIDIA H200)")
    assert dict(result.facts)["driver"] == "580.95.05"
    assert dict(result.facts)["visible"] == "2"


def test_a_desktop_and_an_idle_context_share_a_gpu_with_anybody(root: Root) -> None:
    """A laptop's desktop keeps some hundred MiB on the only GPU there is."""
    desktop = Gpu(total=8 * GIB, used=1 * GIB, processes=[(OTHER, 300 * MIB)])
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(desktop)).verdict == "ok"


def test_ranks_that_hide_every_gpu_want_none(root: Root) -> None:
    """A job on the processors, for a readable traceback: the GPUs may be as full and as broken as they like."""
    full = Gpu(used=140 * GIB, processes=[(OTHER, 139 * GIB)], uncorrected=3)
    result = check_gpus(launch(root, {"CUDA_VISIBLE_DEVICES": ""}), nvml=Nvml(full, Gpu(lost=True)))
    assert result.verdict == "ok"


# ----------------------------------------------------------------------------------------------------------------- busy


def test_somebody_else_s_job_on_a_gpu_is_told_and_waited_for_where_no_other_is_free(root: Root) -> None:
    """A script may choose another GPU, and no retry waits for the first one."""
    busy = Gpu(used=61 * GIB, processes=[(OTHER, 60 * GIB)])
    for nvml, nproc in ((Nvml(Gpu(), busy), 2), (Nvml(busy, Gpu(), Gpu()), 1)):
        result = check_gpus(launch(root, nproc=nproc), nvml=nvml)
        assert (result.verdict, result.class_name, result.transient) == ("warn", "gpu_busy", False)
    result = check_gpus(launch(root), nvml=Nvml(Gpu(), busy))
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(busy)).transient
    assert result.message.startswith(f"GPU 1 is in use: pid {OTHER} (")
    assert result.message.endswith(") holds 60 GiB of its 140 GiB")


def test_only_the_gpus_of_the_launch_matter(root: Root) -> None:
    """On a shared host one rank takes the first GPU, or the one that the environment shows it."""
    nvml = Nvml(Gpu(), Gpu(used=61 * GIB, processes=[(OTHER, 60 * GIB)]))
    assert check_gpus(launch(root, nproc=1), nvml=nvml).verdict == "ok"
    assert check_gpus(launch(root, {"CUDA_VISIBLE_DEVICES": "1"}, nproc=1), nvml=nvml).verdict == "warn"
    assert check_gpus(launch(root, {"CUDA_VISIBLE_DEVICES": "GPU-0001"}, nproc=1), nvml=nvml).verdict == "warn"


def test_without_a_launch_each_gpu_of_the_host_is_judged(root: Root) -> None:
    """`saferunctl health` speaks for the host: a job of eight ranks would meet the broken fourth GPU."""
    host = launch(root, {"CUDA_VISIBLE_DEVICES": "0"}, nproc=1, is_of_host=True, spans_hosts=True)
    eight = [Gpu(fabric=SET_UP) for _ in range(8)]
    assert check_gpus(host, nvml=Nvml(*eight)).verdict == "ok"
    for broken, message in (
        (Gpu(lost=True), "GPU 3 fell off the bus"),
        (Gpu(fabric=(3, 999, b"")), "GPU 3: NVLink could not be set up"),
        (Gpu(fabric=SET_UP, alone=NO_DIRECT_ACCESS), "GPU 3 cannot access the memory of the others"),
    ):
        result = check_gpus(host, nvml=Nvml(*eight[:3], broken, *eight[4:]))
        assert result.message.startswith(message)
        assert found_faults(findings_of([result._replace(name="gpus")]), 1, is_launch=False)[0].kind == "gpu"


@pytest.mark.parametrize("shown", ["0", "", None])
def test_without_a_launch_somebody_s_job_on_another_gpu_is_no_word_worth(root: Root, shown: str | None) -> None:
    """A shared host is fit although another job holds its other GPUs."""
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    host = launch(root, environ, nproc=1, is_of_host=True, spans_hosts=True)
    busy = Gpu(used=61 * GIB, processes=[(OTHER, 60 * GIB)])
    assert check_gpus(host, nvml=Nvml(Gpu(), busy)).verdict == "ok"
    assert check_gpus(host, nvml=Nvml(busy, Gpu())).class_name == ("" if shown == "" else "gpu_busy")
    # What is broken counts on each GPU.
    assert check_gpus(host, nvml=Nvml(Gpu(), Gpu(lost=True))).class_name == "gpu_hardware_error"


def test_with_no_memory_left_anywhere_there_is_nothing_to_start_on(root: Root) -> None:
    full = [Gpu(used=140 * GIB - 100 * MIB, processes=[(OTHER, 139 * GIB)]) for _ in range(2)]
    result = check_gpus(launch(root), nvml=Nvml(*full))
    assert (result.verdict, result.transient) == ("warn", True), "the script may do without any"
    half = [full[0], Gpu()]
    assert not check_gpus(launch(root), nvml=Nvml(*half)).transient


def test_a_torch_that_cannot_use_these_gpus_is_not_stopped_by_them(root: Root) -> None:
    """A job on processors beside somebody's job on the GPUs."""
    root.write(
        "venv/lib/python3.12/site-packages/torch/version.py", "__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n"
    )
    full = Gpu(used=140 * GIB, processes=[(OTHER, 139 * GIB)])
    assert check_gpus(launch(root, nproc=8), nvml=Nvml(full)).verdict == "warn"
    assert check_gpus(launch(root, nproc=8), nvml=Nvml(Gpu())).verdict == "ok"


def test_an_exclusive_gpu_is_taken_by_whoever_has_it(root: Root) -> None:
    """CUDA says "all CUDA-capable devices are busy or unavailable", however little memory is in use."""
    taken = Gpu(mode=3, processes=[(OTHER, 300 * MIB)])
    result = check_gpus(launch(root, nproc=1), nvml=Nvml(taken))
    assert (result.verdict, result.class_name, result.transient) == ("warn", "gpu_busy", True)
    assert "is in Exclusive Process mode, and " in result.message


def test_a_gpu_that_takes_no_computing_is_told_and_not_waited_for(root: Root) -> None:
    result = check_gpus(launch(root, nproc=1), nvml=Nvml(Gpu(mode=2)))
    assert (result.verdict, result.transient) == ("warn", False)
    assert "is in compute mode Prohibited" in result.message
    assert "-c 0" in result.hint


def test_a_gpu_that_takes_no_computing_by_its_setting_blames_no_host(root: Root) -> None:
    """An administrator sets it. What is broken beside it counts as before."""
    for host in (launch(root, nproc=1), launch(root, nproc=1, is_of_host=True)):
        result = check_gpus(host, nvml=Nvml(Gpu(mode=2)))
        assert found_faults(findings_of([result._replace(name="gpus")]), 1, is_launch=False) == ()
    result = check_gpus(launch(root, is_of_host=True), nvml=Nvml(Gpu(mode=2), Gpu(lost=True)))
    assert result.class_name == "gpu_hardware_error"


def test_memory_of_the_attempt_before_is_waited_for(root: Root) -> None:
    """The driver gives a dead rank's memory back a moment later, or its process hangs in the driver."""
    dying = Gpu(used=61 * GIB, processes=[(4_100_000, 60 * GIB)])
    result = check_gpus(launch(root, nproc=1, attempt=1, old_pids=(4_100_000,)), nvml=Nvml(dying))
    assert (result.class_name, result.transient) == ("gpu_busy", True)
    assert "a rank of the previous attempt" in result.message
    unowned = Gpu(used=61 * GIB)
    result = check_gpus(launch(root, nproc=1, attempt=1, old_pids=(4_100_000,)), nvml=Nvml(unowned))
    assert (result.class_name, result.transient) == ("gpu_busy", True)
    assert result.message == "61 GiB of GPU 0's 140 GiB are in use, by no process that can be seen from here"
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(unowned)).verdict == "ok", "nothing of ours was there before"


def test_a_process_out_of_sight_is_told_as_such(root: Root) -> None:
    """In a container the driver names pids of the host."""
    busy = Gpu(used=61 * GIB, processes=[(4_100_001, 60 * GIB)])
    result = check_gpus(launch(root, nproc=1), nvml=Nvml(busy))
    assert "a process that cannot be seen from here holds 60 GiB" in result.message


def test_sizes_that_the_driver_does_not_tell_are_none(root: Root) -> None:
    unknown = Gpu(processes=[(OTHER, None)])
    assert check_gpus(launch(root, nproc=1), nvml=Nvml(unknown)).verdict == "ok"


# --------------------------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"uncorrected": 3}, "GPU 0 has had 3 uncorrectable memory errors"),
        ({"rows": (0, 1, 1, 0)}, "GPU 0 has memory rows to be remapped at the next reset"),
        ({"rows": (0, 1, 0, 1)}, "GPU 0 has defective memory (row remapping failed)"),
    ],
)
def test_memory_that_is_failing_is_told(root: Root, facts: dict[str, Any], words: str) -> None:
    result = check_gpus(launch(root, nproc=1), nvml=Nvml(Gpu(**facts)))
    assert (result.verdict, result.message, result.class_name) == ("warn", words, "gpu_hardware_error")
    assert result.hint
    assert not result.transient


def test_a_gpu_that_fell_off_the_bus_is_told(root: Root) -> None:
    """CUDA does not start with it; ranks that hide it, or use none, do."""
    result = check_gpus(launch(root), nvml=Nvml(Gpu(), Gpu(lost=True)))
    assert (result.verdict, result.class_name, result.transient) == ("warn", "gpu_hardware_error", False)
    assert "GPU 1 fell off the bus" in result.message


def test_what_no_rank_can_use_is_marked_and_not_what_is_merely_worth_a_repair(root: Root) -> None:
    """A spare takes the place of the host for it. Ranks that use no GPU, or too few of them, can do without."""

    def unusable(nvml: Nvml, **more: Any) -> list[str]:
        return [what for name, what in check_gpus(launch(root, **more), nvml=nvml).facts if name == UNUSABLE]

    lost = Nvml(Gpu(), Gpu(lost=True))
    assert unusable(lost) == ["GPU 1"]
    assert unusable(lost, nproc=1) == []
    assert unusable(Nvml(Gpu(), Gpu()), nproc=3) == ["1 GPU too few"]
    assert unusable(Nvml(Gpu(rows=(0, 1, 1, 1), uncorrected=3), Gpu(used=140 * GIB))) == []
    assert unusable(lost, environ={"CUDA_VISIBLE_DEVICES": ""}) == []
    root.write("venv/lib/python3.12/site-packages/torch/version.py", "__version__ = '2.13.0+cpu'\ncuda = None\n")
    assert unusable(lost) == []


def test_the_worst_of_several_faults_comes_first(root: Root) -> None:
    busy = Gpu(used=61 * GIB, processes=[(OTHER, 60 * GIB)])
    result = check_gpus(launch(root), nvml=Nvml(busy, Gpu(lost=True)))
    assert result.verdict == "warn"
    assert result.message.startswith("GPU 1 fell off the bus")
    assert "GPU 0 is in use" in result.message
    assert not result.transient, "what is broken does not go away by itself"


# -------------------------------------------------------------------------------------- NVSwitches, IMEX, direct access


def test_gpus_whose_nvswitches_are_set_up_are_in_order(root: Root) -> None:
    """As an HGX H200 host has it; GPUs without NVSwitches say that they are not supported, or nothing."""
    for fabric in (SET_UP, None, (0, 0, b"")):
        result = check_gpus(launch(root, spans_hosts=True), nvml=Nvml(Gpu(fabric=fabric), Gpu(fabric=fabric)))
        assert result.verdict == "ok", fabric


@pytest.mark.parametrize("state", [1, 2])
def test_nvswitches_that_nobody_has_set_up_are_told(root: Root, state: int) -> None:
    """CUDA fails with error 802, "system not yet initialized"."""
    result = check_gpus(launch(root), nvml=Nvml(*(Gpu(fabric=(state, 0, b"")) for _ in "01")))
    assert (result.verdict, result.class_name, result.transient) == ("warn", "missing_gpu", False)
    assert result.message == "GPUs 0-1: the NVIDIA fabric manager has not set up the NVSwitches (CUDA error 802)"
    assert "systemctl start nvidia-fabricmanager" in result.hint


def test_a_gpu_whose_nvlink_failed_is_told(root: Root) -> None:
    result = check_gpus(launch(root), nvml=Nvml(Gpu(fabric=SET_UP), Gpu(fabric=(3, 999, b""))))
    assert result.message == "GPU 1: NVLink could not be set up (NVML status 999)"


def test_a_newer_nvml_has_the_second_version_of_the_call(root: Root) -> None:
    class Newer(Nvml):
        c_nvmlGpuFabricInfo_t = None  # type: ignore[assignment]
        c_nvmlGpuFabricInfoV_t = FabricInfo
        nvmlDeviceGetGpuFabricInfoV = Nvml.nvmlDeviceGetGpuFabricInfo

    result = check_gpus(launch(root), nvml=Newer(Gpu(fabric=SET_UP), Gpu(fabric=(2, 0, b""))))
    assert result.message.startswith("GPU 1: the NVIDIA fabric manager")


def test_nvlink_between_hosts_needs_an_imex_channel(root: Root) -> None:
    """GB200 NVL72: one NVLink domain of several hosts."""
    nvml = Nvml(*(Gpu(name="NVIDIA GB200", fabric=(3, 0, CLUSTER)) for _ in "01"))
    result = check_gpus(launch(root, spans_hosts=True), nvml=nvml)
    assert result.verdict == "warn"
    assert "there is no IMEX channel (/dev/nvidia-caps-imex-channels)" in result.message
    assert check_gpus(launch(root), nvml=nvml).verdict == "ok", "one host needs none"
    assert check_gpus(launch(root, {"NCCL_MNNVL_ENABLE": "0"}, spans_hosts=True), nvml=nvml).verdict == "ok"
    root.write("dev/nvidia-caps-imex-channels/channel0")
    assert check_gpus(launch(root, spans_hosts=True), nvml=nvml).verdict == "ok"


def test_a_missing_imex_channel_blames_no_host(root: Root) -> None:
    """Schedulers make channels for each job: an idle host has none, and a job without one is not the host's fault."""
    nvml = Nvml(*(Gpu(name="NVIDIA GB200", fabric=(3, 0, CLUSTER)) for _ in "01"))
    assert check_gpus(launch(root, spans_hosts=True, is_of_host=True), nvml=nvml).verdict == "ok"
    result = check_gpus(launch(root, spans_hosts=True), nvml=nvml)
    assert (result.verdict, result.class_name) == ("warn", "")


def test_one_gpu_without_direct_access_is_told_and_a_host_without_any_is_not(root: Root) -> None:
    """A desktop's GPUs have no direct access at all."""
    alone = Nvml(Gpu(), Gpu(), Gpu(alone=NO_DIRECT_ACCESS), Gpu())
    result = check_gpus(launch(root, nproc=4), nvml=alone)
    assert result.message == "GPU 2 cannot access the memory of the others (P2P), which access each other's"
    assert check_gpus(launch(root, nproc=2), nvml=alone).verdict == "ok", "no rank uses it"
    none = Nvml(*(Gpu(alone=NO_DIRECT_ACCESS) for _ in "0123"))
    assert check_gpus(launch(root, nproc=4), nvml=none).verdict == "ok"
    bridged = Nvml(Gpu(), Gpu(), Gpu(alone=NO_DIRECT_ACCESS))
    assert check_gpus(launch(root, nproc=3), nvml=bridged).verdict == "ok", "two with a bridge, and one"


# --------------------------------------------------------------------------------------------------- number and driver


def test_more_ranks_than_gpus_are_told(root: Root) -> None:
    """NCCL refuses: "Duplicate GPU detected"."""
    result = check_gpus(launch(root, nproc=8), nvml=Nvml(Gpu(), Gpu()))
    assert (result.verdict, result.class_name) == ("warn", "missing_gpu")
    assert result.message == "8 ranks have 2 GPUs between them"
    masked = check_gpus(launch(root, {"CUDA_VISIBLE_DEVICES": "0"}), nvml=Nvml(Gpu(), Gpu()))
    assert "--nproc-per-node 1, or look at CUDA_VISIBLE_DEVICES" in masked.hint


@pytest.mark.parametrize(
    "environ",
    [{"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {"SLURM_NTASKS_PER_NODE": "2"}],
)
def test_a_task_for_each_rank_sees_its_own_gpu_only(root: Root, environ: dict[str, str]) -> None:
    """With --gpus-per-task=1 each of eight launchers of a host is shown one GPU."""
    context = launch(root, {**environ, "CUDA_VISIBLE_DEVICES": "0"}, nproc=8)
    assert check_gpus(context, nvml=Nvml(Gpu())).verdict == "ok"


def test_a_driver_that_is_too_old_for_torch_is_told(root: Root) -> None:
    result = check_gpus(launch(root), nvml=Nvml(Gpu(), Gpu(), cuda=12040))
    assert (result.verdict, result.class_name) == ("warn", "missing_gpu")
    assert result.message == "the driver serves CUDA 12.4, and torch is built for CUDA 13.0: it will see no GPU"
    assert check_gpus(launch(root), nvml=Nvml(Gpu(), Gpu(), cuda=13010)).verdict == "ok"


def test_the_torch_of_saferuns_own_python_says_nothing_of_the_jobs_on_a_host(root: Root) -> None:
    """Each node of a cluster would be taken out of service for it."""
    result = check_gpus(launch(root, is_of_host=True), nvml=Nvml(Gpu(), Gpu(), cuda=12040))
    assert result.verdict == "ok"


def test_a_newer_driver_library_that_is_brought_along_serves_torch(root: Root) -> None:
    nvml = Nvml(Gpu(), Gpu(), cuda=12040)
    environ = {"LD_LIBRARY_PATH": "/usr/local/cuda-13.0/compat:/lib"}
    assert check_gpus(launch(root, environ), nvml=nvml).verdict == "ok"


def test_a_driver_that_was_updated_without_a_reboot_is_told(root: Root) -> None:
    result = check_gpus(launch(root), nvml=Nvml(start=MISMATCH))
    assert (result.verdict, result.class_name) == ("warn", "missing_gpu")
    assert "different versions" in result.message


def test_a_container_with_the_node_and_without_the_library_is_passed_over(root: Root) -> None:
    result = check_gpus(launch(root), nvml=Nvml(start=NO_DRIVER))
    assert result.verdict == "skipped"


def test_a_driver_that_does_not_answer_is_named_with_the_call_that_hangs(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_ask_nvidia", lambda _nvml: {"gpus": [], "stuck_in": "nvmlInit", "stuck_s": 20.0})
    result = check_gpus(launch(root))
    assert result.verdict == "warn"
    assert result.message == "the GPUs' driver does not answer (nvmlInit)"


# --------------------------------------------------------------------------------------------------------- asked apart


def test_the_driver_is_asked_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds can then be killed; what it answers comes back."""
    (tmp_path / "pynvml.py").write_text(
        "from tests.unit.preflight.test_checks_gpus import Gpu, Nvml\n"
        "nvml = Nvml(Gpu(), Gpu(uncorrected=1))\n"
        "globals().update({name: getattr(nvml, name) for name in dir(nvml) if name.startswith('nvml')})\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    state = read_nvidia_state_apart(30.0)
    assert state is not None
    assert [gpu.get("ecc_uncorrected") for gpu in state["gpus"]] == [0, 1]
    assert state["gpus"][0]["uuid"] == "GPU-0000"


def test_a_driver_that_holds_its_caller_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("import threading\ndef nvmlInit():\n    threading.Event().wait()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    state = read_nvidia_state_apart(3.0)
    assert state is not None
    assert state["stuck_in"] == "nvmlInit"


def test_a_library_that_crashes_its_process_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("import os\nos._exit(11)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert read_nvidia_state_apart(30.0) is None


def test_without_the_python_library_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml cannot be imported" in read_nvidia_state(0.0)["failure"]
    assert nvidia_gpus.error_text(ValueError()) == "ValueError"
