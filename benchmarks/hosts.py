"""Several hosts: how soon they meet, how soon all know of a death, and what their messages cost at rest and at a hang.

python benchmarks/hosts.py [--quick] [--sides saferun,torchrun] [--only static,c10d,death,cost]

The hosts are processes of this machine, so that the network costs nothing. torch asks the name service for each address
that it connects to: where that may drop a question, `unshare -n sh -c 'ip link set lo up && ...'` measures without it.
``cost`` drives coordinators alone: 2, 4, 16 and 64 of them, and what each counts of its own operations on the store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from measure import (
    REPOSITORY,
    Bar,
    Options,
    Scratch,
    Table,
    alternate,
    command,
    parse_options,
    progress,
    say,
    say_machine,
    wait,
    wait_until,
)

sys.path.insert(0, str(REPOSITORY))

from tests.ports import own_port
from tests.torch.coordinating import Host

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = 2
# Two ranks each; the more hosts on one machine, the more of the time is its processors'.
MEETING_HOSTS = (2, 4)
# Of torchrun's time until every rank runs.
MEETING_BARS = {"static": Bar(1.0, "torchrun"), "c10d": Bar(0.6, "torchrun")}
# As many as one machine can hold; a job's hosts say how they do every five seconds.
COST_HOSTS = (2, 4, 16, 64)
HOST_TIMEOUT_S = 30.0
REST_S = 20.0
PART_BYTES = 16 << 10

RANK = """\
import os
import signal
import sys
import time

path = os.path.join(os.environ["BENCHMARK_DIR"], "at." + os.environ["RANK"])
with open(path + ".new", "w") as file:
    file.write(str(time.monotonic()))
