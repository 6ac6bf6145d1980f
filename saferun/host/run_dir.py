"""The run directory: what a launch leaves behind for people to read. Nothing in it can fail a launch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress

from saferun.model import JsonObject

BASE = "saferun_runs"


class RunDirectory:
    """Files of one launch on one host.

    ``<run>/run.json``, ``<run>/<host>/events.jsonl``, ``<run>/<host>/attempt_<N>/rank_<R>/…``. Where it cannot be
    written, or is not wanted, ``path`` is None and error files go to a private temporary directory.

    Args:
        path: the directory; None: the default place below the current directory.
        wanted: False: keep no files.
        host: name of this host's sub-directory.
        run_id: distinguishes runs that start in the same second.
        warn: told, in one line, what could not be written.
    """

    def __init__(self, path: str | None, *, wanted: bool, host: str, run_id: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._events_fd = -1
        self._scratch: str | None = None
        self.path: str | None = None
        self.host_path: str | None = None
        if not wanted:
            return
        chosen = path or os.path.join(BASE, f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:6]}")
        try:
            self._make(chosen, ours=path is None)
            self.path = os.path.abspath(chosen)
            self.host_path = os.path.join(self.path, host)
            os.makedirs(self.host_path, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._events_fd = os.open(os.path.join(self.host_path, "events.jsonl"), flags, 0o666)
        except OSError as error:
            self.path = self.host_path = None
            warn(f"no run directory: {error.filename or chosen}: {error.strerror}; output goes to the console only")

    @staticmethod
    def _make(path: str, *, ours: bool) -> None:
        existed = os.path.isdir(path)
        os.makedirs(path, exist_ok=True)
        top = os.path.dirname(path) if ours else path
        ignore = os.path.join(top, ".gitignore")
        if (ours or not existed) and not os.path.exists(ignore):
            with open(ignore, "w", encoding="ascii") as file:
                file.write("*\n")
        if ours:
            link = os.path.join(top, f".latest-{os.getpid()}")
            with suppress(OSError):
                os.symlink(os.path.basename(path), link)
                os.replace(link, os.path.join(top, "latest"))

    def rank_path(self, attempt: int, rank: int) -> str:
        """The directory of one rank's files, made if need be; a private temporary one where there is no run directory.

        Raises:
            OSError: not even a temporary directory can be made.
        """
        below = os.path.join(f"attempt_{attempt}", f"rank_{rank}")
        if self.host_path is not None:
            try:
                return _made(os.path.join(self.host_path, below))
            except OSError as error:
                self._warn(f"{error.filename}: {error.strerror}")
        return _made(os.path.join(self.scratch(), below))

    def scratch(self) -> str:
        """A private temporary directory that ``close`` removes."""
        if self._scratch is None:
            import tempfile

            self._scratch = tempfile.mkdtemp(prefix="saferun-")
        return self._scratch

    def write_event(self, event: JsonObject) -> None:
        """Append one line to events.jsonl."""
        if self._events_fd < 0:
            return
        try:
            os.write(self._events_fd, json.dumps(event, default=str).encode() + b"\n")
        except OSError as error:
            self._warn(f"events.jsonl: {error.strerror}")
            os.close(self._events_fd)
            self._events_fd = -1

    def write_json(self, name: str, content: JsonObject) -> None:
        """Write a file of the run directory as a whole, or not at all."""
        if self.path is None:
            return
        path = os.path.join(self.path, name)
        temporary = f"{path}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, default=str)
                file.write("\n")
            os.replace(temporary, path)
        except OSError as error:
            self._warn(f"{path}: {error.strerror}")
            with suppress(OSError):
                os.unlink(temporary)

    def close(self) -> None:
        """Close the files and remove what was temporary."""
        if self._events_fd >= 0:
            os.close(self._events_fd)
            self._events_fd = -1
        if self._scratch is not None:
            import shutil

            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def _made(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return path


def shorter_path(path: str) -> str:
    """A path as it is shown: relative to the current directory where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the current directory is gone
        return path
    return relative if len(relative) < len(path) else path
