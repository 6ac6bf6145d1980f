"""How far apart the clocks of this host and of the leader are: NTP's four timestamps, over the control store.

A host claims the key ``clock`` below the attempt's prefix with its number and a number of its question, by
compare-and-set: however many hosts there are, the leader has one question at a time. The leader notes when the key
appears, deletes it, and writes to ``clock/<host>/<question>`` when it saw the question and when it answers. Of the
samples that a host takes so, the one with the least delay counts; half of that delay is the most by which it can be
wrong, whichever way was the slower one.

The host's two times are of its monotonic clock, so that a time of day that is set meanwhile spoils nothing.

Source: RFC 5905, sections 8 (offset and delay of a sample) and 10 (the sample of the least delay).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.model import Value
from saferun.text.decoding import MALFORMED, loads

# The first samples follow each other quickly: a job may fail soon. Two clocks drift apart by a millisecond in half a
# minute, where neither is steered.
_FIRST_SAMPLES = 4
_FIRST_PAUSE_S = 0.05
_EVERY_S = 60.0
_DRIFT = 50e-6
# So much of the leader's time each host may claim at first, which spreads the questions of many hosts.
_SHARE_S = 0.001
# What takes longer tells nothing, and holds up the other messages of this host.
_ANSWER_S = 0.1
_BUSY_S = 0.01
_LONGEST_BUSY_S = 20.0
_SERVED_S = 5.0
_PAUSE_S = 0.5
_LONGEST_TEXT = 200
_MOST_S = float(1 << 40)


class ClockSample(Value):
    """One exchange.

    Attributes:
        leader_s: what is to be added to this host's monotonic clock to have the leader's time of day.
        error_s: how far that can be from the truth: half of the delay.
        taken_at: when, in this host's monotonic seconds.
    """

    leader_s: float
    error_s: float
    taken_at: float

    def error_at(self, now: float) -> float:
        """How far it can be from the truth by now."""
        return self.error_s + max(0.0, now - self.taken_at) * _DRIFT


def sample_of(asked_at: float, seen_at: float, answered_at: float, heard_at: float) -> ClockSample | None:
    """The offset from four timestamps; None where they cannot be right.

    Args:
        asked_at: by this host's monotonic clock.
        seen_at: by the leader's time of day.
        answered_at: by the same.
        heard_at: by this host's monotonic clock.
    """
    delay_s = (heard_at - asked_at) - (answered_at - seen_at)
    if not (abs(seen_at) < _MOST_S and 0.0 <= answered_at - seen_at <= heard_at - asked_at):
        return None
    return ClockSample(((seen_at - asked_at) + (answered_at - heard_at)) / 2, delay_s / 2, heard_at)


def better_of(best: ClockSample | None, new: ClockSample) -> ClockSample:
    """Which of two samples counts: the more exact one, or the newer one where a clock was set in between."""
    if best is None:
        return new
    error_s = best.error_at(new.taken_at)
    return new if new.error_s <= error_s or abs(new.leader_s - best.leader_s) > error_s + new.error_s else best


class ClockExchange:
    """A host's side.

    Args:
        channel: to the control store.
        prefix: the attempt's.
        host: this host's number.
        hosts: how many there are.
        on_sample: takes a sample that is better than those before.
    """

    def __init__(
        self,
        channel: ControlChannel,
        prefix: str,
        host: int,
        hosts: int,
        on_sample: Callable[[ClockSample], None],
    ) -> None:
        self._channel = channel
        self._key = f"{prefix}clock"
        self._host = host
        self._spread_s = hosts * _SHARE_S
        self._on_sample = on_sample
        self._best: ClockSample | None = None
        self._taken = 0
        self._busy_s = _BUSY_S
        self._late_key = ""  # of an answer that had not come in time

    def start(self) -> None:
        """Ask, with the channel's connection of now."""
        with suppress(RuntimeError):  # no thread can be started now: the clocks are not known
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client = self._channel.client
        pause_s = self._spread_s * _chance() if self._spread_s > _FIRST_PAUSE_S else 0.0
        while self._channel.wait_while_current(client, pause_s):
            try:
                pause_s = self._ask(client)
            except StoreBrokenError:
                return  # the heartbeats, on the same connection, find out why

    def _ask(self, client: StoreClient) -> float:
        """Take a sample if the leader is free. Returns after which time to ask again."""
        if self._late_key:
            client.delete(self._late_key)
            self._late_key = ""
        question = os.urandom(4).hex()
        answer_key = f"{self._key}/{self._host}/{question}"
        text = json.dumps([self._host, question])
        asked_at = time.monotonic()
        if not client.claim(self._key, text):
            # Another host asks, or the leader is late: it has more to do than this.
            self._busy_s = min(2 * self._busy_s, _LONGEST_BUSY_S)
            return self._busy_s * (0.5 + _chance())
        self._busy_s = _BUSY_S
        self._taken += 1
        if client.wait([answer_key], _ANSWER_S):
            heard_at = time.monotonic()
            self._take(asked_at, client.find(answer_key, longest=_LONGEST_TEXT), heard_at)
            client.delete(answer_key)
        else:
            self._late_key = answer_key
        usual_s = _EVERY_S if self._taken >= _FIRST_SAMPLES else max(_FIRST_PAUSE_S, self._spread_s)
        return usual_s * (0.5 + _chance())

    def _take(self, asked_at: float, answer: bytes | None, heard_at: float) -> None:
        try:
            seen_at, answered_at = map(float, loads(answer or b"", longest=_LONGEST_TEXT))
            sample = sample_of(asked_at, seen_at, answered_at, heard_at)
        except MALFORMED:
            return
        if sample is not None and better_of(self._best, sample) is sample:
            self._best = sample
            self._on_sample(sample)


class ClockServer:
    """The leader's side.

    Args:
        client: to the control store, of its own.
        prefix: the attempt's.
    """

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self._client = client
        self._key = f"{prefix}clock"
        self._closed = threading.Event()

    def start(self) -> None:
        """Answer, until ``close``."""
        with suppress(RuntimeError):
            threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._client.wait([self._key], _SERVED_S):
                    self._answer(time.time(), time.monotonic())
            except StoreBrokenError:
                # The store is this process's own: it is being closed, or something held the connection up.
                self._closed.wait(_PAUSE_S)
                with suppress(StoreBrokenError):
                    self._client = self._client.another()

    def _answer(self, seen_at: float, seen_monotonic: float) -> None:
        question = self._client.find(self._key, longest=_LONGEST_TEXT)
        self._client.delete(self._key)
        try:
            host, number = loads(question or b"", longest=_LONGEST_TEXT)
            key = f"{self._key}/{int(host)}/{bytes.fromhex(number)[:8].hex()}"
        except MALFORMED:
            return
        answered_at = seen_at + (time.monotonic() - seen_monotonic)
        self._client.set(key, json.dumps([seen_at, answered_at]))


def _chance() -> float:
    """From 0 to 1. The module ``random`` would cost more memory than all of this."""
    return int.from_bytes(os.urandom(2), "big") / 0xFFFF
