"""The kernel log: which lines matter, what they mean, and how records of either form are read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from saferun.captures import kernel_log
from saferun.captures.kernel_lines import explain, kind_of, relevant, shown, tidy
from saferun.captures.kernel_log import (
    KernelLog,
    capture_kernel_log,
    mark_start,
    parse_record,
    parse_syslog,
    read_kernel_lines,
    read_kernel_log,
)
from saferun.diagnosis.gpu_errors import XIDS

XID_79 = "NVRM: Xid (PCI:0000:65:00): 79, pid=4711, name=python, GPU has fallen off the bus."
OOM = (
    "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:65000kB, file-rss:0kB, "
    "shmem-rss:0kB, UID:0 pgtables:200kB oom_score_adj:0"
)

# ------------------------------------------------------------------------------------------------------- what matters


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("xid", XID_79),
        ("xid", "NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000"),
        ("xid", "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus."),
        ("xid", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"),
        ("xid", "NVRM: API mismatch: the client has the version 580.95, but this kernel module has 575.51"),
        ("amdgpu", "amdgpu 0000:28:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=57638, emitted seq=57641"),
        ("amdgpu", "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=1, emitted seq=2"),
        ("amdgpu", "amdgpu 0000:2b:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:153 vmid:0 pasid:0, for process"),
        ("amdgpu", "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"),
        ("amdgpu", "amdgpu 0000:c3:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block"),
        ("oom", OOM),
        ("oom", "Out of memory: Killed process 12 (python) total-vm:1kB, anon-rss:1kB"),
        ("oom_detail", "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"),
        ("oom_detail", "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python"),
        ("oom_detail", "memory: usage 65536kB, limit 65536kB, failcnt 12"),
        ("limits", "cgroup: fork rejected by pids controller in /user.slice/session-1.scope"),
        ("crash", "python[123]: segfault at 301 ip 00007fc1 sp 00007ffc error 4 in libtorch_cpu.so[67ba0ae,7fc1+145e]"),
        ("crash", "traps: python[123] general protection fault ip:7f12 sp:7ffe error:0 in libc.so.6[28000+195000]"),
        ("crash", "traps: python[123] trap invalid opcode ip:7f12 sp:7ffe error:0 in libfoo.so[1000+2000]"),
        ("lockup", "INFO: task python:4711 blocked for more than 120 seconds."),
        ("lockup", "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:123]"),
        ("lockup", "rcu: INFO: rcu_preempt self-detected stall on CPU"),
        ("kernel_bug", "BUG: unable to handle page fault for address: ffff9a"),
        ("hardware", "mce: [Hardware Error]: Machine check events logged"),
        ("hardware", "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0"),
        ("hardware", "Memory failure: 0x1234: Sending SIGBUS to python:4711 due to hardware memory corruption"),
        ("network", "mlx5_core 0000:17:00.0 eth2: Link down"),
        ("network", "bond0: (slave ens3): link status definitely down, disabling slave"),
        ("network", "nf_conntrack: nf_conntrack: table full, dropping packet"),
        ("file_system", "nfs: server filer1 not responding, still trying"),
        ("file_system", "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python: reading directory"),
        ("file_system", "XFS (nvme0n1p1): metadata I/O error in xfs_buf_ioend"),
        ("file_system", "I/O error, dev nvme0n1, sector 12345 op 0x0:(READ)"),
    ],
)
def test_a_line_that_tells_of_a_fault_is_found(kind: str, line: str) -> None:
    assert kind_of(line) == kind


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Linux version 6.18.0 (builder@host)",
        "Kernel command line: quiet reboot=k panic=1 rcupdate.rcu_cpu_stall_cputime=1 hung_task_panic=1",
        "amdgpu 0000:c3:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:c3:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:33:00.0: amdgpu: RAS: optional ras ta ucode is not available",
        "[drm:amdgpu_job_timedout] ring gfx timeout, but soft recovered",
        "eth0: Link is Up - 1Gbps/Full - flow control off",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "nvidia: module license 'NVIDIA' taints kernel.",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0",
        "Code: ed 74 0e f0 48 83 45 08 01 48 89 ef e8 fb 70",
    ],
)
def test_what_is_everyday_life_is_left_out(line: str) -> None:
    """A console full of harmless lines hides the one that counts."""
    assert not kind_of(line)


def test_an_xid_is_explained_behind_the_kernels_own_words() -> None:
    """The line itself stays whole, so that it can be searched for and be recognised."""
    line = explain(XID_79)
    assert line.startswith(XID_79)
    assert "[Xid 79: the GPU has fallen off the PCIe bus; reboot the host" in line


def test_an_unknown_xid_and_any_other_line_stay_as_they_are() -> None:
    for line in ("NVRM: Xid (PCI:0000:65:00): 9999, what", "NVRM: Xid (PCI:0000:65:00): 12345678901, x", OOM):
        assert explain(line) == line


def test_the_numbers_that_jobs_die_of_are_all_explained() -> None:
    important = {13, 31, 32, 43, 45, 48, 61, 62, 63, 64, 68, 69, 74, 79, 92, 94, 95, 119, 120, 121, 137, 140, 154}
    assert important <= set(XIDS)
    for xid in XIDS.values():
        assert xid.meaning
        assert xid.advice
        assert not any("\n" in text or text.endswith(".") for text in xid)


def test_details_of_an_oom_kill_are_kept_but_not_shown() -> None:
    lines = ["python invoked oom-killer: gfp_mask=0xcc0, order=0", "memory: usage 65536kB, limit 65536kB", OOM]
    assert relevant(lines) == lines
    assert shown(lines) == (OOM,)


def test_a_flood_is_cut_and_counted() -> None:
    faults = [f"amdgpu 0000:2b:00.0: amdgpu: [gfxhub] page fault at {number}" for number in range(1000)]
    lines = shown([XID_79, *faults, OOM])
    assert lines[0] == explain(XID_79)
    assert OOM in lines
    assert lines[-1] == "996 more kernel lines like these (amdgpu)"
    assert len(lines) == 1 + 4 + 1 + 1


def test_each_xid_number_has_a_flood_of_its_own() -> None:
    """A hundred Xid 31 may not hide the Xid 79 behind them."""
    lines = [f"NVRM: Xid (PCI:0000:65:00): 31, pid={number}, MMU fault" for number in range(100)]
    result = shown([*lines, XID_79])
    assert explain(XID_79) in result
    assert result[-1] == "96 more kernel lines like these (Xid 31)"


def test_what_a_line_quotes_cannot_reach_the_terminal() -> None:
    """A process may call itself what it likes, and the kernel prints that name."""
    hostile = "Out of memory: Killed process 1 (\x1b]0;owned\x07\u202e) " + "x" * 9000
    (line,) = relevant([hostile])
    assert line.isprintable()
    assert len(line) == 500
    assert tidy("a\tb\nc") == "a b?c"


# ---------------------------------------------------------------------------------------------------- how it is written


def test_a_record_is_read() -> None:
    assert parse_record(b"6,339,12398900295,-;python3[1]: segfault\n SUBSYSTEM=pci\n DEVICE=+pci\n", 0) == [
        "python3[1]: segfault"
    ]


def test_a_record_of_several_lines_gives_them_all() -> None:
    assert parse_record(rb"3,1,5000000,-;one\x0atwo\x09x \x5c", 0) == ["one", "two\tx \\"]


def test_a_record_older_than_asked_for_is_dropped() -> None:
    assert parse_record(b"6,1,4999999,-;old", 5.0) == []
    assert parse_record(b"6,1,5000000,-;new", 5.0) == ["new"]


def test_what_a_program_wrote_is_not_the_kernels_word() -> None:
    """Whoever may write to /dev/kmsg could otherwise blame a GPU."""
    assert parse_record(b"14,1,5000000,-;NVRM: Xid (PCI:0000:65:00): 79, pid=1", 0) == []
    assert parse_syslog(b"<14>[    5.000000] NVRM: Xid (PCI:0000:65:00): 79\n", 0) == []


@pytest.mark.parametrize("record", [b"", b"\n", b"6", b"6,1", b"6,1,x,-;text", b"6,1,5,-", b"\xff\xfe,;;;", b";text"])
def test_what_is_no_record_is_dropped(record: bytes) -> None:
    assert parse_record(record, 0) == []


def test_bytes_that_are_no_text_do_no_harm() -> None:
    assert parse_record(b"6,1,5000000,-;ab\xff\xfecd\n", 0) == ["ab\ufffd\ufffdcd"]
    assert parse_syslog(b"<6>[    5.000000] ab\xffcd\n", 0) == ["ab\ufffdcd"]


def test_the_lines_of_the_syslog_call_are_read() -> None:
    content = (
        b"<6>[    4.999999] old\n<6>[    5.000000] first\n<4>[   12.345678][  T123] with its thread\n"
        b"<6>without a time\nrest of a cut line\n"
    )
    assert parse_syslog(content, 5.0) == ["first", "with its thread"]


# ----------------------------------------------------------------------------------------------------- where it is read


@pytest.fixture(autouse=True)
def booted_hours_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is older than its machine, and this one may have been started a minute ago."""
    real, real_monotonic = time.clock_gettime, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_monotonic() + 30_000.0)
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: time.monotonic() if clock == time.CLOCK_MONOTONIC else real(clock)
    )


