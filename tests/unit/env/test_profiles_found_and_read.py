"""Env profiles: where they are found, what is wrong with one, and what is read of the installed versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from saferun.config import EnvironConfig
from saferun.env.apply import read_versions, resolve_environ
from saferun.env.profiles import default_search_path, load_profiles
from saferun.env.profiles.quoting import nearest
from saferun.errors import UsageError
from tests.unit.env.profile_steps import profiles_of, rendered, resolved, usage_error

REPO = Path(__file__).resolve().parents[3]
NOTHING = "nothing of this name exists"
CONFIG = EnvironConfig(("production",), (), (), (), "none", lint=False)


def profiles_in(home: Path) -> Path:
    """The directory for the user's own profiles."""
    path = home / ".config" / "saferun" / "profiles"
    path.mkdir(parents=True)
    return path


# -------------------------------------------------------------------------------------------------------------- finding


def test_the_nearest_profile_of_a_name_is_taken(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    (near / "a.yaml").write_text("variables: {X: near}", encoding="utf-8")
    (far / "a.yaml").write_text("variables: {X: far}", encoding="utf-8")
    (far / "b.yml").write_text("variables: {Y: far}", encoding="utf-8")
    profiles = load_profiles([str(near), str(far)])
    assert rendered(resolved(profiles, "a", "b")) == {"X": "near", "Y": "far"}
    assert {"a", "b", "production"} <= set(profiles.names())


def test_the_search_path_is_flag_then_directory_then_user(tmp_path: Path) -> None:
    user = tmp_path / "config" / "saferun" / "profiles"
    user.mkdir(parents=True)
    (tmp_path / "saferun.yaml").write_text("profiles: {}\n", encoding="utf-8")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    found = default_search_path(["x.yaml", f"y{os.pathsep}z"], environ, str(tmp_path))
    assert found == ["x.yaml", "y", "z", str(tmp_path / "saferun.yaml"), str(user)]


@pytest.mark.parametrize("environ", [{}, {"XDG_CONFIG_HOME": "relative"}, {"HOME": "relative"}, {"HOME": ""}])
def test_without_a_home_only_what_is_named_is_searched(tmp_path: Path, environ: dict[str, str]) -> None:
    assert default_search_path([], environ, str(tmp_path)) == []


def test_the_home_directory_stands_in_for_a_missing_config_home(tmp_path: Path) -> None:
    user = tmp_path / ".config" / "saferun" / "profiles"
    user.mkdir(parents=True)
    assert default_search_path([], {"HOME": str(tmp_path)}, str(tmp_path)) == [str(user)]


BROKEN = (b"variables: {X", b"\0\xff" * 200_000, b"extends: [nothing", b"extends: nothing")


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_profile_that_was_only_found_gives_way_to_the_one_of_saferun_itself(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full quota cuts files; whoever names no profile gets ``production``, and the launch goes on."""
    user = profiles_in(tmp_path)
    (user / "production.yaml").write_bytes(content)
    (user / "mine.yaml").write_bytes(content)
    (user / "sound.yaml").write_text("variables: {X: 1}", encoding="utf-8")
    environ = {"HOME": str(tmp_path)}
    assert resolve_environ(CONFIG, environ).settings == resolve_environ(CONFIG, {}).settings
    warning = capsys.readouterr().err
    assert warning.startswith("saferun: warning: ")
    assert "production.yaml" in warning
    assert warning.endswith(": the env profiles in the home directory are not used\n")
    sound = resolve_environ(CONFIG._replace(profiles=("sound",)), environ)
    assert [setting.variable.name for setting in sound.settings] == ["X"]
    for named in (
        CONFIG._replace(profiles=("mine",)),  # nothing else has that name
        CONFIG._replace(profile_path=(str(user),)),
    ):
        with pytest.raises(UsageError, match=r"(mine|production)\.yaml"):
            resolve_environ(named, environ)


def test_a_directory_that_was_only_found_and_cannot_be_listed_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user = profiles_in(tmp_path)

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    environ = {"HOME": str(tmp_path)}
    assert resolve_environ(CONFIG, environ).settings == resolve_environ(CONFIG, {}).settings
    unused = "the env profiles in the home directory are not used"
    assert capsys.readouterr().err == f"saferun: warning: {user}: Permission denied: {unused}\n"
    with pytest.raises(UsageError, match="Permission denied"):
        resolve_environ(CONFIG._replace(profile_path=(str(user),)), environ)


@pytest.mark.parametrize(("vendor", "file"), [("nvidia", ".nccl.conf"), ("amd", ".rccl.conf")])
def test_the_library_of_the_hosts_gpus_has_files_of_its_own(
    tmp_path: Path, vendor: Literal["nvidia", "amd"], file: str
) -> None:
    environ = {"HOME": str(tmp_path)}
    for name in (".nccl.conf", ".rccl.conf"):
        (tmp_path / name).write_text("NCCL_DEBUG=INFO\n")
        resolution = resolve_environ(CONFIG._replace(vendor=vendor), environ)
        (tmp_path / name).unlink()
        assert ("NCCL_DEBUG" in {skipped.variable.name for skipped in resolution.skipped}) == (name == file)


def test_a_file_of_settings_may_hold_profiles(tmp_path: Path) -> None:
    settings = tmp_path / "saferun.yaml"
    settings.write_text("nproc_per_node: 2\nprofiles:\n  mine:\n    variables: {X: 1}\n", encoding="utf-8")
    profiles = load_profiles([str(settings)])
    assert "mine" in profiles.names()
    resolution = resolved(profiles, "mine")
    assert rendered(resolution) == {"X": "1"}
    assert resolution.settings[0].origin == f"profile mine ({settings}:4)"


@pytest.mark.parametrize("body", ["", "# nothing\n", "nproc_per_node: 2\n", "profiles:\n"])
def test_a_file_of_settings_need_hold_none(tmp_path: Path, body: str) -> None:
    settings = tmp_path / "saferun.yaml"
    settings.write_text(body, encoding="utf-8")
    assert load_profiles([str(settings)]).names() == load_profiles([]).names()


def test_an_empty_file_is_an_empty_profile(tmp_path: Path) -> None:
    assert rendered(resolved(profiles_of(tmp_path, a="# later\n"), "a")) == {}


def test_a_named_place_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_profiles([str(tmp_path / NOTHING)])
    assert "no env profiles at" in caught.value.what


def test_a_broken_file_nobody_asks_for_stops_nothing(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, good="variables: {X: 1}", broken="variables: [")
    assert rendered(resolved(profiles, "good")) == {"X": "1"}
    assert "broken.yaml:" in usage_error(profiles, "broken").what


# ----------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("body", "what", "hint"),
    [
        ("@descripton: x", "unknown key 'descripton' in profile a", "did you mean description?"),
        ("variables:\n  X:\n    @vlaue: 1", "unknown key 'vlaue' in X", "did you mean value?"),
        ("variables:\n  X: {value: 1, cost: @hevy}", "unknown cost 'hevy'", "did you mean heavy?"),
        ("variables:\n  X: {value: 1, vendor: @NVIDA}", "unknown vendor 'NVIDA'", "did you mean nvidia?"),
        ("variables:\n  X: {value: 1, vendor: @intel}", "unknown vendor 'intel'", "known are nvidia, amd, any"),
        (
            "variables:\n  X: @'{rnak}'",
            "unknown placeholder {rnak}",
            "did you mean rank? The text itself is written {{rnak}}",
        ),
        ("variables:\n  X: @'{qqqq}'", "unknown placeholder {qqqq}", ". The text itself is written {{qqqq}}"),
        ("variables:\n  X: {value: 1, versions: {@troch: '>=2'}}", "no version of 'troch'", "torch?"),
        ("variables:\n  X: {value: 1, versions: {torch: @2.8}}", "'2.8' is no range of versions", ">=2.8"),
        ("variables:\n  X: @~", "no value", "the empty text is ''"),
        ("variables:\n  X: @{why: because}", "X has no value", "value: VALUE"),
        ("variables:\n  X: @[]", "X has an empty list", "leave the variable out"),
        ("variables:\n  X: {value: @[1, 2]}", "a list where a value is needed", "quote it"),
        ("variables: @[X]", "variables: is a list", "NAME: VALUE"),
        ("variables: @text", "variables: is a single value", "NAME: VALUE"),
        ("@- a\n- b", "profile a is a list", "description, extends"),
        ("@text", "profile a is a single value", "description, extends"),
        ("variables:\n  @X=1: 2", "'X=1' cannot be the name of an environment variable", "NAME: VALUE"),
        ("variables:\n  @'X Y': 2", "cannot be the name", "letters, digits"),
        ("variables:\n  @1: 2", "'1' cannot be the name", "no digit first"),
        ("variables:\n  @RANK: 2", "RANK is set by saferun itself", "leave it out"),
        ("variables:\n  @[X]: 2", "a list cannot be a name", "before a colon"),
        ("variables:\n  ? @{a: b}\n  : 2", "a mapping (name: value) cannot be a name", "before a colon"),
        ("variables:\n  @~: 2", "nothing cannot be a name", "before a colon"),
        ("variables:\n  X: 1\n  Y: 2\n  @X: 3", "'X' is here a second time", "it stands in line 2 already"),
        ("extends: @a b", "'a b' cannot be the name of a profile", "at most 64"),
        ("extends: @{a: b}", "a mapping (name: value) where a string is needed", "quote it"),
        ("variables:\n  X: {value: 1, ranks: {@first: 2}}", "'first' names no ranks", "1-7"),
        ("variables:\n  X: {value: 1, ranks: {@7-1: 2}}", "'7-1' names no ranks", "smaller rank first"),
        ("variables:\n  X: {value: 1, ranks: @[0]}", "a list where ranks and their values are needed", "0: VALUE"),
        ("variables:\n  X: {value: 1, force: @maybe}", "'maybe' is neither true nor false", "true or false"),
        ("variables:\n  X: {value: 1, source: @wiki}", "'wiki' is no URL", "https://"),
        ("variables:\n  X: @!forse 1", "unknown tag '!forse'", "!force"),
        ("variables:\n  X: @!!python/object:os.system 1", "unknown tag '!!python/object:os.system'", "!force"),
        ("description: @!force x", "the tag !force belongs before the value", "leave it out"),
        ('description: @"\\e[2J"', "a text with control characters: '\\x1b[2J'", "shown to people"),
        ("variables:\n  X: @!force {value: 1}", "the tag !force cannot stand before X", "before a value"),
        ("variables:\n  @!force X: 1", "the tag !force belongs before a value", "write X: !force VALUE"),
        ("variables:\n  X: @&a 1", "anchors and aliases are not allowed", "write the value out"),
        ("variables:\n  X: @*a", "anchors and aliases are not allowed", "write the value out"),
        ("description: 1\n@---\nb: 2", "a second document begins here", "one in a file"),
    ],
)
def test_an_error_names_file_line_column_fault_and_remedy(tmp_path: Path, body: str, what: str, hint: str) -> None:
    """The at sign marks the place and is not part of the file."""
    before, _, after = body.partition("@")
    location = f"{before.count(chr(10)) + 1}:{len(before.rpartition(chr(10))[2]) + 1}"
    error = usage_error(profiles_of(tmp_path, a=before + after), "a")
    assert error.what.startswith(f"{tmp_path}/a.yaml:{location}: "), error.what
    assert what in error.what
    assert hint in error.hint


@pytest.mark.parametrize("body", ["variables:\n\tX: 1", "variables: {X: 1", "a: b: c", "'a", "%YAML 9", "]"])
def test_what_is_not_yaml_is_told_with_its_line(tmp_path: Path, body: str) -> None:
    error = usage_error(profiles_of(tmp_path, a=body), "a")
    assert re.match(rf"{tmp_path}/a.yaml:[12]:\d+: not YAML: ", error.what)
    assert error.hint == "correct the file at that position"


@pytest.mark.parametrize(("word", "expected"), [("Heavy", "heavy"), ("modrate", "moderate"), ("x", None), ("", None)])
def test_the_nearest_word_is_found_whatever_the_case(word: str, expected: str | None) -> None:
    assert nearest(word, ["none", "light", "moderate", "heavy"]) == expected


# ------------------------------------------------------------------------------------------------------------- versions


def installed(directory: Path, version_py: str, *names: str) -> dict[str, str]:
    (directory / "torch").mkdir()
    (directory / "torch" / "version.py").write_text(version_py, encoding="utf-8")
    for name in names:
        (directory / name).mkdir()
    return read_versions([str(directory / NOTHING), str(directory)])


def test_the_versions_of_a_cuda_build_are_read(tmp_path: Path) -> None:
    text_ = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    found = installed(tmp_path, text_, "nvidia_nccl_cu13-2.29.7.dist-info", "numpy-2.0.dist-info")
    assert found == {"torch": "2.13.0+cu130", "nccl": "2.29.7"}


def test_the_versions_of_a_rocm_build_are_read(tmp_path: Path) -> None:
    text_ = "__version__ = '2.9.1+rocm6.4'\ncuda = None\nhip = '6.4.43484-123f'\n"
    assert installed(tmp_path, text_) == {"torch": "2.9.1+rocm6.4", "rocm": "6.4"}


def test_the_version_of_rocm_itself_is_taken_where_it_is_told(tmp_path: Path) -> None:
    text_ = "__version__ = '2.13.0+rocm7.1'\nhip: Optional[str] = '7.1.25424'\nrocm: Optional[str] = '7.1.1'\n"
    assert installed(tmp_path, text_)["rocm"] == "7.1.1"


def test_without_torch_no_version_is_known(tmp_path: Path) -> None:
    assert read_versions([str(tmp_path)]) == {}


# ------------------------------------------------------------------------------------------------------------- start-up


def test_a_launch_with_built_in_profiles_reads_no_yaml() -> None:
    """Importing yaml and reading one profile takes longer than the rest of a launch's work before the first rank."""
    code = (
        "import sys\n"
        "from saferun.env.profiles import load_profiles, render, resolve\n"
        "r = resolve(load_profiles([]), ['production'], vendor='nvidia', versions={'torch': '2.13'}, user_environ={})\n"
        "e = render(r, host='h', rank=0, local_rank=0, world_size=1, run_dir='/r', rank_dir='/r/0')\n"
        "assert e['TORCH_FR_DUMP_TEMP_FILE'] == '/r/0/flight_recorder_', e\n"
        "slow = {'yaml', 'dataclasses', 'difflib', 'pathlib', 'subprocess', 'torch'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=REPO)
