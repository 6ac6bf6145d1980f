"""When ranks may leave cores: where all of them have room together, and nowhere where they harm others."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from saferun.linux import answering_files, core_limits
from saferun.linux.container import INITIAL_PID_NAMESPACE, in_container
from saferun.linux.core_limits import (
    LimitNotes,
    RankPreparation,
    have_raised,
    lower_limits,
    lower_limits_of,
    plan_preparation,
    prepare_rank,
    why_no_cores,
)
from saferun.linux.core_pattern import CorePattern, file_in_place
from saferun.linux.file_systems import kind_of

HERE = CorePattern("core.%p")
GB = 10**9


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host with 100 GB of memory, a disk of 1 TB, no limits and no container; tests change it."""
    host = SimpleNamespace(memory=100 * GB, free=1000 * GB, limits=(-1, -1), container=False, kind="")
    monkeypatch.setattr(core_limits, "memory_limit_bytes", lambda: host.memory)
    monkeypatch.setattr(core_limits, "in_container", lambda _: host.container)
    monkeypatch.setattr(core_limits, "kind_of", lambda _: host.kind)
    monkeypatch.setattr(resource, "getrlimit", lambda _: host.limits)
    sizes = SimpleNamespace(f_frsize=1, f_blocks=1000 * GB)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=host.free, **vars(sizes)))
    return host


def test_the_cores_of_all_ranks_have_room_together(host: SimpleNamespace) -> None:
    """NCCL's watchdog aborts all ranks at once; room for one core is none."""
    assert why_no_cores("/", 8, HERE) == ""
    host.free = 110 * GB
    assert "/ has 110.0 GB free, and the cores of all ranks may take 100.0 GB" in why_no_cores("/", 8, HERE)


def test_something_is_left_free_in_any_case(host: SimpleNamespace) -> None:
    """Checkpoints go there too."""
    host.free, host.memory = 51 * GB, 2 * GB
    assert "GB free" in why_no_cores("/", 8, HERE)
    host.free = 53 * GB
    assert why_no_cores("/", 8, HERE) == ""


def test_a_hard_limit_bounds_what_each_rank_writes(host: SimpleNamespace) -> None:
    host.free, host.limits = 60 * GB, (0, GB)
    assert why_no_cores("/", 8, HERE) == ""
    assert why_no_cores("/", 16, HERE) != ""


@pytest.mark.parametrize("kind", ["overlayfs", "NFS", "Lustre", "FUSE"])
def test_there_are_none_on_what_others_use_too(host: SimpleNamespace, kind: str) -> None:
    """A pod that fills its layers is evicted, and a full quota fails the next checkpoint."""
    host.kind = kind
    assert why_no_cores("/", 1, HERE, asked=True) == f"/ is on {kind}"


def test_in_a_container_that_wants_no_cores_there_are_none_unless_asked_for(host: SimpleNamespace) -> None:
    host.container, host.limits = True, (0, -1)
    assert "in this container the limit on cores is 0" in why_no_cores("/", 1, HERE)
    assert why_no_cores("/", 1, HERE, asked=True) == ""
    host.limits = (-1, -1)
    assert why_no_cores("/", 1, HERE) == ""
    host.container, host.limits = False, (0, -1)
    assert why_no_cores("/", 1, HERE) == ""


@pytest.mark.parametrize(
    ("pattern", "raises"),
    [
        (CorePattern("core"), False),
        (CorePattern("core.%e"), False),
        (CorePattern("core", uses_pid=True), True),
        (CorePattern("core.%p"), True),
        (CorePattern("core.%t"), True),
        (CorePattern("/var/crash/core"), True),
    ],
)
def test_where_cores_take_the_place_of_files_there_are_none_unless_asked_for(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, pattern: CorePattern, raises: bool
) -> None:
    """In whatever directory a process crashes: the kernel would delete the user's ``core`` there."""
    host.limits = (0, -1)
    monkeypatch.setattr(core_limits, "read_core_pattern", lambda: pattern)
    assert plan_preparation("/", 1, cores=True, tracer_pid=0).raise_core_limit is raises
    assert plan_preparation("/", 1, cores=True, tracer_pid=0, asked=True).raise_core_limit
    reason = why_no_cores("/nowhere", 1, pattern)
    expected = f"a core would replace any file called {pattern.text} (--cores backtrace raises the limit all the same)"
    assert (reason == expected) is not raises
    host.limits = (1 << 30, -1)  # it does so without saferun, too
    assert plan_preparation("/", 1, cores=True, tracer_pid=0).raise_core_limit


