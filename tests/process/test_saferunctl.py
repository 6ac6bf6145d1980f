"""``saferunctl env``: what it answers, with which exit code, and what it makes of wrong questions."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.process.launching import REPOSITORY, in_mounts, two_lines
from tests.process.somebody import needs_root
from tests.unit.report.page_samples import hang_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAFERUNCTL = (sys.executable, "-m", "saferun.ctl")
BUILT_IN = [path.stem for path in sorted((REPOSITORY / "configs").glob("*.yaml"))]
# What an environment needs to be one; the rest of this process's own would be linted too.
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the lint has found in this installation: searched once for all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def directory(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to ask in, with a home of its own."""
    for name in set(os.environ) - set(KEPT):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def ask(*arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One question."""
    return subprocess.run(
        [*SAFERUNCTL, *arguments],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer(*arguments: str, environ: Mapping[str, str] | None = None, code: int = 0) -> list[str]:
    """The lines of an answer, which has to be all that is printed."""
    done = ask(*arguments, environ=environ)
    assert (done.returncode, done.stderr) == (code, ""), done
    return done.stdout.splitlines()


def refusal(*arguments: str, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The two lines about a wrong question."""
    done = ask(*arguments, environ=environ)
    assert (done.returncode, done.stdout) == (2, ""), done
    return two_lines(done.stderr)


# --------------------------------------------------------------------------------------------------------------------
# list, show, explain, diff


@pytest.mark.usefixtures("directory")
def test_list_has_one_line_for_each_profile_that_comes_with_saferun() -> None:
    """Name, highest cost, what it is for."""
    lines = answer("env", "list")
    assert [line.split()[0] for line in lines] == BUILT_IN
    costs = {line.split()[0]: line.split()[1] for line in lines}
    assert set(costs.values()) <= {"none", "light", "moderate", "heavy"}
    assert (costs["none"], costs["production"], costs["blocking"]) == ("none", "light", "heavy")
    assert all(len(line.split(maxsplit=2)) == 3 for line in lines)


def test_list_has_the_users_profiles_too(directory: Path) -> None:
    """Of ./saferun.yaml, of the home directory, and of a path that is named, before the action or behind it."""
    (directory / "saferun.yaml").write_text("max-restarts: 1\nprofiles: {here: {description: of this directory}}")
    profiles = directory.parent / "home" / ".config" / "saferun" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "homely.yaml").write_text("description: of the home directory\nvariables: {X: {value: 1, cost: heavy}}")
    (directory / "named.yaml").write_text("description: of a path")
    for arguments in (("--env-profile-path", "named.yaml", "list"), ("list", "--env-profile-path", "named.yaml")):
        lines = answer("env", *arguments)
        assert sorted([*BUILT_IN, "here", "homely", "named"]) == [line.split()[0] for line in lines]
        (homely,) = (line for line in lines if line.startswith("homely"))
        assert homely.split(maxsplit=2) == ["homely", "heavy", "of the home directory"]


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("name", slow_but(BUILT_IN, "production"))
def test_every_built_in_profile_can_be_shown(name: str) -> None:
    """Each variable with who sets it, what it costs and where that is written."""
    lines = answer("env", "show", name)
    path = lines[0].removeprefix(f"{name}  (").partition(":")[0]
    assert Path(path).samefile(REPOSITORY / "configs" / f"{name}.yaml")
    variables = [line for line in lines if re.match(r"[A-Z_]+=", line)]
    for words in ("    set by ", "    cost: ", "    source: http"):
        assert sum(line.startswith(words) for line in lines) == len(variables)


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("arguments", [("--vendor", "nvidia", "show"), ("show", "--vendor", "nvidia")])
def test_show_is_about_one_vendor(arguments: Sequence[str]) -> None:
    """And names what is left out, and why."""
    lines = answer("env", *arguments, "blocking")
    at = lines.index("not on this host:")
    assert "CUDA_LAUNCH_BLOCKING=1" in lines[:at]
    assert not any("AMD_SERIALIZE_KERNEL" in line for line in lines[:at])
    assert any("AMD_SERIALIZE_KERNEL=3" in line and "it is for AMD's GPUs" in line for line in lines[at:])


