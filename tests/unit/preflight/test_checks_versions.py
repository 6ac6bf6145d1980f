"""What a host tells of itself, and which combinations are known to hang."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from saferun import __version__
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.versions import (
    check_versions,
    describe_host,
    read_versions,
    relevant_environ,
    script_hash,
)
from tests.unit.preflight.host_roots import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def install(
    root: Root, torch: str = "2.13.0+cu130", cuda: str = "13.0", nccl: str = "2.28.9", package: str = "nvidia_nccl_cu13"
) -> CheckContext:
    """A virtual environment with this torch, and a launch that uses its interpreter."""
    root.write("venv/pyvenv.cfg", "home = /usr/bin\nversion = 3.12.7.final.0\n")
    packages = "venv/lib/python3.12/site-packages"
    root.write(f"{packages}/torch/version.py", f"__version__ = '{torch}'\ncuda: str = '{cuda}'\nhip = None\n")
    root.write(f"{packages}/{package}-{nccl}.dist-info/METADATA")
    return root.context(nproc=8, vendor="nvidia", python=f"{root.path}/venv/bin/python")


# ------------------------------------------------------------------------------------------------------------- versions


def test_versions_are_read_from_files_and_no_interpreter_is_run(root: Root) -> None:
    context = install(root)
    root.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.3.0\n",
    )
    assert read_versions(context) == {
        "saferun": __version__,
        "python": "3.12.7",
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "nccl": "2.28.9",
        "driver": "580.95.05",
    }


def test_the_older_form_of_the_driver_s_line_is_read(root: Root) -> None:
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    root.write("proc/driver/nvidia/version", line)
    assert read_versions(root.context())["driver"] == "535.104.05"


def test_rocm_s_versions_are_told_in_place_of_cuda_s(root: Root) -> None:
    root.write("opt/bin/python3")
    root.write(
        "opt/lib/python3.11/dist-packages/torch/version.py", "__version__ = '2.9.0'\nhip = '6.4.43482-0f2d60242'\n"
    )
    root.write("sys/module/amdgpu/version", "6.12.12\n")
    versions = read_versions(root.context(python=f"{root.path}/opt/bin/python3"))
    assert versions["hip"] == "6.4.43482-0f2d60242"
    assert (versions["rocm"], versions["python"], versions["driver"]) == ("6.4", "3.11", "6.12.12")
    assert "nccl" not in versions
    assert "cuda" not in versions


def test_an_interpreter_without_a_path_is_looked_up(root: Root) -> None:
    install(root)
    program = root.write("venv/bin/python")
    program.chmod(0o755)
    context = root.context({"PATH": f"/nowhere:{program.parent}"}, python="python")
    assert read_versions(context)["torch"] == "2.13.0+cu130"


def test_ranks_that_are_no_python_have_no_torch(root: Root) -> None:
    assert read_versions(root.context(python="")) == {"saferun": __version__}


def test_the_own_interpreter_s_versions_are_those_that_run() -> None:
    versions = read_versions(CheckContext(python=sys.executable))
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


# --------------------------------------------------------------------------------------------------------------- script


def test_the_script_s_hash_is_that_of_its_content(tmp_path: Path) -> None:
    """Hosts may have it in different places, and copied at different times."""
    one, two, other = (tmp_path / name for name in ("one.py", "two.py", "other.py"))
    one.write_text("print(1)\n")
    two.write_text("print(1)\n")
    other.write_text("print(2)\n")
    os.utime(two, (1, 1))
    assert script_hash(str(one)) == script_hash(str(two)) != script_hash(str(other))
    assert len(script_hash(str(one))) == 32


def test_of_a_huge_script_only_parts_are_read(tmp_path: Path) -> None:
    """A gigabyte that is given as a script is hashed in no time; its size, beginning and end count."""
    huge = tmp_path / "huge.py"
    with huge.open("wb") as file:
        file.write(b"print(1)")
        file.truncate(1 << 40)
    before = script_hash(str(huge))
    with huge.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert before
    assert script_hash(str(huge)) != before
    with huge.open("r+b") as file:
        file.truncate((1 << 40) + 1)
    assert script_hash(str(huge)) != before


def test_what_is_no_file_has_no_hash(tmp_path: Path) -> None:
    """A named pipe would hold its reader forever."""
    os.mkfifo(tmp_path / "pipe")
    assert script_hash(str(tmp_path / "pipe")) == ""
    assert script_hash(str(tmp_path)) == ""
    assert script_hash(str(tmp_path / "none")) == ""
    assert script_hash("") == ""


# ---------------------------------------------------------------------------------------------------------- environment


def test_the_environment_of_a_card_is_what_libraries_read() -> None:
    environ = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "8",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HSA_ENABLE_SDMA": "0",
        "LD_LIBRARY_PATH": "/opt/lib",
        "HOME": "/home/me",
        "PATH": "/bin",
        "WANDB_PROJECT": "x",
    }
    names = [name for name, _ in relevant_environ(environ)]
    assert names == sorted(set(environ) - {"HOME", "PATH", "WANDB_PROJECT"})


def test_what_differs_by_nature_is_left_out() -> None:
    """It would be told as a difference between hosts at every launch."""
    environ = {
        "CUDA_VISIBLE_DEVICES": "0",
        "HIP_VISIBLE_DEVICES": "0",
        "ROCR_VISIBLE_DEVICES": "0",
        "RANK": "3",
        "MASTER_ADDR": "node0",
        "SLURM_NODEID": "2",
        "OMPI_MCA_orte_ess_vpid": "2",
        "TORCHELASTIC_ERROR_FILE": "/tmp/x/3/error.json",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/node3/trace_",
        "NCCL_DEBUG_FILE": "/runs/node3/nccl",
        "TORCH_TRACE": "/runs/node3/trace",
        "TRITON_CACHE_DIR": "/local/3",
        "NCCL_HOSTID": "7",
        "CUDA_HOME": "/usr/local/cuda",
        "NCCL_VERSION": "2.28.9",
    }
    assert relevant_environ(environ) == ()


def test_secrets_do_not_travel_to_other_hosts() -> None:
    environ = {"TORCH_HUB_TOKEN": "s3cret", "UCX_AUTH": "s3cret", "NCCL_PROXY": "https://me:s3cret@proxy"}
    assert "s3cret" not in repr(relevant_environ(environ))


def test_a_card_s_environment_is_bounded_and_still_tells_differences() -> None:
    one = relevant_environ({"LD_LIBRARY_PATH": "/x:" * 5000 + "/a", **{f"NCCL_X{n}": "1" for n in range(2000)}})
    two = relevant_environ({"LD_LIBRARY_PATH": "/x:" * 5000 + "/b"})
    assert len(one) == 256
    assert len(repr(one)) < 64 * 1024
    assert dict(one)["LD_LIBRARY_PATH"] != dict(two)["LD_LIBRARY_PATH"]


def test_bytes_that_are_no_text_are_no_obstacle() -> None:
    value = os.fsdecode(b"\xff" * 400)
    assert relevant_environ({"NCCL_X": value})[0][1].startswith(value[:256])


def test_a_host_is_described_by_versions_script_and_environment(root: Root) -> None:
    context = install(root)._replace(script=str(root.write("train.py", "pass")), environ={"NCCL_DEBUG": "INFO"})
    versions, script, environ = describe_host(context)
    assert dict(versions)["nccl"] == "2.28.9"
    assert script
    assert environ == (("NCCL_DEBUG", "INFO"),)


# -------------------------------------------------------------------------------------------------------- known to hang


@pytest.mark.parametrize(
    ("torch", "nccl", "environ", "verdict"),
    [
        ("2.13.0", "2.28.9", {}, "ok"),
        ("2.13.0", "2.28.9", {"CUDA_LAUNCH_BLOCKING": "1"}, "ok"),
        ("2.4.0a0", "2.14.3", {"CUDA_LAUNCH_BLOCKING": "1"}, "warn"),
        ("2.4.0a0", "2.14.3", {"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
        ("2.4.0a0", "2.17.1", {"CUDA_LAUNCH_BLOCKING": "1"}, "ok"),
        ("2.7.0+cu126", "2.26.2", {}, "warn"),
        ("2.7.0+cu126", "2.26.2", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}, "ok"),
        ("2.7.1+cu126", "2.26.2", {}, "ok"),
        ("2.7.1+cu126", "2.26.2", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, "warn"),
        ("2.8.0", "2.27.3", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, "ok"),
        ("2.6.0", "2.21.5", {}, "ok"),
    ],
)
def test_combinations_that_are_known_to_hang_are_told(
    root: Root, torch: str, nccl: str, environ: dict[str, str], verdict: str
) -> None:
    """Only those that somebody who maintains them has said to hang, and no neighbours of theirs."""
    result = check_versions(install(root, torch, nccl=nccl)._replace(environ=environ))
    assert result.verdict == verdict
    if verdict == "warn":
        assert nccl in result.message
        assert result.hint
        assert "https://" in dict(result.facts)["known_hang"]


def test_nccl_2_29_2_hangs_on_arm(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    context = install(root, nccl="2.29.2")
    uname = os.uname()
    for machine, verdict in (("x86_64", "ok"), ("aarch64", "warn")):
        changed = os.uname_result((*tuple(uname)[:4], machine))
        monkeypatch.setattr(os, "uname", lambda changed=changed: changed)
        assert check_versions(context).verdict == verdict


def test_what_hangs_only_in_some_scripts_is_a_fact_and_no_warning(root: Root) -> None:
    """NCCL 2.21.5 came with torch 2.5 and 2.6, and most jobs never captured two graphs."""
    result = check_versions(install(root, "2.6.0+cu124", nccl="2.21.5"))
    assert result.verdict == "ok"
    assert "CUDA graphs" in dict(result.facts)["known_hang"]


def test_what_hangs_between_ranks_does_not_matter_to_one(root: Root) -> None:
    context = install(root, nccl="2.14.3")._replace(environ={"CUDA_LAUNCH_BLOCKING": "1"}, nproc=1)
    assert check_versions(context).verdict == "ok"
    assert check_versions(context._replace(spans_hosts=True)).verdict == "warn"
    assert check_versions(context._replace(nproc=8, vendor="none")).verdict == "ok"


def test_the_machine_itself_is_in_order() -> None:
    result = check_versions(CheckContext(nproc=2, environ=dict(os.environ), python=sys.executable))
    assert result.verdict == "ok"
