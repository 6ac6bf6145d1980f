"""What the checks of a job found, for tests of the report's rooms."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.linux.nic import Nic
from saferun.preflight.results import Cell, CheckResult, HostInfo, MatrixRow, Preflight
from saferun.supervisor.policy.decision_row import DecisionRow

SHM_HINT = "give it more (docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory on /dev/shm)"
OPEN_FILES = "a process may open 1048576 files"
WORDS = "hsn0 does not answer (timeout) from 3 of 3 hosts; its eth0 does"


def dead_nic(host: str) -> CheckResult:
    """A host that cannot be reached over its fast network."""
    hint = f"check the cable, the switch port and the VLAN of {host}'s hsn0, and firewalls, or run with --nic eth0"
    return CheckResult("links", "fail", WORDS, hint, (("from", "3"),), 0.31, "nic_unreachable", host=host)


def small_shm(host: str, size: str = "64 MiB") -> CheckResult:
    """A host with little shared memory."""
    message = f"/dev/shm has only {size}, and NCCL and data loaders of 8 ranks need more"
    return CheckResult("shared_memory", "warn", message, SHM_HINT, (("size", size),), 0.001, host=host)


def good(name: str, words: str, hosts: Iterable[str]) -> list[CheckResult]:
    """A check that found nothing wrong on some hosts."""
    return [CheckResult(name, "ok", words, duration_s=0.001, host=host) for host in hosts]


def well(host: str, of: int = 3, nics: Iterable[str] = ("eth0", "hsn0")) -> MatrixRow:
    """A host that all others reach over all interfaces."""
    return MatrixRow(host, tuple(Cell(nic, "ok", of, of, 21e-6, 1.18e10) for nic in nics))


def cut_off(host: str, of: int = 3) -> MatrixRow:
    """A host whose hsn0 nobody reaches."""
    return MatrixRow(host, (Cell("eth0", "ok", of, of, 80e-6, 1.1e9), Cell("hsn0", "timeout", 0, of)))


def info(host: str) -> HostInfo:
    """What a host tells of itself."""
    return HostInfo(
        host,
        1.7e9,
        (
            Nic("lo", ("127.0.0.1",), ("127.0.0.1/8",), True, 65536, "loopback"),
            Nic("eth0", ("10.0.0.1",), ("10.0.0.1/24",), True, 1500, "ethernet", 1_000_000_000),
        ),
        ("eth0",),
        ("eth0",),
        ("eth0", "hsn0"),
        (("torch", "2.13.0"), ("python", "3.11.9")),
        "5f2c1a",
        (("NCCL_DEBUG", "INFO"), ("API_TOKEN", "abc123")),
        (("node1", "10.0.0.1"),),
    )


def hosts_of(count: int) -> list[str]:
    """``node1`` and so on."""
    return [f"node{number}" for number in range(1, count + 1)]


def names(number: int) -> str:
    """What the check of names finds on one of these hosts; node1 is the first host."""
    both = dict.fromkeys((number, 1))
    return ", ".join(f"node{host} is 10.0.{host // 256}.{host % 256}" for host in both)


def found(count: int = 4) -> Preflight:
    """Of some hosts node3 has a dead interface; node1 and node2 have little shared memory."""
    hosts = hosts_of(count)
    return Preflight(
        (
            dead_nic("node3"),
            small_shm("node1"),
            small_shm("node2"),
            CheckResult("gpus", "skipped", "the GPUs' driver could not be asked", host="node1"),
            *(result for number, host in enumerate(hosts, 1) for result in good("names", names(number), [host])),
            *good("open_files", OPEN_FILES, hosts[:1]),
            *good("versions", "saferun 0.1.0, python 3.11.9, torch 2.13.0", hosts),
        ),
        tuple(cut_off(host, count - 1) if host == "node3" else well(host, count - 1) for host in hosts),
        0.431,
    )


def infos_of(count: int = 4) -> dict[int, HostInfo]:
    """What these hosts tell of themselves."""
    return {number: info(host) for number, host in enumerate(hosts_of(count))}


RETRY = DecisionRow(
    0,
    1.7e9 + 30,
    "retry",
    "starting again in 1.2 s (retry 1 of 3): port 29500 is in use",
    1.21,
    "port_in_use",
    "node1",
)
FINISH = DecisionRow(
    1,
    1.7e9 + 60,
    "finish",
    "not started again: the same failure twice in a row (syntax_error, rank 3, train.py:12)",
    class_name="syntax_error",
)
