from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.env.lint import names_in_files
from saferun.env.lint.elf import string_ranges
from saferun.env.lint.installation import find_installation
from saferun.env.lint.scanner import scan
from tests.unit.env.lint_samples import (
    Packages,
    asking,
    elf,
    strings,
)


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    return Packages(tmp_path)


# ------------------------------------------------------------------------------------------------- what files hold


def test_names_are_found_in_libraries_and_in_modules(packages: Packages) -> None:
    packages.add(
        "torch",
        {"torch/lib/libtorch_cpu.so": strings("GLOO_SOCKET_IFNAME"), "torch/a.py": b'os.environ.get("TORCH_LOGS")'},
        "2.13.0+cpu",
    )
    (packages.libraries / "libnccl.so.2").write_bytes(strings("NCCL_DEBUG", "NCCL version 2.27.3+cuda12.9"))
    known = scan(packages.installation)
    assert known.readers["GLOO_SOCKET_IFNAME"] == known.readers["TORCH_LOGS"] == ("torch 2.13.0+cpu",)
    assert known.readers["NCCL_DEBUG"] == ("libnccl.so.2",)
    assert known.owners["NCCL"] == ("libnccl.so.2",)
    assert known.owners["torch"] == ("libtorch_cpu.so",)
    assert known.versions == {"nccl": (2, 27, 3), "torch": (2, 13, 0)}
    assert known.modules == ("torch 2.13.0+cpu",)
    assert known.unsearched == ()


def test_the_name_in_a_comment_or_a_message_is_only_a_mention(packages: Packages) -> None:
    packages.add(
        "torch",
        {
            "torch/lib/libc10.so": strings("Compile with `TORCH_USE_CUDA_DSA` to enable assertions."),
            "torch/a.py": b"# TORCH_OLD_KNOB is gone\n",
        },
    )
    known = scan(packages.installation)
    assert not known.is_read("TORCH_USE_CUDA_DSA")
    assert set(known.mentions) == {"TORCH_USE_CUDA_DSA", "TORCH_OLD_KNOB"}


def test_only_the_sections_with_strings_are_read(packages: Packages) -> None:
    """Symbols, code and debugging information hold names of functions and enumerators, which nobody can set."""
    library = elf(
        (".text", 6, b"\0NCCL_IN_CODE\0"),
        (".rodata", 2, b"\0NCCL_IN_STRINGS\0"),
        (".data.rel.ro", 3, b"\0NCCL_IN_DATA\0"),
        (".debug_str", 0, b"\0NCCL_IN_DEBUG\0"),
        (".nv_fatbin", 2, b"\0NCCL_IN_KERNEL\0"),
    )
    (packages.libraries / "libnccl.so.2").write_bytes(library)
    assert {name for name in scan(packages.installation).readers if "_IN_" in name} == {
        "NCCL_IN_STRINGS",
        "NCCL_IN_DATA",
    }


def test_what_is_no_shared_object_is_read_as_a_whole(packages: Packages) -> None:
    (packages.libraries / "libnccl.so.2").write_bytes(b"garbage\0NCCL_DEBUG\0" + bytes(range(256)))
    assert scan(packages.installation).is_read("NCCL_DEBUG")


def test_a_name_that_the_linker_keeps_as_the_end_of_another_is_mentioned(packages: Packages) -> None:
    """In libgomp OMP_STACKSIZE is the end of GOMP_STACKSIZE: no string of its own, and read all the same."""
    (packages.libraries / "libgomp.so.1").write_bytes(strings("GOMP_STACKSIZE"))
    assert "OMP_STACKSIZE" in scan(packages.installation).mentions


def test_the_end_of_one_of_torchs_names_is_no_name_of_nccl(packages: Packages) -> None:
    """Else nobody would be told that NCCL_HEARTBEAT_TIMEOUT_SEC lacks its TORCH_."""
    packages.add("torch", {"torch/lib/libtorch_cuda.so": strings("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")})
    assert scan(packages.installation).mentions == {}


