"""Env profiles in words: at a launch, in a dry run, and from saferunctl env."""

from __future__ import annotations

from pathlib import Path

from saferun.env.profiles import load_profiles, profile_text
from tests.unit.env.profile_steps import profiles_of, resolved

# ------------------------------------------------------------------------------------------------------------- in words


def test_heavy_profiles_warn_in_one_line_each(tmp_path: Path) -> None:
    profiles = profiles_of(
        tmp_path, a="variables: {X: {value: 1, cost: heavy}, Y: {value: 2, cost: heavy}, Z: {value: 3, cost: light}}"
    )
    assert profile_text.launch_lines(resolved(profiles, "a"), has_run_dir=True) == [
        "env profile a makes the job much slower (X=1, Y=2); not for production"
    ]


def test_a_dry_run_shows_every_change_with_its_origin(tmp_path: Path) -> None:
    profiles = profiles_of(
        tmp_path, a="variables:\n  X: {value: 1, cost: light}\n  Y: !force 2\n  Z: 3\n  W: {value: 1, vendor: amd}"
    )
    resolution = resolved(
        profiles, "a", user={"Y": "y", "Z": "z", "V": "v"}, env=[("API_TOKEN", "hunter2")], unset=["V"]
    )
    file = f"{tmp_path}/a.yaml"
    assert profile_text.change_lines(resolution, is_secret=lambda name: "TOKEN" in name) == [
        "API_TOKEN=<redacted>  [--env]",
        f"X=1  [profile a ({file}:2), cost: light]",
        f"Y=2  [profile a ({file}:3), replaces the value of your environment]",
        "V is removed  [--unset]",
        "Z stays as your environment sets it  [profile a would set Z=3]",
        "W is left out  [profile a: it is for AMD's GPUs]",
    ]


def test_a_launch_and_a_dry_run_show_no_secret_of_a_profile(tmp_path: Path) -> None:
    """Each launch would print it, into a log that others may read."""
    shape = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
    body = (
        "variables:\n  API_KEY: {value: hunter2, cost: heavy}\n  A_TOKEN: !force hunter2\n"
        f"  B_TOKEN: {{value: hunter2, ranks: {{0: hunter3}}}}\n  URL: !force https://me:hunter2@host/{shape}\n"
    )
    user = {"A_TOKEN": "mine", "B_TOKEN": "mine", "URL": "mine"}
    resolution = resolved(profiles_of(tmp_path, a=body), "a", user=user)
    lines = profile_text.launch_lines(resolution, has_run_dir=True)
    assert len(lines) == 4
    assert "B_TOKEN stays as your environment sets it; profile a would set B_TOKEN=<redacted>" in lines
    dry_run = profile_text.change_lines(resolution, is_secret=lambda name: "TOKEN" in name or "KEY" in name)
    assert not [line for line in lines if "hunter" in line or shape in line]
    assert not [line for line in dry_run if "hunter" in line and "URL" not in line], "its caller redacts each line"


def test_another_versions_name_is_left_out_without_a_word() -> None:
    resolution = resolved(load_profiles([]), "production", versions={"torch": "2.13.0"})
    lines = profile_text.change_lines(resolution, is_secret=lambda name: "TOKEN" in name)
    assert any(line.startswith("TORCH_FR_BUFFER_SIZE=2000") for line in lines)
    assert not any("TORCH_NCCL_TRACE_BUFFER_SIZE" in line for line in lines)


def test_what_comes_from_a_file_cannot_move_the_cursor(tmp_path: Path) -> None:
    body = 'variables: {X: "\\e[2J\\r\\n"}'
    profiles = profiles_of(tmp_path, a=body)
    resolution = resolved(profiles, "a")
    lines = [
        *profile_text.change_lines(resolution, is_secret=lambda name: "TOKEN" in name),
        *profile_text.show_lines(profiles, "a", vendor="any", versions={}),
        *profile_text.explain_lines(profiles, "X"),
        *profile_text.list_lines(profiles),
    ]
    assert all(char.isprintable() for line in lines for char in line)


def test_list_names_every_profile_with_its_cost(tmp_path: Path) -> None:
    lines = profile_text.list_lines(profiles_of(tmp_path, mine="description: my own\nextends: debug"))
    assert any(line.split()[:2] == ["mine", "heavy"] and line.endswith("my own") for line in lines)
    assert any(line.split()[:2] == ["production", "light"] for line in lines)


def test_show_tells_what_holds_on_this_host_and_what_does_not() -> None:
    lines = profile_text.show_lines(
        load_profiles([]), "blocking", vendor="amd", versions={"torch": "2.13.0", "rocm": "7.1"}
    )
    shown = "\n".join(lines)
    assert "HIP_LAUNCH_BLOCKING=1" in shown.split("not on this host:")[0]
    assert "CUDA_LAUNCH_BLOCKING=1" in shown.split("not on this host:")[1]
    assert "on top of minimal, production" in shown


def test_explain_finds_a_variable_by_its_other_names() -> None:
    lines = profile_text.explain_lines(load_profiles([]), "NCCL_ASYNC_ERROR_HANDLING")
    assert lines[0] == "TORCH_NCCL_ASYNC_ERROR_HANDLING=1"


def test_a_variable_that_no_profile_sets_has_no_lines() -> None:
    assert profile_text.explain_lines(load_profiles([]), "TORCH_FR_BUFER_SIZE") == []
    assert "TORCH_FR_BUFFER_SIZE" in profile_text.variable_names(load_profiles([]))


def test_explain_tells_who_takes_a_variable_out(tmp_path: Path) -> None:
    lines = profile_text.explain_lines(profiles_of(tmp_path, a="unset: X"), "X")
    assert lines == [f"profile a ({tmp_path}/a.yaml:1) removes X"]


def test_diff_shows_what_one_profile_adds_to_another() -> None:
    profiles = load_profiles([])
    assert profile_text.diff_lines(profiles, "production", "nccl-debug", vendor="any", versions={"torch": "2.13"}) == [
        "- NCCL_DEBUG=WARN",
        "+ NCCL_DEBUG=INFO on rank 0, WARN on the others  [cost: light]",
        "- NCCL_DEBUG_FILE='{rank_dir}/nccl.%h.%p.log'",
        "+ NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH",
        "+ TORCH_CPP_LOG_LEVEL=INFO on rank 0 only  [cost: light]",
    ]
    assert "- NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH" in profile_text.diff_lines(
        profiles, "nccl-debug", "production", vendor="any", versions={}
    )
    (same,) = profile_text.diff_lines(profiles, "minimal", "minimal", vendor="any", versions={})
    assert "the same variables" in same