def records(path: Path, *lines: str, age_s: float = 0.0) -> str:
    """A file in the place of /dev/kmsg: unlike the device it gives all its records in one piece."""
    stamp = int((time.clock_gettime(time.CLOCK_MONOTONIC) - age_s) * 1e6)
    path.write_text("".join(f"6,{number},{stamp},-;{line}\n" for number, line in enumerate(lines)))
    return str(path)


def soon() -> float:
    return time.monotonic() + 60


def test_the_time_of_a_line_is_that_of_the_calendar(tmp_path: Path) -> None:
    """The device counts from the boot, whoever asks counts from the epoch."""
    now = time.time()
    kmsg = records(tmp_path / "kmsg", OOM, age_s=1000)
    assert read_kernel_log(now - 2000, soon(), kmsg=kmsg) == KernelLog((OOM,), kmsg)
    # The two clocks drift apart with the time since boot: only what is clearly older is dropped.
    drift_s = kernel_log._DRIFT * time.clock_gettime(time.CLOCK_MONOTONIC)
    assert read_kernel_log(now - 990 + drift_s, soon(), kmsg=kmsg).lines == ()


def test_where_nothing_may_be_read_the_setting_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(*_: object) -> list[str]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel_log, "_read_syslog", denied)
    monkeypatch.setattr(kernel_log, "_read_journal", denied)
    setting = tmp_path / "dmesg_restrict"
    real_open = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *args, **named: real_open(
            setting if path == "/proc/sys/kernel/dmesg_restrict" else path, *args, **named
        ),
    )
    setting.write_text("1\n")
    restricted = read_kernel_log(0, soon(), kmsg=str(tmp_path / "none"))
    assert restricted.failure == "the kernel log cannot be read: kernel.dmesg_restrict=1, and no CAP_SYSLOG"
    setting.write_text("0\n")
    failure = read_kernel_log(0, soon(), kmsg=str(tmp_path / "none")).failure
    assert "none: No such file or directory" in failure
    assert "journalctl -k: Operation not permitted" in failure


