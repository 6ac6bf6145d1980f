"""Where torchrun's options put the streams and error files of an attempt."""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.config import LogConfig
from saferun.files.file_stream import WriterAnswer
from saferun.files.run_dir import RunDirectory
from saferun.files.trees import add_tree, log_tree
from saferun.linux.scratch import current_directory
from saferun.model import LogDestinations, Placement

_OUT, _ERR = 1, 2
_ERROR_FILE = "error.json"


class LogDirectory:
    """``--log-dir`` in torchrun's layout: ``<log-dir>/<run id>_<random>/attempt_<N>/<local rank>/…``.

    Without ``--log-dir`` the run directory takes its place: its files of each rank are what torchrun would have
    written to a directory in /tmp.
    """

    def __init__(self, config: LogConfig, run_dir: RunDirectory) -> None:
        self._config = config
        self._run_dir = run_dir
        self._job_name: str | None = None

    def destinations(
        self, placement: Placement, attempt: int, on_ready: Callable[[LogDestinations | OSError], None]
    ) -> None:
        """Have the directories of an attempt made, and say where each stream goes.

        Args:
            placement: the ranks.
            attempt: its number.
            on_ready: takes the answer: an OSError where a directory that the user asked for cannot be made. Where a
                file system does not answer, the ranks are not kept from their start: files follow when it does.
        """
        base = self._config.log_dir
        if base == os.devnull:
            # Nothing is written; streams that are not teed still reach the console.
            nowhere = ("",) * len(placement.ranks)
            none = frozenset[int]()
            answer = LogDestinations(nowhere, nowhere, none, none, nowhere, os.devnull, os.devnull)
            self._run_dir.open(lambda: on_ready(answer))
        elif base:
            self._below(base, placement, attempt, on_ready)
        else:
            self._run_dir.open()  # not waited for: what is asked of files is done in its order
            self._in_run_directory(placement, attempt, on_ready)

    def _below(
        self, base: str, placement: Placement, attempt: int, on_ready: Callable[[LogDestinations | OSError], None]
    ) -> None:
        name = self._job_name or f"{placement.run_id}_{os.urandom(4).hex()}"
        names = [str(assignment.local_rank) for assignment in placement.ranks]

        def on_answer(answer: WriterAnswer | None) -> None:
            if answer is not None and (error := answer.error) is not None:
                error.filename = error.filename or base
                on_ready(error)
                return
            self._job_name = answer.value if answer is not None else name
            add_tree(log_tree(base, str(self._job_name)))  # for a writer that follows the first one
            path = os.path.join(base, str(self._job_name), f"attempt_{attempt}")
            paths = [os.path.join(path, rank) for rank in names]

            def on_open() -> None:
                self._ready(placement, attempt, paths, on_ready, answers=answer is not None)

            self._run_dir.open(on_open)

        arguments: list[object] = [base, name, attempt, names, int(self._job_name is not None)]
        self._run_dir.files.ask("make_log_directories", arguments, on_answer)

    def _in_run_directory(
        self, placement: Placement, attempt: int, on_ready: Callable[[LogDestinations | OSError], None]
    ) -> None:
        paths = [
            path
            for assignment in placement.ranks
            if (path := self._run_dir.rank_path(attempt, assignment.rank)) is not None
        ]
        if not paths:
            self._ready(placement, attempt, paths, on_ready, answers=False)
            return

        def on_answer(answer: WriterAnswer | None) -> None:
            error = answer.error if answer is not None else None
            if error is not None:
                self._run_dir.lost(error.filename, error)
            answers = answer is not None and error is None
            # There may be no run directory by now.
            there = paths if self._run_dir.path is not None else []
            self._ready(placement, attempt, there, on_ready, answers=answers and bool(there))

        outdated = [os.path.join(path, name) for path in paths for name in (_ERROR_FILE, "failure.json")]
        self._run_dir.files.ask("make_directories", [paths, outdated, 1], on_answer)

    def _ready(
        self,
        placement: Placement,
        attempt: int,
        rank_paths: list[str],
        on_ready: Callable[[LogDestinations | OSError], None],
        *,
        answers: bool,
    ) -> None:
        """Say where all goes. ``answers``: whether a rank may write its error file in its directory."""
        ranks = [assignment.rank for assignment in placement.ranks]

        def on_error_paths(error_paths: list[str] | OSError) -> None:
            if isinstance(error_paths, OSError):
                on_ready(error_paths)
                return

            def on_paths(paths: list[str] | OSError) -> None:
                found = paths if isinstance(paths, OSError) else self._found(placement, paths, error_paths)
                on_ready(found)

            if not rank_paths and self._writes_logs(placement):
                self._run_dir.rank_scratch.make(attempt, ranks, on_paths, is_large=True)
            else:
                on_paths(rank_paths or error_paths)

        if answers:
            on_error_paths(rank_paths)
        else:
            self._run_dir.rank_scratch.make(attempt, ranks, on_error_paths)

    def _found(self, placement: Placement, paths: list[str], error_paths: list[str]) -> LogDestinations:
        attempt_path = os.path.dirname(paths[0])
        cwd = current_directory()
        return LogDestinations(
            stdouts=self._paths(placement, paths, _OUT, "stdout.log"),
            stderrs=self._paths(placement, paths, _ERR, "stderr.log"),
            tee_stdouts=self._teed(placement, _OUT),
            tee_stderrs=self._teed(placement, _ERR),
            # Absolute, below a relative --log-dir too: a script may have changed its directory when it fails.
            error_files=tuple(os.path.join(cwd, path, _ERROR_FILE) if path else "" for path in error_paths),
            filtered_stdout=os.path.join(attempt_path, "filtered_stdout.log"),
            filtered_stderr=os.path.join(attempt_path, "filtered_stderr.log"),
        )

    def _writes_logs(self, placement: Placement) -> bool:
        """Whether streams are to go to files, as torchrun's options have it."""
        config = self._config
        masks = [
            config.redirects[assignment.local_rank] | config.tee[assignment.local_rank]
            for assignment in placement.ranks
        ]
        return any(masks) or bool(config.duplicate_stdout_filters or config.duplicate_stderr_filters)

    def _shown(self, local_rank: int) -> bool:
        return not self._config.local_ranks_filter or local_rank in self._config.local_ranks_filter

    def _paths(self, placement: Placement, rank_paths: list[str], stream: int, name: str) -> tuple[str, ...]:
        paths = []
        for assignment, path in zip(placement.ranks, rank_paths, strict=True):
            local_rank = assignment.local_rank
            mask = self._config.redirects[local_rank] | self._config.tee[local_rank]
            if mask & stream:
                paths.append(os.path.join(path, name))
            else:
                paths.append("" if self._shown(local_rank) else os.devnull)
        return tuple(paths)

    def _teed(self, placement: Placement, stream: int) -> frozenset[int]:
        local_ranks = [assignment.local_rank for assignment in placement.ranks]
        return frozenset(
            i for i, rank in enumerate(local_ranks) if self._config.tee[rank] & stream and self._shown(rank)
        )
