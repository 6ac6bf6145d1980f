"""How long saferunctl takes, beside a Python that does nothing: help of each verb, a list of runs, a million lines.

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

from saferun.ctl import VERBS
from saferun.files.file_server import FileServer
from saferun.files.file_stream import LAZY
from saferun.files.ring import DATA, OPEN, Record

ROOT = Path(__file__).parents[1]
RUNS, RANKS, LINES = 200, 64, 1_000_000
HELP_BAR_MS = 60.0


def taken_ms(folder: Path, rounds: int, *command: str) -> str:
    """The median and the best of some rounds, in milliseconds."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": os.devnull}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - started) * 1000)
    return f"median {statistics.median(times):8.1f} ms   best {min(times):8.1f} ms"


def make_runs(folder: Path) -> None:
    """Runs that have ended, each with a few files."""
    for number in range(RUNS):
        name = f"20260101-{number:06d}-abcdef"
        host = folder / "saferun_runs" / name / "node1"
        for rank in range(8):
            (host / "attempt_0" / f"rank_{rank}").mkdir(parents=True)
            (host / "attempt_0" / f"rank_{rank}" / "stdout.log").write_text("x\n")
        end = {"time": 1.0, "exit_code": 0, "outcome": "succeeded", "headline": ""}
        content = {"run_id": "abcdef", "command": ["train.py"], "host": "node1", "directory": name, "end": end}
        (host.parent / "run.json").write_text(json.dumps(content))


def make_output(folder: Path) -> Path:
    """A run with many lines of many ranks, written as the writer process does."""
    run = folder / "run"
    (run / "node1").mkdir(parents=True)
    end = {"time": 1.0, "exit_code": 0, "outcome": "succeeded", "headline": ""}
    (run / "run.json").write_text(json.dumps({"run_id": "abcdef", "command": [], "host": "node1", "end": end}))
    server = FileServer(lambda _message: None)
    server.begin_run(str(run / "node1" / "output.index"), 0, ["", str(run), "", 0])
    for rank in range(RANKS):
        path = run / "node1" / "attempt_0" / f"rank_{rank}" / "stdout.log"
        server.handle(OPEN, rank + 1, memoryview(json.dumps([str(path), LAZY]).encode()))
    line = memoryview(b"step 1234 loss 2.345 lr 0.001 tokens 123456 throughput 123.4 samples a second ok\n")
    for _ in range(LINES // RANKS):
        records = [Record(DATA, rank + 1, line, 0) for rank in range(RANKS)]
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
        run = make_output(folder)
        size = sum(path.stat().st_size for path in run.rglob("*.log"))
        index = (run / "node1" / "output.index").stat().st_size
        print(f"{'a Python that does nothing':<32}", taken_ms(folder, rounds, "-c", "pass"))
        for verb in ("", *(verb.name for verb in VERBS)):
            words = [verb, "--help"] if verb else ["--help"]
            shown = taken_ms(folder, rounds, "-m", "saferun.ctl", *words)
            print(f"{' '.join(words):<32}", shown, f"  (bar: {HELP_BAR_MS:.0f} ms)")
        print(f"{f'list, {RUNS} runs':<32}", taken_ms(folder, 3, "-m", "saferun.ctl", "list", "-n", "0"))
        logs = ("-m", "saferun.ctl", "logs", str(run))
        what = f"logs, {LINES} lines, {size / 1e6:.0f} MB"
        print(f"{what:<32}", taken_ms(folder, 3, *logs), f"  (index: {index / 1e6:.1f} MB)")
        print(f"{'cat of the same files':<32}", taken_ms(folder, 3, "-c", f"import os; os.system('cat {run}/*/*/*/*')"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
