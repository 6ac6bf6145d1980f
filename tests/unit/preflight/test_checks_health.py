"""The checks of a host's health: errors of interfaces over time, storage, the kernel's log, a real computation."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import kernel_log
from saferun.captures.kernel_log import KernelLog
from saferun.diagnosis import host_fault
from saferun.diagnosis.host_fault import found_faults
from saferun.linux import link_counters
from saferun.linux.link_counters import LinkCounters
from saferun.preflight import health_record
from saferun.preflight.checks import nic_errors, storage
from saferun.preflight.checks.all_checks import CHECKS, OF_HEALTH, checks_for
from saferun.preflight.checks.nic_errors import check_nic_errors
from saferun.preflight.checks.recent_kernel import check_kernel_log
from saferun.preflight.checks.storage import check_storage, read_only_file_systems
from saferun.preflight.outcome import bad_hosts, findings_of
from saferun.preflight.results import CheckResult, HostInfo, Preflight
from tests.unit.preflight.host_roots import Root

BOOT = "9fbf6883-0c1a-49d9-b37d-41fcec448964"
COUNTERS = "sys/class/infiniband/mlx5_0/ports/1/counters"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path)
    root.write("proc/sys/kernel/random/boot_id", f"{BOOT}\n")
    return root


# ----------------------------------------------------------------------------------------------------------- interfaces


class Link:
    """An interface whose counters a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.counters = {name: LinkCounters(name, "ethernet", True, 1_000_000, 7, 3) for name in names or ("hsn0",)}
        monkeypatch.setattr(nic_errors, "read_link_counters", lambda: tuple(self.counters.values()))

    def add(self, packets: int = 0, errors: int = 0, losses: int = 0, *, name: str = "hsn0") -> None:
        old = self.counters[name]
        self.counters[name] = old._replace(
            packets=old.packets + packets, errors=old.errors + errors, losses=old.losses + losses
        )


def compared(root: Root, earlier: CheckResult) -> CheckResult:
    """A look after another one."""
    return check_nic_errors(root.context(earlier=earlier.facts))


def test_what_was_counted_before_the_first_look_shows_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be years old."""
    link = Link(monkeypatch)
    link.add(errors=10**6, losses=1000)
    first = check_nic_errors(root.context())
    assert first.verdict == "ok"
    assert compared(root, first).verdict == "ok"


@pytest.mark.parametrize(
    ("added", "message", "class_name"),
    [
        ({"losses": 2}, "hsn0 has lost its carrier 2 times in the last ", "network_interface"),
        ({"losses": 1}, "hsn0 has lost its carrier once in the last ", ""),
        ({"errors": 500, "packets": 9500}, "hsn0 has counted 500 errors in 9500 packets", "network_interface"),
        ({"errors": 99, "packets": 100}, "", ""),
        ({"errors": 500, "packets": 10**8}, "", ""),
        ({"packets": 10**9}, "", ""),
    ],
)
def test_what_is_counted_between_two_looks_is_judged(
    root: Root, monkeypatch: pytest.MonkeyPatch, added: Any, message: str, class_name: str
) -> None:
    """Few errors among many packets are ordinary; one loss of the carrier is told, and blames no host."""
    link = Link(monkeypatch)
    first = check_nic_errors(root.context())
    link.add(**added)
    second = compared(root, first)
    assert (second.verdict == "warn") == bool(message)
    assert second.class_name == class_name
    if message:
        assert second.message.startswith(message)
    # Once told, it is no news.
    assert compared(root, second).verdict == "ok"


def test_interfaces_of_containers_come_and_go_unnoticed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, "veth0a1b", "docker0", "lo")
    link.counters["lo"] = link.counters["lo"]._replace(kind="loopback")
    first = check_nic_errors(root.context())
    for name in link.counters:
        link.add(name=name, losses=9, errors=10**6)
    assert compared(root, first).verdict == "ok"


def test_the_interfaces_of_another_network_namespace_are_not_compared(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host has recorded is not about a container's eth0."""
    link = Link(monkeypatch)
    first = check_nic_errors(root.context())
    (namespace := Path(root.path, "proc/self/ns/net")).parent.mkdir(parents=True)
    namespace.symlink_to("net:[4026532008]")
    link.add(losses=50)
    assert compared(root, first).verdict == "ok"
    second = check_nic_errors(root.context())
    link.add(losses=50)
    assert compared(root, second).verdict == "warn"


