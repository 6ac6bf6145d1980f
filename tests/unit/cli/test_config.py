"""Command lines and environments, and what saferun makes of them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from saferun.cli.main import read_config
from saferun.cli.options import OPTIONS, SAFERUN_OPTIONS, TORCHRUN_OPTIONS, comma_separated_list
from saferun.cluster.placement.rank_count import count_ranks
from saferun.config import ChecksConfig, HostsConfig, LaunchConfig, Origin, OutputConfig, RetryConfig
from saferun.errors import UsageError
from saferun.linux import gpus

ENVIRON = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def config_of(*arguments: str, environ: dict[str, str] | None = None) -> LaunchConfig:
    return read_config([*arguments, "train.py"], {**ENVIRON, **(environ or {})})


# --------------------------------------------------------------------------------------------------------------------
# Values


def test_without_options_there_is_one_rank_on_a_free_port() -> None:
    """As torchrun has it: a random name, this host's own address, any port."""
    config = config_of()
    assert config.nproc_per_node == 1
    assert config.role == "default"
    assert config.command.argv == (sys.executable, "-u", "train.py")
    rendezvous = config.rendezvous
    assert (rendezvous.backend, rendezvous.master_addr, rendezvous.master_port) == ("c10d", None, None)
    assert uuid.UUID(rendezvous.run_id).version == 4
    assert rendezvous.agent_store
    assert config.max_restarts == 0
    assert config.shutdown_timeout_s == 30.0
    assert config.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert config.output.keep_files
    assert config.output.run_dir is None
    assert config.output.prefix == "[{host}:{rank}] "
    assert (config.output.pty, config.output.color) == ("auto", "auto")
    assert (config.logs.redirects, config.logs.tee) == ((0,), (0,))
    assert config.argv == ("train.py",)


def test_without_options_the_settings_are_the_defaults_of_their_values() -> None:
    """Each default stands in one place: what a test or the doctor leaves out is what a launch without options has."""
    config = config_of()
    assert (config.hosts, config.checks, config.retry) == (HostsConfig(), ChecksConfig(), RetryConfig())
    output = OutputConfig(None, keep_files=True, prefix=None, legacy_template=None, pty="auto", color="auto", fold=True)
    assert config.output._replace(prefix=None) == output
    for name in ("wraps", "leftovers", "leftovers_timeout_s", "secret_file", "sign_messages"):
        assert getattr(config, name) == LaunchConfig._field_defaults[name]


@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        (["train.py", "--lr", "0.1"], (sys.executable, "-u", "train.py", "--lr", "0.1")),
        (["-m", "pack.age", "-x"], (sys.executable, "-u", "-m", "pack.age", "-x")),
        (["--no-python", "sh", "-c", "true"], ("sh", "-c", "true")),
        (["--no-python", "/bin/sh"], ("/bin/sh",)),
        (["run_$local_rank.py"], (sys.executable, "-u", "run_$local_rank.py")),
        (["-"], (sys.executable, "-u", "-")),
        (["train.py", "--", "--nnodes", "7"], (sys.executable, "-u", "train.py", "--nnodes", "7")),
    ],
)
def test_what_each_rank_runs(arguments: list[str], argv: tuple[str, ...]) -> None:
    """Everything behind the script is the script's."""
    config = read_config(arguments, ENVIRON)
    assert config.command.argv == argv
    assert not config.command.run_path
    assert config.argv == tuple(arguments)


def test_run_path_wins_over_no_python() -> None:
    """As under torchrun."""
    config = config_of("--run-path", "--no-python")
    assert config.command.run_path
    assert config.command.argv == ("train.py",)


def test_a_script_that_can_be_opened_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever access(2) says of it: on some file servers it is stricter than open."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert config_of().command.name == "train.py"
    os.mkfifo(tmp_path / "pipe.py")  # what is in there is the rank's: it is not opened
    with pytest.raises(UsageError, match="permission denied"):
        read_config(["pipe.py"], ENVIRON)
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(UsageError, match="permission denied"):
        config_of()


