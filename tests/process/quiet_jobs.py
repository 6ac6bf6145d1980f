"""Many small jobs that are watched at the same time: each alone would take as many seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.launching import DEADLINE_S
from tests.process.quiet_servers import CALL, quiet_servers
from tests.process.watch_jobs import SLEEPS, Job


class Together:
    """Jobs of two ranks each, of which the second one sleeps, watched at the same time, with one examiner.

    Args:
        stack: closes all of it.
        new_folder: makes a directory.
        programs: the first rank of each job, which may use ``CALL``.
        timeout_s: after which a job hangs.
    """

    def __init__(
        self, stack: contextlib.ExitStack, new_folder: Callable[[], Path], programs: dict[str, str], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._begin = str(new_folder() / "begin")
        self.servers = stack.enter_context(quiet_servers(new_folder()))
        self.jobs: dict[str, Job] = {}
        first: Job | None = None
        for name, program in programs.items():
            job = Job(
                new_folder(),
                f"while not os.path.exists({self._begin!r}): time.sleep(0.01)\n" + CALL + program,
                SLEEPS,
                timeout_s=timeout_s,
                shared=first,
                environ=self.servers.environ,
            )
            stack.callback(job.close)
            first = first or job
            self.jobs[name] = job

    def run(self, timeouts: float) -> None:
        """Watch all of them."""
        for job in self.jobs.values():
            job.begin()
        # They have waited for the last one of them.
        Path(self._begin).touch()
        enough_at = time.monotonic() + timeouts * self._timeout_s
        while time.monotonic() < enough_at:
            self._turn()

    def until_reported(self, *names: str) -> None:
        """Watch on until these jobs have a verdict."""
        give_up_at = time.monotonic() + DEADLINE_S
        while missing := [name for name in names if not self.jobs[name].verdicts]:
            assert time.monotonic() < give_up_at, missing
            self._turn()

    def _turn(self) -> None:
        for job in self.jobs.values():
            job.turn(wait_s=0.0)
        time.sleep(0.005)


@contextlib.contextmanager
def watched_together(
    folders: pytest.TempPathFactory | Path, programs: dict[str, str], timeout_s: float
) -> Iterator[Together]:
    """Jobs of these programs, below a directory or in new ones."""
    count = 0

    def new_folder() -> Path:
        nonlocal count
        count += 1
        if not isinstance(folders, Path):
            return folders.mktemp("job")
        folder = folders / str(count)
        folder.mkdir()
        return folder

    with contextlib.ExitStack() as stack:
        yield Together(stack, new_folder, programs, timeout_s)
