"""Folding of tracebacks: copies are dropped only where another rank has shown exactly the same lines."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console.cpp_frames import HOLD_S
from saferun.console.folding import GROUP_MARKER, MARKER, Folding

FRAMES = b'Traceback (most recent call last):\n  File "train.py", line 8, in <module>\n    step()\n'
LABELS = FRAMES + b"KeyError: 'labels'\n"
BATCH = FRAMES + b"ValueError: batch\n"
CHAINED = FRAMES + b"KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n" + BATCH


GROUP = (
    GROUP_MARKER
    + b"""
  |   File "train.py", line 8, in <module>
  |     step()
  | ExceptionGroup: shards (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 3, in load
    | KeyError: 2
    +---------------- 2 ----------------
    | ExceptionGroup: more (1 sub-exception)
    +-+---------------- 1 ----------------
      | OSError: 3
      +------------------------------------
    +------------------------------------
"""
)
SYNTAX = b'  File "/job/train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
RAISED = b"Exception raised from meta at ../LinearAlgebra.cpp:182 (most recent call first):\n"


def cpp_frames(rank: int, count: int = 31) -> bytes:
    """As torch appends them; the addresses are those of a process."""
    return b"".join(b"frame #%d: c10::f(int) + 0x96 (0x7f%d in libc10.so)\n" % (i, rank) for i in range(count))


def mismatch(rank: int) -> bytes:
    """A traceback whose message has C++ frames."""
    return FRAMES + b"RuntimeError: mat1 and mat2\n" + RAISED + cpp_frames(rank)


class Console:
    """Ranks whose stderr passes through the folding; the clock is the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.copies: dict[int, list[bytes]] = {}
        copies = self.copies

        class Watched(Folding):
            def _fold(self, key, stream, other):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
                copies.setdefault(key, []).append(bytes(stream.held[: stream.parsed]))
                return super()._fold(key, stream, other)

        self.folding = Watched()
        self.shown: dict[int, bytes] = {}
        self.written: dict[int, bytes] = {}
        self.notes: list[str] = []

    def write(self, rank: int, text: bytes) -> None:
        self.written[rank] = self.written.get(rank, b"") + text
        key: object = rank
        at_line_start = self.shown.get(rank, b"\n")[-1:] in {b"\n", b""}
        if self.folding.wants(key, text):  # type: ignore[arg-type]
            text = self.folding.feed(key, rank, text, self.now, at_line_start=at_line_start)  # type: ignore[arg-type]
        self._show(rank, text)

    def wait(self, seconds: float) -> None:
        """Time passes; the loop wakes at the deadline, and not before."""
        end = self.now + seconds
        while (due := self.folding.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self._tick()
        self.now = end
        self._tick()
        for stream in self.folding._streams.values():
            assert not stream.held or self.now - stream.since < HOLD_S
        assert not self.folding._frames.due(self.now)

    def _tick(self) -> None:
        for key, text in self.folding.tick(self.now):
            self._show(key, text)  # type: ignore[arg-type]
        self.notes += self.folding.notes(self.now)

    def end(self, rank: int) -> None:
        self._show(rank, self.folding.end(rank, self.now))  # type: ignore[arg-type]

    def _show(self, rank: int, text: bytes) -> None:
        self.shown[rank] = self.shown.get(rank, b"") + text


def test_copies_of_other_ranks_are_named_in_one_note() -> None:
    console = Console()
    for rank in range(8):
        console.write(rank, LABELS)
        console.wait(0.01)
    assert console.shown[0] == LABELS
    assert not any(console.shown[rank] for rank in range(1, 8))
    assert not console.notes
    console.wait(HOLD_S)
    assert console.notes == ["ranks 1-7: the same as rank 0: KeyError: 'labels'"]
    assert not any(console.shown[rank] for rank in range(1, 8))
    assert console.folding.deadline is None


def test_line_by_line_at_the_same_time() -> None:
    """The first rank is not always ahead."""
    console = Console()
    lines = CHAINED.splitlines(keepends=True)
    console.write(3, lines[0])
    for line, later in zip(lines, [*lines[1:], b""], strict=True):
        cut = 0 if line.startswith(MARKER) else 5
        console.write(1, line[:cut])
        console.write(1, line[cut:])
        console.write(3, later)
        console.wait(0.001)
    console.wait(1.0)
    assert console.shown == {3: CHAINED, 1: b""}
    assert console.notes == ["rank 1: the same as rank 3: ValueError: batch"]


def test_torch_tags_do_not_differ() -> None:
    console = Console()
    for rank in (0, 1):
        tagged = b"".join(b"[rank%d]: %s" % (rank, line) for line in LABELS.splitlines(keepends=True))
        console.write(rank, tagged + b"[W1122 20:15:33.1 torch] %d\n" % rank)
    assert console.shown[0].endswith(b"torch] 0\n")
    assert console.shown[1] == b"[W1122 20:15:33.1 torch] 1\n"
    console.wait(1)
    assert len(console.notes) == 1


@pytest.mark.parametrize("text", [GROUP, SYNTAX, CHAINED, CHAINED.replace(BATCH, GROUP)])
@pytest.mark.parametrize("is_tagged", [False, True])
def test_other_shapes(text: bytes, is_tagged: bool) -> None:
    console = Console()
    for rank in range(3):
        tag = b"[rank%d]: " % rank if is_tagged and text is not SYNTAX else b""
        for line in text.splitlines(keepends=True):
            console.write(rank, tag + line)
    console.wait(1)
    assert console.shown[0]
    assert not console.shown[1]
    assert not console.shown[2]
    (note,) = console.notes
    last = {GROUP: "ExceptionGroup: shards (2 sub-exceptions)", SYNTAX: "SyntaxError: invalid syntax"}.get(text)
    assert note.startswith("ranks 1-2: the same as rank 0: ")
    assert last is None or note.endswith(last)


def test_groups_that_differ_in_their_last_member_are_shown() -> None:
    console = Console()
    other = GROUP.replace(b"OSError: 3", b"OSError: 4")
    console.write(0, GROUP)
    console.write(1, other)
    console.wait(1)
    assert console.shown[1] == other


@pytest.mark.parametrize(
    "line", [b'  File "x.py", line 3 in f', b'  File "x.py", line 3, in f', b'  File "x', b"  File"]
)
def test_frames_alone_are_no_syntax_error(line: bytes) -> None:
    """Of faulthandler, for instance."""
    console = Console()
    for rank in (0, 1):
        console.write(rank, line + b"\nKeyError: 1\n")
    assert console.shown[1] == line + b"\nKeyError: 1\n"


def test_a_traceback_at_the_end_of_much_output() -> None:
    console = Console()
    before = b"loss 1\n" * 9_000
    for rank in (0, 1):
        console.write(rank, before + LABELS)
    assert console.shown == {0: before + LABELS, 1: before}
    console.wait(1)
    assert console.notes


@pytest.mark.parametrize("size", [1 << 20, 700])
def test_cpp_frames_are_one_line(size: int) -> None:
    console = Console()
    text = mismatch(0) + b"after\n"
    for start in range(0, len(text), size):
        console.write(0, text[start : start + size])
    note = b"(31 lines of C++ frames: in the rank's stderr.log)\n"
    assert console.shown[0] == FRAMES + b"RuntimeError: mat1 and mat2\n" + RAISED + note + b"after\n"


def test_cpp_frames_at_the_end_are_named_in_time() -> None:
    console = Console()
    console.write(0, RAISED)
    assert console.shown[0] == RAISED
    console.write(0, cpp_frames(0))
    console.wait(HOLD_S)
    assert console.shown[0] == RAISED + b"(31 lines of C++ frames: in the rank's stderr.log)\n"


def test_tracebacks_that_differ_in_addresses_of_cpp_frames_alone_are_the_same() -> None:
    console = Console()
    for rank in range(4):
        tagged = b"".join(b"[rank%d]: %s" % (rank, line) for line in mismatch(rank).splitlines(keepends=True))
        console.write(rank, tagged)
        console.end(rank)
    assert b"[rank0]: (31 lines of C++ frames: in the rank's stderr.log)\n" in console.shown[0]
    assert not any(console.shown[rank] for rank in (1, 2, 3))


@pytest.mark.parametrize(
    "text",
    [
        RAISED + cpp_frames(0, 3) + b"after\n",
        RAISED + b"after\nframe #0: x\nframe #1: x\nframe #2: x\nframe #3: x\nframe #4: x\n",
        cpp_frames(0),
        b"Thread 0x1 (most recent call first):\n" + cpp_frames(0),
        RAISED + b"frame #0: " + b"x" * 200_000 + b"\n",
        RAISED + b"frame #zero: x\n" * 9,
        RAISED + b"#1 x\n" * 9,
    ],
)
def test_what_is_no_run_of_cpp_frames_is_shown(text: bytes) -> None:
    for size in (len(text), 9_000, 37):
        console = Console()
        for start in range(0, len(text), size):
            console.write(0, text[start : start + size])
        console.end(0)
        assert console.shown[0] == text


def test_a_late_difference_shows_everything() -> None:
    console = Console()
    console.write(0, LABELS)
    console.write(1, FRAMES)
    assert console.shown[1] == b""
    console.write(1, b"KeyError: 'other'\n")
    assert console.shown[1] == FRAMES + b"KeyError: 'other'\n"
    console.wait(1)
    assert not console.notes
    # It is one that others may repeat.
    console.write(2, console.shown[1])
    console.wait(1)
    assert console.notes == ["rank 2: the same as rank 1: KeyError: 'other'"]


@pytest.mark.parametrize("more", [b"", b"KeyErr", b"KeyError: 'labels'"])
def test_a_rank_that_stops_within_a_traceback_is_shown_in_time(more: bytes) -> None:
    console = Console()
    console.write(0, LABELS)
    console.write(1, FRAMES + more)
    console.wait(HOLD_S)
    assert console.shown[1] == FRAMES + more
    console.write(1, b"\nand on\n")
    assert console.shown[1].endswith(b"\nand on\n")
    assert not console.notes


def test_its_end_shows_what_is_held() -> None:
    console = Console()
    console.write(0, LABELS)
    console.write(1, FRAMES)
    console.end(1)
    assert console.shown[1] == FRAMES


def test_messages_of_several_lines_are_compared_whole() -> None:
    console = Console()
    console.write(0, LABELS + b"detail of 0\n")
    console.write(1, LABELS + b"detail of 1\n")
    console.write(2, LABELS)
    console.wait(1)
    assert console.shown[1] == LABELS + b"detail of 1\n"
    assert console.shown[2] == LABELS
    assert not console.notes


def test_a_rank_that_repeats_itself_is_shown() -> None:
    """A note stands for one copy: the third one of rank 1 has no counterpart."""
    console = Console()
    for rank in (0, 0, 1, 1, 1):
        console.write(rank, LABELS)
        console.wait(1)
    assert console.shown == {0: LABELS * 2, 1: LABELS}
    assert len(console.notes) == 2


def test_what_is_too_far_up_is_shown_again() -> None:
    console = Console()
    console.write(0, LABELS)
    console.wait(60)
    console.write(1, LABELS)
    assert console.shown[1] == LABELS


def test_other_ranks_after_a_restart() -> None:
    console = Console()
    console.write(0, LABELS)
    console.wait(1)
    console.folding.forget()
    console.write(1, LABELS)
    assert console.shown[1] == LABELS


@pytest.mark.parametrize(
    "text",
    [
        b"error: " + LABELS,
        MARKER + b" and so on\n" + LABELS[len(MARKER) :],
        b"[rank7]: " + LABELS,
    ],
)
def test_what_merely_looks_like_one_is_shown(text: bytes) -> None:
    console = Console()
    for rank in (0, 1):
        console.write(rank, text)
        assert console.shown[rank] == text


def test_within_a_line_nothing_begins() -> None:
    console = Console()
    console.write(0, LABELS)
    console.write(1, b"half a line ")
    console.write(1, LABELS)
    assert console.shown[1] == b"half a line " + LABELS


def test_huge_tracebacks_and_lines_are_shown() -> None:
    for text in (FRAMES + b"  more\n" * 1000 + b"E: 1\n", FRAMES + b"y" * 1_000_000 + b"\n", FRAMES + b"  " * 99_000):
        console = Console()
        for rank in (0, 1):
            for start in range(0, len(text), 8000):
                console.write(rank, text[start : start + 8000])
                held = dict(console.folding.held()).get(rank, b"")  # type: ignore[call-overload]
                assert len(held) < 100_000
        console.wait(1)
        assert console.shown == {0: text, 1: text}
        assert sum(own.size for own in console.folding._shown) < 1_000_000


def test_many_different_ones_stay_bounded() -> None:
    console = Console()
    for rank in range(200):
        console.write(rank, FRAMES + b"KeyError: %d\n" % rank)
    assert len(console.folding._shown) <= 16
    console.wait(1)
    assert console.shown == console.written


def test_what_was_not_shown_is_no_first_copy() -> None:
    console = Console()
    console.write(0, FRAMES)
    console.folding.invalidate(0, 0)  # type: ignore[arg-type]
    console.write(0, b"KeyError: 'labels'\n")
    console.write(1, LABELS)
    console.wait(1)
    assert console.shown[1] == LABELS
    assert not console.folding.whole_on_console(0)
    assert console.folding.whole_on_console(1)


PIECES = st.sampled_from(
    [
        *(LABELS, BATCH, CHAINED, FRAMES, MARKER + b"\n", MARKER[:9], b"KeyError: 'labels'\n", b"    step()\n"),
        *(b"\n", b"\r\n", b"\r", b"\0\xff", b"loss 1\n", b"half", b"[rank1]: ", b"[W1122 20:15:33 x]\n"),
    ]
)
STEPS = st.lists(
    st.tuples(st.integers(0, 2), PIECES, st.integers(1, 400), st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3])), max_size=25
)


