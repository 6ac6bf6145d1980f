"""Imports from memory: the code of modules that another process has read.

A process that may hang (with an ``ImportRecorder``) imports modules as usual, and writes the code of each to a pipe. A
process that may not hang (with ``HeldModules`` in its ``sys.meta_path``) reads that code, and imports from memory. From
then on it never opens a file for an import: a module that is not in memory, and cannot be fetched, is missing.

A shared library is sent as a whole, and loaded from a memory file; from its own file where none can be executed, or
found by a path (/proc is not mounted). The other process has just been able to read that one.

Source: Python, "The import system"; ``importlib._bootstrap_external``, ``SourceLoader`` and ``ExtensionFileLoader``.
"""

from __future__ import annotations

import _imp
import marshal
import os
import struct
import sys
import time
from _frozen_importlib import ModuleSpec
from collections.abc import Callable, Iterable
from itertools import count

from saferun.errors import suppress
from saferun.linux.memory_file import blank_memory_file, memory_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

_LENGTH = struct.Struct("<I")
# The name of the last record, whose content is an order in which the modules can be imported one by one.
_END = ""
_libraries = count()


class ImportRecorder:
    """Records the code of the modules that this process imports, and that the process which gets it does not have yet.

    It is to be made while both have the same modules.
    """

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)
        self._records: dict[str, bytes] = {}
        self._originals: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Start recording."""
        if self._originals is not None:
            return
        external = sys.modules["_frozen_importlib_external"]
        get_code, create_module = self._originals = (
            external.SourceLoader.get_code,
            external.ExtensionFileLoader.create_module,
        )

        def recorded_code(loader: Any, name: str) -> CodeType | None:  # noqa: ANN401 - any SourceLoader
            code: CodeType | None = get_code(loader, name)
            if code is not None:
                self._record(name, loader.get_filename(name), marshal.dumps(code), is_package=loader.is_package(name))
            return code

        def recorded_module(loader: Any, spec: ModuleSpec) -> ModuleType | None:  # noqa: ANN401 - as above
            module: ModuleType | None = create_module(loader, spec)
            self._record(spec.name, loader.path, loader.get_data(loader.path), is_library=True)
            return module

        external.SourceLoader.get_code = recorded_code
        external.ExtensionFileLoader.create_module = recorded_module

    def end(self) -> None:
        """Stop recording."""
        if self._originals is not None:
            external = sys.modules["_frozen_importlib_external"]
            external.SourceLoader.get_code, external.ExtensionFileLoader.create_module = self._originals
            self._originals = None

    def _record(
        self, name: str, path: str, content: bytes | None, *, is_package: bool = False, is_library: bool = False
    ) -> None:
        self._records[name] = marshal.dumps((name, path, is_package, is_library, content))

    def write(
        self,
        names: Iterable[str],
        write: Callable[[bytes], None],
        *,
        pause: Callable[[float], None] = lambda _took_s: None,
    ) -> None:
        """Import modules, and write the records of them and of what they import.

        The record of a module without code that could be written has only its name.

        Args:
            names: the modules; those that cannot be imported are skipped.
            write: writes a whole record.
            pause: called between two modules, with how long the last import has taken, in seconds.
        """
        self.begin()
        for name in [name for name in sys.modules if name not in self._before]:
            with suppress(Exception):  # one that is needed is missing there
                self._record_again(name)  # what names depend on may be among them
        order: list[str] = []
        took_s: float | None = None
        for name in names:
            if name in self._before:
                continue
            if took_s is not None:
                pause(took_s)
            began, known = time.monotonic(), len(sys.modules)
            try:
                __import__(name)
                if name not in self._records:
                    self._record_again(name)
                # In the order in which their imports have ended: what one depends on comes before it, as far as this
                # process did not have it.
                order += [*list(sys.modules)[known:], name]
            except Exception:  # noqa: S112 - the process that needs it reports why
                continue
            self._write_new(write)
            took_s = time.monotonic() - began
        write(_framed(marshal.dumps((_END, "", False, False, marshal.dumps(order)))))

    def _record_again(self, name: str) -> None:
        """Record a module that was imported before recording began, or not from source."""
        spec = sys.modules[name].__spec__
        loader: Any = spec.loader if spec is not None else None
        if spec is None or loader is None:
            return
        if type(loader).__name__ == "ExtensionFileLoader":
            self._record(name, loader.path, loader.get_data(loader.path), is_library=True)
            return
        code = loader.get_code(name) if hasattr(loader, "get_code") else None
        if name not in self._records:
            is_package = spec.submodule_search_locations is not None
            content = marshal.dumps(code) if code is not None else None
            self._record(name, spec.origin or "", content, is_package=is_package)

    def _write_new(self, write: Callable[[bytes], None]) -> None:
        for name, record in self._records.items():
            if record:
                self._records[name] = b""  # that it was written is enough
                write(_framed(record))


def _framed(record: bytes) -> bytes:
    return _LENGTH.pack(len(record)) + record


class HeldModules:
    """A finder for ``sys.meta_path`` that, once sealed, finds modules in memory and nowhere else.

    Forks of this process import from files as usual: a file system that hangs only blocks the fork.

    Args:
        fetch: called with the name of a module that is not in memory. True: it has been fed; False: it is unavailable;
            None: no process can read it, so it is imported from its file.
    """

    def __init__(self, fetch: Callable[[str], bool | None]) -> None:
        self._fetch = fetch
        self._pid = os.getpid()
        self._held: dict[str, tuple[str, bool, bool, int, int]] = {}  # name -> path, kinds, and its span in the file
        self._file = -1  # a memory file, freed when all is imported, unlike the heap
        self._heap = bytearray()  # used if there is no such file, or no room in it
        self._size = 0
        self._rest = bytearray()
        self.order: list[str] | None = None
        """In which the modules can be imported one by one; None: the last record has not been received."""

    def seal(self) -> None:
        """Stop opening files for imports in this process."""
        if self not in sys.meta_path:
            names = [getattr(finder, "__name__", "") for finder in sys.meta_path]
            # Modules of the interpreter itself need no file.
            at = names.index("FrozenImporter") + 1 if "FrozenImporter" in names else 0
            sys.meta_path.insert(at, self)

    def unseal(self) -> None:
        """Import from files again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def feed(self, chunk: bytes) -> None:
        """Process a chunk of a recorder's output."""
        self._rest += chunk
        taken, order = self._take(self._rest)
        del self._rest[:taken]
        if order is not None:
            self.order = order

    def feed_apart(self, content: bytes) -> None:
        """Process the whole output of another recorder in addition."""
        self._take(content)

    def _take(self, content: bytes | bytearray) -> tuple[int, list[str] | None]:
        at, order = 0, None
        while len(content) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(content, at)
            end = at + _LENGTH.size + length
            if len(content) < end:
                break
            name, path, is_package, is_library, code = marshal.loads(content[at + _LENGTH.size : end])  # noqa: S302 - a fork's
            at = end
            if name == _END:
                order = list(marshal.loads(code))  # noqa: S302 - likewise
            else:
                self._held[name] = (path, is_package, is_library, *self._put(code))
        return at, order

    def _put(self, code: bytes | None) -> tuple[int, int]:
        """Store it in the file. Returns its offset and length; length -1: there is none."""
        if code is None:
            return 0, -1
        if not self._size:
            with suppress(OSError):
                self._file = blank_memory_file("saferun-code")
        at, self._size = self._size, self._size + len(code)
        try:
            written = 0
            while self._file >= 0 and written < len(code):
                written += os.pwrite(self._file, code[written:], at + written)
        except OSError:  # no memory for files, or a limit on their size
            self._heap += os.pread(self._file, at, 0)
            os.close(self._file)
            self._file = -1
        if self._file < 0:
            self._heap += code
        return at, len(code)

    def _get(self, at: int, length: int) -> bytes:
        return os.pread(self._file, length, at) if self._file >= 0 else bytes(self._heap[at : at + length])

    def begin(self) -> None:
        """Start to read from a new recorder."""
        self._rest.clear()
        self.order = None

    def forget(self) -> None:
        """Drop modules that have not been imported."""
        self._held.clear()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size = -1, 0
        self._heap.clear()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """As ``importlib.abc.MetaPathFinder``'s.

        Raises:
            ModuleNotFoundError: the module is not in memory, and cannot be fetched.
        """
        if os.getpid() != self._pid:
            return None
        if name not in self._held:
            found = self._fetch(name)
            if found is None:
                return None
            if not found or name not in self._held:
                raise ModuleNotFoundError(f"{name} is not in memory", name=name)
        path, is_package, is_library, at, length = self._held[name]
        if length < 0:
            return None  # without code to record, but another process has just been able to read it
        content = self._get(at, length)
        if is_library:
            return _library_spec(name, path, content)
        spec = ModuleSpec(name, _Loader(content), origin=path, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(path)]
        return spec


def _library_spec(name: str, path: str, content: bytes) -> ModuleSpec | None:
    """A shared library, to be loaded from a memory file; None if there can be none."""
    try:
        fd = memory_file(name, content, executable=True, disks=False)
    except OSError:
        return None
    # A library that is loaded from the same path later would be taken for this one: each has a spelling of its own.
    held = f"/proc/self/fd/{'./' * next(_libraries)}{fd}"
    spec = ModuleSpec(name, _LibraryLoader(fd, path), origin=held)  # type: ignore[arg-type]
    spec.has_location = True
    return spec


class _LibraryLoader:
    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            return _imp.create_dynamic(spec)
        except ImportError:
            # Also because a library that it needs is searched for beside it ($ORIGIN).
            spec.origin = self._path
            return _imp.create_dynamic(spec)
        finally:
            os.close(self._fd)

    def exec_module(self, module: ModuleType) -> None:
        _imp.exec_dynamic(module)


class _Loader:
    def __init__(self, code: bytes) -> None:
        self._code = code

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        code, self._code = self._code, b""  # the module keeps its loader, for good
        exec(marshal.loads(code), module.__dict__)  # noqa: S102, S302 - saferun's own modules
