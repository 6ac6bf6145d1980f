"""``--trace-calls`` in whole launches whose ranks run on newer Pythons, where ``sys.monitoring`` reports calls.

saferun itself runs on the Python of the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.matrix import DIRECTORY, UnavailableError, interpreter
from tests.process.test_last_calls import STEPS, incident_of, last_calls_of, launch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
ENDS = [("call", "step"), ("call", "load"), ("return", "load"), ("return", "step")]


@pytest.fixture(scope="module", params=["3.12", "3.13", "3.14"])
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter of this release, wherever the machine has one, or that of a newer Debian."""
    DIRECTORY.mkdir(exist_ok=True)
    try:
        return interpreter(request.param)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("evaluate", "how"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("ctypes.string_at(0)", "SIGSEGV")],
    ids=["SIGKILL", "SIGSEGV"],
)
def test_a_rank_that_was_killed_shows_its_last_calls(tmp_path: Path, python: str, evaluate: str, how: str) -> None:
    done = launch(tmp_path, STEPS.format(evaluate=evaluate), "--trace-calls", "train", "--cores", "off", python=python)
    assert done.returncode != 0
    assert how in done.stderr
    calls = last_calls_of(incident_of(tmp_path))
    assert calls[1][-5:] == [*ENDS, ("call", "evaluate")]
    assert calls[0][-4:] == ENDS


def test_a_rank_that_holds_the_gil_shows_its_last_calls(tmp_path: Path, python: str) -> None:
    source = STEPS.format(evaluate="ctypes.PyDLL(None).sleep(1000)").replace("time.sleep", "ctypes.PyDLL(None).sleep")
    options = ("--hang-timeout", "2", "--on-hang", "stop", "--external-wait-timeout", "0")
    done = launch(tmp_path, source, "--trace-calls", "train", *options, python=python)
    assert done.returncode != 0
    calls = last_calls_of(incident_of(tmp_path))
    assert calls[1][-1] == ("call", "evaluate")
    assert calls[0][-1] == ("return", "step")


def test_lines_are_recorded_of_one_rank(tmp_path: Path, python: str) -> None:
    source = STEPS.format(evaluate="os.kill(os.getpid(), signal.SIGKILL)")
    done = launch(tmp_path, source, "--trace-lines", "1", "--cores", "off", python=python)
    assert "rank 1 records lines, too" in done.stderr
    incident = incident_of(tmp_path)
    kinds = {rank["rank"]: {e["kind"] for e in rank["threads"][0]["events"]} for rank in incident["last_calls"]}
    assert ("line" in kinds[0], "line" in kinds[1]) == (False, True)


def test_an_exception_leaves_a_failure_record_with_its_last_calls(tmp_path: Path, python: str) -> None:
    """Also where the script prints tracebacks itself."""
    source = STEPS.format(evaluate="raise ValueError('wrong')")
    source = f"sys.excepthook = lambda *_: print('mine', file=sys.stderr)\n{source}"
    done = launch(tmp_path, source, "--trace-calls", "train", python=python)
    assert done.returncode == 1
    assert "mine" in done.stderr
    (record,) = (tmp_path / "run").rglob("failure.json")
    assert '"ValueError"' in record.read_text()
    assert "evaluate" in record.read_text()