def test_the_next_way_is_taken_where_one_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_log, "_read_syslog", lambda _oldest_s: [OOM])
    assert read_kernel_log(0, soon(), kmsg=str(tmp_path / "none")) == KernelLog((OOM,), "syslog(2)")


JOURNAL = """#!/bin/sh
for option; do
  case $option in
    --since=*) printf '%s' "$SINCE"; exit "$CODE" ;;
    --lines=1) printf '%s' "$ANY" ;;
  esac
done
"""


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A journalctl that says what the environment says."""
    program = tmp_path / "journalctl"
    program.write_text(JOURNAL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"SINCE": "", "ANY": "", "CODE": "0"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_journal_is_read(journal: pytest.MonkeyPatch) -> None:
    journal.setenv("SINCE", f"{OOM}\n{XID_79}\n")
    assert kernel_log._read_journal(0, soon()) == [OOM, XID_79]


def test_a_quiet_journal_is_an_answer_only_where_it_holds_anything(journal: pytest.MonkeyPatch) -> None:
    """A user who may not see the kernel's lines gets an empty answer and no error."""
    journal.setenv("ANY", "Linux version 6.18\n")
    assert kernel_log._read_journal(0, soon()) == []
    journal.setenv("ANY", "")
    with pytest.raises(OSError, match="no kernel lines that this user may see"):
        kernel_log._read_journal(0, soon())


def test_a_journal_that_cannot_be_asked_is_a_failure(journal: pytest.MonkeyPatch) -> None:
    journal.setenv("CODE", "1")
    with pytest.raises(OSError, match="exit code 1"):
        kernel_log._read_journal(0, soon())
    journal.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError):
        kernel_log._read_journal(0, soon())