def test_an_interface_that_has_appeared_since_is_not_compared(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    first = check_nic_errors(root.context())
    link.counters["hsn1"] = LinkCounters("hsn1", "ethernet", True, 10, 10_000, 50)
    assert compared(root, first).verdict == "ok"


def test_errors_of_rdma_ports_are_compared_too(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    Link(monkeypatch)
    root.write(f"{COUNTERS}/link_downed", "4\n")
    root.write(f"{COUNTERS}/symbol_error", "70000\n")
    first = check_nic_errors(root.context())
    assert compared(root, first).verdict == "ok"
    root.write(f"{COUNTERS}/symbol_error", "70500\n")
    second = compared(root, first)
    assert (second.class_name, second.verdict) == ("fabric_degraded", "warn")
    assert second.message.startswith("mlx5_0:1 has counted 500 symbol_error in the last ")
    root.write(f"{COUNTERS}/link_downed", "6\n")
    assert "mlx5_0:1 has lost its carrier 2 times" in compared(root, second).message


def test_errors_of_rdma_ports_over_many_hours_are_ordinary(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is restarted after a day compares with what there was a day ago."""
    Link(monkeypatch)
    root.write(f"{COUNTERS}/symbol_error", "70000\n")
    first = check_nic_errors(root.context())
    root.write(f"{COUNTERS}/symbol_error", "70500\n")
    earlier = dict(first.facts)
    aged = first._replace(facts=tuple({**earlier, "at_s": str(float(earlier["at_s"]) - 20 * 3600)}.items()))
    assert compared(root, first).verdict == "warn"
    assert compared(root, aged).verdict == "ok"


@pytest.mark.parametrize(("physical", "class_name"), [("2: Polling", "network_interface"), ("3: Disabled", "")])
def test_one_loss_is_the_host_s_fault_where_the_port_is_still_down(
    root: Root, monkeypatch: pytest.MonkeyPatch, physical: str, class_name: str
) -> None:
    """Unless it was switched off. A port that never had a cable has lost none."""
    Link(monkeypatch)
    port = COUNTERS.removesuffix("counters")
    root.write(f"{COUNTERS}/link_downed", "4\n")
    root.write(f"{port}state", "1: DOWN\n")
    root.write(f"{port}phys_state", f"{physical}\n")
    first = check_nic_errors(root.context())
    assert compared(root, first).verdict == "ok"
    root.write(f"{COUNTERS}/link_downed", "5\n")
    second = compared(root, first)
    assert second.class_name == class_name
    assert ("and is down" in second.message) == bool(class_name)


@pytest.mark.parametrize(
    "earlier",
    [
        (("boot", "another boot"), ("at_s", "1.0"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "x"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "1e300"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "-90000000"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "nan"), ("hsn0 losses", "0")),
        (("hsn0 losses", "0"),),
        (),
    ],
)
def test_a_look_before_the_boot_or_one_that_makes_no_sense_does_not_count(
    root: Root, monkeypatch: pytest.MonkeyPatch, earlier: tuple[tuple[str, str], ...]
) -> None:
    link = Link(monkeypatch)
    link.add(losses=50)
    assert check_nic_errors(root.context(earlier=earlier)).verdict == "ok"


def test_the_counters_of_this_machine_can_be_read() -> None:
    by_name = {link.name: link for link in link_counters.read_link_counters()}
    assert by_name["lo"].kind == "loopback"
    assert all(link.packets >= 0 and link.losses >= 0 for link in by_name.values())


# --------------------------------------------------------------------------------------------------------------- record


def test_counters_are_kept_for_the_next_run(tmp_path: Path) -> None:
    path = str(tmp_path / "saferun" / "health.json")
    assert health_record.read_record(path) == ((), 0.0)
    assert health_record.write_record((("hsn0 losses", "3"),), path) == ""
    counts, at = health_record.read_record(path)
    assert counts == (("hsn0 losses", "3"),)
    assert abs(at - time.time()) < 60
    assert os.listdir(tmp_path / "saferun") == ["health.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"time": "x", "counts": []}', '{"time": 1, "counts": [[1, 2]]}'])
def test_a_record_that_is_none_costs_the_comparison(tmp_path: Path, content: str) -> None:
    path = tmp_path / "health.json"
    path.write_text(content)
    assert health_record.read_record(str(path)) == ((), 0.0)


def test_a_record_that_others_could_have_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    assert health_record.write_record((("hsn0 losses", "3"),), str(path)) == ""
    path.chmod(0o666)
    assert health_record.read_record(str(path)) == ((), 0.0)
    assert health_record.write_record((), "/proc/no/such/file").startswith("/proc/no/such/file: ")


# -------------------------------------------------------------------------------------------------------------- storage

MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 8:2 / /data rw,relatime - ext4 /dev/sdb1 ro,errors=remount-ro
24 22 8:3 / /backup ro,relatime - ext4 /dev/sdc1 ro
25 22 0:40 / /home rw,relatime - nfs4 filer:/home rw,vers=4.2
26 22 8:4 / /new rw,relatime - ext4 /dev/sdd1 rw,emergency_ro
27 22 7:1 / /snap/core rw,nodev - squashfs /dev/loop1 ro
28 22 8:2 / /bound ro,relatime - ext4 /dev/sde1 rw
29 22 0:41 / /lower rw - overlay overlay ro,lowerdir=/a:/b
"""


def test_a_file_system_that_has_become_read_only_is_known() -> None:
    """Unlike one that was mounted so, or can be nothing else. Only the kernel's word for damage is certain."""
    found = [(one.point, one.device, one.is_certain) for one in read_only_file_systems(MOUNTS)]
    assert found == [("/data", "8:2", False), ("/new", "8:4", True)]
    assert read_only_file_systems("") == read_only_file_systems("1 2 - ext4\n- ext4 a ro\n\n") == []


def remounted(root: Root, *, errors: int = 0, ago_s: float = 0.0) -> None:
    """Mounts of which /data is read-only as a whole, and what ext4 counts of it."""
    root.write("proc/self/mountinfo", MOUNTS.replace("rw,emergency_ro", "rw"))
    (link := Path(root.path, "sys/dev/block/8:2")).parent.mkdir(parents=True)
    link.symlink_to("../../devices/pci0000:00/block/sdb/sdb1")
    root.write("sys/fs/ext4/sdb1/errors_count", f"{errors}\n")
    root.write("sys/fs/ext4/sdb1/last_error_time", f"{time.time() - ago_s:.0f}\n" if errors else "0\n")


@pytest.mark.parametrize("counted", [{}, {"errors": 3, "ago_s": 20 * 365 * 86400.0}])
def test_a_planned_remount_as_read_only_blames_no_host(root: Root, counted: dict[str, Any]) -> None:
    """It leaves bind mounts and copied namespaces "rw", as damage does. Who uses the path is warned."""
    remounted(root, **counted)
    for is_of_host in (False, True):
        assert check_storage(root.context(is_of_host=is_of_host)).verdict == "ok"
        used = check_storage(root.context(storage=("/data/me",), is_of_host=is_of_host))
        assert (used.verdict, used.class_name) == ("warn", "")
        assert used.message == "the file system at /data has become read-only"
        assert found_faults(findings_of([used._replace(name="storage")]), 1, is_launch=False) == ()


def test_a_file_system_that_is_read_only_after_errors_is_a_fault_of_the_host(root: Root) -> None:
    """On older kernels errors=remount-ro leaves no other trace in the options."""
    remounted(root, errors=1)
    result = check_storage(root.context(is_of_host=True))
    assert (result.class_name, result.message) == ("file_system_error", "the file system at /data has become read-only")


def test_damage_is_a_fault_of_the_host(root: Root) -> None:
    root.write("proc/self/mountinfo", MOUNTS)
    result = check_storage(root.context())
    assert (result.verdict, result.class_name) == ("warn", "file_system_error")
    assert result.message == "the file system at /new has become read-only"
    assert found_faults(findings_of([result._replace(name="storage")]), 1)[0].kind == "file_system"


def test_a_path_that_does_not_answer_is_told_and_not_waited_for(
    root: Root, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside others that do. What hangs is left behind."""
    dead, answer = f"{tmp_path}{tmp_path}/dead", threading.Event()
    (tmp_path / str(tmp_path)[1:]).mkdir(parents=True)
    real = storage._error_of

    def ask(path: str, *, lists: bool) -> int:
        if path == dead:
            answer.wait(60)
        return real(path, lists=lists)

    monkeypatch.setattr(storage, "_error_of", ask)
    monkeypatch.setattr(storage, "PATIENCE_S", 1.0)
    root.write("proc/self/mountinfo", f"22 1 0:40 / {tmp_path} rw - lustre mds@tcp:/scratch rw\n")
    try:
        result = check_storage(root.context(storage=(f"{tmp_path}/dead", str(tmp_path))))
    finally:
        answer.set()
    assert (result.verdict, result.class_name) == ("warn", "file_system_error")
    assert result.message == f"{tmp_path}/dead (lustre at {tmp_path}) does not answer within 1 s"


@pytest.mark.parametrize(
    ("number", "is_fault"),
    [(errno.ESTALE, True), (errno.EIO, True), (errno.ENOTCONN, True), (errno.EACCES, False), (errno.ELOOP, False)],
)
def test_what_a_path_answers_is_a_fault_only_if_the_file_system_is_broken(
    root: Root, monkeypatch: pytest.MonkeyPatch, number: int, is_fault: bool
) -> None:
    monkeypatch.setattr(storage, "_error_of", lambda _path, **_: number)
    assert (check_storage(root.context(storage=("/scratch",))).verdict == "warn") == is_fault


def test_a_path_that_is_missing_stands_for_the_directory_above(root: Root) -> None:
    """A run directory is made later."""
    assert check_storage(root.context(run_dir="/no/such/run", storage=("/etc/passwd/x",))).verdict == "ok"


def test_what_the_ranks_may_do_without_is_waited_for_a_moment_and_blames_no_host(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of several hosts wait for this check, and may never touch HOME. Without ranks it is waited for."""
    answer, homes = threading.Event(), {"HOME": "/home/dead"}

    def ask(path: str, *, lists: bool) -> int:
        if path.endswith("/home/dead"):
            answer.wait(60)
        return int(not lists)

    monkeypatch.setattr(storage, "_error_of", ask)
    monkeypatch.setattr(storage, "PATIENCE_S", 3600.0)
    monkeypatch.setattr(storage, "_NEEDLESS_S", 1.0)
    try:
        result = check_storage(root.context(homes, storage=("/scratch",)))
        assert (result.verdict, result.class_name) == ("warn", "")
        assert result.message == "/home/dead does not answer within 1 s"
        assert found_faults(findings_of([result._replace(name="storage")]), 1) == ()
        monkeypatch.setattr(storage, "PATIENCE_S", 0.1)
        assert check_storage(root.context(homes, is_of_host=True)).class_name == "file_system_error"
    finally:
        answer.set()


def test_a_bucket_that_looks_like_a_directory_is_not_listed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its first name all of it may be listed, which takes minutes."""
    listed: dict[str, bool] = {}

    def ask(path: str, *, lists: bool) -> int:
        listed[path.removeprefix(str(root.path))] = lists
        return 0

    monkeypatch.setattr(storage, "_error_of", ask)
    mounts = "22 1 0:40 / /bucket rw - fuse.gcsfuse data rw\n23 1 0:41 / /scratch rw - lustre mds:/ rw\n"
    root.write("proc/self/mountinfo", mounts)
    assert check_storage(root.context(storage=("/bucket/images", "/scratch/me"))).verdict == "ok"
    assert (listed["/bucket/images"], listed["/scratch/me"]) == (False, True)


@pytest.mark.parametrize("path", ["/scratch/\0", "/scratch/\udcff", "/" + "x" * 5000, "/a" * 3000])
def test_a_path_that_can_be_none_is_no_fault_of_the_host(root: Root, path: str) -> None:
    """Settings and variables may hold anything."""
    assert check_storage(root.context({"TMPDIR": path}, storage=(path,))).verdict == "ok"


def test_a_current_directory_that_has_been_removed_costs_only_itself(
    root: Root, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = check_storage(root.context({"HOME": "/", "TMPDIR": "relative"}, storage=("/etc",)))
    assert (result.verdict, [path for path, _ in result.facts]) == ("ok", ["/etc", "/"])


# ----------------------------------------------------------------------------------------------------------- kernel log


@pytest.mark.parametrize(
    ("line", "class_name"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "gpu_hardware_error"),
        ("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: b2", "machine_fault"),
        ("EXT4-fs (sda1): Remounting filesystem read-only", "file_system_error"),
        ("mlx5_core 0000:12:00.0 hsn0: Link down", ""),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, Ch 00000010", ""),
        ("usb 1-1: new high-speed USB device", ""),
    ],
)
def test_what_the_kernel_has_logged_since_the_earlier_look_is_judged(root: Root, line: str, class_name: str) -> None:
    now_us = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
    root.write("dev/kmsg", f"3,1,{now_us:.0f},-;{line}\n")
    result = check_kernel_log(root.context(since=time.time() - 300))
    assert (result.class_name, result.verdict) == (class_name, "warn" if class_name else "ok")
    # What was there before the first look may have been repaired.
    first = check_kernel_log(root.context())
    assert (first.verdict, first.message) == ("ok", "there is no earlier check to compare the kernel log with")


def test_a_kernel_that_reports_without_end_takes_no_more_than_its_time(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks wait for the checks; what is newest counts."""
    judged: list[str] = []
    clock = iter(range(1000))

    def judge_line(line: str) -> str:
        judged.append(line)
        return ""

    log = KernelLog(tuple(f"line {number}" for number in range(40)), "a test")
    monkeypatch.setattr(kernel_log, "read_kernel_log", lambda *_, **__: log)
    monkeypatch.setattr(host_fault, "kernel_fault", judge_line)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) * 0.1)
    assert check_kernel_log(root.context(since=time.time() - 300)).verdict == "ok"
    assert judged[0] == "line 39"
    assert 0 < len(judged) < 12


def test_a_console_in_the_place_of_the_kernel_log_is_not_read() -> None:
    """In some containers /dev/kmsg is a link to it: what somebody types there is theirs."""
    ours, theirs = os.openpty()
    os.write(ours, b"typed\n")
    with pytest.raises(OSError, match="it is a terminal"):
        kernel_log._read_kmsg(os.ttyname(theirs), 0.0, time.monotonic() + 60)
    assert os.read(theirs, 100) == b"typed\n"
    os.close(ours)
    os.close(theirs)


# ------------------------------------------------------------------------------------------------------------- together


def test_which_checks_there_are_follows_from_what_is_wanted(root: Root) -> None:
    """Nothing is computed unless it is asked for."""
    names = {check.name for check in CHECKS}
    of_health = {"kernel_log", "nic_errors", "storage"}
    assert {check.name for check in checks_for(root.context())} == names
    assert {check.name for check in checks_for(root.context(health="off"))} == names - of_health
    assert {check.name for check in checks_for(root.context(health="full"))} == names | {"compute"}
    of_host = {check.name for check in checks_for(root.context(is_of_host=True))}
    assert of_host == {check.name for check in OF_HEALTH}
    assert of_health < of_host
    assert not {"ports", "names", "master", "versions"} & of_host


@pytest.mark.parametrize(
    ("changes", "is_short"),
    [
        ({"together": True}, True),
        ({}, False),
        ({"together": True, "attempt": 1}, False),
        ({"together": True, "only": True}, False),
        ({"together": True, "health": "full"}, False),
        ({"is_of_host": True}, False),
    ],
)
def test_ranks_do_not_wait_for_a_driver_that_is_slow(root: Root, changes: dict[str, Any], is_short: bool) -> None:
    """Without persistence mode it takes a second or two for each GPU, and what is found is a warning at most."""
    (limit_s,) = [check.deadline_s for check in checks_for(root.context(**changes)) if check.name == "gpus"]
    assert (limit_s < 7) == is_short


def test_the_hosts_that_checks_have_found_bad_are_known_by_number() -> None:
    infos = {number: HostInfo(label=f"node{number + 1}") for number in range(3)}
    results = (
        CheckResult("storage", "warn", "/scratch does not answer", class_name="file_system_error", host="node3"),
        CheckResult("clock", "ok", "all is well", host="node2"),
        CheckResult("links", "warn", "the hosts do not reach each other", class_name="network_between_hosts"),
    )
    (fault,) = bad_hosts(Preflight(results), infos)
    assert (fault.host, fault.label, fault.kind) == (2, "node3", "file_system")