def test_a_directory_may_have_compiled_code_only(tmp_path: Path) -> None:
    """Python runs it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.pyc").write_bytes(b"")
    assert read_config(["app"], ENVIRON).command.name == "app"


def test_another_python_may_be_named(tmp_path: Path) -> None:
    """PYTHON_EXEC, as under torchrun; it has to be there."""
    assert config_of(environ={"PYTHON_EXEC": sys.executable}).command.argv[0] == sys.executable
    with pytest.raises(UsageError, match="no-such-python"):
        config_of(environ={"PYTHON_EXEC": str(tmp_path / "no-such-python")})


def test_another_python_may_find_its_script_elsewhere(tmp_path: Path) -> None:
    """A wrapper may go into a container, or to another directory, before it reads the script."""
    wrapper = tmp_path / "python.sh"
    wrapper.write_text("#!/bin/sh\n")
    wrapper.chmod(0o755)
    environ = {**ENVIRON, "PYTHON_EXEC": str(wrapper)}
    assert read_config(["/only/there/train.py"], environ).command.argv == (str(wrapper), "-u", "/only/there/train.py")
    with pytest.raises(UsageError, match=r"there is no script /only/there/train\.py"):
        read_config(["/only/there/train.py"], ENVIRON)


def test_options_of_the_interpreter_may_stand_for_the_script() -> None:
    """Torchrun puts whatever it is behind ``python -u``."""
    command = read_config(["--", "-W", "ignore", "train.py", "a"], ENVIRON).command
    assert command.argv[1:] == ("-u", "-W", "ignore", "train.py", "a")


def test_the_launcher_s_own_torch_counts_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun. PYTHON_EXEC may have no torch, or be no Python at all."""
    asked: list[str] = []

    def count(value: str, python: str, environ: object, *_: object) -> int:
        asked.append(python)
        return len(value) + bool(environ)

    monkeypatch.setattr(gpus, "resolve_nproc_per_node", count)
    assert count_ranks("auto", {"PYTHON_EXEC": "/of/the/ranks/python"}) == 5
    assert asked == [sys.executable]


