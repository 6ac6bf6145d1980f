"""Valid values of variables, the effect of invalid ones, and where that is documented."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from saferun.env.lint import knowledge
from saferun.env.lint.known_names import HostFacts
from saferun.env.lint.value_checks import (
    directory_to_read,
    exact_interfaces,
    gpu_list,
    hca_list,
    list_of,
    nccl_interfaces,
    one_of,
    path_of_file,
    path_to_make,
    prefix_of_files,
    whole_number,
)
from saferun.model import Value

Check = Callable[[str, HostFacts], str]  # returns what is wrong, or ""


class VariableRule(Value):
    """What is known about a variable's values.

    Args:
        check: checks a value on a host with these facts.
        consequence: the effect of a wrong value.
        source: where that is documented.
    """

    check: Check
    consequence: str
    source: str


_TORCH_BOOL = one_of("0", "1", "true", "false", "yes", "no", "t", "f", "y", "n")
_TORCH_FLAG = one_of("0", "1")
_TORCH_BOOL_CODE = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/Utils.hpp"
_TORCH_FLAG_CODE = "https://github.com/pytorch/pytorch/blob/v2.13.0/c10/util/env.cpp"
_RAISES = "torch raises an error"
_IGNORED = "torch warns and ignores it"
_NCCL_NUMBER = "NCCL does not take it for 1"
# topoPathTypeStr of NCCL's graph/topo.cc, up to SYS, and RCCL's name for the links between GPUs.
_PATH_TYPES = ("LOC", "NVL", "XGMI", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_NO_LOG = "NCCL then logs nothing"
_CUDA_LIST = "CUDA then shows only the devices before the first wrong one, or none"

SETTINGS: dict[str, VariableRule] = {
    # torch
    "TORCH_DISTRIBUTED_DEBUG": VariableRule(one_of("OFF", "INFO", "DETAIL"), _RAISES, knowledge.TORCH_DISTRIBUTED),
    "TORCH_CPP_LOG_LEVEL": VariableRule(
        one_of("INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3"), _IGNORED, knowledge.TORCH_DEBUGGING
    ),
    "TORCH_SHOW_CPP_STACKTRACES": VariableRule(_TORCH_FLAG, _IGNORED, _TORCH_FLAG_CODE),
    "TORCH_SYMBOLIZE_MODE": VariableRule(
        one_of("dladdr", "addr2line", "fast", ignore_case=False),
        _RAISES,
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/profiler/combined_traceback.cpp",
    ),
    "TORCH_DIST_INIT_BARRIER": VariableRule(
        whole_number(), _RAISES, "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/distributed_c10d.py"
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": VariableRule(whole_number(0, 3), "torch knows 0 to 3", knowledge.TORCH_NCCL),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": VariableRule(_TORCH_FLAG, _IGNORED, _TORCH_FLAG_CODE),
    "PYTORCH_USE_CUDA_DSA": VariableRule(_TORCH_FLAG, _IGNORED, knowledge.TORCH_DSA_CODE),
    "TORCH_HOME": VariableRule(
        directory_to_read,
        "torch.hub cannot keep models there",
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/hub.py",
    ),
    # Keywords of NCCL
    "NCCL_DEBUG": VariableRule(
        one_of("VERSION", "WARN", "INFO", "TRACE", "ABORT", "NONE", "ERROR", "ATTN"), _NO_LOG, knowledge.NCCL_ENV
    ),
    "NCCL_DEBUG_SUBSYS": VariableRule(
        list_of(
            *("INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL", "PROXY"),
            *("NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "VERBS", "ALL"),
        ),
        "NCCL passes over what it does not know",
        knowledge.NCCL_ENV,
    ),
    "NCCL_SOCKET_FAMILY": VariableRule(one_of("AF_INET", "AF_INET6"), "NCCL takes either family", knowledge.NCCL_ENV),
    "NCCL_IB_ADDR_FAMILY": VariableRule(one_of("AF_INET", "AF_INET6"), "NCCL takes its default", knowledge.NCCL_ENV),
    "NCCL_P2P_LEVEL": VariableRule(
        one_of(*_PATH_TYPES, ignore_case=False, numbers=True),
        "NCCL takes its default",
        knowledge.NCCL_ENV,
    ),
    "NCCL_NET_GDR_LEVEL": VariableRule(
        one_of(*_PATH_TYPES, ignore_case=False, numbers=True),
        "NCCL takes its default",
        knowledge.NCCL_ENV,
    ),
    "NCCL_LAUNCH_MODE": VariableRule(one_of("PARALLEL", "GROUP"), "NCCL takes its default", knowledge.NCCL_ENV),
    # Devices and files of NCCL
    "NCCL_SOCKET_IFNAME": VariableRule(nccl_interfaces, "NCCL finds no interface to use", knowledge.NCCL_ENV),
    "NCCL_IB_HCA": VariableRule(hca_list, "NCCL then uses sockets, or no network at all", knowledge.NCCL_ENV),
    "NCCL_TOPO_FILE": VariableRule(path_of_file, "NCCL goes without it", knowledge.NCCL_ENV),
    "NCCL_CONF_FILE": VariableRule(path_of_file, "NCCL goes without it", knowledge.NCCL_ENV),
    "NCCL_DEBUG_FILE": VariableRule(path_to_make, "NCCL writes to stdout instead", knowledge.NCCL_ENV),
    "NCCL_TOPO_DUMP_FILE": VariableRule(path_to_make, "NCCL cannot write it", knowledge.NCCL_ENV),
    # Bounded numbers of NCCL
    "NCCL_NTHREADS": VariableRule(one_of("64", "128", "256", "512"), "NCCL takes its default", knowledge.NCCL_ENV),
    "NCCL_IB_RETRY_CNT": VariableRule(whole_number(0, 7), "InfiniBand knows 0 to 7", knowledge.NCCL_ENV),
    "NCCL_IB_TIMEOUT": VariableRule(whole_number(1, 31), "InfiniBand then waits forever", knowledge.NCCL_ENV),
    "NCCL_IB_QPS_PER_CONNECTION": VariableRule(whole_number(1, 128), "NCCL knows 1 to 128", knowledge.NCCL_ENV),
    "NCCL_IB_PCI_RELAXED_ORDERING": VariableRule(whole_number(0, 2), "NCCL knows 0, 1 and 2", knowledge.NCCL_ENV),
    "NCCL_CROSS_NIC": VariableRule(whole_number(0, 2), "NCCL knows 0, 1 and 2", knowledge.NCCL_ENV),
    "NCCL_SOCKET_NTHREADS": VariableRule(whole_number(1, 16), "NCCL knows 1 to 16", knowledge.NCCL_ENV),
    "NCCL_P2P_PXN_LEVEL": VariableRule(whole_number(0, 2), "NCCL knows 0, 1 and 2", knowledge.NCCL_ENV),
    # gloo, tensorpipe
    "GLOO_SOCKET_IFNAME": VariableRule(
        exact_interfaces, "gloo fails with “Unable to find address”", knowledge.TORCH_DISTRIBUTED
    ),
    "TP_SOCKET_IFNAME": VariableRule(exact_interfaces, "tensorpipe finds no address", knowledge.TORCH_DISTRIBUTED),
    # GPUs
    "CUDA_VISIBLE_DEVICES": VariableRule(gpu_list, _CUDA_LIST, knowledge.CUDA_ENV),
    "HIP_VISIBLE_DEVICES": VariableRule(gpu_list, "HIP does not show them all", knowledge.HIP_ENV),
    "ROCR_VISIBLE_DEVICES": VariableRule(gpu_list, "ROCr does not show them all", knowledge.HIP_ENV),
    "CUDA_DEVICE_ORDER": VariableRule(
        one_of("FASTEST_FIRST", "PCI_BUS_ID"), "CUDA takes FASTEST_FIRST", knowledge.CUDA_ENV
    ),
    "CUDA_LAUNCH_BLOCKING": VariableRule(_TORCH_FLAG, "CUDA knows 0 and 1", knowledge.CUDA_ENV),
    "CUDA_MODULE_LOADING": VariableRule(
        one_of("DEFAULT", "LAZY", "EAGER"), "CUDA takes its default", knowledge.CUDA_ENV
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": VariableRule(whole_number(1, 32), "CUDA knows 1 to 32", knowledge.CUDA_ENV),
    "AMD_SERIALIZE_KERNEL": VariableRule(whole_number(0, 3), "HIP knows 0 to 3", knowledge.HIP_ENV),
    "AMD_SERIALIZE_COPY": VariableRule(whole_number(0, 3), "HIP knows 0 to 3", knowledge.HIP_ENV),
    "HIP_LAUNCH_BLOCKING": VariableRule(_TORCH_FLAG, "HIP knows 0 and 1", knowledge.HIP_ENV),
}

_TORCH_BOOLS: Final = """
TORCH_NCCL_BCAST_UNIQUEID TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG
TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_EXTRA_DUMP_ON_EXEC
TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN TORCH_NCCL_NAN_CHECK TORCH_NCCL_PROPAGATE_ERROR
TORCH_NCCL_RETHROW_CUDA_ERRORS TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK TORCH_GLOO_LAZY_INIT TORCH_FR_CPP_STACK
"""
_TORCH_NUMBERS: Final = """
TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC
TORCH_NCCL_COORD_CHECK_MILSEC
"""
_NCCL_SWITCHES: Final = """
NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_COLLNET_ENABLE NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DMABUF_ENABLE
NCCL_GDRCOPY_ENABLE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_DISABLE
NCCL_IB_ECE_ENABLE NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IGNORE_CPU_AFFINITY
NCCL_LEGACY_CUDA_REGISTER NCCL_LOCAL_REGISTER NCCL_NET_GDR_C2C NCCL_NET_GDR_READ NCCL_NET_SHARED_BUFFERS
NCCL_NET_SHARED_COMMS NCCL_NVB_DISABLE NCCL_OOB_NET_ENABLE NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_PXN_C2C
NCCL_PXN_DISABLE NCCL_RUNTIME_CONNECT NCCL_SET_STACK_SIZE NCCL_SET_THREAD_NAME NCCL_SHM_DISABLE NCCL_WIN_ENABLE
"""
_DIRECTORIES: Final = """
TORCH_EXTENSIONS_DIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR CUDA_CACHE_PATH TORCH_TRACE
PYTORCH_KERNEL_CACHE_PATH
"""
_OPENMP: Final = "https://www.openmp.org/spec-html/5.0/openmpse50.html"

SETTINGS |= {name: VariableRule(_TORCH_BOOL, _RAISES, _TORCH_BOOL_CODE) for name in _TORCH_BOOLS.split()}
SETTINGS |= {name: VariableRule(whole_number(0), _RAISES, _TORCH_BOOL_CODE) for name in _TORCH_NUMBERS.split()}
SETTINGS |= {
    name: VariableRule(whole_number(signed=True), _NCCL_NUMBER, knowledge.NCCL_ENV) for name in _NCCL_SWITCHES.split()
}
SETTINGS |= {
    name: VariableRule(path_to_make, "what is to be kept there is lost", "mkdir(2)") for name in _DIRECTORIES.split()
}
SETTINGS |= {
    name: VariableRule(prefix_of_files, "the Flight Recorder cannot write its dump", knowledge.TORCH_FR_CODE)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
}
SETTINGS |= {
    name: VariableRule(whole_number(1, several=True), "the OpenMP runtime ignores it", _OPENMP)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
}

_TRUE = re.compile(r"1|y|yes|t|true|on", re.IGNORECASE)


def is_true(value: str | None) -> bool:
    """Whether a switch is on."""
    return value is not None and _TRUE.fullmatch(value.strip()) is not None
