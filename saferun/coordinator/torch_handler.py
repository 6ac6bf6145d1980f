"""What torch's rendezvous handlers are given, and how they are called where a store stands still, or a job is full.

torch's client gives up a value for which it has waited as long as the store's timeout, and sees that the store is there
again at the same moment. The handler takes that for a failed connection, and whoever fails closes the rendezvous for
all.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saferun.coordinator.rendezvous_round import RendezvousRound

# torch's own read_timeout.
_READ_TIMEOUT_S = 60.0
_PAUSE_S = 0.5
_WITH_JOIN_TIMEOUT = frozenset({"c10d", "etcd-v2"})
_CONNECTION_ERROR = "RendezvousConnectionError"
_JOIN_TIMEOUT_ERROR = "RendezvousTimeoutError"
_TIMEOUT_ERRORS = frozenset({"DistStoreError", "TimeoutError"})


def handler_conf(backend: str, late_s: float, conf: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a handler.

    Args:
        backend: its name.
        late_s: how long late hosts are waited for.
        conf: what the user has set.
    """
    seconds = max(1, int(late_s))
    # torchrun sets it for every handler: some that are registered cannot do without.
    given: dict[str, Any] = {"timeout": seconds}
    if backend in _WITH_JOIN_TIMEOUT:
        given["join_timeout"] = seconds
    return {**given, **conf}


def wait_as_torch_does(store: Any, read_timeout_s: float) -> None:  # noqa: ANN401 - torch may be there in part only
    """Have a store that a handler is given wait for values as long as under torchrun, or longer.

    Args:
        store: torch's TCPStore.
        read_timeout_s: as the user wants it; 0: it was not said.
    """
    store.set_timeout(timedelta(seconds=max(_READ_TIMEOUT_S, read_timeout_s)))


class NextRendezvous:
    """A call of a handler's ``next_rendezvous``, repeated where it fails though no host of the job is missing.

    torch has a host that comes to a job with as many hosts as it takes wait without end, but not one that becomes one
    too many by a restart, where another one was quicker than it: that waits as if hosts were missing. It would give up,
    and close the rendezvous of a job that runs.

    Args:
        handler: torch's, or another.
        rdzv: the rendezvous; the call is repeated while time remains, or while the job runs without this host.
    """

    def __init__(self, handler: Any, rdzv: RendezvousRound) -> None:  # noqa: ANN401
        self._handler = handler
        self._rdzv = rdzv
        self._was_beyond = False  # in this call, this host was beyond the most that the job takes

    def observe(self) -> None:
        """Note, while the call lasts, whether the job runs without this host; to be called now and then."""
        self._was_beyond = self._was_beyond or _is_beyond(self._handler)

    def __call__(self) -> Any:  # noqa: ANN401
        """What the handler returns."""
        while True:
            self._was_beyond = False
            try:
                return self._handler.next_rendezvous()
            except Exception as error:
                self.observe()
                has_time = self._was_beyond or self._rdzv.remaining_s > 0
                is_late = self._was_beyond and type(error).__name__ == _JOIN_TIMEOUT_ERROR
                if self._rdzv.is_over or not (is_late or (has_time and _is_stall(error))):
                    raise
            time.sleep(_PAUSE_S)


def _is_beyond(handler: Any) -> bool:  # noqa: ANN401
    """Whether as many other hosts as a job takes are its hosts now, as this host has read torch's rendezvous last."""
    try:
        state, most = handler._state_holder.state, handler.settings.max_nodes  # noqa: SLF001 - torch does not say it
        others = [node for node in list(state.participants) if node != handler._this_node]  # noqa: SLF001
        return bool(state.complete) and len(others) >= most
    except Exception:
        return False  # another handler, or it changes the state at this moment


def has_room(handler: Any, was_full: bool) -> bool:  # noqa: ANN401, FBT001 - what the job was when its hosts met
    """Whether another host can join: also a job that met in full, once torch has missed one of its hosts for long."""
    try:
        return bool(len(handler._state_holder.state.participants) < handler.settings.max_nodes)  # noqa: SLF001
    except Exception:
        return not was_full  # another handler


def _is_stall(error: Exception) -> bool:
    """Whether a connection has failed because nothing was answered in time, and not because it broke."""
    return type(error).__name__ == _CONNECTION_ERROR and type(error.__cause__).__name__ in _TIMEOUT_ERRORS
