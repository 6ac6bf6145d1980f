"""Messages out of chunks."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from saferun.text.framing import MessageBuffer


@given(st.lists(st.dictionaries(st.text(), st.integers()), max_size=5), st.integers(1, 40))
def test_messages_come_out_however_they_are_cut(messages: list[dict[str, int]], size: int) -> None:
    """A connection cuts where it likes."""
    content = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    buffer = MessageBuffer(1 << 20)
    found = [buffer.feed(content[at : at + size]) or [] for at in range(0, len(content), size)]
    assert [message for some in found for message in some] == messages


def test_what_is_no_object_is_left_out() -> None:
    """The next line may make sense."""
    buffer = MessageBuffer(1 << 20)
    lines = [b"", b"{", b"[1]", b"[" * 100_000, b"\xff", b'{"op": "x"}', b""]
    assert buffer.feed(b"\n".join(lines)) == [{"op": "x"}]


def test_a_line_without_end_is_the_end() -> None:
    """Whoever sends it fills no memory."""
    buffer = MessageBuffer(10)
    assert buffer.feed(b"x" * 11) == []
    assert buffer.feed(b"x") is None
