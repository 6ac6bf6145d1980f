"""torch's TCPStore on a socket that the supervisor listens on."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TIMEOUT = timedelta(seconds=300)


def import_store_class(*, whole_torch: bool) -> tuple[Any, str]:
    """Torch's TCPStore class and torch's version.

    The store lives in torch's C extension, and importing that alone costs a fourth of ``import torch``. So, unless
    all of torch is wanted, the packages ``torch`` and ``torch.distributed`` are stood in for by empty modules while the
    extension is loaded. Whatever goes wrong with that ends in a plain import in a fresh interpreter, which the caller
    arranges (ImportError); nothing else in this process may import torch afterwards.

    Raises:
        ImportError: torch cannot be imported this way.
    """
    if whole_torch:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore, str(torch.__version__)
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torch'")
    location = spec.submodule_search_locations[0]
    for name, path in (("torch", location), ("torch.distributed", os.path.join(location, "distributed"))):
        module = ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    try:
        extension: Any = import_module("torch._C")
        extension._c10d_init()  # noqa: SLF001
        store_class = extension._distributed_c10d.TCPStore  # noqa: SLF001
    except Exception as error:
        raise ImportError(f"the store alone cannot be imported: {error}") from error
    return store_class, _version(location)


def _version(location: str) -> str:
    scope: dict[str, Any] = {}
    try:
        with open(os.path.join(location, "version.py"), encoding="utf-8") as file:
            text = file.read()
        for line in text.splitlines():
            if line.startswith("__version__"):
                exec(line, scope)  # noqa: S102 - torch's own file, which importing torch would run as well
    except (OSError, SyntaxError, NameError):
        pass
    return str(scope.get("__version__", "unknown"))


def loopback_address(listen_fd: int) -> tuple[str, int]:
    """Where this host reaches its own listening socket."""
    with socket.socket(fileno=os.dup(listen_fd)) as probe:
        port = int(probe.getsockname()[1])
        if probe.family != socket.AF_INET6 or not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            return "127.0.0.1", port
    return "::1", port


def open_store(store_class: Any, listen_fd: int) -> Any:  # noqa: ANN401 - torch may be there in part only
    """A TCPStore server on a copy of a listening socket. Dropping the result ends the server.

    Raises:
        RuntimeError: torch cannot serve on this socket.
    """
    host, port = loopback_address(listen_fd)
    arguments = {"host_name": host, "port": port, "world_size": None, "is_master": True, "timeout": _TIMEOUT}
    arguments |= {"wait_for_workers": False}
    try:
        return store_class(**arguments, master_listen_fd=os.dup(listen_fd))
    except (RuntimeError, ValueError):
        # The libuv server of older releases cannot take over a socket; the older server can.
        return store_class(**arguments, master_listen_fd=os.dup(listen_fd), use_libuv=False)
