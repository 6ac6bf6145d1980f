from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.env.lint.findings import VERDICTS, by_severity, one_line, shown
from saferun.env.lint.known_names import HostFacts, PathFact
from saferun.env.lint.rules import MAX_FINDINGS, lint, paths_to_examine
from saferun.env.lint.settings import SETTINGS
from tests.examples import examples
from tests.unit.env.lint_samples import (
    ETH0,
    NOTHING,
    TODAY,
    installed,
    only,
    with_gpus,
)

# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_DEBUG", "DEBUG", "NCCL then logs nothing"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NETWORK", "names NETWORK"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAILS", "torch raises"),
        ("TORCH_CPP_LOG_LEVEL", "DEBUG", "not one of INFO"),
        ("TORCH_SHOW_CPP_STACKTRACES", "true", "torch warns"),
        ("TORCH_SYMBOLIZE_MODE", "Fast", "torch raises"),
        ("TORCH_NCCL_BLOCKING_WAIT", "on", "torch raises"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4", "between 0 and 3"),
        ("TORCH_FR_BUFFER_SIZE", "2k", "is not a number"),
        ("TORCH_FR_BUFFER_SIZE", "-1", "is below 0"),
        ("NCCL_IB_DISABLE", "true", "does not take it for 1"),
        ("NCCL_IB_TIMEOUT", "0", "forever"),
        ("NCCL_IB_TIMEOUT", "32", "forever"),
        ("NCCL_IB_RETRY_CNT", "8", "between 0 and 7"),
        ("NCCL_NTHREADS", "100", "not one of 64"),
        ("NCCL_P2P_LEVEL", "NVLINK", "not one of LOC"),
        ("NCCL_P2P_LEVEL", "nvl", "not one of LOC"),
        ("NCCL_SOCKET_FAMILY", "IPv4", "not one of AF_INET"),
        ("NCCL_SOCKET_IFNAME", "eht0", "did you mean eth0?"),
        ("NCCL_SOCKET_IFNAME", "=eth", "no interface eth ("),
        ("NCCL_SOCKET_IFNAME", "bond,ens", "starting with bond, ens"),
        ("GLOO_SOCKET_IFNAME", "eht0", "did you mean eth0?"),
        ("GLOO_SOCKET_IFNAME", "eth", "names an interface"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", "eth7"),
        ("GLOO_SOCKET_IFNAME", "^docker0", "only NCCL understands"),
        ("NCCL_IB_HCA", "=mlx5_7:1", "InfiniBand device"),
        ("CUDA_VISIBLE_DEVICES", "0,4", "this host has 4"),
        ("CUDA_VISIBLE_DEVICES", "0,0", "twice"),
        ("CUDA_VISIBLE_DEVICES", "cuda:0", "neither an index nor a UUID"),
        ("CUDA_VISIBLE_DEVICES", "0,,1", "empty item"),
        ("CUDA_DEVICE_ORDER", "PCI", "not one of FASTEST_FIRST"),
        ("OMP_NUM_THREADS", "0", "is below 1"),
        ("OMP_NUM_THREADS", "auto", "is not a number"),
        ("NCCL_DEBUG_FILE", "~/nccl.log", "not expanded"),
    ],
)
def test_a_value_that_cannot_be_meant_is_told_with_what_becomes_of_it(name: str, value: str, said: str) -> None:
    known = with_gpus(name)
    finding = next(found for found in lint({name: value}, known, ETH0) if found.verdict == "bad value")
    assert finding.variable == name
    assert said in one_line(finding)
    assert finding.at_launch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "info"),
        ("NCCL_DEBUG_SUBSYS", "^INIT,coll"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ("TORCH_CPP_LOG_LEVEL", "0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "No"),
        ("NCCL_IB_DISABLE", "0x1"),
        ("NCCL_CUMEM_ENABLE", "-2"),
        ("NCCL_P2P_LEVEL", "4"),
        ("NCCL_P2P_LEVEL", "C2C"),
        ("NCCL_NET_GDR_LEVEL", "NVB"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo"),
        ("NCCL_SOCKET_IFNAME", "^=docker0"),
        ("NCCL_SOCKET_IFNAME", "ens,eth"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_9:1"),
        ("NCCL_IB_HCA", "mlx5"),
        ("NCCL_IB_HCA", "^mlx5_3"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "3, 0"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("CUDA_VISIBLE_DEVICES", "MIG-GPU-8932f937/1/0"),
        ("OMP_NUM_THREADS", "4,2"),
        ("NCCL_IB_TIMEOUT", "22"),
        ("NCCL_SOCKET_IFNAME", "eth0:0"),
        ("NCCL_SOCKET_IFNAME", "=eth0:0"),
        ("TORCH_HOME", "~/models"),
    ],
)
def test_values_that_the_manuals_allow_are_no_bad_values(name: str, value: str) -> None:
    assert [found for found in lint({name: value}, with_gpus(name), ETH0) if found.verdict == "bad value"] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "eht0"),
        ("GLOO_SOCKET_IFNAME", "eht0"),
        ("CUDA_VISIBLE_DEVICES", "9"),
        ("NCCL_IB_HCA", "x"),
    ],
)
def test_what_the_host_has_is_not_judged_where_it_is_not_known(name: str, value: str) -> None:
    assert lint({name: value}, with_gpus(name), HostFacts()) == ()


