"""Memory, shared memory, disks, processors, clock: what is worth a word and what is not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from saferun.env.profiles.version_ranges import numbers_of
from saferun.preflight.checks.clock import check_clock
from saferun.preflight.checks.common import list_of_numbers
from saferun.preflight.checks.cpus import check_cpus
from saferun.preflight.checks.disk import check_disk
from saferun.preflight.checks.memory import check_memory
from saferun.preflight.checks.shared_memory import check_shared_memory
from saferun.text.wording import size_text
from tests.unit.found_samples import small_shm
from tests.unit.preflight.host_roots import Root

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def _file_system(
    monkeypatch: pytest.MonkeyPatch, size: int, free: int, *, files: int = 1000, free_files: int = 900, flag: int = 0
) -> None:
    """Every file system has this size."""
    state = SimpleNamespace(
        f_blocks=size // 4096, f_bavail=free // 4096, f_frsize=4096, f_files=files, f_favail=free_files, f_flag=flag
    )
    monkeypatch.setattr(os, "statvfs", lambda path: state if path else None)


# -------------------------------------------------------------------------------------------------------- shared memory


@pytest.fixture
def shm(root: Root) -> Path:
    root.write("proc/self/mountinfo", "25 24 0:23 / /dev/shm rw,relatime - tmpfs shm rw,size=65536k\n")
    path = root.path / "dev/shm"
    path.mkdir(parents=True)
    return path


def test_a_host_s_shared_memory_is_in_order(root: Root, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.is_dir()
    _file_system(monkeypatch, 64 * GIB, 63 * GIB)
    result = check_shared_memory(root.context(nproc=8, vendor="nvidia"))
    assert (result.verdict, result.message) == ("ok", "/dev/shm has 64 GiB, 63 GiB of it free")
    assert dict(result.facts)["mount"] == "tmpfs"


def test_docker_s_default_is_enough_for_processors_and_too_little_for_gpus(
    root: Root, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB: a container on a laptop is healthy with it, NCCL and data loaders of eight ranks are not."""
    assert shm.is_dir()
    _file_system(monkeypatch, 64 * MIB, 64 * MIB)
    assert check_shared_memory(root.context(nproc=8)).verdict == "ok"
    assert check_shared_memory(root.context(nproc=1, vendor="nvidia")).verdict == "ok"
    result = check_shared_memory(root.context(nproc=8, vendor="nvidia"))
    assert (result.verdict, result.class_name) == ("warn", "shared_memory_exhausted")
    sample = small_shm("")  # what the examples of the documents are made of
    assert (result.message, result.hint) == (sample.message, sample.hint)


