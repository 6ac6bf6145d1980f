"""One value an option, from the nearest of five places, and a place for every complaint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from saferun.cli.main import read_config
from saferun.cli.options import OPTIONS, Option
from saferun.config import LaunchConfig, Setting
from saferun.env.profiles import default_search_path
from saferun.env.profiles.templates import fill
from saferun.env.profiles.yaml_nodes import MAX_FILE_BYTES
from saferun.errors import SaferunError, UsageError
from tests.unit.operations import operations

ENVIRON = {"PATH": "/usr/bin:/bin"}
SETTABLE = [option for option in OPTIONS if not option.asks and option.dest != "config"]
BY_DEST = {option.dest: option for option in OPTIONS}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("localhost\n")
    monkeypatch.chdir(tmp_path)


def config_of(*arguments: str, environ: Mapping[str, str] | None = None, file: str | None = None) -> LaunchConfig:
    if file is not None:
        Path("saferun.yaml").write_text(file)
    return read_config([*arguments, "train.py"], {**ENVIRON, **(environ or {})})


def refusal(*arguments: str, environ: Mapping[str, str] | None = None, file: str | None = None) -> UsageError:
    """The error, which has to be two lines of print with exit code 2."""
    with pytest.raises(UsageError) as caught:
        config_of(*arguments, environ=environ, file=file)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() and len(line) < 1500 for line in lines)
    return caught.value


class Values(NamedTuple):
    """Four texts that an option accepts, which are not its default, with what each is read as."""

    flag: tuple[str, object]
    own: tuple[str, object]
    pet: tuple[str, object]
    file: tuple[str, object]


def alike(*values: tuple[str, object]) -> Values:
    return Values(*values)


def of_choices(option: Option) -> Values:
    """Where there are few, places have to share a value; the origin still tells them apart."""
    assert option.choices is not None
    others = [choice for choice in option.choices if choice != option.default]
    return Values(*((others[at % len(others)], others[at % len(others)]) for at in range(4)))


# By kind, and by option where the option does not take just any value of its kind.
BY_KIND = {
    "int": alike(("3", 3), ("4", 4), ("5", 5), ("6", 6)),
    "float": alike(("3", 3.0), ("0.5", 0.5), ("5e-1", 0.5), ("6.0", 6.0)),
    "str": alike(("a", "a"), ("b", "b"), ("c", "c"), ("d", "d")),
    "list": alike(("a,b", ["a", "b"]), ("c,,d", ["c,d"]), ("e", ["e"]), ("f,g,,h", ["f", "g,h"])),
    "append": alike(("A", ["A"]), ("B\nC", ["B", "C"]), ("", []), ("D,E", ["D,E"])),
    # A switch that is given is on.
    "flag": alike(("", True), ("off", False), ("0", False), ("on", True)),
}
SPECIAL = {
    "on_hang": alike(("stop", "stop"), ("report", "report"), ("stop", "stop"), ("report", "report")),
    "nnodes": alike(("1", "1"), ("1:1", "1:1"), ("01", "01"), ("1:01", "1:01")),
    "nproc_per_node": alike(("2", "2"), ("3", "3"), ("4", "4"), ("5", "5")),
    "node_rank": alike(("0", 0), ("00", 0), ("-0", 0), ("0", 0)),
    "rdzv_backend": alike(("c10d", "c10d"), ("static", "static"), ("c10d", "c10d"), ("c10d", "c10d")),
    "rdzv_endpoint": alike(("a:1", "a:1"), ("b:2", "b:2"), ("c:3", "c:3"), ("d:4", "d:4")),
    "rdzv_conf": alike(("a=1", "a=1"), ("b=2", "b=2"), ("c=3", "c=3"), ("d=4", "d=4")),
    "scheduler": alike(("none", "none"), ("auto", "auto"), ("none", "none"), ("auto", "auto")),
    "hosts": alike(*((name, name) for name in ("localhost", "127.0.0.1", "[::1]", "localhost"))),
    "hostfile": alike(*((name, name) for name in ("hosts", "./hosts", ".//hosts", "hosts"))),
    "redirects": alike(("1", "1"), ("2", "2"), ("3", "3"), ("0:1", "0:1")),
    "tee": alike(("1", "1"), ("2", "2"), ("3", "3"), ("0:1", "0:1")),
    "local_ranks_filter": alike(("0", "0"), ("1", "1"), ("2", "2"), ("0,1", "0,1")),
    "signals_to_handle": alike(*((name, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"))),
    "attach": alike(("auto", "auto"), ("any", "any"), ("off", "off"), ("3", "3")),
    "metrics_port": alike(*((port, port) for port in ("0", "9400", ":9400", "[::1]:9400"))),
    "keep_output": alike(*((size, size) for size in ("64K", "1M", "2G", "all"))),
    "wrap": alike(("0:a", ["0:a"]), ("0:b\n1:c", ["0:b", "1:c"]), ("", []), ("0,1:d", ["0,1:d"])),
    "env": alike(("A=1", ["A=1"]), ("A=2\nB=3", ["A=2", "B=3"]), ("", []), ("A=4,5", ["A=4,5"])),
}


def values_of(option: Option) -> Values:
    if option.dest in SPECIAL:
        return SPECIAL[option.dest]
    return of_choices(option) if option.choices else BY_KIND[option.kind]


def flag_of(option: Option, text: str) -> Sequence[str]:
    return [option.name] if option.kind == "flag" else [f"{option.name}={text}"]


# --------------------------------------------------------------------------------------------------------------------
# Precedence


@pytest.mark.parametrize("option", SETTABLE, ids=lambda option: option.dest)
def test_the_nearest_place_decides(option: Option) -> None:
    """Flag before SAFERUN_* before PET_* before the file before the default: the nearer the launch, the stronger."""
    values = values_of(option)
    pet = f"PET_{option.dest.upper()}"
    arguments = flag_of(option, values.flag[0])
    environ = {option.variable: values.own[0]} | ({pet: values.pet[0]} if option.pet else {})
    file = f"# settings\n{option.name.removeprefix('--')}: '{values.file[0]}'\n"
    expected = [
        (Setting(values.flag[1], "flag", option.name), arguments, environ),
        (Setting(values.own[1], "environment", option.variable), (), environ),
        (Setting(values.file[1], "file", "saferun.yaml:2"), (), {}),
    ]
    if option.pet:
        expected.insert(2, (Setting(values.pet[1], "environment", pet), (), {pet: values.pet[0]}))
    for setting, given, around in expected:
        if option.dest == "no_python":
            Path("train.py").chmod(0o755)
            around = {**around, "PATH": "."}  # noqa: PLW2901 - the script is a program
        assert config_of(*given, environ=around, file=file).settings[option.dest] == setting
    Path("saferun.yaml").unlink()
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    assert config_of().settings[option.dest] == Setting(default, "default", "")


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.asks], ids=lambda option: option.dest)
def test_questions_stand_on_the_command_line_only(option: Option) -> None:
    """A forgotten file that made every launch start nothing would be a trap."""
    assert config_of(environ={option.variable: "1"}).settings[option.dest].origin == "default"
    assert "there is no setting" in refusal(file=f"{option.name.removeprefix('--')}: on").what
    if option.kind == "flag":
        assert config_of(option.name, file="").settings[option.dest] == Setting(True, "flag", option.name)


def test_what_is_given_by_each_place_reaches_the_launch() -> None:
    """Not the settings alone: what they are for."""
    config = config_of(
        *("--env", "A=1", "--env", "B=2"),
        environ={"SAFERUN_UNSET": "C\n\nD\n", "SAFERUN_ENV_PROFILE": "none,debug", "SAFERUN_LINT": "off"},
        file="nproc-per-node: 2\nmax_restarts: 7\nstandalone: yes\nvendor: amd\nprefix: none\n",
    )
    assert config.environ.env == (("A", "1"), ("B", "2"))
    assert config.environ.unset == ("C", "D")
    assert config.environ.profiles == ("none", "debug")
    assert not config.environ.lint
    assert config.environ.vendor == "amd"
    assert (config.nproc_per_node, config.max_restarts, config.output.prefix) == (2, 7, None)


def test_a_repeated_flag_replaces_what_other_places_give() -> None:
    """Places are not added up: what is on the command line is all there is."""
    environ = {"SAFERUN_ENV": "A=1\nB=2"}
    assert config_of("--env", "C=3", "--env", "D=4", environ=environ).environ.env == (("C", "3"), ("D", "4"))
    assert config_of("--env-profile", "none", file="env-profile: debug").environ.profiles == ("none",)


def test_an_empty_list_is_a_value() -> None:
    """How one launch does without what the file asks for."""
    file = "env-profile: debug\nenv: {A: 1}\n"
    config = config_of(environ={"SAFERUN_ENV_PROFILE": "", "SAFERUN_ENV": ""}, file=file)
    assert config.environ.profiles == ()
    assert config.environ.env == ()
    assert config_of(file="env-profile: []\nunset: []\nenv:\n").environ.profiles == ()


@pytest.mark.parametrize("word", ["1", "true", "True", "YES", "on"])
def test_words_for_on(word: str) -> None:
    """In SAFERUN_* and in the file alike."""
    assert config_of(environ={"SAFERUN_STANDALONE": word}).settings["standalone"].value is True
    assert config_of(file=f"standalone: {word}").settings["standalone"].value is True


# --------------------------------------------------------------------------------------------------------------------
# The file


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("env: {A: 1, B: 'x y'}", (("A", "1"), ("B", "x y"))),
        ("env:\n  A: on\n  B: 010\n  C: ''\n", (("A", "on"), ("B", "010"), ("C", ""))),
        ("env: [A=1, 'B=x=y']", (("A", "1"), ("B", "x=y"))),
        ("env: A=1,B=2", (("A", "1,B=2"),)),
        ("env:", ()),
    ],
)
def test_env_may_be_a_mapping_or_a_list(text: str, env: tuple[tuple[str, str], ...]) -> None:
    """Values stay as they are written: YAML's ideas about on, 010 and 1e3 are not the user's."""
    assert config_of(file=text).environ.env == env


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("[a, 'b,c']", ("a", "b,c")),
        ("a,b", ("a", "b")),
        ("'a,,b'", ("a,b",)),
        ("\n  - a\n  - b", ("a", "b")),
    ],
)
def test_lists_in_the_file(text: str, texts: tuple[str, ...]) -> None:
    """A YAML list as it stands, or the text of the command line."""
    config = config_of("--log-dir", "logs", file=f"duplicate-stdout-filters: {text}\n")
    assert config.logs.duplicate_stdout_filters == texts


def test_a_named_file_takes_the_place_of_the_one_that_lies_here() -> None:
    """By flag before environment; a file that is found is told as the default."""
    Path("a.yaml").write_text("max-restarts: 1")
    Path("b.yaml").write_text("max-restarts: 2")
    file = "max-restarts: 3"
    found = config_of(file=file)
    assert found.settings["config"] == Setting("saferun.yaml", "default", "found in the current directory")
    assert (found.settings_file, found.max_restarts) == ("saferun.yaml", 3)
    by_flag = config_of("--config", "a.yaml", environ={"SAFERUN_CONFIG": "b.yaml"})
    assert by_flag.settings["config"] == Setting("a.yaml", "flag", "--config")
    assert by_flag.settings["max_restarts"] == Setting(1, "file", "a.yaml:1")
    by_variable = config_of(environ={"SAFERUN_CONFIG": "b.yaml"})
    assert by_variable.settings["config"] == Setting("b.yaml", "environment", "SAFERUN_CONFIG")
    assert by_variable.max_restarts == 2


@pytest.mark.parametrize(("arguments", "environ"), [(["--config="], {}), ([], {"SAFERUN_CONFIG": ""})])
def test_an_empty_name_means_no_file(arguments: list[str], environ: dict[str, str]) -> None:
    """How a launch does without the file that lies here."""
    config = config_of(*arguments, environ=environ, file="max-restarts: 3")
    assert (config.settings_file, config.max_restarts) == (None, 0)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~\n", "profiles: {mine: {variables: {X: 1}}}\n"])
def test_a_file_without_settings_sets_nothing(text: str) -> None:
    """One that holds env profiles alone is read by those."""
    config = config_of(file=text)
    assert config.settings_file == "saferun.yaml"
    assert {setting.origin for setting in config.settings.values()} == {"default"}


def test_profiles_of_a_named_file_are_found() -> None:
    """As those of ./saferun.yaml are."""
    Path("team.yaml").write_text("env-profile: mine\nprofiles: {mine: {variables: {X: 1}}}")
    config = config_of("--config", "team.yaml", "--env-profile-path", "more")
    assert config.environ.profile_path == ("more", "team.yaml")
    assert config.settings["env_profile_path"].value == ["more"]
    Path("team.yaml").write_text("env-profile: mine\n")
    assert config_of("--config", "team.yaml").environ.profile_path == ()
    # Searched anyway, but only because it is named if somebody else may write it; twice would be once too often.
    named = config_of("--config", "./saferun.yaml", file="profiles: {mine: {variables: {X: 1}}}").environ.profile_path
    assert named == ("./saferun.yaml",)
    assert default_search_path(named, {}) == ["./saferun.yaml"]


@pytest.mark.parametrize(
    ("text", "place", "word", "hint"),
    [
        ("max-restart: 1", "saferun.yaml:1:1", "'max-restart'", "did you mean max-restarts?"),
        ("a: 1", "saferun.yaml:1:1", "'a'", "see saferun --help-all"),
        ("dry-run: yes", "saferun.yaml:1:1", "--dry-run is only an option of the command line", "on the command line"),
        ("job-secret-file: x", "saferun.yaml:1:1", "'job-secret-file'", "did you mean secret-file?"),
        ("\nMAX_RESTARTS: 1", "saferun.yaml:2:1", "'MAX_RESTARTS'", "did you mean max-restarts?"),
        ("lint: on\nenv_profil: none", "saferun.yaml:2:1", "'env_profil'", "did you mean env-profile?"),
        ("profile: none", "saferun.yaml:1:1", "'profile'", "did you mean profiles?"),
        ("config: other.yaml", "saferun.yaml:1:1", "'config'", "pass --config, or set SAFERUN_CONFIG"),
        ("max-restarts: 1\nlint: on\nmax-restarts: 2", "saferun.yaml:3:1", "'max-restarts'", "line 1"),
        ("max-restarts: 1\nmax_restarts: 2", "saferun.yaml:2:1", "max_restarts", "keep one of the two"),
        ("lint: of", "saferun.yaml:1: ", "'of' is not one of on, off", "did you mean off?"),
        ("vendor: intel", "saferun.yaml:1: ", "'intel' is not one of", "--help"),
        ("lint: on\n\nmax-restarts: many", "saferun.yaml:3: ", "'many' is not a whole number", ""),
        ("max-restarts: 1.5", "saferun.yaml:1: ", "'1.5'", ""),
        ("max-restarts: -1", "saferun.yaml:1: ", "--max-restarts -1 is negative", ""),
        ("monitor-interval: soon", "saferun.yaml:1: ", "'soon' is not a number of seconds", "write it like 300"),
        ("hang-timeout: 5m", "saferun.yaml:1: ", "'5m' is not a number of seconds", "5 minutes are 300"),
        ("standalone: maybe", "saferun.yaml:1: ", "--standalone: 'maybe' is neither on nor off", "write on or off"),
        ("nnodes: 2:1", "saferun.yaml:1: ", "--nnodes 2:1", ""),
        ("nproc-per-node: 0", "saferun.yaml:1: ", "--nproc-per-node 0", ""),
        ("redirects: 7", "saferun.yaml:1: ", "--redirects 7", ""),
        ("env: ['']", "saferun.yaml:1: ", "--env is empty", "--unset"),
        ("env: {A: {B: 1}}", "saferun.yaml:1:10", "a mapping", "write one value"),
        ("env: {A: }", "saferun.yaml:1:10", "nothing", "write one value"),
        ("unset: {A: 1}", "saferun.yaml:1:8", "a mapping", "write one value"),
        ("max-restarts: [1]", "saferun.yaml:1:15", "a list", "write one value"),
        ("max-restarts:", "saferun.yaml:1:14", "nothing", "write one value"),
        ("- max-restarts", "saferun.yaml:1:1", "a list", "begin with an option's name"),
        ("max-restarts 1", "saferun.yaml:1:1", "a single value", "begin with an option's name"),
        ("? [a]\n: 1", "saferun.yaml:1:3", "a list cannot be a name", ""),
        ("lint: on\n  off: x", "saferun.yaml:2:", "not YAML", ""),
        ("lint: !!python/object/apply:os.system [true]", "saferun.yaml:1:7", "unknown tag", ""),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(text: str, place: str, word: str, hint: str) -> None:
    """File, line, what is wrong, and the word that was meant."""
    error = refusal(file=text)
    assert error.what.startswith(place)
    assert word in error.what
    assert hint in error.hint


def bomb() -> bytes:
    """Nine levels of nine aliases: a billion values from half a kilobyte."""
    levels = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    levels += [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    return "\n".join(levels).encode()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (bomb(), "anchors and aliases"),
        (b"\x7fELF\x02\x01\x01\0\0\0" + bytes(range(256)) * 16, ""),
        (b"lint: on\nrole: \xff\xfe\n", "saferun.yaml:2: not text in UTF-8"),
        (b"role: a\x00b\n", "not YAML"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger than"),
        (b"[" * 10_000, "nested"),
        (b"role: \x1b[31mred\n", "not YAML"),
        (b"\x1b[31m: 1\n", "not YAML"),
        (b"a" * 1000 + b": 1", "there is no setting"),
        (b"role: a\n---\nrole: b\n", "second document"),
    ],
    ids=["bomb", "binary", "latin", "nul", "huge", "deep", "escape", "escape in name", "long name", "documents"],
)
def test_hostile_files_are_refused_with_bounded_work(content: bytes, word: str) -> None:
    """It is found in whatever directory the launch happens in."""
    Path("saferun.yaml").write_bytes(content)
    said: list[str] = []
    assert operations(lambda: said.append(refusal().what)) < 500_000
    assert word in said[0]


def test_a_fifo_is_not_waited_for() -> None:
    """Nobody may ever write into it."""
    os.mkfifo("saferun.yaml")
    assert config_of().settings_file is None
    assert "not a regular file" in refusal("--config", "saferun.yaml").what


@pytest.mark.parametrize(
    ("name", "word"),
    [("nowhere.yaml", "No such file"), (".", "not a regular file"), ("/dev/zero", "not a regular file")],
)
def test_a_named_file_has_to_be_one(name: str, word: str) -> None:
    """By flag and by variable: whoever names a file wants it."""
    for error in (refusal("--config", name), refusal(environ={"SAFERUN_CONFIG": name})):
        assert name in error.what
        assert word in error.what


# --------------------------------------------------------------------------------------------------------------------
# The environment


@pytest.mark.parametrize(
    ("variable", "value", "word", "hint"),
    [
        ("SAFERUN_LINT", "of", "SAFERUN_LINT: --lint: 'of' is not one of on, off", "did you mean off?"),
        ("SAFERUN_MAX_RESTARTS", "many", "SAFERUN_MAX_RESTARTS: --max-restarts: 'many'", ""),
        ("SAFERUN_MAX_RESTARTS", "", "SAFERUN_MAX_RESTARTS: --max-restarts: ''", ""),
        ("SAFERUN_MAX_RESTARTS", "-1", "SAFERUN_MAX_RESTARTS: --max-restarts -1", ""),
        ("SAFERUN_MAX_RESTARTS", "9" * 5000, "SAFERUN_MAX_RESTARTS", ""),
        ("SAFERUN_MODULE", "maybe", "SAFERUN_MODULE: --module: 'maybe'", "write on or off"),
        ("SAFERUN_MONITOR_INTERVAL", "nan", "SAFERUN_MONITOR_INTERVAL: --monitor-interval nan", ""),
        ("PET_MAX_RESTARTS", "-1", "PET_MAX_RESTARTS: --max-restarts -1", ""),
    ],
)
def test_what_is_wrong_with_the_environment_names_the_variable(variable: str, value: str, word: str, hint: str) -> None:
    """It was set long ago and far away: the name of the option alone would not lead there."""
    error = refusal(environ={variable: value})
    assert error.what.startswith(word)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("variable", "meant"), [("LNIT", "LINT"), ("MAX_RESTART", "MAX_RESTARTS"), ("PROFILE", "ENV_PROFILE")]
)
def test_a_variable_that_is_nearly_a_setting_is_one_line(
    variable: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip, or a setting of another release: no job of a cluster is refused for what its administrator has set."""
    assert config_of(environ={f"SAFERUN_{variable}": "1"}).max_restarts == 0
    line = f"saferun: SAFERUN_{variable} is ignored: there is no such setting; did you mean SAFERUN_{meant}?\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("variable", "option"),
    [("DRY_RUN", "--dry-run"), ("SHOW_CONFIG", "--show-config"), ("PRINT_COMPLETION", "--print-completion")],
)
def test_a_variable_of_an_option_that_has_none_is_one_line(
    variable: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who sets SAFERUN_DRY_RUN=1 expects that nothing is started. Inherited, it must not keep a job from its start."""
    for value in ("1", "on"):
        assert config_of(environ={f"SAFERUN_{variable}": value}).max_restarts == 0
        line = f"saferun: SAFERUN_{variable} is ignored: {option} is only an option of the command line\n"
        assert capsys.readouterr().err == line
    for value in ("", "0", "off", "False"):
        assert config_of(environ={f"SAFERUN_{variable}": value}).max_restarts == 0
        assert capsys.readouterr().err == ""


def test_a_wrong_value_that_a_nearer_place_replaces_is_none() -> None:
    """A launch can get around what it cannot change."""
    config = config_of("--lint", "on", environ={"SAFERUN_LINT": "of"}, file="lint: on\nmax-restarts: 1")
    assert config.environ.lint
    assert config_of(environ={"SAFERUN_MAX_RESTARTS": "2"}, file="max-restarts: many").max_restarts == 2


@pytest.mark.parametrize(
    "variable",
    [
        *("SAFERUN_SERVICE_HOST", "SAFERUN_SERVICE_PORT", "SAFERUN_PORT", "SAFERUN_PORT_80_TCP_ADDR"),
        *("SAFERUN_RUN_ID", "SAFERUN_OUTER_RUNS", "SAFERUN_VERSION", "SAFERUN_", "saferun_lnit"),
    ],
)
def test_other_variables_of_this_prefix_are_left_alone(variable: str) -> None:
    """Kubernetes names variables after services, and saferun itself tells its ranks something."""
    assert config_of(environ={variable: "x"}).settings == {**config_of().settings}


SERVICE = "tcp://10.0.0.1:29500"


@pytest.mark.parametrize(
    ("service", "port"),
    [("saferun", 80), ("saferun-master", 29500), ("saferun-master-0", 29500), ("saferun-control", 29501)],
)
def test_variables_of_kubernetes_services_are_no_settings(service: str, port: int) -> None:
    """Every container beside a service gets them, also where the service is named like an option."""
    name = service.upper().replace("-", "_")
    each = f"{name}_PORT_{port}_TCP"
    environ = {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_STORE": str(port),
        f"{name}_PORT": SERVICE,
        each: SERVICE,
        f"{each}_PROTO": "tcp",
        f"{each}_PORT": str(port),
        f"{each}_ADDR": "10.0.0.1",
    }
    config = config_of(environ=environ)
    assert config.settings == {**config_of().settings}
    assert config_of(environ={"SAFERUN_MASTER_PORT": "29500"}).settings["master_port"].value == 29500


def test_a_run_within_a_run_keeps_its_files_apart() -> None:
    """A rank is told where its run's files are by the name that --run-dir has in the environment."""
    environ = {"SAFERUN_RUN_DIR": "runs/7"}
    assert config_of(environ=environ).output.run_dir == "runs/7"
    environ["SAFERUN_RUN_ID"] = "0123456789abcdef"
    assert config_of(environ=environ).output.run_dir is None
    assert config_of("--run-dir", "mine", environ=environ).output.run_dir == "mine"


# --------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(("text", "pair"), [("A=", ("A", "")), ("A=b=c", ("A", "b=c")), ("=b", ("", "b"))])
def test_env_is_split_at_the_first_equal_sign(text: str, pair: tuple[str, str]) -> None:
    """Values may hold more of them; an empty name is refused by those who know names."""
    assert config_of("--env", text).environ.env == (pair,)


def test_env_without_a_value_takes_it_from_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``docker run -e NAME`` does. It is the value as it is there: braces in it are no placeholders."""
    value = '{"a": {rank}}'
    config = config_of("--env", "NAME", "--env", "OTHER", environ={"NAME": value})
    ((name, template),) = config.environ.env
    assert (name, fill(template, {"rank": "3"})) == ("NAME", value)
    assert config.settings["env"].value == ["NAME", "OTHER"]
    said = "saferun: --env OTHER: it is not set in this environment, and is left out\n"
    assert capsys.readouterr().err == said


def test_a_secret_on_the_command_line_is_warned_about_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Every user of the host can read it there, as long as the job runs; and in no other place."""
    texts = ("X=ghp_0123456789abcdefghijABCDEFGHIJ", "--env", "LR=1", "--env", "HF_TOKEN=x", "--env", "HF_TOKEN=y")
    config_of("--env", *texts)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == "saferun: everyone on this host can read the value of X, HF_TOKEN in ps; export it, and write --env X"
    )
    config_of("--env", "HF_TOKEN", "--env", "TOKENIZERS_PARALLELISM=false", environ={"HF_TOKEN": "x"})
    config_of(environ={"SAFERUN_ENV": "HF_TOKEN=x"}, file="env: {API_KEY: x}")
    assert capsys.readouterr().err == ""


def test_errors_of_the_command_line_keep_their_form() -> None:
    """Nobody needs to be told where the command line is."""
    error = refusal("--max-restarts", "-1", environ={"SAFERUN_MAX_RESTARTS": "3"}, file="max-restarts: 4")
    assert error.what == "--max-restarts -1 is negative"


def test_exit_codes_stay_with_their_errors() -> None:
    """A switch of torchrun's that is no number ends with 1, as under torchrun."""
    with pytest.raises(SaferunError) as caught:
        config_of(environ={"PET_STANDALONE": "yes"})
    assert caught.value.exit_code == 1
