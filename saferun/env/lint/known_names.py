"""The names in installed libraries and modules, and facts of the host: the input of the rules."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.env.lint.families import COMPOSED_PREFIXES, Family
from saferun.model import Value

Version = tuple[int, ...]


class KnownNames(Value):
    """The names in the libraries and modules of an installation, and what was searched.

    Args:
        readers: name -> the libraries and modules that hold it as a separate string, as if they read it.
        mentions: name -> where it is only part of other text: a message, a comment, the end of a longer name.
        fragments: library -> the second halves of names that it appends to a prefix of its own.
        open_prefixes: prefixes that some code completes at run time.
        owners: family -> its libraries that were searched; without one, the readers of a name are unknown.
        libraries: all libraries that were searched, by file name.
        modules: the distributions whose Python code was searched, with their versions.
        versions: ``torch``, ``nccl`` … -> version.
        unsearched: what could not be read, or not in time; empty if everything was searched.
    """

    readers: Mapping[str, tuple[str, ...]]
    mentions: Mapping[str, tuple[str, ...]]
    fragments: Mapping[str, frozenset[str]]
    open_prefixes: tuple[str, ...]
    owners: Mapping[str, tuple[str, ...]]
    libraries: tuple[str, ...]
    modules: tuple[str, ...]
    versions: Mapping[str, Version]
    unsearched: tuple[str, ...]

    def readers_of(self, name: str) -> tuple[str, ...]:
        """The libraries and modules that hold a name as a separate string, or compose it."""
        found = self.readers.get(name)
        if found:
            return found
        for prefix in COMPOSED_PREFIXES:
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                return tuple(library for library, held in self.fragments.items() if prefix in held and rest in held)
        return ()

    def is_read(self, name: str) -> bool:
        """Whether a library or module seems to read a name."""
        return bool(self.readers_of(name))

    def has_owner(self, family: Family) -> bool:
        """Whether a library that reads the family's names was searched."""
        return bool(self.owners.get(family.name))


class PathFact(Value):
    """The state of a path in a variable on this host."""

    exists: bool
    is_directory: bool
    may_be_made: bool  # it exists and may be written to, or the nearest directory above that exists may be


_NO_PATHS: Mapping[str, PathFact] = {}
_NO_VERSIONS: Mapping[str, Version] = {}


class HostFacts(Value):
    """Facts of a host; None if unknown.

    Args:
        interfaces: names of the network interfaces.
        ib_devices: names of the InfiniBand and RoCE devices.
        gpu_count: number of GPUs, hidden ones included.
        vendor: ``nvidia``, ``amd`` or "" (no GPU).
        paths: the paths in the environment (see ``rules.paths_to_examine``).
        versions: versions that are known for certain; they override those of the scan.
    """

    interfaces: frozenset[str] | None = None
    ib_devices: frozenset[str] | None = None
    gpu_count: int | None = None
    vendor: str | None = None
    paths: Mapping[str, PathFact] = _NO_PATHS
    versions: Mapping[str, Version] = _NO_VERSIONS


def version_text(version: Version) -> str:
    """A version as text."""
    return ".".join(str(part) for part in version)
