"""Command lines and environments that cannot be taken: two lines and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun import __version__
from saferun.cli.argument_parser import _OF_OTHERS, build_parser
from saferun.cli.command_line import parse_plain
from saferun.cli.main import main, read_config
from saferun.cli.options import OPTIONS
from saferun.cluster.placement import rendezvous_options
from saferun.config import LaunchConfig
from saferun.diagnosis.causes.python import LAUNCHER_OPTIONS
from saferun.errors import SaferunError, UsageError
from saferun.launch import entry
from tests.examples import examples

ENVIRON = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendezvous_options, "is_served", lambda host, _: host == "192.0.2.7")


def config_of(*arguments: str, environ: dict[str, str] | None = None) -> LaunchConfig:
    return read_config([*arguments, "train.py"], {**ENVIRON, **(environ or {})})


def words_of(error: BaseException) -> str:
    """The error as it is printed; fails unless it has the two lines that every error has."""
    text = str(error)
    assert re.fullmatch(r"saferun: [^\n]+\nhint: [^\n]+", text), text
    assert text.isprintable() or all(line.isprintable() for line in text.split("\n"))
    return text


# --------------------------------------------------------------------------------------------------------------------
# Bad input

BAD = [
    (["--nnodes", "two"], "--nnodes two", 2),
    (["--nnodes", "0"], "--nnodes 0", 2),
    (["--nnodes=--"], "--nnodes --", 2),
    (["--nproc-per-node=--"], "--nproc-per-node '--'", 2),
    (["--nnodes", "3:2"], "--nnodes 3:2", 2),
    (["--nnodes", "9999999"], "--nnodes 9999999", 2),
    (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2 does not exist in a job of 2 hosts", 2),
    (["--nnodes", "2", "--master-port", "0"], "--master-port 0", 2),
    (["--nnodes", "2", "--rdzv-id", ""], "--rdzv-id", 2),
    (["--nnodes", "2", "--rdzv-backend", "etcd-v2"], "--rdzv-backend etcd-v2 has no address", 2),
    (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"], "store_type=file has no file", 2),
    (["--node-rank", "1", "--master-port", "29511"], "--node-rank 1", 2),
    (["--node-rank", "-1", "--master-port", "29511"], "--node-rank -1", 2),
    (["--node-rank", "-1", "--nnodes", "2"], "--node-rank -1 does not exist in a job of 2 hosts", 2),
    (["--hosts", "a,b", "--hostfile", "x"], "--hosts and --hostfile", 2),
    (["--hosts", "node[1-"], "a bracket that is not closed", 2),
    (["--hosts", "node[2-1]"], "'2-1' in brackets", 2),
    (["--hosts", ","], "names no host", 2),
    (["--hosts", "node1,node1"], "names node1 twice", 2),
    (["--hosts", "node[1-3].invalid"], "none of node1.invalid,node2.invalid,node3.invalid is this host", 2),
    (["--hostfile", "nowhere"], "--hostfile nowhere: No such file", 2),
    (["--hostfile", "train.py"], "train.py names no host", 2),
    (["--scheduler", "openmpi"], "--scheduler openmpi", 2),
    (["--start-timeout", "0"], "--start-timeout 0", 2),
    (["--host-timeout", "nan"], "--host-timeout nan", 2),
    (["--nproc-per-node", "0"], "--nproc-per-node 0", 2),
    (["--nproc-per-node", "-2"], "--nproc-per-node -2", 2),
    (["--nproc-per-node", "100000"], "--nproc-per-node 100000", 2),
    (["--max-restarts", "-1"], "--max-restarts -1", 2),
    (["--master-port", "70000"], "--master-port 70000", 2),
    (["--master-port", "-1"], "--master-port -1", 2),
    (["--rdzv-endpoint", "node0"], "no port", 2),
    (["--rdzv-endpoint", "node0:port"], "'port' is not a port", 2),
    (["--rdzv-endpoint", "node0:99999"], "99999", 2),
    (["--rdzv-backend", "etcd"], "--rdzv-backend etcd has no address", 2),
    (["--rdzv-backend", "pigeons"], "--rdzv-backend pigeons", 2),
    (["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-id", ""], "--rdzv-id is empty", 2),
    (["--rdzv-conf", "timeout"], "'timeout' is not KEY=VALUE", 2),
    (["--rdzv-conf", "a=1,"], "KEY=VALUE", 2),
    (["--redirects", "4"], "--redirects 4", 2),
    (["--tee", "0:1,x"], "--tee 0:1,x", 2),
    (["--tee=-1:3"], "--tee -1:3", 2),
    (["--local-ranks-filter", "0,x"], "--local-ranks-filter 0,x", 2),
    (["--log-dir", "train.py"], "--log-dir train.py", 2),
    (["--prefix", "{rnk}"], "--prefix", 2),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout -1", 2),
    (["--no-python", "-m"], "--no-python and --module", 2),
]


@pytest.mark.parametrize(("arguments", "words", "exit_code"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_gets_two_lines_that_name_it(arguments: list[str], words: str, exit_code: int) -> None:
    """What happened, then what to do."""
    with pytest.raises(UsageError) as raised:
        config_of(*arguments)
    assert words in words_of(raised.value)
    assert raised.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("environ", "words", "exit_code"),
    [
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE=yes", 1),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon", 2),
    ],
)
def test_a_bad_environment_gets_two_lines_too(environ: dict[str, str], words: str, exit_code: int) -> None:
    """With the variable's name: it may have been set far away."""
    with pytest.raises(UsageError) as raised:
        config_of(environ=environ)
    assert words in words_of(raised.value)
    assert raised.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--max-restarts", "many"], {}, "many"),
        (["--max-restarts=--"], {}, "--max-restarts -- is not a whole number\n"),
        (["--max-restarts="], {}, "--max-restarts '' is not a whole number\n"),
        ([], {"PET_MAX_RESTARTS": "many"}, "PET_MAX_RESTARTS=many is not a whole number\n"),
        (["--pty", "maybe"], {}, "maybe"),
        (["--numa-binding", "moon"], {}, "moon"),
        (["--no-such-option"], {}, "--no-such-option"),
        (["--nproc-per-node"], {}, "script"),
        (["--master-port", "1\x1b[31m2"], {}, r"\x1b[31m"),
    ],
)
def test_what_the_parser_refuses_has_the_same_form(
    arguments: list[str], environ: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Argparse's own errors are rewritten; exit code 2, as under torchrun. Escape sequences are shown, not sent."""
    with pytest.raises(SystemExit) as raised:
        config_of(*arguments, environ=environ)
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"saferun: [^\n]+\nhint: [^\n]+\n", printed.err)
    assert words in printed.err


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["--hang-timeout", "5m"], "--hang-timeout 5m is not a number of seconds", "5 minutes are 300"),
        (["--hang_timeout=1h"], "--hang-timeout 1h is not a number of seconds", "1 hour is 3600"),
        (["--start-timeout", "30s"], "--start-timeout 30s is not a number of seconds", "write it without the unit: 30"),
        (["--start-timeout", "foo"], "--start-timeout foo is not a number of seconds", "write it like 300"),
        (["--shutdown-timeout", "5 x"], "--shutdown-timeout 5 x is not a whole number of seconds", "write it like 300"),
        (["--max-restarts", "abc"], "--max-restarts abc is not a whole number", "write it like 2"),
        (["--master-port", "http"], "--master-port http is not a whole number", "write it like 29500"),
    ],
)
def test_what_is_no_number_is_told_with_one_that_is(
    arguments: list[str], what: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        config_of(*arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err == f"saferun: {what}\nhint: {hint}\n"


@pytest.mark.parametrize(
    ("arguments", "option", "hint"),
    [
        (["--nproc-per-node", "train.py"], "--nproc-per-node", "--nproc-per-node N SCRIPT"),
        (["--nnodes", "1", "--max-restarts", "train.py"], "--max-restarts", "--max-restarts N SCRIPT"),
        (["--pty=train.py"], "--pty", "--pty {auto,on,off} SCRIPT"),
        (["--standalone", "-t", "train.py"], "--tee", "--tee VALUE SCRIPT"),
        (["--hang-tim", "train.py"], "--hang-timeout", "--hang-timeout SECONDS SCRIPT"),
    ],
)
def test_an_option_that_took_the_script_for_its_value_is_named(
    arguments: list[str], option: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        read_config(arguments, ENVIRON)
    assert raised.value.code == 2
    assert (
        capsys.readouterr().err == f"saferun: there is no script: {option} took 'train.py' as its value\nhint: {hint}\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--nproc-per-node", "2"], ["--nproc-per-node", "2", "--standalone"], ["--role", "two.words"]]
)
def test_a_value_that_is_no_script_was_not_meant_to_be_one(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_config(arguments, ENVIRON)
    assert capsys.readouterr().err.startswith("saferun: the following arguments are required: script")


def test_a_file_may_be_the_value_of_an_option_before_a_script() -> None:
    assert config_of("--role", "train.py").role == "train.py"


@pytest.mark.parametrize("option", ["--hang-timeout", "--retry-wait", "--leftovers-timeout"])
def test_a_negative_number_of_seconds_is_a_number(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} -1 must not be negative"):
        config_of(f"{option}=-1")


def test_a_number_of_hosts_is_shown() -> None:
    with pytest.raises(UsageError, match="--nnodes x is neither N nor MIN:MAX\nhint: write 4, or 2:4"):
        config_of("--nnodes", "x")


def test_no_script_is_an_error_and_not_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """The most common slip."""
    with pytest.raises(SystemExit) as raised:
        read_config(["--nnodes", "1"], ENVIRON)
    assert raised.value.code == 2
    assert "script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian.py"], "there is no script trian.py"),
        (["train.py/x"], "cannot be read"),
        (["--run-path", "trian.py"], "there is no script trian.py"),
        (["--no-python", "./train.py"], "not a program"),
        (["--no-python", "no-such-program"], "not a program"),
        (["--no-python", "/"], "not a program"),
    ],
)
def test_a_script_that_cannot_be_run_is_found_before_any_rank_is_started(arguments: list[str], words: str) -> None:
    """A thousand ranks would tell it a thousand times."""
    with pytest.raises(UsageError) as raised:
        read_config(arguments, ENVIRON)
    assert words in words_of(raised.value)
    assert raised.value.exit_code == 2


