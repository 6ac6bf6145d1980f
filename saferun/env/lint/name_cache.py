"""The results of scans, cached between launches in the user's cache directory."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from typing import Final

from saferun.model import Value

_FORMAT: Final = 1
_MAX_BYTES = 8 << 20
_MAX_FILES = 8
_PREFIX = "env-names-"


class Unit(Value):
    """The names in one file, distribution or directory.

    Args:
        stamp: identifies the content; a change makes the entry invalid.
        readers: names that are separate strings.
        mentions: names within other text.
        fragments: second halves of names, which the library appends to a prefix.
        open_prefixes: prefixes that some code completes.
        files: further files that belong to it (the shared objects of a distribution).
        asked: names that were searched one by one -> 2 a separate string, 1 a mention, 0 not found.
        version: its version, or "".
        families: families whose sentinels one of its shared objects holds.
    """

    stamp: str
    readers: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    fragments: tuple[str, ...] = ()
    open_prefixes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    asked: Mapping[str, int] = {}
    version: str = ""
    families: tuple[str, ...] = ()


def default_directory(environ: Mapping[str, str]) -> str | None:
    """The cache directory by the XDG rules; None if this user has no home.

    Source: https://specifications.freedesktop.org/basedir-spec/latest/
    """
    base = environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        home = environ.get("HOME", "")
        if not home.startswith("/"):
            return None
        base = f"{home}/.cache"
    return f"{base}/saferun"


def path_for(directory: str, roots: Iterable[str]) -> str:
    """The cache file of an installation, named after the directories that were searched."""
    # A collision of names is harmless: each unit has its own path.
    digest = zlib.crc32("\0".join(roots).encode(errors="surrogateescape"))
    return f"{directory}/{_PREFIX}{digest:08x}.json"


def load(path: str) -> dict[str, Unit]:
    """The cached units; none if the file is missing, another user's, too large or malformed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            # Another user's file could hide findings, or fake them.
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _MAX_BYTES:
                return {}
            with os.fdopen(os.dup(fd), "rb") as file:
                content = json.loads(file.read(_MAX_BYTES + 1))
        finally:
            os.close(fd)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return {}
        return {str(key): _unit(row) for key, row in content["units"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
        return {}


def save(path: str, units: Mapping[str, Unit]) -> None:
    """Write the cache atomically, for this user only; if that fails, the next launch scans again."""
    temporary = f"{path}.{os.getpid()}"
    try:
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        rows = {key: unit._replace(asked=dict(unit.asked)) for key, unit in units.items()}
        content = json.dumps({"format": _FORMAT, "units": rows}, ensure_ascii=True, separators=(",", ":")).encode()
        if len(content) > _MAX_BYTES:
            return
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        _drop_oldest(directory)
    except OSError:
        return


def _unit(row: list[object]) -> Unit:
    stamp, readers, mentions, fragments, open_prefixes, files, asked, version, families = row
    if not isinstance(asked, dict):
        raise TypeError
    answers = {str(name): int(answer) for name, answer in asked.items()}
    return Unit(
        str(stamp), _texts(readers), _texts(mentions), _texts(fragments), _texts(open_prefixes), _texts(files), answers,
        str(version), _texts(families),
    )  # fmt: skip


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError
    return tuple(values)


def _drop_oldest(directory: str) -> None:
    with os.scandir(directory) as entries:
        files = [(entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in entries if _is_ours(entry)]
    for _, path in sorted(files)[:-_MAX_FILES]:
        os.unlink(path)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(_PREFIX)  # including temporary files of killed processes
