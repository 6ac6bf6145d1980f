from __future__ import annotations

from typing import Any

import pytest

from saferun.env.lint.documented import DOCUMENTED
from saferun.env.lint.families import FAMILIES, family_of
from saferun.env.lint.known_names import HostFacts, KnownNames
from saferun.env.lint.rules import lint, names_to_search
from tests.unit.env.lint_samples import (
    TODAY,
    installed,
    only,
)

# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "verdict", "advice"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING", "renamed", "set TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_USE_CUDA_DSA", "misconception", "PYTORCH_USE_CUDA_DSA"),
        ("NCCL_TIMEOUT", "misconception", "init_process_group(timeout=...)"),
        ("RCCL_TIMEOUT", "misconception", "init_process_group(timeout=...)"),
        ("RCCL_DEBUG", "misconception", "set NCCL_DEBUG"),
        ("RCCL_DEBUG_FILE", "misconception", "set NCCL_DEBUG_FILE"),
        ("TORCH_DIST_INIT_BARRIER_TIMEOUT", "misconception", "TORCH_DIST_INIT_BARRIER"),
        ("NCCL_BLOCKING_WAIT", "renamed", "set TORCH_NCCL_BLOCKING_WAIT"),
        ("NCCL_DESYNC_DEBUG", "renamed", "set TORCH_NCCL_DESYNC_DEBUG"),
        ("NCCL_ENABLE_MONITORING", "misconception", "set TORCH_NCCL_ENABLE_MONITORING"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "renamed", "set TORCH_FR_BUFFER_SIZE"),
        ("TORCH_DISTRIBUTED_DETAIL", "misconception", "set TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ("MKL_DEBUG_CPU_TYPE", "misconception", "unset it"),
        ("NCCL_IB_CUDA_SUPPORT", "misconception", "set NCCL_NET_GDR_LEVEL"),
    ],
)
@pytest.mark.parametrize("known", [TODAY, installed("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")])
def test_wrong_names_that_wikis_spread_get_the_right_advice(
    name: str, verdict: str, advice: str, known: KnownNames
) -> None:
    """Nobody finds these by similarity: what people want of them is somewhere else. It holds without a GPU, too."""
    findings = lint({name: "1"}, known, HostFacts())
    if known is not TODAY and verdict == "renamed" and advice.removeprefix("set ") not in known.readers:
        assert findings == ()  # an older torch, for which the old name is the right one
        return
    finding = only(findings, name)
    assert finding.verdict == verdict
    assert advice in f"{finding.sentence}; {finding.hint}"
    assert finding.at_launch
    assert finding.source.startswith("https://")