@pytest.mark.usefixtures("directory")
def test_explain_tells_every_profile_that_sets_a_variable() -> None:
    """To what, why, at what cost, who reads it, and where that is written."""
    lines = answer("env", "explain", "NCCL_DEBUG")
    text = "\n".join(lines)
    assert "NCCL_DEBUG=INFO on rank 0, WARN on the others" in lines
    assert "/configs/nccl-debug.yaml:" in text
    assert "/configs/debug.yaml:" in text
    assert "    source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html" in lines
    assert "    read by: libnccl.so.2, librccl.so.1" in lines


@pytest.mark.usefixtures("directory")
def test_explain_of_a_variable_that_no_profile_sets_says_so() -> None:
    """Which is an answer, with the one that may have been meant."""
    lines = answer("env", "explain", "NCCL_SOCKET_IFNAME", environ={"NCCL_SOCKET_IFNAME": "eth1"})
    assert lines[0].startswith("NCCL_SOCKET_IFNAME: the network interfaces that NCCL uses for sockets")
    assert lines[1] == "    read by NCCL (libnccl, librccl)"
    assert lines[-2:] == ["    here: NCCL_SOCKET_IFNAME=eth1", "    no env profile sets it"]
    assert answer("env", "explain", "NCCL_DEBG", code=1) == [
        "nothing is known of 'NCCL_DEBG'",
        "did you mean NCCL_DEBUG?",
    ]
    assert answer("env", "explain", "XYZZY", code=1) == ["nothing is known of 'XYZZY'"]
    assert answer("env", "explain", "\x1b[31m", code=1) == [r"nothing is known of '\x1b[31m'"]


