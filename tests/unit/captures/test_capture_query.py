"""One capture as the supervisor has it, with an examiner that does what the test wants."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from saferun.captures.capture_query import CaptureQuery
from saferun.captures.examiner import Examiner
from saferun.captures.wire import NOT_READ, CaptureReader, CaptureRequest, CaptureTarget, Done, encode
from saferun.evidence.job_evidence import CoreDump, Frame, StackDump, ThreadStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.linux.poller import Poller

STACK = StackDump(
    0, 11, True, "python", "py-spy", (ThreadStack("MainThread", 11, True, True, False, (Frame("f", "t.py", 1),)),)
)


class World:
    """An examiner, the loop's poller, and what the capture has told in the end."""

    def __init__(self, examiners: int = 2) -> None:
        self.asked: list[tuple[int, Callable[[], None], CaptureRequest]] = []  # where to answer, how to be lost, what
        self.handlers: dict[int, Callable[[], None]] = {}
        self.ends: list[tuple[CaptureReader, str]] = []
        self._left = examiners
        self._now = time.monotonic()

    def ask(
        self, _kind: str, value: Any, budget_s: float, on_lost: Callable[[], None], *, is_urgent: bool = True
    ) -> tuple[int, int]:
        assert is_urgent, "a capture waits for no examiner that does not begin"
        if not self._left:
            raise OSError(0, "there is no examiner")
        self._left -= 1
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.asked.append((write_end, on_lost, value["value"] | {"budget_s": budget_s}))
        return len(self.asked), read_end

    def end(self, number: int) -> None:
        """It is not wanted any more."""

    def hear(self) -> None:
        """There is no loop."""

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        del self.handlers[fd]

    def run(self, budget_s: float = 60.0) -> CaptureQuery:
        run = CaptureQuery(
            CaptureRequest((CaptureTarget(0, 11),), budget_s=budget_s),
            cast("Examiner", self),
            cast("Poller", self),
            deadline=time.monotonic() + budget_s,
            on_done=lambda reader, failure: self.ends.append((reader, failure)),
        )
        run.begin()
        return run

    def say(self, number: int, kind: str, value: object = None) -> None:
        os.write(self.asked[number][0], encode(kind, value))

    def read(self) -> None:
        for handler in list(self.handlers.values()):
            handler()

    def close(self) -> None:
        for fd, _, _ in self.asked:
            os.close(fd)


@pytest.fixture(name="world")
def _world() -> World:
    return World()


def test_what_has_come_counts_when_the_time_is_over(world: World) -> None:
    """Also what nobody has read yet: the time of a capture is short where a job is stopped."""
    run = world.run()
    world.say(0, "stack", STACK)
    run.expire()
    ((reader, failure),) = world.ends
    assert reader.capture.stacks == (STACK,)
    assert failure == "capture budget exceeded"
    world.close()


def test_a_capture_that_is_complete_when_its_time_is_over_lacks_nothing(world: World) -> None:
    run = world.run()
    world.say(0, "stack", STACK)
    world.say(0, "done", Done(1.0))
    run.expire()
    assert [failure for _, failure in world.ends] == [""]
    world.close()


def test_a_capture_that_is_broken_off_gives_what_it_has(world: World) -> None:
    run = world.run()
    world.say(0, "stack", STACK)
    reader = run.abort()
    assert reader is not None
    assert reader.capture.stacks == (STACK,)
    assert run.abort() is None
    assert world.ends == []
    world.close()


def test_the_next_examiner_is_asked_for_the_rest_of_the_time(world: World) -> None:
    world.run(budget_s=60.0)
    world.asked[0][1]()
    assert len(world.asked) == 2
    assert 0 < cast("Any", world.asked[1][2])["budget_s"] <= 60.0
    world.say(1, "stack", STACK)
    world.say(1, "done", Done(1.0))
    world.read()
    assert [failure for _, failure in world.ends] == [""]
    world.close()


def test_a_second_one_that_is_lost_is_not_followed_by_a_third() -> None:
    """And what the first one had seen is told."""
    world = World(examiners=3)
    world.run()
    world.say(0, "stack", STACK)
    world.asked[0][1]()
    world.asked[1][1]()
    assert len(world.asked) == 2
    ((reader, failure),) = world.ends
    assert reader.capture.stacks == (STACK,)
    assert failure == "the capture process ended before it was done"
    world.close()


def test_where_there_is_no_other_one_what_has_come_is_all_there_is() -> None:
    world = World(examiners=1)
    world.run()
    world.say(0, "stack", STACK)
    world.asked[0][1]()
    ((reader, failure),) = world.ends
    assert reader.capture.stacks == (STACK,)
    assert failure
    world.close()


def test_no_other_one_is_asked_when_the_time_is_nearly_over(world: World) -> None:
    world.run(budget_s=0.1)
    world.asked[0][1]()
    assert len(world.asked) == 1
    assert len(world.ends) == 1
    world.close()


def test_of_two_examiners_the_one_that_has_read_more_cores_counts(world: World) -> None:
    """Both name all cores before they read one."""
    found = [CoreDump(rank, 71 + rank, 11, "/core", 1, True, "", (), failure=NOT_READ) for rank in range(2)]
    run = world.run()
    for core in (*found, found[0]._replace(tool="gdb", threads=STACK.threads, failure="")):
        world.say(0, "core", core)
    world.asked[0][1]()
    for core in found:
        world.say(1, "core", core)
    run.expire("a signal left no time")
    ((reader, failure),) = world.ends
    assert [core.tool for core in reader.cores] == ["gdb", ""]
    assert failure == "a signal left no time"
    world.close()


@pytest.mark.parametrize("is_done", [False, True])
def test_a_core_that_a_lost_examiner_has_read_and_deleted_is_not_missing(world: World, is_done: bool) -> None:
    """Its replacement does not find it, and says that the rank has left none."""
    found = [CoreDump(rank, 71 + rank, 11, "/core", 1, True, "", (), failure=NOT_READ) for rank in range(2)]
    read = [core._replace(kept=False, tool="gdb", threads=STACK.threads, failure="") for core in found]
    run = world.run()
    for core in (*found, read[0]):
        world.say(0, "core", core)
    world.asked[0][1]()
    for core in (found[0]._replace(path="", kept=False, failure="the limit on core files is 0"), found[1]):
        world.say(1, "core", core)
    if is_done:
        world.say(1, "core", read[1])
        world.say(1, "done", Done(1.0))
    run.expire("a signal left no time")
    ((reader, _),) = world.ends
    assert reader.cores == (read[0], read[1] if is_done else found[1])
    world.close()
