"""saferun reads a command line as the installed torch's own launcher does.

Both parsers are given the same arguments and the same environment, and must come to the same values or end with the
same exit code. saferun may know more options; it may not lack one, nor shadow one by an abbreviation.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from saferun.cli.argument_parser import build_parser
from saferun.cli.command_line import parse_plain
from saferun.cli.options import SAFERUN_OPTIONS
from saferun.errors import SaferunError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a parser makes of a command line: its values by name, or the exit code it ends with.
Outcome = dict[str, str] | int

NO_ENVIRONMENT: dict[str, str] = {}


def torchrun_parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    """Make torchrun's parser in a process whose ``PET_*`` variables are exactly ``env``."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("PET_")]:
            del os.environ[name]
        os.environ.update(env)
        return get_args_parser()


TORCHRUN = torchrun_parser(NO_ENVIRONMENT)
ACTIONS = [action for action in TORCHRUN._actions if action.dest != "help"]
OPTIONS = [action for action in ACTIONS if action.option_strings]
FLAGS = [action for action in OPTIONS if action.nargs == 0]
VALUED = [action for action in OPTIONS if action.nargs is None]
POSITIONALS = [action for action in ACTIONS if not action.option_strings]
DESTS = {action.dest for action in ACTIONS}
SPELLINGS = [spelling for action in OPTIONS for spelling in action.option_strings]
LONG_SPELLINGS = [spelling for spelling in SPELLINGS if spelling.startswith("--")]

# Values that one type or another refuses, or reads in a way of its own.
VALUES = (
    *("", "0", "1", "2", "-1", "+3", "3:4", "1.5", "1e3", "nan", " 2 ", "0x10", "1_000", "²", "true", "yes"),
    *("a", "a,b", "a,,b", ",", ",,", "a,,,b", "k=v", "spawn", "fork", "forkserver", "Spawn"),
    *("node", "socket", "exclusive", "core-complex", "auto", "gpu", "--", "-x", "--nnodes", "0:1,1:2"),
)


def values(namespace: argparse.Namespace) -> dict[str, str]:
    """The values of the options that torchrun has too, as text: 1, 1.0 and True are equal, and no nan is."""
    return {name: repr(value) for name, value in vars(namespace).items() if name in DESTS}


def torchrun_outcome(arguments: list[str], env: Mapping[str, str] = NO_ENVIRONMENT) -> Outcome:
    """What torchrun makes of a command line. Over a malformed flag variable it ends with a traceback, exit code 1."""
    try:
        return values((torchrun_parser(env) if env else TORCHRUN).parse_args(arguments))
    except SystemExit as ended:
        return exit_code(ended)
    except ValueError:
        return 1


def saferun_outcome(arguments: list[str], env: Mapping[str, str] = NO_ENVIRONMENT) -> Outcome:
    """What saferun makes of the same command line; where it is plain, with the parser and without."""
    plain = parse_plain(arguments, env)
    try:
        namespace = (build_parser(env) if env else saferun_parser()).parse_args(arguments)
        if plain is not None:
            known = {"given": set(), **vars(namespace)}
            assert {name: repr(value) for name, value in vars(plain).items() if name != "given"} == {
                name: repr(value) for name, value in known.items() if name != "given"
            }
            assert plain.given == known["given"]
        return values(namespace)
    except SystemExit as ended:
        assert plain is None
        return exit_code(ended)
    except SaferunError as error:
        return error.exit_code


@functools.cache
def saferun_parser() -> argparse.ArgumentParser:
    """Make saferun's parser without any variable, once, as it is asked thousands of times."""
    return build_parser(NO_ENVIRONMENT)


def exit_code(ended: SystemExit) -> int:
    """The code that the process would have ended with."""
    assert ended.code is None or isinstance(ended.code, int)
    return ended.code or 0


def by_dest(actions: list[argparse.Action]) -> pytest.MarkDecorator:
    """Parametrise a test over options, named after where their values go."""
    return pytest.mark.parametrize("action", actions, ids=[action.dest for action in actions])


@by_dest(OPTIONS)
def test_every_option_of_torchrun_exists_with_its_spellings_and_shape(action: argparse.Action) -> None:
    """A job script written for torchrun names options in any of their spellings."""
    ours = build_parser(NO_ENVIRONMENT)._option_string_actions
    for spelling in action.option_strings:
        assert spelling in ours, f"saferun lacks {spelling}"
        twin = ours[spelling]
        assert twin.dest == action.dest
        assert (type(twin.default), twin.default) == (type(action.default), action.default)
        assert (twin.choices and list(twin.choices)) == (action.choices and list(action.choices))
        assert twin.nargs == action.nargs
        assert twin.const == action.const
        assert twin.required == action.required