def test_the_capture_shows_what_matters_and_keeps_the_details(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("Linux version 6", "memory: usage 65536kB, limit 65536kB, failcnt 12", OOM, XID_79)
    monkeypatch.setattr(kernel_log, "read_kernel_log", lambda _since, _deadline: KernelLog(lines, "/dev/kmsg"))
    capture = capture_kernel_log(0, soon())
    assert capture.lines == (OOM, explain(XID_79))
    assert capture.content == {"source": "/dev/kmsg", "lines": list(lines[1:])}
    assert not capture.failure
    assert read_kernel_lines(0) == list(lines[1:])


def test_a_long_log_is_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines tell the cause, the last what became of it."""
    lines = tuple(f"NVRM: Xid (PCI:0000:65:00): 31, pid={number}" for number in range(10_000))
    monkeypatch.setattr(kernel_log, "read_kernel_log", lambda _since, _deadline: KernelLog(lines, "/dev/kmsg"))
    kept = capture_kernel_log(0, soon()).content["lines"]
    assert (len(kept), kept[0], kept[-1]) == (500, lines[0], lines[-1])


def test_a_log_that_cannot_be_read_is_a_failure_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "read_kernel_log", lambda _since, _deadline: KernelLog((), "", "denied"))
    capture = capture_kernel_log(0, soon())
    assert (capture.lines, capture.failure) == ((), "denied")


def test_this_hosts_log_gives_lines_or_a_reason() -> None:
    log = read_kernel_log(0, soon())
    assert bool(log.source) != bool(log.failure)


def stamped(number: int, line: str, *, age_s: float) -> bytes:
    """A record of /dev/kmsg."""
    return f"6,{number},{(time.clock_gettime(time.CLOCK_MONOTONIC) - age_s) * 1e6:.0f},-;{line}\n".encode()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The records of a device, which /dev/null stands for."""
    found: list[bytes] = []
    monkeypatch.setattr(kernel_log, "_records", lambda _path, _deadline: iter(found))
    monkeypatch.setattr(kernel_log, "_MARK", [])
    return found


def test_an_error_of_the_attempt_before_is_not_counted_again(device: list[bytes]) -> None:
    """After months the clock of the stamps is minutes off: an old record looks new, and a new one old."""
    device.append(stamped(7, XID_79, age_s=-60))
    mark_start(time.monotonic(), "/dev/null")
    assert read_kernel_log(time.time(), soon(), kmsg="/dev/null").lines == ()
    device.append(stamped(8, OOM, age_s=600))
    assert read_kernel_log(time.time(), soon(), kmsg="/dev/null").lines == (OOM,)


def test_who_asks_for_what_is_newer_than_the_start_gets_no_more(device: list[bytes]) -> None:
    """Stacks that are asked for later."""
    device += [stamped(7, XID_79, age_s=9e6), stamped(8, OOM, age_s=3600), stamped(9, XID_79, age_s=0)]
    kernel_log._MARK.append((7, time.monotonic() - 7200))
    assert read_kernel_log(time.time() - 10, soon(), kmsg="/dev/null").lines == (XID_79,)
    assert read_kernel_log(time.time() - 7200, soon(), kmsg="/dev/null").lines == (OOM, XID_79)


@pytest.mark.parametrize("late_s", [1.0, 3.0])
def test_a_mark_that_comes_late_leaves_nothing_out(device: list[bytes], late_s: float) -> None:
    """The examiner may have waited for a file system: what came meanwhile may be the cause. So is a mark of before."""
    device.append(stamped(7, XID_79, age_s=1))
    kernel_log._MARK.append((7, time.monotonic()))
    mark_start(time.monotonic() - late_s, "/dev/null")
    assert read_kernel_log(time.time() - 60, soon(), kmsg="/dev/null").lines == (XID_79,)


@pytest.mark.parametrize("content", ["", "6,7,5000000,-;a file\n"])
def test_only_a_device_is_read_for_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    """What a container has in its place could be a pipe, or a link to a file system that does not answer."""
    monkeypatch.setattr(kernel_log, "_MARK", [])
    (tmp_path / "kmsg").write_text(content)
    mark_start(time.monotonic(), str(tmp_path / "kmsg"))
    (tmp_path / "link").symlink_to("/dev/null")
    mark_start(time.monotonic(), str(tmp_path / "link"))
    assert kernel_log._MARK == []


def test_a_device_without_records_has_no_mark(device: list[bytes]) -> None:
    mark_start(time.monotonic(), "/dev/null")
    device.append(b"no record")
    mark_start(time.monotonic(), "/dev/null")
    assert kernel_log._MARK == []
