"""Launches some of whose files are on a file system that stops answering.

One mirror shows the whole machine's files; which of them a launch reaches through it is a set of *parts*. So each of
them can be taken away alone, and all of them together.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.process.frozen import FileSystem, mirror
from tests.process.launching import DEADLINE_S, REPOSITORY, Job, running, until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

# Whoever reads through a mirror takes many times as long, and more on a busy machine.
SLOW_S = 120.0
PLACES = {
    "run directory": ("run",),
    "current directory": ("cwd",),
    "current directory with run directory": ("cwd", "script", "run below"),
    "installation": ("saferun",),
    "script and packages": ("script", "packages"),
    "TMPDIR": ("tmp",),
    "all but run directory": ("cwd", "saferun", "python", "script", "packages", "tmp"),
    "all": ("run", "cwd", "saferun", "python", "script", "packages", "tmp"),
}
"""What is on the file system. ``run below``: saferun puts the run directory where it does by default."""


class Frozen:
    """Where a launch's files are.

    Args:
        system: the file system, a mirror of ``/``.
        parts: what the launch reaches through it.
        folder: a folder of the test's own.
    """

    def __init__(self, system: FileSystem, parts: Collection[str], folder: Path) -> None:
        self.system = system
        self.folder = folder
        self._parts = parts

    def path(self, part: str, path: Path) -> str:
        """A path as the launch has it."""
        return f"{self.system.path}{path}" if part in self._parts else str(path)

    @property
    def runs(self) -> Path:
        """Where run directories are, as this process sees them, whatever is frozen."""
        below = "run below" in self._parts
        return self.folder / "job" / "saferun-runs" / "latest" if below else self.folder / "files"

    def options(self) -> Sequence[str]:
        """Options of saferun."""
        return () if "run below" in self._parts else ("--run-dir", self.path("run", self.folder / "files"))

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``running``."""
        job = self.folder / "job"
        python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        packages = Path(sysconfig.get_path("purelib"))
        own = "python" in self._parts
        return {
            "environ": {
                "PYTHONPATH": os.pathsep.join([self.path("saferun", REPOSITORY), self.path("packages", packages)]),
                "PATH": os.pathsep.join(
                    [f"{self.system.path}{Path(sys.executable).parent}"] * own + [os.environ["PATH"]]
                ),
                "TMPDIR": self.path("tmp", self.folder / "tmp"),
            },
            "before": self.system.before(self.path("cwd", job)),
            "launcher": (self.path("python", python) if own else sys.executable, "-m", "saferun"),
            "script": ("train.py",) if "run below" in self._parts else (self.path("script", job / "train.py"),),
        }

    def await_memory(self) -> None:
        """Return when all that saferun needs is in memory."""

        def is_there() -> bool:
            texts = [path.read_text() for path in self.runs.glob("*/events.jsonl")]
            return any("ExaminerReady" in text and "ModulesImported" in text for text in texts)

        until(is_there, "all is in memory", timeout_s=SLOW_S)

    def log(self, rank: int, attempt: int = 0) -> str:
        """What is in the file of a rank's output by now."""
        return "".join(path.read_text() for path in self.runs.glob(f"*/attempt_{attempt}/rank_{rank}/stdout.log"))


@contextlib.contextmanager
def launched_from(
    folder: Path, parts: Collection[str], program: str, *options: str, **more: Any
) -> Iterator[tuple[Job, Frozen]]:
    """A launch with these parts on a mirror, which is thawed in the end; nothing is left of the launch then.

    Args:
        folder: a folder of the test's own.
        parts: what is on the mirror.
        program: what every rank runs.
        options: saferun's options.
        more: further arguments of ``running``.
    """
    with mirror(folder, Path("/")) as system:
        frozen = Frozen(system, parts, folder / "run")
        arguments = {"store": False, "sweeps": False, **frozen.arguments(), **more}
        with running(folder / "run", program, *frozen.options(), *options, **arguments) as job:
            try:
                yield job, frozen
            finally:
                system.thaw()
            # What waited for the file system ends as soon as it answers.
            job.wait(SLOW_S)
            job.assert_nothing_left(DEADLINE_S)
