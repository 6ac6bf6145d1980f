"""The command lines of ranks that run under a tool."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saferun.cli.wrap_option import read_wraps
from saferun.config import Command
from saferun.errors import UsageError
from saferun.launch import wrapping
from saferun.launch.wrapping import (
    Wrapper,
    _perf_refusal,
    cost_lines,
    missing_tool,
    misspelt_lines,
    with_own_tools,
    wrappers_of,
)
from saferun.model import Placement, RankAssignment

HOST = "node3.cluster"


def placement(ranks: int = 4) -> Placement:
    assignments = tuple(RankAssignment(number, number, number) for number in range(ranks))
    return Placement(0, 1, ranks, ranks, assignments, "127.0.0.1", 29500, "none")


def wrapped(
    *texts: str, ranks: int = 4, rank_dir: str | None = "/run/rank", python: str = "/bin/python3"
) -> list[list[str]]:
    """The tools of each rank, by name."""
    command = Command((python, "train.py"), run_path=False, name="train.py")
    found = wrappers_of(read_wraps(texts), placement(ranks), HOST, [rank_dir] * ranks, command)
    return [[wrapper.name for wrapper in wrappers] for wrappers in found]


def test_only_ranks_that_are_named_run_under_it() -> None:
    assert wrapped("1,3:nice") == [[], ["nice"], [], ["nice"]]
    assert wrapped("*:nice", ranks=2) == [["nice"], ["nice"]]
    assert wrapped("host:node3:nice", ranks=1) == [["nice"]] == wrapped(f"host:{HOST}:nice", ranks=1)
    assert wrapped("host:node4:nice", ranks=1) == [[]]


def test_the_first_tool_is_the_outermost() -> None:
    assert wrapped("*:nice", "0:strace", ranks=1) == [["nice", "strace"]]


def test_places_are_filled_in() -> None:
    (wrap,) = read_wraps(["2:tool {rank} {local_rank} {rank_dir}/out {host} {other}"])
    found = wrappers_of([wrap], placement(), HOST, ["/run/rank"] * 4, Command(("python",), run_path=False, name=""))
    assert found[2][0].argv == ("tool", "2", "2", "/run/rank/out", HOST, "{other}")


def test_a_module_runs_in_place_of_the_script() -> None:
    wrapper = Wrapper("memray", ("-m", "memray", "run"), is_module=True)
    assert wrapper.around(["python", "-u", "a.py", "-u"]) == ["python", "-u", "-m", "memray", "run", "a.py", "-u"]
    run_path = ["python", "-B", "-Wdefault", "-Xdev", "run_path.py", "", "a.py"]
    assert wrapper.around(run_path) == [*run_path[:4], "-m", "memray", "run", *run_path[4:]]
    assert wrapper.around(["python", "-u", "-m", "a"]) == ["python", "-u", "-m", "memray", "run", "-m", "a"]
    assert wrapper.around(["python", "a.py"]) == ["python", "-m", "memray", "run", "a.py"]
    assert Wrapper("nice", ("nice", "-n", "5")).around(["a"]) == ["nice", "-n", "5", "a"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("4:nice", "no rank 4"),
        ("0-9:nice", "no rank 9"),
        ("local:4:nice", "no local rank 4"),
        ("0:memray", "runs Python scripts only"),
        ("0:strace", "no run directory"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        wrapped(text, rank_dir=None, python="/bin/true")


def test_a_tool_that_is_not_here_is_said_before_anything_starts(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("")
    tool.chmod(0o700)
    here, missing = ((Wrapper("a", ("tool",)),),), ((Wrapper("a", ("no-tool",)),),)
    assert missing_tool(here, [{"PATH": f"/nowhere:{tmp_path}"}]) is None
    assert missing_tool(((Wrapper("a", (str(tool),)),),), [{}]) is None
    error = missing_tool(missing, [{"PATH": str(tmp_path)}])
    assert error is not None
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("rankdir", "rank_dir"),
        ("local-rank", "local_rank"),
        ("RANK", "rank"),
        ("hostname", "host"),
        ("run_dir", "rank_dir"),
    ],
)
def test_a_misspelt_placeholder_is_named(word: str, meant: str) -> None:
    """It goes to the tool as it is, which may want it so."""
    line = f"--wrap: {{{word}}} goes to tool as it is; did you mean {{{meant}}}?"
    assert misspelt_lines(read_wraps([f"0:tool -o {{{word}}}/a {{{word}}}"])) == [line]


def test_braces_of_a_tools_own_are_no_mistake() -> None:
    own = "'{print}' -I{} {} {cost} {foo} {0} '{rank:x}' '${rank}' '${RANK_DIR}' {rank}{rank_dir}{local_rank}{host}"
    assert misspelt_lines(read_wraps([f"0:tool {own}", "*:strace"])) == []


def test_py_spy_is_found_where_saferun_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its environment being activated. One on the PATH of the ranks comes first."""
    own, of_user = tmp_path / "own", tmp_path / "user"
    for folder in (own, of_user):
        folder.mkdir()
        (folder / "py-spy").write_text("")
        (folder / "py-spy").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    wrappers = ((Wrapper("py-spy", ("py-spy", "record")), Wrapper("nice", ("nice",))),)
    ((found, nice),) = with_own_tools(wrappers, [{"PATH": "/nowhere"}])
    assert found.argv == (str(own / "py-spy"), "record")
    assert nice.argv == ("nice",)
    assert with_own_tools(wrappers, [{"PATH": str(of_user)}]) == wrappers
    (own / "py-spy").unlink()
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    assert with_own_tools(wrappers, [{"PATH": "/nowhere"}]) == wrappers