os.rename(path + ".new", path)
if os.environ["BENCHMARK_DYING"] == os.environ["RANK"]:
    while not os.path.exists(os.path.join(os.environ["BENCHMARK_DIR"], "at.0")):
        time.sleep(0.01)
    time.sleep(1.0)
    with open(os.path.join(os.environ["BENCHMARK_DIR"], "died"), "w") as file:
        file.write(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["BENCHMARK_DYING"]:
    time.sleep(600)
"""


def host_options(backend: str, port: int, host: int) -> list[str]:
    """The options of one host."""
    if backend == "static":
        return ["--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "bench"]


def launch(scratch: Scratch, script: str, backend: str, hosts: int, dying: str, side: str) -> dict[str, float]:
    """One job: seconds to the first line of its last rank, or from the death of rank ``dying`` to the last end."""
    directory = scratch.new_directory()
    port = own_port()
    started = time.monotonic()
    processes = []
    extra = {"BENCHMARK_DYING": dying, "SAFERUN_LINT": "off", "SAFERUN_ENV_PROFILE": "none"}
    for host in range(hosts):
        options = ["--nnodes", str(hosts), "--nproc-per-node", "2", *host_options(backend, port, host)]
        more = ["--run-dir", str(directory / "runs")] if side.startswith("saferun") else []
        arguments = [*command(side), *options, *more, script]
        processes.append(scratch.start(arguments, directory, extra={**extra, "BENCHMARK_DIR": str(directory)}))
    ranks = [directory / f"at.{rank}" for rank in range(2 * hosts)]
    wait_until(lambda: all(path.exists() for path in ranks), "all ranks run", timeout_s=120)
    if not dying:
        for process in processes:
            wait(process, 120)
        return {
            f"{backend}, {hosts} hosts: the last rank runs": max(float(path.read_text()) for path in ranks) - started
        }
    for process in processes:
        with contextlib.suppress(Exception):
            wait(process, 60)
        if process.poll() is None:
            process.kill()
            process.wait()
    return {"SIGKILL of a rank: the last host has ended": time.monotonic() - float((directory / "died").read_text())}


# ---------------------------------------------------------------------------------------------------------------------
# Messages


@contextlib.contextmanager
def met(count: int) -> Iterator[tuple[list[Host], float]]:
    """So many coordinators, each a host of one job, and how long they took to meet once all were started."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for number in range(count):
            host = Host(f"node{number}", serves=not number)
            stack.callback(host.close)
            hosts.append(host)
        master = ["127.0.0.1", [hosts[0].ranks.getsockname()[1]]]
        started = time.monotonic()
        for number, host in enumerate(hosts):
            host.join(
                node_rank=number, least=count, most=count, master=master, probe_after_s=HOST_TIMEOUT_S, timeout_s=300.0
            )
        for host in hosts:
            host.expect("joined", timeout_s=300.0)
        yield hosts, time.monotonic() - started


def counts(hosts: list[Host]) -> list[dict[str, Any]]:
    """Operations and bytes of each coordinator so far."""
    for host in hosts:
        host.send("counts")
    return [host.expect("counts") for host in hosts]


def difference(before: list[dict[str, Any]], after: list[dict[str, Any]], name: str) -> list[float]:
    """What each has done between two counts."""
    return [float(b[name] - a[name]) for a, b in zip(before, after, strict=True)]


def hang(hosts: list[Host]) -> None:
    """All ranks go quiet, the leader tells a hang, every host hands in its part, and the leader has them all."""
    quiet = {"s": "quiet", "kind": "quiescent", "quiet_s": 300.0, "ranks": [0, 1], "busy": [], "certain": True}
    for host in hosts:
        host.send("state", attempt=0, state=quiet)
    seen: set[str] = set()
    while len(seen) < len(hosts):
        seen.update(hosts[0].expect("states")["changed"])
    message = {"kind": "hang", "attempt": 0, "host": 0, "task": 0, "label": "node0", "verdict": {}, "n": 1}
    hosts[0].send("append", attempt=0, message=message)
    for host in hosts:
        host.expect("entry")
    for host in hosts[1:]:
        host.send("chunk", attempt=0, name="hang-1", text=json.dumps({"evidence": "x" * PART_BYTES}))
    for _ in hosts[1:]:
        hosts[0].expect("chunk", timeout_s=120.0)


def measure_cost(quick: bool) -> None:  # noqa: FBT001 - one caller
    """Prints a table of operations and bytes by number of hosts."""
    say("messages, counted by each coordinator (a part has 16 KiB; the leader's store is on its own host)")
    at_rest = f"{'ops':>8} {'bytes':>9} {'leader ops':>11} {'bytes':>9}"
    at_hang = f"{'ops':>8} {'bytes':>9} {'leader ops':>11} {'bytes':>9} {'s':>6}"
    say(f"{'hosts':>6} {'join s':>8} | at rest, a minute {'':>22} | a hang")
    say(f"{'':>6} {'':>8} | {at_rest} | {at_hang}")
    for count in COST_HOSTS[:2] if quick else COST_HOSTS:
        progress(f"{count} hosts")
        with met(count) as (hosts, join_s):
            time.sleep(1.0)  # what the meeting stirs up
            before = counts(hosts)
            time.sleep(REST_S)
            after = counts(hosts)
            began = time.monotonic()
            hang(hosts)
            hang_s = time.monotonic() - began
            end = counts(hosts)
        per_minute = 60.0 / REST_S
        rest = {name: difference(before, after, name) for name in ("operations", "size_bytes")}
        hung = {name: difference(after, end, name) for name in ("operations", "size_bytes")}
        say(f"{count:>6} {join_s:>8.2f} | {_row(rest, per_minute)} | {_row(hung, 1.0)} {hang_s:>6.2f}")
    say()


def _row(values: dict[str, list[float]], factor: float) -> str:
    """The mean of those that do not lead, and the leader."""
    operations, size_bytes = values["operations"], values["size_bytes"]
    others = f"{_others(operations) * factor:>8.1f} {_others(size_bytes) * factor:>9.0f}"
    return f"{others} {operations[0] * factor:>11.0f} {size_bytes[0] * factor:>9.0f}"


def _others(values: list[float]) -> float:
    """The mean over the hosts that do not lead."""
    return sum(values[1:]) / (len(values) - 1)


def main() -> None:
    """Runs the parts that are wanted."""
    options: Options = parse_options(__doc__ or "", ("saferun", "torchrun"), ("static", "c10d", "death", "cost"))
    say_machine("hosts", options)
    rounds = options.rounds or (2 if options.quick else 7)
    table = Table(["torchrun"])
    with Scratch() as scratch:
        script = scratch.script("rank.py", RANK)
        for backend, bar in MEETING_BARS.items():
            for hosts in MEETING_HOSTS if backend in options.only else ():
                progress(f"{backend}: {hosts} hosts meet")
                one = functools.partial(launch, scratch, script, backend, hosts, "")
                for metric, values in alternate(options.sides, rounds, one).items():
                    table.add(metric, "s", values, {"saferun": [bar]})
        if "death" in options.only:
            progress("a rank is killed")
            one = functools.partial(launch, scratch, script, "static", HOSTS, "3")
            sides = [side for side in options.sides if side.startswith("saferun")]
            for metric, values in alternate(sides, rounds, one).items():
                table.add(metric, "s", values, {"saferun": [Bar(2.0)]})
    if options.only != ("cost",):
        table.say()
    if "cost" in options.only:
        measure_cost(options.quick)


if __name__ == "__main__":
    main()
