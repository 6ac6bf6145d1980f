"""What only torch knows, for a task of a host whose coordinator is another task's.

torch answers by the environment, the CPUs and the GPUs of the process that asks it, and a scheduler gives each task its
own. So each task asks for itself, as each torchrun does, in a process that serves nothing else: torch's server of
timers kills itself with the rank whose timer expires, and a driver that does not answer holds up no other task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from saferun.cluster.coordinator_client import CoordinatorClient
from saferun.cluster.coordinator_process import CoordinatorLink
from saferun.cluster.job_values import JobCallbacks
from saferun.config import LaunchConfig
from saferun.errors import SaferunError, printable
from saferun.linux.poller import Poller
from saferun.model import JsonObject

# For the last events, and for torch's server of timers to remove its file.
_GOODBYE_S = 5.0


class TorchProcess(CoordinatorClient):
    """A process of this task's own that has all of torch, if the options need that. It is replaced when it is missing.

    Args:
        config: the launch.
        environ: its environment.
        poller: the loop's.
        callbacks: of the job.
        task: the number of this task on the host.
        open_link: starts the process.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        callbacks: JobCallbacks,
        task: int,
        *,
        open_link: Callable[..., CoordinatorLink] = CoordinatorLink,
    ) -> None:
        super().__init__(
            config,
            environ,
            poller,
            callbacks,
            on_message=lambda _: None,
            on_lost=self._on_process_lost,
            name=f"the process of task {task} that has torch",
            open_link=open_link,
        )
        self._is_in_use = False  # an attempt has what it answered

    def open(self) -> None:
        """Start it, if it is needed: it imports torch while the hosts meet."""
        if self.asks_torch:
            self.start({})

    def prepare(self, preparation: JsonObject) -> None:
        """Ask it; ``on_prepared`` or ``on_prepare_failed`` follows."""
        self.is_preparing = True  # also if it cannot be started
        self._is_in_use = True
        self.open()
        if self.is_open:
            super().prepare(preparation)

    def close(self, goodbye_s: float = _GOODBYE_S) -> None:
        """End it, at once if there is nothing that it has to finish."""
        super().close(goodbye_s if self.forwards_events or self.serves_timers else 0.0)

    def _on_process_lost(self, what: str, hint: str) -> None:
        is_missed, self._is_in_use = self._is_in_use, False
        if self.is_preparing:
            self.is_preparing = False
            self._callbacks.on_prepare_failed(SaferunError(what, hint))
            return
        missing = [("torch's timers", self.serves_timers), ("torchrun's events", self.forwards_events)]
        names = " and ".join(name for name, is_missing in missing if is_missing)
        if is_missed and names:
            self._callbacks.print_line(f"saferun: warning: {printable(what)}; {names} of that task are missing")
