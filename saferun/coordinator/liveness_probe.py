"""Why another host is silent: gone, unreachable, cut off, or frozen. Found out by TCP connections to all its addresses.

A coordinator that serves no control store answers whoever connects to its control port with ``ANSWER``. The leader's
port leads to its store, which answers as stores do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from saferun.cluster.messages import COORDINATOR_ENDED
from saferun.cluster.silence import CUT, ENDED, FROZEN, GONE, REACHED, UNKNOWN, UNREACHABLE
from saferun.coordinator.dial import CONNECTED, REFUSED, SILENT, UNKNOWN_NAME, dial
from saferun.model import Value, signal_name

ANSWER = b"saferun\n"
# The kernel's own verdict on a host without a power supply comes after 3.1 s.
_CONNECT_TIMEOUT_S = 3.5
_ANSWER_TIMEOUT_S = 2.0
# torch's client asks the name service first, which may not be in order.
_STORE_ANSWER_TIMEOUT_S = 6.0
_MOST_ADDRESSES = 16
_AFTER_REFUSAL_S = 0.5
_END_ANSWER_S = 1.0
_MOST_DIGITS = 2
_MOST_ASKED = 3

# Its ranks may be at work all the same: only the route to it is gone, or its saferun was stopped.
MAY_WORK = frozenset({CUT, UNREACHABLE, UNKNOWN, FROZEN})


class Observation(Value):
    """What came of one address: the kind of ``dial``, its message, and whether saferun answered there."""

    address: str
    kind: str
    message: str
    answered: bool


class SilenceReason(Value):
    """Why a host is silent, as one word and as a message for people; ``address``: where it answers, if anywhere."""

    why: str
    message: str
    address: str = ""


def probe_host(
    name: str,
    addresses: Sequence[str],
    port: int,
    *,
    address: str | None,
    answers: Callable[[str], bool] | None = None,
    is_answer_enough: bool = False,
) -> SilenceReason:
    """Try all addresses of a host at once, and return what that means. Takes seconds.

    Args:
        name: the host's, for messages.
        addresses: names or numeric addresses.
        port: the host's control port; 0: unknown.
        address: the one that messages go to, where they go from here to there.
        answers: whether a coordinator answers at an address that accepts connections; None: it says ``ANSWER``.
        is_answer_enough: whether nothing else is waited for once it has answered at one address. Else it has these
            seconds to find another address by itself.

    Returns:
        ``reached`` means that it can be reached after all.
    """
    tried = list(dict.fromkeys(([address] if address else []) + list(addresses)))[:_MOST_ADDRESSES]
    if not port or not tried:
        return SilenceReason(UNKNOWN, f"no address is known for {name}")
    return judge(name, _Probe(port, answers, is_answer_enough=is_answer_enough).results(tried), address)


class _Probe:
    """Connections to all addresses of a host at once."""

    def __init__(self, port: int, answers: Callable[[str], bool] | None, *, is_answer_enough: bool) -> None:
        self._is_answer_enough = is_answer_enough
        self._port = port
        self._answers = answers
        self._observations: dict[str, Observation] = {}
        self._connected: set[str] = set()  # addresses that accept connections; they may have yet to answer
        self._changed = threading.Condition()

    def results(self, addresses: Sequence[str]) -> list[Observation]:
        """What comes of each address. A refusal ends the wait for those that say nothing, and so may an answer."""
        for address in addresses:
            try:
                threading.Thread(target=self._ask, args=(address,), daemon=True).start()
            except RuntimeError:
                self._ask(address)  # no thread can be started now
        answer_s = _ANSWER_TIMEOUT_S if self._answers is None else _STORE_ANSWER_TIMEOUT_S

        def is_complete() -> bool:
            is_answered = self._is_answer_enough and any(seen.answered for seen in self._observations.values())
            return is_answered or len(self._observations) == len(addresses)

        with self._changed:
            self._changed.wait_for(lambda: is_complete() or self._is_refused(), 2 * _CONNECT_TIMEOUT_S + answer_s + 0.5)
            if self._is_refused():
                # The host is up. Where saferun runs there, another address says so at once.
                self._changed.wait_for(is_complete, _AFTER_REFUSAL_S)
                if self._connected - self._observations.keys():
                    # Something listens there that is slow to answer: the refusal may be that of another machine.
                    self._changed.wait_for(is_complete, answer_s)
            return [self._observation(address) for address in addresses]

    def _is_refused(self) -> bool:
        return any(seen.kind == REFUSED and not seen.answered for seen in self._observations.values())

    def _observation(self, address: str) -> Observation:
        kind = CONNECTED if address in self._connected else SILENT
        silent = Observation(address, kind, f"{address} does not answer", answered=False)
        return self._observations.get(address, silent)

    def _ask(self, address: str) -> None:
        observation = _ask(address, self._port, self._answers, self._note_connected)
        with self._changed:
            self._observations[address] = observation
            self._changed.notify_all()

    def _note_connected(self, address: str) -> None:
        with self._changed:
            self._connected.add(address)


def _ask(
    address: str, port: int, answers: Callable[[str], bool] | None, on_connected: Callable[[str], None]
) -> Observation:
    connection, kind, message = dial(address, port, _CONNECT_TIMEOUT_S)
    if connection is None:
        return Observation(address, kind, message, answered=False)
    on_connected(address)
    with connection:
        if answers is None:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            try:
                answered = connection.recv(len(ANSWER)) == ANSWER
            except OSError:
                answered = False
        else:
            answered = _within(_STORE_ANSWER_TIMEOUT_S, lambda: answers(address))
    if not answered:
        # Whoever accepted it may have been about to end.
        again, kind, message = dial(address, port, _CONNECT_TIMEOUT_S)
        if again is not None:
            again.close()
    return Observation(address, kind, message, answered)


def how_it_ended(name: str, addresses: Sequence[str], port: int) -> SilenceReason | None:
    """What a host answers whose coordinator is gone, at once (``cluster.end_answers``); None: no such answer comes.

    A store that is served there waits for the other end to begin.
    """
    for address in list(dict.fromkeys(addresses))[:_MOST_ASKED]:
        connection, _, _ = dial(address, port, _END_ANSWER_S)
        if connection is None:
            continue
        with connection:
            connection.settimeout(_END_ANSWER_S)
            try:
                answer = connection.recv(len(COORDINATOR_ENDED) + _MOST_DIGITS + 1)
            except OSError:
                return None
        return ended_reason(name, answer)
    return None


def ended_reason(name: str, answer: bytes) -> SilenceReason | None:
    """The answer of a host whose coordinator is gone, as a reason; None where it is none. Pure."""
    number = answer.removeprefix(COORDINATOR_ENDED).rstrip(b"\n")
    if number == answer.rstrip(b"\n") or not number.isdigit() or len(number) > _MOST_DIGITS:
        return None
    by = f" (killed by {signal_name(int(number))})" if int(number) else ""
    return SilenceReason(ENDED, f"the coordinator of {name} ended{by}")


def judge(name: str, observations: Sequence[Observation], address: str | None) -> SilenceReason:
    """What the observations of a host's addresses mean. Pure.

    Args:
        name: the host's.
        observations: one for each address.
        address: the one that messages go to.
    """
    answering = [observation for observation in observations if observation.answered]
    if answering:
        if address is None:
            message = f"{name} answers at {answering[0].address}, but its messages do not arrive"
            return SilenceReason(CUT, message, answering[0].address)
        if any(observation.address == address for observation in answering):
            return SilenceReason(REACHED, f"{name} answers", address)
        blocked = next(
            (observation.message for observation in observations if observation.address == address),
            f"{address} does not answer",
        )
        message = f"{name} answers at {answering[0].address}, but not where its messages go: {blocked}"
        return SilenceReason(CUT, message, answering[0].address)
    accepting = [observation for observation in observations if observation.kind == CONNECTED]
    if accepting:
        return SilenceReason(FROZEN, f"{name} accepts connections, but saferun does not respond there")
    refusing = [observation for observation in observations if observation.kind == REFUSED]
    if refusing:
        return SilenceReason(GONE, f"{name} is up, but saferun is not running there any more ({refusing[0].message})")
    if all(observation.kind == UNKNOWN_NAME for observation in observations):
        return SilenceReason(UNKNOWN, observations[0].message)
    shown = [observation for observation in observations if observation.kind != UNKNOWN_NAME]
    return SilenceReason(
        UNREACHABLE, f"no address of {name} answers: {'; '.join(observation.message for observation in shown[:3])}"
    )


def _within(timeout_s: float, question: Callable[[], bool]) -> bool:
    """The answer to a question that may block forever; False when it does not come in time."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(answers and answers[0])
