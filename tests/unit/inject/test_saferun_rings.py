"""The last calls in a failure record: of the thread that failed, as it was then, and read without any help."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from saferun.captures.call_rings import MAGIC, SIZE_BYTES
from saferun.inject import saferun_rings
from tests.unit.inject.test_hook import INJECT
from tests.unit.inject.test_saferun_calls import DEADLINE_S, environ_of, memory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["memory"]
ROOT = Path(__file__).resolve().parents[3]


def record_of(
    tmp_path: Path, memory: Path, source: str, what: str = "calls", *, inject: Path = INJECT
) -> dict[str, Any]:
    """The failure record of a script whose calls are recorded. ``inject``: where the hook is."""
    script = tmp_path / "train.py"
    script.write_text(source)
    environ = environ_of(memory, [str(tmp_path)], what=what)
    environ["PYTHONPATH"] = environ["PYTHONPATH"].replace(str(INJECT), str(inject))
    heartbeat = str(memory / "a0r0.heartbeat")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environ, "PYTHONPATH": f"{environ['PYTHONPATH']}:{ROOT}", "SAFERUN_HEARTBEAT_FILE": heartbeat},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tmp_path,
        check=False,
    )
    path = memory / "a0r0.failure"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"stderr": done.stderr}
    return record


def events_of(record: dict[str, Any]) -> list[str]:
    return [f"{row['kind']} {row['function']}:{row['line']}" for row in record.get("last_calls", ())]


FAILS = "def load(n): return n\ndef step(n):\n    load(n)\n    raise ValueError('wrong')\nfor n in range(40): load(n)\n"


def test_the_last_calls_of_the_rank_are_in_its_record(tmp_path: Path, memory: Path) -> None:
    """The newest last, with times before the record; a few dozen."""
    record = record_of(tmp_path, memory, f"{FAILS}step(3)\n")
    events = events_of(record)
    assert events[-5:-2] == ["call step:2", "call load:1", "return load:1"]
    assert events[-2].endswith(" step:2")
    assert events[-1].endswith(" <module>:1")
    assert len(events) == 32
    times = [row["before_s"] for row in record["last_calls"]]
    assert times == sorted(times, reverse=True)
    assert 0 <= times[-1] < 3600
    assert {Path(row["file"]).name for row in record["last_calls"]} == {"train.py"}


def test_a_hook_that_was_compiled_by_a_relative_path_records_no_calls_of_its_own(tmp_path: Path, memory: Path) -> None:
    """As ``python -m compileall saferun`` does: relative paths are those of the script elsewhere."""
    inject, job = tmp_path / "inject", tmp_path / "job"
    job.mkdir()
    shutil.copytree(INJECT, inject, ignore=shutil.ignore_patterns("__pycache__"))
    for source in inject.glob("*.py"):
        py_compile.compile(str(source), dfile=f"inject/{source.name}", doraise=True)
    events = events_of(record_of(job, memory, f"{FAILS}step(3)\n", inject=inject))
    assert events[-5:-2] == ["call step:2", "call load:1", "return load:1"]


def test_with_lines_there_are_lines(tmp_path: Path, memory: Path) -> None:
    """``--trace-lines``."""
    assert "line step:4" in events_of(record_of(tmp_path, memory, f"{FAILS}step(3)\n", what="lines"))


def test_of_a_thread_that_fails_there_are_its_own(tmp_path: Path, memory: Path) -> None:
    """Others go on meanwhile."""
    source = (
        f"{FAILS}import saferun, threading\nsaferun.record()\n"
        "thread = threading.Thread(target=step, args=(1,))\nthread.start(); thread.join()\n"
    )
    events = events_of(record_of(tmp_path, memory, source))
    assert events[0] == "call step:2"
    assert not any(event.endswith("<module>:1") for event in events)


CHILD = """import os, sys
child = os.fork()
if not child:
    try:
        {child}
    finally:
        os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    "child",
    [
        "step(1)",
        "import saferun; saferun.record(step)(1)",
        # As multiprocessing frameworks do: a child that is ended by os._exit never gets to the interpreter's own call.
        "step(1)\n    except ValueError:\n        sys.excepthook(*sys.exc_info())",
    ],
)
def test_a_forked_child_leaves_neither_record_nor_calls(child: str, tmp_path: Path, memory: Path) -> None:
    """And the rank's own calls are the rank's, whatever its children do."""
    assert "exceptions" not in record_of(tmp_path, memory, FAILS + CHILD.format(child=child))
    events = events_of(record_of(tmp_path, memory, f"{FAILS}{CHILD.format(child=child)}step(3)\n"))
    assert events.count("call step:2") == 1


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Path]:
    """A file in the place of this process's own."""
    path = tmp_path / f"r.{os.getpid()}.calls"
    yield path
    path.unlink(missing_ok=True)


def numbers(*at: tuple[int, int]) -> bytes:
    content = bytearray(SIZE_BYTES)
    for index, number in at:
        content[index * 8 : index * 8 + 8] = number.to_bytes(8, sys.byteorder)
    return bytes(content)


def test_whatever_the_file_holds_is_read_in_bounds(ring: Path, tmp_path: Path) -> None:
    """Its process may have failed while it wrote, and the script may write to it."""
    thread = __import__("_thread").get_native_id()
    mine = [(0, MAGIC), (1, os.getpid()), (4, 1 << 60), (512, thread), (513, 1 << 50)]
    events = [(131072 // 8 + at, (1 << 64) - 1) for at in range(512)]
    for content in (b"", b"x" * 100, numbers(), numbers(*mine), numbers(*mine, *events)):
        ring.write_bytes(content)
        try:
            found = saferun_rings.last_calls(str(tmp_path / "r"))
        except (OSError, ValueError, TypeError, IndexError):
            continue
        assert len(found) <= 32
        assert all(len(row["function"]) <= 100 and len(row["file"]) <= 100 for row in found)


def test_a_fifo_in_its_place_is_not_waited_for(ring: Path, tmp_path: Path) -> None:
    """Nothing is followed, or waited for."""
    os.mkfifo(ring)
    with pytest.raises(OSError, match="seek"):
        saferun_rings.last_calls(str(tmp_path / "r"))
