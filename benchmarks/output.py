"""Output: what a line costs the launcher, how late it comes, and whether a stopped reader stalls a rank.

python benchmarks/output.py [--quick] [--sides cat,saferun,torchrun,torchrun-unbuffered]
                                   [--only cost,latency,stopped]
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import IO

from launcher_cost import cpu_s, marked_pids, read_memory, settle, user_s
from measure import (
    Bar,
    Bars,
    Gates,
    Options,
    Scratch,
    Table,
    alternate,
    command,
    finish,
    parse_options,
    percentile,
    progress,
    say_machine,
)

LINE_BYTES = 100
UNBUFFERED = "torchrun-unbuffered"
"""torchrun with PYTHONUNBUFFERED, as many container images set it: its lines come sooner, and cost a write each."""
SLOW_READ_BYTES, SLOW_PAUSE_S = 65536, 0.004
"""The slow pipe: 64 KiB, then a pause; 16 MB/s at most."""
LINE = re.compile(rb"^(?:\[[^\]\n]*\]:? ?)?R\d{2} N\d{7} x{86}$", re.MULTILINE)
"""A whole line of a rank, with or without a launcher's prefix."""

RANK = """\
import os
import sys
import time

directory, rank = os.environ["BENCHMARK_DIR"], int(os.environ["RANK"])
count = int(os.environ["BENCHMARK_LINES"])


def wait_at(gate):
    with open(os.path.join(directory, f"{gate}.{rank}"), "rb") as fifo:
        fifo.read()


"""

# All lines are made before the start, and leave in blocks: the launcher is to be the bottleneck, not the rank.
BULK = (
    RANK
    + """\
rest = b"x" * 86 + b"\\n"
lines = memoryview(b"".join(b"R%02d N%07d " % (rank, number) + rest for number in range(count)))
wait_at("go")
slowest_ns = 0
began_ns = before_ns = time.monotonic_ns()
while lines:
    lines = lines[os.write(1, lines[:64000]):]
    now_ns = time.monotonic_ns()
    slowest_ns = max(slowest_ns, now_ns - before_ns)
    before_ns = now_ns
with open(os.path.join(directory, f"unfinished.{rank}"), "w") as file:
    file.write(f"{slowest_ns} {now_ns - began_ns}")
os.rename(file.name, os.path.join(directory, f"written.{rank}"))
wait_at("done")
"""
)

TRICKLE = (
    RANK
    + """\
wait_at("go")
due = time.monotonic() + 0.01 * rank
for _ in range(count):
    due += 0.02
    time.sleep(max(0.0, due - time.monotonic()))
    os.write(1, b"T%019d\\n" % time.monotonic_ns())
wait_at("done")
"""
)


class Reader(threading.Thread):
    """Reads a pipe to its end, keeping what came and when; at most `size` bytes, then a pause of `pause_s`."""

    def __init__(self, pipe: int, pause_s: float = 0) -> None:
        super().__init__(daemon=True)
        self._pipe, self._pause_s = pipe, pause_s
        self.chunks: list[tuple[int, bytes]] = []
        self.received_bytes = 0

    def run(self) -> None:
        """Until all writers have closed their end."""
        while chunk := os.read(self._pipe, SLOW_READ_BYTES):
            self.chunks.append((time.monotonic_ns(), chunk))
            self.received_bytes += len(chunk)
            if self._pause_s:
                time.sleep(self._pause_s)


