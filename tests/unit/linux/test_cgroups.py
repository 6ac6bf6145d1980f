from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.evidence.job_evidence import OomKill
from saferun.linux import cgroups
from saferun.linux.cgroups import (
    MemoryState,
    OomLine,
    memory_limit_bytes,
    oom_kill_between,
    parse_oom_lines,
    read_memory_state,
)
from saferun.linux.container import INITIAL_PID_NAMESPACE

GIB = 1 << 30

CGROUP_KILL = tuple(
    """\
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
memory: usage 65536kB, limit 65536kB, failcnt 19
memory+swap: usage 65536kB, limit 9007199254740988kB, failcnt 0
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,oom_memcg=/job,task_memcg=/job,task=python,pid=1438,uid=0
Memory cgroup out of memory: Killed process 1438 (python) total-vm:1061096kB, anon-rss:65024kB, file-rss:5872kB, \
shmem-rss:0kB, UID:0 pgtables:200kB oom_score_adj:0
oom_reaper: reaped process 1438 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
""".splitlines()
)
HOST_KILL = tuple(
    """\
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/job,pid=99,uid=1000
Out of memory: Killed process 99 (pt_data_worker) total-vm:900kB, anon-rss:700kB, file-rss:20kB, shmem-rss:4kB, \
UID:1000 pgtables:200kB oom_score_adj:0
""".splitlines()
)


# ----------------------------------------------------------------------------------------------------- the kernel log


def test_a_kill_in_a_cgroup_is_read_with_its_limit() -> None:
    """As Linux 6.18 wrote it."""
    assert parse_oom_lines(CGROUP_KILL) == [OomLine(1438, "python", 70896 * 1024, is_cgroup=True, limit_bytes=64 << 20)]


def test_a_kill_of_the_host_is_no_cgroup_s() -> None:
    """A limit that was told of another kill is not this one's."""
    kills = parse_oom_lines(CGROUP_KILL + HOST_KILL)
    assert kills[1] == OomLine(99, "pt_data_worker", 724 * 1024, is_cgroup=False, limit_bytes=0)


@pytest.mark.parametrize(
    "lines",
    [
        (
            "Memory cgroup out of memory: Kill process 7 (python) score 1905 or sacrifice child",
            "Killed process 7 (python) total-vm:99kB, anon-rss:60kB, file-rss:4kB, shmem-rss:0kB",
        ),
        (
            "Memory cgroup out of memory: Kill process 7 (python) score 1905 or sacrifice child",
            "Killed process 7 (python), UID 1000, total-vm:99kB, anon-rss:60kB, file-rss:4kB, shmem-rss:0kB",
        ),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=7,uid=0",
            "Killed process 7, UID 1000, (python) total-vm:99kB, anon-rss:60kB, file-rss:4kB, shmem-rss:0kB",
        ),
    ],
)
def test_kernels_write_a_kill_in_several_ways(lines: tuple[str, ...]) -> None:
    """Clusters live long."""
    assert parse_oom_lines(lines) == [OomLine(7, "python", 64 * 1024, is_cgroup=True, limit_bytes=0)]


def test_a_name_may_look_like_the_rest_of_the_line() -> None:
    """Programs call themselves what they like."""
    line = "Out of memory: Killed process 7 (a) total-vm:1kB (b)) total-vm:99kB, anon-rss:60kB, file-rss:0kB"
    assert [(kill.pid, kill.rss_bytes) for kill in parse_oom_lines([line])] == [(7, 60 * 1024)]


@given(
    st.lists(
        st.one_of(
            st.text(),
            st.sampled_from(CGROUP_KILL + HOST_KILL),
            st.builds(
                "".join,
                st.lists(
                    st.sampled_from(
                        [
                            "Killed process ",
                            "Kill process ",
                            "7",
                            "(",
                            ") total-vm:",
                            "memory: usage ",
                            ", limit ",
                            "kB",
                        ]
                    )
                ),
            ),
        )
    )
)
def test_any_line_may_be_in_a_log(lines: list[str]) -> None:
    """Whatever stands there, reading it ends without an error."""
    assert all(kill.pid >= 0 for kill in parse_oom_lines(lines))


# --------------------------------------------------------------------------------------------------- between readings


def _state(**changed: object) -> MemoryState:
    state = MemoryState(64 * GIB, 0, 0, 5, 512 * GIB)
    return MemoryState(**{**state._asdict(), **changed})


