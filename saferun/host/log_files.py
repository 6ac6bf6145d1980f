"""Where torchrun's options put the streams and error files of an attempt."""

from __future__ import annotations

import os
from contextlib import suppress

from saferun.config import LogConfig
from saferun.host.run_dir import RunDirectory
from saferun.model import LogDestinations, Placement

_OUT, _ERR = 1, 2


class LogDirectory:
    """``--log-dir`` in torchrun's layout: ``<log-dir>/<run id>_<random>/attempt_<N>/<local rank>/…``.

    Without ``--log-dir`` the run directory takes its place: its files of each rank are what torchrun would have
    written to a directory in /tmp.

    Raises:
        OSError: a directory or file that the user asked for cannot be made.
    """

    def __init__(self, config: LogConfig, run_dir: RunDirectory) -> None:
        self._config = config
        self._run_dir = run_dir
        self._job_path: str | None = None

    def destinations(self, placement: Placement, attempt: int) -> LogDestinations:
        """Make the directories of an attempt and say where each stream goes."""
        base = self._config.log_dir
        count = len(placement.ranks)
        if base == os.devnull:
            # Nothing is written; streams that are not teed still reach the console.
            return LogDestinations(
                ("",) * count, ("",) * count, frozenset(), frozenset(), ("",) * count, os.devnull, os.devnull
            )
        if base:
            attempt_path = os.path.join(self._make_job_path(base, placement.run_id), f"attempt_{attempt}")
            os.makedirs(attempt_path)
            rank_paths = [os.path.join(attempt_path, str(place.local_rank)) for place in placement.ranks]
            for path in rank_paths:
                os.mkdir(path)
        else:
            rank_paths = [self._run_dir.rank_path(attempt, place.rank) for place in placement.ranks]
            attempt_path = os.path.dirname(rank_paths[0])
        error_files = [os.path.join(path, "error.json") for path in rank_paths]
        for path in error_files:
            # A run directory that is used again must not show the errors of the run before.
            with suppress(FileNotFoundError):
                os.unlink(path)
        return LogDestinations(
            stdouts=self._paths(placement, rank_paths, _OUT, "stdout.log"),
            stderrs=self._paths(placement, rank_paths, _ERR, "stderr.log"),
            tee_stdouts=self._teed(placement, _OUT),
            tee_stderrs=self._teed(placement, _ERR),
            error_files=tuple(error_files),
            filtered_stdout=os.path.join(attempt_path, "filtered_stdout.log"),
            filtered_stderr=os.path.join(attempt_path, "filtered_stderr.log"),
        )

    def _make_job_path(self, base: str, run_id: str) -> str:
        if self._job_path is None:
            os.makedirs(base, exist_ok=True)
            while True:
                path = os.path.join(base, f"{run_id}_{os.urandom(4).hex()}")
                try:
                    os.mkdir(path, 0o700)
                except FileExistsError:
                    continue
                self._job_path = path
                break
        return self._job_path

    def _shown(self, local_rank: int) -> bool:
        return not self._config.local_ranks_filter or local_rank in self._config.local_ranks_filter

    def _paths(self, placement: Placement, rank_paths: list[str], stream: int, name: str) -> tuple[str, ...]:
        paths = []
        for place, path in zip(placement.ranks, rank_paths, strict=True):
            local_rank = place.local_rank
            mask = self._config.redirects[local_rank] | self._config.tee[local_rank]
            if mask & stream:
                paths.append(os.path.join(path, name))
            else:
                paths.append("" if self._shown(local_rank) else os.devnull)
        return tuple(paths)

    def _teed(self, placement: Placement, stream: int) -> frozenset[int]:
        local_ranks = [place.local_rank for place in placement.ranks]
        return frozenset(
            i for i, rank in enumerate(local_ranks) if self._config.tee[rank] & stream and self._shown(rank)
        )
