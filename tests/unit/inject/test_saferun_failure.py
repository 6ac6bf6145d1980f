"""The failure record that the hook writes: what it has, what it never has, and that it harms nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.inject.saferun_written import as_json
from tests.unit.inject.test_hook import environ_of, run
from tests.unit.inject.test_saferun_calls import memory

__all__ = ["memory"]
DEADLINE_S = 30.0


def failed(folder: Path, script: str, code: int = 1, **variables: str) -> dict[str, Any]:
    """The record that a script leaves; its traceback and exit code must be as without the hook."""
    path = folder / "script.py"
    path.write_text(script)
    ended = [run([str(path)], environ_of(prefix, **variables), folder) for prefix in (None, folder / "a0r0")]
    plain, hooked = ended
    assert (hooked.returncode, without_addresses(hooked.stderr)) == (plain.returncode, without_addresses(plain.stderr))
    assert plain.returncode == code
    record = folder / "a0r0.failure"
    content = record.read_bytes() if record.exists() else b"{}"
    assert len(content) <= 128 << 10
    found: dict[str, Any] = json.loads(content)
    return found


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def locals_of(record: dict[str, Any], function: str) -> dict[str, dict[str, Any]]:
    frames = record["exceptions"][0]["frames"]
    frame = next(frame for frame in frames if frame["function"] == function)
    return {row["name"]: row for row in frame.get("locals", ())}


# ------------------------------------------------------------------------------------------------------- what it has


def test_an_uncaught_exception_is_recorded_with_its_frames_and_locals(tmp_path: Path) -> None:
    """Function, file, line, and of numbers and shapes their values."""
    record = failed(
        tmp_path,
        "def step(n, lr, shape, name, items):\n    count = len(items)\n    raise ValueError('wrong')\n"
        "step(3, 1e-3, (4, 5), 'text', [object()])\n",
    )
    error = record["exceptions"][0]
    assert (error["type"], error["message"]) == ("ValueError", "wrong")
    assert [(frame["function"], frame["line"]) for frame in error["frames"]] == [("<module>", 4), ("step", 3)]
    found = locals_of(record, "step")
    assert [found[name].get("value") for name in ("n", "lr", "shape", "count")] == ["3", "0.001", "(4, 5)", "1"]
    assert found["name"] == {"name": "name", "type": "str", "length": 4}
    assert found["items"] == {"name": "items", "type": "list", "length": 1}
    assert record["memory"]["rss_bytes"] > 0
    assert abs(record["time"] - time.time()) < 3600


def test_causes_contexts_and_members_of_groups_are_in_it(tmp_path: Path) -> None:
    """The first error is often the one that matters."""
    record = failed(
        tmp_path,
        "try:\n  try:\n    {}['a']\n  except KeyError:\n    [][1]\n"
        "except IndexError as error:\n"
        "  raise ExceptionGroup('several', [OSError(2, 'no', '/x'), ValueError()]) from error\n",
    )
    rows = [(row["type"], row.get("link", ""), row.get("of", -1)) for row in record["exceptions"]]
    assert rows == [
        ("ExceptionGroup", "", -1),
        ("IndexError", "cause", 0),
        ("FileNotFoundError", "member", 0),
        ("ValueError", "member", 0),
        ("KeyError", "context", 1),
    ]
    assert record["exceptions"][2]["message"] == "[Errno 2] no: '/x'"


def test_a_circle_of_causes_ends(tmp_path: Path) -> None:
    """Python itself prints such a chain once."""
    record = failed(tmp_path, "a, b = ValueError(1), KeyError(2)\na.__cause__ = b\nb.__cause__ = a\nraise a\n")
    assert [row["type"] for row in record["exceptions"]] == ["ValueError", "KeyError"]


def test_the_last_step_is_in_it(tmp_path: Path) -> None:
    """``saferun.step`` says how far the training had come."""
    root = str(Path(__file__).resolve().parents[3])
    script = "import saferun\nsaferun.step(7, loss=0.5)\nraise ValueError\n"
    record = failed(tmp_path, script, PYTHONPATH=root)
    assert (record["step"], record["metrics"]) == (7, {"loss": "0.5"})


# ---------------------------------------------------------------------------------------------------- what it never has


def test_no_text_of_a_local_is_in_it(tmp_path: Path) -> None:
    """Texts may be secrets, in whatever they are; and numbers by such a name."""
    script = (
        "def step(text, mapping, password, pin, items):\n    raw = b'hunter2'\n    raise ValueError('wrong')\n"
        "step('hunter2', {'hunter2': 'hunter2', 'x': ['hunter2']}, 7531902, 7531902, ('hunter2', 'hunter2'))\n"
    )
    failed(tmp_path, script)
    content = (tmp_path / "a0r0.failure").read_text()
    assert "hunter2" not in content
    assert "7531902" not in content


def test_numbers_of_ordinary_names_are_in_it(tmp_path: Path) -> None:
    """``pin`` in ``mapping`` is no word of it."""
    script = "def step(mapping, tokenizer, num_tokens, token, apiKey):\n    raise ValueError\nstep(1, 2, 3, 4, 5)\n"
    found = locals_of(failed(tmp_path, script), "step")
    assert {name: row.get("value") for name, row in found.items()} == {
        "mapping": "1",
        "tokenizer": "2",
        "num_tokens": "3",
        "token": None,
        "apiKey": None,
    }


HOSTILE = """
import time, sys
class Meta(type):
    def __getattribute__(cls, name): time.sleep(100)
    def __instancecheck__(cls, other): time.sleep(100)
    def __eq__(cls, other): time.sleep(100)
    def __hash__(cls): time.sleep(100)