def test_the_script_and_its_arguments_are_the_only_positionals() -> None:
    """Everything behind the script belongs to the script."""
    ours = [action for action in build_parser(NO_ENVIRONMENT)._actions if not action.option_strings]
    assert [(action.dest, action.nargs) for action in ours] == [(action.dest, action.nargs) for action in POSITIONALS]


@by_dest(VALUED)
def test_an_options_value_is_read_as_torchrun_reads_it(action: argparse.Action) -> None:
    """The same text becomes the same value, or is refused by both."""
    for spelling in action.option_strings:
        for value in VALUES:
            for arguments in ([spelling, value, "train.py"], [f"{spelling}={value}", "train.py"]):
                assert saferun_outcome(arguments) == torchrun_outcome(arguments), arguments


@by_dest(FLAGS)
def test_a_flag_takes_no_value(action: argparse.Action) -> None:
    """What follows a flag is the script, and ``--flag=1`` is refused."""
    for spelling in action.option_strings:
        for arguments in ([spelling, "train.py"], [spelling, "1", "train.py"], [f"{spelling}=1", "train.py"]):
            assert saferun_outcome(arguments) == torchrun_outcome(arguments), arguments


@by_dest(ACTIONS)
def test_pet_variables_are_defaults_for_exactly_torchruns_options(action: argparse.Action) -> None:
    """Platforms configure launches by ``PET_*``; an option that torchrun reads from no variable stays without one.

    Where a flag's variable is no number both end with 1, torchrun with a traceback and saferun with two lines.
    """
    for value in VALUES:
        env = {f"PET_{action.dest.upper()}": value}
        assert saferun_outcome(["train.py"], env) == torchrun_outcome(["train.py"], env), env


@by_dest(VALUED)
def test_the_command_line_wins_over_a_pet_variable(action: argparse.Action) -> None:
    """A variable is a default and no more, malformed or not."""
    for value in ("1", "x"):
        env = {f"PET_{action.dest.upper()}": value}
        for arguments in ([action.option_strings[0], "2", "train.py"], [action.option_strings[-1], "fork", "train.py"]):
            assert saferun_outcome(arguments, env) == torchrun_outcome(arguments, env), (arguments, env)


@by_dest(FLAGS)
def test_a_flag_stays_set_where_its_variable_says_no(action: argparse.Action) -> None:
    """``PET_STANDALONE=0 torchrun --standalone`` is standalone."""
    for value in ("0", "1"):
        env = {f"PET_{action.dest.upper()}": value}
        arguments = [action.option_strings[-1], "train.py"]
        assert saferun_outcome(arguments, env) == torchrun_outcome(arguments, env), (arguments, env)


def test_the_parser_reads_the_environment_it_is_given_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process may parse for several environments."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "7")
    assert build_parser(NO_ENVIRONMENT).parse_args(["train.py"]).nproc_per_node == "1"


@pytest.mark.parametrize("spelling", LONG_SPELLINGS)
def test_every_abbreviation_means_what_it_means_to_torchrun(spelling: str) -> None:
    """An option of saferun's own may neither steal an abbreviation nor make one ambiguous."""
    for end in range(len("--x"), len(spelling) + 1):
        short = spelling[:end]
        for arguments in ([short, "1", "train.py"], [f"{short}=1", "train.py"], [short, "train.py"], ["x.py", short]):
            expected = torchrun_outcome(arguments)
            if expected == 2 and _was_clear_before(short):
                continue  # torch 2.14 made it ambiguous; saferun understands what older command lines mean by it
            assert saferun_outcome(arguments) == expected, arguments


def _was_clear_before(short: str) -> bool:
    """Whether an abbreviation is ambiguous only because of the options that torch 2.14 has added."""
    meant = {action.dest for action in OPTIONS for one in action.option_strings if one.startswith(short)}
    lately = {"log_line_prefix_template", "print_completion"}
    return bool(meant & lately) and len(meant - lately) <= 1


def test_an_argument_of_the_script_that_abbreviates_several_options_of_saferuns_is_the_scripts() -> None:
    """``train.py --host 0.0.0.0``: before Python 3.13 argparse refuses what is ambiguous even there.

    One that abbreviates several of torchrun's own torchrun refuses as well.
    """
    spellings = sorted(flag for option in SAFERUN_OPTIONS for flag in option.flags)
    ends = {spelling[:end] for spelling in spellings for end in range(len("--x"), len(spelling))} - set(spellings)
    several = sorted(short for short in ends if sum(spelling.startswith(short) for spelling in spellings) > 1)
    assert {"--host", "--env-", "--pre", "--slow", "--trace"} <= set(several)
    for short in (*several, "--print"):
        for arguments in (["x.py", short, "1"], ["x.py", f"{short}=a b"]):
            expected = torchrun_outcome(arguments)
            if expected != 2 or not _was_clear_before(short):
                assert saferun_outcome(arguments) == expected, arguments
        assert saferun_outcome([short, "1", "train.py"]) == 2 or torchrun_outcome([short, "1", "train.py"]) != 2, short


