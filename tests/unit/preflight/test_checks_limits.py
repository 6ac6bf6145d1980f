"""Limits that stop a job, or will: read from files of hosts that do not exist."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from saferun.preflight.checks import limits
from saferun.preflight.checks.limits import check_cores, check_locked_memory, check_open_files, check_processes
from tests.unit.found_samples import OPEN_FILES
from tests.unit.preflight.host_roots import Root


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of other tests may still be ending; those of this process do not count as used."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


# ----------------------------------------------------------------------------------------------------------- open files


@pytest.mark.parametrize("limit", ["1024 524288", "1024 1024", "1048576 1048576", "unlimited unlimited", "256 4096"])
def test_usual_limits_on_open_files_are_worth_no_word(root: Root, limit: str) -> None:
    """1024 is what every system begins with."""
    root.limits(open_files=limit)
    assert check_open_files(root.context(nproc=8)).verdict == "ok"


def test_the_limit_on_open_files_is_told(root: Root) -> None:
    root.limits(open_files="1048576 1048576")
    assert check_open_files(root.context(nproc=8)).message == OPEN_FILES


def test_a_low_limit_on_open_files_is_told_with_the_way_to_raise_it(root: Root) -> None:
    """Where the hard limit allows it, a word in the shell is enough."""
    root.limits(open_files="200 524288")
    result = check_open_files(root.context(nproc=4))
    assert result.verdict == "warn"
    assert result.message == "a process may open 200 files, and 4 ranks may need more"
    assert "ulimit -n 65536" in result.hint
    root.limits(open_files="200 200")
    assert "docker" in check_open_files(root.context(nproc=4)).hint


def test_a_limit_that_saferun_s_own_files_do_not_fit_into_is_told(root: Root) -> None:
    """It stops nobody: ranks whose streams find no room write to the console themselves."""
    root.limits(open_files="64 64")
    result = check_open_files(root.context(nproc=8))
    assert (result.verdict, result.class_name) == ("warn", "too_many_open_files")


def test_the_first_of_many_hosts_needs_room_for_the_connections_of_all(root: Root) -> None:
    """By the hard limit, to which its coordinator raises its own. Hosts that find no room there would wait in vain."""
    job = root.context(nproc=1, spans_hosts=True, host_count=2000)
    root.limits(open_files="1024 4096")
    result = check_open_files(job)
    assert (result.verdict, result.class_name) == ("warn", "too_many_open_files")
    assert result.message == (
        "a process may open 4096 files, at most, and the leader of 2000 hosts may need 10048 for its stores"
    )
    assert "the leader of" not in check_open_files(job._replace(serves=False)).message
    root.limits(open_files="4096 16384")
    assert check_open_files(job).verdict == "ok"


def test_a_thousand_ranks_need_more_than_the_usual_limit(root: Root) -> None:
    """Gloo connects each pair of ranks."""
    root.limits(open_files="1024 1048576")
    hosts = tuple(f"node{number}" for number in range(128))
    assert check_open_files(root.context(nproc=8, hosts=hosts)).verdict == "warn"


@pytest.mark.parametrize("content", ["", "Max open files", "Max open files  x  y  files\n", "\0\xff"])
def test_limits_that_cannot_be_read_are_no_fault(root: Root, content: str) -> None:
    root.write("proc/self/limits", content)
    context = root.context(nproc=8, spans_hosts=True, vendor="nvidia")
    for check in (check_open_files, check_processes, check_locked_memory, check_cores):
        assert check(context).verdict == "ok"


# ------------------------------------------------------------------------------------------------------------ processes


def _process(root: Root, pid: int, threads: int) -> None:
    fields = ["S", *["0"] * 16, str(threads), "0", "0"]
    root.write(f"proc/{pid}/stat", f"{pid} (py) thon) {' '.join(fields)}\n")


def test_the_user_s_threads_count_against_the_limit_on_processes(root: Root) -> None:
    """The limit is the user's on this host, not the process's."""
    root.limits(processes="4096 4096")
    root.status()
    _process(root, 10, 3000)
    _process(root, 11, 1000)
    result = check_processes(root.context(nproc=8))
    assert result.verdict == "warn"
    assert result.message.startswith("this user may start 96 more processes and threads")
    _process(root, 12, 96)
    assert check_processes(root.context(nproc=8)).verdict == "fail"


def test_threads_of_a_moment_refuse_no_launch(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other checks, and of another job of the user that starts at the same time."""
    root.limits(processes="unlimited unlimited")
    root.cgroup(pids_max="103", pids_current="100")
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        root.cgroup(pids_max="103", pids_current="100" if len(looks) < 2 else "60")

    monkeypatch.setattr(time, "sleep", wait)
    assert check_processes(root.context(nproc=8)).verdict == "warn"
    root.cgroup(pids_max="103", pids_current="100")
    looks.clear()
    monkeypatch.setattr(time, "sleep", looks.append)
    assert check_processes(root.context(nproc=8)).verdict == "fail"
    assert len(looks) == 2


