"""The profiles that come with saferun: what they set is really read, by whom they say, in the versions they say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from saferun.env.profiles import load_profiles, render, resolve
from saferun.env.profiles.builtin import PROFILES
from saferun.env.profiles.profile_values import COSTS, Profile, Variable, Vendor
from saferun.env.profiles.resolution import layered, needs_run_dir
from saferun.env.profiles.version_ranges import holds
from tests.compile_profiles import TARGET, configs_directory, read_builtin, source_text

NAMES_FILE = Path(__file__).with_name("env_names_in_binaries.txt")

EVERY_VARIABLE = [
    pytest.param(profile, variable, id=f"{profile.name}-{variable.name}-{variable.location.line}")
    for profile in PROFILES.values()
    for variable in profile.variables
]
VENDORS: tuple[Vendor, ...] = ("nvidia", "amd", "any")
TORCH_RELEASES = [f"2.{minor}.0" for minor in range(4, 17)]

# Names that people copy from each other, and that nothing reads or that an older release read (with the right name).
WRONG_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_USE_CUDA_DSA": "PYTORCH_USE_CUDA_DSA",
    "NCCL_TIMEOUT": None,
    "RCCL_TIMEOUT": None,
    "RCCL_DEBUG": "NCCL_DEBUG",
    "RCCL_DEBUG_FILE": "NCCL_DEBUG_FILE",
    "TORCH_DIST_INIT_BARRIER_TIMEOUT": None,
}


class Search(NamedTuple):
    """Where names were looked for. ``whole``: in all of these libraries, so that a name not found is not there."""

    component: str
    version: str
    whole: bool
    libraries: frozenset[str]
    names: dict[str, frozenset[str]]


def read_searches() -> list[Search]:
    searches: list[Search] = []
    for line in NAMES_FILE.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "searched":
            _, component, version, extent, *libraries = words
            assert extent in ("whole", "part")
            searches.append(Search(component, version, extent == "whole", frozenset(libraries), {}))
        else:
            searches[-1].names[words[0]] = frozenset(words[1:])
    return searches


SEARCHES = read_searches()


def libraries_of(variable: Variable) -> frozenset[str]:
    return frozenset(reader for reader in variable.reader if not reader.startswith("python: "))


def in_range(variable: Variable, search: Search) -> bool:
    return all(
        holds(search.version, wanted) for component, wanted in variable.versions if component == search.component
    )


def layers_of(name: str) -> list[Profile]:
    return layered(load_profiles([]), [name])


def test_the_built_in_profiles_are_these() -> None:
    assert list(PROFILES) == [
        "blocking",
        "compile-debug",
        "cpu-repro",
        "debug",
        "memory-debug",
        "minimal",
        "nccl-debug",
        "none",
        "production",
        "slow-network",
    ]


def test_the_compiled_profiles_are_those_of_the_files() -> None:
    """After a change of configs/*.yaml run: python -m tests.compile_profiles."""
    from_files = read_builtin(configs_directory())
    assert from_files == PROFILES
    assert Path(TARGET).read_text(encoding="utf-8") == source_text(from_files)


@pytest.mark.parametrize(("profile", "variable"), EVERY_VARIABLE)
def test_every_variable_tells_why_it_costs_what_and_where_it_is_documented(
    profile: Profile, variable: Variable
) -> None:
    assert profile.description
    assert len(variable.why) > 20
    assert variable.why.endswith(".")
    assert variable.cost in COSTS
    assert variable.source.startswith("https://")
    assert variable.reader


@pytest.mark.parametrize(("profile", "variable"), EVERY_VARIABLE)
def test_every_variable_is_known_to_a_library_it_names(profile: Profile, variable: Variable) -> None:
    """In every release it is said to hold for and that was searched; at least one such release there must be.

    What Python code reads is held to the sources of the installed torch in tests/torch.
    """
    del profile
    wanted = libraries_of(variable)
    if not wanted:
        assert all(reader.startswith("python: ") for reader in variable.reader)
        return
    seen = 0
    for search in SEARCHES:
        if not in_range(variable, search):
            continue
        found = search.names.get(variable.name, frozenset()) & wanted
        seen += bool(found)
        if search.whole and wanted <= search.libraries:
            assert found, f"{variable.name} is not in {sorted(wanted)} of {search.component} {search.version}"
    assert seen, f"nothing that was searched mentions {variable.name} in {sorted(wanted)}"


@pytest.mark.parametrize(("profile", "variable"), EVERY_VARIABLE)
def test_a_variable_for_a_vendor_is_read_by_that_vendors_library(profile: Profile, variable: Variable) -> None:
    del profile
    of_nvidia = {"libnccl.so.2", "libc10_cuda.so", "libtorch_cuda.so"}
    of_amd = {"librccl.so.1", "libamdhip64.so", "libhsa-runtime64.so.1", "libc10_hip.so", "libtorch_hip.so"}
    if variable.vendor == "nvidia":
        assert not libraries_of(variable) & of_amd
    if variable.vendor == "amd":
        assert not libraries_of(variable) & of_nvidia
    if variable.vendor == "any" and libraries_of(variable) & of_nvidia:
        # One that a CUDA library reads is read by its HIP counterpart, by a common library or by Python code.
        others = set(variable.reader) - of_nvidia
        assert others, f"{variable.name} is for any vendor, and only NVIDIA's libraries are named"


def test_every_renamed_variable_has_one_name_in_each_release() -> None:
    """Two names at once would make torch warn on every rank; none would leave the setting out."""
    groups = (
        ("production", {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"}),
        ("production", {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT"}),
        ("production", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"}),
        ("debug", {"TORCH_NCCL_TRACE_CPP_STACK", "TORCH_FR_CPP_STACK"}),
        ("slow-network", {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC"}),
        ("memory-debug", {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}),
    )
    for name, group in groups:
        for vendor in ("nvidia", "amd"):
            for torch in TORCH_RELEASES:
                release = tuple(int(part) for part in torch.split(".")[:2])
                first = {"TORCH_NCCL_DUMP_ON_TIMEOUT": (2, 6), "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": (2, 8)}
                if any(variable in group and release < since for variable, since in first.items()):
                    assert not rendered(name, vendor, torch).keys() & group
                    continue
                got = rendered(name, vendor, torch).keys() & group
                assert len(got) == 1, f"{name} on {vendor} with torch {torch} sets {sorted(got)} of {sorted(group)}"


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize(("torch", "dumps"), [("2.4.1", False), ("2.5.1", False), ("2.6.0", True)])
def test_a_dump_costs_no_rank_its_life_or_its_gpu(vendor: str, torch: str, *, dumps: bool) -> None:
    """With 2.4 the thread that asks the store whether another rank has failed ends its own rank if the store is gone.

    With 2.5 the watchdog sleeps for the time of its heartbeat, 8 minutes, before it ends a rank that has an error.
    """
    assert ("TORCH_NCCL_DUMP_ON_TIMEOUT" in rendered("production", vendor, torch)) is dumps


def test_names_of_the_same_setting_know_each_other() -> None:
    """Otherwise a user's variable under the one name would not hold back the profile's under the other."""
    by_name = {variable.name: variable for profile in PROFILES.values() for variable in profile.variables}
    for variable in by_name.values():
        for other in variable.same_as:
            if other in by_name:
                assert variable.name in by_name[other].same_as, f"{other} does not name {variable.name}"


def rendered(
    name: str, vendor: str, torch: str, *, rank: int = 0, user: dict[str, str] | None = None, run_dir: str | None = "/r"
) -> dict[str, str]:
    resolution = resolve(
        load_profiles([]),
        [name],
        vendor=vendor,  # type: ignore[arg-type]
        versions={"torch": torch, "nccl": "2.29.7", "rocm": "6.4"},
        user_environ=user or {},
        exists=lambda _path: True,
    )
    return render(
        resolution,
        host="node0",
        rank=rank,
        local_rank=rank,
        world_size=2,
        run_dir=run_dir,
        rank_dir=None if run_dir is None else f"{run_dir}/rank_{rank}",
    )


# ------------------------------------------------------------------------------------------------------ what is in them


@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("torch", TORCH_RELEASES)
def test_production_costs_next_to_nothing(vendor: str, torch: str) -> None:
    profile_costs = {variable.cost for layer in layers_of("production") for variable in layer.variables}
    assert profile_costs <= {"none", "light"}
    assert not any(variable.force for layer in layers_of("production") for variable in layer.variables)
    got = rendered("production", vendor, torch)
    assert "TORCH_SHOW_CPP_STACKTRACES" not in got, "it buries the commonest errors, and costs caught ones too"
    assert got["TORCH_SYMBOLIZE_MODE"] == "dladdr", "with addr2line the first exception can take minutes"
    assert got["SAFERUN_FAULTHANDLER"] == "1"
    assert "PYTHONFAULTHANDLER" not in got, "every child would inherit it"


def test_production_sets_what_torchrun_sets() -> None:
    """It gives this variable to the ranks where the user does not: another value would change failing jobs."""
    assert rendered("production", "any", "2.13.0")["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_production_sets_nothing_that_writes_to_a_stream_of_a_healthy_job() -> None:
    got = rendered("production", "nvidia", "2.13.0")
    assert not got.keys() & {"TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "GLOO_LOG_LEVEL"}


def test_production_has_nccls_warnings_in_a_file_or_not_at_all() -> None:
    """NCCL writes to standard output where it has no file, and that belongs to the script."""
    got = rendered("production", "nvidia", "2.13.0", rank=3)
    assert (got["NCCL_DEBUG"], got["NCCL_DEBUG_FILE"]) == ("WARN", "/r/rank_3/nccl.%h.%p.log")
    names = {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    assert not rendered("production", "nvidia", "2.13.0", run_dir=None).keys() & names
    assert not rendered("production", "nvidia", "2.13.0", user={"NCCL_DEBUG": "INFO"}).keys() & names
    assert not rendered("production", "nvidia", "2.13.0", user={"NCCL_DEBUG_FILE": "/home/me/nccl"}).keys() & names


def test_nccl_writes_into_a_directory_whose_name_has_a_percent_sign() -> None:
    """NCCL takes %h for the host, and %% for a percent sign; where it cannot open its file it writes to stdout."""
    got = rendered("production", "nvidia", "2.13.0", run_dir="/d/50%hot")
    assert got["NCCL_DEBUG_FILE"] == "/d/50%%hot/rank_0/nccl.%h.%p.log"
    assert got["TORCH_FR_DUMP_TEMP_FILE"] == "/d/50%hot/rank_0/flight_recorder_"


def test_what_others_ask_of_nccl_stays_on_the_console() -> None:
    """--env and another profile, as the user's environment does."""
    assert "NCCL_DEBUG_FILE" not in rendered("nccl-debug", "nvidia", "2.13.0")
    resolution = resolve(
        load_profiles([]),
        ["production"],
        vendor="nvidia",
        versions={"torch": "2.13.0"},
        user_environ={},
        env=[("NCCL_DEBUG", "INFO")],
    )
    assert {s.variable.name: s.profile for s in resolution.settings if "NCCL_DEBUG" in s.variable.name} == {
        "NCCL_DEBUG": None
    }
    user = resolve(
        load_profiles([]),
        ["production"],
        vendor="nvidia",
        versions={"torch": "2.13.0"},
        user_environ={"NCCL_DEBUG": "INFO"},
    )
    assert not [kept for kept in user.kept if kept.differs], "a line at every launch of whoever sets it"


def test_slow_network_holds_the_gpus_of_a_failed_job_for_two_minutes_at_most() -> None:
    """The watchdog waits up to four times as long for a dump, and the heartbeat's time is 8 minutes."""
    for torch in TORCH_RELEASES:
        got = rendered("slow-network", "nvidia", torch)
        wait = got.get("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC") or got.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
        if tuple(int(part) for part in torch.split(".")[:2]) < (2, 8):
            assert wait is None, "torch gives it 60 s"
        else:
            assert wait is not None
            assert 15_000 <= int(wait) <= 30_000


def test_slow_network_leaves_the_patience_of_a_site_alone() -> None:
    """NCCL reads its own files only for what the environment does not set: a longer timeout there would be lost."""

    def given(nccl_files: tuple[str, ...]) -> set[str]:
        got = resolve(
            load_profiles([]),
            ["slow-network"],
            vendor="nvidia",
            versions={"torch": "2.13.0", "nccl": "2.27"},
            user_environ={},
            nccl_files=nccl_files,
        )
        return {s.variable.name for s in got.settings} & {"NCCL_IB_TIMEOUT", "NCCL_SOCKET_RETRY_CNT"}

    assert given(()) == {"NCCL_IB_TIMEOUT", "NCCL_SOCKET_RETRY_CNT"}
    assert given(("NCCL_IB_TIMEOUT",)) == {"NCCL_SOCKET_RETRY_CNT"}


def test_segments_grow_on_rocm_where_they_can() -> None:
    def allocator(torch: str, rocm: str) -> str:
        got = resolve(
            load_profiles([]),
            ["memory-debug"],
            vendor="amd",
            versions={"torch": torch, "rocm": rocm},
            user_environ={},
            exists=lambda _path: False,
        )
        return next(s.variable.value or "" for s in got.settings if s.variable.name.endswith("ALLOC_CONF"))

    assert allocator("2.15.0", "7.1") == "expandable_segments:True"
    for torch, rocm in (("2.15.0", "6.4"), ("2.10.0", "7.1"), ("2.8.0", "7.1")):
        assert allocator(torch, rocm) == "max_split_size_mb:512"


def test_production_puts_dumps_into_the_directory_of_the_rank() -> None:
    assert rendered("production", "any", "2.13.0", rank=3)["TORCH_FR_DUMP_TEMP_FILE"] == "/r/rank_3/flight_recorder_"
    assert rendered("production", "any", "2.7.1")["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/r/rank_0/flight_recorder_"
    without = rendered("production", "any", "2.13.0", run_dir=None)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in without
    assert without["TORCH_FR_BUFFER_SIZE"] == "2000"


def test_a_user_who_sizes_the_recorder_by_its_old_name_keeps_that_size() -> None:
    """The new name is heeded before the old one."""
    assert "TORCH_FR_BUFFER_SIZE" not in rendered(
        "production", "any", "2.13.0", user={"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}
    )


def test_none_sets_nothing() -> None:
    assert rendered("none", "nvidia", "2.13.0") == {}


def test_minimal_costs_nothing() -> None:
    assert {variable.cost for layer in layers_of("minimal") for variable in layer.variables} == {"none"}


def test_nccl_debug_informs_on_rank_0_only() -> None:
    assert rendered("nccl-debug", "nvidia", "2.13.0", rank=0)["NCCL_DEBUG"] == "INFO"
    assert rendered("nccl-debug", "amd", "2.13.0", rank=1)["NCCL_DEBUG"] == "WARN"
    assert "TORCH_CPP_LOG_LEVEL" not in rendered("nccl-debug", "nvidia", "2.13.0", rank=1)


def test_debug_logs_into_a_file_of_each_process() -> None:
    got = rendered("debug", "nvidia", "2.13.0", rank=1)
    assert got["NCCL_DEBUG"] == "INFO"
    assert got["NCCL_DEBUG_FILE"] == "/r/rank_1/nccl.%h.%p.log"
    assert got["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert (got["TORCH_SHOW_CPP_STACKTRACES"], got["TORCH_NCCL_ENABLE_TIMING"]) == ("1", "1")
    assert got["NCCL_CHECK_MODE"] == "DEBUG_GLOBAL"


def test_debug_spares_jobs_over_gloo_the_level_that_crashes_them() -> None:
    """DistributedDataParallel over gloo with DETAIL: SIGSEGV in c10d::Logger::set_env_variables (torch 2.13)."""
    assert rendered("debug", "any", "2.13.0")["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert rendered("cpu-repro", "nvidia", "2.13.0")["TORCH_DISTRIBUTED_DEBUG"] == "INFO"


def test_blocking_speaks_to_the_runtime_of_the_vendor() -> None:
    assert "CUDA_LAUNCH_BLOCKING" in rendered("blocking", "nvidia", "2.13.0")
    assert "HIP_LAUNCH_BLOCKING" not in rendered("blocking", "nvidia", "2.13.0")
    on_amd = rendered("blocking", "amd", "2.13.0")
    assert "CUDA_LAUNCH_BLOCKING" not in on_amd
    assert (on_amd["HIP_LAUNCH_BLOCKING"], on_amd["AMD_SERIALIZE_KERNEL"]) == ("1", "3")


def test_blocking_spares_the_nccl_that_hangs_with_it() -> None:
    variable = next(v for v in PROFILES["blocking"].variables if v.name == "CUDA_LAUNCH_BLOCKING")
    assert variable.breaks_with == (("nccl", "==2.14.3"),)


@pytest.mark.parametrize("vendor", VENDORS)
def test_cpu_repro_hides_the_gpus_that_a_scheduler_gave(vendor: str) -> None:
    user = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}
    got = rendered("cpu-repro", vendor, "2.13.0", user=user)
    assert got["CUDA_VISIBLE_DEVICES"] == "-1"
    if vendor == "amd":
        assert got["HIP_VISIBLE_DEVICES"] == "-1", "HIP looks here first, and takes an empty text for unset"


def test_memory_debug_loads_the_agent_only_where_it_is() -> None:
    assert "HSA_TOOLS_LIB" in rendered("memory-debug", "amd", "2.13.0")
    resolution = resolve(
        load_profiles([]), ["memory-debug"], vendor="amd", versions={}, user_environ={}, exists=lambda _path: False
    )
    assert "HSA_TOOLS_LIB" not in {setting.variable.name for setting in resolution.settings}
    assert "HSA_TOOLS_LIB" not in rendered("memory-debug", "nvidia", "2.13.0")


@pytest.mark.parametrize("wrong", WRONG_NAMES)
def test_no_profile_sets_a_wrong_name(wrong: str) -> None:
    assert wrong not in {variable.name for profile in PROFILES.values() for variable in profile.variables}


def test_every_profile_is_for_a_job_without_a_run_directory_too() -> None:
    """With ``--run-dir none`` what needs one is left out, and the rest is set."""
    for name in PROFILES:
        got = rendered(name, "nvidia", "2.13.0", run_dir=None)
        assert not any("{" in value for value in got.values())
        needing = {v.name for layer in layers_of(name) for v in layer.variables if needs_run_dir(v)}
        assert not got.keys() & needing


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_what_nccls_own_files_set_stays_as_it_is(name: str) -> None:
    """A variable of the environment would win over them, and the user's messages would leave the console."""
    resolution = resolve(
        load_profiles([]), ["production"], vendor="nvidia", versions={}, user_environ={}, nccl_files={name: "/my/file"}
    )
    assert not {setting.variable.name for setting in resolution.settings} & {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    assert [
        (skipped.variable.name, skipped.reason) for skipped in resolution.skipped if skipped.variable.name == name
    ] == [(name, "nccl.conf sets it")]


def test_a_profile_that_the_user_names_wins_over_nccls_files() -> None:
    """As a variable of the environment does."""
    resolution = resolve(
        load_profiles([]),
        ["nccl-debug"],
        vendor="nvidia",
        versions={},
        user_environ={},
        nccl_files={"NCCL_DEBUG": "WARN"},
    )
    assert [s.profile for s in resolution.settings if s.variable.name == "NCCL_DEBUG"] == ["nccl-debug"]


def test_on_amds_gpus_the_files_are_those_of_rccl() -> None:
    resolution = resolve(
        load_profiles([]), ["production"], vendor="amd", versions={}, user_environ={}, nccl_files={"NCCL_DEBUG": "WARN"}
    )
    assert [skipped.reason for skipped in resolution.skipped if skipped.variable.name == "NCCL_DEBUG"] == [
        "rccl.conf sets it"
    ]