@pytest.mark.usefixtures("directory")
def test_diff_tells_what_would_change() -> None:
    """Lost and gained, with what the gain costs."""
    assert answer("env", "diff", "none", "minimal") == [
        "+ SAFERUN_FAULTHANDLER=1",
        "+ TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    ]
    assert answer("env", "diff", "minimal", "none") == [
        "- SAFERUN_FAULTHANDLER=1",
        "- TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    ]
    assert "+ CUDA_LAUNCH_BLOCKING=1  [cost: heavy]" in answer(
        "env", "diff", "production", "blocking", "--vendor", "nvidia"
    )
    (line,) = answer("env", "diff", "debug", "debug")
    assert line == "debug and debug set the same variables to the same values on this host"


# --------------------------------------------------------------------------------------------------------------------
# lint


@pytest.mark.usefixtures("directory")
def test_lint_of_an_environment_without_knobs_is_content() -> None:
    """Nothing is searched where there is nothing to look for."""
    assert answer("env", "lint") == ["no problems found: no variable is set that the lint checks"]


@pytest.mark.slow
@pytest.mark.usefixtures("directory")
def test_lint_of_real_variables_is_content_and_says_what_it_searched() -> None:
    """An all-clear is worth as much as the search behind it."""
    environ = {"TORCH_SHOW_CPP_STACKTRACES": "1", "OMP_NUM_THREADS": "4", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    content, searched = answer("env", "lint", environ=environ)
    assert content == "no problems found"
    assert searched.startswith("searched: ")
    assert len(searched) < 300
    names = ask("env", "lint", "--all", environ=environ).stdout.partition(searched)[2].splitlines()
    assert any("libtorch_cpu.so" in line for line in names)
    assert max(map(len, names)) <= 102


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_SOCKET_IFNAME", "eht0", "this host has no interface starting with eht0"),
        ("TORCH_SHOW_CPP_STACKTRACE", "1", "TORCH_SHOW_CPP_STACKTRACES"),
        ("TORCH_DISTRIBUTED_DEBUG", "VERBOSE", "DETAIL"),
        # Also on a host without NCCL.
        ("NCCL_DEBG", "INFO", "did you mean NCCL_DEBUG?"),
    ],
)
@pytest.mark.parametrize("by", slow_but(["environment", "flag"], "flag"))
def test_lint_tells_what_is_wrong_and_ends_with_1(name: str, value: str, words: str, by: str) -> None:
    """So that a job script can ask before it starts."""
    environ = {name: value} if by == "environment" else {}
    arguments = () if by == "environment" else ("--env", f"{name}={value}")
    line, _ = answer("env", "lint", *arguments, environ=environ, code=1)
    assert line.startswith(f"{name}={value}: ")
    assert words in line


def test_lint_knows_what_the_script_reads(directory: Path) -> None:
    """Its own variable is no slip."""
    (directory / "train.py").write_text("import os\nprint(os.environ['TORCH_MY_OWN_SWITCH'])\n")
    environ = {"TORCH_MY_OWN_SWITCH": "1"}
    assert answer("env", "lint", environ=environ, code=1)[0].startswith("TORCH_MY_OWN_SWITCH=1: ")
    assert answer("env", "lint", "train.py", environ=environ)[0] == "no problems found"


def test_lint_can_look_at_profiles(directory: Path) -> None:
    """What a launch with them would bring."""
    (directory / "saferun.yaml").write_text("profiles: {mine: {variables: {NCCL_SOCKET_IFNAME: eht0}}}")
    line, _ = answer("env", "lint", "--env-profile", "mine", code=1)
    assert line.startswith("NCCL_SOCKET_IFNAME=eht0: ")
    assert answer("env", "lint", "--env-profile", "minimal")[0].startswith("no problems found")


@pytest.mark.usefixtures("directory")
def test_lint_shows_no_secret() -> None:
    """Its lines are pasted into issues."""
    lines = answer("env", "lint", environ={"TORCH_MY_TOKEN": "s3cret"}, code=1)
    assert "TORCH_MY_TOKEN" in lines[0]
    assert "s3cret" not in "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------
# Wrong questions


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ((), "SUBCOMMAND", "see saferunctl --help"),
        (("evn",), "there is no subcommand 'evn'", "did you mean env? see saferunctl --help"),
        (("stat",), "there is no subcommand 'stat'", "did you mean status? see saferunctl --help"),
        (("qqq",), "there is no subcommand 'qqq'", "see saferunctl --help"),
        pytest.param(("env",), "ACTION", "see saferunctl env --help", marks=pytest.mark.slow),
        (("env", "shwo"), "there is no action 'shwo'", "did you mean show? see saferunctl env --help"),
        (("env", "show", "nope"), "no env profile is named 'nope'", "known are "),
        (("logs", "--lines", "x"), "--lines x is not a whole number", "see saferunctl logs --help"),
        (("list", "NAME"), "unrecognized arguments: NAME", "see saferunctl list --help"),
        (("logs", "--no-such"), "unrecognized arguments: --no-such", "see saferunctl logs --help"),
        (("env", "list", "NAME"), "unrecognized arguments: NAME", "see saferunctl env list --help"),
        (("health", "--timeout", "x"), "--timeout x is not a number", "see saferunctl health --help"),
        pytest.param(("env", "show"), "profile", "see saferunctl env show --help", marks=pytest.mark.slow),
        (("env", "show", "produktion"), "no env profile is named 'produktion'", "did you mean production?"),
        (("env", "show", "\x1b[31m"), r"'\x1b[31m'", "known are"),
        pytest.param(
            ("env", "diff", "none", "non"),
            "no env profile is named 'non'",
            "did you mean none?",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("env", "lint", "--env-profile", "minimum"), "'minimum'", "did you mean minimal?", marks=pytest.mark.slow
        ),
        (("env", "lint", "nowhere.py"), "there is no script nowhere.py", "check the path"),
        (("env", "lint", "--env", ""), "--env is empty", "--env NAME=VALUE"),
        pytest.param(
            ("env", "--vendor", "intel", "list"), "'intel'", "see saferunctl env --help", marks=pytest.mark.slow
        ),
        (("env", "--env-profile-path", "nowhere", "list"), "no env profiles at 'nowhere'", "--env-profile-path"),
    ],
)
def test_a_wrong_question_is_answered_in_two_lines(arguments: Sequence[str], what: str, hint: str) -> None:
    """With exit code 2, and what to do."""
    said, advice = refusal(*arguments)
    assert what in said
    assert hint in advice


