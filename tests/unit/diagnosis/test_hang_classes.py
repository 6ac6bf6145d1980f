"""Every kind of wait has its class and its place among the causes of a hang."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from saferun import diagnosis
from saferun.diagnosis.hang import diagnose_hang
from saferun.diagnosis.hang_classes import CLASSES, class_of, severity_of
from saferun.diagnosis.rank_view import Found
from saferun.diagnosis.rank_waits import Wait
from saferun.evidence.job_evidence import Capture, Frame, StackDump
from saferun.text.wording import NOT_PYTHON
from tests.unit.diagnosis.recorded_hangs import C10D, dump_of, evidence, look_of

FOLDER = Path(diagnosis.__file__).parent


def kinds_found() -> set[str]:
    """The kinds that the sources of the diagnosis give to what a rank waits in."""
    kinds = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Found":
                assert isinstance(node.args[0], ast.Constant), path
                kinds.add(str(node.args[0].value))
    return kinds


def test_every_kind_of_wait_has_a_class() -> None:
    """One that has none would lose the whole report."""
    kinds = kinds_found()
    assert {"interpreter", "lock", "dead", "unanswering"} <= kinds
    assert kinds <= {*CLASSES}


def test_a_kind_without_a_class_is_the_least_sure() -> None:
    wait = Wait(0, Found("new", "", "does something new"), "")
    assert class_of(wait) is CLASSES["unanswering"]
    assert severity_of(wait) > max(severity_of(wait._replace(found=Found(kind, "", ""))) for kind in CLASSES)


@pytest.mark.parametrize(
    ("dump", "syscall"),
    [
        (StackDump(1, 101, True, "python", "py-spy", (), f"pid 101: {NOT_PYTHON}"), "ioctl"),
        (StackDump(1, 101, True, "pt_main_thread", "py-spy", (), f"pid 101: {NOT_PYTHON}"), "munmap"),
        (dump_of(1), "exit_group"),
    ],
)
def test_a_rank_that_is_starting_or_shutting_down_is_named(dump: StackDump, syscall: str) -> None:
    """Its interpreter does not exist yet, or no more."""
    waiting = dump_of(0, Frame("all_reduce", C10D, 3252), Frame("step", "/job/train.py", 52))
    looks = (look_of(0), look_of(1, syscall=syscall, wchan=""))
    found = diagnose_hang(evidence(Capture(processes=looks, stacks=(waiting, dump)), ranks=(0, 1)))
    assert found.headline == (
        "the job hangs: rank 1 (node1) has not called the all_reduce that rank 0 waits in: it is starting or shutting "
        "down"
    )
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_interpreter", (1,))


SITE = "/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("torch/utils/file_baton.py", ", and remove it"),
        ("filelock/_soft.py", ", and remove it"),
        ("filelock/_api.py", "do not remove"),
        ("filelock/_unix.py", "do not remove"),
        ("fasteners/process_lock.py", "do not remove"),
        ("portalocker/utils.py", "do not remove"),
    ],
)
def test_only_a_lock_file_that_a_killed_process_leaves_behind_may_be_removed(file: str, says: str) -> None:
    """A lock of the kernel ends with its holder: without its file, two processes would have the lock."""
    waiting = dump_of(0, Frame("all_reduce", C10D, 3252), Frame("step", "/job/train.py", 52))
    locked = dump_of(1, Frame("acquire", f"{SITE}/{file}", 300), Frame("load", "/job/train.py", 60))
    looks = (look_of(0), look_of(1, syscall="clock_nanosleep", wchan="hrtimer_nanosleep"))
    found = diagnose_hang(evidence(Capture(processes=looks, stacks=(waiting, locked)), ranks=(0, 1)))
    assert found.cause is not None
    assert found.cause.class_name == "hang_lock"
    assert "a lock file" in found.headline
    assert says in found.cause.advice
    assert ("and remove it" in found.cause.advice) != ("do not remove" in found.cause.advice)
