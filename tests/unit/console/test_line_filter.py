"""The lines that torchrun's filters copy to a file."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from saferun.console.rank_stream import LineFilter
from saferun.files.file_stream import FileStream


class Sink:
    """A file in memory."""

    def __init__(self) -> None:
        self.text = b""

    def write(self, text: bytes) -> None:
        self.text += text


def filtered(chunks: list[bytes], *needles: str) -> bytes:
    sink = Sink()
    line_filter = LineFilter(cast("FileStream", sink), needles, "[0]:")
    for chunk in chunks:
        line_filter.feed(chunk)
    line_filter.close()
    return sink.text


PARTS = [b"loss 1", b"loss 2", b"50%", b"", b"\r", b"\r", b"\n", b"\r\n"]


@given(st.lists(st.sampled_from(PARTS), max_size=20), st.lists(st.integers(0, 60), max_size=6))
def test_lines_are_those_that_torchrun_reads(parts: list[bytes], cuts: list[int]) -> None:
    """It opens the log as text: a message beside a bar, which a carriage return begins or ends, was missing."""
    text = b"".join(parts)
    places = sorted({*cuts, 0, len(text)})
    chunks = [text[low:high] for low, high in pairwise(places)]
    read = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", errors="replace")  # as tail_logfile of torch does
    expected = "".join(f"[0]:{line.rstrip()}\n" for line in read if "loss" in line)
    assert filtered(chunks, "loss") == expected.encode()
