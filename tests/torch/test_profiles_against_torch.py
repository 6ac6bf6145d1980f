"""The built-in env profiles against the installed torch: every name they set in this release is really read by it."""

from __future__ import annotations

import importlib.util
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.env.apply import read_versions
from saferun.env.profiles import load_profiles, resolve
from saferun.env.profiles.builtin import PROFILES
from saferun.env.profiles.profile_values import Variable

VERSIONS = read_versions(sys.path)
SPEC = importlib.util.find_spec("torch")
assert SPEC is not None
assert SPEC.submodule_search_locations
TORCH = Path(SPEC.submodule_search_locations[0])

HELD = {
    setting.variable.name: setting.variable
    for name in PROFILES
    for vendor in ("nvidia", "amd", "any")
    for setting in resolve(
        load_profiles([]),
        [name],
        vendor=vendor,
        versions={**VERSIONS, "nccl": "2.29.7", "rocm": "7.1"},
        user_environ={},
        exists=lambda _path: True,
    ).settings
}
BY_LIBRARIES = [v for v in HELD.values() if any((TORCH / "lib" / reader).is_file() for reader in v.reader)]
BY_PYTHON = [v for v in HELD.values() if any(reader.startswith("python: torch") for reader in v.reader)]


def mentions(library: Path, name: str) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name.encode() + b"\0") >= 0


def test_the_release_of_torch_is_found_without_importing_it() -> None:
    code = "from saferun.env.apply import read_versions; import sys; print(read_versions(sys.path)['torch'])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    asked = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("+")[0].strip() == asked.stdout.split("+")[0].strip()


@pytest.mark.parametrize("variable", BY_LIBRARIES, ids=lambda variable: variable.name)
def test_a_library_of_the_installed_torch_mentions_the_name(variable: Variable) -> None:
    """Names that only libraries of other builds read are held to env_names_in_binaries.txt."""
    libraries = [TORCH / "lib" / reader for reader in variable.reader if (TORCH / "lib" / reader).is_file()]
    assert any(mentions(library, variable.name) for library in libraries)


@pytest.mark.parametrize("variable", BY_PYTHON, ids=lambda variable: variable.name)
def test_the_python_module_mentions_the_name(variable: Variable) -> None:
    for reader in variable.reader:
        module = reader.removeprefix("python: ")
        if module.startswith("torch."):
            stem = TORCH.joinpath(*module.split(".")[1:])
            path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
            assert variable.name in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_stack_of_an_exception_is_there_without_addr2line() -> None:
    """The default way to name its functions announces that it may hang, and may: production must not take it."""
    code = "import torch\ntry: torch.empty(2, 3) @ torch.empty(2, 3)\nexcept RuntimeError as error: print(error)"
    environ = {name: HELD[name].value or "" for name in ("TORCH_SHOW_CPP_STACKTRACES", "TORCH_SYMBOLIZE_MODE")}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ)
    assert "c10::detail::torchCheckFail" in done.stdout
    assert "symbolizing" not in done.stderr
