"""The search for env profiles, which are read when they are needed.

Those that come with saferun are compiled into ``builtin``: a launch with them reads no YAML at all. A directory is only
listed, and its files are read when one of its profiles is needed, so that a malformed file that is not used stops no
launch. What the user did not name is used only if no other user can have planted it (``found``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from saferun.env.profiles.quoting import advice, quoted
from saferun.errors import UsageError
from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.env.profiles.profile_values import Profile

SETTINGS_FILE = "saferun.yaml"
_OPTION = "--env-profile-path"
_SUFFIXES = (".yaml", ".yml")
_MAX_FILES = 1000  # per directory: more than there ever are


class FoundPath(str):
    """A path of the search that the user did not name."""

    __slots__ = ()


class _Source(Value):
    """A file or directory with profiles.

    Attributes:
        files: name of each profile -> its file; None: those that come with saferun.
        read: the profiles read so far.
        found: whether the user did not name the directory.
    """

    files: Mapping[str, str] | None
    read: dict[str, Profile]
    found: bool = False


def user_directory(environ: Mapping[str, str]) -> str:
    """The directory for the user's own profiles, whether or not it is there; empty: there cannot be one.

    Args:
        environ: for ``XDG_CONFIG_HOME`` and ``HOME``.

    Source: XDG Base Directory Specification, https://specifications.freedesktop.org/basedir-spec/latest/.
    """
    config = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(config):  # the specification: relative paths are invalid
        home = environ.get("HOME", "")
        config = os.path.join(home, ".config") if os.path.isabs(home) else ""
    return os.path.join(config, "saferun", "profiles") if config else ""


def default_search_path(
    extra: Sequence[str], environ: Mapping[str, str], directory: str = ".", *, with_user: bool = True
) -> list[str]:
    """The files and directories to search for profiles, the nearest first; those that do not exist are left out.

    Those that the user did not name have a type of their own (``FoundPath``), and must not be another user's.

    Args:
        extra: the values of ``--env-profile-path``; these must exist, and are kept.
        environ: for ``XDG_CONFIG_HOME`` and ``HOME``.
        directory: the directory of ``saferun.yaml``.
        with_user: whether to search the user's own directory; False: it is missing, or does not answer.
    """
    found = [part for entry in extra for part in entry.split(os.pathsep) if part]
    settings = os.path.join(directory, SETTINGS_FILE)
    if os.path.isfile(settings) and not any(_is_same(settings, entry) for entry in found):
        found.append(FoundPath(settings))
    user = user_directory(environ) if with_user else ""
    if user and os.path.isdir(user):
        found.append(FoundPath(user))
    return found


def _is_same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


class ProfileSet:
    """The profiles of a search path, the built-in ones last. A profile hides later ones of the same name."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._sources = sources

    def names(self) -> list[str]:
        """The names of all profiles, in alphabetical order. Files are not opened."""
        return sorted({name for source in self._sources for name in _names(source)})

    def get(self, name: str, *, beyond: Profile | None = None) -> Profile:
        """The first profile of a name.

        Args:
            name: the profile's name.
            beyond: only later ones than this profile of the same name: a profile may extend the one it hides.

        Raises:
            UsageError: there is none, or its file is malformed.
        """
        passed = beyond is None
        for source in self._sources:
            profile = _profile(source, name)
            if profile is not None and passed:
                return profile
            passed = passed or (profile is not None and profile == beyond)
        if beyond is not None:
            raise UsageError(f"{beyond.location}: profile {name} extends itself", "name another profile under extends")
        raise UsageError(f"no env profile is named {quoted(name)}", advice(name, self.names()))


def load_profiles(search_path: Sequence[str]) -> ProfileSet:
    """Load the profiles of the files and directories of a search path, and those that come with saferun.

    A directory holds one profile a file, named like the file (``mine.yaml``: ``mine``). A file holds one profile, or
    with the key ``profiles`` several of them by name, as a file of saferun's settings does.

    Raises:
        UsageError: an entry does not exist, or a file with several profiles is malformed.
    """
    sources = [_source(entry) for entry in search_path]
    sources.append(_Source(None, {}))
    return ProfileSet(sources)


def _source(entry: str) -> _Source:
    fd = None
    if isinstance(entry, FoundPath):
        from saferun.env.profiles.found import counts, open_found_file

        is_directory = os.path.isdir(entry)
        fd = None if is_directory else open_found_file(entry, _OPTION)
        if fd is None and not (is_directory and counts(entry, _OPTION, is_directory=True)):
            return _Source({}, {})
    if os.path.isdir(entry):
        return _Source(_listed(entry), {}, isinstance(entry, FoundPath))
    if fd is None and not os.path.exists(entry):
        raise UsageError(f"no env profiles at {quoted(entry)}", "give --env-profile-path a directory or a YAML file")
    from saferun.env.profiles.validation import PROFILE_NAME, profiles_from_collection
    from saferun.env.profiles.yaml_nodes import read_yaml

    root = read_yaml(entry, fd=fd)
    collection = None
    if root is not None and root.kind == "mapping":
        collection = next((value for key, value in root.pairs if key.text == "profiles"), None)
    if collection is not None:
        read = {} if collection.is_null else profiles_from_collection(collection)
        return _Source(dict.fromkeys(read, entry), read)
    if os.path.basename(entry) == SETTINGS_FILE:
        return _Source({}, {})  # settings without profiles
    name = _stem(entry)
    if not PROFILE_NAME.fullmatch(name):
        raise UsageError(f"{quoted(entry)} cannot name a profile", "use letters, digits, '-', '_' and '.'")
    return _Source({name: entry}, {})


def _listed(directory: str) -> dict[str, str]:
    try:
        entries = sorted(os.listdir(directory))[:_MAX_FILES]
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}", "make the directory readable") from None
    # A settings file is never a profile.
    files = [entry for entry in entries if entry.endswith(_SUFFIXES) and entry != SETTINGS_FILE]
    return {_stem(entry): os.path.join(directory, entry) for entry in files if not entry.startswith(".")}


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _names(source: _Source) -> list[str]:
    if source.files is not None:
        return [name for name in source.files if _counts(source, name)]
    from saferun.env.profiles.builtin import PROFILES

    return list(PROFILES)


def _profile(source: _Source, name: str) -> Profile | None:
    if source.files is None:
        from saferun.env.profiles.builtin import PROFILES

        return PROFILES.get(name)
    if name not in source.read and name in source.files:
        fd = None
        if source.found:
            from saferun.env.profiles.found import open_found_file

            fd = open_found_file(source.files[name], _OPTION)
            if fd is None:
                return None
        source.read[name] = read_profile(source.files[name], name, fd=fd)
    return source.read.get(name)


def _counts(source: _Source, name: str) -> bool:
    if not source.found or source.files is None:
        return True
    from saferun.env.profiles.found import counts

    return counts(source.files[name], _OPTION)


def read_profile(path: str, name: str, *, shown: str | None = None, fd: int | None = None) -> Profile:
    """Read the profile in a file of its own.

    Args:
        path: the file.
        name: the profile's name.
        shown: the name of the file in messages and origins, by default ``path``.
        fd: the file, if it is already open; it is closed.

    Raises:
        UsageError: the file is malformed.
    """
    from saferun.env.profiles.profile_values import Location, Profile
    from saferun.env.profiles.validation import profile_from_node
    from saferun.env.profiles.yaml_nodes import read_yaml

    root = read_yaml(path, shown=shown, fd=fd)
    return Profile(name, Location(shown or path, 1)) if root is None else profile_from_node(name, root)