COMMAND_LINES = {
    "nothing": [],
    "script only": ["train.py"],
    "options only": ["--nnodes", "2"],
    "help": ["--help"],
    "help, short": ["-h"],
    "help behind the script": ["train.py", "--help"],
    "unknown option": ["--no-such-option", "train.py"],
    "unknown short option": ["-q", "train.py"],
    "unknown option behind the script": ["train.py", "--no-such-option"],
    "ambiguous abbreviation": ["--nproc", "2", "train.py"],
    "ambiguous by spelling": ["--rdzv-", "2", "train.py"],
    "ambiguous by spelling, underscore": ["--rdzv_", "2", "train.py"],
    "ambiguous across options": ["--master", "x", "train.py"],
    "ambiguous between run-path spellings": ["--run", "train.py"],
    "abbreviation with a dash": ["--run-", "/x/train.py"],
    "abbreviation with an underscore": ["--run_", "/x/train.py"],
    "abbreviated redirects": ["--redirect=3", "train.py"],
    "abbreviated redirects, apart": ["--redirect", "3", "train.py"],
    "abbreviated tee": ["--te", "3", "train.py"],
    "abbreviated standalone": ["--stand", "train.py"],
    "abbreviated module": ["--mod", "train"],
    "hyphens": ["--nproc-per-node", "2", "--max-restarts=3", "--rdzv-id", "7", "train.py"],
    "underscores": ["--nproc_per_node", "2", "--max_restarts=3", "--rdzv_id", "7", "train.py"],
    "mixed spellings": ["--nproc_per-node", "2", "train.py"],
    "upper case": ["--NNODES", "2", "train.py"],
    "single dash, long name": ["-nnodes", "2", "train.py"],
    "given twice": ["--nnodes", "1", "--nnodes", "2", "train.py"],
    "given twice, both spellings": ["--log-dir", "a", "--log_dir", "b", "train.py"],
    "module": ["-m", "package.train", "--lr", "1"],
    "module glued": ["-mpackage.train"],
    "module with equals": ["--module=package.train"],
    "module behind the script": ["train.py", "-m", "x"],
    "flags joined": ["-mr", "3", "package.train"],
    "flags joined, value glued": ["-mr3", "package.train"],
    "redirects apart": ["-r", "3", "train.py"],
    "redirects glued": ["-r3", "train.py"],
    "redirects with equals": ["-r=3", "train.py"],
    "redirects by rank": ["-r", "0:1,1:2", "train.py"],
    "tee glued": ["-t3", "train.py"],
    "tee by rank": ["-t", "0:3,1:0", "train.py"],
    "redirects and tee": ["-r", "1", "-t", "2", "train.py"],
    "value missing": ["--nnodes"],
    "value is an option": ["--nnodes", "--standalone", "train.py"],
    "value begins with a dash": ["--log-dir", "-x", "train.py"],
    "value begins with a dash, equals": ["--log-dir=-x", "train.py"],
    "negative number": ["--node-rank", "-1", "train.py"],
    "negative number, equals": ["--node-rank=-1", "train.py"],
    "negative number for the script": ["-1"],
    "empty value": ["--rdzv-id", "", "train.py"],
    "empty value, equals": ["--rdzv-id=", "train.py"],
    "empty script": [""],
    "spaces": ["--role", "a b", "my train.py", "an argument"],
    "restarts no number": ["--max-restarts", "many", "train.py"],
    "port no number": ["--master-port", "http", "train.py"],
    "unknown start method": ["--start-method", "thread", "train.py"],
    "unknown binding": ["--numa-binding", "moon", "train.py"],
    "script arguments": ["train.py", "--lr", "0.1", "-v", "data"],
    "script arguments like ours": ["train.py", "--nnodes", "4", "--standalone", "-m", "-r", "3"],
    "script arguments like saferun's": ["train.py", "--run-dir", "x", "--prefix", "none", "--color", "never"],
    "script arguments by equals": ["train.py", "--nnodes=4", "--log_dir=x"],
    "options around the script": ["--nnodes", "1", "train.py", "--nproc-per-node", "2"],
    "double dash before the script": ["--", "train.py", "--lr", "1"],
    "double dash after the script": ["train.py", "--", "--lr", "1"],
    "double dash on both sides": ["--", "train.py", "--", "--lr"],
    "double dash twice after the script": ["train.py", "--", "--", "x"],
    "double dash further behind": ["train.py", "x", "--", "y"],
    "double dash last": ["train.py", "--"],
    "double dash alone": ["--"],
    "double dash before an option": ["--nnodes", "2", "--", "--nnodes", "3"],
    "double dash as value": ["--role", "--", "train.py"],
    "prefix characters": ["train.py", "@file", "+x", "=y", "-"],
    "dash as script": ["-"],
    "templates": ["train.py", "$$", "${local_rank}", "$local_rank"],
    "unicode": ["--role", "élève", "trän.py", "\N{SNOWMAN}"],
    "lone surrogate": ["train.py", "\udcff"],
    "filters": ["--duplicate-stdout-filters", "a,b,,c", "--duplicate_stderr_filters=", "train.py"],
    "everything": [
        *("--nnodes=1:2", "--nproc-per-node=gpu", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=i"),
        *("--rdzv-conf=a=b,c=d", "--max-restarts=3", "--monitor-interval=0.5", "--start-method=fork", "--role=r"),
        *("--event-log-handler=console", "--no-python", "--run-path", "--log-dir=l", "-r1", "-t2", "--node-rank=1"),
        *("--local-ranks-filter=0,1", "--master-addr=a", "--master-port=1", "--local-addr=b", "--logs-specs=s"),
        *("--numa-binding=node", "--signals-to-handle=SIGUSR1", "--shutdown-timeout=5", "--virtual-local-rank", "x"),
    ],
}


@pytest.mark.parametrize("arguments", COMMAND_LINES.values(), ids=COMMAND_LINES.keys())
def test_a_command_line_is_read_as_torchrun_reads_it(arguments: list[str]) -> None:
    """The same values, or an end with the same exit code."""
    assert saferun_outcome(arguments) == torchrun_outcome(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py"],
        ["--nproc_per_node", "2", "train.py", "--lr", "0.1", "-v", "data"],
        ["--nproc-per-node=2", "--nnodes", "1", "--standalone", "--tee=3", "train.py", "--nnodes=4", "-m", "-1"],
        ["-m", "-r", "0:1,1:2", "--duplicate-stdout-filters", "a,b", "package.train"],
        ["--max-restarts", "3", "--env", "A=1", "--env", "B=2", "--start-method", "fork", "train.py"],
    ],
)
def test_an_ordinary_command_line_needs_no_argparse(arguments: list[str]) -> None:
    """Argparse takes a tenth of the time until the ranks run; what it would make of these is compared above."""
    assert parse_plain(arguments, NO_ENVIRONMENT) is not None
    saferun_outcome(arguments)


