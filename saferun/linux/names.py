"""Whether a name leads to this host. A name service may take minutes to answer, so a process of its own asks it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable

from saferun.linux.child_output import collect_output
from saferun.linux.children import Child, fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.helper import Helper
from saferun.linux.pidfd import open_pidfd
from saferun.linux.poller import Poller
from saferun.linux.prctl import die_with_parent, set_name
from saferun.model import ExitStatus, JsonObject

DEADLINE_S = 3.0
"""How long a name service may take."""

_PROCESS = "sr-names"
_MOST_AT_ONCE = 32
_AGAIN_S = 1.0
# A failure that comes sooner is no silence: there is no name server, or it refuses.
_SILENCE_S = 0.5


def known_at_once(name: str) -> bool | None:
    """Whether a name or address is this host's, where no name service is needed for that; None: it is.

    Args:
        name: of a host, or an address without brackets.
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
    """Those of these names that lead to this host. Waits for the name service, not longer than the deadline.

    Args:
        names: names or addresses.
        deadline_s: for all of them together, in seconds.

    Returns:
        The names, and one of which nothing has been heard in time; empty: there is none.
    """
    known = {name: known_at_once(name) for name in names}
    asked = [name for name, is_own in known.items() if is_own is None]
    answers = _ask(asked, deadline_s) if asked else {}
    own = frozenset(name for name, is_own in {**known, **answers}.items() if is_own)
    return own, next((name for name in asked if name not in answers), "")


def unanswered_words(name: str, seconds: float) -> str:
    """What is said of a name service that does not answer."""
    return f"the name server does not answer for {name} ({seconds:.0f} s)"


class OwnName:
    """The question whether a name leads to this host, which a helper process asks again until there is an answer.

    Names may come into being late, as those of pods behind a headless service.

    Args:
        name: of a host.
        poller: the loop's.
        on_answer: told, once, whether it is this host; not, where nobody can ask.
        on_doubt: told, once, that there will be no answer soon: the name is unknown, or there is none in time.
    """

    def __init__(
        self, name: str, poller: Poller, on_answer: Callable[[bool], None], on_doubt: Callable[[], None]
    ) -> None:
        self.name = name
        self.began_at = time.monotonic()
        self.deadline: float | None = self.began_at + DEADLINE_S
        self.is_unknown = False  # the name service says that there is no such name
        self._on_answer = on_answer
        self._on_doubt = on_doubt
        self._helper: Helper | None = None
        try:
            helper = Helper(_PROCESS, lambda line: _serve(line, name))
        except OSError:
            self.deadline = self.began_at  # nobody can ask, which is told from the loop
            return
        self._helper = helper
        helper.attach(poller, self._on_message, self._on_lost)

    @property
    def words(self) -> str:
        """Why there is no answer yet."""
        if self.is_unknown:
            return f"the name {self.name} cannot be resolved on this host"
        return unanswered_words(self.name, time.monotonic() - self.began_at)

    def tick(self, now: float) -> None:
        """Whether it takes too long."""
        if self.deadline is not None and self.deadline <= now:
            self._doubt()

    def _on_lost(self) -> None:
        """Nobody asks any more; whoever connects to that name finds out what there is to be known."""
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

    @property
    def pids(self) -> set[int]:
        """The helper process."""
        return self._helper.pids if self._helper is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Whether it was the helper process."""
        return self._helper is not None and self._helper.on_exit(pid, status)

    def close(self) -> None:
        """Ask no more."""
        self.deadline = None
        if self._helper is not None:
            self._helper.close()


def _serve(line: socket.socket, name: str) -> None:
    while True:
        answer = _look_up(name)
        line.sendall(json.dumps(answer).encode() + b"\n")
        if "own" in answer:
            return
        time.sleep(_AGAIN_S)


def _look_up(name: str) -> JsonObject:
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
    """Whether an address belongs to this host: only then can a socket be bound to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _ask(names: list[str], deadline_s: float) -> dict[str, bool]:
    """Ask in a process that is left behind at the deadline; a name that cannot be resolved is not this host's."""
    read_fd, write_fd = os.pipe()
    parent_pid = os.getpid()

    def begin() -> None:
        die_with_parent(parent_pid)
        set_name(_PROCESS)
        close_all_but(write_fd)
        _answer_all(names, write_fd)

    try:
        pid = fork(begin)
    except OSError:
        os.close(read_fd)
        return {}
    finally:
        os.close(write_fd)
    output, _status = collect_output(Child(pid, open_pidfd(pid)), read_fd, deadline_s)
    answers = (line.split() for line in output.splitlines())
    return {names[int(number)]: is_own == b"1" for number, is_own in answers}


def _answer_all(names: list[str], write_fd: int) -> None:
    """Look all names up, several at once; each answer is one short write."""
    numbers = iter(range(len(names)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            answer = _look_up(names[number])
            if "own" in answer or answer["unknown"]:
                os.write(write_fd, f"{number} {int(answer.get('own') is True)}\n".encode())

    threads = [threading.Thread(target=work) for _ in range(min(_MOST_AT_ONCE, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
