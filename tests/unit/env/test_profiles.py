"""Env profiles: layering, conditions, values, and what wins over what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.env.profiles import load_profiles, profile_text, templates
from saferun.env.profiles.version_ranges import holds, is_range, numbers_of
from saferun.errors import UsageError
from tests.unit.env.profile_steps import profiles_of, rendered, resolved, usage_error

# ------------------------------------------------------------------------------------------------------------- layering


def test_a_later_profile_wins_over_an_earlier_one(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: 1, ONLY_A: a}", b="variables: {X: 2}")
    assert rendered(resolved(profiles, "a", "b")) == {"X": "2", "ONLY_A": "a"}
    assert rendered(resolved(profiles, "b", "a"))["X"] == "1"


def test_a_profile_comes_after_the_ones_it_extends(tmp_path: Path) -> None:
    profiles = profiles_of(
        tmp_path,
        base="variables: {X: base, Y: base}",
        middle="extends: base\nvariables: {Y: middle}",
        top="extends: [middle]\nvariables: {Z: top}",
    )
    resolution = resolved(profiles, "top")
    assert resolution.profiles == ("base", "middle", "top")
    assert rendered(resolution) == {"X": "base", "Y": "middle", "Z": "top"}


def test_a_profile_that_two_others_extend_is_laid_once(tmp_path: Path) -> None:
    """Laid a second time it would undo what the first of the two changed."""
    profiles = profiles_of(
        tmp_path,
        base="variables: {X: base}",
        a="extends: base\nvariables: {X: a}",
        b="extends: base\nvariables: {Y: b}",
    )
    assert rendered(resolved(profiles, "a", "b")) == {"X": "a", "Y": "b"}


@pytest.mark.parametrize("length", [1, 2, 5, 400])
def test_profiles_that_extend_each_other_are_named(tmp_path: Path, length: int) -> None:
    """The circle may be long: no recursion limit may be met first."""
    for i in range(length):
        (tmp_path / f"p{i}.yaml").write_text(f"extends: p{(i + 1) % length}\n", encoding="utf-8")
    error = usage_error(load_profiles([str(tmp_path)]), "p0")
    assert "p0" in error.what
    assert "extend" in error.what
    assert str(tmp_path) in error.what


def test_a_profile_may_extend_the_one_it_hides(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, production="extends: production\nvariables: {MINE: 1}")
    got = rendered(resolved(profiles, "production", versions={"torch": "2.13.0"}))
    assert got["MINE"] == "1"
    assert got["TORCH_FR_BUFFER_SIZE"] == "2000"


def test_a_profile_takes_variables_of_earlier_profiles_out(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: 1, Y: 1}", b="extends: a\nunset: [X]")
    resolution = resolved(profiles, "b", user={"X": "the user's"})
    assert rendered(resolution) == {"Y": "1"}
    assert resolution.removed == (), "the user's own value stays"


def test_a_forced_removal_takes_the_users_variable_out(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="unset: [!force X]")
    resolution = resolved(profiles, "a", user={"X": "1"})
    assert [removed.name for removed in resolution.removed] == ["X"]
    assert "profile a" in resolution.removed[0].origin


def test_an_unknown_profile_is_answered_with_the_nearest(tmp_path: Path) -> None:
    error = usage_error(load_profiles([str(tmp_path)]), "prodution")
    assert "prodution" in error.what
    assert error.hint == "did you mean production?"


def test_an_unknown_profile_under_extends_is_answered_with_its_place(tmp_path: Path) -> None:
    error = usage_error(profiles_of(tmp_path, a="description: x\nextends: minmal\n"), "a")
    assert f"{tmp_path}/a.yaml:1" in error.what
    assert "did you mean minimal?" in error.hint


# -------------------------------------------------------------------------------------------------- what wins over what


def test_the_users_environment_wins_over_a_profile_and_a_line_says_so(tmp_path: Path) -> None:
    resolution = resolved(profiles_of(tmp_path, a="variables: {X: 1}"), "a", user={"X": "7"})
    assert rendered(resolution) == {}
    (line,) = profile_text.launch_lines(resolution, has_run_dir=True)
    assert line == "X stays as your environment sets it; profile a would set X=1"


def test_nothing_is_said_where_the_user_sets_the_same_value(tmp_path: Path) -> None:
    resolution = resolved(profiles_of(tmp_path, a="variables: {X: 1}"), "a", user={"X": "1"})
    assert profile_text.launch_lines(resolution, has_run_dir=True) == []


def test_an_empty_value_of_the_user_is_a_value(tmp_path: Path) -> None:
    assert rendered(resolved(profiles_of(tmp_path, a="variables: {X: 1}"), "a", user={"X": ""})) == {}


@pytest.mark.parametrize("body", ["variables: {X: !force 1}", "variables: {X: {value: 1, force: true}}"])
def test_a_forced_value_replaces_the_users_and_is_shown(tmp_path: Path, body: str) -> None:
    resolution = resolved(profiles_of(tmp_path, a=body), "a", user={"X": "secret"})
    assert rendered(resolution) == {"X": "1"}
    (line,) = profile_text.launch_lines(resolution, has_run_dir=True)
    assert "replaces X of your environment: X=1" in line
    assert "secret" not in line


def test_the_option_wins_over_all(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: !force 1}")
    resolution = resolved(profiles, "a", user={"X": "2"}, env=[("X", "3"), ("X", "4")], unset=["X"])
    assert rendered(resolution) == {"X": "4"}
    assert resolution.settings[0].origin == "--env"
    assert resolution.removed == ()


def test_unset_takes_a_variable_from_the_profiles_and_from_the_user(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: 1, Y: 1}")
    resolution = resolved(profiles, "a", user={"X": "2", "Z": "3"}, unset=["X", "Y", "Z", "W"])
    assert rendered(resolution) == {}
    assert [(removed.name, removed.origin) for removed in resolution.removed] == [("X", "--unset"), ("Z", "--unset")]


def test_another_name_of_the_same_setting_in_the_users_environment_wins(tmp_path: Path) -> None:
    """The reader heeds only one of two names: the profile's would silently switch off the user's."""
    profiles = profiles_of(tmp_path, a="variables: {NEW: {value: 1, same_as: OLD}}")
    resolution = resolved(profiles, "a", user={"OLD": "7"})
    assert rendered(resolution) == {}
    assert profile_text.launch_lines(resolution, has_run_dir=True) == [
        "OLD stays as your environment sets it; profile a would set NEW=1"
    ]
    assert rendered(resolved(profiles, "a", user={"OLD": "7"}, unset=["OLD"])) == {"NEW": "1"}


def test_another_name_of_the_same_setting_in_a_later_profile_wins(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {NEW: {value: 1, same_as: OLD}}", b="variables: {OLD: 7}")
    assert rendered(resolved(profiles, "a", "b")) == {"OLD": "7"}
    assert rendered(resolved(profiles, "a", env=[("OLD", "7")])) == {"OLD": "7"}


def test_every_origin_is_told(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="# a comment\nvariables:\n  X: 1\n\n  Y:\n    value: 2\n")
    origins = {s.variable.name: s.origin for s in resolved(profiles, "a", env=[("Z", "3")]).settings}
    assert origins == {
        "X": f"profile a ({tmp_path}/a.yaml:3)",
        "Y": f"profile a ({tmp_path}/a.yaml:5)",
        "Z": "--env",
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("A B", "1", "'A B' cannot be the name of an environment variable"),
        ("", "1", "'' cannot be the name"),
        ("1X", "1", "'1X' cannot be the name"),
        ("X", "a\0b", "a NUL character"),
        ("X", "x" * 70_000, "more than 64 KiB"),
        ("X", "{rnak}", "unknown placeholder {rnak}"),
        ("RANK", "3", "RANK is set by saferun itself"),
    ],
)
def test_a_malformed_option_is_refused(tmp_path: Path, name: str, value: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(load_profiles([str(tmp_path)]), "none", env=[(name, value)])
    assert said in caught.value.what
    assert caught.value.hint


def test_the_placeholder_of_an_option_is_filled_in(tmp_path: Path) -> None:
    resolution = resolved(load_profiles([str(tmp_path)]), "none", env=[("X", "{rank_dir}/x of {world_size}")])
    assert rendered(resolution, rank=3) == {"X": "/run/node0/attempt_0/rank_3/x of 8"}


# ----------------------------------------------------------------------------------------------------------- conditions


def test_a_variable_for_another_vendor_is_left_out_and_told(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: {value: 1, vendor: amd}}")
    assert rendered(resolved(profiles, "a", vendor="amd")) == {"X": "1"}
    for vendor in ("nvidia", "any"):
        resolution = resolved(profiles, "a", vendor=vendor)
        assert rendered(resolution) == {}
        assert resolution.skipped[0].reason == "it is for AMD's GPUs"


def test_a_variable_for_another_version_is_left_out_and_told(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: {value: 1, versions: {torch: '>=2.8,<2.11'}}}")
    assert rendered(resolved(profiles, "a", versions={"torch": "2.10.1+cu128"})) == {"X": "1"}
    assert resolved(profiles, "a", versions={"torch": "2.7.1"}).skipped[0].reason == (
        "it is for torch >=2.8,<2.11, and 2.7.1 is installed"
    )
    assert "not known" in resolved(profiles, "a").skipped[0].reason


def test_a_variable_known_to_break_with_a_version_is_left_out_only_with_it(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: {value: 1, breaks_with: {nccl: '==2.14.3'}}}")
    assert rendered(resolved(profiles, "a")) == {"X": "1"}
    assert rendered(resolved(profiles, "a", versions={"nccl": "2.14.4"})) == {"X": "1"}
    assert "known to break with nccl 2.14.3" in resolved(profiles, "a", versions={"nccl": "2.14.3"}).skipped[0].reason


def test_a_variable_that_needs_a_file_waits_for_it(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: {value: 1, needs_file: /opt/agent.so}}")
    assert rendered(resolved(profiles, "a", files=["/opt/agent.so"])) == {"X": "1"}
    assert resolved(profiles, "a").skipped[0].reason == "/opt/agent.so is not here"


def test_of_several_alternatives_the_first_that_fits_is_taken(tmp_path: Path) -> None:
    body = "variables: {X: [{value: n, vendor: nvidia}, {value: a, vendor: amd}, {value: none}]}"
    profiles = profiles_of(tmp_path, a=body)
    assert rendered(resolved(profiles, "a", vendor="nvidia")) == {"X": "n"}
    assert rendered(resolved(profiles, "a", vendor="amd")) == {"X": "a"}
    assert rendered(resolved(profiles, "a")) == {"X": "none"}


def test_a_profile_whose_variable_does_not_fit_leaves_the_earlier_value(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, a="variables: {X: 1}", b="variables: {X: {value: 2, vendor: amd}}")
    assert rendered(resolved(profiles, "a", "b", vendor="nvidia")) == {"X": "1"}


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cu130", ">=2.8", True),
        ("2.13.0", "<2.8", False),
        ("2.10.0", ">=2.9", True),
        ("2.9.1", "<=2.9", True),
        ("2.9.1", ">2.9", False),
        ("2.9.1", "==2.9", True),
        ("2.9.1", "!=2.9", False),
        ("2.9", "==2.9.0", True),
        ("2.15.0a0+git123", ">=2.15", True),
        ("2.8.0rc1", ">=2.8,<2.9", True),
        ("v2.8", ">=2.8", True),
        ("7.1.25424-4179531dcd", ">=7.0", True),
        ("nightly", ">=2.8", False),
        ("", ">=2.8", False),
    ],
)
def test_ranges_compare_numbers_and_not_texts(version: str, wanted: str, expected: bool) -> None:
    assert holds(version, wanted) is expected


@pytest.mark.parametrize("text_", ["", ">=", "2.8", "=2.8", ">=2.8,", ">=x", "~=2.8", ">=2..8", ">=2.8 2.9", "> = 2"])
def test_what_is_no_range_is_told_apart(text_: str) -> None:
    assert not is_range(text_)


VERSION = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(VERSION, VERSION)
def test_the_operators_agree_with_each_other(version: str, bound: str) -> None:
    """Whatever the lengths: each version is on one side of a bound, and the negations are negations."""
    assert holds(version, f"=={bound}") is not holds(version, f"!={bound}")
    assert holds(version, f"<={bound}") is not holds(version, f">{bound}")
    assert holds(version, f">={bound}") is not holds(version, f"<{bound}")
    assert not (holds(version, f"<{bound}") and holds(version, f">{bound}"))


@given(st.text(max_size=80))
def test_any_text_can_be_asked_for_its_version(version: str) -> None:
    found = numbers_of(version)
    assert all(number >= 0 for number in found)


# ----------------------------------------------------------------------------------------------------- values and ranks


def test_a_value_may_differ_by_rank(tmp_path: Path) -> None:
    body = "variables: {X: {value: W, ranks: {0: I, '2-3,5': J}, local_ranks: {1: K}}, Y: {ranks: {0: I}}}"
    resolution = resolved(profiles_of(tmp_path, a=body), "a")
    assert rendered(resolution, rank=0, local_rank=1) == {"X": "I", "Y": "I"}
    assert [rendered(resolution, rank=rank)["X"] for rank in (1, 2, 3, 4, 5)] == ["W", "J", "J", "W", "J"]
    assert rendered(resolution, rank=4, local_rank=1) == {"X": "K"}


def test_placeholders_are_filled_in_for_each_rank(tmp_path: Path) -> None:
    body = "variables: {X: '{host}/{rank}.{local_rank}.{world_size} {run_dir} {rank_dir}'}"
    resolution = resolved(profiles_of(tmp_path, a=body), "a")
    assert rendered(resolution, rank=5, local_rank=1) == {"X": "node0/5.1.8 /run /run/node0/attempt_0/rank_5"}


def test_a_variable_that_needs_the_run_directory_is_left_out_without_one(tmp_path: Path) -> None:
    """A file name with an unfilled placeholder, or beginning with '/', would be worse than none."""
    resolution = resolved(profiles_of(tmp_path, a="variables: {X: '{rank_dir}/x', Y: '{run_dir}', Z: 1}"), "a")
    assert rendered(resolution, run_dir=None) == {"Z": "1"}
    assert profile_text.launch_lines(resolution, has_run_dir=False) == [
        "without a run directory these are left out: X, Y"
    ]
    assert profile_text.launch_lines(resolution, has_run_dir=True) == []


def test_other_braces_stay_as_they_are(tmp_path: Path) -> None:
    """JSON and shell text are values too."""
    body = """variables: {A: '{"a": {"b": 1}}', B: '{{rank}}', C: '${HOME}{', D: '{}{ rank }{1}', E: '{{rank}'}"""
    profiles = profiles_of(tmp_path, a=body.replace("${HOME}", "$ {"))
    got = rendered(resolved(profiles, "a"), rank=3)
    assert got == {"A": '{"a": {"b": 1}}', "B": "{rank}", "C": "$ {{", "D": "{}{ rank }{1}", "E": "{3"}


@given(st.text(alphabet="{}ab ", max_size=30))
def test_a_template_without_placeholders_of_ours_is_kept(template: str) -> None:
    """Braces are never lost, whatever their order, unless they escape a name."""
    if "{{" not in template:
        assert templates.fill(template, {"rank": "3"}) == template


@given(st.text(alphabet="{}ab ", max_size=30))
def test_a_literal_stands_for_the_text_as_it_is(value: str) -> None:
    """A variable's value is nobody's template."""
    template = templates.literal(value)
    assert templates.fields(template) == []
    assert templates.fill(template, {"a": "1", "b": "2"}) == value


@given(st.text(max_size=50).filter(lambda value: "{" not in value), st.text(max_size=20))
def test_what_is_filled_in_is_not_read_again(host: str, tail: str) -> None:
    assert templates.fill("{host}", {"host": host + "{rank}", "rank": "1"}) == host + "{rank}"
    assert templates.fields("{host}{{rank}}" + tail.replace("{", "")) == ["host"]


@pytest.mark.parametrize("written", ["on", "yes", "true", "010", "1.50", "1e3", "2024-01-01", "0x10", "1_000", ".5"])
def test_a_value_is_what_is_written(tmp_path: Path, written: str) -> None:
    """Other readers of YAML make True, 8 and 1.5 of these, and an environment holds texts."""
    assert rendered(resolved(profiles_of(tmp_path, a=f"variables: {{X: {written}}}"), "a")) == {"X": written}
