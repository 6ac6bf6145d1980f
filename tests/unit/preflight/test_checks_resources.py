"""All checks of what a host has, together: what they cost, and that none of them breaks or cries wolf."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.linux.procfs import parse_mounts
from saferun.preflight.checks.all_checks import CHECKS
from saferun.preflight.checks.context import Check, CheckContext
from saferun.preflight.checks.run import run_checks
from saferun.preflight.results import HELD_BY_OLD_RANK, SEVERITY, CheckResult
from tests.unit.preflight.host_roots import Root

ROOT = Path(__file__).resolve().parents[3]
# What a launch has not loaded by then and a check must not make it pay for.
HEAVY = frozenset(
    ["asyncio", "dataclasses", "hashlib", "importlib.metadata", "logging", "pathlib", "psutil", "pynvml", "shutil"]
) | {"subprocess", "tempfile", "torch", "yaml"}

RESOURCES = CHECKS[5:]  # behind those of the network


def test_a_healthy_machine_gives_no_warning() -> None:
    """This one: a container or a laptop, with ranks on its processors."""
    context = CheckContext(nproc=2, environ=dict(os.environ), python=sys.executable, script=__file__)
    found: list[CheckResult] = []
    run_checks(RESOURCES, context, found.append)
    assert {result.name for result in found} == {check.name for check in RESOURCES}
    assert not [result for result in found if SEVERITY[result.verdict] > SEVERITY["skipped"]]
    assert all(result.message and not result.message.endswith(".") for result in found)


def test_the_checks_load_nothing_heavy() -> None:
    """They run at every launch, beside the import of torch."""
    program = (
        "import sys, saferun.launch.entry\n"
        "before = set(sys.modules)\n"
        "from saferun.preflight.checks.context import CheckContext\n"
        "from saferun.preflight.checks.all_checks import CHECKS\n"
        "from saferun.preflight.checks.versions import describe_host\n"
        "context = CheckContext(nproc=2, spans_hosts=True, python=sys.executable, script=sys.executable)\n"
        "print(*[check.check(context).verdict for check in CHECKS[5:]], file=sys.stderr)\n"
        "assert describe_host(context)[1]\n"
        "print(*(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "saferun.preflight.checks.versions" in loaded
    assert not loaded & HEAVY


def test_a_host_whose_files_cannot_be_read_passes(tmp_path: Path) -> None:
    """Some containers hide most of /proc and /sys; only a missing /dev/shm is told."""
    context = Root(tmp_path).context(nproc=8, vendor="nvidia", spans_hosts=True, python="/nowhere/bin/python")
    results = {check.name: check.check(context) for check in RESOURCES}
    assert {name for name, result in results.items() if result.verdict not in {"ok", "skipped"}} == {"shared_memory"}


_FILES = (
    *(
        "proc/self/limits",
        "proc/self/status",
        "proc/self/cgroup",
        "proc/self/mountinfo",
        "proc/meminfo",
        "proc/cpuinfo",
    ),
    *(
        "sys/devices/system/cpu/online",
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/cpu.max",
        "proc/driver/nvidia/version",
    ),
    *("sys/class/kfd/kfd/topology/nodes/1/properties", "sys/class/kfd/kfd/topology/nodes/1/gpu_id", "bin/pyvenv.cfg"),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=len(_FILES), max_size=len(_FILES)))
def test_whatever_stands_in_the_files_no_check_breaks(tmp_path: Path, contents: list[bytes]) -> None:
    root = Root(tmp_path)
    (tmp_path / "dev/shm").mkdir(parents=True, exist_ok=True)
    for name, content in zip(_FILES, contents, strict=True):
        root.write(name, content)
    context = root.context(nproc=8, vendor="amd", python=f"{tmp_path}/bin/x/python")
    for check in RESOURCES:
        assert check.check(context).verdict in SEVERITY


@pytest.mark.parametrize("check", RESOURCES, ids=lambda check: check.name)
def test_what_a_check_answers_gets_its_name(check: Check, tmp_path: Path) -> None:
    found: list[CheckResult] = []
    run_checks([check], Root(tmp_path).context(), found.append)
    assert [result.name for result in found] == [check.name]
    assert check.deadline_s > 0


@pytest.mark.parametrize("line", ["", "-", "- tmpfs", "1 2 - tmpfs", "22 1 0:5 / /dev/shm rw -", "22 1 0:5 / - tmpfs"])
def test_a_line_of_mountinfo_that_is_cut_short_is_no_mount(line: str) -> None:
    assert parse_mounts(f"{line}\n22 1 0:5 / /a\\040b rw shared:1 - tmpfs tmpfs rw") == [("/a b", "tmpfs")]


def test_where_no_other_thread_can_be_started_the_checks_are_made_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many processes there may be is one of them, and threads count."""

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    found: list[CheckResult] = []
    checks = [Check(name, lambda _context: CheckResult("", "ok", "well")) for name in ("a", "b")]
    run_checks(checks, Root(tmp_path).context(), found.append)
    assert [(result.name, result.verdict) for result in found] == [("a", "ok"), ("b", "ok")]


@pytest.mark.parametrize(("facts", "is_waited_for"), [((), False), (((HELD_BY_OLD_RANK, "GPU 0"),), True)])
def test_a_retry_does_not_wait_for_memory_that_may_be_another_containers(
    tmp_path: Path, facts: tuple[tuple[str, str], ...], *, is_waited_for: bool
) -> None:
    """On a GPU that containers share it would be late each time. That of a dying rank comes free."""
    looks: list[int] = []

    def look(_context: CheckContext) -> CheckResult:
        looks.append(1)
        if len(looks) > 2:
            return CheckResult("", "ok", "1 GPU")
        return CheckResult("", "warn", "GPU 0 is in use", facts=facts, class_name="gpu_busy", transient=True)

    found: list[CheckResult] = []
    run_checks([Check("gpus", look)], Root(tmp_path).context(attempt=1), found.append, patience_s=60.0, still_s=0.0)
    assert [result.verdict for result in found] == ["ok" if is_waited_for else "warn"]
    assert len(looks) == (3 if is_waited_for else 1)


def test_a_retry_waits_while_memory_is_being_given_back(tmp_path: Path) -> None:
    left = [61, 40, 12]

    def look(_context: CheckContext) -> CheckResult:
        if not left:
            return CheckResult("", "ok", "1 GPU")
        return CheckResult("", "warn", f"{left.pop(0)} GiB in use", class_name="gpu_busy", transient=True)

    found: list[CheckResult] = []
    run_checks([Check("gpus", look)], Root(tmp_path).context(attempt=1), found.append, patience_s=60.0, still_s=5.0)
    assert [result.verdict for result in found] == ["ok"]