class Blocks(metaclass=Meta):
    @property
    def __class__(self): time.sleep(100)
    @property
    def shape(self): time.sleep(100)
    def __getattr__(self, name): time.sleep(100)
    def __repr__(self): time.sleep(100)
    def __len__(self): time.sleep(100)
    def __iter__(self): time.sleep(100)
    def __eq__(self, other): time.sleep(100)
    def __hash__(self): time.sleep(100)
class Number(int):
    def __repr__(self): time.sleep(100)
    def bit_length(self): time.sleep(100)
class Text(str):
    def __len__(self): time.sleep(100)
class Dictionary(dict):
    def items(self): time.sleep(100)
def step():
    a, b, c, d = Blocks(), Number(3), Text('x'), Dictionary(x=1)
    e, f = [Blocks()], {'x': Blocks()}
    g = (Number(1), Number(2))
    raise ValueError('wrong')
step()
"""


def test_no_code_of_the_script_is_run(tmp_path: Path) -> None:
    """It may block, raise, or change something."""
    record = failed(tmp_path, HOSTILE)
    found = locals_of(record, "step")
    assert {name: row["type"] for name, row in found.items()} == {
        "a": "__main__.Blocks",
        "b": "__main__.Number",
        "c": "__main__.Text",
        "d": "__main__.Dictionary",
        "e": "list",
        "f": "dict",
        "g": "tuple",
    }
    assert not any("value" in row for row in found.values())


@pytest.mark.parametrize("method", ["__bool__", "__len__", "__eq__", "__hash__"])
def test_an_exception_is_not_asked_for_its_truth(method: str, tmp_path: Path) -> None:
    """That is code of the script's as well, and may print, raise or wait."""
    script = (
        f"class Mine(Exception):\n    def {method}(self, *a):\n        print('asked'); 1 / 0\nraise Mine('wrong')\n"
    )
    record = failed(tmp_path, script)
    assert record["exceptions"][0]["type"] == "__main__.Mine"


