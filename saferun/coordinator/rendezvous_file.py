"""The file by which hosts meet with ``--rdzv-conf store_type=file``; there is no address then, and no port."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from saferun.coordinator.rendezvous_round import JoinFailedError
from saferun.errors import printable

if TYPE_CHECKING:
    from saferun.coordinator.rendezvous_round import RendezvousRound

_AGAIN_S = 0.5


def await_file(rdzv: RendezvousRound) -> None:
    """Wait until the file can be opened, as torch does, which would hold the GIL of this process meanwhile.

    Raises:
        JoinFailedError: the time for that is over.
        CancelledError: no task waits for it any more.
    """
    while True:
        rdzv.check()
        try:
            os.close(os.open(rdzv.request.endpoint, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            path = printable(rdzv.request.endpoint)
            message = f"{path}, the file of the rendezvous, cannot be opened on {rdzv.name}: {error.strerror}"
        else:
            return
        rdzv.set_status(message, is_fault=True)
        if rdzv.remaining_s <= 0:
            hint = "name a file in a directory that all hosts share and can write to as --rdzv-endpoint"
            raise JoinFailedError(f"{message}, for {rdzv.timeout_s:.0f} s", hint)
        time.sleep(_AGAIN_S)