def test_a_kill_in_the_own_cgroup_at_its_limit_is_told_with_the_limit() -> None:
    """Killed by the kernel's OOM killer: cgroup limit 64 GiB, rank used 61 GiB."""
    kill = oom_kill_between(_state(), _state(oom_kills=1, limit_hits=1, host_oom_kills=6), 61 * GIB)
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.rss_bytes, kill.kills) == ("cgroup", 64 * GIB, 61 * GIB, 1)
    assert kill.source == "memory cgroup"


def test_a_kill_of_the_own_cgroup_s_process_without_its_limit_is_the_host_s() -> None:
    """The host had run out of memory; raising the job's limit would not help."""
    kill = oom_kill_between(_state(), _state(oom_kills=1, host_oom_kills=6))
    assert kill is not None
    assert (kill.scope, kill.limit_bytes) == ("host", 512 * GIB)


def test_other_people_s_kills_are_not_ours() -> None:
    """The host's counter counts everybody's."""
    assert oom_kill_between(_state(), _state(host_oom_kills=9)) is None
    assert oom_kill_between(_state(), _state(limit_hits=9)) is None
    assert oom_kill_between(_state(), _state(), kernel_lines=HOST_KILL, pids=[71]) is None


def test_without_a_counter_of_the_cgroup_the_host_s_counts() -> None:
    """It is all that there is."""
    kill = oom_kill_between(_state(oom_kills=None), _state(oom_kills=None, host_oom_kills=6))
    assert kill is not None
    assert (kill.scope, kill.source) == ("host", "/proc/vmstat")
    nothing = _state(oom_kills=None, host_oom_kills=None)
    assert oom_kill_between(nothing, nothing) is None


@pytest.mark.parametrize(
    ("namespace", "kills", "is_ours"),
    [(INITIAL_PID_NAMESPACE, 1, False), (INITIAL_PID_NAMESPACE, 2, True), ("pid:[4026532001]", 1, True), ("", 1, True)],
)
def test_without_a_counter_a_kill_in_another_cgroup_has_no_limit_for_us(
    monkeypatch: pytest.MonkeyPatch, namespace: str, kills: int, *, is_ours: bool
) -> None:
    """The log names every process that was killed, unless it lacks lines or numbers them otherwise."""
    monkeypatch.setattr("saferun.linux.cgroups.read_link", lambda _: namespace)
    before, after = _state(oom_kills=None), _state(oom_kills=None, host_oom_kills=5 + kills)
    kill = oom_kill_between(before, after, 3 * GIB, CGROUP_KILL, [57])
    assert kill == (OomKill("cgroup", 0, 3 * GIB, (), kills, "/proc/vmstat") if is_ours else None)


@pytest.mark.parametrize("lines", [HOST_KILL, CGROUP_KILL + HOST_KILL, HOST_KILL + CGROUP_KILL])
def test_without_a_counter_a_kill_for_the_memory_of_the_host_keeps_its_process(
    monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    """No rank is known to be the one that was killed, and no host is replaced by a spare for it."""
    monkeypatch.setattr("saferun.linux.cgroups.read_link", lambda _: "pid:[4026532001]")
    before, after = _state(oom_kills=None), _state(oom_kills=None, host_oom_kills=7)
    kill = oom_kill_between(before, after, 3 * GIB, lines, [57])
    assert kill == OomKill("host", 512 * GIB, 3 * GIB, (99,), 2, "/proc/vmstat")


def test_the_kernel_log_tells_more_than_the_counters() -> None:
    """Who was killed, how large it was, and which limit it was."""
    kill = oom_kill_between(_state(), _state(oom_kills=1), kernel_lines=CGROUP_KILL, pids=[1438])
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.rss_bytes) == ("cgroup", 64 << 20, 70896 * 1024)
    assert (kill.pids, kill.source) == ((1438,), "kernel log")


def kill_line(limit_bytes: int, pid: int, rss_bytes: int) -> tuple[str, str]:
    """The lines about a kill in a control group."""
    usage = f"memory: usage {limit_bytes >> 10}kB, limit {limit_bytes >> 10}kB, failcnt 12"
    sizes = f"total-vm:9000000kB, anon-rss:{rss_bytes >> 10}kB, file-rss:0kB, shmem-rss:0kB"
    return usage, f"Memory cgroup out of memory: Killed process {pid} (python) {sizes}, UID:0 pgtables:200kB"


