"""The checks of a host's health: storage, the kernel's log; the record of the previous run."""

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
from saferun.preflight import health_record
from saferun.preflight.checks import storage
from saferun.preflight.checks.all_checks import CHECKS, OF_HEALTH, checks_for
from saferun.preflight.checks.recent_kernel import check_kernel_log
from saferun.preflight.checks.storage import check_storage, read_only_file_systems
from saferun.preflight.outcome import bad_hosts, findings_of
from saferun.preflight.results import UNUSABLE, CheckResult, HostInfo, Preflight
from tests.unit.preflight.host_roots import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


# --------------------------------------------------------------------------------------------------------------- record


def test_counters_are_kept_for_the_next_run(tmp_path: Path) -> None:
    path = str(tmp_path / "saferun" / "health.json")
    assert health_record.read_health_record(path) == ((), 0.0)
    assert health_record.write_health_record((("hsn0 losses", "3"),), path) == ""
    counts, at = health_record.read_health_record(path)
    assert counts == (("hsn0 losses", "3"),)
    assert abs(at - time.time()) < 60
    assert os.listdir(tmp_path / "saferun") == ["health.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"time": "x", "counts": []}', '{"time": 1, "counts": [[1, 2]]}'])
def test_a_record_that_is_none_costs_the_comparison(tmp_path: Path, content: str) -> None:
    path = tmp_path / "health.json"
    path.write_text(content)
    assert health_record.read_health_record(str(path)) == ((), 0.0)


def test_a_record_that_others_could_have_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    assert health_record.write_health_record((("hsn0 losses", "3"),), str(path)) == ""
    path.chmod(0o666)
    assert health_record.read_health_record(str(path)) == ((), 0.0)
    assert health_record.write_health_record((), "/proc/no/such/file").startswith("/proc/no/such/file: ")


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
    root.write("data/me/notes")
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
    root.write("etc/passwd")
    environ = {"TMPDIR": "/etc/passwd/x"}
    for is_of_host in (False, True):
        assert check_storage(root.context(environ, run_dir="/no/such/run", is_of_host=is_of_host)).verdict == "ok"


@pytest.mark.parametrize("path", ["/no/scratch", "/etc/passwd/x", "/scratch/\udcff"])
def test_a_path_that_the_user_has_named_has_to_exist(root: Root, path: str) -> None:
    """On one host of several it is that host's fault: a file system is not mounted. On all it is a wrong path."""
    root.write("etc/passwd")
    root.write("home/me")
    result = check_storage(root.context(run_dir="/no/such/run", storage=(path, "/home")))._replace(name="storage")
    assert (result.verdict, result.class_name) == ("warn", "file_system_error")
    assert result.message == f"{path} does not exist"
    assert result.hint == "see whether its file system is mounted on this host, and whether the path is right"
    assert [fact for fact in result.facts if fact[0] == UNUSABLE] == [(UNUSABLE, path)]
    (finding,) = findings_of([result])
    assert [fault.kind for fault in found_faults([finding._replace(label="node1")], 4)] == ["file_system"]
    assert found_faults([finding._replace(label=label) for label in "abc"], 4) == ()


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


@pytest.mark.parametrize("path", ["/scratch/\0", "/" + "x" * 5000, "/a" * 3000])
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
    root.write("etc/passwd")
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
        ({"spans_hosts": True}, True),
        ({}, False),
        ({"spans_hosts": True, "attempt": 1}, False),
        ({"spans_hosts": True, "only": True}, False),
        ({"spans_hosts": True, "health": "full"}, False),
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