class Run:
    """Ranks that run `script` with their output going through one side into `sink`; gates "go" and "done"."""

    def __init__(self, scratch: Scratch, side: str, script: str, *, ranks: int, lines: int, sink: int | None) -> None:
        self.directory = scratch.new_directory()
        self._go, self._done = (Gates(self.directory, name, ranks) for name in ("go", "done"))
        self._scratch = scratch
        extra = {"BENCHMARK_LINES": str(lines // ranks)}
        self._writers: list[subprocess.Popen[bytes]] = []
        self._ends: list[subprocess.Popen[bytes]] = []
        start = functools.partial(scratch.start, directory=self.directory)
        output: int | IO[bytes] = (self.directory / "console").open("wb") if sink is None else sink
        if side == "cat":
            for rank in range(ranks):
                numbered = {**extra, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                writer = start([sys.executable, "-u", script], stdout=subprocess.PIPE, extra=numbered)
                assert writer.stdout is not None
                with writer.stdout:
                    self._ends.append(start(["cat"], stdin=writer.stdout, stdout=output))
                self._writers.append(writer)
        else:
            kept = ["--run-dir", "runs"] if side.startswith("saferun") else ["--tee", "3", "--log-dir", "logs"]
            if side == UNBUFFERED:
                extra["PYTHONUNBUFFERED"] = "1"
            arguments = [*command(side), "--nproc_per_node", str(ranks), *kept, script]
            self._ends.append(start(arguments, stdout=output, extra=extra))
        if isinstance(output, int):
            os.close(output)
        else:
            output.close()

    def launcher_pids(self) -> list[int]:
        """The processes between ranks and reader, lowest first."""
        return marked_pids(self._scratch.mark, without_ranks=True)

    def begin(self) -> tuple[float, float]:
        """Waits for the ranks, and for the launcher to have nothing else to do; lets go.

        Returns:
            The CPU seconds of the launcher so far, all and in user mode.
        """
        self._go.wait(self._ends[0])
        settle(self.launcher_pids)
        pids = self.launcher_pids()
        used = cpu_s(pids), user_s(pids)
        self._go.open()
        return used

    def drain(self, reader: Reader | None) -> tuple[float, float]:
        """Waits until the ranks have written and nothing moves any more; returns the same as `begin`."""
        self._done.wait(self._ends[0], timeout_s=300)
        received = -1
        while received != (received := self._received_bytes(reader)):
            # The smallest load of a slow reader may hide below this share, so the count of bytes has a say too.
            settle(self.launcher_pids, share=0.1)
        pids = self.launcher_pids()
        return cpu_s(pids), user_s(pids)

    def _received_bytes(self, reader: Reader | None) -> int:
        return reader.received_bytes if reader else (self.directory / "console").stat().st_size

    def end(self, reader: Reader | None) -> None:
        """Lets the ranks end and waits for all."""
        self._done.open()
        for process in [*self._writers, *self._ends]:
            finish(process, self.directory)
        if reader:
            reader.join()

    def write_ms(self) -> list[tuple[float, float]]:
        """Of each rank that has written everything: its slowest write and all of them, in milliseconds."""
        found = [path.read_text().split() for path in self.directory.glob("written.*")]
        return [(int(slowest) / 1e6, int(total) / 1e6) for slowest, total in found]

    def lines_in_files(self) -> float:
        """How many lines of the ranks are in the files that the launcher keeps."""
        return sum(path.stat().st_size for path in self.directory.glob("**/stdout.log")) / LINE_BYTES


def whole_lines(text: bytes) -> int:
    """How many lines of the ranks came whole: neither lost nor glued to another."""
    return sum(1 for _ in LINE.finditer(text))


def measure_cost(scratch: Scratch, side: str, script: str, ranks: int, lines: int, slow: bool) -> dict[str, float]:  # noqa: FBT001
    """Bulk output into a file or a slow pipe: CPU seconds of launcher processes for a million lines, and what came."""
    read_end, write_end = os.pipe() if slow else (None, None)
    run = Run(scratch, side, script, ranks=ranks, lines=lines, sink=write_end)
    reader = Reader(read_end, SLOW_PAUSE_S) if read_end is not None else None
    if reader:
        reader.start()
    before, after = run.begin(), run.drain(reader)
    run.end(reader)
    console = b"".join(chunk for _, chunk in reader.chunks) if reader else (run.directory / "console").read_bytes()
    if read_end is not None:
        os.close(read_end)
    result = {
        "cpu": (after[0] - before[0]) / lines * 1e6,
        "user": (after[1] - before[1]) / lines * 1e6,
        "writing": max(total_ms for _, total_ms in run.write_ms()) / 1e3 / lines * 1e6,
        "console": 100 * whole_lines(console) / lines,
    }
    if side != "cat":
        result["files"] = 100 * run.lines_in_files() / lines
    for path in run.directory.glob("**/*.log"):
        path.unlink()
    (run.directory / "console").unlink(missing_ok=True)
    return result


def measure_latency(scratch: Scratch, side: str, script: str, lines: int) -> dict[str, float]:
    """Two ranks write a line each 20 ms: milliseconds from the write to its arrival at the reader."""
    read_end, write_end = os.pipe()
    run = Run(scratch, side, script, ranks=2, lines=lines, sink=write_end)
    reader = Reader(read_end)
    reader.start()
    run.begin()
    run.drain(reader)
    run.end(reader)
    os.close(read_end)
    late_ms = [
        (arrived_ns - int(written_ns)) / 1e6
        for arrived_ns, chunk in reader.chunks
        for written_ns in re.findall(rb"T(\d{19})\n", chunk)
    ]
    return {"p50": percentile(late_ms, 50), "p99": percentile(late_ms, 99), "came": 100 * len(late_ms) / lines}


def measure_stopped(scratch: Scratch, side: str, script: str, lines: int, stop_s: float) -> dict[str, float]:
    """Two ranks write far more than the pipe holds while nobody reads for `stop_s`; then the reader goes on."""
    read_end, write_end = os.pipe()
    run = Run(scratch, side, script, ranks=2, lines=lines, sink=write_end)
    run.begin()
    time.sleep(stop_s)
    written = run.write_ms()
    waiting_bytes: int = struct.unpack("i", fcntl.ioctl(read_end, termios.FIONREAD, b"\0" * 4))[0]
    peak_mib = max(read_memory(pid).peak_mib for pid in run.launcher_pids()[:1])
    reader = Reader(read_end)
    reader.start()
    run.drain(reader)
    run.end(reader)
    os.close(read_end)
    console = b"".join(chunk for _, chunk in reader.chunks)
    result = {
        "finished": len(written),
        "slowest": max(slowest_ms for slowest_ms, _ in run.write_ms()),
        "pipe": waiting_bytes / 1024,
        "memory": peak_mib,
        "console": 100 * whole_lines(console) / lines,
    }
    if side != "cat":
        result["files"] = 100 * run.lines_in_files() / lines
    return result


def main(options: Options) -> None:
    """Measures the parts asked for and prints one table each."""
    say_machine("output", options)
    table = Table(("torchrun", UNBUFFERED, "cat"))
    exact: Bars = {"saferun": (Bar(100, at_least=True),)}
    with Scratch() as scratch:
        bulk, trickle = scratch.script("bulk.py", BULK), scratch.script("trickle.py", TRICKLE)
        if "cost" in options.only:
            lines = 200_000 if options.quick else 1_000_000
            rounds = options.rounds or (3 if options.quick else 5)
            for ranks, slow in ((2, False), (2, True), (8, False), (8, True)):
                sink = "slow pipe" if slow else "file"
                progress(f"{lines} lines of {ranks} ranks to a {sink}, {rounds} rounds")
                measure = functools.partial(measure_cost, scratch, script=bulk, ranks=ranks, lines=lines, slow=slow)
                values = alternate(options.sides, rounds, measure, warm_up=False)
                what = f"{ranks} ranks to a {sink}"
                bars: Bars = {"saferun": (Bar(0.25, "torchrun"),)}
                table.add(f"{what}: launcher's CPU for 1 M lines", "s", values["cpu"], bars)
                table.add(f"{what}: in user mode", "s", values["user"])
                table.add(f"{what}: ranks' writing of 1 M lines", "s", values["writing"])
                table.add(f"{what}: whole lines at the console", "%", values["console"], None if slow else exact)
                table.add(f"{what}: lines in the ranks' files", "%", values.get("files", {}), exact)
        if "latency" in options.only:
            lines = 400 if options.quick else 2000
            rounds = options.rounds or 3
            progress(f"latency of {lines} lines, {rounds} rounds")
            measure = functools.partial(measure_latency, scratch, script=trickle, lines=lines)
            values = alternate(options.sides, rounds, measure, warm_up=False)
            table.add("latency of a line at rest, p50", "ms", values["p50"])
            table.add("latency of a line at rest, p99", "ms", values["p99"], {"saferun": (Bar(5),)})
            table.add("latency: lines that came", "%", values["came"], exact)
        if "stopped" in options.only:
            lines, stop_s = (400_000, 10.0) if options.quick else (1_200_000, 30.0)
            rounds = options.rounds or 1
            progress(f"reader stopped for {stop_s:g} s, {rounds} rounds")
            measure = functools.partial(measure_stopped, scratch, script=bulk, lines=lines, stop_s=stop_s)
            values = alternate(options.sides, rounds, measure, warm_up=False)
            what = f"reader stopped for {stop_s:g} s"
            table.add(f"{what}: ranks done while it was", "", values["finished"], {"saferun": (Bar(2, at_least=True),)})
            table.add(f"{what}: slowest single write", "ms", values["slowest"], {"saferun": (Bar(1000),)})
            table.add(f"{what}: then in the pipe", "KiB", values["pipe"])
            table.add(f"{what}: launcher's highest memory", "MiB", values["memory"])
            table.add(f"{what}: whole lines at the console", "%", values["console"])
            table.add(f"{what}: lines in the ranks' files", "%", values.get("files", {}), exact)
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("cat", "saferun", "torchrun", UNBUFFERED), ("cost", "latency", "stopped")))