def test_a_directory_on_the_path_is_no_program(tmp_path: Path) -> None:
    """It may be searched (x), and not run."""
    (tmp_path / "tool").mkdir()
    with pytest.raises(UsageError, match="tool is not a program"):
        read_config(["--no-python", "tool"], {"PATH": str(tmp_path)})


def test_help_and_version_print_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, with exit code 0."""
    for argument, words in (
        ("--help", "--nproc-per-node"),
        ("--h", "--nproc-per-node"),
        ("--help-all", "--strace"),
        ("--version", __version__),
    ):
        with pytest.raises(SystemExit) as raised:
            read_config([argument], ENVIRON)
        assert raised.value.code == 0
        assert words in capsys.readouterr().out


def test_one_host_needs_no_store_of_another_one() -> None:
    """Torchrun goes on where a store is, or comes within a minute. Where there is none, others may have been meant."""
    served, closed = (
        config_of("--rdzv-backend", "c10d", "--rdzv-endpoint", f"192.0.2.{last}:29400", "--rdzv-id", "7")
        for last in (7, 1)
    )
    assert (served.hosts.spans_hosts, served.rendezvous.run_id, served.rendezvous.note) == (False, "7", "")
    assert closed.rendezvous._replace(note="") == served.rendezvous
    assert "192.0.2.1:29400 is another host, and no store answers there" in closed.rendezvous.note


def test_the_command_turns_errors_into_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Two lines on stderr and nothing else."""
    assert main(["trian.py"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("saferun: there is no script trian.py")
    assert printed.err.count("\n") == 2


# --------------------------------------------------------------------------------------------------------------------
# Anything at all

WORDS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "-1",
        "3",
        "x",
        "0:1",
        "0:9",
        "a=b",
        ",",
        "none",
        "{rank}",
        "{",
        "localhost",
        "localhost:1",
        "[::1]:2",
        "::1",
        "train.py",
        "trian.py",
        "-m",
        "--",
        "static",
        "c10d",
        "SIGTERM",
        "SIGX",
        "1:1",
        "1_0",
        "²",
        "+1",
        "1.5",
        "nan",
    ]
)
FLAGS = st.sampled_from([flag for option in OPTIONS for flag in option.flags if option.dest != "nproc_per_node"])


