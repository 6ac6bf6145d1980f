"""What a rank may have written into its progress file is bounded, and what does not fit is left out."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saferun.text.script_state import SIZE_BYTES, ReportedPhase, ScriptState, state_from, step_text


def file(*lines: str, mark: str = "1.1", end: str | None = None) -> bytes:
    text = "\n".join([mark, *lines]) + "\n"
    tail = f"{mark if end is None else end}\n"
    return text.encode().ljust(SIZE_BYTES - len(tail)) + tail.encode()


def test_what_is_half_written_is_not_read() -> None:
    assert state_from(file("step 1 2.0")) == ScriptState("1.1", 1, 2.0)
    assert state_from(file("step 1 2.0", end="1.2")) is None
    assert state_from(b"") is None
    assert state_from(file()[:-1]) is None
    assert state_from(b" " * SIZE_BYTES) is None


@pytest.mark.parametrize(
    "line",
    [
        "step -1 2.0",
        "step 99999999999999999999999999999999999999 2.0",
        "step 1 nan",
        "step 1",
        "step ² 1.0",
        "phase 2.0 1.0 backwards",
        "phase nan 1.0 x",
        "phase 0.0 inf x",
        "phase 1.0 1e9 longer than a day",
        "metric x",
        "metric x y",
        "bad x loss nan",
        "bad 1",
        "",
        "something else",
    ],
)
def test_what_does_not_fit_is_left_out(line: str) -> None:
    assert state_from(file(line, "step 7 1.0")) == ScriptState("1.1", 7, 1.0)


def test_texts_are_bounded_and_have_no_control_characters() -> None:
    state = state_from(file("phase 1.0 9.0 \x1b[2J" + "x" * 300, "bad 1 \x1b]0;x nan" + "9" * 99))
    assert state is not None
    assert state.phase is not None
    assert len(state.phase.what) <= 80
    assert "\x1b" not in state.phase.what
    assert state.bad is not None
    assert "\x1b" not in state.bad[1]
    assert len(state.bad[2]) <= 8


@given(st.binary(max_size=SIZE_BYTES))
@example(b"\xff" * 100)
def test_no_content_raises(content: bytes) -> None:
    state_from(content)
    tail = b" 1.1\n"
    body = b"1.1\n" + content
    state_from(body[: SIZE_BYTES - len(tail)].ljust(SIZE_BYTES - len(tail)) + tail)


def test_a_step_in_words() -> None:
    assert step_text(ScriptState(), 5.0) == ""
    state = ScriptState("1.1", 120, 100.0, (("loss", 0.53124567), ("lr", 1e-4)))
    assert step_text(state, 104.2) == "step 120 (loss 0.531246, lr 0.0001), 4 s before"
    phase = ReportedPhase("x", 1.0, 2.0)
    assert step_text(ScriptState("1.1", 3, 0.0, (), None, phase), 4.0) == "step 3"
