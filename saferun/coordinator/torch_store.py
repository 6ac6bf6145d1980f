"""torch's TCPStore on a socket that the supervisor listens on."""

from __future__ import annotations

import os
import re
import socket
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.store_connection import KNOWN_RELEASES, StoreConnection

if TYPE_CHECKING:
    from saferun.model import TorchParts

_TIMEOUT = timedelta(seconds=300)
_RENDEZVOUS = "torch.distributed.elastic.rendezvous"
_C10D_MODULES = (f"{_RENDEZVOUS}.c10d_rendezvous_backend", f"{_RENDEZVOUS}.dynamic_rendezvous")
# Of these and older ones the c10d rendezvous has been seen to work without the rest of torch.
_NEWEST_RELEASE = (2, 15)
# What older releases serve leaves those asleep that wait for a key which compare_set sets.
_WAKES_WAITING = (2, 8)


def import_store_class(torch_parts: TorchParts, *, serves: bool = True) -> tuple[Any, str]:
    """Torch's TCPStore class and torch's version.

    A host that serves no store, and needs a connection to one only, has a class of ours instead: nothing is imported.

    The store lives in torch's C extension, and importing that alone costs a fourth of ``import torch``. So, unless
    all of torch is wanted, the packages ``torch`` and ``torch.distributed`` are stood in for by empty modules while the
    extension is loaded. The c10d rendezvous is Python that needs no more than the stores and modules of its own, so it
    is imported the same way. Whatever goes wrong with that ends in a plain import in a fresh interpreter, which the
    caller arranges (ImportError); nothing else in this process may import torch afterwards.

    Args:
        torch_parts: what is needed of torch.
        serves: whether this host may have to serve a store.

    Raises:
        ImportError: torch cannot be imported this way.
    """
    if torch_parts == "all":
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        version = str(torch.__version__)
        StoreClient.wakes_waiting = _release(version) >= _WAKES_WAITING
        return TCPStore, version
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torch'")
    location = spec.submodule_search_locations[0]
    version = _version(location)
    StoreClient.wakes_waiting = _release(version) >= _WAKES_WAITING
    if torch_parts == "store" and not serves and _is_known(version):
        return StoreConnection, version
    if torch_parts == "c10d" and _release(version) > _NEWEST_RELEASE:
        raise ImportError(f"whether the c10d rendezvous of torch {version} needs more of torch is not known")
    for name, path in (("torch", location), ("torch.distributed", os.path.join(location, "distributed"))):
        module = ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    try:
        extension: Any = import_module("torch._C")
        extension._c10d_init()  # noqa: SLF001
        stores = extension._distributed_c10d  # noqa: SLF001
        if torch_parts == "c10d":
            vars(sys.modules["torch.distributed"]).update(
                {name: value for name, value in vars(stores).items() if not name.startswith("_")}
            )
            for rendezvous in _C10D_MODULES:
                import_module(rendezvous)
    except Exception as error:
        raise ImportError(f"a part of torch cannot be imported alone: {error}") from error
    return stores.TCPStore, version


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


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; an unknown one is newer than all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (sys.maxsize,)


def _is_known(version: str) -> bool:
    """Whether the queries of its store are known; those of the oldest known release came before it was released."""
    oldest, newest = KNOWN_RELEASES
    release, is_early = _release(version), bool(re.match(r"[\d.]+(a|\.dev|rc)", version))
    return oldest <= release <= newest and not (release == oldest and is_early)


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