def test_paths_are_judged_by_what_was_found_there() -> None:
    environ = {
        "NCCL_TOPO_FILE": "/etc/topo.xml",
        "NCCL_DEBUG_FILE": "/logs/nccl.%h.%p",
        "TORCH_FR_DUMP_TEMP_FILE": "/nowhere/dump_",
        "TORCHINDUCTOR_CACHE_DIR": "/cache",
    }
    assert set(paths_to_examine(environ)) == {"/etc/topo.xml", "/logs", "/nowhere", "/cache"}
    missing = PathFact(exists=False, is_directory=False, may_be_made=False)
    findings = lint(environ, with_gpus(*environ), HostFacts(paths=dict.fromkeys(paths_to_examine(environ), missing)))
    assert {found.variable for found in findings if found.verdict == "bad value"} == set(environ)
    fine = {
        path: PathFact(exists=True, is_directory=path != "/etc/topo.xml", may_be_made=True)
        for path in paths_to_examine(environ)
    }
    findings = lint(environ, with_gpus(*environ), HostFacts(paths=fine))
    assert [found for found in findings if found.verdict == "bad value"] == []


@pytest.mark.parametrize(
    ("exists", "is_directory", "may_be_made", "said"),
    [
        (True, True, False, ""),  # weights that all users share
        (True, True, True, ""),
        (False, False, True, ""),
        (True, False, True, "is a file, not a directory; torch.hub cannot keep models there"),
        (False, False, False, "names a path that cannot be made or written to; torch.hub cannot keep models there"),
    ],
)
def test_a_directory_of_models_need_not_be_written_to(
    said: str, *, exists: bool, is_directory: bool, may_be_made: bool
) -> None:
    environ = {"TORCH_HOME": "/models"}
    (path,) = paths_to_examine(environ)
    host = HostFacts(paths={path: PathFact(exists, is_directory, may_be_made)})
    assert [found.sentence for found in lint(environ, with_gpus("TORCH_HOME"), host)] == ([said] if said else [])


# --------------------------------------------------------------------------------- contradictions and known problems


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2,3"}, "CUDA_VISIBLE_DEVICES names other devices"),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5"}, "leaves 2"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "no watchdog"),
        ({"NCCL_BLOCKING_WAIT": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"}, "no watchdog"),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"}, "nothing to dump"),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}, "which is off"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:2"}, "PYTORCH_CUDA_ALLOC_CONF wins"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT wins"),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "128"),
    ],
)
def test_variables_that_contradict_each_other_are_told(environ: dict[str, str], said: str) -> None:
    found = [
        finding for finding in lint(environ, with_gpus(*environ), HostFacts()) if finding.verdict == "contradiction"
    ]
    assert len(found) == 1
    assert said in found[0].sentence
    assert found[0].at_launch


