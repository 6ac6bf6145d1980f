"""What is known of a variable, and which one was probably meant."""

from __future__ import annotations

import pytest

from saferun.env.lint.documented import DOCUMENTED
from saferun.env.lint.explanation import explanation, probably_meant
from saferun.env.lint.families import family_of
from saferun.env.lint.purposes import PURPOSES
from saferun.env.lint.settings import SETTINGS
from saferun.env.lint.undocumented import UNDOCUMENTED

COMMON = (
    *("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_CUDA_ALLOC_CONF"),
)


@pytest.mark.parametrize("name", COMMON)
def test_what_users_set_most_has_a_purpose_and_a_reader(name: str) -> None:
    first, reader, *_ = explanation(name)
    assert first.startswith(f"{name}: ")
    assert reader.startswith("    read by ")


@pytest.mark.parametrize("name", sorted(DOCUMENTED | UNDOCUMENTED | PURPOSES.keys() | SETTINGS.keys()))
def test_every_variable_that_is_known_is_explained_by_its_reader(name: str) -> None:
    lines = explanation(name)
    assert lines
    assert family_of(name) is None or any(line.startswith("    read by ") for line in lines)


def test_a_name_that_nothing_reads_is_explained_by_what_to_do() -> None:
    assert explanation("NCCL_TIMEOUT")[1:3] == [
        "    neither torch nor NCCL reads this name",
        "    hint: give the timeout to torch.distributed.init_process_group(timeout=...)",
    ]


def test_lists_have_no_name_twice() -> None:
    assert not DOCUMENTED & UNDOCUMENTED


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_DEBG", "NCCL_DEBUG"),
        ("nccl_socket_ifname", "NCCL_SOCKET_IFNAME"),
        ("NCCL-DEBUG", "NCCL_DEBUG"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IFNAME_SOCKET", "NCCL_SOCKET_IFNAME"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("TORCH_RCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING"),
        ("MY_PROFILE_VARIBLE", "MY_PROFILE_VARIABLE"),
        ("XYZZY", ""),
        ("", ""),
        ("A" * 1000, ""),
    ],
)
def test_what_was_probably_meant(name: str, meant: str) -> None:
    assert probably_meant(name, {"MY_PROFILE_VARIABLE"}) == meant