def test_while_torch_counts_devices_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is imported for that, perhaps from a file system that does not answer."""

    def count(_value: str, _python: str, _environ: object, on_wait: Callable[[float], None]) -> int:
        on_wait(60.0)
        on_wait(120.2)
        return 8

    monkeypatch.setattr(gpus, "resolve_nproc_per_node", count)
    assert count_ranks("gpu", {}) == 8
    first, hint, second = capsys.readouterr().err.splitlines()
    assert first == "saferun: waiting for torch to report how many ranks --nproc-per-node gpu means (60 s)"
    assert hint.startswith("hint: see whether `")
    assert second == first.replace("60", "120")


@pytest.mark.parametrize(
    ("arguments", "backend", "address", "port"),
    [
        (["--master-port", "29500"], "static", "127.0.0.1", 29500),
        (["--master-port=0", "--master-addr=node0"], "static", "node0", 0),
        (["--rdzv-endpoint", "node0:1234"], "static", "node0", 1234),
        (["--rdzv-endpoint", "[::1]:1234"], "static", "::1", 1234),
        (["--master-port", "1", "--master-addr", "[::1]"], "static", "::1", 1),
        (["--standalone", "--master-port", "29500"], "c10d", None, None),
        (["--rdzv-backend", "c10d"], "c10d", None, None),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400"], "c10d", None, None),
    ],
)
def test_where_the_ranks_meet(arguments: list[str], backend: str, address: str | None, port: int | None) -> None:
    """With c10d the ranks' port is never the endpoint's; static takes what is given."""
    rendezvous = config_of(*arguments).rendezvous
    assert (rendezvous.backend, rendezvous.master_addr, rendezvous.master_port) == (backend, address, port)


def test_the_name_of_the_job() -> None:
    """Given for static and c10d; for one host on a free port it is always random, as under torchrun."""
    assert config_of("--rdzv-id", "job7", "--master-port", "1").rendezvous.run_id == "job7"
    assert config_of("--rdzv-id", "job7", "--rdzv-backend", "c10d").rendezvous.run_id == "job7"
    assert config_of("--rdzv-id", "job7").rendezvous.run_id != "job7"
    assert config_of("--standalone").rendezvous.run_id != config_of("--standalone").rendezvous.run_id
    # --rdzv-id $SLURM_JOB_ID where there is no Slurm: a number, as under torchrun.
    for arguments in (
        ["--rdzv-backend", "c10d"],
        ["--master-port", "1"],
        ["--nnodes", "1:2", "--rdzv-backend", "c10d"],
    ):
        assert config_of("--rdzv-id", "", *arguments).rendezvous.run_id.isdigit()


def test_what_torchrun_ignores_is_no_error() -> None:
    """Scripts write --node-rank ${SLURM_NODEID:--1}, and an address that leads to this host by a detour."""
    for arguments in ([], ["--rdzv-backend", "c10d"], ["--nnodes", "2", "--rdzv-backend", "c10d"], ["--standalone"]):
        assert config_of("--node-rank", "-1", *arguments).hosts.node_rank in {0, None}
    elsewhere = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1:29400", "--rdzv-conf", "is_host=1")
    assert not config_of(*elsewhere).hosts.spans_hosts


@pytest.mark.parametrize(
    ("arguments", "is_default"),
    [
        ([], True),
        (["--rdzv-id", "none"], True),
        (["--rdzv-id", "job7"], False),
        (["--master-port", "29501"], False),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0"], False),
    ],
)
def test_several_hosts_without_a_port_or_an_id_have_the_address_of_any_job(
    arguments: list[str], *, is_default: bool
) -> None:
    """What torchrun has as defaults, as those of the options are."""
    several = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", *arguments]
    assert config_of(*several).rendezvous.has_default_address == is_default


def test_the_store_may_be_left_to_rank_0() -> None:
    """TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, with c10d on one host only: of several, the first serves one."""
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert not config_of(environ=environ).rendezvous.agent_store
    assert config_of("--master-port", "1", environ=environ).rendezvous.agent_store
    assert config_of("--nnodes", "2", "--rdzv-backend", "c10d", environ=environ).rendezvous.agent_store


@pytest.mark.parametrize(
    ("text", "masks"),
    [
        ("0", (0, 0, 0)),
        ("3", (3, 3, 3)),
        ("0:1", (1, 0, 0)),
        ("0:1,2:3", (1, 0, 3)),
        ("1:2,1:1", (0, 1, 0)),
        ("7:3", (0, 0, 0)),
        ("3\n", (3, 3, 3)),
        ("0:1\n", (1, 0, 0)),
    ],
)
def test_masks_of_streams(text: str, masks: tuple[int, ...]) -> None:
    """For all local ranks, or for some; ranks that do not exist are left out."""
    logs = config_of("--nproc-per-node=3", "-r", text, "-t", text).logs
    assert logs.redirects == logs.tee == masks


def test_options_about_logs() -> None:
    """The filters are texts, in which two commas stand for one."""
    logs = config_of(
        *("--log-dir", "logs", "--local-ranks-filter", "0,2", "--logs-specs", "mine"),
        *("--duplicate-stdout-filters", "a,b,,c", "--duplicate-stderr-filters", "d"),
    ).logs
    assert logs.log_dir == "logs"
    assert logs.local_ranks_filter == {0, 2}
    assert logs.duplicate_stdout_filters == ("a", "b,c")
    assert logs.duplicate_stderr_filters == ("d",)
    assert logs.logs_specs == "mine"
    assert config_of("--log-dir", "").logs.log_dir is None


@pytest.mark.parametrize(
    ("text", "items"), [("a", ["a"]), ("a,b", ["a", "b"]), ("a,,b", ["a,b"]), ("a,,,b", ["a,", "b"]), ("", [""])]
)
def test_lists_are_separated_by_commas(text: str, items: list[str]) -> None:
    """As torchrun reads them."""
    assert comma_separated_list(text) == items


def test_options_about_output() -> None:
    """Saferun's own."""
    output = config_of("--run-dir", "runs/7", "--prefix", "{rank}|", "--pty", "on", "--color", "never").output
    assert (output.run_dir, output.keep_files, output.prefix) == ("runs/7", True, "{rank}|")
    assert (output.pty, output.color) == ("on", "never")
    output = config_of("--run-dir", "none", "--prefix", "none").output
    assert (output.run_dir, output.keep_files, output.prefix) == (None, False, None)


