"""``--wrap``: which ranks run under which tool."""

from __future__ import annotations

import pytest

from saferun.cli.main import read_config
from saferun.cli.wrap_option import read_wraps
from saferun.config import RankChoice, WrapConfig
from saferun.errors import UsageError
from saferun.launch.wrap_tools import TOOLS


def read(text: str) -> WrapConfig:
    (wrap,) = read_config(["--wrap", text, "--no-python", "true"], {}).wraps
    return wrap


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0:nice", RankChoice(ranges=((0, 0),))),
        ("3,5-7:nice", RankChoice(ranges=((3, 3), (5, 7)))),
        ("local:0,2:nice", RankChoice(ranges=((0, 0), (2, 2)), is_local=True)),
        ("host:node3:nice", RankChoice(host="node3")),
    ],
)
def test_ranks_are_numbers_ranges_local_ranks_or_those_of_a_host(text: str, ranks: RankChoice) -> None:
    assert read(text) == WrapConfig("nice", ranks, ("nice",))


def test_a_star_is_every_rank_however_many_there_are() -> None:
    assert read("*:nice").ranks.may_miss
    assert read("local:*:nice").ranks.is_local


def test_a_command_has_quotes_as_in_a_shell_and_may_have_colons() -> None:
    assert read("0:sh -c '\"$@\"; echo a:b' sh").argv == ("sh", "-c", '"$@"; echo a:b', "sh")


def test_a_known_name_alone_is_a_whole_command() -> None:
    """With further words it is what the user wrote."""
    assert read("0:strace").argv == TOOLS["strace"].argv
    assert read("0:strace").cost
    assert read("0:memray").is_module
    assert read("0:strace -c").argv == ("strace", "-c")


def test_it_can_be_given_several_times() -> None:
    wraps = read_config(["--wrap", "0:nice", "--wrap", "*:strace", "--no-python", "true"], {}).wraps
    assert [wrap.name for wrap in wraps] == ["nice", "strace"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "strace", "0:", "0: ", ":strace", "x:strace", "-1:strace", "3-1:strace", "0,:strace", "1-:strace"),
        *("host::strace", "host:node1", "local:0", "local:x:strace", "0:sh -c 'a", "٣:nice", "9" * 30 + ":nice"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_wraps([text])
    assert str(refused.value).count("\n") == 1
