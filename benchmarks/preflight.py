"""Checks between hosts: time and processor time against the number of hosts, up to 64.

python benchmarks/preflight.py [--quick] [--only rounds,full,judge] [--rounds 5]

The hosts are processes of this machine on loopback addresses (127.0.N.1), each with a listener and a prober, two
interfaces each. So there is no network to wait for, but all hosts share this machine's cores: the processor time of a
host is what a real one needs, and the wall time is that of all hosts together divided by the cores. What a network adds
is computed: one large message at a time, over 1 Gbit/s. ``full`` is --preflight-full: all pairs.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from launcher_cost import BenchmarkError
from measure import Options, parse_options, progress, quartiles, say, say_machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from saferun.coordinator.assignments import partners
from saferun.linux.nic import Nic
from saferun.preflight.host_messages import (
    decode_endpoint,
    decode_host_info,
    decode_probes,
    encode_endpoint,
    encode_host_info,
    encode_probes,
)
from saferun.preflight.judge import judge
from saferun.preflight.probe.listener import Listener
from saferun.preflight.probe.prober import probe_all
from saferun.preflight.probe.protocol import LARGE_BYTES
from saferun.preflight.results import HostInfo, Probe, ProbeTarget

HOSTS = (2, 4, 8, 16, 32, 64)
NICS = 2
NETWORK_BYTES_S = 118e6
WITHIN_S = 60.0
# A host of so many has this many times the work of one of two, and no more than that by half.
SLACK = 1.5
JUDGED_HOSTS = (64, 256, 1024, 4096)


class Measured(NamedTuple):
    """One run of so many hosts.

    ``wall_s``: from the word to begin to the last host's last probe; ``cpu_s``: of one host, the mean; ``judge_s``: of
    the one that leads.
    """

    wall_s: float
    cpu_s: float
    judge_s: float


def address(host: int, nic: int) -> str:
    """Of one interface of one host."""
    return f"127.{nic + 1}.{host}.1"


def card_of(host: int) -> HostInfo:
    """What a host says of itself."""
    nics = tuple(Nic(f"eth{i}", (address(host, i),), (f"{address(host, i)}/32",)) for i in range(NICS))
    names = tuple(nic.name for nic in nics)
    return HostInfo(f"node{host}", time.time(), nics, names[:1], names, names, (("torch", "2.13.0"),), "0" * 64)


def be_a_host(host: int, hosts: int, full: bool, orders: int, answers: int) -> None:  # noqa: FBT001 - one caller
    """A host's check process: opens its endpoint, hears of the others', probes them, tells."""
    info = card_of(host)
    with closing(Listener([(nic.name, nic.addresses[0]) for nic in info.nics])) as listener:
        _write(answers, {"endpoint": encode_endpoint(listener.endpoint), "info": encode_host_info(info)})
        endpoints = _read(orders)["endpoints"]
        targets = []
        for other in partners(host, hosts, full=full):
            endpoint = decode_endpoint(endpoints[other])
            assert endpoint is not None
            targets.append(ProbeTarget(other, f"node{other}", endpoint))
        _write(answers, {"ready": True})
        _read(orders)
        before = time.process_time()
        probes = probe_all(host, targets, info.nics, time.monotonic() + WITHIN_S)
        _write(answers, {"probes": encode_probes(probes)})
        # It is probed by others for as long as they need.
        _read(orders)
        _write(answers, {"cpu_s": time.process_time() - before})


def measure(hosts: int, *, full: bool) -> Measured:
    """So many hosts probe each other once."""
    lines: list[tuple[int, int]] = []
    pids: list[int] = []
    try:
        for host in range(hosts):
            order_read, order_write = os.pipe()
            answer_read, answer_write = os.pipe()
            pid = os.fork()
            if pid == 0:
                _live(host, hosts, full, order_read, answer_write)
            pids.append(pid)
            lines.append((order_write, answer_read))
            os.close(order_read)
            os.close(answer_write)
        opened = [_read(answer) for _, answer in lines]
        _tell(lines, {"endpoints": [each["endpoint"] for each in opened]})
        for _, answer in lines:
            _read(answer)
        began_at = time.monotonic()
        _tell(lines, {"begin": True})
        told = [_read(answer)["probes"] for _, answer in lines]
        wall_s = time.monotonic() - began_at
        _tell(lines, {"end": True})
        cpu_s = sum(_read(answer)["cpu_s"] for _, answer in lines) / hosts
    finally:
        for order, answer in lines:
            os.close(order)
            os.close(answer)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    before = time.process_time()
    infos = {host: info for host, each in enumerate(opened) if (info := decode_host_info(each["info"])) is not None}
    probes = [probe for host, text in enumerate(told) for probe in decode_probes(text, host)]
    found = judge(infos, probes, missing={}, nics=(), remeasured=True, duration_s=wall_s)
    judge_s = time.process_time() - before
    expected = NICS * sum(len(partners(host, hosts, full=full)) for host in range(hosts))
    if len(probes) != expected or found.verdict not in {"ok", "skipped"}:
        raise BenchmarkError(f"{len(probes)} of {expected} probes, verdict {found.verdict}: {found.results[:3]}")
    return Measured(wall_s, cpu_s, judge_s)


def _live(host: int, hosts: int, full: bool, orders: int, answers: int) -> None:  # noqa: FBT001 - one caller
    try:
        be_a_host(host, hosts, full, orders, answers)
    finally:
        os._exit(0)


def _tell(lines: list[tuple[int, int]], message: dict[str, Any]) -> None:
    for order, _ in lines:
        _write(order, message)


def _write(fd: int, message: dict[str, Any]) -> None:
    left = json.dumps(message).encode() + b"\n"
    while left:
        left = left[os.write(fd, left) :]


def _read(fd: int) -> dict[str, Any]:
    """The next message; both sides speak in turn, so nothing follows it."""
    content = b""
    while not content.endswith(b"\n"):
        if not select.select([fd], [], [], 2 * WITHIN_S)[0]:
            raise BenchmarkError("a host says nothing")
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            raise BenchmarkError("a host has ended early")
        content += chunk
    message: dict[str, Any] = json.loads(content)
    return message


def say_times(title: str, options: Options, *, full: bool) -> None:
    """Prints a row for each number of hosts; ends with status 1 where the work grows faster than its reason."""
    say(title)
    say(
        f"{'hosts':>6} {'partners':>9} {'wall ms':>8} {'CPU ms a host':>14} {'a partner':>10} "
        f"{'on 1 Gbit/s ms':>15} {'judge ms':>9}"
    )
    base = 0.0
    for hosts in HOSTS[:4] if options.quick else HOSTS:
        progress(f"{hosts} hosts")
        runs = [measure(hosts, full=full) for _ in range(options.rounds or (2 if options.quick else 5))]
        wall_s, cpu_s, judge_s = (quartiles([run[i] for run in runs])[1] for i in range(3))
        count = len(partners(0, hosts, full=full))
        each_s = cpu_s / count
        # What is fixed is paid with the first partner: of few hosts the share of each is the largest.
        base = max(base, each_s) if hosts <= HOSTS[1] else base
        network_s = count * NICS * LARGE_BYTES / NETWORK_BYTES_S
        say(
            f"{hosts:>6} {count:>9} {wall_s * 1e3:>8.1f} {cpu_s * 1e3:>14.2f} {each_s * 1e3:>10.2f} "
            f"{network_s * 1e3:>15.0f} {judge_s * 1e3:>9.1f}"
        )
        if each_s > SLACK * base:
            raise BenchmarkError(
                f"{hosts} hosts: {each_s * 1e3:.2f} ms of CPU a partner, against {base * 1e3:.2f} ms of few"
            )
    say()


def say_judge(options: Options) -> None:
    """Prints how long the host that leads needs for what all of them found."""
    say("the verdict alone, healthy hosts with one interface")
    say(f"{'hosts':>6} {'probes':>8} {'decode ms':>10} {'judge ms':>9} {'us a probe':>11}")
    for hosts in JUDGED_HOSTS[:2] if options.quick else JUDGED_HOSTS:
        infos = {
            host: card_of(host % 250)._replace(
                label=f"node{host}", nics=(Nic("eth0", (f"10.{host >> 8}.{host & 255}.1",)),), probed=("eth0",)
            )
            for host in range(hosts)
        }
        texts = []
        for host in range(hosts):
            found = [
                Probe(host, other, "eth0", f"10.{other >> 8}.{other & 255}.1", "eth0", "ok", 1e-4, 1e9, segments=700)
                for other in partners(host, hosts)
            ]
            texts.append(encode_probes(found))
        before = time.process_time()
        probes = [probe for host, text in enumerate(texts) for probe in decode_probes(text, host)]
        decode_s = time.process_time() - before
        before = time.process_time()
        judge(infos, probes, missing={}, nics=(), remeasured=True, duration_s=0.0)
        judge_s = time.process_time() - before
        each_s = (decode_s + judge_s) / len(probes)
        say(f"{hosts:>6} {len(probes):>8} {decode_s * 1e3:>10.0f} {judge_s * 1e3:>9.0f} {each_s * 1e6:>11.1f}")
    say()


def main() -> None:
    """Runs the parts that are wanted."""
    options = parse_options(__doc__ or "", ("saferun",), ("rounds", "full", "judge"))
    say_machine("preflight", options)
    say("all hosts are processes of this machine, on loopback addresses")
    if "rounds" in options.only:
        say_times("each host probes those 1, 2, 4, 8 … further on", options, full=False)
    if "full" in options.only:
        say_times("all pairs (--preflight-full)", options, full=True)
    if "judge" in options.only:
        say_judge(options)


if __name__ == "__main__":
    main()