def test_who_may_exceed_the_limit_on_processes_is_not_counted(root: Root) -> None:
    """Root and its like: CAP_SYS_RESOURCE, CAP_SYS_ADMIN."""
    root.limits(processes="100 100")
    _process(root, 10, 3000)
    for capability in (24, 21):
        root.status(capabilities=1 << capability)
        assert check_processes(root.context(nproc=8)).verdict == "ok"


@pytest.mark.parametrize(("uid_map", "verdict"), [("0 0 4294967295", "ok"), ("0 1000 1", "fail"), ("", "fail")])
def test_the_host_s_root_has_no_limit_on_processes(
    root: Root, monkeypatch: pytest.MonkeyPatch, uid_map: str, verdict: str
) -> None:
    """Also without any capability, as in a container of Docker; the root of a user namespace is any user."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    root.limits(processes="100 100")
    root.status()
    root.write("proc/self/uid_map", f"         {uid_map}\n")
    monkeypatch.setattr(limits, "_own_threads", lambda _: 3000)
    assert check_processes(root.context(nproc=8)).verdict == verdict


def test_a_high_limit_on_processes_costs_no_look_at_all_processes(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.limits(processes="127394 127394")
    root.status()
    monkeypatch.setattr(limits, "_own_threads", lambda context: pytest.fail(f"counted in {context.root}"))
    assert check_processes(root.context(nproc=8)).verdict == "ok"


@pytest.mark.parametrize(("maximum", "verdict"), [("max", "ok"), ("1024", "ok"), ("300", "warn"), ("103", "fail")])
def test_the_control_group_s_limit_on_processes_counts(root: Root, maximum: str, verdict: str) -> None:
    """Containers are limited in this way; 1024 is usual in Kubernetes."""
    root.limits(processes="unlimited unlimited")
    root.cgroup(pids_max=maximum, pids_current="100")
    result = check_processes(root.context(nproc=8))
    assert result.verdict == verdict
    assert ("pids.max" in result.hint) == (verdict != "ok")


# -------------------------------------------------------------------------------------------------------- locked memory


def _with_rdma(root: Root) -> None:
    root.limits(locked_memory="8388608 8388608")
    root.status()
    (root.path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)


def test_rdma_between_gpus_needs_locked_memory(root: Root) -> None:
    """ibv_reg_mr fails with "Cannot allocate memory" in the middle of a job."""
    _with_rdma(root)
    result = check_locked_memory(root.context(spans_hosts=True, vendor="nvidia"))
    assert result.verdict == "warn"
    assert result.message == "a process may lock 8 MiB of memory, and RDMA over mlx5_0 needs more"
    assert "memlock=-1" in result.hint


@pytest.mark.parametrize(
    ("changed", "environ"),
    [({"spans_hosts": False}, {}), ({"vendor": "none"}, {}), ({}, {"NCCL_IB_DISABLE": "1"})],
)
def test_without_rdma_traffic_locked_memory_is_worth_no_word(
    root: Root, changed: dict[str, object], environ: dict[str, str]
) -> None:
    """One host, ranks on processors, or RDMA switched off."""
    _with_rdma(root)
    base: dict[str, object] = {"spans_hosts": True, "vendor": "nvidia"}
    assert check_locked_memory(root.context(environ, **{**base, **changed})).verdict == "ok"


def test_who_may_lock_any_memory_is_not_limited(root: Root) -> None:
    """CAP_IPC_LOCK, which root in most containers has."""
    _with_rdma(root)
    root.status(capabilities=1 << 14)
    assert check_locked_memory(root.context(spans_hosts=True, vendor="nvidia")).verdict == "ok"


# --------------------------------------------------------------------------------------------------------- this machine


def test_the_machine_itself_is_in_order() -> None:
    """A check that warns on a healthy machine is a defect; facts are told all the same."""
    from saferun.preflight.checks.context import CheckContext

    for check in (check_open_files, check_processes, check_locked_memory, check_cores):
        result = check(CheckContext(nproc=2, environ=dict(os.environ)))
        assert result.verdict == "ok"
        assert result.message
        assert dict(result.facts)["hard"] != "unknown"
