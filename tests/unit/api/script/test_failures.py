"""``saferun.record`` in a script: what it records, and that it changes nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import saferun
from saferun.api.script import failures

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport saferun\n{source}")
    return subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        start_new_session=True,  # as a rank
    )


def record_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


DECORATED = """
@saferun.record
def main(n):
    "What it does."
    raise ValueError("wrong")
assert main.__name__ == "main" and main.__doc__ == "What it does."
try:
    main(3)
except ValueError as error:
    print(error, [type(error.__cause__), type(error.__context__)], flush=True)
    sys.exit(5)
"""


def test_what_leaves_a_decorated_function_is_recorded_also_where_the_caller_handles_it(tmp_path: Path) -> None:
    """Many scripts catch everything around main, and exit with a code of their own."""
    done = run(tmp_path, DECORATED, SAFERUN_HEARTBEAT_FILE=str(tmp_path / "a0r0.heartbeat"))
    assert (done.returncode, done.stdout) == (5, "wrong [<class 'NoneType'>, <class 'NoneType'>]\n")
    error = record_in(tmp_path / "a0r0.failure")["exceptions"][0]
    assert error["frames"][-1]["locals"] == [{"name": "n", "type": "int", "value": "3"}]


def test_another_program_that_a_rank_starts_leaves_no_record_in_its_place(tmp_path: Path) -> None:
    """It has the rank's variables, and may fail without that the rank does. A file that it names is its own."""
    (tmp_path / "tool.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport saferun\nsaferun.record(file='tool.json')\n1 / 0\n"
    )
    source = "import subprocess\nsys.exit(subprocess.call([sys.executable, 'tool.py']))\n"
    done = run(tmp_path, source, SAFERUN_HEARTBEAT_FILE=str(tmp_path / "a0r0.heartbeat"))
    assert done.returncode == 1
    assert record_in(tmp_path / "tool.json")["exceptions"][0]["type"] == "ZeroDivisionError"
    assert not (tmp_path / "a0r0.failure").exists()


def test_outside_saferun_nothing_is_written(tmp_path: Path) -> None:
    """The same script runs under every launcher."""
    done = run(tmp_path, DECORATED)
    assert done.returncode == 5
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_file_that_is_named_is_written_everywhere(tmp_path: Path) -> None:
    done = run(tmp_path, "saferun.record(file='failure-{rank}.json')\n1 / 0\n", RANK="3")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.stderr.count("Traceback") == 1
    assert record_in(tmp_path / "failure-3.json")["rank"] == "3"


def test_exceptions_of_threads_are_recorded_with_the_threads_name(tmp_path: Path) -> None:
    """They do not end the rank, but others wait for what the thread was to do."""
    source = (
        "import threading\nsaferun.record(file='f.json')\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='loader')\nt.start()\nt.join()\n"
    )
    done = run(tmp_path, source)
    assert done.returncode == 0
    assert "Exception in thread loader" in done.stderr
    record = record_in(tmp_path / "f.json")
    assert (record["thread"], record["exceptions"][0]["type"]) == ("loader", "ZeroDivisionError")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("@saferun.record(file='f.json')\ndef main():\n    sys.exit(3)\nmain()\n", 3),
        (
            (
                "import threading\nsaferun.record(file='f.json')\nt = threading.Thread(target=sys.exit)\n"
                "t.start()\nt.join()\n"
            ),
            0,
        ),
        (
            (
                "import os\nsaferun.record(file='f.json')\npid = os.fork()\nif not pid:\n    1 / 0\n"
                "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
            ),
            1,
        ),
    ],
    ids=["sys.exit", "of a thread", "forked child"],
)
def test_what_is_no_failure_of_this_process_is_not_recorded(source: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, source)
    assert done.returncode == code
    assert not (tmp_path / "f.json").exists()


@pytest.mark.parametrize("process", ["", "process = None", "process = 7", "__slots__ = ()"])
def test_the_hook_of_another_release_is_no_obstacle(process: str, tmp_path: Path) -> None:
    """The script may have another saferun than the launcher; and others may have such a class."""
    source = "import sys\nclass _TorchWatcher:\n    find_spec = lambda *_: None\n"
    before = f"{source}    {process}\nsys.meta_path.insert(0, _TorchWatcher())\n"
    path = tmp_path / "script.py"
    path.write_text(f"{before}sys.path.insert(0, {str(ROOT)!r})\nimport saferun\nsaferun.record(print)(3)\n")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_leaves_no_record_for_the_rank(method: str, tmp_path: Path) -> None:
    """A spawned one imports the script once more, with the rank's environment: it would take the record's place."""
    source = (
        "import multiprocessing\nsaferun.record(file='f.json')\n@saferun.record(file='f.json')\n"
        "def load():\n    raise ValueError('of the child')\n"
        f"if __name__ == '__main__':\n    child = multiprocessing.get_context({method!r}).Process(target=load)\n"
        "    child.start()\n    child.join()\n    assert child.exitcode == 1\n"
    )
    done = run(tmp_path, source, SAFERUN_HEARTBEAT_FILE=str(tmp_path / "a0r0.heartbeat"))
    assert done.returncode == 0, done.stderr
    assert "of the child" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