@contextlib.contextmanager
def _stderr_kept() -> Iterator[io.StringIO]:
    kept = io.StringIO()
    with contextlib.redirect_stderr(kept):
        yield kept


VALUES = {
    option.dest: st.sampled_from(option.choices) if option.choices else st.sampled_from(["1", "0.5", "a,b", "x y"])
    for option in OPTIONS
}
WRITTEN = st.sampled_from([option for option in OPTIONS if option.dest != "print_completion"]).flatmap(
    lambda option: st.tuples(
        st.sampled_from(option.flags), *([] if option.kind == "flag" else [VALUES[option.dest]])
    ).flatmap(lambda words: st.sampled_from([list(words), ["=".join(words)]]))
)


@examples(300)
@given(st.lists(WRITTEN, max_size=4), st.lists(st.one_of(FLAGS, WORDS), max_size=3))
def test_a_plain_command_line_is_read_as_argparse_reads_it(options: list[list[str]], rest: list[str]) -> None:
    """Argparse is not asked where there is nothing to ask; where it is not, its answer would have been the same."""
    arguments = [*(word for words in options for word in words), "train.py", *rest]
    plain = parse_plain(arguments, {})
    if plain is not None:
        expected = {"given": set(), **vars(build_parser({}).parse_args(arguments))}
        assert {name: repr(value) for name, value in vars(plain).items() if name != "given"} == {
            name: repr(value) for name, value in expected.items() if name != "given"
        }
        assert plain.given == expected["given"]