@pytest.mark.parametrize("is_last", [False, True])
def test_the_limit_of_another_container_is_not_the_own_one(is_last: bool) -> None:
    """The kernel log has the kills of all containers, and the numbers of their processes are the host's."""
    other, own = kill_line(GIB, 991, GIB), kill_line(64 * GIB, 88123, 61 * GIB)
    lines = (*own, *other) if is_last else (*other, *own)
    kill = oom_kill_between(_state(), _state(oom_kills=1, limit_hits=2), 0, lines, [57])
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.rss_bytes) == ("cgroup", 64 * GIB, 61 * GIB)
    assert (kill.pids, kill.kills, kill.source) == ((), 1, "memory cgroup")


@pytest.mark.parametrize("limit_bytes", [0, 64 * GIB])
def test_a_kill_for_the_memory_of_the_host_has_no_limit_of_another_container(limit_bytes: int) -> None:
    lines = (*HOST_KILL, *kill_line(GIB, 991, GIB))
    kill = oom_kill_between(
        _state(limit_bytes=limit_bytes), _state(limit_bytes=limit_bytes, oom_kills=1), 0, lines, [57]
    )
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.rss_bytes, kill.pids) == ("host", 512 * GIB, 0, (99,))


def test_a_limit_that_the_container_does_not_see_is_that_of_the_only_kill() -> None:
    """That of a pod: the container itself has none."""
    lines = kill_line(64 * GIB, 88123, 61 * GIB)
    kill = oom_kill_between(_state(limit_bytes=0), _state(limit_bytes=0, oom_kills=1), 5 * GIB, lines, [57])
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.rss_bytes) == ("cgroup", 64 * GIB, 61 * GIB)


def test_a_kill_without_a_known_limit_is_not_that_of_another_container() -> None:
    """The line with the limit has fallen out of the log."""
    lines = (kill_line(0, 991, GIB)[1], *kill_line(GIB, 992, GIB))
    kill = oom_kill_between(_state(limit_bytes=0), _state(limit_bytes=0, oom_kills=1), 5 * GIB, lines, [57])
    assert kill is not None
    assert (kill.limit_bytes, kill.rss_bytes) == (0, 5 * GIB)


def test_of_several_kills_none_is_known_to_be_that_of_the_rank() -> None:
    lines = (*kill_line(64 * GIB, 88123, 3 * GIB), *kill_line(64 * GIB, 88124, 51 * GIB))
    kill = oom_kill_between(_state(), _state(oom_kills=2), 7 * GIB, lines, [57])
    assert kill is not None
    assert (kill.scope, kill.rss_bytes, kill.pids) == ("cgroup", 7 * GIB, ())


def test_a_kill_for_the_memory_of_the_host_keeps_its_process() -> None:
    """It may be another one of the same user's session: what killed a rank at that time is not known then."""
    kill = oom_kill_between(_state(), _state(oom_kills=1), 0, HOST_KILL, [57])
    assert kill is not None
    assert (kill.scope, kill.limit_bytes, kill.pids) == ("host", 512 * GIB, (99,))


# ------------------------------------------------------------------------------------------------------ the hierarchy