def test_torchruns_prefix_template_is_taken_where_saferuns_is_not_given() -> None:
    """A job that has set it wants it."""
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}:"}
    output = config_of(environ=environ).output
    assert (output.prefix, output.legacy_template) == (None, "${rank}:")
    output = config_of("--prefix", "{rank} ", environ=environ).output
    assert (output.prefix, output.legacy_template) == ("{rank} ", None)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (("--log-line-prefix-template", "${rank}:"), {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a"}, "${rank}:"),
        ((), {"PET_LOG_LINE_PREFIX_TEMPLATE": "b", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a"}, "b"),
        (("--log_line_prefix_template", ""), {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a"}, "a"),
        (("--log-line-prefix-template", "c"), {"SAFERUN_PREFIX": "{rank}"}, "c"),
        ((), {"PET_LOG_LINE_PREFIX_TEMPLATE": "b", "SAFERUN_PREFIX": "{rank}"}, None),
        (("--log-line-prefix-template", "c", "--prefix", "{rank}"), {}, None),
        ((), {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}, None),
    ],
)
def test_torchruns_prefix_template_is_an_option_too(
    arguments: tuple[str, ...], environ: dict[str, str], expected: str | None
) -> None:
    """It wins over the variable, as under torchrun; saferun's own prefix wins unless the template stands nearer."""
    output = config_of(*arguments, environ=environ).output
    assert (output.prefix is None, output.legacy_template) == (expected is not None, expected)


def test_a_completion_script_is_printed_where_shtab_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No script need be given, and nothing is started."""
    shtab = types.ModuleType("shtab")
    shtab.complete = lambda parser, shell: f"{shell} for {parser.prog}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shtab", shtab)
    with pytest.raises(SystemExit) as ended:
        read_config(["--print-completion", "zsh"], ENVIRON)
    assert (ended.value.code, capsys.readouterr().out) == (0, "zsh for saferun\n")


def test_without_shtab_there_is_no_completion_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, as under torchrun, and what to install."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        read_config(["--print_completion", "bash"], ENVIRON)
    assert ended.value.code == 1
    assert "pip install shtab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environ", "seconds"),
    [
        ([], {}, 30.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 5.0),
        (["--shutdown-timeout", "7"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 7.0),
        (["--shutdown-timeout", "0"], {}, 0.0),
        (["--shutdown-timeout", "7"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, 7.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "-5"}, 0.0),
    ],
)
def test_the_grace(arguments: list[str], environ: dict[str, str], seconds: float) -> None:
    """From the option, else from torch's variable, else 30 s."""
    assert config_of(*arguments, environ=environ).shutdown_timeout_s == seconds


def test_unknown_signals_are_left_out_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """As under torchrun, which warns only."""
    config = config_of("--signals-to-handle", "SIGTERM,SIGNOPE, SIGUSR1,signal,SIG_IGN")
    assert config.signals == (signal.SIGTERM, signal.SIGUSR1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("saferun: --signals-to-handle: ") for line in lines)


# --------------------------------------------------------------------------------------------------------------------
# Origins


@pytest.mark.parametrize(
    ("arguments", "environ", "value", "origin"),
    [
        ([], {}, 0, "default"),
        ([], {"PET_MAX_RESTARTS": "3"}, 3, "environment"),
        (["--max-restarts", "4"], {"PET_MAX_RESTARTS": "3"}, 4, "flag"),
        (["--max_restarts=0"], {}, 0, "flag"),
        (["--max-r", "2"], {}, 2, "flag"),
    ],
)
def test_every_setting_knows_where_it_comes_from(
    arguments: list[str], environ: dict[str, str], value: int, origin: Origin
) -> None:
    """Why it does what it does has an answer in run.json."""
    config = config_of(*arguments, environ=environ)
    assert config.settings["max_restarts"][:2] == (value, origin)
    assert config.max_restarts == value
    assert set(config.settings) == {option.dest for option in OPTIONS}


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("7", True)])
def test_switches_in_the_environment_are_numbers(value: str, *, is_on: bool) -> None:
    """As under torchrun."""
    setting = config_of(environ={"PET_STANDALONE": value}).settings["standalone"][:2]
    assert setting == (is_on, "environment")


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.pet], ids=lambda option: option.dest)
def test_other_options_are_not_taken_from_the_environment(option: object) -> None:
    """PET_* is torchrun's; saferun adds no names to it."""
    dest = getattr(option, "dest", "")
    config = config_of(environ={f"PET_{dest.upper()}": "nonsense"})
    assert config.settings[dest].origin == "default"


def test_saferuns_options_never_shadow_an_abbreviation() -> None:
    """``--r``-something that torchrun understands means the same here."""
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        config_of("--nproc", "2")  # ambiguous under torchrun too
    assert config_of("--redir", "1").logs.redirects == (1,)
    assert config_of("--col", "never").output.color == "never"


def test_the_table_of_options_is_sound() -> None:
    """Each name once; each default among the choices."""
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))
    assert len({option.dest for option in OPTIONS}) == len(OPTIONS) == len(TORCHRUN_OPTIONS) + len(SAFERUN_OPTIONS)
    for option in OPTIONS:
        assert option.choices is None or option.default is None or option.default in option.choices
        assert option.help
        assert not option.help.endswith(".")


def test_whether_the_time_for_waits_outside_the_job_was_asked_for_is_known() -> None:
    """Then longer timeouts of process groups do not count, wherever it was set."""
    watch = config_of().watch
    assert (watch.external_wait_s, watch.external_wait_asked) == (1200.0, False)
    assert config_of("--external-wait-timeout", "1200").watch.external_wait_asked
    watch = config_of(environ={"SAFERUN_EXTERNAL_WAIT_TIMEOUT": "0"}).watch
    assert (watch.external_wait_s, watch.external_wait_asked) == (0.0, True)