@pytest.mark.parametrize(
    "method",
    ["__str__", "__getattribute__", "__cause__", "args", "__traceback__"],
)
def test_nor_is_code_of_the_exception(method: str, memory: Path) -> None:
    """What Python prints of it calls ``__str__`` once; the record does not call it again.

    The script has an excepthook of its own: with Python 3.12 and newer, that needs a directory in memory.
    """
    body = (
        f"    def {method}(self, *names):\n        global count; count += 1\n"
        "        if count > limit: time.sleep(100)\n"
        "        return super().__getattribute__(*names) if names else 'shown'\n"
    )
    if method not in {"__str__", "__getattribute__"}:
        body = f"    @property\n{body}".replace("'shown'", "None")
    script = (
        f"import time, sys\ncount, limit = 0, 10**9\nclass Mine(Exception):\n{body}"
        "def hook(*args):\n    global limit\n    sys.stderr.write('printed\\n'); limit = count\n"
        "sys.excepthook = hook\nraise Mine('wrong')\n"
    )
    record = failed(memory, script)
    assert (record["exceptions"][0]["type"], record["exceptions"][0]["message"]) == ("__main__.Mine", "wrong")


@pytest.mark.parametrize(
    "lines",
    [
        "many = list(range(10**6)); text = 'x' * 10**8; number = 10**100000; raise ValueError(text)",
        "raise ValueError(10**100000 - 1 if False else 'x' * 10**6)",
        "exec('; '.join(f'v{i} = {i}' for i in range(5000))); raise ValueError",
        "exec('; '.join(f'v{i}' + 'x' * 500 + f' = {i}' for i in range(500))); raise ValueError",
        "raise ExceptionGroup('g', [ExceptionGroup('h', [ValueError('y' * 10**5)] * 100)] * 100)",
    ],
    ids=["values", "message", "locals", "names", "groups"],
)
def test_a_record_is_bounded(lines: str, tmp_path: Path) -> None:
    """Whatever the script has."""
    path = tmp_path / "script.py"
    path.write_text(lines)
    ended = run([str(path)], environ_of(tmp_path / "a0r0"), tmp_path)
    assert ended.returncode == 1
    content = (tmp_path / "a0r0.failure").read_bytes()
    assert 0 < len(content) <= 128 << 10
    assert json.loads(content)["exceptions"]


def test_an_endless_recursion_is_recorded(tmp_path: Path) -> None:
    """With its outermost and its innermost frames."""
    record = failed(tmp_path, "import sys\nsys.setrecursionlimit(5000)\ndef f(n):\n    f(n + 1)\nf(0)\n")
    error = record["exceptions"][0]
    assert error["type"] == "RecursionError"
    assert error["frames"][0]["function"] == "<module>"
    assert error["frames_left_out"] > 4000
    assert len(error["frames"]) == 24


def test_memory_that_runs_out_is_recorded_or_not(tmp_path: Path) -> None:
    """The exit code is the script's in any case."""
    failed(
        tmp_path,
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\nx = bytearray(1 << 40)\n",
    )
    script = "raise MemoryError\n"
    assert failed(tmp_path, script)["exceptions"][0]["type"] == "MemoryError"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(VALUES)
def test_it_is_json(value: object) -> None:
    """Whatever names and messages have, half a pair of surrogates too."""
    assert json.loads(as_json(value)) == value
    assert as_json(value).isascii()
    assert json.loads(as_json("\ud800x")) == "\ud800x"


# ------------------------------------------------------------------------------------------------ when, and when not