@given(STEPS)
def test_nothing_but_copies_is_left_out(steps: list[tuple[int, bytes, int, float]]) -> None:
    console = Console()
    for rank, text, cut, pause in steps:
        console.write(rank, text[:cut])
        console.wait(pause)
        if text[cut:]:
            console.write(rank, text[cut:])
    for rank in list(console.written):
        console.end(rank)
    console.wait(1)
    for rank, text in console.written.items():
        copies = console.copies.get(rank, [])
        assert _is_merged(text, console.shown[rank], copies)
        for copy in copies:
            plain = copy.replace(b"\r\n", b"\n").replace(b"[rank%d]: " % rank, b"")
            others = [console.shown[i].replace(b"\r\n", b"\n").replace(b"[rank%d]: " % i, b"") for i in console.shown]
            assert any(plain in other for i, other in zip(console.shown, others, strict=True) if i != rank)
    named = sum(len(_named(note)) for note in console.notes)
    assert named == sum(map(len, console.copies.values()))


def _named(note: str) -> list[int]:
    ranks: list[int] = []
    for part in note.partition(":")[0].removeprefix("ranks ").removeprefix("rank ").split(", "):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _is_merged(text: bytes, shown: bytes, copies: list[bytes]) -> bool:
    """Whether a text is what was shown with the copies put in somewhere, in order."""

    @cache
    def fits(place: int, count: int) -> bool:
        at = place + sum(map(len, copies[:count]))
        if count == len(copies):
            return text[at:] == shown[place:]
        copy = copies[count]
        for end in range(place, len(shown) + 1):
            here = at + end - place
            if text[at:here] != shown[place:end]:
                return False
            if text[here : here + len(copy)] == copy and fits(end, count + 1):
                return True
        return False

    return fits(0, 0)
