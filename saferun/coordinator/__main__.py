"""The coordinator process: ``python -P …/coordinator/__main__.py SOCKET_FD LISTEN_FD TORCH_PARTS [FDS]``.

FDS, in a job of several hosts, is a JSON object of more listening sockets. Started by the supervisor beside the ranks.
It serves torch's TCPStore on the descriptor that the supervisor listens on, if there is one, and answers what needs
torch. It never outlives the supervisor (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.model import TorchParts


def main() -> None:
    """Serve until the supervisor says goodbye or is gone."""
    # The package, wherever it lies, without putting the current directory on the path.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from saferun.linux.search_path import search_pythons_own_first

    search_pythons_own_first()
    # Ctrl-C and the scheduler's signals are the supervisor's to handle.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    from saferun.coordinator.service import serve

    socket_fd, listen_fd = (int(argument) for argument in sys.argv[1:3])
    torch_parts: TorchParts = sys.argv[3]  # type: ignore[assignment]
    fds = {str(name): int(fd) for name, fd in json.loads(sys.argv[4]).items()} if len(sys.argv) > 4 else {}  # noqa: PLR2004
    # torch's store clients ask the name service for the name of each address that they connect to, only to have it for
    # messages. Where the service is broken, glibc's own patience would cost ten seconds and more a connection.
    os.environ["RES_OPTIONS"] = f"{os.environ.get('RES_OPTIONS', '')} timeout:1 attempts:2".strip()
    if fds:
        # A job of several hosts: saferun has messages of its own for what torch's code logs about connections.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Torch's elastic rendezvous would have hosts that join a running job wait for an address without end.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    sharing = None
    if fds and os.environ.get("SAFERUN_SIGN_MESSAGES", "off") != "off":
        from saferun.coordinator.secret_process import SecretProcess

        # Before torch is imported, and before there are threads.
        sharing = SecretProcess((socket_fd, listen_fd, *fds.values()))
    serve(socket_fd, listen_fd, fds, torch_parts=torch_parts, sharing=sharing)


if __name__ == "__main__":
    main()