def test_a_file_system_that_hangs_keeps_nobody_from_ending(tmp_path: Path) -> None:
    """Of the file that is named, too."""
    source = (
        "import os\nos.mkfifo(f'f.json.{os.getpid()}.new')\n@saferun.record(file='f.json')\n"
        "def main():\n    raise ValueError('wrong')\nmain()\n"
    )
    done = run(tmp_path, source)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: wrong\n")


def test_a_keyboard_interrupt_ends_the_script_as_ever(tmp_path: Path) -> None:
    source = "@saferun.record(file='f.json')\ndef main():\n    raise KeyboardInterrupt\nmain()\n"
    assert run(tmp_path, source).returncode == -2
    assert record_in(tmp_path / "f.json")["exceptions"][0]["type"] == "KeyboardInterrupt"


def test_a_coroutine_function_stays_one(tmp_path: Path) -> None:
    source = (
        "import asyncio, inspect\n@saferun.record(file='f.json')\nasync def main():\n    raise ValueError('wrong')\n"
        "assert inspect.iscoroutinefunction(main)\nasyncio.run(main())\n"
    )
    assert run(tmp_path, source).returncode == 1
    assert record_in(tmp_path / "f.json")["exceptions"][0]["type"] == "ValueError"


@pytest.mark.parametrize("path", ["missing/f.json", "fifo", "."])
def test_where_it_cannot_be_written_the_exception_is_the_same(path: str, tmp_path: Path) -> None:
    """A full disk costs the record only; what is no file stays what it is."""
    os.mkfifo(tmp_path / "fifo")
    done = run(tmp_path, f"@saferun.record(file={path!r})\ndef main():\n    raise ValueError('wrong')\nmain()\n")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: wrong\n")
    assert "another exception" not in done.stderr
    assert (tmp_path / "fifo").is_fifo()


def test_what_a_function_returns_and_takes_stays() -> None:
    @saferun.record
    def add(first: int, *, second: int = 2) -> int:
        return first + second

    assert add(1) == 3
    assert add(1, second=5) == 6


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """By nothing of this."""
    source = (
        "saferun.record(file='f.json')\n@saferun.record\ndef main():\n    1 / 0\n"
        "try:\n    main()\nexcept ZeroDivisionError:\n    print('torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    assert run(tmp_path, source).stdout == "False False\n"


def test_other_hooks_are_called_as_ever(tmp_path: Path) -> None:
    """The one that was installed before prints."""
    source = (
        "sys.excepthook = lambda *args: print('mine')\n"
        "saferun.record(file='f.json')\nsaferun.record(file='g.json')\n1 / 0\n"
    )
    done = run(tmp_path, source)
    assert (done.returncode, done.stdout, done.stderr) == (1, "mine\n", "")
    assert not (tmp_path / "f.json").exists()
    assert record_in(tmp_path / "g.json")["exceptions"]


def test_it_is_silent_where_the_description_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistake of saferun's own is no mistake of the script's."""
    from saferun.inject import saferun_failure

    def described(*_: object) -> bytes:
        raise RuntimeError("planted")

    monkeypatch.setattr(saferun_failure, "described", described)

    @failures.record(file=str(tmp_path / "f.json"))
    def main() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        main()


def test_what_prints_uncaught_exceptions_can_be_pickled_as_ever(tmp_path: Path) -> None:
    """By its name, as Python's own: an object that keeps the previous one may go to a process that is spawned."""
    source = """
import pickle, threading
saferun.record()
for hook in (sys.excepthook, threading.excepthook):
    print(pickle.loads(pickle.dumps(hook)) is hook)
"""
    done = run(tmp_path, source, SAFERUN_HEARTBEAT_FILE=str(tmp_path / "a0r0.heartbeat"))
    assert done.stdout == "True\nTrue\n", done.stderr
