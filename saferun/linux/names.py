"""Whether a name resolves to this host. A name service may take minutes, so a separate process asks it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket, short_host_name
from saferun.linux.child_output import run_forked
from saferun.linux.helper import Helper, PartBase
from saferun.linux.poller import Poller
from saferun.linux.small_files import read_line
from saferun.model import JsonObject

DEADLINE_S = 3.0
"""How long a name service may take before it is reported."""

_PROCESS = "sr-names"
_MOST_AT_ONCE = 32
_AGAIN_S = 1.0
_NONLOCAL_BIND = ("/proc/sys/net/ipv4/ip_nonlocal_bind", "/proc/sys/net/ipv6/ip_nonlocal_bind")
# A failure that comes sooner is no timeout: there is no name server, or it refuses.
_SILENCE_S = 0.5
# Of the process that asks for several names: whether one is this host's, or None.
_WRITTEN = {True: b"own", False: b"other", None: b"unknown"}
_ANSWERS = {text: is_own for is_own, text in _WRITTEN.items()}


def known_at_once(name: str) -> bool | None:
    """Whether a name or address is this host's; None if only a name service can tell.

    Args:
        name: a host name, or an address without brackets.
    """
    if name in {"localhost", socket.gethostname()}:
        return True
    if not name:
        return False
    try:
        infos = socket.getaddrinfo(name.encode(), None, proto=socket.IPPROTO_TCP, flags=socket.AI_NUMERICHOST)
    except OSError:
        return None
    except UnicodeError:
        return False
    return any(_is_own(info[0], str(info[4][0])) for info in infos)


def own_names(names: Iterable[str], deadline_s: float = DEADLINE_S) -> tuple[frozenset[str], str]:
    """Find the names that resolve to this host. Waits for the name service until the deadline.

    Args:
        names: names or addresses.
        deadline_s: for all of them together, in seconds.

    Returns:
        The names, and one that was not resolved in time; empty if there is none.
    """
    known = {name: known_at_once(name) for name in names}
    asked = [name for name, is_own in known.items() if is_own is None]
    answers = _ask(asked, deadline_s) if asked else {}
    own = frozenset(name for name, is_own in {**known, **answers}.items() if is_own)
    return own, next((name for name in asked if name not in answers), "")


def is_elsewhere(name: str, deadline_s: float = DEADLINE_S) -> bool:
    """Whether a name or address is another host's. False where it is unknown, perhaps only until now.

    Args:
        name: a host name, or an address without brackets.
        deadline_s: for how long the name service is waited for, in seconds.
    """
    is_own = known_at_once(name)
    if is_own is None:
        is_own = _ask([name], deadline_s).get(name)
    return is_own is False


def unanswered_text(name: str, seconds: float) -> str:
    """The message about a name service that does not respond."""
    return f"the name server does not answer for {name} ({seconds:.0f} s)"


class OwnName(PartBase):
    """Finds whether a name resolves to this host; a helper process asks the name service until there is an answer.

    Names may appear late, as those of pods of a headless service.

    Args:
        name: a host name.
        poller: the loop's.
        on_answer: called once with whether it is this host; False if no process can be started.
        on_doubt: called once if there is no answer soon: the name is unknown, or the name service is slow.
    """

    def __init__(
        self, name: str, poller: Poller, on_answer: Callable[[bool], None], on_doubt: Callable[[], None]
    ) -> None:
        self.name = name
        self.began_at = time.monotonic()
        self.deadline: float | None = self.began_at + DEADLINE_S
        self.is_unknown = False  # the name service reports that there is no such name
        self._on_answer = on_answer
        self._on_doubt = on_doubt
        try:
            helper = Helper(_PROCESS, lambda line: _serve(line, name))
        except OSError:
            self.deadline = self.began_at  # reported from the loop
            return
        self._helper = helper
        helper.attach(poller, self._on_message, self._on_lost)

    @property
    def reason(self) -> str:
        """Why there is no answer yet."""
        if self.is_unknown:
            return f"the name {self.name} cannot be resolved on {short_host_name()}"
        return unanswered_text(self.name, time.monotonic() - self.began_at)

    def tick(self, now: float) -> None:
        """Report that it takes too long, if it does."""
        if self.deadline is not None and self.deadline <= now:
            self._doubt()

    def _on_lost(self) -> None:
        """The helper process is gone; connecting to the name will show where it leads."""
        self.deadline = None
        self._on_answer(False)

    def _doubt(self) -> None:
        if self._helper is None:
            self._on_lost()
        elif self.deadline is not None:
            self.deadline = None
            self._on_doubt()

    def _on_message(self, message: JsonObject) -> None:
        if "own" in message:
            self.close()
            self._on_answer(message["own"] is True)
            return
        self.is_unknown = message.get("unknown") is True
        self._doubt()

    def close(self) -> None:
        """Stop asking."""
        self.deadline = None
        if self._helper is not None:
            self._helper.close()


def _serve(line: Socket, name: str) -> None:
    while True:
        answer = _resolve(name)
        line.sendall(json.dumps(answer).encode() + b"\n")
        if "own" in answer:
            return
        time.sleep(_AGAIN_S)


def _resolve(name: str) -> JsonObject:
    began_at = time.monotonic()
    try:
        # As bytes: text would import the IDNA codec.
        infos = socket.getaddrinfo(name.encode(), None, proto=socket.IPPROTO_TCP)
    except socket.gaierror as error:
        is_silence = error.errno == socket.EAI_AGAIN and time.monotonic() - began_at > _SILENCE_S
        return {"unknown": not is_silence}
    except (OSError, UnicodeError):
        return {"unknown": True}
    return {"own": any(_is_own(info[0], str(info[4][0])) for info in infos)}


def _is_own(family: int, address: str) -> bool:
    """Whether an address belongs to this host: only then can a socket be bound to it, unless the kernel allows any.

    Hosts with a virtual address that moves between them (keepalived, HAProxy) have it do so. Source: ip-sysctl.rst of
    the kernel's documentation, ip_nonlocal_bind.
    """
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return not any(read_line(path) == "1" for path in _NONLOCAL_BIND) or _is_on_interface(address)


def _is_on_interface(address: str) -> bool:
    """Whether an interface of this host has an address, or it means any of them. True where that is unknown."""
    from saferun.linux.netlink import read_nics

    plain = address.partition("%")[0].removeprefix("::ffff:")
    if plain.startswith("127.") or plain in {"0.0.0.0", "::"}:  # noqa: S104 - of the user
        return True
    try:
        return any(plain in nic.addresses for nic in read_nics())
    except OSError:
        return True


def _ask(names: list[str], deadline_s: float) -> dict[str, bool | None]:
    """Ask in a process that is killed at the deadline whether names are this host's; None: there is no such name."""
    output = b""
    with suppress(OSError):
        output, _status = run_forked(lambda write_fd: _answer_all(names, write_fd), deadline_s, _PROCESS)
    answers = (line.split() for line in output.splitlines())
    return {names[int(number)]: _ANSWERS[answer] for number, answer in answers}


def _answer_all(names: list[str], write_fd: int) -> None:
    """Resolve all names, several at once; each answer is one short write."""
    numbers = iter(range(len(names)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            answer = _resolve(names[number])
            if "own" in answer or answer["unknown"]:
                os.write(write_fd, b"%d %b\n" % (number, _WRITTEN[answer.get("own")]))

    threads = [threading.Thread(target=work) for _ in range(min(_MOST_AT_ONCE, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