def test_full_shared_memory_is_told_with_the_largest_file(
    root: Root, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of jobs that were killed stay until the host is booted."""
    (shm / "small").write_bytes(b"x")
    (shm / "nccl-Xa81bQ").write_bytes(b"x" * 100_000)
    _file_system(monkeypatch, 8 * GIB, 2 * MIB)
    result = check_shared_memory(root.context())
    assert (result.verdict, result.message) == ("warn", "/dev/shm is full: 2 MiB of 8 GiB free")
    assert "nccl-Xa81bQ" in result.hint


def test_shared_memory_that_is_mounted_read_only_is_told_so(
    root: Root, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode may be right."""
    assert shm.is_dir()
    _file_system(monkeypatch, 8 * GIB, 8 * GIB, flag=os.ST_RDONLY)
    result = check_shared_memory(root.context())
    assert (result.verdict, result.message) == ("warn", "/dev/shm is mounted read-only")
    assert "read-write" in result.hint


def test_shared_memory_without_inodes_is_full(root: Root, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.is_dir()
    _file_system(monkeypatch, 8 * GIB, 8 * GIB, free_files=0)
    assert check_shared_memory(root.context()).message.startswith("/dev/shm takes no more files")


def test_a_host_without_shared_memory_is_told(root: Root) -> None:
    result = check_shared_memory(root.context())
    assert result.verdict == "warn"
    assert "no /dev/shm" in result.message


def test_a_directory_in_place_of_a_mount_is_no_fault(root: Root, shm: Path) -> None:
    """In a chroot: it works, on a disk."""
    assert shm.is_dir()
    root.write("proc/self/mountinfo", "27 1 254:0 / / rw - ext4 /dev/vda rw\n")
    result = check_shared_memory(root.context())
    assert result.verdict == "ok"
    assert "no file system of its own" in result.message


# ---------------------------------------------------------------------------------------------------------------- disk


def test_a_full_disk_is_told_once_for_each_file_system(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.path / "tmp").mkdir()
    _file_system(monkeypatch, 100 * GIB, 3 * MIB)
    result = check_disk(root.context(run_dir="/home/me/runs/x"))
    assert (result.verdict, result.class_name) == ("warn", "disk_full")
    assert result.message == "/home/me/runs/x (run directory) has 3 MiB free"


def test_a_disk_without_inodes_is_full(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.path / "tmp").mkdir()
    _file_system(monkeypatch, 100 * GIB, 50 * GIB, free_files=3)
    assert "no free inodes" in check_disk(root.context()).message


def test_a_file_system_without_a_number_of_inodes_is_not_judged_by_it(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Btrfs says 0 of 0."""
    _file_system(monkeypatch, 100 * GIB, 50 * GIB, files=0, free_files=0)
    assert check_disk(root.context(run_dir="/x")).verdict == "ok"


def test_a_tmpdir_that_is_not_there_is_what_python_passes_over(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers pass on the TMPDIR of the host where the job was submitted."""
    (root.path / "tmp").mkdir()
    _file_system(monkeypatch, 100 * GIB, 50 * GIB)
    result = check_disk(root.context({"TMPDIR": "/scratch/job7"}))
    assert result.verdict == "ok"
    assert ("TMPDIR", "no such directory") in result.facts


# --------------------------------------------------------------------------------------------------------------- memory


def _meminfo(root: Root, available: int, swap: int = 0) -> None:
    root.write("proc/meminfo", f"MemTotal: 1000 kB\nMemAvailable: {available >> 10} kB\nSwapFree: {swap >> 10} kB\n")


def test_memory_for_the_ranks_to_import_torch_is_asked_for_and_no_more(root: Root) -> None:
    """What they load then nobody knows beforehand."""
    _meminfo(root, 2 * GIB)
    context = root.context(nproc=8, python="/usr/bin/python3")
    assert check_memory(context).verdict == "ok"
    _meminfo(root, 1 * GIB)
    result = check_memory(context)
    assert (result.verdict, result.class_name) == ("warn", "host_out_of_memory")
    assert result.message == "the host has 1 GiB of memory, and 8 ranks that import torch need 1.8 GiB"
    assert check_memory(context._replace(python="")).verdict == "ok", "ranks that are no Python may be small"
    _meminfo(root, 1 * GIB, swap=4 * GIB)
    assert check_memory(context).verdict == "ok", "swap keeps a job alive"


def test_the_control_group_s_limit_is_what_counts_in_a_container(root: Root) -> None:
    _meminfo(root, 100 * GIB)
    root.cgroup(memory_max=str(4 * GIB), memory_current=str(4 * GIB - 100 * MIB), memory_stat="anon 1\ninactive_file 0")
    result = check_memory(root.context(nproc=4, python="python3"))
    assert result.verdict == "warn"
    assert result.message.startswith("the control group's limit leaves 100 MiB")
    assert "--mem" in result.hint


def test_the_page_cache_counts_as_free(root: Root) -> None:
    """A container that has read a data set is full of it, and healthy."""
    _meminfo(root, 100 * GIB)
    cache = f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\nslab_reclaimable {MIB}"
    root.cgroup(memory_max=str(4 * GIB), memory_current=str(4 * GIB), memory_stat=cache)
    result = check_memory(root.context(nproc=4, python="python3"))
    assert result.verdict == "ok"
    assert dict(result.facts)["cgroup_room"] == str(3 * GIB + MIB)


def test_the_narrowest_control_group_on_the_way_up_counts(root: Root) -> None:
    _meminfo(root, 100 * GIB)
    root.cgroup("/slurm/job7", memory_max="max", memory_current="5", memory_stat="anon 5")
    root.write("sys/fs/cgroup/slurm/memory.max", str(GIB))
    root.write("sys/fs/cgroup/slurm/memory.current", str(GIB // 2))
    assert dict(check_memory(root.context()).facts)["cgroup_room"] == str(GIB // 2)


def test_version_1_of_control_groups_is_read_too(root: Root) -> None:
    root.write("proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/job\n")
    mounts = "".join(
        f"3{number} 31 0:3{number} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
        for number, name in enumerate(("memory", "cpu", "pids"))
    )
    root.write("proc/self/mountinfo", mounts)
    for name, content in {
        "memory/job/memory.limit_in_bytes": str(GIB),
        "memory/job/memory.usage_in_bytes": str(GIB),
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {300 * MIB}",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu/job/cpu.cfs_quota_us": "150000\n",
        "cpu/job/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
    }.items():
        root.write(f"sys/fs/cgroup/{name}", content)
    root.status()
    root.online("0-63")
    assert dict(check_memory(root.context()).facts)["cgroup_room"] == str(300 * MIB)
    assert dict(check_cpus(root.context()).facts)["quota"] == "1.5"


# ----------------------------------------------------------------------------------------------------------- processors


def test_a_forgotten_option_of_the_scheduler_is_told(root: Root) -> None:
    """Under srun without --cpus-per-task all ranks share one processor."""
    root.online("0-63")
    root.status(cpus="5")
    result = check_cpus(root.context({"SLURM_JOB_ID": "7"}, nproc=8))
    assert result.verdict == "warn"
    assert result.message == "8 ranks may use 1 processor of this host's 64"
    assert "--cpus-per-task=8" in result.hint
    assert check_cpus(root.context(nproc=8, vendor="nvidia")).verdict == "warn"


def test_a_small_machine_is_healthy_with_many_ranks(root: Root) -> None:
    """More ranks than processors is somebody's decision."""
    root.online("0-1")
    root.status(cpus="0-1")
    assert check_cpus(root.context({"SLURM_JOB_ID": "7"}, nproc=8, vendor="nvidia")).verdict == "ok"


def test_a_small_container_on_a_large_host_is_healthy(root: Root) -> None:
    root.online("0-63")
    root.status(cpus="3,7")
    root.cgroup(cpu_max="200000 100000")
    assert check_cpus(root.context(nproc=4)).verdict == "ok"


def test_a_quota_below_the_number_of_gpu_ranks_is_told(root: Root) -> None:
    """A rank that cannot launch its kernels in time holds up all others."""
    root.online("0-63")
    root.status()
    root.cgroup(cpu_max="200000 100000")
    result = check_cpus(root.context(nproc=8, vendor="nvidia"))
    assert result.verdict == "warn"
    assert "the time of 2 of this host's 64 processors" in result.message


def test_unknown_processors_are_no_fault(root: Root) -> None:
    assert check_cpus(root.context({"SLURM_JOB_ID": "7"}, nproc=8, vendor="nvidia")).verdict == "ok"


# ---------------------------------------------------------------------------------------------------------------- clock


def test_a_clock_that_was_never_set_is_told(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_clock(root.context()).verdict == "ok"
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    result = check_clock(root.context())
    assert (result.verdict, result.message) == ("warn", "the clock says 1970-01-02 00:00:00 UTC, which cannot be")


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (1, "1 byte"), (2, "2 bytes"), (1024, "1 KiB"), (64 * MIB, "64 MiB"), (3 * GIB // 2, "1.5 GiB")],
)
def test_sizes_are_told_as_people_write_them(size: int, words: str) -> None:
    assert size_text(size) == words


def test_lists_of_the_kernel_are_read() -> None:
    assert list_of_numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert list_of_numbers("") == list_of_numbers("x-y,-1,1-\n") - {1} == set()


def test_the_numbers_of_a_version_end_where_its_words_begin() -> None:
    assert numbers_of("2.13.0+cu130") == (2, 13, 0)
    assert numbers_of("2.15.0a0") == (2, 15, 0)
    assert numbers_of("") == numbers_of("unknown") == ()


def test_the_machine_itself_is_in_order() -> None:
    """A check that warns on a healthy machine is a defect."""
    from saferun.preflight.checks.context import CheckContext

    context = CheckContext(nproc=2, environ=dict(os.environ), run_dir="saferun-runs")
    for check in (check_shared_memory, check_disk, check_memory, check_cpus, check_clock):
        result = check(context)
        assert result.verdict == "ok", result
        assert result.facts
