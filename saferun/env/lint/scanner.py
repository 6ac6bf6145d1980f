"""The names of environment variables in installed libraries and Python modules, from their files.

Two stages. The packages that read a job's settings (torch, NVIDIA's and AMD's libraries, Triton, …) and the system's
libraries of that kind are searched for all names. All other packages are only searched for those names that nothing
seems to read otherwise.

The results are cached (``name_cache``). A shared object is unchanged if its size and modification time are. For the
sources of a distribution its RECORD file is checked: a package that is installed, upgraded or removed gets a new one,
and to stat thousands of sources at every launch would take longer than all the rest. (A variable that a user adds to an
installed module by hand is not found until the next installation.) The user's own code is checked file by file, since
it does change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

from saferun.env.lint import name_cache
from saferun.env.lint.families import FAMILIES
from saferun.env.lint.installation import Installation
from saferun.env.lint.known_names import KnownNames, Version
from saferun.env.lint.name_cache import Unit
from saferun.env.lint.names_in_files import answer, library_strings, nothing, read_library, read_source, source_text
from saferun.env.lint.sources import Source, files_of, find_sources, stamp_of, stamp_of_file
from saferun.env.profiles.version_ranges import numbers_of
from saferun.model import Value

_MAX_ASKED = 256  # names that the other packages are searched for
_ACCELERATOR_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def scan(
    installation: Installation,
    *,
    cache_directory: str | None = None,
    wanted: Callable[[KnownNames], Iterable[str]] | None = None,
    budget_s: float = 10.0,
) -> KnownNames:
    """Scan the names in the libraries and modules of an installation. Never raises for what it finds there.

    A file that is malformed, unreadable or vanishes is skipped; what could not be read in time is listed in
    ``unsearched``, and found at the next call, since the results so far are cached.

    Args:
        installation: what to search.
        cache_directory: where to cache the results; None: no cache.
        wanted: returns the names to search in the other packages, from the result of the first stage.
        budget_s: how long it may take.
    """
    deadline = time.monotonic() + budget_s
    roots = [*installation.package_directories, *installation.source_directories, *installation.library_directories]
    cache_path = name_cache.path_for(cache_directory, roots) if cache_directory else None
    kept = name_cache.load(cache_path) if cache_path else {}
    search = _Search(kept, deadline)
    sources = list(find_sources(installation))
    for source in sources:
        if source.is_central:
            search.for_all_knobs(source)
    names: tuple[str, ...] = ()
    if wanted is not None:
        names = tuple(sorted(set(wanted(_summary(sources, search, ())))))
        if len(names) > _MAX_ASKED:
            search.unsearched.append(f"{len(names) - _MAX_ASKED} more unknown names")
            names = names[:_MAX_ASKED]
    if names:
        for source in sources:
            if not source.is_central:
                search.for_names(source, names)
    if cache_path and not search.units.items() <= kept.items():
        # Earlier results of other packages are kept while these are installed.
        present = {source.path for source in sources}
        name_cache.save(cache_path, {key: unit for key, unit in {**kept, **search.units}.items() if key in present})
    return _summary(sources, search, names)


class _Read(Value):
    stamp: str  # "": not everything could be read, so the next launch tries again
    libraries: tuple[str, ...]


class _Search:
    """Scans sources, using the cache for unchanged ones."""

    def __init__(self, kept: Mapping[str, Unit], deadline: float) -> None:
        self._kept = kept
        self._deadline = deadline
        self.units: dict[str, Unit] = {}
        self.unsearched: list[str] = []

    def for_all_knobs(self, source: Source) -> None:
        """Add all names of settings in a source."""
        kept = self._unchanged(source)
        if kept is not None:
            self.units[source.path] = kept
            return
        held = nothing()
        read = self._read(
            source, lambda path, is_library: read_library(path, held) if is_library else read_source(path, held)
        )
        if read is not None:
            version = max(held.versions, key=numbers_of, default="") or source.version
            self.units[source.path] = Unit(
                stamp=read.stamp,
                readers=tuple(sorted(held.readers)),
                mentions=tuple(sorted(held.mentions - held.readers)),
                fragments=tuple(sorted(held.fragments)),
                open_prefixes=tuple(sorted(held.open_prefixes)),
                files=read.libraries,
                version=version,
                families=tuple(sorted(held.families)),
            )

    def for_names(self, source: Source, names: Iterable[str]) -> None:
        """Add those of these names that a source holds."""
        kept = self._unchanged(source) or Unit("", version=source.version)
        answers = {name: kept.asked.get(name, 0) for name in names}
        new = [name for name in names if name not in kept.asked]
        if not new and kept.stamp:
            self.units[source.path] = kept
            return

        def ask(path: str, is_library: bool) -> None:  # noqa: FBT001 - same signature as the other reader
            for text in library_strings(path) if is_library else (source_text(path),):
                for name, level in answer(new, text, is_library=is_library):
                    answers[name] = max(level, answers[name])

        read = self._read(source, ask)
        if read is not None:
            older = [(name, level) for name, level in kept.asked.items() if name not in answers]
            asked = {**dict(older[-_MAX_ASKED:]), **answers}
            self.units[source.path] = kept._replace(stamp=read.stamp, files=read.libraries, asked=asked)

    def _unchanged(self, source: Source) -> Unit | None:
        kept = self._kept.get(source.path)
        try:
            return kept if kept is not None and kept.stamp == stamp_of(source, kept.files) else None
        except OSError:
            return None

    def _read(self, source: Source, read: Callable[[str, bool], None]) -> _Read | None:
        """Read all files of a source; None if that is not possible, or not in time."""
        libraries: list[str] = []
        stamps: list[str] = []
        complete = True
        try:
            # Before reading, so that a file that is replaced meanwhile is read again the next time.
            stamps.append(stamp_of(source))
            for path, is_library in files_of(source):
                if time.monotonic() > self._deadline:
                    self.unsearched.append(source.name)
                    return None
                try:
                    if is_library and source.kind != "library":
                        stamps += [stamp_of_file(path)] if source.kind == "distribution" else []
                        libraries.append(path)
                    read(path, is_library)
                except FileNotFoundError:
                    libraries = [library for library in libraries if library != path]
                except OSError:
                    complete = False
        except OSError:
            complete = False
        if not complete:
            self.unsearched.append(source.name)
        return _Read(",".join(stamps) if complete else "", tuple(libraries))


def _summary(sources: list[Source], search: _Search, names: tuple[str, ...]) -> KnownNames:
    readers: dict[str, list[str]] = {}
    mentions: dict[str, list[str]] = {}
    found = [(source, search.units[source.path]) for source in sources if source.path in search.units]
    for source, unit in found:
        asked = [(name, unit.asked[name]) for name in names if unit.asked.get(name)]
        for name in [*unit.readers, *(name for name, level in asked if level > 1)]:
            readers.setdefault(name, []).append(source.title)
        for name in [*unit.mentions, *(name for name, level in asked if level == 1)]:
            mentions.setdefault(name, []).append(source.title)
    libraries = [
        os.path.basename(path)
        for source, unit in found
        if source.is_central
        for path in ((source.path,) if source.kind == "library" else unit.files)
    ]
    return KnownNames(
        readers={name: tuple(titles) for name, titles in readers.items()},
        mentions={name: tuple(titles) for name, titles in mentions.items() if name not in readers},
        fragments={source.title: frozenset(unit.fragments) for source, unit in found if unit.fragments},
        open_prefixes=tuple(sorted({prefix for _, unit in found for prefix in unit.open_prefixes} - set(readers))),
        owners=_owners(libraries, [(family, source.title) for source, unit in found for family in unit.families]),
        libraries=tuple(dict.fromkeys(libraries)),
        modules=tuple(source.title for source, _ in found if source.is_central and source.kind == "distribution"),
        versions=_versions(found),
        unsearched=tuple(search.unsearched),
    )


def _owners(libraries: list[str], by_sentinel: list[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    owners = {}
    for family in FAMILIES:
        found = [name for name in libraries if name.startswith(family.owners)]
        found = found or [title for name, title in by_sentinel if name == family.name]
        owners[family.name] = tuple(dict.fromkeys(found))
    owners["torch for accelerators"] = tuple(name for name in libraries if name.startswith(_ACCELERATOR_LIBRARIES))
    return owners


def _versions(found: list[tuple[Source, Unit]]) -> dict[str, Version]:
    versions: dict[str, Version] = {}
    for source, unit in found:
        if unit.version:
            # torch loads the libnccl of the wheel beside it before one of the system's.
            is_nccl = "nccl" in source.name.lower()
            key = "nccl" if is_nccl else source.name.lower()
            if source.kind == "distribution" or key not in versions:
                versions[key] = numbers_of(unit.version)
    return versions
