"""What a rank needs to take part in a test, laid beside its program, with ``from rank import *``."""

import os
import signal
import sys  # noqa: F401 - for the program, as the others
import time

RANK = int(os.environ.get("RANK", "-1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1"))
FOLDER = os.environ["LAUNCHING_FOLDER"]


def tell(word: str) -> None:
    """Say a word to the test: one write, so that the words of many processes never mix."""
    fd = os.open(FOLDER + "/words", os.O_WRONLY)
    os.write(fd, f"{RANK} {ATTEMPT} {os.getpid()} {word}\n".encode())
    os.close(fd)


def tell_signals(*signums: int) -> None:
    """Say each signal that comes, and go on."""
    for signum in signums:
        signal.signal(signum, lambda number, _frame: tell(signal.Signals(number).name))


def ignore(*signums: int) -> None:
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)


def await_release(name: str) -> None:
    """Return when the test releases the name."""
    while not os.path.exists(f"{FOLDER}/release.{name}"):
        time.sleep(0.02)  # polls at 5 ms may take 2 % of a core, which is work to the watchdog


def fill(disk: str) -> object:
    """Leave no room on a disk, to the last byte. Returns the function that makes room again."""
    path = disk + "/filler"
    filler = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (4096, 1):
        try:
            while True:
                os.write(filler, bytes(size))
        except OSError:
            pass

    def make_room() -> None:
        os.unlink(path)
        os.close(filler)

    return make_room


def stay() -> None:
    """Stay until a signal ends this process."""
    while True:
        signal.pause()
