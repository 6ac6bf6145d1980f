"""The record of a launch that keeps no files: its run.json, in a private directory of the user, while it lives.

``$XDG_RUNTIME_DIR/saferun``, else ``/run/user/UID/saferun``, ``/dev/shm/saferun-UID`` or ``/tmp/saferun-UID``: the
first that can be made, and is this user's alone. In it each run has a directory like a run directory, with a run.json
and nothing else, by which saferunctl finds it. The process that writes it keeps it locked and removes it at the end;
what a launch that was killed has left is removed by the next one. It is a convenience: without a place for it, the run
is not listed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from itertools import islice

from saferun.errors import suppress
from saferun.files.run_files import read_run_record
from saferun.linux.descriptors import close_on_error
from saferun.linux.ownership import make_directory, open_directory, open_ours, open_temporary, remove_tree
from saferun.linux.process_identity import is_living

# Directories for all users, with the sticky bit: only the owner of what is in them can rename it.
_OF_ALL = ("/dev/shm", "/tmp")  # noqa: S108 - the owner of what is in them is checked
_MOST_RUNS = 1000
_MOST_NAMES = 100
# A directory without a record may be one that is being made.
_UNUSED_S = 3600.0
# The directory may be removed by another launch, whose record was the last one, while this one adds its own.
_ATTEMPTS = 3


def record_directories(environ: Mapping[str, str]) -> list[str]:
    """Directories of this user's that may have records, the best one first. They need not exist."""
    uid = os.geteuid()
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    directories = [os.path.join(runtime, "saferun")] if os.path.isabs(runtime) else []
    directories += [f"/run/user/{uid}/saferun", f"/dev/shm/saferun-{uid}", f"/tmp/saferun-{uid}"]  # noqa: S108 - checked
    return list(dict.fromkeys(directories))


def recorded_runs(environ: Mapping[str, str]) -> list[str]:
    """The directories of the runs that have a record here, the newest first."""
    found: list[str] = []
    for directory in record_directories(environ):
        with suppress(OSError):
            fd = open_directory(directory, private=True)
            try:
                found += [os.path.join(directory, name) for name in _names(fd, _MOST_RUNS) if _is_directory(name, fd)]
            finally:
                os.close(fd)
    return sorted(found, key=os.path.basename, reverse=True)


class LiveRecord:
    """The record of one launch, written by the process that holds this object.

    Args:
        name: what the run is called.
        host: the host's name in the job: a name of a directory.
        file: the name of the record: ``run.json``, or another one of a host on which the job has several.
        is_part: whether another host's record is the one of the whole job.
    """

    def __init__(self, name: str, host: str, file: str, *, is_part: bool) -> None:
        self._name = name
        self._host = host
        self._file = os.path.join(host, file) if is_part else file
        self._directory = ""
        self._lock = -1

    def write(self, content: str, environ: Mapping[str, str]) -> None:
        """Write the record, or write it again.

        Raises:
            OSError: there is no place for it.
        """
        failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a private directory")
        for directory in [self._directory] if self._directory else record_directories(environ):
            for _ in range(_ATTEMPTS):
                try:
                    self._write_in(directory, content)
                except FileNotFoundError as error:
                    failure = error
                except OSError as error:
                    failure = error
                    break
                else:
                    self._directory = directory
                    return
            if not self._directory:
                self._remove_from(directory)
        raise failure

    def touch(self) -> None:
        """Show that the launch lives to those who do not see its process: of another container."""
        if self._directory:
            with suppress(OSError):
                os.utime(os.path.join(self._directory, self._name, self._host), follow_symlinks=False)

    def remove(self) -> None:
        """Remove the record, and the directories that have no other one."""
        if not self._directory:
            return
        self._remove_from(self._directory)
        if self._lock >= 0:
            os.close(self._lock)
        self._directory, self._lock = "", -1

    def _remove_from(self, directory: str) -> None:
        with suppress(OSError):
            fd = open_directory(os.path.join(directory, self._name))
            try:
                with suppress(OSError):
                    os.unlink(self._file, dir_fd=fd)
                with suppress(OSError):
                    os.rmdir(self._host, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(os.path.join(directory, self._name))
        with suppress(OSError):
            os.rmdir(directory)  # also where there was no room for the record

    def _write_in(self, directory: str, content: str) -> None:
        top = _open_directory(directory)
        try:
            if not self._directory:
                _remove_stale(top)
            run = make_directory(self._name, dir_fd=top)
            try:
                os.close(make_directory(self._host, dir_fd=run))
                fd = self._write_to(run, content.encode(errors="backslashreplace"))
            finally:
                os.close(run)
        finally:
            os.close(top)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = fd

    def _write_to(self, run: int, content: bytes) -> int:
        """Write the file, whole or not at all, and return its descriptor, which keeps it locked."""
        fd, temporary = open_temporary(f"{self._file}.new", dir_fd=run)
        with close_on_error(fd):
            try:
                # Locked before it has its name. Where locks do not work, the process alone says whether it lives.
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A file system that is nearly full takes a part.
                while content:
                    content = content[os.write(fd, content) :]
                os.replace(temporary, self._file, src_dir_fd=run, dst_dir_fd=run)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=run)
                raise
        return fd


def _open_directory(directory: str) -> int:
    above = os.path.dirname(directory)
    if above not in _OF_ALL:
        os.close(open_directory(above, links=True))
    os.close(make_directory(directory))
    return open_directory(directory, private=True)


def _remove_stale(top: int) -> None:
    """Remove the records of launches that were killed."""
    for name in _names(top, _MOST_RUNS):
        with suppress(OSError):
            fd = open_directory(name, dir_fd=top)
            try:
                stale = _is_stale(fd)
            finally:
                os.close(fd)
            if stale:
                remove_tree(name, dir_fd=top)


def _is_stale(fd: int) -> bool:
    """Whether all launches with a record in this directory are gone. In doubt they are not."""
    has_record = False
    for path in _records_in(fd):
        has_record = True
        if _may_live(fd, path):
            return False
    return has_record or time.time() - os.fstat(fd).st_mtime > _UNUSED_S


def _records_in(fd: int) -> Iterator[str]:
    for name in _names(fd, _MOST_NAMES):
        if _is_record(name):
            yield name
            continue
        with suppress(OSError):
            below = open_directory(name, dir_fd=fd)
            try:
                names = _names(below, _MOST_NAMES)
            finally:
                os.close(below)
            yield from (os.path.join(name, file) for file in names if _is_record(file))


def _is_record(name: str) -> bool:
    return name.startswith("run") and name.endswith(".json")


def _may_live(fd: int, path: str) -> bool:
    record = read_run_record(fd, path)
    living = is_living(record.process) if record is not None and record.process is not None else None
    if living is not None:
        return living
    try:
        file = open_ours(path, os.O_RDONLY, dir_fd=fd)
    except FileNotFoundError:
        return False  # removed a moment ago
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _is_directory(name: str, dir_fd: int) -> bool:
    """Whether an entry can be a run: sockets of jobs with one saferun per rank lie in the same directory."""
    with suppress(OSError):
        return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    return False


def _names(fd: int, most: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in islice(entries, most)]
