"""An error that a script handles and prints by ``sys.excepthook`` is not what ends the rank later; others are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from saferun.files.failure_files import take_failure_record
from saferun.inject import saferun_hook
from saferun.launch.failed_rank_files import last_exception
from tests.unit.inject.test_hook import DEADLINE_S, environ_of

REPOSITORY = Path(saferun_hook.__file__).parents[2]
HANDLED = """
import os, signal, sys
def probe(size):
    1 / 0
def main():
    try:
        probe(3)
    except Exception:
        {print}
main()
"""
PRINT = "sys.excepthook(*sys.exc_info())"


def ended(folder: Path, *arguments: str, **variables: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """The locals that a report of its end would show; ``train.py`` is what runs."""
    hook = environ_of(folder / "a0r0", PYTHONPATH=f"{folder}:{REPOSITORY}")
    process = subprocess.Popen(
        [sys.executable, *(arguments or ("train.py",))],
        env={**hook, **variables, "SAFERUN_HEARTBEAT_FILE": str(folder / "a0r0.heartbeat"), "RANK": "0"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=DEADLINE_S)
    at, code = time.time(), process.returncode if process.returncode >= 0 else None
    printed = last_exception(err.splitlines())
    found = take_failure_record(str(folder / "a0r0.failure"), "", process.pid, code, at, printed)
    return found.get("lines", []), subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("record", ["", "import saferun; saferun.record()\n"], ids=["hook", "saferun.record"])
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(1)", 1), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)]
)
def test_an_error_that_was_handled_and_printed_is_not_that_of_the_end(
    record: str, end: str, code: int, tmp_path: Path
) -> None:
    """A probe at the start; the rank ends by something else, hours later."""
    after = "print('Traceback', file=sys.stderr)\n"
    (tmp_path / "train.py").write_text(record + HANDLED.format(print="sys.stderr = open('log', 'w'); " + PRINT) + after)
    with (tmp_path / "train.py").open("a") as file:
        file.write(f"sys.stderr.flush(); {end}\n")
    lines, done = ended(tmp_path)
    assert (lines, done.returncode) == ([], code), done.stderr
    assert (tmp_path / "a0r0.failure").exists()


@pytest.mark.parametrize(("end", "code"), [("sys.exit(1)", 1), ("sys.exit(3)", 3), ("os._exit(70)", 70)])
def test_one_that_is_printed_at_the_end_is(end: str, code: int, tmp_path: Path) -> None:
    """The report names its traceback."""
    (tmp_path / "train.py").write_text(HANDLED.format(print=f"{PRINT}; sys.stderr.flush(); {end}"))
    lines, done = ended(tmp_path)
    assert done.returncode == code
    assert any("size = 3" in line for line in lines), done.stderr


@pytest.mark.parametrize(
    "source",
    [
        HANDLED.format(print="raise"),
        HANDLED.format(print=f"{PRINT}; raise"),
        "import sys\nbefore = sys.excepthook\nsys.excepthook = lambda *error: before(*error)\n"
        + HANDLED.format(print="raise"),
        "import sys\nsys.excepthook = lambda *error: sys.__excepthook__(*error)\n" + HANDLED.format(print="raise"),
        HANDLED.format(print=PRINT) + "def second(size):\n    raise KeyError\nsecond(3)\n",
        "import saferun; saferun.record()\n" + HANDLED.format(print="raise"),
        HANDLED.format(print="raise").replace("probe(3)", "import saferun; saferun.record(probe)(3)"),
    ],
    ids=["plain", "printed and raised", "own hook", "own hook, python's", "second", "record", "decorator"],
)
def test_one_that_nothing_handles_is(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    lines, done = ended(tmp_path)
    assert done.returncode == 1
    assert any("size = 3" in line for line in lines), done.stderr


def test_one_that_a_silent_hook_of_the_script_gets_is() -> None:
    """It is recorded at the very end, in memory, as for ranks; for a disk Python 3.12 starts no thread any more."""
    with TemporaryDirectory(prefix="saferun-", dir="/dev/shm") as name:
        folder = Path(name)
        silent = "import sys\nsys.excepthook = lambda *_: None\n"
        (folder / "train.py").write_text(silent + HANDLED.format(print="raise"))
        lines, done = ended(folder)
        assert (done.returncode, done.stderr) == (1, "")
        assert any("size = 3" in line for line in lines), lines


def test_one_that_nothing_handles_is_whatever_the_process_does_then(tmp_path: Path) -> None:
    """A library may abort while the interpreter ends."""
    end = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "train.py").write_text(end + HANDLED.format(print="raise"))
    lines, done = ended(tmp_path)
    assert done.returncode == -9
    assert any("size = 3" in line for line in lines)


@pytest.mark.parametrize("way", ["-m", "runpy", "reraised", "--pdb"])
def test_however_the_script_is_started(way: str, tmp_path: Path) -> None:
    """``reraised``: as torch's ``@record`` does it."""
    (tmp_path / "train.py").write_text(HANDLED.format(print="raise"))
    (tmp_path / "main.py").write_text("import runpy\nrunpy.run_path('train.py', run_name='__main__')\n")
    (tmp_path / "again.py").write_text(
        "def main():\n    import train\ntry:\n    main()\nexcept Exception as error:\n    raise\n"
    )
    arguments = {"-m": ("-m", "train"), "runpy": ("main.py",), "reraised": ("again.py",), "--pdb": ("train.py",)}[way]
    lines, done = ended(tmp_path, *arguments, SAFERUN_PDB="1" if way == "--pdb" else "")
    assert done.returncode == 1
    assert any("size = 3" in line for line in lines), done.stderr