def test_the_supervisor_does_not_look_at_the_file_system_of_the_ranks(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not answer. The process of the rank looks, before its program starts."""
    host.limits = (0, -1)
    monkeypatch.setattr(core_limits, "read_core_pattern", lambda: HERE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: pytest.fail("looked at"))
        patched.setattr(core_limits, "kind_of", lambda _: pytest.fail("looked at"))
        plan = plan_preparation("/", 4, cores=True, tracer_pid=0)
    assert plan.raise_core_limit
    assert (plan.core_directory, plan.cores_bytes) == ("/", 100 * GB)


@pytest.mark.parametrize(("text", "raises"), [("/cores/core.%p", False), ("/tmp/core.%p", True), ("core.%p", True)])
def test_no_rank_looks_at_a_server_where_cores_would_go(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, raises: bool
) -> None:
    """If it is dead, the rank would wait for it between fork and exec."""
    host.limits = (0, -1)
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:41 / /cores rw - nfs4 server:/cores rw\n")
    monkeypatch.setattr(answering_files.is_at_hand, "__kwdefaults__", {"mounts_file": str(mounts)})
    monkeypatch.setattr(core_limits, "read_core_pattern", lambda: CorePattern(text))
    plan = plan_preparation("/cores/work", 1, cores=True, tracer_pid=0)
    assert plan.raise_core_limit is raises


def test_the_cores_of_a_user_who_has_switched_them_on_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun's: with the memory that ranks and loaders share."""
    monkeypatch.setattr(core_limits, "_read_filter", lambda: core_limits._DEFAULT_FILTER)
    for soft, drops in ((0, True), (1 << 30, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, resource.RLIM_INFINITY))
        assert plan_preparation("/", 1, cores=True, tracer_pid=0).drop_shared_memory is drops


@pytest.mark.parametrize("free", [100 * GB, 200 * GB])
def test_the_rank_raises_its_limit_where_there_is_room(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    host.free = free
    limits: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    prepare_rank(
        RankPreparation(
            raise_core_limit=True, drop_shared_memory=False, tracer_pid=0, core_directory="/", cores_bytes=100 * GB
        )
    )
    assert limits == ([(-1, -1)] if free > 150 * GB else [])


@pytest.mark.parametrize(("soft", "raises"), [(0, False), (1 << 20, True)])
def test_the_rank_raises_no_limit_that_costs_the_user_a_file(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soft: int, raises: bool
) -> None:
    """The kernel deletes whatever is called ``core``. Where cores were on before, it does so without saferun too."""
    (tmp_path / "core").write_text("precious")
    host.limits = (soft, -1)
    limits: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(core_limits, "read_core_pattern", lambda: CorePattern("core"))
    plan = plan_preparation(str(tmp_path), 1, cores=True, tracer_pid=0, asked=True)
    prepare_rank(plan._replace(drop_shared_memory=False))
    assert limits == ([(-1, -1)] if raises else [])
    reason = why_no_cores(str(tmp_path), 1, CorePattern("core"), asked=True)
    assert reason == ("" if raises else f"a core would replace {tmp_path}/core")
    limits.clear()
    (tmp_path / "core").rename(tmp_path / "core.c")
    prepare_rank(plan._replace(drop_shared_memory=False))
    assert limits == [(-1, -1)]


@pytest.mark.parametrize("kept", ["not planned", "no room", "refused", ""])
def test_cores_lack_shared_memory_only_where_saferun_has_them_written(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: str
) -> None:
    """Those of a user whose cores go to a server, or of a script that raises the limit itself, are the user's."""
    host.free = 0 if kept == "no room" else 1000 * GB

    def set_limit(*_: object) -> None:
        if kept == "refused":
            raise PermissionError

    mask = tmp_path / "coredump_filter"
    mask.write_text("0x33")
    monkeypatch.setattr(core_limits, "_FILTER", str(mask))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    plan = RankPreparation(
        raise_core_limit=kept != "not planned",
        drop_shared_memory=True,
        tracer_pid=0,
        core_directory="/",
        cores_bytes=100 * GB,
    )
    prepare_rank(plan)
    assert mask.read_text() == ("0x33" if kept else "0x31")


@pytest.fixture
def notes() -> Iterator[LimitNotes]:
    notes = LimitNotes()
    yield notes
    notes.close()


def test_ranks_note_whether_they_have_raised_the_limit(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, notes: LimitNotes
) -> None:
    """Where they have not, a core is that of a script that raised it itself."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    plan = RankPreparation(
        raise_core_limit=True,
        drop_shared_memory=False,
        tracer_pid=0,
        core_directory="/",
        cores_bytes=100 * GB,
        note_path=notes.path,
    )
    assert not have_raised(notes.fd)
    host.free = 200 * GB
    prepare_rank(plan)
    prepare_rank(plan)
    assert have_raised(notes.fd)
    host.free = 100 * GB
    prepare_rank(plan)
    assert not have_raised(notes.fd)  # it is not known of which rank a core is
    notes.begin_attempt()
    assert not have_raised(notes.fd)
    host.free = 200 * GB
    prepare_rank(plan)
    assert have_raised(notes.fd)
    notes.close()
    assert not have_raised(notes.fd)


def test_a_limit_that_cannot_be_noted_is_not_raised(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, notes: LimitNotes
) -> None:
    """The cores would never be deleted."""
    host.free = 200 * GB
    limits: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    plan = RankPreparation(
        raise_core_limit=True,
        drop_shared_memory=False,
        tracer_pid=0,
        core_directory="/",
        cores_bytes=100 * GB,
        note_path="/no/such/file",
    )
    prepare_rank(plan)
    assert limits == []
    prepare_rank(plan._replace(note_path=notes.path))
    assert limits == [(-1, -1)]


def test_that_a_rank_of_an_earlier_attempt_has_kept_its_limit_is_known(notes: LimitNotes) -> None:
    """Its cores, if there are any, are the user's."""
    os.write(notes.fd, b"+")
    notes.begin_attempt()
    assert not notes.were_kept
    os.ftruncate(notes.fd, 0)
    os.pwrite(notes.fd, b"+-", 0)
    notes.begin_attempt()
    os.pwrite(notes.fd, b"+", 0)
    notes.begin_attempt()
    assert notes.were_kept


def test_limits_are_lowered_in_all_processes_of_the_run(notes: LimitNotes) -> None:
    """The next core would cost the user a file, whichever of them left it."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if not hard:
        pytest.skip("a hard limit of 0")
    script = f"ulimit -S -c {'unlimited' if hard == -1 else hard}; sleep 100 & echo $!; wait"
    os.pwrite(notes.fd, b"+", 0)
    run_id = os.urandom(8).hex()
    entry, environ = f"SAFERUN_RUN_ID={run_id}", {"SAFERUN_RUN_ID": run_id, "PATH": os.environ["PATH"]}
    with (
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, env=environ) as child,
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as older,
    ):
        try:
            assert child.stdout is not None
            assert older.stdout is not None
            grandchild, another = int(child.stdout.readline()), int(older.stdout.readline())
            assert resource.prlimit(grandchild, resource.RLIMIT_CORE) == (hard, hard)
            lower_limits(os.getpid(), notes.fd, entry)
            # A server that an entry script started before it became saferun.
            assert resource.prlimit(older.pid, resource.RLIMIT_CORE) == (hard, hard)
            assert resource.prlimit(another, resource.RLIMIT_CORE) == (hard, hard)
            assert resource.prlimit(child.pid, resource.RLIMIT_CORE) == (0, hard)
            assert resource.prlimit(grandchild, resource.RLIMIT_CORE) == (0, hard)
            assert not have_raised(notes.fd)
        finally:
            os.kill(grandchild, 9)
            os.kill(another, 9)
            child.kill()
            older.kill()


def test_limits_of_chosen_processes_are_lowered_with_those_of_their_descendants(notes: LimitNotes) -> None:
    """A signal that ends a rank reaches its process group. That it has raised its limit stays noted."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if not hard:
        pytest.skip("a hard limit of 0")
    script = f"ulimit -S -c {'unlimited' if hard == -1 else hard}; sleep 100 & echo $!; wait"
    os.pwrite(notes.fd, b"+", 0)
    with (
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as child,
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as another,
    ):
        found = []
        try:
            for process in (child, another):
                assert process.stdout is not None
                found.append(int(process.stdout.readline()))
            lower_limits_of([child.pid])
            assert resource.prlimit(child.pid, resource.RLIMIT_CORE) == (0, hard)
            assert resource.prlimit(found[0], resource.RLIMIT_CORE) == (0, hard)
            assert resource.prlimit(another.pid, resource.RLIMIT_CORE) == (hard, hard)
            assert resource.prlimit(found[1], resource.RLIMIT_CORE) == (hard, hard)
            assert have_raised(notes.fd)
        finally:
            for pid in found:
                os.kill(pid, 9)
            child.kill()
            another.kill()


def test_a_sandbox_that_refuses_prlimit_keeps_no_signal_from_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they leave cores."""

    def refused(*_: object) -> tuple[int, int]:
        raise PermissionError

    monkeypatch.setattr(resource, "prlimit", refused)
    lower_limits_of([os.getpid()])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("core", "core"),
        ("core.%e", "core.python"),
        ("%e.core", "python.core"),
        ("core.%p", ""),
        ("core.%e.%t", ""),
        ("%u/core", ""),
        ("core.%e.dump", ""),
        ("other", ""),
        ("directory", ""),
        ("link", "link"),
    ],
)
def test_what_the_next_core_would_replace_is_known(tmp_path: Path, text: str, found: str) -> None:
    """Nothing, where each core has a name of its own."""
    for name in ("core", "core.python", "python.core", "core.python.71"):
        (tmp_path / name).touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/no/such")
    expected = str(tmp_path / found) if found else ""
    assert file_in_place(str(tmp_path), CorePattern(text).repeated_name) == expected
    assert file_in_place("/no/such", CorePattern(text).repeated_name) == ""
    assert CorePattern(text, uses_pid=True).repeated_name == ""


def test_memory_is_no_place_for_cores() -> None:
    assert kind_of("/dev/shm") in {"tmpfs", ""}
    assert kind_of("/no/such/directory") == ""
    assert kind_of("/proc") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_containers_layers_are_known(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    source = "from saferun.linux.file_systems import kind_of; import sys; print(kind_of(sys.argv[1]))"
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    script = f'mount -t overlay -o {options} none "{tmp_path}/merged" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", source, f"{tmp_path}/merged"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unknown filesystem" in done.stderr:
        pytest.skip("this kernel has no overlayfs")
    assert (done.stdout.strip(), done.stderr) == ("overlayfs", "")


@pytest.mark.parametrize(
    ("environ", "path", "content"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "", ""),
        ({"container": "podman"}, "", ""),
        ({}, ".dockerenv", ""),
        ({}, "run/.containerenv", ""),
        ({}, "proc/self/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n"),
    ],
)
def test_signs_of_a_container_are_known(tmp_path: Path, environ: dict[str, str], path: str, content: str) -> None:
    root = f"{tmp_path}/"
    for folder in ("run", "proc/self/ns"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(INITIAL_PID_NAMESPACE)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/user-0.slice\n")
    assert not in_container({}, root)
    if path:
        (tmp_path / path).write_text(content)
    assert in_container(environ, root)


def test_another_pid_namespace_is_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532000]")
    assert in_container({}, f"{tmp_path}/")