@pytest.mark.parametrize(
    ("script", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os._exit(4)", 4), ("import sys; sys.exit('no')", 1)],
)
def test_a_script_that_ends_otherwise_leaves_no_record(script: str, code: int, tmp_path: Path) -> None:
    """Its exit code is not an exception."""
    assert failed(tmp_path, script, code) == {}


def test_a_keyboard_interrupt_is_recorded_and_ends_as_ever(tmp_path: Path) -> None:
    """Python ends itself by SIGINT then."""
    record = failed(tmp_path, "raise KeyboardInterrupt\n", -2)
    assert record["exceptions"][0]["type"] == "KeyboardInterrupt"


def test_scripts_that_print_tracebacks_themselves_are_recorded_at_the_end(memory: Path) -> None:
    """As rich does; what it prints and the exit code are its own. On a disk, Python 3.12 starts no thread for it."""
    record = failed(memory, "import sys\nsys.excepthook = lambda *args: print('mine', file=sys.stderr)\n1 / 0\n")
    assert record["exceptions"][0]["type"] == "ZeroDivisionError"
    assert record["exceptions"][0]["frames"]


def test_a_forked_child_leaves_no_record(tmp_path: Path) -> None:
    """It is no rank; the parent's record is the parent's."""
    script = "import os\npid = os.fork()\nif not pid:\n    raise ValueError('child')\nos.waitpid(pid, 0)\n"
    assert failed(tmp_path, script, 0) == {}
    assert failed(tmp_path, f"{script}raise KeyError('parent')\n")["exceptions"][0]["type"] == "KeyError"


def test_an_exception_of_a_thread_does_not_end_the_rank_and_is_not_recorded(tmp_path: Path) -> None:
    """``saferun.record()`` records those, too."""
    script = "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n"
    assert failed(tmp_path, script, 0) == {}


@pytest.mark.parametrize("how", ["missing", "full", "directory"])
def test_where_it_cannot_be_written_the_script_ends_as_ever(how: str, tmp_path: Path) -> None:
    """A full disk, and whatever stands in its place."""
    folder = tmp_path / "hook"
    folder.mkdir()
    script = "raise ValueError('wrong')\n"
    if how == "missing":
        script = f"import shutil\nshutil.rmtree({str(folder)!r}, ignore_errors=True)\n{script}"
    if how == "full":
        script = (
            "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n{script}"
        )
    if how == "directory":
        (folder / "a0r0.failure").mkdir()
    path = tmp_path / "script.py"
    path.write_text(script)
    ended = run([str(path)], environ_of(folder / "a0r0"), tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: wrong\n")
    left = [] if how == "missing" else [path.name for path in folder.iterdir() if path.name.endswith(".new")]
    assert not left
    assert (folder / "a0r0.failure").is_file() is False


def test_what_has_ended_with_a_script_ends_as_ever(tmp_path: Path) -> None:
    """The hook keeps no object alive: ``__del__`` runs when it always has."""
    record = failed(
        tmp_path,
        "import atexit, sys\nclass Ends:\n    def __del__(self): print('over', file=sys.stderr)\n"
        "atexit.register(lambda: print('at exit', file=sys.stderr))\n"
        "def step():\n    one = Ends()\n    raise ValueError\nstep()\n",
    )
    assert record["exceptions"][0]["type"] == "ValueError"


def test_a_signal_handler_that_ends_the_script_meanwhile_decides_its_exit_code(tmp_path: Path) -> None:
    """SystemExit of a handler is the script's."""
    script = (
        "import os, signal, sys\n"
        "def handler(*_):\n    raise SystemExit(9)\n"
        "signal.signal(signal.SIGUSR1, handler)\n"
        "class Dictionary(dict):\n    pass\n"
        "original = os.getpid\n"
        "def getpid():\n    os.kill(original(), signal.SIGUSR1)\n    return original()\n"
        "os.getpid = getpid\nraise ValueError\n"
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    assert run([str(path)], environ_of(tmp_path / "a0r0"), tmp_path).returncode == 9


def test_python_finds_its_own_hook(tmp_path: Path) -> None:
    """Programs compare ``sys.excepthook`` with ``sys.__excepthook__`` to see whether somebody has changed it."""
    script = (
        "import sys\nassert sys.excepthook is sys.__excepthook__\nsys.__excepthook__(ValueError, ValueError(1), None)\n"
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    ended = subprocess.run(
        [sys.executable, str(path)],
        env=environ_of(tmp_path / "a0r0"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "ValueError: 1\n")
    assert (tmp_path / "a0r0.failure").exists()
