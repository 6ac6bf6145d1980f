"""Folded tracebacks on a console: what fails, what is not kept in files, and what a slow reader has not seen."""

from __future__ import annotations

import pytest

from saferun.console import target
from saferun.console.console_stream import ConsoleStream
from saferun.console.folding import Folding
from saferun.console.screen import Screen
from tests.unit.console.reader import Reader, console, drain
from tests.unit.console.test_folding import FRAMES, GROUP, LABELS


class Broken(Folding):
    """Fails in one place."""

    place = ""
    is_late = False

    def feed(self, key: ConsoleStream, rank: int, chunk: bytes, now: float, *, at_line_start: bool = True) -> bytes:
        if self.place == "feed" and rank == 2:
            raise KeyError
        return super().feed(key, rank, chunk, now, at_line_start=at_line_start)

    def tick(self, now: float) -> list[tuple[ConsoleStream, bytes]]:
        if self.place == "tick":
            raise KeyError
        return super().tick(now)

    def end(self, key: ConsoleStream, now: float) -> bytes:
        if self.place == "end":
            raise KeyError
        return super().end(key, now)

    def notes(self, now: float | None = None) -> list[str]:
        if self.place == "notes":
            raise KeyError
        return super().notes(now)

    def wants(self, key: ConsoleStream, chunk: bytes) -> bool:
        if self.place == "wants" and key.rank == 2:
            raise KeyError
        return super().wants(key, chunk)

    def held(self) -> list[tuple[ConsoleStream, bytes]]:
        if self.place == "held" and self.is_late:
            raise KeyError
        return super().held()

    @property
    def deadline(self) -> float | None:
        if self.place == "deadline" and self.is_late:
            raise KeyError
        return super().deadline

    def invalidate(self, key: ConsoleStream, rank: int) -> None:
        if self.place == "invalidate":
            raise KeyError
        super().invalidate(key, rank)

    def release(self) -> list[tuple[ConsoleStream, bytes]]:
        if self.place == "release":
            raise KeyError
        return super().release()


def _folds(screen: Screen) -> bool:
    return screen.folding is not None


def _streams(screen: Screen) -> list[ConsoleStream]:
    return [ConsoleStream(screen.err, b"[%d] " % rank, screen, rank) for rank in range(3)]


