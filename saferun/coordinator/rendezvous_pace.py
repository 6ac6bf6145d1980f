"""How often torch's dynamic rendezvous reads its state while hosts are waited for.

torch reads it every second, whatever the number of hosts, keeps what it has read for a second, and lets each host begin
up to 0.3 s late: two hosts would wait for nothing most of that time. Here few hosts read it more often at first, and
all of them every second, as torch has it, once hosts have been waited for longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# So that all hosts of a rendezvous together read at most 100 states a second.
_HOST_S = 0.01
_LEAST_S = 0.05
# Who has waited for 10 s may as well wait for one more.
_OF_WAITED = 0.1


class RendezvousPace:
    """Shortens the pauses of torch's ``dynamic_rendezvous`` module; without effect where that has no such function.

    Args:
        hosts: the most that may take part.
    """

    def __init__(self, hosts: int) -> None:
        self._least_s = max(_LEAST_S, hosts * _HOST_S)
        self._since = time.monotonic()

    def begin(self) -> None:
        """Another round begins: whoever is waited for may come at once."""
        self._since = time.monotonic()

    def apply(self, handler: Any) -> Any:  # noqa: ANN401 - torch may be there in part only
        """Have a handler keep the state no longer than the shortest pause, where it keeps one. Returns the handler."""
        holder: Any = getattr(handler, "_state_holder", None)
        kept_s = getattr(holder, "_cache_duration", None)
        if isinstance(kept_s, int | float):
            holder._cache_duration = min(kept_s, self._least_s)  # noqa: SLF001 - torch has no setting for it
        return handler

    def pause(self, seconds: float | tuple[float, float]) -> float | tuple[float, float]:
        """What takes the place of a pause that torch wants: as long or shorter, seconds.

        Args:
            seconds: a pause, or the bounds between which torch chooses one at random.
        """
        if isinstance(seconds, tuple):
            low, high = seconds
            return low, max(low, min(high, self._least_s))
        waited_s = time.monotonic() - self._since
        return min(seconds, max(self._least_s, waited_s * _OF_WAITED))

    def install(self, module: Any) -> None:  # noqa: ANN401 - torch may be there in part only
        """Have the module pause like this.

        Args:
            module: ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``.
        """
        delay: Callable[..., None] | None = getattr(module, "_delay", None)
        if not callable(delay):
            return

        def paced(seconds: float | tuple[float, float]) -> None:
            delay(self.pause(seconds))

        module._delay = paced  # noqa: SLF001 - torch has no setting for it
