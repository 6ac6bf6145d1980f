"""What py-spy counts, read, packed for the host that leads, and unpacked."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.recording import (
    CountedStack,
    Recording,
    decode_recordings,
    encode_recordings,
    stacks_from_text,
)

# As py-spy 0.4 prints it.
TEXT = b"""py-spy> Sampling process 100 times a second for 2 seconds. Press Control-C to exit.
thread (10467): MainThread;<module> (/w/a b.py:9);work (/w/a b.py:5) 66
thread (0x7f1);run (threading.py:982);idle (/w/w.py:7) 120
thread (10468): MainThread;<module> (/w/a b.py:9);work (/w/a b.py:5) 4
process 12:"python, 3;x" 2
no number
 7
"""


def test_the_stacks_are_counted_without_the_numbers_of_threads() -> None:
    assert stacks_from_text(TEXT) == (
        CountedStack(("thread", "run (threading.py:982)", "idle (/w/w.py:7)"), 120),
        CountedStack(("MainThread", "<module> (/w/a b.py:9)", "work (/w/a b.py:5)"), 70),
        CountedStack(('process 12:"python, 3', 'x"'), 2),
    )


def test_names_hold_no_secrets() -> None:
    secret = "ghp_" + "a1B2" * 9
    (stack,) = stacks_from_text(f"thread (1): token={secret};f (/data/key={secret}/train.py:12) 3\n".encode())
    assert secret not in "".join(stack.frames)
    assert stack.frames[1].endswith("/train.py:12)")


@given(st.binary(max_size=300))
def test_anything_else_is_no_stack(content: bytes) -> None:
    for stack in stacks_from_text(content):
        assert stack.frames
        assert stack.samples >= 0
    stacks_from_text(b"f 1" + content)


def recording(rank: int, stacks: int) -> Recording:
    """A recording with so many different stacks; the first ones are the most frequent."""
    counted = tuple(
        CountedStack(("MainThread", f"function_{rank}_{i} (/w/{i}.py:{i})"), stacks - i) for i in range(stacks)
    )
    return Recording(rank, 100 + rank, counted)


def test_recordings_travel_as_text() -> None:
    found = [recording(0, 30), Recording(3, 103, failure="py-spy is not installed")]
    text = encode_recordings(found, 1 << 16)
    assert text.isascii()
    assert decode_recordings(text) == found


def test_the_rarest_stacks_are_left_out_where_there_is_no_room() -> None:
    """And counted."""
    whole = recording(0, 2000)
    text = encode_recordings([whole], 8 << 10)
    assert 0 < len(text) <= 8 << 10
    (found,) = decode_recordings(text)
    assert found.stacks == whole.stacks[: len(found.stacks)]
    assert found.samples == whole.samples
    assert found.left_out > 0
    assert encode_recordings([whole], 10) == ""


def packed(value: object) -> str:
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "é",
        packed({}),
        packed([[], [[0, 1, [[[5], 1]], "", 0]]]),
        packed([["f"], [[-1, 1, [], "", 0]]]),
        packed([["f"], [[0, 1, [[[0], -3]], "", 0]]]),
        packed([[["f"]], [[0, 1, [[[0], 1]], "", 0]]]),
        packed([["f"], 3]),
    ],
)
def test_what_another_host_sends_may_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="no recordings"):
        decode_recordings(text)


def test_what_another_host_sends_is_not_unpacked_without_bound() -> None:
    with pytest.raises(ValueError, match="no recordings"):
        decode_recordings(base64.b85encode(zlib.compress(b" " * (1 << 26))).decode())
