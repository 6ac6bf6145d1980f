"""What torch's rendezvous handlers are given, and how they are called where the store stands still for a while.

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


def next_rendezvous(handler: Any, rdzv: RendezvousRound) -> Any:  # noqa: ANN401
    """What the handler's ``next_rendezvous`` returns, tried again while time remains where its store stood still."""
    while True:
        try:
            return handler.next_rendezvous()
        except Exception as error:
            if rdzv.is_over or rdzv.remaining_s <= 0 or not _is_stall(error):
                raise
        time.sleep(_PAUSE_S)


def _is_stall(error: Exception) -> bool:
    """Whether a connection has failed because nothing was answered in time, and not because it broke."""
    return type(error).__name__ == _CONNECTION_ERROR and type(error.__cause__).__name__ in _TIMEOUT_ERRORS