def test_a_broken_file_is_told_with_its_line(directory: Path) -> None:
    """Where to look."""
    (directory / "saferun.yaml").write_text("profiles:\n  mine:\n    varaibles: {X: 1}\n")
    what, hint = refusal("env", "list")
    assert "./saferun.yaml:3:5" in what
    assert "variables" in hint


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("arguments", [("list",), ("show", "debug"), ("explain", "NCCL_DEBUG"), ("lint",)])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: Sequence[str]) -> None:
    """`saferunctl env list | head -1`: one line, no traceback, and the pipe counts as served."""
    script = '{ "$@"; echo "code $?" >&2; } | head -1'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *SAFERUNCTL, "env", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == "code 0\n"


@pytest.mark.usefixtures("directory")
def test_a_reader_that_is_gone_before_the_first_line_is_no_error() -> None:
    """What is left in the buffer must not be tried once more at the end."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as out:
        done = subprocess.run(
            [*SAFERUNCTL, "env", "show", "debug"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("env", "--help"), ("env", "lint", "--help")])
def test_help_is_on_stdout(arguments: Sequence[str]) -> None:
    assert "saferunctl" in answer(*arguments)[0]


@needs_root
def test_a_report_that_root_writes_to_a_device_leaves_it_what_it_is(tmp_path: Path) -> None:
    """``--output /dev/null`` had made a file of the machine's /dev/null. Here /dev is the test's own."""
    hang_run(tmp_path / "run")
    prepare = "mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/urandom c 1 9; ln -s /proc/self/fd/1 /dev/stdout"
    ask = shlex.join([*SAFERUNCTL, "report", "run", "--json", "--output"])
    look = "test -c /dev/null && test -L /dev/stdout && echo ok"
    script = f"{prepare}; {ask} /dev/null; {ask} /dev/stdout > out; {look}"
    done = subprocess.run(
        [*in_mounts(("/dev", "size=1m"), directory=str(tmp_path)), "sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "run" / "report.json").read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("env", "list"),
        ("completion", "bash"),
        ("logs", "run"),
        ("report", "run", "--json"),
        ("report", "run", "--json", "--output", "-"),
        ("report", "run", "--html", "--output", "/dev/stdout"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("where", "why"), [("&-", "Bad file descriptor"), ("/dev/full", "No space left on device")])
def test_output_that_cannot_be_written_is_an_error_of_two_lines(
    directory: Path, words: tuple[str, ...], where: str, why: str
) -> None:
    """A full disk, or a caller that has closed the stream: neither is a fault of saferunctl."""
    log = hang_run(directory / "run") / "node1" / "attempt_0" / "rank_0" / "stdout.log"
    log.write_text("step 1\n")
    command = f"{shlex.join([*SAFERUNCTL, *words])} >{where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    lines = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("saferunctl: the times"))
    assert done.returncode == 1
    assert two_lines(lines) == (
        f"standard output cannot be written: {why}",
        "see where it leads: it is closed, or a file on a full disk",
    )


@pytest.mark.parametrize(("where", "why"), [("&-", "it is closed"), ("/dev/full", "No space left on device")])
def test_help_that_cannot_be_written_is_an_error_of_two_lines(where: str, why: str) -> None:
    command = f"{shlex.join([sys.executable, '-m', 'saferun', '--help'])} >{where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert two_lines(done.stderr) == (f"standard output cannot be written: {why}", "see where it leads")
