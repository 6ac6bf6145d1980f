"""How tests are run: what tests/running.py promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.running import LONGEST, unit_of_work

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = (
    "from tests.running import pytest_collection_modifyitems, pytest_runtest_call, pytest_runtest_setup, "
    "pytest_runtest_teardown, pytest_xdist_make_scheduler"
)


def run(folder: Path, *options: str, **files: str) -> str:
    """What pytest says of ``files``, which are run side by side as those of saferun."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = limit_s(seconds)\naddopts = --import-mode=importlib\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-n", "1", "--dist", "loadfile"]
    done = subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


ENDLESS = """
import threading, time, pytest
def elsewhere():
    while True:
        time.sleep(0.1)
def test_before():
    pass
@pytest.mark.limit_s(0.5)
def test_endless():
    threading.Thread(target=elsewhere, daemon=True).start()
    time.sleep(1000)
@pytest.mark.limit_s(1000)
def test_after():
    pass
"""


def test_a_test_that_never_ends_fails_alone_and_with_its_stacks(tmp_path: Path) -> None:
    """The tests behind it run, on the same worker."""
    said = run(tmp_path, test_a=ENDLESS)
    assert "1 failed, 2 passed" in said
    assert "worker" not in said.partition("FAILURES")[2]
    assert ">       time.sleep(1000)" in said
    assert "in elsewhere" in said


# pytest-xdist gives up where a worker ends while it is sent its next tests.
DEADLY = """
import os, time
def test_before():
    pass
def test_deadly():
    time.sleep(1)
    os._exit(3)
def test_after():
    pass
"""


def test_a_test_that_ends_its_worker_is_not_run_again(tmp_path: Path) -> None:
    """Each further worker would end as well; the tests behind it run on the next."""
    said = run(tmp_path, test_a=DEADLY, test_b="def test_other(): pass")
    assert said.count("node down") == 1
    assert "1 failed, 3 passed" in said


def test_tests_of_the_cluster_are_one_piece_of_work() -> None:
    """Two at a time would take each other's ports."""
    assert unit_of_work("tests/cluster/test_jobs.py::test_x[a::b]") == "tests/cluster"
    assert unit_of_work("tests/process/test_output.py::test_x[a::b]") == "tests/process/test_output.py"


def test_what_runs_first_is_there() -> None:
    """A file that has moved would be begun last."""
    assert not [name for name in LONGEST if not (ROOT / name).exists()]
