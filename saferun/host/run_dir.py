"""The run directory: what a launch leaves behind for people to read. Nothing in it can fail a launch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress

from saferun.linux.scratch import Scratch
from saferun.model import JsonObject

BASE = "saferun_runs"
_LONGEST_NAME = 128


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
        self._chosen = path
        self._wanted = wanted
        self._host = host
        self.scratch = Scratch(run_id)
        self._warn = warn
        self._has_warned = False
        self._is_open = False
        self._events_fd = -1
        self._events: list[JsonObject] = []
        self._is_part = False
        self._part = ""
        self.path: str | None = None
        self.host_path: str | None = None
        self.name = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:6]}"
        """What the directory is called where the user chose no other."""

    def join(self, name: str, *, host: str, is_part: bool, task: int) -> None:
        """This launch is part of a job of several. Does nothing once the directory is open.

        Args:
            name: what the directory is called on all hosts.
            host: this host's name in the job.
            is_part: files about the whole job are somebody else's to write; ours go to the host's directory.
            task: which of several processes of this host this is; 0 is the first.
        """
        self._is_part = is_part
        if self._is_open:
            return
        self._host = _file_name(host) or self._host
        self.name = _file_name(name) or self.name
        self._part = f".task_{task}" if task else ""

    def open(self) -> None:
        """Make the directory. Until now nothing has been written, and events were kept in memory."""
        if self._is_open:
            return
        self._is_open = True
        events, self._events = self._events, []
        if not self._wanted:
            return
        ours = self._chosen is None
        chosen = self._chosen or os.path.join(BASE, self.name)
        try:
            self._make(chosen, ours=ours)
            path = os.path.abspath(chosen)
            host_path = _made(os.path.join(path, self._host))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._events_fd = os.open(os.path.join(host_path, f"events{self._part}.jsonl"), flags, 0o666)
        except OSError as error:
            self.lost(f"no run directory: {error.filename or chosen}", error)
            return
        self.path, self.host_path = path, host_path
        for event in events:
            self.write_event(event)

    @property
    def keeps_all(self) -> bool:
        """Whether whatever the ranks write can be read here."""
        return self.path is not None and not self._has_warned

    def lost(self, path: str, error: OSError) -> None:
        """A file cannot be written (any more). The user hears of the first one; the others follow from it."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{path}: {error.strerror}; what cannot be written to files still goes to the console")

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
        self.open()
        below = os.path.join(f"attempt_{attempt}", f"rank_{rank}")
        if self.host_path is not None:
            try:
                return _made(os.path.join(self.host_path, below))
            except OSError as error:
                self.lost(str(error.filename), error)
        return _made(os.path.join(self.scratch.path(), below))

    def write_event(self, event: JsonObject) -> None:
        """Append one line to events.jsonl."""
        if not self._is_open:
            self._events.append(event)
            return
        if self._events_fd < 0:
            return
        try:
            os.write(self._events_fd, json.dumps(event, default=str).encode() + b"\n")
        except OSError as error:
            self.lost("events.jsonl", error)
            os.close(self._events_fd)
            self._events_fd = -1

    def write_json(self, name: str, content: JsonObject) -> None:
        """Write a file of the run directory as a whole, or not at all."""
        self.write_text(name, json.dumps(content, indent=1, default=str) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Write a file of the run directory as a whole, or not at all."""
        if self.path is None or self.host_path is None:
            return
        if self._is_part:
            stem, extension = os.path.splitext(name)
            path = os.path.join(self.host_path, f"{stem}{self._part}{extension}")
        else:
            path = os.path.join(self.path, name)
        temporary = f"{path}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError as error:
            self.lost(path, error)
            with suppress(OSError):
                os.unlink(temporary)

    def close(self) -> None:
        """Close the files and remove what was temporary."""
        if self._events_fd >= 0:
            os.close(self._events_fd)
            self._events_fd = -1
        self.scratch.close()


def _made(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return path


def _file_name(text: str) -> str:
    """What came from another host, as a name of one file; empty where it is none."""
    fine = 0 < len(text) < _LONGEST_NAME and all(char.isalnum() or char in "._-" for char in text)
    return text if fine and not text.startswith(".") else ""


def shorter_path(path: str) -> str:
    """A path as it is shown: relative to the current directory where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the current directory is gone
        return path
    return relative if len(relative) < len(path) else path
