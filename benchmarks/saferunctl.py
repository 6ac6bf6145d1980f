"""How long saferunctl takes, beside a Python that does nothing: help of each subcommand, a list, a million lines.

Usage: python benchmarks/saferunctl.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from saferun.ctl import SUBCOMMANDS
from saferun.files.file_server import FileServer
from saferun.files.file_stream import LAZY
from saferun.files.ring import DATA, OPEN, RingRecord

ROOT = Path(__file__).parents[1]
RUNS, RANKS, LINES = 200, 64, 1_000_000
HELP_BAR_MS = 60.0


def taken_s(folder: Path, *command: str) -> float:
    """How long a command takes."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": os.devnull}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out:  # what goes to /dev/null costs cat nothing
        subprocess.run([*command], cwd=folder, env=environ, stdout=out, check=True)
    return time.perf_counter() - started


def taken_ms(folder: Path, rounds: int, *command: str) -> str:
    """The median and the best of some rounds, in milliseconds."""
    times = [taken_s(folder, sys.executable, *command) * 1000 for _ in range(rounds)]
    return f"median {statistics.median(times):8.1f} ms   best {min(times):8.1f} ms"


def make_runs(folder: Path) -> None:
    """Runs that have ended, each with a few files."""
    for number in range(RUNS):
        name = f"20260101-{number:06d}-abcdef"
        host = folder / "saferun-runs" / name / "node1"
        for rank in range(8):
            (host / "attempt_0" / f"rank_{rank}").mkdir(parents=True)
            (host / "attempt_0" / f"rank_{rank}" / "stdout.log").write_text("x\n")
        end = {"time": 1.0, "exit_code": 0, "outcome": "succeeded", "headline": ""}
        content = {"run_id": "abcdef", "command": ["train.py"], "host": "node1", "directory": name, "end": end}
        (host.parent / "run.json").write_text(json.dumps(content))


def make_output(folder: Path, lines_a_piece: int) -> Path:
    """A run with many lines of many ranks, written as the writer process does: so many lines of a rank at once."""
    run = folder / f"run{lines_a_piece}"
    (run / "node1").mkdir(parents=True)
    end = {"time": 1.0, "exit_code": 0, "outcome": "succeeded", "headline": ""}
    (run / "run.json").write_text(json.dumps({"run_id": "abcdef", "command": [], "host": "node1", "end": end}))
    server = FileServer(lambda _message: None)
    server.begin_run(str(run / "node1" / "output.index"), 0, ["", str(run), "", 0])
    for rank in range(RANKS):
        path = run / "node1" / "attempt_0" / f"rank_{rank}" / "stdout.log"
        server.handle(OPEN, rank + 1, memoryview(json.dumps([str(path), LAZY]).encode()))
    line = b"step 1234 loss 2.345 lr 0.001 tokens 123456 throughput 123.4 samples a second ok\n"
    piece = memoryview(line * lines_a_piece)
    for _ in range(LINES // RANKS // lines_a_piece):
        records = [RingRecord(DATA, rank + 1, piece, 0) for rank in range(RANKS)]
        for record in records:
            server.write(record.stream, [record.payload])
        server.note_times(records)
    server.finish()
    return run


def main(rounds: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="saferun-benchmark-") as name:
        folder = Path(name)
        make_runs(folder)
        print(f"{'a Python that does nothing':<32}", taken_ms(folder, rounds, "-c", "pass"))
        for subcommand in ("", *(subcommand.name for subcommand in SUBCOMMANDS)):
            words = [subcommand, "--help"] if subcommand else ["--help"]
            shown = taken_ms(folder, rounds, "-m", "saferun.ctl", *words)
            print(f"{' '.join(words):<32}", shown, f"  (bar: {HELP_BAR_MS:.0f} ms)")
        print(f"{f'list, {RUNS} runs':<32}", taken_ms(folder, 3, "-m", "saferun.ctl", "list", "-n", "0"))
        for run in (make_output(folder, 1), make_output(folder, 100)):
            print_logs(folder, run)


def print_logs(folder: Path, run: Path) -> None:
    """How long the output of a run takes, beside ``cat`` of its files, in turn."""
    files = sorted(map(str, run.glob("*/*/*/*.log")))
    index = (run / "node1" / "output.index").stat().st_size
    size = sum(map(os.path.getsize, files))
    shown, plain = [], []
    for _ in range(5):
        shown.append(taken_s(folder, sys.executable, "-m", "saferun.ctl", "logs", str(run)))
        plain.append(taken_s(folder, "cat", *files))
    ours, cat = statistics.median(shown), statistics.median(plain)
    print(f"logs of {LINES} lines, {RANKS} ranks, {size / 1e6:.0f} MB, {index / 1e6:.2f} MB of index:")
    print(f"  median {ours:6.3f} s, best {min(shown):6.3f} s; cat: {cat:6.3f} s, best {min(plain):6.3f} s", end="; ")
    print(f"ratio of medians {ours / cat:.1f}, of the best {min(shown) / min(plain):.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