def _prefixed(rank: int, text: bytes) -> bytes:
    return b"".join(b"[%d] %s" % (rank, line) for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("place", ["feed", "tick", "end", "notes"])
def test_a_failure_of_the_folding_shows_lines_as_they_are(place: str) -> None:
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = folding = Broken()
        folding.place = place
        first, second, third = _streams(screen)
        first.feed(LABELS, 1.0)
        second.feed(LABELS, 1.0)
        third.feed(b"before\n" + FRAMES, 1.0)
        screen.tick(1.3)
        for stream in (first, second, third):
            stream.close()
        screen.release()
        drain(screen, reader)
        assert _prefixed(0, LABELS) in reader.taken
        assert b"[2] before\n" in reader.taken
        assert _prefixed(2, FRAMES) in reader.taken
        assert (_prefixed(1, LABELS) in reader.taken) == (place in {"feed", "tick"})
        assert place == "end" or screen.folding is None
        if place == "notes":
            assert b"saferun: the same traceback of other ranks is not shown" in reader.taken
        elif place == "end":
            assert b"saferun: rank 1: the same as rank 0" in reader.taken


@pytest.mark.parametrize("place", ["wants", "deadline", "release", "invalidate"])
def test_a_failure_between_two_chunks_shows_what_is_held_back(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The second rank's copy is not at its end: it is held back when the folding fails."""
    monkeypatch.setattr(target, "JUDGED_AFTER_S", 0.0)
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = folding = Broken()
        folding.place = place
        first, second, third = _streams(screen)
        first.feed(LABELS, 1.0)
        second.feed(FRAMES, 1.0)
        drain(screen, reader)
        assert _prefixed(1, FRAMES) not in reader.taken
        folding.is_late = True
        if place == "invalidate":
            third.feed(b"x" * (9 << 20) + b"\n", 1.0)  # more than is queued for a slow reader
            third.feed(b"y" * (9 << 20) + b"\n", 1.0)
        else:
            third.feed(b"an ordinary line\n", 1.0)
        screen.deadline()
        screen.allow_skipping(place != "release")
        assert not _folds(screen)
        drain(screen, reader)
        # A reader that is too slow is told how many lines it lacks.
        assert (_prefixed(1, FRAMES) if place != "invalidate" else b"4 lines skipped here") in reader.taken


def test_a_failure_that_loses_what_is_held_back_loses_no_more() -> None:
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = folding = Broken()
        folding.place, folding.is_late = "held", True
        first, *_ = _streams(screen)
        first.feed(LABELS, 1.0)
        first.feed(b"an ordinary line\n", 1.0)
        screen.tick(1.3)
        drain(screen, reader)
        assert not _folds(screen)
        assert reader.taken.endswith(b"[0] an ordinary line\n")


def test_without_files_everything_is_shown() -> None:
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(False)
        screen.folding = Folding()
        first, second, _ = _streams(screen)
        first.feed(LABELS, 1.0)
        second.feed(LABELS, 1.0)
        drain(screen, reader)
        assert reader.taken == _prefixed(0, LABELS) + _prefixed(1, LABELS)


def test_files_that_fail_meanwhile() -> None:
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = Folding()
        first, second, _ = _streams(screen)
        first.feed(LABELS, 1.0)
        second.feed(LABELS, 1.0)
        screen.allow_skipping(False)
        drain(screen, reader)
        assert reader.taken == _prefixed(0, LABELS) + _prefixed(1, LABELS)


def test_messages_of_saferun_come_after_the_note() -> None:
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = Folding()
        first, second, _ = _streams(screen)
        first.feed(LABELS, 1.0)
        second.feed(LABELS + b"[W1122 20:15:33 x] y\n", 1.0)
        screen.print_message("saferun: the report")
        drain(screen, reader)
        assert reader.taken.endswith(
            b"[1] [W1122 20:15:33 x] y\nsaferun: rank 1: the same as rank 0: KeyError: 'labels'\nsaferun: the report\n"
        )


def test_a_header_in_several_pieces_is_known() -> None:
    """Python without buffering writes that of an exception group so."""
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = Folding()
        for stream in _streams(screen):
            for piece in (b"  ", b"+ ", GROUP[4:]):
                stream.feed(piece, 1.0)
        screen.tick(1.3)
        drain(screen, reader)
        note = b"saferun: ranks 1-2: the same as rank 0: ExceptionGroup: shards (2 sub-exceptions)\n"
        assert reader.taken == _prefixed(0, GROUP) + note


def test_half_a_line_before_a_header_is_shown_as_it_is() -> None:
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = Folding()
        first, second, _ = _streams(screen)
        for stream in (first, second):
            stream.feed(b"half ", 1.0)
            stream.feed(LABELS, 1.0)
        drain(screen, reader)
        assert reader.taken == _prefixed(0, b"half " + LABELS) + _prefixed(1, b"half " + LABELS)


def test_lines_that_are_skipped_for_a_slow_reader_are_no_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the traceback had ended within the same bytes."""
    monkeypatch.setattr(target, "JUDGED_AFTER_S", 0.0)
    with Reader.pipe(65536) as reader, console(reader) as screen:
        screen.allow_skipping(True)
        screen.folding = Folding()
        first, second, _ = _streams(screen)
        for size in (1000, 10):
            while screen.err.target.has_room(size + len(second.prefix)):
                second.feed(b"x" * (size - 1) + b"\n", 1.0)
        first.feed(LABELS + b"[W1122 20:15:33 x] y\n", 1.0)
        drain(screen, reader)
        second.feed(LABELS, 1.1)
        screen.tick(1.4)
        drain(screen, reader)
        assert _prefixed(0, LABELS) not in reader.taken
        assert _prefixed(1, LABELS) in reader.taken
        assert b"the same as" not in reader.taken
