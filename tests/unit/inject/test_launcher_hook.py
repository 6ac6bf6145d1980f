"""The start-up hook of ``saferunctl shim``: which command lines it is about, and what becomes of torch's settings."""

from __future__ import annotations

import argparse

import pytest

from saferun.inject.launcher_hook import launcher_arguments, split_command


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("python", ([], "", "", [])),
        ("python -", ([], "script", "-", [])),
        ("python train.py -m x", ([], "script", "train.py", ["-m", "x"])),
        ("python -m a.b --c d", ([], "m", "a.b", ["--c", "d"])),
        ("python -ma.b c", ([], "m", "a.b", ["c"])),
        ("python -uBm a.b", (["-uB"], "m", "a.b", [])),
        ("python -W ignore -X utf8 -m a", (["-W", "ignore", "-X", "utf8"], "m", "a", [])),
        ("python -Wm -Xm -m a", (["-Wm", "-Xm"], "m", "a", [])),
        ("python -uW m train.py", (["-uW", "m"], "script", "train.py", [])),
        ("python -c -m torch.distributed.run", ([], "c", "-m", ["torch.distributed.run"])),
        ("python --check-hash-based-pycs always -m a", (["--check-hash-based-pycs", "always"], "m", "a", [])),
        ("python -u", (["-u"], "", "", [])),
        ("python -m", ([], "m", "", [])),
    ],
)
def test_a_command_line_is_split_as_python_does(words: str, found: object) -> None:
    assert split_command(words.split()) == found


def parser() -> argparse.ArgumentParser:
    """With the kinds of options that torch's has."""
    made = argparse.ArgumentParser()
    made.add_argument("--nnodes", default="1:1")
    made.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    made.add_argument("--master-port", "--master_port", default=None, type=int)
    made.add_argument("--standalone", action="store_true")
    made.add_argument("-m", "--module", action="store_true")
    made.add_argument("training_script")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return made


@pytest.mark.parametrize(
    "words",
    [
        "train.py",
        "--nnodes=2 --nproc_per_node=4 --master_port=29500 train.py --nnodes=3 -- x",
        "--standalone --module package.train --standalone",
    ],
)
def test_settings_become_the_command_line_that_they_came_from(words: str) -> None:
    assert launcher_arguments(parser(), parser().parse_args(words.split())) == words.split()


def test_what_a_tool_writes_otherwise_is_the_same() -> None:
    args = parser().parse_args(["train.py"])
    args.master_port = "29500"
    args.standalone = None
    assert launcher_arguments(parser(), args) == ["--master_port=29500", "train.py"]


def test_the_local_rank_is_an_argument_where_torchs_old_launcher_has_it() -> None:
    args = parser().parse_args(["--standalone", "train.py", "x"])
    args.use_env = False
    assert launcher_arguments(parser(), args) == ["--standalone", "train.py", "--local-rank=${local_rank}", "x"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("unknown", 1), ("master_port", "none"), ("nnodes", None), ("training_script", "--module"), ("module", "yes")],
)
def test_settings_without_a_command_line_are_refused(name: str, value: object) -> None:
    """Torch's own launcher runs then."""
    args = parser().parse_args(["train.py"])
    setattr(args, name, value)
    with pytest.raises(ValueError, match=r"."):
        launcher_arguments(parser(), args)