def test_a_script_that_sets_both_names_makes_no_torch_newer() -> None:
    """The old one is right for as long as torch itself does not read the new one."""
    older = installed()
    known = older._replace(readers={**older.readers, "TORCH_FR_BUFFER_SIZE": ("/home/me/project",)})
    assert lint({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, known, HostFacts()) == ()


def test_a_name_that_the_users_script_reads_is_not_called_unread_at_launch() -> None:
    """Many scripts read NCCL_TIMEOUT themselves and pass it on."""
    known = TODAY._replace(readers={**TODAY.readers, "NCCL_TIMEOUT": ("/home/me/project",)})
    finding = only(lint({"NCCL_TIMEOUT": "1800"}, known, HostFacts()), "NCCL_TIMEOUT")
    assert (finding.verdict, finding.at_launch) == ("uncertain", False)
    assert "/home/me/project" in finding.sentence


def test_an_alias_that_works_as_well_is_no_line_at_launch() -> None:
    """Half of all jobs set PYTORCH_CUDA_ALLOC_CONF, and torch takes it without a word."""
    finding = only(lint({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, TODAY, HostFacts()), "PYTORCH_CUDA_ALLOC_CONF")
    assert (finding.verdict, finding.at_launch) == ("renamed", False)


def test_a_name_that_something_reads_is_no_finding() -> None:
    assert lint({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, TODAY, HostFacts()) == ()


def test_a_name_that_nothing_reads_is_unknown_and_the_searched_libraries_are_named() -> None:
    finding = only(lint({"NCCL_FLUX_CAPACITOR": "1"}, TODAY, HostFacts()), "NCCL_FLUX_CAPACITOR")
    assert finding.verdict == "unknown name"
    assert "no library that is installed here reads it" in finding.sentence
    assert "libnccl.so.2" in finding.sentence
    assert "libnccl.so.2" in finding.source


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SCOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOCKET_INFAME", "NCCL_SOCKET_IFNAME"),
        ("NCLL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBUG_SUBSYSTEM", "NCCL_DEBUG_SUBSYS"),
        ("TORCH_DISTRIBUTED_DEBG", "TORCH_DISTRIBUTED_DEBUG"),
        ("TROCH_DISTRIBUTED_DEBUG", "TORCH_DISTRIBUTED_DEBUG"),
        ("TORCH_SHOW_CPP_STACKTRACE", "TORCH_SHOW_CPP_STACKTRACES"),
        ("TORCH_SHOW_STACKTRACES_CPP", "TORCH_SHOW_CPP_STACKTRACES"),
        ("TORCH_EXTENSION_DIR", "TORCH_EXTENSIONS_DIR"),
        ("TORCH_CUDA_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("PYTORCH_DISTRIBUTED_DEBUG", "TORCH_DISTRIBUTED_DEBUG"),
        ("NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("TORCH_NCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("TORCH_DYNAMO_VERBOSE", "TORCHDYNAMO_VERBOSE"),
        ("TORCHINDUCTER_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        ("CUDA_LAUNCH_BLOCKNG", "CUDA_LAUNCH_BLOCKING"),
        ("CUDA_LAUNCH_BLOCK", "CUDA_LAUNCH_BLOCKING"),
        ("CUDA_BLOCKING_LAUNCH", "CUDA_LAUNCH_BLOCKING"),
        ("CUDA_LAUNCHBLOCKING", "CUDA_LAUNCH_BLOCKING"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
    ],
)
def test_the_name_that_was_meant_is_suggested(name: str, meant: str) -> None:
    finding = only(lint({name: "1"}, TODAY, HostFacts()), name)
    assert finding.hint == f"did you mean {meant}?"


@pytest.mark.parametrize(
    "name", ["NCCL_RAS_ENABLE", "NCCL_INSPECTOR_ENABLE", "TORCH_DIST_USE_NCCL2", "TORCH_INCLUDE_STACK_TRACE"]
)
def test_a_documented_name_gets_no_neighbour_as_a_hint(name: str) -> None:
    """It is right, for another release."""
    assert name in DOCUMENTED
    assert not any("did you mean" in finding.hint for finding in lint({name: "1"}, TODAY, HostFacts()))


@pytest.mark.parametrize(
    "name",
    [
        "HCCL_SOCKET_IFNAME",
        "CCL_LOG_LEVEL",
        "MSCCL_ALGO_DIR",
        "ACCL_DEBUG",
        "FIX_NCCL",
        "MY_NCCL_TIMEOUT",
        "CUSTOM_DEBUG",
    ],
)
def test_names_of_other_software_are_left_alone(name: str) -> None:
    """Huawei's HCCL_SOCKET_IFNAME is one letter off NCCL's, and quite right."""
    assert lint({name: "1"}, TODAY, HostFacts()) == ()


@pytest.mark.parametrize(
    "name",
    [
        *("SLURM_JOB_ID", "SLURM_NTASKS", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "LOCAL_RANK", "PATH"),
        *("CUDA_VERSION", "NCCL_VERSION", "CUDNN_VERSION", "CUDA_HOME", "NCCL_HOME", "ROCM_PATH", "NCCL_INCLUDE_DIR"),
        *("PYTORCH_BUILD_NUMBER", "CUDA_COMPONENT_LIST", "HIP_COMPILER", "PYTORCH_ROCM_ARCH", "CUDA_DRIVER_VERSION"),
        *("CUDA_ARCH_LIST", "CUDACXX", "TORCH_INSTALL_DIR", "HIP_PLATFORM_VERSION", "PYTORCH_BUILD_VERSION"),
        *("PYTORCH_HOME", "PYTORCH_EXTENSIONS_DIR", "PYTORCH_VERSION"),
    ],
)
def test_what_launchers_modules_and_images_set_is_no_finding(name: str) -> None:
    """Nothing reads CUDA_VERSION, and rightly so."""
    assert lint({name: "1"}, TODAY, HostFacts()) == ()


@pytest.mark.parametrize("name", ["TORCHX_JOB_ID", "OMPI_MCA_btl_tcp_if_include", "UCX_SOME_KNOB", "FI_TCP_SOME_KNOB"])
def test_of_libraries_that_put_names_together_nothing_is_said_at_launch(name: str) -> None:
    known = TODAY._replace(
        owners={**TODAY.owners, "Open MPI": ("libmpi.so",), "UCX": ("libucs.so",), "libfabric": ("libfabric.so",)}
    )
    finding = only(lint({name: "1"}, known, HostFacts()), name)
    assert (finding.verdict, finding.at_launch) == ("uncertain", False)


def test_without_the_right_library_nobody_can_tell() -> None:
    """On a login node without NCCL, NCCL's names are not wrong; a hint is given to who asks."""
    finding = only(lint({"NCCL_SOCKET_IFNAM": "eth0"}, installed(), HostFacts()), "NCCL_SOCKET_IFNAM")
    assert (finding.verdict, finding.at_launch) == ("uncertain", False)
    assert finding.hint == "did you mean NCCL_SOCKET_IFNAME?"


def test_what_only_a_torch_for_gpus_reads_is_not_wrong_for_one_without() -> None:
    finding = only(lint({"TORCH_NCCL_SOMETHING_NEW": "1"}, installed(), HostFacts()), "TORCH_NCCL_SOMETHING_NEW")
    assert (finding.verdict, finding.at_launch) == ("uncertain", False)
    assert only(lint({"TORCH_NCCL_SOMETHING_NEW": "1"}, TODAY, HostFacts()), "TORCH_NCCL_SOMETHING_NEW").at_launch


@pytest.mark.parametrize(
    "changes",
    [
        {"mentions": {"TORCH_FLUX": ("torch 2.13.0",)}},
        {"open_prefixes": ("TORCH_FL",)},
        {"unsearched": ("vllm",)},
    ],
)
def test_doubt_is_never_a_line_at_launch(changes: dict[str, Any]) -> None:
    """A name in a comment, a name that something completes, and a search that ran out of time prove nothing."""
    finding = only(lint({"TORCH_FLUX": "1"}, installed(**changes), HostFacts()), "TORCH_FLUX")
    assert (finding.verdict, finding.at_launch) == ("uncertain", False)


def test_a_documented_name_of_another_release_is_told_as_such() -> None:
    finding = only(lint({"NCCL_RAS_ENABLE": "1"}, TODAY, HostFacts()), "NCCL_RAS_ENABLE")
    assert finding.verdict == "unknown name"
    assert "others do" in finding.sentence


def test_a_driver_that_hides_its_names_proves_nothing() -> None:
    known = TODAY._replace(owners={**TODAY.owners, "CUDA": ("libcuda.so.1",)})
    assert only(lint({"CUDA_SOMETHING": "1"}, known, HostFacts()), "CUDA_SOMETHING").verdict == "uncertain"
    plain = known._replace(readers={**known.readers, "CUDA_VISIBLE_DEVICES": ("libcuda.so.1",)})
    assert only(lint({"CUDA_SOMETHING": "1"}, plain, HostFacts()), "CUDA_SOMETHING").verdict == "unknown name"


@pytest.mark.parametrize(
    ("plugin", "libraries", "verdict"),
    [
        ("aws-ofi", (), "uncertain"),
        ("/opt/x/libnccl-net-x.so", (), "uncertain"),
        ("/opt/x/libnccl-net-x.so", ("libnccl-net-x.so",), "unknown name"),
        ("none", (), "unknown name"),
    ],
)
def test_a_plug_in_of_nccl_that_was_not_found_may_read_any_name(
    plugin: str, libraries: tuple[str, ...], verdict: str
) -> None:
    """Some vendors' plug-ins read names that start with NCCL_."""
    known = TODAY._replace(libraries=(*TODAY.libraries, *libraries))
    environ = {"NCCL_NET_PLUGIN": plugin, "NCCL_FASTRAK_NUM_FLOWS": "2"}
    assert only(lint(environ, known, HostFacts()), "NCCL_FASTRAK_NUM_FLOWS").verdict == verdict


def test_halves_of_names_count_where_one_library_holds_both() -> None:
    known = installed(
        owners={"oneDNN": ("libtorch_cpu.so",)},
        fragments={"libtorch_cpu.so": frozenset({"ONEDNN_", "VERBOSE"}), "libother.so": frozenset({"TLS"})},
    )
    assert lint({"ONEDNN_VERBOSE": "1"}, known, HostFacts()) == ()
    assert only(lint({"ONEDNN_TLS": "1"}, known, HostFacts()), "ONEDNN_TLS").verdict == "unknown name"


def test_the_rest_of_the_installation_is_asked_only_for_what_nothing_central_holds() -> None:
    environ = {"NCCL_DEBUG": "INFO", "TORCH_FLUX": "1", "PATH": "/bin", "NCCL_TIMEOUT": "1", "TP_SOCKET_IFNAME": "lo"}
    assert names_to_search(environ, TODAY) == {"TORCH_FLUX", "NCCL_TIMEOUT"}


def test_every_documented_name_belongs_to_a_family() -> None:
    """Else it would never be looked at."""
    assert [name for name in DOCUMENTED if family_of(name) is None] == ["TP_SOCKET_IFNAME"]


def test_every_family_can_be_told_from_the_others() -> None:
    for family in FAMILIES:
        assert all(family_of(f"{prefix}SOMETHING") is family for prefix in family.prefixes), family.name