def test_the_address_of_a_handled_error_hides_no_other(tmp_path: Path) -> None:
    """An exception that is gone leaves its address to the next."""
    source = (
        "import sys\n"
        "def fail(size):\n    raise ValueError(size)\n"
        "try:\n    fail(2)\nexcept ValueError as error:\n    sys.excepthook(ValueError, error, error.__traceback__)\n"
        "    first = id(error)\n"
        "kept = []\n"
        "def again(size):\n    while True:\n        error = ValueError(size)\n"
        "        if id(error) == first or len(kept) > 10**5:\n            raise error\n        kept.append(error)\n"
        "again(3)\n"
    )
    (tmp_path / "train.py").write_text(source)
    lines, done = ended(tmp_path)
    assert any("size = 3" in line for line in lines), done.stderr
    assert json.loads((tmp_path / "a0r0.failure").read_text())["uncaught"] is True


def test_of_many_that_were_handled_and_printed_it_is_the_last(tmp_path: Path) -> None:
    """Each attempt of a loop fails, with an exception at the address of the previous one; then the rank gives up."""
    source = (
        "import sys\n"
        "def attempt(step):\n    raise ValueError('no store')\n"
        "def main():\n"
        "    for step in range(3):\n"
        "        try:\n            attempt(step)\n"
        f"        except ValueError:\n            {PRINT}\n"
        "    sys.exit(1)\n"
        "main()\n"
    )
    (tmp_path / "train.py").write_text(source)
    lines, done = ended(tmp_path)
    assert any("step = 2" in line for line in lines), (lines, done.stderr)


@pytest.mark.parametrize("debugger", ["", "1"])
def test_the_hook_can_be_pickled_as_ever(debugger: str, tmp_path: Path) -> None:
    """By its name, as Python's own."""
    program = "import pickle, sys\nprint(pickle.loads(pickle.dumps(sys.excepthook)) is sys.excepthook)\n"
    program += "print(sys.excepthook.__module__, sys.excepthook.__qualname__, sys.excepthook.__name__)\n"
    environ = environ_of(tmp_path / "a0r0", SAFERUN_PDB=debugger)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == "True\nsys excepthook excepthook\n", done.stderr
    assert os.listdir(tmp_path)
