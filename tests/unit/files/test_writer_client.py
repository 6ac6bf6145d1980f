"""When ranks no longer wait for the writer of their files."""

from __future__ import annotations

import pytest

from saferun.files.writer_client import HeldUp

MIB = 1 << 20


@pytest.mark.parametrize(
    ("bytes_a_second", "held_share", "seconds", "gives_up"),
    [
        (MIB // 2, 1.0, 4, True),
        (MIB // 2, 0.1, 29, False),  # the ranks hardly wait
        (MIB // 2, 0.1, 40, True),
        (2 * MIB, 1.0, 600, False),  # a burst on a disk that is worth waiting for
        (0, 1.0, 2, False),  # a pause is none
    ],
)
def test_ranks_wait_for_what_takes_something_worth(
    bytes_a_second: int, held_share: float, seconds: int, *, gives_up: bool
) -> None:
    held = HeldUp()
    now, written, found = 1000.0, 0, False
    held.begin(now, written)
    for step in range(seconds * 10):
        now, written = now + 0.1, written + bytes_a_second // 10
        held.note(now, is_held=step % 10 < held_share * 10)
        found = found or held.is_too_slow(now, written)
    assert found == gives_up


def test_a_slow_minute_is_forgotten_once_all_is_written() -> None:
    held = HeldUp()
    held.begin(0.0, 0)
    held.note(2.9, is_held=True)
    held.begin(3.0, 1000)
    held.note(5.9, is_held=True)
    assert not held.is_too_slow(5.9, 2000)
    held.note(6.1, is_held=True)
    assert held.is_too_slow(6.1, 2000)