def test_a_prefix_and_a_rest_in_one_library_make_a_name(packages: Packages) -> None:
    packages.add("torch", {"torch/lib/libtorch_cpu.so": strings("ONEDNN_", "VERBOSE")})
    packages.add("nvidia_other", {"other/libother.so": strings("MAX_CPU_ISA")})
    known = scan(packages.installation)
    assert known.is_read("ONEDNN_VERBOSE")
    assert not known.is_read("ONEDNN_MAX_CPU_ISA")


def test_names_that_python_puts_together_are_known(packages: Packages) -> None:
    source = b'PACKAGE = "torch_vendor"\nx = os.getenv(f"{PACKAGE.upper()}_HOME")\nprefix = "TORCH_COMPILE_" + y\n'
    run = b'from torch.distributed.argparse_util import env\nparser.add_argument("--nproc-per-node", action=env)\n'
    packages.add("torch", {"torch/a.py": source, "torch/run.py": run})
    known = scan(packages.installation)
    assert known.is_read("TORCH_VENDOR_HOME")
    assert known.is_read("PET_NPROC_PER_NODE")
    assert not known.is_read("PET_NPROC_PER_NODES")
    assert "TORCH_COMPILE_" in known.readers


def test_a_text_that_the_compiler_keeps_in_pieces_leaves_doubt(packages: Packages) -> None:
    """A std::string may be built from 16 bytes of read-only data and an immediate operand."""
    packages.add("torch", {"torch/lib/libtorch_cpu.so": elf((".rodata", 2, b"\1\2TORCH_GLOO_LAZY_\3\4"))})
    assert scan(packages.installation).open_prefixes == ("TORCH_GLOO_LAZY_",)


def test_a_library_with_nccl_inside_stands_in_for_it(packages: Packages) -> None:
    packages.add("torch", {"torch/lib/libtorch_cuda.so": strings("NCCL_BUFFSIZE", "NCCL_SHM_DISABLE")})
    assert scan(packages.installation).owners["NCCL"] == ("torch 1.0",)


def test_quoted_names_in_python_make_no_library(packages: Packages) -> None:
    packages.add("torch", {"torch/a.py": b'x = ["NCCL_BUFFSIZE", "NCCL_SHM_DISABLE"]'})
    assert scan(packages.installation).owners["NCCL"] == ()


def test_a_library_under_several_names_is_read_once(packages: Packages) -> None:
    (packages.libraries / "libnccl.so.2.27.3").write_bytes(strings("NCCL_DEBUG"))
    for link in ("libnccl.so.2", "libnccl.so"):
        (packages.libraries / link).symlink_to("libnccl.so.2.27.3")
    assert len(scan(packages.installation).readers["NCCL_DEBUG"]) == 1


def test_preloaded_libraries_count(packages: Packages, tmp_path: Path) -> None:
    """Intel's OpenMP gets into a job so."""
    (tmp_path / "libiomp5.so").write_bytes(strings("KMP_AFFINITY"))
    known = scan(packages.installation._replace(preloaded=(str(tmp_path / "libiomp5.so"), "/nowhere/libx.so")))
    assert known.is_read("KMP_AFFINITY")
    assert known.owners["LLVM and Intel OpenMP"] == ("libiomp5.so",)


def test_names_across_the_edge_of_a_chunk_are_found_whole(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_in_files, "_CHUNK_BYTES", 1024)
    names = [f"NCCL_NUMBER_{number}_OF_MANY" for number in range(500)]
    (packages.libraries / "libnccl.so.2").write_bytes(strings(*names))
    assert set(names) <= set(scan(packages.installation).readers)


# -------------------------------------------------------------------------------------------- broken installations


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 200, elf((".rodata", 2, b"x"))[:150]]
)
def test_a_broken_library_is_passed_over(packages: Packages, content: bytes) -> None:
    (packages.libraries / "libnccl.so.2").write_bytes(content)
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    assert scan(packages.installation).is_read("TORCH_LOGS")


