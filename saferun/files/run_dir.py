"""The run directory: what a launch leaves behind for people to read. Nothing in it can fail a launch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable

from saferun.errors import SaferunError, UsageError
from saferun.files.event_file import EventFile
from saferun.files.file_stream import APPENDED, WHOLE, Files, WriterAnswer
from saferun.files.place_in_job import PlaceInJob
from saferun.files.rank_scratch import RankScratch
from saferun.files.trees import Tree, add_tree
from saferun.files.write_errors import WriteErrors
from saferun.linux.ownership import NotOursError
from saferun.linux.scratch import Scratch
from saferun.model import JsonObject

BASE = "saferun-runs"
_WITHOUT = "the job runs without it; all output is on the console, except what -r sends to log files only"
_THEIRS_HINT = "pass --run-dir DIRECTORY to keep files elsewhere, or --run-dir none to keep none"


class RunDirectory:
    """Files of one launch on one host.

    ``<run>/run.json``, ``<run>/<host>/events.jsonl``, ``<run>/<host>/attempt_<N>/rank_<R>/…``. Where it cannot be
    written, or is not wanted, ``path`` is None and error files go to a private temporary directory.

    Args:
        path: the directory; None: the default place below the current directory.
        wanted: False: keep no files.
        host: name of this host's sub-directory.
        run_id: distinguishes runs that start in the same second.
        warn: takes one line about what could not be written; a second argument is what to do about it.
        files: writes them.
        keep_runs: how many runs are kept in the default place; 0: all.
        keep_bytes: how much is kept of what a rank writes to a stream; 0: all.
    """

    def __init__(
        self,
        path: str | None,
        *,
        wanted: bool,
        host: str,
        run_id: str,
        warn: Callable[..., None],
        files: Files,
        keep_runs: int = 0,
        keep_bytes: int = 0,
    ) -> None:
        self._chosen = path
        self._keep_runs = keep_runs
        self._keep_bytes = keep_bytes
        self._wanted = wanted
        self._run_id = run_id
        self._has_live_record = False
        self._warn = warn
        self.files = files
        self.rank_scratch = RankScratch(run_id, warn, files)
        """The ranks' directories where there is no run directory, or no log files in it."""
        self._errors = WriteErrors(warn)
        self.files.on_failed = self._errors.on_failed
        self.files.on_written = self._errors.on_written
        self._is_open = False
        self._waiting: list[Callable[[], None]] | None = None  # for the directory to be made
        self._events = EventFile()
        self._place = PlaceInJob(f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:6]}", host)
        self.path: str | None = None

    @property
    def shared_base(self) -> str:
        """Where run directories are, on this host and, if it is shared, on the others; empty: nowhere.

        No file system is asked.
        """
        if not self._wanted:
            return ""
        try:
            return os.path.abspath(self._chosen or BASE)
        except OSError:  # the current directory is gone
            return ""

    def join(
        self,
        name: str,
        *,
        host: str,
        is_part: bool,
        task: int = 0,
        tasks: int = 1,
        hosts: Iterable[str] | None = None,
        is_late: bool = False,
    ) -> None:
        """This launch is part of a job of several. Does nothing once the directory is open.

        Args:
            name: what the directory is called on all hosts.
            host: this host's name in the job.
            is_part: files about the whole job are written elsewhere; ours go to the host's directory.
            task: which of several processes of this host this is; 0 is the first.
            tasks: how many there are.
            hosts: the names of the job's other hosts, for the one that leads; None: they are not known.
            is_late: the job may have been under way before: what is in the directory may be its own. The first meeting
                of the hosts decides.
        """
        if self._is_open:
            self._place = self._place._replace(is_part=is_part, has_neighbours=tasks > 1)
            return
        self._place = self._place.joined(
            name, host=host, is_part=is_part, task=task, tasks=tasks, hosts=hosts, is_late=is_late
        )

    def open(self, on_open: Callable[[], None] | None = None) -> None:
        """Make the directory. Until now nothing has been written, and events were kept in memory.

        Args:
            on_open: called when it is there, or it is known that there is to be none (``path`` is None then).
        """
        if self._is_open:
            if self._waiting is not None and on_open is not None:
                self._waiting.append(on_open)
            elif on_open is not None:
                on_open()
            return
        self._is_open = True
        chosen = self._chosen or os.path.join(BASE, self._place.name)
        path = self._absolute(chosen) if self._wanted else ""
        if not path:
            self._events.begin(None)
            if on_open is not None:
                on_open()
            return
        ours, place = self._chosen is None, self._place
        host_path = os.path.join(path, place.host)
        top = os.path.dirname(path)
        latest = [f".latest-{os.urandom(6).hex()}", "latest"]
        self.path = path
        self._waiting = [on_open] if on_open is not None else []

        self.files.directory = path
        add_tree(Tree(top if ours else path))  # for a writer that follows the first one, and for captures

        def on_answer(answer: WriterAnswer | None) -> None:
            try:
                if answer is None:
                    self._errors.add(path)  # it may yet be made, and is not relied upon
                elif answer.error is not None:
                    self._refuse(chosen, path, answer.error)
                else:
                    self._note_earlier_run(chosen, *answer.value)
                    self._begin_run(path, host_path, top if ours else "")
            except Exception as error:
                self.path = None
                self._warn(f"no run directory: {chosen}: {type(error).__name__}: {error}")
            self._begin()  # the ranks wait for it

        earlier = [] if ours or place.has_neighbours or place.is_late else [int(not place.is_part)]
        keeps = int(not ours and not place.is_part)
        hosts = list(place.hosts) if earlier else []
        arguments: list[object] = [path, host_path, top if ours else "", latest if ours else [], earlier, keeps, hosts]
        self.files.ask("make_run_directory", arguments, on_answer)

    def _note_earlier_run(self, chosen: str, moved: str, unheard_s: float | None, left: str, kept: str) -> None:
        if kept:
            where = os.path.join(chosen, kept)
            self._warn(f"{chosen} has files with names that saferun writes to: they are kept in {where}, too")
        if moved:
            others = f"; some may still be in {chosen}: {left}" if left else ""
            self._warn(
                f"{chosen} had the files of an earlier run: they are in {os.path.join(chosen, moved)} now{others}"
            )
        elif left:
            self._warn(f"{chosen} has the files of an earlier run, which may be overwritten: {left}")
        elif unheard_s == 0:
            self._warn(
                f"another run writes to {chosen}: they overwrite each other's files; give each a --run-dir of its own"
            )
        elif unheard_s is not None:
            self._warn(
                f"another run may still write to {chosen}: its files changed {unheard_s:.0f} s ago; they are not moved,"
                " and may be overwritten; give each run a --run-dir of its own"
            )

    def _refuse(self, chosen: str, path: str, error: OSError) -> None:
        """There is no run directory. Where the user has chosen another user's, there is no launch either."""
        self.path = None
        ours, is_theirs = self._chosen is None, isinstance(error, NotOursError)
        if is_theirs and not ours:
            hint = "pass another --run-dir, or --run-dir none to keep no files"
            where = f"{shorter_path(error.filename)}: " if error.filename not in {path, chosen, ""} else ""
            self._errors.refusal = UsageError(f"--run-dir {chosen}: {where}{error.strerror}", hint)
        else:
            hint = _THEIRS_HINT if is_theirs else ""
            self._errors.warn_once(f"no run directory: {error.filename or chosen}", error, hint, _WITHOUT)

    def _begin_run(self, path: str, host_path: str, base: str) -> None:
        index = os.path.join(host_path, self._place.own_name("output.index"))
        run_id, base = ("", "") if self.is_part else (self._run_id, base)
        self.files.ask("begin_run", [index, self._keep_bytes, [run_id, path, base, self._keep_runs]])

    def _absolute(self, path: str) -> str:
        try:
            return os.path.abspath(path)
        except OSError as error:  # the current directory is gone
            self._errors.warn_once(f"no run directory: {path}", error, remains=_WITHOUT)
            return ""

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        file = None
        if self.host_path is not None:
            file = self.files.open(os.path.join(self.host_path, self._place.own_name("events.jsonl")), APPENDED)
        self._events.begin(file)
        for call in waiting:
            call()

    @property
    def name(self) -> str:
        """What the directory is called where the user chose no other."""
        return self._place.name

    @property
    def host(self) -> str:
        """The name of this host's directory: once that has been made, it keeps it, whatever the job calls the host."""
        return self._place.host

    @property
    def host_path(self) -> str | None:
        """This host's directory; None where there is no run directory."""
        return os.path.join(self.path, self.host) if self.path is not None else None

    @property
    def scratch(self) -> Scratch:
        """The private temporary directories of the run."""
        return self.rank_scratch.scratch

    @property
    def logs_path(self) -> str:
        """Where the ranks' log files are that stay in a temporary directory; empty: nowhere, as far as is known."""
        return self.rank_scratch.logs_path

    @property
    def is_part(self) -> bool:
        """Whether files about the whole job are written elsewhere."""
        return self._place.is_part

    # ----------------------------------------------------------------------------------------------------------------
    # What cannot be written

    @property
    def keeps_all(self) -> bool:
        """Whether whatever the ranks write can be read here."""
        return self.path is not None and self._waiting is None and self.is_written

    @property
    def is_silent(self) -> bool:
        """Whether the file system of the directory does not answer, as far as is known."""
        return self.path is not None and (self._errors.has(self.path) or self.files.is_stalled)

    @property
    def is_written(self) -> bool:
        """Whether all files that there are can be written, also those of ``--log-dir`` where there is no directory."""
        return not self._errors.has_any and not self.files.is_stalled

    @property
    def refusal(self) -> SaferunError | None:
        """Why the launch cannot be: the user has chosen another user's directory."""
        return self._errors.refusal

    def lost(self, path: str, error: OSError) -> None:
        """A file cannot be written (any more). The user hears of the first one; the others follow from it."""
        self._errors.warn_once(path, error)

    # ----------------------------------------------------------------------------------------------------------------
    # Files

    def rank_path(self, attempt: int, rank: int) -> str | None:
        """The directory of one rank's files; None where there is no run directory."""
        if self.host_path is None:
            return None
        return os.path.join(self.host_path, f"attempt_{attempt}", f"rank_{rank}")

    def write_event(self, event: JsonObject) -> None:
        """Append one line to events.jsonl, without secrets."""
        self._events.write(event)

    def write_json(self, name: str, content: JsonObject) -> None:
        """Write a file of the run directory as a whole, or not at all."""
        self.write_text(name, json.dumps(content, indent=1, default=str) + "\n")

    def write_text(self, name: str, content: str, *, of_host: bool = False) -> None:
        """Write a file of the run directory as a whole, or not at all. ``of_host``: below the name of this host."""
        if self._waiting is not None:
            self._waiting.append(lambda: self.write_text(name, content, of_host=of_host))
            return
        if self.path is None or self.host_path is None:
            return
        if self.is_part or of_host:
            path = os.path.join(self.host_path, self._place.own_name(name))
        else:
            path = os.path.join(self.path, name)
        file = self.files.open(path, WHOLE)
        file.write(content.encode(errors="backslashreplace"))
        file.close()

    def write_live_record(self, content: str) -> None:
        """Write run.json where there is no run directory: to a private directory, until the launch ends."""
        if self.path is None and self._is_open:
            self._has_live_record = True
            arguments = [self.name, self.host, self._place.own_name("run.json"), int(self.is_part), content]
            self.files.ask("write_live_record", arguments)

    def make_directory(self, path: str) -> None:
        """Have a directory of this launch made; whoever writes there makes it where it is not there yet."""
        self.files.ask("make_directories", [[path], []])

    def restore(self) -> None:
        """Have the directory made again where a rank has removed it: for the report, once no rank runs any more."""
        if self.host_path is not None:
            self.files.ask("make_directories", [[self.host_path], [], 1])

    def close(self) -> None:
        """Close the files and remove what was temporary."""
        self._events.close()
        if self._has_live_record:
            self.files.ask("remove_live_record", [])
        self.rank_scratch.close()


def shorter_path(path: str) -> str:
    """A path as it is shown: relative to the current directory where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the current directory is gone
        return path
    return relative if len(relative) < len(path) else path
