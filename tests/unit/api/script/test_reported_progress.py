"""What a script reports: it never raises, costs next to nothing, and is read as it was written."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import saferun
from saferun.api.script import reported_progress
from saferun.linux.small_files import read_at_once
from saferun.text.script_state import SIZE_BYTES, ScriptState, state_from

ROOT = Path(__file__).resolve().parents[3]


class Odd:
    """A value that cannot be read."""

    def __float__(self) -> float:
        raise RuntimeError("no")


class OnGpu:
    """As a tensor of a GPU looks."""

    device = SimpleNamespace(type="cuda")

    def __float__(self) -> float:
        raise AssertionError("this would wait for the GPU")


class NeedsGradient:
    """As a tensor of a CPU that requires a gradient; a warning is an error."""

    device = SimpleNamespace(type="cpu")

    def __float__(self) -> float:
        raise UserWarning("Converting a tensor with requires_grad=True to a scalar may lead to unexpected behavior.")

    def detach(self) -> float:
        return 0.25


class Warns:
    """Any other whose reading is warned of."""

    def __float__(self) -> float:
        raise UserWarning("deprecated")


class NoAttributes:
    """Its attributes are code of the program's."""

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAFERUN_HEARTBEAT_FILE", str(tmp_path / "a0r0.heartbeat"))
    monkeypatch.setattr(reported_progress, "_reported", reported_progress._Reported())
    return tmp_path / "a0r0.progress"


def read(path: Path) -> ScriptState:
    state = state_from(read_at_once(str(path), SIZE_BYTES))
    assert state is not None
    return state


def test_a_step_is_read_as_it_was_reported(path: Path) -> None:
    saferun.step(7, loss=0.5, lr=1)
    state = read(path)
    assert (state.step, state.metrics, state.bad, state.phase) == (7, (("loss", 0.5), ("lr", 1.0)), None, None)
    assert -0.01 <= time.monotonic() - state.step_at < 60
    saferun.step(8, loss=0.4)
    assert read(path).metrics == (("loss", 0.4), ("lr", 1.0))
    assert read(path).mark != state.mark
    assert not path.with_suffix(".heartbeat").exists(), "a step promises no further one"


def test_a_value_that_cannot_be_read_costs_itself_alone(path: Path) -> None:
    """Neither the step nor the other values."""
    odd: Any = {"a": Warns(), "b": NoAttributes(), "c": Odd(), "loss": NeedsGradient(), "lr": 1}
    saferun.step(7, **odd)
    assert (read(path).step, read(path).metrics) == (7, (("loss", 0.25), ("lr", 1.0)))


def test_the_first_value_that_is_no_number_stays(path: Path) -> None:
    """It is reported once, also where the next steps come before saferun reads the file."""
    saferun.step(3, grad=math.inf)
    saferun.step(4, loss=math.nan)
    state = read(path)
    assert state.bad == (3, "grad", "inf")
    assert math.isnan(dict(state.metrics)["loss"])


@pytest.mark.parametrize(
    ("number", "metrics"),
    [
        ("x", {}),
        (-1, {}),
        (1 << 60, {}),
        (None, {"loss": 1}),
        (1, {"loss": Odd()}),
        (1, {"loss": "not a number"}),
        (1, {"loss": OnGpu()}),
        (1, {f"metric_{i}": i for i in range(1000)}),
        (1, {"x" * 10000: 1, "a b\nc": 2, "ü": 3}),
    ],
)
def test_whatever_is_reported_never_raises_and_can_be_read(number: Any, metrics: dict[str, Any], path: Path) -> None:
    saferun.step(0)
    saferun.step(number, **metrics)
    assert read(path).step in {0, 1}


def test_a_phase_is_there_while_it_lasts_and_the_one_that_ends_first_counts(path: Path) -> None:
    with saferun.expect(3600, "evaluating"):
        with saferun.expect(60, "saving\nthe checkpoint"):
            phase = read(path).phase
            assert phase is not None
            assert phase.what == "saving the checkpoint"
            assert phase.until - phase.since == pytest.approx(60, abs=0.01)
        outer = read(path).phase
        assert outer is not None
        assert outer.what == "evaluating"
    assert read(path).phase is None


def test_an_exception_ends_a_phase_and_goes_on(path: Path) -> None:
    def fail() -> None:
        with saferun.expect(60, "x"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert read(path).phase is None


@pytest.mark.parametrize("seconds", [math.nan, -1, 0, "soon", None, math.inf, 1e300])
def test_a_phase_of_no_time_has_no_effect_and_one_of_all_times_lasts_a_day(seconds: Any, path: Path) -> None:
    saferun.step(0)
    with saferun.expect(seconds, "x"):
        phase = read(path).phase
        assert phase is None or phase.until - phase.since == pytest.approx(86400)


@pytest.mark.parametrize("value", ["", "/no/such/directory/a.heartbeat", "\x01", "relative/none", "other"])
def test_nothing_is_written_and_raised_elsewhere(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFERUN_HEARTBEAT_FILE", value)
    saferun.step(1, loss=1.0)
    with saferun.expect(5, "x"):
        pass
    monkeypatch.delenv("SAFERUN_HEARTBEAT_FILE")
    saferun.step(1, loss=1.0)
    with saferun.expect(5, "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_what_lies_at_the_path_is_not_followed_and_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    saferun.step(1)
    assert read_at_once(str(path), SIZE_BYTES) == b""
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))
    path.with_name("elsewhere").write_text("theirs")
    saferun.step(2)
    assert path.with_name("elsewhere").read_text() == "theirs"
    assert read_at_once(str(path), SIZE_BYTES) == b""


def test_a_script_that_reports_loads_nothing_slow() -> None:
    """Neither torch, nor what an interpreter does not have at its start anyway."""
    program = "import sys, os, time, math; before = set(sys.modules); import saferun; saferun.step; saferun.expect; "
    done = subprocess.run(
        [sys.executable, "-S", "-c", program + "print(*sorted(set(sys.modules) - before))"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert {"saferun", "saferun.api.script", "saferun.api.script.reported_progress"} <= loaded
    # importlib itself takes ``warnings`` and the like.
    assert not loaded & {"torch", "json", "typing", "dataclasses", "contextlib", "threading", "inspect", "re"}


def test_a_child_that_is_forked_in_a_phase_does_not_end_it(path: Path) -> None:
    """It leaves the ``with`` as the rank does: by an exception, or at the end of what it was forked for."""
    with saferun.expect(60, "saving"):
        child = os.fork()
        if not child:
            try:
                raise SystemExit  # noqa: TRY301 - as in a script
            except SystemExit:
                reported_progress._reported.phases[0].__exit__(None, None, None)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        phase = read(path).phase
        assert phase is not None
        assert phase.what == "saving"
    assert read(path).phase is None