@examples(300)
@given(st.lists(st.one_of(FLAGS, WORDS, st.builds("{}={}".format, FLAGS, WORDS)), max_size=6))
def test_any_command_line_is_taken_or_refused_in_two_lines(arguments: list[str]) -> None:
    """Nothing a person can type ends in a traceback."""
    with _stderr_kept() as stderr:
        try:
            config = read_config(arguments, ENVIRON)
        except SaferunError as error:
            words_of(error)
            exit_code = error.exit_code
        except SystemExit as error:
            words_of(Exception(stderr.getvalue().removesuffix("\n")))
            exit_code = int(error.code or 0)
        else:
            assert len(config.logs.tee) == config.nproc_per_node == 1
            # What is only shown needs no script.
            assert config.command.argv or config.show_config
            exit_code = 2
        assert exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--nprocs", "2"], "--nproc-per-node"),
        (["-np", "2"], "--nproc-per-node"),
        (["--nproc_per_nodes=2"], "--nproc-per-node"),
        (["--hangtimeout", "10"], "--hang-timeout"),
        (["--node", "2"], "--nnodes"),
        (["--num_machines", "2"], "--nnodes"),
        (["--max-restart-count", "2"], "--max-restarts"),
    ],
)
def test_an_unknown_option_gets_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser(ENVIRON).parse_args([*arguments, "train.py"])
    assert ended.value.code == 2
    what, hint = capsys.readouterr().err.splitlines()
    assert what.startswith("saferun: ")
    assert hint == f"hint: did you mean {meant}?"


def test_an_ambiguous_option_names_each_candidate_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(ENVIRON).parse_args(["--node", "2", "train.py"])
    assert capsys.readouterr().err.splitlines()[0] == "saferun: ambiguous option: --node could match --node-rank"
    with pytest.raises(SystemExit) as ended:
        build_parser(ENVIRON).parse_args(["--host=a", "train.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "saferun: ambiguous option: --host could match --hosts, --hostfile, --host-file, --host-timeout",
        "hint: did you mean --master-addr?",
    ]


def test_an_option_that_resembles_none_gets_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(ENVIRON).parse_args(["--zzz", "train.py"])
    assert capsys.readouterr().err.splitlines()[1] == "hint: see saferun --help"


def test_names_of_other_launchers_lead_to_options_that_exist() -> None:
    flags = {flag for option in OPTIONS for flag in option.flags}
    assert set(_OF_OTHERS.values()) <= flags
    assert not flags & set(_OF_OTHERS)
    assert flags >= LAUNCHER_OPTIONS


@pytest.mark.parametrize(("number", "advice"), [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u")])
def test_limits_that_leave_no_room_for_saferun_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, advice: str
) -> None:
    def launch(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(entry, "launch", launch)
    assert main(["train.py"]) == 1
    what, hint = capsys.readouterr().err.splitlines()
    assert what == f"saferun: cannot go on: {os.strerror(number)}"
    assert advice in hint


@pytest.mark.parametrize("path", ["{bin}:/usr/bin", "/of/{{local_rank}}/bin"])
def test_a_program_is_looked_for_where_the_ranks_look_for_it(path: str, tmp_path: Path) -> None:
    """``--env PATH=``, and the PATH here lacks it; where that differs by rank, each rank finds out."""
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    option = ("--env", f"PATH={path.replace('{bin}', str(tool.parent))}")
    assert read_config([*option, "--no-python", "tool"], ENVIRON).command.argv == ("tool",)
    with pytest.raises(UsageError, match="tool is not a program"):
        read_config(["--env", "PATH=/nowhere", "--no-python", "tool"], {"PATH": str(tool.parent)})
    with pytest.raises(UsageError, match="tool is not a program"):
        read_config(["--env", "PYTHONPATH=/nowhere", "--no-python", "tool"], ENVIRON)
    here = {"PATH": str(tool.parent)}
    for options in (["--env", "PATH=/nowhere", "--env", "PATH"], ["--env", "PATH=/nowhere", "--unset", "PATH"]):
        assert read_config([*options, "--no-python", "tool"], here).command.argv == ("tool",)
