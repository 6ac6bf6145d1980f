"""What the coordinator does for its supervisor, message by message.

The supervisor sends JSON lines, each with ``op``:

* ``serve {attempt}``: serve the store of this attempt; answered by ``serving {attempt, torch}``.
* ``drop``: end the store of the attempt before, with all its keys and connections; answered by ``dropped``.
* ``prepare {numa, nproc, logs, environs}``: numactl prefixes and log destinations; answered by ``prepared`` or
  ``failed``.
* ``event {…}``: hand an event to torch's event handlers.
* ``goodbye``: end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from saferun.coordinator.store import import_store_class, open_store


def serve(socket_fd: int, listen_fd: int, *, whole_torch: bool) -> None:
    """Import torch, then answer messages until goodbye or until the supervisor is gone."""
    connection = socket.socket(fileno=socket_fd)
    try:
        store_class, torch_version = import_store_class(whole_torch=whole_torch)
    except ModuleNotFoundError:
        raise
    except ImportError:
        if whole_torch:
            raise
        # Half of torch is loaded; only a fresh interpreter can load all of it.
        for fd in (socket_fd, listen_fd):
            if fd >= 0:
                os.set_inheritable(fd, True)  # noqa: FBT003
        os.execv(sys.executable, [sys.executable, "-P", sys.argv[0], str(socket_fd), str(listen_fd), "1"])
    store: Any = None
    with connection, connection.makefile("rb") as incoming:

        def answer(message: dict[str, Any]) -> None:
            connection.sendall(json.dumps(message).encode() + b"\n")

        for line in incoming:
            message = json.loads(line)
            match message["op"]:
                case "serve":
                    store = None
                    store = open_store(store_class, listen_fd)
                    answer({"op": "serving", "attempt": message["attempt"], "torch": torch_version})
                case "drop":
                    store = None
                    answer({"op": "dropped"})
                case "prepare":
                    from saferun.coordinator.torchrun_parts import prepare

                    answer(prepare(message))
                case "event":
                    from saferun.coordinator.torchrun_parts import record_event

                    record_event(message)
                case "goodbye":
                    break
    del store
    # Nothing is worth the interpreter's shutdown, with threads of torch's own about.
    sys.stderr.flush()
    os._exit(0)
