"""What a scan found, kept between launches in the user's cache directory."""

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
    """What one file, distribution or folder holds.

    Args:
        stamp: what must be unchanged for this to hold still.
        readers: knobs that are strings of their own.
        mentions: knobs that stand within other text.
        fragments: second halves of names, of a library that joins them to a prefix.
        open_prefixes: beginnings of names that something completes.
        files: further files that belong to it (the shared objects of a distribution).
        asked: names that were looked for in it one by one -> 2 a string of its own, 1 a mention, 0 not there.
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
    """Where the cache is by the XDG rules, or None where this user has no home.

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
    """The cache file of an installation, which is known by the directories that were searched."""
    # Two installations that came to the same name would only overwrite each other: each unit knows its own path.
    digest = zlib.crc32("\0".join(roots).encode(errors="surrogateescape"))
    return f"{directory}/{_PREFIX}{digest:08x}.json"


def load(path: str) -> dict[str, Unit]:
    """The units that were kept; none where the file is missing, foreign, too large or makes no sense."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            # Somebody else's file could hide what is wrong with an environment, or claim what is not.
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
    """Keep the units, for this user alone and in one step; where that fails, the next launch scans again."""
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
    return entry.name.startswith(_PREFIX)  # what a killed process left half written is among them
