"""Threads that wait in virtual time, for the code of thousands of hosts in one process.

These stand in for ``time``, ``threading`` and ``queue``. A thread is a greenlet, and gives up the processor only where
it waits, so that a run is decided by its seed. Nothing is reimplemented of what waits: the real modules get these in
place of the standard library's (``installed``).
"""

from __future__ import annotations

import heapq
import os
import queue
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

_EPOCH_S = 1_700_000_000.0


class Place:
    """A host, as far as its threads are concerned."""

    def __init__(self, clock_ahead_s: float = 0.0) -> None:
        self.clock_ahead_s = clock_ahead_s
        self.is_gone = False  # nothing of it runs any more
        self.frozen_until = 0.0
        self.processor_s = 0.0  # how much of the real processor its code has used


NOWHERE = Place()


class Thread:
    """Stands in for ``threading.Thread``. Runs on the host whose code has made it."""

    def __init__(
        self,
        simulation: Simulation,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._simulation = simulation
        self._call: Callable[[], object] = partial(target, *args, **(kwargs or {}))
        self.place = simulation.place
        self.turn = 0  # rises with each wait: what woke an earlier one comes too late
        self.is_over = False
        self._joining: list[tuple[Thread, int]] = []
        self.greenlet: Any = None

    def start(self) -> None:
        self._simulation.at(self._simulation.now, partial(self._simulation.resume, self, 0, None))

    def join(self, timeout: float | None = None) -> None:
        if not self.is_over:
            self._joining.append(self._simulation.ticket())
            self._simulation.park(timeout)

    def is_alive(self) -> bool:
        return not self.is_over

    def run(self) -> None:
        call, self._call = self._call, lambda: None  # nothing of it is kept, as by a real thread
        try:
            call()
        except GreenletExit:
            pass
        except BaseException as error:
            self._simulation.errors.append(error)
        finally:
            self.is_over = True
            for thread, turn in self._joining:
                self._simulation.wake(thread, turn, True)


class Simulation:
    """The virtual clock, and what happens when."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)  # noqa: S311 - a run is to be the same again
        self.errors: list[BaseException] = []  # that have ended threads
        self.place = NOWHERE
        self.events = 0
        self._thread: Thread | None = None
        self._queue: list[tuple[float, int, Place, Callable[[], object]]] = []
        self._hub = getcurrent()
        self._is_over = False
        self._threads: set[Thread] = set()  # that have begun and not ended

    # ------------------------------------------------------------------------------------------------ what happens when

    def at(self, when: float, call: Callable[[], object], place: Place | None = None) -> None:
        """Have something happen, on a host unless that is gone by then."""
        self.events += 1
        heapq.heappush(self._queue, (when, self.events, place or self.place, call))

    def run(self, until: float, check: Callable[[], object] = lambda: None, every: int = 1) -> None:
        """Let time pass; ``check`` is called after every so many steps, and stops it by returning something true."""
        steps = 0
        while self._queue and self._queue[0][0] <= until:
            when, number, place, call = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            if place.is_gone:
                continue
            if place.frozen_until > self.now:
                heapq.heappush(self._queue, (place.frozen_until, number, place, call))
                continue
            self._do(place, call)
            if self.errors:
                raise self.errors[0]
            steps += 1
            if steps % every == 0 and check():
                return
        self.now = max(self.now, until) if until < float("inf") else self.now

    def _do(self, place: Place, call: Callable[[], object]) -> None:
        before, self.place = self.place, place
        began = time.thread_time()
        try:
            call()
        finally:
            place.processor_s += time.thread_time() - began
            self.place = before

    # ---------------------------------------------------------------------------------------------------------- threads

    def ticket(self) -> tuple[Thread, int]:
        """What wakes the thread that runs, from the wait that it is about to begin."""
        assert self._thread is not None, "only a thread may wait"
        return self._thread, self._thread.turn

    def park(self, timeout_s: float | None = None) -> Any:
        """Wait. Returns what the thread was woken with, None after the time."""
        if self._is_over:
            raise GreenletExit
        thread, turn = self.ticket()
        if timeout_s is not None:
            self.at(self.now + max(0.0, timeout_s), partial(self.resume, thread, turn, None), thread.place)
        return self._hub.switch()

    def wake(self, thread: Thread, turn: int, value: object) -> None:
        """End a wait, as soon as what runs now waits itself."""
        if thread.turn == turn:
            self.at(self.now, partial(self.resume, thread, turn, value), thread.place)

    def resume(self, thread: Thread, turn: int, value: object) -> None:
        """Let a thread go on."""
        if thread.turn != turn or thread.is_over:
            return
        thread.turn += 1
        if thread.greenlet is None:
            thread.greenlet = greenlet(thread.run, self._hub)
            self._threads.add(thread)
        before, self._thread = self._thread, thread
        try:
            thread.greenlet.switch(value) if turn else thread.greenlet.switch()
        finally:
            self._thread = before
            if not thread.is_alive():
                self._threads.discard(thread)

    def spawn(self, place: Place, target: Callable[[], object]) -> None:
        """Start a thread on a host."""
        before, self.place = self.place, place
        Thread(self, target).start()
        self.place = before

    def end(self) -> None:
        """No thread waits any more: those that are left end where they are."""
        self._is_over = True
        self._queue.clear()
        for thread in self._threads:
            thread.greenlet.throw(GreenletExit)
        self._threads.clear()


class Lock:
    """Stands in for ``threading.Lock``, and for ``RLock``."""

    def __init__(self, simulation: Simulation, *, again: bool = False) -> None:
        self._simulation = simulation
        self._again = again
        self._owner: object = None
        self._depth = 0
        self._waiting: deque[tuple[Thread, int]] = deque()

    def acquire(self) -> bool:
        me: object = self._simulation._thread or self._simulation
        while self._owner is not None and not (self._again and self._owner is me):
            self._waiting.append(self._simulation.ticket())
            self._simulation.park()
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                self._simulation.wake(*self._waiting.popleft(), True)

    def put_down(self) -> int:
        """Release it however often it was taken."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_up(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Stands in for ``threading.Condition``."""

    def __init__(self, simulation: Simulation, lock: Lock | None = None) -> None:
        self._simulation = simulation
        self._lock = lock or Lock(simulation, again=True)
        self._waiting: list[tuple[Thread, int]] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        ticket = self._simulation.ticket()
        self._waiting.append(ticket)
        depth = self._lock.put_down()
        try:
            woken = self._simulation.park(timeout)
        finally:
            with suppress(ValueError):
                self._waiting.remove(ticket)
            self._lock.take_up(depth)
        return woken is not None

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        give_up_at = None if timeout is None else self._simulation.now + timeout
        while not (result := predicate()):
            remaining_s = None if give_up_at is None else give_up_at - self._simulation.now
            if remaining_s is not None and remaining_s <= 0:
                break
            self.wait(remaining_s)
        return result

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            self._simulation.wake(*ticket, True)

    def notify(self) -> None:
        if self._waiting:
            self._simulation.wake(*self._waiting.pop(0), True)


class Event:
    """Stands in for ``threading.Event``."""

    def __init__(self, simulation: Simulation) -> None:
        self._changed = Condition(simulation)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class SimpleQueue:
    """Stands in for ``queue.SimpleQueue``."""

    def __init__(self, simulation: Simulation) -> None:
        self._changed = Condition(simulation)
        self._items: deque[Any] = deque()

    def put(self, item: object) -> None:
        self._items.append(item)
        self._changed.notify()

    def get(self, timeout: float | None = None) -> Any:
        """The next item."""
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class _Os:
    """The module ``os``, but for what would differ from run to run."""

    def __init__(self, simulation: Simulation) -> None:
        self.urandom = simulation.random.randbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextmanager
def installed(simulation: Simulation, rooms: tuple[str, ...]) -> Iterator[None]:
    """Have all modules of these packages that have been imported wait in virtual time."""
    stand_ins: dict[str, Any] = {
        "time": SimpleNamespace(
            monotonic=lambda: simulation.now,
            time=lambda: _EPOCH_S + simulation.now + simulation.place.clock_ahead_s,
            sleep=simulation.park,
            monotonic_ns=lambda: int(simulation.now * 1e9),
        ),
        "threading": SimpleNamespace(
            Thread=lambda target, args=(), kwargs=None, daemon=True: Thread(simulation, target, args, kwargs),  # noqa: ARG005
            Lock=lambda: Lock(simulation),
            RLock=lambda: Lock(simulation, again=True),
            Condition=lambda lock=None: Condition(simulation, lock),
            Event=lambda: Event(simulation),
        ),
        "queue": SimpleNamespace(SimpleQueue=lambda: SimpleQueue(simulation), Empty=queue.Empty),
        "os": _Os(simulation),
    }
    replaced = []
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(rooms):
            for name, stand_in in stand_ins.items():
                if getattr(module, name, None) is sys.modules.get(name):
                    replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, stand_in)
    try:
        yield
    finally:
        simulation.end()
        for module, name, own in replaced:
            setattr(module, name, own)
