"""Imports of saferun's own modules by the short way: it leads to what Python's own way leads to, or to that way."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from saferun.linux.held_code import ImportRecorder
from saferun.linux.quick_imports import QuickFinder

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "saferun"


@pytest.fixture(name="folder")
def a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``shop`` with the module ``tea`` and the package ``shop.room``, found by the short way."""
    folder = tmp_path / "shop"
    (folder / "room").mkdir(parents=True)
    for name in ("__init__.py", "room/__init__.py", "tea.py"):
        (folder / name).write_text("VALUE = 'first'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "meta_path", [QuickFinder("shop"), *sys.meta_path])
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def compiled(source: Path) -> Path:
    """The file of its code."""
    return Path(importlib.util.cache_from_source(str(source)))


def imported(name: str) -> ModuleType:
    """The module, imported anew."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def spec_of(name: str) -> ModuleSpec:
    spec = imported(name).__spec__
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", ["shop.tea", "shop.room"])
def test_a_module_is_as_if_python_had_found_it(folder: Path, name: str) -> None:
    """Tracebacks, reloads, inspect and what reads a package's files depend on it."""
    mine = spec_of(name)
    theirs = PathFinder.find_spec(name, [str(folder)])
    assert type(mine.loader).__name__ == "QuickLoader"
    assert theirs is not None
    for field in ("name", "origin", "cached", "has_location", "submodule_search_locations", "parent"):
        assert getattr(mine, field) == getattr(theirs, field), field
    module = importlib.reload(imported(name))
    assert (module.__file__, module.__cached__) == (theirs.origin, theirs.cached)
    assert mine.loader.get_source(name) == "VALUE = 'first'\n"  # type: ignore[union-attr]


def test_code_is_read_and_not_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what it is for."""
    py_compile.compile(str(folder / "tea.py"))
    importlib.import_module("shop")
    monkeypatch.setattr("importlib._bootstrap_external.SourceLoader.source_to_code", None)
    assert imported("shop.tea").VALUE == "first"


def test_an_edited_source_is_compiled(folder: Path) -> None:
    """Whoever changes saferun runs what was changed."""
    source = folder / "tea.py"
    py_compile.compile(str(source))
    source.write_text("VALUE = 'other'\n")
    os.utime(source, (1, 1))
    assert imported("shop.tea").VALUE == "other"
    source.write_text("VALUE = 'longer still'\n")
    os.utime(source, (1, 1))
    assert imported("shop.tea").VALUE == "longer still"


@pytest.mark.parametrize("length", [0, 10, 16, 40])
def test_damaged_code_is_no_worse_than_none(folder: Path, length: int) -> None:
    """A full disk leaves such files. Python itself refuses one that is whole to the end of what it begins with."""
    source = folder / "tea.py"
    py_compile.compile(str(source))
    file = compiled(source)
    file.write_bytes(file.read_bytes()[:length])
    if length < 16:
        assert imported("shop.tea").VALUE == "first"
        return
    with pytest.raises(EOFError):
        imported("shop.tea")


def test_code_that_is_checked_by_a_hash_is_python_s(folder: Path) -> None:
    """Its source may have another time."""
    source = folder / "tea.py"
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    source.write_text("VALUE = 'hashed'\n")
    assert imported("shop.tea").VALUE == "hashed"


def test_what_is_not_there_is_not_found(folder: Path) -> None:
    """Nor is what belongs to others."""
    with pytest.raises(ModuleNotFoundError, match=r"shop\.coffee"):
        importlib.import_module("shop.coffee")
    finder = QuickFinder("shop")
    assert finder.find_spec("shop") is None
    assert finder.find_spec("shopping.tea", [str(folder)]) is None
    assert finder.find_spec("shop.tea", [str(folder), "/elsewhere"]) is None


def test_whoever_replaces_pythons_method_sees_every_module(folder: Path) -> None:
    """The examiner reads modules for the supervisor this way."""
    py_compile.compile(str(folder / "tea.py"))
    written: list[bytes] = []
    recorder = ImportRecorder()
    recorder.write(["shop.tea"], written.append)
    recorder.end()
    assert any(b"shop.tea" in record and b"first" in record for record in written)


def test_no_module_has_the_name_of_a_folder_beside_it() -> None:
    """Python would take the folder."""
    assert not [path for path in PACKAGE.rglob("*.py") if path.with_suffix("").is_dir()]


@pytest.mark.parametrize("options", [("-O",), ("-X", "pycache_prefix=/nowhere")])
def test_code_that_python_keeps_elsewhere_is_left_to_it(options: tuple[str, ...]) -> None:
    """Asserts would come back."""
    assert "QuickFinder" in _finders()
    assert "QuickFinder" not in _finders(*options)


def _finders(*options: str) -> str:
    program = "import sys, saferun.__main__; print(sys.meta_path)"
    return subprocess.run(
        [sys.executable, "-B", *options, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_the_code_is_that_of_the_source(folder: Path) -> None:
    """Equal to what Python compiles, for whatever saferun imports."""
    loader = spec_of("shop.tea").loader
    code = loader.get_code("shop.tea")  # type: ignore[union-attr]
    assert isinstance(code, CodeType)
    assert code == compile((folder / "tea.py").read_text(), str(folder / "tea.py"), "exec", dont_inherit=True)


def test_a_python_without_these_parts_imports_as_ever() -> None:
    """They are no public interface: a later release may not have them."""
    program = (
        "import sys, runpy; sys.modules['saferun.linux.quick_imports'] = None; sys.argv = ['saferun', '--version']"
    )
    ended = subprocess.run(  # the module is as good as missing
        [sys.executable, "-c", f"{program}; runpy.run_module('saferun', run_name='__main__')"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout[:8]) == (0, "saferun ")