class Host:
    """Files of /proc and control groups in a directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._proc: dict[str, bytes] = {"/proc/vmstat": b"nr_free_pages 5\noom_kill 3\n"}
        monkeypatch.setattr(cgroups, "read_bytes", self._read)
        monkeypatch.setattr(cgroups, "_host_bytes", lambda: 512 * GIB)

    def _read(self, path: str) -> bytes:
        if path.startswith("/proc/"):
            return self._proc.get(path, b"")
        try:
            return Path(path).read_bytes()
        except OSError:
            return b""

    def mount(self, cgroup: str, *mounts: str) -> None:
        self._proc["/proc/self/cgroup"] = cgroup.encode()
        self._proc["/proc/self/mountinfo"] = "".join(f"{mount}\n" for mount in mounts).encode()

    def group(self, path: str, **files: str) -> str:
        directory = self.root / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name.replace("__", ".")).write_text(f"{content}\n")
        return str(directory)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_the_least_limit_on_the_way_up_counts(host: Host) -> None:
    """Schedulers limit the job, not the step that ranks are in."""
    host.group("", memory__stat="anon 1")
    host.group("job_7", memory__max=str(64 * GIB), memory__current="123", memory__events="oom 2\noom_kill 4")
    step = host.group("job_7/step_0", memory__max="max", memory__events="low 0\noom 1\noom_kill 1", memory__current="1")
    host.mount("0::/job_7/step_0", f"41 31 0:38 / {host.root} rw - cgroup2 cgroup2 rw")
    state = read_memory_state()
    assert cgroups._memory_cgroup(0)[:2] == (2, step)
    assert (state.limit_bytes, state.oom_kills, state.limit_hits, state.host_oom_kills) == (64 * GIB, 1, 2, 3)
    assert memory_limit_bytes() == 64 * GIB


def test_version_1_has_other_files_and_a_number_for_no_limit(host: Host) -> None:
    """Hybrid hosts have both, and the memory controller in only one of them."""
    host.group("unified")
    job = host.group(
        "memory/slurm/job_7",
        memory__limit_in_bytes=str(8 * GIB),
        memory__failcnt="3",
        memory__usage_in_bytes="77",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    )
    host.group("memory/slurm", memory__limit_in_bytes="9223372036854771712", memory__failcnt="9")
    host.mount(
        "4:cpu,memory:/slurm/job_7\n1:name=systemd:/x\n0::/y",
        f"35 31 0:32 / {host.root}/memory rw - cgroup cgroup rw,memory",
        f"41 31 0:38 / {host.root}/unified rw - cgroup2 cgroup2 rw",
    )
    state = read_memory_state()
    assert cgroups._memory_cgroup(0)[:2] == (1, job)
    assert (state.limit_bytes, state.oom_kills, state.limit_hits) == (8 * GIB, 2, 3)


def test_a_frozen_group_is_known_in_both_versions(host: Host) -> None:
    """Version 1 has a hierarchy of its own for that; in version 2 each group but the root says so."""
    host.group("unified/job", cgroup__events="populated 1\nfrozen 1")
    host.group("freezer/job", freezer__state="FREEZING")
    mounts = (
        f"35 31 0:32 / {host.root}/freezer rw - cgroup cgroup rw,freezer",
        f"41 31 0:38 / {host.root}/unified rw - cgroup2 cgroup2 rw",
    )
    for cgroup, state, expected in (
        ("0::/job", "THAWED", True),
        ("0::/", "THAWED", False),
        ("7:freezer:/job", "FREEZING", True),
        ("7:freezer:/job", "FROZEN", True),
        ("7:freezer:/job\n0::/", "THAWED", False),
        ("", "FROZEN", False),
    ):
        host.group("freezer/job", freezer__state=state)
        host.mount(cgroup, *mounts)
        host._proc["/proc/7/cgroup"] = cgroup.encode()
        assert cgroups.is_frozen(7) is expected


def test_in_a_container_the_path_is_the_host_s_and_the_mount_is_its_own(host: Host) -> None:
    """Docker without a cgroup namespace."""
    own = host.group("memory", memory__limit_in_bytes=str(GIB), memory__oom_control="oom_kill 0")
    host.mount("4:memory:/docker/abc", f"35 31 0:32 /docker/abc {host.root}/memory ro - cgroup cgroup ro,memory")
    assert (cgroups._memory_cgroup(0)[1], read_memory_state().limit_bytes) == (own, GIB)


def test_in_a_cgroup_namespace_the_own_group_is_the_root(host: Host) -> None:
    """Kubernetes and Docker with version 2."""
    own = host.group("unified", memory__max=str(GIB), memory__events="oom_kill 0", memory__current="5")
    host.mount("0::/", f"35 31 0:32 / {own} ro - cgroup2 cgroup ro")
    assert (cgroups._memory_cgroup(0)[1], read_memory_state().limit_bytes) == (own, GIB)


@pytest.mark.parametrize("cgroup", ["", "garbage", "4:memory", "0::/../../etc", "4:memory:/gone"])
@pytest.mark.parametrize(
    "mount", ["", "garbage - cgroup", "1 2 3 / - cgroup2", "35 31 0:32 / /nowhere rw - cgroup2 c rw"]
)
def test_whatever_proc_says_nothing_is_raised(host: Host, cgroup: str, mount: str) -> None:
    """A reading at the start of a launch may cost its own values and nothing else."""
    host.mount(cgroup, mount)
    state = read_memory_state()
    assert (state.limit_bytes, state.oom_kills) == (0, None)
    assert memory_limit_bytes() == 512 * GIB


def test_the_machine_itself_can_be_read() -> None:
    """The files of the kernel that these tests run on."""
    state = read_memory_state()
    assert state.host_bytes > 0
    assert 0 < memory_limit_bytes() <= state.host_bytes
