"""What every benchmark here shares: sides run in turn, quartiles, the cost of launcher processes, one plain table.

Only Linux, and only the standard library: the process that measures never imports torch.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self, TypeAlias, TypeVar

from launcher_cost import MARK, BenchmarkError, marked_pids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parent.parent

# What an enclosing job may have left in the environment; either launcher would take it for its own.
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_", "SAFERUN_", "SLURM_", "PMI_", "OMPI_", "MASTER_", "GROUP_", "ROLE_")
_FOREIGN_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}

Result = TypeVar("Result")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class Options(NamedTuple):
    """What the user asked for; `rounds` is None where the benchmark's own number holds."""

    quick: bool
    sides: tuple[str, ...]
    only: tuple[str, ...]
    rounds: int | None


def say(text: str = "") -> None:
    """Writes one line of the result to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """Writes one line about what runs now to stderr, so that stdout holds the result alone."""
    sys.stderr.write(f"… {text}\n")
    sys.stderr.flush()


def command(side: str) -> list[str]:
    """The command that starts the launcher `side`, without options.

    saferun (-no-page): `python -m saferun`; saferun-script, torchrun (-unbuffered): console scripts beside this Python.
    """
    if side.removesuffix("-no-page") == "saferun":
        return [sys.executable, "-m", "saferun"]
    return [str(Path(sys.executable).parent / side.removesuffix("-script").removesuffix("-unbuffered"))]


def _is_present(side: str) -> bool:
    if side.removesuffix("-no-page") == "saferun":
        installed = importlib.util.find_spec("saferun") is not None
        return installed or (REPOSITORY / "saferun" / "__main__.py").is_file()
    if side == "saferun-script" or side.startswith("torchrun"):
        return Path(command(side)[0]).is_file()
    return True


def parse_options(description: str, sides: Sequence[str], parts: Sequence[str]) -> Options:
    """Reads `--quick`, `--sides`, `--only` and `--rounds`; ends with status 2 where a named side is missing.

    saferun-script is left out silently where no console script is installed, unless it was named.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller loads; a look, not a result")
    parser.add_argument("--sides", help=f"comma-separated, of: {', '.join(sides)} (default: all that are present)")
    parser.add_argument("--only", help=f"comma-separated, of: {', '.join(parts)} (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    given = parser.parse_args()
    named = given.sides.split(",") if given.sides else [s for s in sides if s != "saferun-script" or _is_present(s)]
    only = given.only.split(",") if given.only else list(parts)
    for name in [*(set(named) - set(sides)), *(set(only) - set(parts))]:
        parser.error(f"{name!r} is none of this benchmark's sides or parts")
    missing = [side for side in named if not _is_present(side)]
    if missing:
        parser.error(f"not installed for {Path(sys.executable).name}: {', '.join(missing)}; leave out with --sides")
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds takes 1 or more")
    return Options(given.quick, tuple(s for s in sides if s in named), tuple(only), given.rounds)


def say_machine(name: str, options: Options) -> None:
    """Prints what the numbers below depend on: cores, kernel, versions, load, size of the run."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "none"
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    size = "quick" if options.quick else "full"
    say(
        f"{name} ({size}): {cores} cores, load {load:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch_version}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rounds and statistics


def alternate(
    sides: Sequence[str], rounds: int, measure: Callable[[str], Mapping[str, float]], *, warm_up: bool = True
) -> dict[str, dict[str, list[float]]]:
    """Measures the sides in turn, A B C A B C …, so that a noisy neighbour hits all of them alike.

    Returns the values by metric, then by side. The warm-up round fills the page cache and the bytecode caches and
    is thrown away.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for number in range(-1 if warm_up else 0, rounds):
        for side in sides:
            for metric, value in measure(side).items():
                if number >= 0:
                    values.setdefault(metric, {}).setdefault(side, []).append(value)
    return values


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


# ---------------------------------------------------------------------------------------------------------------------
# The table


class Bar(NamedTuple):
    """What the median may be at most: `limit` times the median of the side `of`, or `limit` itself where `of` is None.

    With `at_least` the median must reach the limit instead.
    """

    limit: float
    of: str | None = None
    at_least: bool = False


Bars: TypeAlias = "Mapping[str, Sequence[Bar]]"


class Table:
    """Rows of one measurement and one side each; printed with quartiles, ratios to the reference sides and bars."""

    def __init__(self, references: Sequence[str]) -> None:
        self._references = references
        self._rows: list[list[str]] = []

    def add(self, what: str, unit: str, values: Mapping[str, Sequence[float]], bars: Bars | None = None) -> None:
        """Adds one row a side. Bars of the side saferun hold for saferun-script too."""
        medians = {side: quartiles(numbers)[1] for side, numbers in values.items() if numbers}
        for side, numbers in values.items():
            if not numbers:
                continue
            first, median, third = quartiles(numbers)
            spread = f"{_number(first)}..{_number(third)}" if len(numbers) > 1 else ""
            ratios = [
                _number(median / medians[of]) if of != side and medians.get(of) else "" for of in self._references
            ]
            own_bars = [
                bar for bar in (bars or {}).get(side.removesuffix("-script"), ()) if bar.of is None or bar.of in medians
            ]
            wanted = ", ".join(_wanted(bar, unit) for bar in own_bars)
            verdict = ", ".join(_verdict(bar, median, medians) for bar in own_bars)
            middle = [str(len(numbers)), f"{_number(median)} {unit}".strip(), spread]
            self._rows.append([what, side, *middle, *ratios, wanted, verdict])

    def say(self) -> None:
        """Prints the table and forgets its rows."""
        head = ["measurement", "side", "n", "median", "quartiles", *(f"/{of}" for of in self._references), "bar", ""]
        widths = [max(len(row[i]) for row in [head, *self._rows]) for i in range(len(head))]
        previous = ""
        for row in [head, *self._rows]:
            shown = ["" if row[0] == previous else row[0], *row[1:]]
            previous = row[0]
            left = {0, 1, len(head) - 2, len(head) - 1}
            columns = enumerate(zip(shown, widths, strict=True))
            say("  ".join(cell.ljust(wide) if i in left else cell.rjust(wide) for i, (cell, wide) in columns).rstrip())
        say()
        self._rows.clear()


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _wanted(bar: Bar, unit: str) -> str:
    sign = ">=" if bar.at_least else "<="
    return f"{sign} {bar.limit:g} x {bar.of}" if bar.of else f"{sign} {bar.limit:g} {unit}".strip()


def _verdict(bar: Bar, median: float, medians: Mapping[str, float]) -> str:
    limit = bar.limit * medians[bar.of] if bar.of else bar.limit
    return "pass" if (median >= limit if bar.at_least else median <= limit) else "MISS"


# ---------------------------------------------------------------------------------------------------------------------
# Starting sides


class Scratch:
    """A directory and a mark for everything one benchmark starts; leaving it kills and removes what is left of both."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="saferun-bench-"))
        self.temporary = self.path / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in marked_pids(self.mark):
            kill(pid)
        shutil.rmtree(self.path, ignore_errors=True)

    def script(self, name: str, text: str) -> str:
        """Writes a script for the ranks and returns its path."""
        path = self.path / name
        path.write_text(text)
        return str(path)

    def new_directory(self) -> Path:
        """An empty directory for one run."""
        self._number += 1
        path = self.path / str(self._number)
        path.mkdir()
        return path

    def environment(self, directory: Path, extra: Mapping[str, str]) -> dict[str, str]:
        """The environment of one run: no traces of an enclosing job, the mark, BENCHMARK_DIR, TMPDIR, and `extra`."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN_PREFIXES)
        }
        # The saferun of this checkout, whichever is installed.
        if (REPOSITORY / "saferun" / "__main__.py").is_file():
            kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), kept.get("PYTHONPATH")]))
        return {**kept, MARK: self.mark, "BENCHMARK_DIR": str(directory), "TMPDIR": str(self.temporary), **extra}

    def start(
        self,
        arguments: Sequence[str],
        directory: Path,
        *,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process in `directory`, stderr into its file `stderr`, stdout there too unless given.

        `extra` comes on top of the environment.
        """
        with (directory / "stderr").open("ab") as stderr:
            return subprocess.Popen(
                arguments,
                stdin=stdin,
                stdout=stderr if stdout is None else stdout,
                stderr=stderr,
                cwd=directory,
                env=self.environment(directory, extra or {}),
            )


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Like ``Popen.wait``, which with a time-out looks only every 50 ms; this is told at once."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return process.wait()
    try:
        if not select.select([pidfd], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(process.args, timeout_s)
    finally:
        os.close(pidfd)
    return process.wait()


def finish(process: subprocess.Popen[bytes], directory: Path, timeout_s: float = 120) -> None:
    """Waits for a side that must end with status 0; raises BenchmarkError with the end of its stderr otherwise."""
    try:
        status: int | str = wait(process, timeout_s)
    except subprocess.TimeoutExpired:
        stop(process)
        status = f"not ended after {timeout_s:g} s"
    if status != 0:
        raise BenchmarkError(_words(process, directory, f"status {status}"))


def _words(process: subprocess.Popen[bytes], directory: Path, what: str) -> str:
    """What happened to which command, and the end of its stderr."""
    assert isinstance(process.args, list)
    last_words = (directory / "stderr").read_text(errors="replace")[-1500:].strip()
    return f"{' '.join(process.args)}: {what}\n{last_words}"


def stop(process: subprocess.Popen[bytes], timeout_s: float = 60) -> None:
    """Ends a launcher whose ranks would go on: SIGTERM, and SIGKILL if that is not enough."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill(pid: int) -> None:
    """SIGKILL to a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_until(condition: Callable[[], Result], what: str, timeout_s: float = 60, step_s: float = 0.01) -> Result:
    """Asks every `step_s` until the answer is true, and returns it; raises BenchmarkError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            message = f"not within {timeout_s:g} s: {what}"
            raise BenchmarkError(message)
        time.sleep(step_s)
    return answer


NOTING_RANK = """\
import os
import signal
import sys
import time

directory, rank = os.environ["BENCHMARK_DIR"], int(os.environ["RANK"])
note = os.open(os.path.join(directory, f"note.{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)


def on_sigterm(number, frame):
    os.write(note, str(time.monotonic_ns()).encode())
    os._exit(0)


signal.signal(signal.SIGTERM, on_sigterm)
with open(os.path.join(directory, f"go.{rank}"), "rb") as fifo:
    fifo.read()
"""
"""How a rank begins that writes down when SIGTERM reaches it, and waits at its gate ``go`` (:class:`Gates`)."""


class Gates:
    """FIFOs `<name>.<rank>` at which ranks wait for the benchmark: each opens its own and reads to the end.

    A non-blocking open for writing succeeds exactly when a reader is there, so `wait` returns when all ranks have
    arrived; closing lets them go.
    """

    def __init__(self, directory: Path, name: str, ranks: int) -> None:
        self._paths = [directory / f"{name}.{rank}" for rank in range(ranks)]
        self._open: list[int] = []
        for path in self._paths:
            os.mkfifo(path)

    def wait(self, process: subprocess.Popen[bytes], timeout_s: float = 120) -> None:
        """Returns when every rank waits at its gate; raises BenchmarkError if the launcher ends before that."""
        for path in self._paths:
            arrived = functools.partial(_open_for_writing, path, process)
            self._open.append(wait_until(arrived, f"rank at {path.name}", timeout_s))

    def open(self) -> int:
        """Lets the ranks go; returns the moment in nanoseconds of CLOCK_MONOTONIC."""
        at_ns = time.monotonic_ns()
        while self._open:
            os.close(self._open.pop())
        return at_ns


def _open_for_writing(path: Path, process: subprocess.Popen[bytes]) -> int:
    try:
        # Never 0, which would read as "not yet": 0, 1 and 2 are taken.
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        if process.poll() is not None:
            what = f"ended with {process.returncode} before its ranks were at {path.name}"
            raise BenchmarkError(_words(process, path.parent, what)) from None
        return 0
