"""Imports of saferun's own modules, at about half the cost.

A start imports more than a hundred of them, and Python's own way to one module is made for everything that a module can
be. Here it is a source file beside its ``__pycache__``: its code is read if it belongs to that source, with two system
calls to open and one to look. Whatever is different, from an edited source to a damaged file, is left to Python.

Sources: Python, "The import system", "Cached bytecode invalidation"; PEP 552 (what a .pyc begins with).
"""

from __future__ import annotations

import marshal
import posix
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

# Valid for a source of the time and size that follow.
_BEGIN = MAGIC_NUMBER + bytes(4)
_HEADER_BYTES = 16
_SUFFIX = f".{sys.implementation.cache_tag}.pyc"
_PYTHONS = SourceFileLoader.get_code


class QuickLoader(SourceFileLoader):
    """Python's loader of source files, but for the way to a module's code."""

    cached = ""
    source: posix.stat_result

    def get_code(self, fullname: str) -> CodeType | None:
        """The code from ``__pycache__`` if it belongs to the source; else what Python makes of that."""
        # Whoever has put something in the place of Python's method wants to see every module.
        if SourceFileLoader.get_code is _PYTHONS:
            try:
                content = _read_code(self.cached, self.source)
                if content is not None:
                    code: CodeType = marshal.loads(content)  # noqa: S302 - as Python does
                    return code
            except (OSError, EOFError, ValueError, TypeError):
                pass
        return super().get_code(fullname)


def _read_code(cached: str, source: posix.stat_result) -> memoryview | None:
    """The marshalled code of a source; None: the file is another source's, or does not say whose it is."""
    fd = posix.open(cached, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        size = posix.fstat(fd).st_size
        content = posix.read(fd, size + 1)
    finally:
        posix.close(fd)
    stamp = (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    expected = _BEGIN + b"".join(number.to_bytes(4, "little") for number in stamp)
    return memoryview(content)[_HEADER_BYTES:] if len(content) == size and content.startswith(expected) else None


class QuickFinder:
    """A finder for ``sys.meta_path`` of the modules of one package; all others it leaves to those behind it.

    No module has the name of a folder beside it.

    Args:
        package: its name.
    """

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """As ``importlib.abc.MetaPathFinder``'s."""
        if not name.startswith(self._prefix) or path is None or len(path) != 1:
            return None
        folder, name_here = path[0], name.rpartition(".")[2]
        file, folders = f"{folder}/{name_here}.py", []
        try:
            source = posix.stat(file)
        except OSError:
            folder, name_here = f"{folder}/{name_here}", "__init__"
            file, folders = f"{folder}/__init__.py", [folder]
            try:
                source = posix.stat(file)
            except OSError:
                return None
        loader = QuickLoader(name, file)
        loader.source = source
        spec = ModuleSpec(name, loader, origin=file, is_package=bool(folders))
        spec.has_location = True
        spec.cached = loader.cached = f"{folder}/__pycache__/{name_here}{_SUFFIX}"
        if folders:
            spec.submodule_search_locations = folders
        return spec


def import_quickly(package: str) -> None:
    """Find the modules of a package by a ``QuickFinder``, if Python keeps code in ``__pycache__`` and nowhere else."""
    if sys.pycache_prefix is not None or sys.flags.optimize:
        return
    names = [getattr(finder, "__name__", "") for finder in sys.meta_path]
    if "PathFinder" in names:
        sys.meta_path.insert(names.index("PathFinder"), QuickFinder(package))
