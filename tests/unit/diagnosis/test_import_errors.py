"""What to do about an import that fails: only what is not installed is to be installed."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.failed_jobs import class_of
from tests.unit.diagnosis.failed_jobs import evidence as evidence_of
from tests.unit.samples import end_of

INSTALLED = "/venv/lib/python3.11/site-packages"
CIRCULAR = "partially initialized module '{}' (most likely due to a circular import)"


def found_in(message: str) -> Cause:
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/user/job/train.py", line 3, in <module>',
        "    from parts import one",
        *message.splitlines(),
    )
    end = RankEnd(1, 1, 4001, ExitStatus(1, None), 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(1, lines, "", "", 0.0)
    evidence = Evidence(
        "node1", 90.0, (end,), (output,), (), None, ranks=(0, 1), script="train.py", cwd="/home/user/job"
    )
    return cause_of(read_failure(evidence, end, output))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            f"ImportError: cannot import name 'foo' from {CIRCULAR.format('train')} (/home/user/job/train.py)",
            "import each other",
        ),
        (
            f"ImportError: cannot import name 'LlamaFlash' from 'transformers' ({INSTALLED}/transformers/__init__.py)",
            "versions of packages",
        ),
        (
            "ImportError: cannot import name 'CAPABILITIES' from 'parts' (/home/user/job/parts.py)",
            "the module has no such name",
        ),
        ("ImportError: cannot import name 'Model' from 'parts' (unknown location)", "a folder of that name"),
        ("ModuleNotFoundError: No module named 'utils.data'; 'utils' is not a package", "another module of that name"),
        ("ModuleNotFoundError: No module named 'torch._six'", "a part of it is not"),
        ("ModuleNotFoundError: No module named 'saferun.debug'", "`from saferun import debug`"),
        ("ImportError: attempted relative import with no known parent package", "-m PACKAGE.MODULE"),
        ("ImportError: attempted relative import beyond top-level package", "-m PACKAGE.MODULE"),
        (f"ImportError: {INSTALLED}/x.so: cannot allocate memory in static TLS block", "LD_PRELOAD"),
        ("ImportError: tokenizers>=0.14 is required", "versions of packages"),
        (
            "ImportError: tokenizers>=0.14,<0.19 is required for this module, but found tokenizers==0.13.3.",
            "versions of packages",
        ),
    ],
)
def test_what_is_installed_is_not_to_be_installed(message: str, words: str) -> None:
    """A package of the name of a user's own file is a stranger's."""
    found = found_in(message)
    assert found.class_name == "import_error"
    assert words in found.advice
    assert not found.advice.startswith("install it")
    assert "compiled extension" not in found.advice


@pytest.mark.parametrize(
    "message",
    [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: Using `low_cpu_mem_usage=True` requires Accelerate: `pip install accelerate`",
    ],
)
def test_what_is_not_installed_is(message: str) -> None:
    assert found_in(message).advice.startswith("install it, on every host")


@pytest.mark.parametrize(
    "message",
    [
        f"ImportError: {INSTALLED}/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
        "ImportError: this extension was compiled with another C++ ABI",
        f"ImportError: cannot import name '_C' from 'detectron2' ({INSTALLED}/detectron2/__init__.py)",
        f"ImportError: cannot import name '_C' from {CIRCULAR.format('ops')} (/home/user/ops/__init__.py)",
    ],
)
def test_an_extension_that_does_not_fit_is_to_be_built(message: str) -> None:
    assert "compiled extension" in found_in(message).advice


LATE = (
    "RuntimeError: Failed to import transformers.models.llama.modeling_llama because of the following error (look up "
    "to see its traceback):"
)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (f"{INSTALLED}/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "compiled extension"),
        (f"{INSTALLED}/x.cpython-310-x86_64-linux-gnu.so: undefined symbol: PyCMethod_New", "compiled extension"),
        ("libcudart.so.11.0: cannot open shared object file: No such file or directory", "LD_LIBRARY_PATH"),
        (f"{INSTALLED}/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister", "LD_LIBRARY_PATH"),
    ],
)
def test_a_library_that_does_not_load_is_the_reason_of_a_late_import(reason: str, words: str) -> None:
    """An extension that was built for another torch is to be built again, a missing library to be found."""
    found = found_in(f"{LATE}\n{reason}")
    assert (found.class_name, found.message) == ("import_error", reason)
    assert words in found.advice


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("No module named 'flash_attn_2_cuda'", "install it, on every host"),
        ("No module named 'torch._six'", "a part of it is not"),
        ("cannot import name 'f' from partially initialized module 'a' (/job/a.py)", "import each other"),
        (f"cannot import name 'builder' from 'google.protobuf' ({INSTALLED}/google/__init__.py)", "versions of pack"),
        ("module 'torch.library' has no attribute 'register_fake'", "versions of packages"),
    ],
)
def test_the_reason_of_a_late_import_stands_in_the_headline(reason: str, words: str) -> None:
    """It stands in the next line."""
    found = found_in(f"{LATE}\n{reason}")
    assert (found.class_name, found.message) == ("import_error", f"{LATE} {reason}")
    assert words in found.advice
    assert found_in(LATE).message == LATE


@pytest.mark.parametrize("head", ["ImportError: ", f"{LATE}\n", "OSError: "])
@pytest.mark.parametrize("name", ["libGL.so.1", "libgthread-2.0.so.0", "libSM.so.6", "libsndfile.so.1"])
def test_a_library_of_the_system_is_to_be_installed_there(head: str, name: str) -> None:
    """No package of Python brings it: to build one again does not help."""
    found = found_in(f"{head}{name}: cannot open shared object file: No such file or directory")
    assert found.class_name == "import_error"
    assert "install this library of the system" in found.advice


@pytest.mark.parametrize("name", ["google.protobuf", "ruamel.yaml", "mpl_toolkits.basemap"])
def test_a_part_of_a_name_that_packages_share_is_a_package_of_its_own(name: str) -> None:
    """The name is found because another one has installed a part of it."""
    assert found_in(f"ModuleNotFoundError: No module named '{name}'").advice.startswith("install it")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ok.py", "-m takes a module's name: -m ok"),
        ("parts/ok.py", "-m takes a module's name: -m parts.ok"),
        ("ok", "look at the module's name, and at PYTHONPATH"),
    ],
)
def test_a_file_is_no_module(name: str, advice: str) -> None:
    line = f"/venv/bin/python: Error while finding module specification for '{name}' (ModuleNotFoundError: ...)"
    end = RankEnd(0, 0, 4001, ExitStatus(1, None), 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(0, (line,), "", "", 0.0)
    evidence = Evidence("node1", 90.0, (end,), (output,), (), None, ranks=(0,), script="train.py", cwd="/home/user/job")
    assert cause_of(read_failure(evidence, end, output)).advice == advice


# --------------------------------------------------------------------------------- extensions that the job compiles

HEAD = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 3, in <module>')
CACHE = "/root/.cache/torch_extensions/py311_cu124"
NOT_BUILT = f"ImportError: {CACHE}/cpu_adam/cpu_adam.so: cannot open shared object file: No such file or directory"
BUILD = "RuntimeError: Error building extension 'cpu_adam': [1/3] nvcc fatal"


def printed(rank: int, message: str, *, raised: bool = False) -> RankOutput:
    return RankOutput(rank, (*HEAD, message), "", "", 0.0, raised=raised)


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_that_wait_for_a_build_are_victims_of_the_one_that_builds(stopped: bool) -> None:
    """They load the file as soon as the build has failed, and may end first; saferun may stop the builder then."""
    builder = end_of(0, signum=15, at=100.3, stopped=True) if stopped else end_of(0, code=1, at=100.3)
    outputs = (printed(0, BUILD, raised=stopped), printed(1, NOT_BUILT))
    found = diagnose(evidence_of(builder, end_of(1, code=1, at=100.0), outputs=outputs))
    assert class_of(found) == "python_exception"
    assert "Error building extension 'cpu_adam'" in found.headline
    assert (found.cause and found.cause.ranks, found.victims) == ((0,), (1,))


def test_a_missing_extension_is_the_cause_where_no_rank_failed_to_build_it() -> None:
    for message in ("KeyError: 'x'", BUILD.replace("cpu_adam", "fused_adam")):
        outputs = (printed(0, message), printed(1, NOT_BUILT))
        found = diagnose(evidence_of(end_of(0, code=1, at=100.3), end_of(1, code=1, at=100.0), outputs=outputs))
        assert (class_of(found), found.cause and found.cause.ranks) == ("import_error", (1,))