@given(data=st.binary(max_size=400), cut=st.integers(0, 400))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_headers_lead_outside_the_file(tmp_path: Path, data: bytes, cut: int) -> None:
    whole = bytearray(strings("NCCL_DEBUG"))
    whole[40 : 40 + len(data)] = data
    path = tmp_path / "library.so"
    path.write_bytes(whole[: max(cut, 1)])
    fd = os.open(path, os.O_RDONLY)
    try:
        size_bytes = os.fstat(fd).st_size
        assert all(offset >= 0 and offset + size <= size_bytes for offset, size in string_ranges(fd, size_bytes))
    finally:
        os.close(fd)


def test_a_record_cannot_lead_out_of_its_directory(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_bytes(b'"TORCH_OUTSIDE"')
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    record = packages.root / "torch-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + f"../outside.py,,\ntorch/../../outside.py,,\n{tmp_path}/outside.py,,\n")
    assert "TORCH_OUTSIDE" not in scan(packages.installation).readers


def test_a_file_that_a_record_names_and_nobody_has_is_passed_over(packages: Packages) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"', "torch/b.py": b"", "torch/lib/libtorch.so": strings("x")})
    (packages.root / "torch/b.py").unlink()
    (packages.root / "torch/lib/libtorch.so").unlink()
    known = scan(packages.installation)
    assert known.is_read("TORCH_LOGS")
    assert known.unsearched == ()


def test_a_file_that_cannot_be_read_leaves_doubt(packages: Packages, tmp_path: Path) -> None:
    """What was not searched may hold the name; and it is tried again at the next launch."""
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"', "torch/b.py": b""})
    (packages.root / "torch/b.py").unlink()
    (packages.root / "torch/b.py").mkdir()  # reading a directory fails for everybody
    for _ in range(2):
        known = scan(packages.installation, cache_directory=str(tmp_path / "cache"))
        assert known.is_read("TORCH_LOGS")
        assert known.unsearched == ("torch",)


def test_a_library_of_boundless_size_leaves_doubt(packages: Packages) -> None:
    with (packages.libraries / "libnccl.so.2").open("wb") as file:
        file.truncate(1 << 40)
    assert scan(packages.installation).unsearched == ("libnccl.so.2",)


def test_fifos_do_not_hold_the_scan_up(packages: Packages, tmp_path: Path) -> None:
    packages.add("torch", {"torch/a.py": b""})
    (packages.root / "torch/a.py").unlink()
    os.mkfifo(packages.root / "torch/a.py")
    os.mkfifo(packages.libraries / "libnccl.so.2")
    assert scan(packages.installation, cache_directory=str(tmp_path / "cache")).readers == {}


def test_without_time_nothing_is_said_to_be_complete(packages: Packages) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    assert scan(packages.installation, budget_s=-1).unsearched == ("torch",)


def test_an_installation_without_a_list_of_files_is_walked(packages: Packages) -> None:
    packages.add("torch", {"torch/lib/libtorch_cpu.so": strings("TORCH_A"), "torch/sub/a.py": b'"TORCH_B"'})
    (packages.root / "torch-1.0.dist-info" / "RECORD").unlink()
    known = scan(packages.installation)
    assert known.is_read("TORCH_A")
    assert known.is_read("TORCH_B")
    assert known.owners["torch"] == ("libtorch_cpu.so",)


def test_an_editable_installation_is_searched_where_its_code_is(packages: Packages, tmp_path: Path) -> None:
    packages.add("torchthing", {})
    code = tmp_path / "checkout"
    code.mkdir()
    (code / "a.py").write_bytes(b'"TORCH_THING"')
    info = packages.root / "torchthing-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": code.as_uri(), "dir_info": {"editable": True}}))
    assert scan(packages.installation).is_read("TORCH_THING")


