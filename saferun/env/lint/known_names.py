"""What the installed libraries and modules mention, and what the host has: the facts that the rules judge by."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.env.lint.families import COMPOSED_PREFIXES, Family
from saferun.model import Value

Version = tuple[int, ...]


class KnownNames(Value):
    """Which names the libraries and modules of an installation mention, and what was searched.

    Args:
        readers: name -> the libraries and modules that hold it as a string of its own, as a name that is read is held.
        mentions: name -> where it merely stands within other text: a message, a comment, the end of a longer name.
        fragments: library -> the second halves of names that it joins to a prefix of its own.
        open_prefixes: beginnings of names that something completes while it runs.
        owners: family -> its libraries that were searched; without one, nobody can tell who reads a name.
        libraries: all libraries that were searched, by file name.
        modules: the distributions whose Python code was searched, with their versions.
        versions: ``torch``, ``nccl`` … -> version.
        unsearched: what could not be read, or not in time; empty when all was.
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
        """The libraries and modules that hold a name as a string of its own, or put it together."""
        found = self.readers.get(name)
        if found:
            return found
        for prefix in COMPOSED_PREFIXES:
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                return tuple(library for library, held in self.fragments.items() if prefix in held and rest in held)
        return ()

    def is_read(self, name: str) -> bool:
        """Whether something holds a name as one that is read."""
        return bool(self.readers_of(name))

    def has_owner(self, family: Family) -> bool:
        """Whether a library that would read the family's names was searched."""
        return bool(self.owners.get(family.name))


class PathFact(Value):
    """What a path that a variable names is on this host."""

    exists: bool
    is_directory: bool
    may_be_made: bool  # it exists and may be written to, or the nearest directory above that exists may be


_NO_PATHS: Mapping[str, PathFact] = {}
_NO_VERSIONS: Mapping[str, Version] = {}


class HostFacts(Value):
    """What a host has; None where it is not known.

    Args:
        interfaces: names of the network interfaces.
        ib_devices: names of the InfiniBand and RoCE devices.
        gpu_count: number of GPUs, hidden ones included.
        vendor: ``nvidia``, ``amd`` or "" (no GPU).
        paths: what the paths are that the environment names (see ``rules.paths_to_examine``).
        versions: versions that are known better than by looking at the installation; they win over the scan's.
    """

    interfaces: frozenset[str] | None = None
    ib_devices: frozenset[str] | None = None
    gpu_count: int | None = None
    vendor: str | None = None
    paths: Mapping[str, PathFact] = _NO_PATHS
    versions: Mapping[str, Version] = _NO_VERSIONS


def version_words(version: Version) -> str:
    """A version as people write it."""
    return ".".join(str(part) for part in version)