def test_what_it_costs_is_said_once_a_tool() -> None:
    lines = cost_lines(read_wraps(["0,2:strace", "1:nice", "host:node9:nice"]), placement(), HOST)
    assert [line.partition(":")[0] for line in lines] == ["2 ranks run under strace", "rank 1 runs under nice"]


@pytest.mark.parametrize(
    ("level", "capabilities", "is_refused"),
    [
        ("2", "0", False),
        ("-1", "0", False),
        ("3", "0", True),
        ("4", "0000000000000000", True),
        ("4", "4000000000", False),
        ("4", "200000", False),
        ("", "0", False),
        ("many", "0", False),
        ("4", "no number", False),
    ],
)
def test_a_kernel_that_may_refuse_perf_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, capabilities: str, *, is_refused: bool
) -> None:
    """Before the ranks start; they start all the same, as perf says best itself what it lacks."""
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/sys/kernel/perf_event_paranoid").write_text(f"{level}\n")
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    why = _perf_refusal(f"{tmp_path}/")
    assert bool(why) == is_refused
    monkeypatch.setattr(wrapping, "_perf_refusal", lambda: why)
    for text in ("1:perf", "1:/usr/bin/perf stat --"):
        lines = cost_lines(read_wraps([text]), placement(), HOST)
        assert len(lines) == 1 + is_refused
    assert not any("refused" in line for line in cost_lines(read_wraps(["1:nice"]), placement(), HOST))


def test_nothing_is_said_of_perf_where_there_is_no_such_limit(tmp_path: Path) -> None:
    """The kernel has no perf events, or /proc is hidden."""
    assert _perf_refusal(f"{tmp_path}/") == ""


@pytest.mark.parametrize(
    ("command", "costs"),
    [("valgrind --tool=memcheck", True), ("/opt/bin/strace -f", True), ("gdb -batch", False), ("perf stat --", False)],
)
def test_what_a_tool_always_costs_is_said_of_a_whole_command_too(command: str, *, costs: bool) -> None:
    """What depends on the options is not."""
    (wrap,) = read_wraps([f"0:{command}"])
    assert bool(wrap.cost) == costs
    assert " ".join(wrap.argv) == command