def test_the_tables_of_saferun_do_not_count(packages: Packages) -> None:
    """They quote the very names that nothing reads."""
    packages.add("saferun", {"saferun/env/lint/knowledge.py": b'"RCCL_DEBUG"'})
    assert not scan(packages.installation, **asking("RCCL_DEBUG")).is_read("RCCL_DEBUG")


def test_the_users_own_code_counts(packages: Packages, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / "sub" / "a.py").write_bytes(b'os.environ["TORCH_MY_RUN"]')
    (project / ".git" / "b.py").write_bytes(b'"TORCH_HIDDEN"')
    known = scan(packages.installation._replace(source_directories=(str(project), "/nowhere")))
    assert known.readers == {"TORCH_MY_RUN": (str(project),)}


# ---------------------------------------------------------------------------------------------- the other packages


def test_other_packages_are_asked_for_single_names(packages: Packages) -> None:
    packages.add("mything", {"mything/a.py": b'os.environ["TORCH_MINE"]; x = "NCCL_NOBODY_ASKS"  # TORCH_SPOKEN_OF'})
    assert scan(packages.installation).readers == {}
    known = scan(packages.installation, **asking("TORCH_MINE", "TORCH_SPOKEN_OF", "TORCH_NOWHERE"))
    assert known.readers == {"TORCH_MINE": ("mything 1.0",)}
    assert known.mentions == {"TORCH_SPOKEN_OF": ("mything 1.0",)}


def test_many_names_are_found_as_few_are(packages: Packages) -> None:
    names = [f"TORCH_KNOB_{number}" for number in range(100)]
    packages.add(
        "mything",
        {
            "mything/a.py": "".join(f"x = '{name}'\n" for name in names[:50]).encode(),
            "mything/b.so": strings(*names[50:]),
        },
    )
    known = scan(packages.installation, **asking(*names))
    assert set(known.readers) == set(names)


def test_more_names_than_are_asked_for_leave_doubt(packages: Packages) -> None:
    known = scan(packages.installation, **asking(*(f"TORCH_KNOB_{number}" for number in range(300))))
    assert known.unsearched == ("44 more unknown names",)


# ------------------------------------------------------------------------------------------------ where things are


def test_the_environment_says_where_libraries_and_code_are(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}::relative", "LD_PRELOAD": "/x/libiomp5.so libtcmalloc.so:/y/z.so"}
    environ |= {"NCCL_NET_PLUGIN": "/p/libnccl-net-x.so", "NCCL_TUNER_PLUGIN": "name"}
    found = find_installation(environ, script=str(tmp_path / "train.py"))
    assert found is not None
    assert found.source_directories[0] == str(tmp_path)
    assert found.library_directories[0] == str(tmp_path)
    assert "relative" not in found.library_directories
    assert found.preloaded == ("/x/libiomp5.so", "/y/z.so", "/p/libnccl-net-x.so")
    assert any(path.endswith("site-packages") for path in found.package_directories)
    assert not any(os.path.isfile(f"{path}/os.py") for path in found.source_directories)


def test_an_interpreter_that_does_not_answer_is_told_apart_from_one_with_nothing(tmp_path: Path) -> None:
    assert find_installation({}, python="/nowhere/python") is None
    broken = tmp_path / "python"
    broken.symlink_to("/bin/true")
    assert find_installation({}, python=str(broken)) is None


def test_a_wrapper_of_the_interpreter_is_not_started_once_more(tmp_path: Path) -> None:
    """It may claim a licence, start a container, or overwrite what the rank's own start has written."""
    started = tmp_path / "started"
    for name in ("python", "python.sh"):
        wrapper = tmp_path / name
        wrapper.write_text(f'#!/bin/sh\ntouch {started}\nexec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        assert find_installation({}, python=str(wrapper)) is None
    assert not started.exists()
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    assert find_installation({}, python=str(other)) is not None