@pytest.mark.parametrize(
    ("vendor", "names", "winner"),
    [
        ("amd", ("HIP_", ""), "PYTORCH_HIP_ALLOC_CONF"),
        ("nvidia", ("HIP_", ""), "PYTORCH_ALLOC_CONF"),
        (None, ("HIP_", ""), "PYTORCH_ALLOC_CONF"),
        ("amd", ("CUDA_", ""), "PYTORCH_CUDA_ALLOC_CONF"),
        ("amd", ("CUDA_", "HIP_", ""), "PYTORCH_CUDA_ALLOC_CONF"),
        ("nvidia", ("CUDA_", "HIP_", ""), "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_which_settings_of_the_allocator_torch_takes(vendor: str | None, names: tuple[str, ...], winner: str) -> None:
    """As CUDAAllocatorConfig.h asks for them; the name of HIP only in a torch for AMD's GPUs."""
    environ = {f"PYTORCH_{name}ALLOC_CONF": f"a:{number}" for number, name in enumerate(names)}
    findings = lint(environ, with_gpus(*environ), HostFacts(vendor=vendor))
    told = [found for found in findings if found.verdict == "contradiction"]
    assert len(told) == len(names) - 1
    assert all(found.sentence.endswith(f"; {winner} wins") for found in told)


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0, 1"},
        {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"},
        {"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_ENABLE_MONITORING": "1"},
        {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:1"},
        {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    ],
)
def test_variables_that_go_together_are_no_contradiction(environ: dict[str, str]) -> None:
    found = lint(environ, with_gpus(*environ), HostFacts())
    assert [finding for finding in found if finding.verdict == "contradiction"] == []


@pytest.mark.parametrize(
    ("nccl", "hangs"), [((2, 14, 3), True), ((2, 12, 12), False), ((2, 27, 3), False), (None, False)]
)
def test_blocking_launches_are_known_to_hang_with_some_releases_of_nccl(
    nccl: tuple[int, ...] | None, hangs: bool
) -> None:
    versions = {"nccl": nccl} if nccl else {}
    findings = lint({"CUDA_LAUNCH_BLOCKING": "1"}, with_gpus("CUDA_LAUNCH_BLOCKING", versions=versions), HostFacts())
    told = [found for found in findings if found.verdict == "known problem" and found.at_launch]
    assert bool(told) == hangs
    assert all("2.14.3" in found.sentence and "750" in found.source for found in told)


def test_a_version_that_the_host_knows_better_wins() -> None:
    known = with_gpus("CUDA_LAUNCH_BLOCKING", versions={"nccl": (2, 27)})
    findings = lint({"CUDA_LAUNCH_BLOCKING": "1"}, known, HostFacts(versions={"nccl": (2, 14, 3)}))
    assert any(found.verdict == "known problem" and found.at_launch for found in findings)


def test_a_log_level_that_the_installed_release_does_not_know_is_told() -> None:
    old, new = (
        with_gpus("NCCL_DEBUG", versions={"nccl": (2, 27, 3)}),
        with_gpus("NCCL_DEBUG", versions={"nccl": (2, 32)}),
    )
    assert "does not know ATTN" in only(lint({"NCCL_DEBUG": "ATTN"}, old, HostFacts()), "NCCL_DEBUG").sentence
    assert lint({"NCCL_DEBUG": "ATTN"}, new, HostFacts()) == ()


def test_blocking_launches_have_another_name_on_amd() -> None:
    """There, too, torch reads CUDA_LAUNCH_BLOCKING, but only to word an error."""
    known = installed("CUDA_LAUNCH_BLOCKING", owners={"HIP": ("libamdhip64.so.6",)})
    findings = lint({"CUDA_LAUNCH_BLOCKING": "1"}, known, HostFacts(vendor="amd"))
    assert any(found.verdict == "misconception" and "HIP_LAUNCH_BLOCKING" in found.hint for found in findings)
    both = lint({"CUDA_LAUNCH_BLOCKING": "1", "HIP_LAUNCH_BLOCKING": "1"}, known, HostFacts(vendor="amd"))
    assert not any(found.verdict == "misconception" for found in both)


def test_slow_settings_are_for_those_who_ask() -> None:
    """Who sets TORCH_DISTRIBUTED_DEBUG=DETAIL knows why; the cost is told where profiles are shown."""
    finding = only(lint({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, TODAY, HostFacts()), "TORCH_DISTRIBUTED_DEBUG")
    assert (finding.verdict, finding.at_launch) == ("known problem", False)


# ------------------------------------------------------------------------------------------------------------ output


def test_the_worst_comes_first() -> None:
    environ = {"TORCH_FLUX": "1", "NCCL_TIMEOUT": "1", "TORCH_DISTRIBUTED_DEBUG": "X", "UCX_TLS": "tcp"}
    findings = lint(environ, TODAY, HostFacts())
    assert [VERDICTS.index(found.verdict) for found in findings] == sorted(VERDICTS.index(f.verdict) for f in findings)
    assert list(findings) == sorted(findings, key=by_severity)
    assert [found.verdict for found in findings] == ["bad value", "misconception", "unknown name", "uncertain"]


@pytest.mark.parametrize("name", ["NCCL_PSK", "TORCH_HUB_TOKEN", "TORCH_API_KEY", "CUDA_LICENSE_SECRET", "FI_PASSWORD"])
def test_a_secret_is_never_shown(name: str) -> None:
    findings = lint({name: "hunter2" * 9}, TODAY, HostFacts())
    assert "hunter2" not in "".join(one_line(found) + found.source for found in findings)
    assert shown(name, "hunter2") == "<redacted>"


def test_a_password_in_an_address_is_never_shown() -> None:
    assert "hunter2" not in shown("TORCH_URL", "https://me:hunter2@example.org/x")


@given(st.text(max_size=300))
@examples(200)
def test_a_value_is_shown_on_one_printable_line_of_bounded_length(value: str) -> None:
    assert shown("TORCH_FLUX", value).isprintable()
    assert len(shown("TORCH_FLUX", value)) <= 80


HOSTILE_VALUES = (
    "x" * 10_000_000,
    "\x1b[2J\n\r\0",
    "\udcff\udc80" * 1000,
    ",".join(map(str, range(200_000))),
    "%h" * 5000,
    "=" * 99,
)


@pytest.mark.parametrize("value", HOSTILE_VALUES)
def test_hostile_values_are_looked_at_within_bounds(value: str) -> None:
    """An environment may hold anything: 10 MB, escape sequences, bytes that are no text, lists without end."""
    known = with_gpus(*SETTINGS)
    for finding in lint(dict.fromkeys(SETTINGS, value), known, ETH0):
        assert one_line(finding).isprintable()
        assert len(one_line(finding)) < 800
    paths_to_examine(dict.fromkeys(SETTINGS, value))


def test_an_environment_of_10000_variables_is_linted_within_bounds() -> None:
    environ = {f"TORCH_KNOB_{number:05}_DEBUG": "1" for number in range(10_000)}
    environ["NCCL_" + "X" * 100_000] = "1"
    environ["TORCH_\udcff"] = "1"
    findings = lint(environ, TODAY, HostFacts())
    assert len(findings) == MAX_FINDINGS
    assert all(one_line(found).isprintable() for found in findings)


@given(
    st.dictionaries(st.text(string.ascii_uppercase + "_", max_size=30).map(lambda n: "NCCL_" + n), st.text(max_size=60))
)
@examples(100)
def test_no_environment_makes_the_lint_fail(environ: dict[str, str]) -> None:
    for known in (TODAY, NOTHING):
        for finding in lint(environ, known, ETH0):
            assert finding.variable in environ
            assert "\n" not in one_line(finding)