ENVIRONMENTS = {
    "several": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "1", "PET_MAX_RESTARTS": "3"},
    "one malformed of several": {"PET_NNODES": "2", "PET_MAX_RESTARTS": "many"},
    "a choice is not checked in a default": {"PET_START_METHOD": "thread"},
    "lower case is no variable": {"PET_nnodes": "2", "pet_nnodes": "2"},
    "hyphens are no variable": {"PET_NPROC-PER-NODE": "2"},
    "short names are no variable": {"PET_R": "3", "PET_T": "3", "PET_M": "1"},
    "positionals are no variable": {"PET_TRAINING_SCRIPT": "x.py", "PET_TRAINING_SCRIPT_ARGS": "y"},
    "other variables": {"NNODES": "2", "MASTER_PORT": "1", "MASTER_ADDR": "x", "WORLD_SIZE": "4", "RANK": "1"},
}


@pytest.mark.parametrize("env", ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())
def test_an_environment_is_read_as_torchrun_reads_it(env: dict[str, str]) -> None:
    """Only ``PET_`` and the option's name in upper case count."""
    assert saferun_outcome(["train.py", "--lr"], env) == torchrun_outcome(["train.py", "--lr"], env)


TOKENS = st.one_of(
    st.sampled_from(SPELLINGS),
    st.sampled_from([spelling[:end] for spelling in LONG_SPELLINGS for end in range(len("--x"), len(spelling))]),
    st.tuples(st.sampled_from(SPELLINGS), st.sampled_from(VALUES)).map("=".join),
    st.sampled_from(["-r3", "-t0:1", "-m", "-mr3", "-mt", "--", "train.py", "-h", "-"]),
    st.sampled_from(VALUES),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=7))
def test_any_list_of_torchruns_words_is_read_as_torchrun_reads_it(arguments: list[str]) -> None:
    """Combinations that nobody thought of: options, their beginnings, values and separators in any order."""
    assert saferun_outcome(arguments) == torchrun_outcome(arguments)
