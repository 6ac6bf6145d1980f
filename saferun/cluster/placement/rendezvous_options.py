"""The rendezvous of a job on one host; how addresses and settings of any rendezvous are written."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from saferun.config import RendezvousConfig
from saferun.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What torch 2.13 brings along; others are registered by entry points.
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
# As under torchrun, where an endpoint has no port.
DEFAULT_C10D_PORT = 29400
# torch's own default of read_timeout.
_READ_TIMEOUT_S = 60.0
_MOST_DIGITS, _FOR_EVER_S = 9, 1e9  # some 30 years
_CONNECT_S = 3.0
MOST_NNODES = 1 << 17
_ENTRY_POINTS = "torchrun.handlers"
_REGISTRY = "torch.distributed.elastic.rendezvous.api"


def one_host(values: Any, environ: Mapping[str, str]) -> RendezvousConfig:  # noqa: ANN401 - argparse's namespace
    """The rendezvous of a job that has one host and one saferun.

    Args:
        values: the options.
        environ: the environment of this process.

    Raises:
        UsageError: the options contradict each other.
    """
    backend, endpoint = values.rdzv_backend, values.rdzv_endpoint
    options = read_conf(values.rdzv_conf)
    own_port = backend == "static" and not endpoint and values.master_port is None
    if values.standalone or own_port:
        return _on_a_free_port(_random_id(), values, environ)
    if backend == "static":
        host, port = static_address(values)
        return RendezvousConfig("static", values.rdzv_id or random_number(), host, port, values.local_addr)
    check_service(backend, endpoint)
    # A file, or a service elsewhere: one host has no other to meet there.
    rendezvous = _on_a_free_port(values.rdzv_id or random_number(), values, environ)
    return rendezvous._replace(note=_note_of_needless(endpoint, options)) if backend == "c10d" else rendezvous


def _note_of_needless(endpoint: str, options: Mapping[str, str]) -> str:
    """A warning where nothing serves the store of c10d on another host; empty: there is none.

    torchrun waits a minute for it, and fails. Here it is not needed, but others may have been meant to take part.
    """
    # Whoever says which host serves the store knows of names and addresses that lead to this one by detours.
    if store_type(options) == "file" or "is_host" in options:
        return ""
    host, port = split_endpoint(endpoint)
    from saferun.linux.names import is_elsewhere

    # A name that is unknown may become known, as that of a pod.
    if not is_elsewhere(host) or is_served(host, DEFAULT_C10D_PORT if port is None else port):
        return ""
    return (
        f"warning: --rdzv-endpoint {endpoint} is another host, and no store answers there; with --nnodes 1 the ranks"
        " need none (in a job of several hosts, pass their number as --nnodes)"
    )


def is_registered(values: Any) -> bool:  # noqa: ANN401 - argparse's namespace
    """Whether a handler that is not torch's own decides which hosts take part, even where the options name one host."""
    return values.rdzv_backend not in _BACKENDS


def is_served(host: str, port: int) -> bool:
    """Whether connections to an address of another host are accepted, within seconds."""
    import socket

    try:
        with socket.create_connection((host, port), _CONNECT_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def check_spares(values: Any, least: int, most: int) -> None:  # noqa: ANN401 - argparse's namespace
    """Refuse a number of spares that means nothing.

    Raises:
        UsageError: it means nothing.
    """
    if values.spares < 0:
        raise UsageError(f"--spares {values.spares} is negative", "leave it out for no spare hosts")
    if values.standalone:
        raise UsageError("--spares with --standalone: one host has no spares", "leave one of them out")
    if values.rdzv_backend != "static" or least != most:
        raise UsageError(
            f"--spares {values.spares} is for the static rendezvous and a fixed number of hosts",
            "start more hosts than the MAX of --nnodes MIN:MAX: torch's rendezvous has them wait",
        )
    if most + values.spares > MOST_NNODES:
        raise UsageError(f"--spares {values.spares} is more than {MOST_NNODES} hosts", "leave it out for no spares")


def static_address(values: Any) -> tuple[str, int]:  # noqa: ANN401 - argparse's namespace
    """Where host 0 is, as the options say."""
    endpoint = values.rdzv_endpoint
    if not endpoint:
        return without_brackets(values.master_addr), checked_port(values.master_port)
    host, port = split_endpoint(endpoint)
    if port is None:
        raise UsageError(f"--rdzv-endpoint {endpoint} has no port", "write it as HOST:PORT")
    return without_brackets(host), port


def checked_port(port: int) -> int:
    """The same port, if it is one."""
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--master-port {port} is not a port", "use a number from 0 to 65535")
    return port


def control_port(values: Any, ports: tuple[int, ...]) -> str:  # noqa: ANN401 - argparse's namespace
    """``--control-port``, where the ranks' store is behind one of these ports."""
    text: str = values.control_port
    if text in {"auto", "same"}:
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 1 << 16):  # noqa: PLR2004
        raise UsageError(f"--control-port {text} is neither a port, same nor auto", "leave it out, or pass same")
    return "same" if ports == (int(text),) else str(int(text))


def _on_a_free_port(run_id: str, values: Any, environ: Mapping[str, str]) -> RendezvousConfig:  # noqa: ANN401
    """Of one host, which meets no other, whatever backend was asked for: c10d, as with torchrun's ``--standalone``."""
    agent_store = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
    return RendezvousConfig("c10d", run_id, None, None, values.local_addr, agent_store)


def random_number() -> str:
    """As torchrun names a job whose name is empty: ``--rdzv-id $SLURM_JOB_ID`` without Slurm."""
    return str(int.from_bytes(os.urandom(16), "big"))


def _random_id() -> str:
    """A random (version 4) UUID, as torchrun names such runs."""
    digits = bytearray(os.urandom(16))
    digits[6] = digits[6] & 0x0F | 0x40
    digits[8] = digits[8] & 0x3F | 0x80
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def check_service(backend: str, endpoint: str) -> None:
    """Refuse a name that no rendezvous handler of torch's goes by, and a service without an endpoint."""
    if backend not in _BACKENDS:
        from importlib.metadata import entry_points

        from saferun.linux.installed_torch import may_load_backends

        registered = sorted({point.name for point in entry_points(group=_ENTRY_POINTS)} | _registered_here())
        # An out-of-tree backend may register one as torch is imported; the coordinator finds out.
        if backend not in registered and not may_load_backends(os.environ):
            known = ", ".join((*_BACKENDS, *registered))
            raise UsageError(f"--rdzv-backend {backend}: torch knows no such rendezvous", f"known are {known}")
    if backend in {"etcd", "etcd-v2"} and not endpoint.strip():
        raise UsageError(f"--rdzv-backend {backend} has no address", "say where etcd is, as --rdzv-endpoint HOST:PORT")


def _registered_here() -> set[str]:
    """The handlers that were registered in this process, by a ``sitecustomize``: it runs in the coordinator too."""
    api = sys.modules.get(_REGISTRY)
    registry = getattr(getattr(api, "rendezvous_handler_registry", None), "_registry", None)
    return set(registry) if isinstance(registry, dict) else set()


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT`` -> host and port; an empty one is this host.

    Raises:
        UsageError: it is none of these.
    """
    endpoint = endpoint.strip()
    if not endpoint:
        return "localhost", None
    if endpoint.startswith("[") and endpoint.endswith("]"):
        return without_brackets(endpoint), None
    host, colon, port = endpoint.rpartition(":")
    name = without_brackets(host if colon else endpoint)
    if not name or not all(char.isalnum() or char in "_.:-" for char in name):
        raise UsageError(f"--rdzv-endpoint {endpoint}: {name!r} is not a host", "write it as HOST:PORT")
    if not colon:
        return endpoint, None
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"--rdzv-endpoint {endpoint}: {port!r} is not a port", "write it as HOST:PORT")
    return without_brackets(host), int(port)


def join_endpoint(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """``::1`` for ``[::1]``."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def read_conf(text: str) -> dict[str, str]:
    """The settings in ``--rdzv-conf``."""
    options = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = item.partition("=")
        if not key.strip() or not value.strip():
            raise UsageError(f"--rdzv-conf {text}: {item!r} is not KEY=VALUE", "write it as KEY=VALUE,KEY=VALUE")
        options[key.strip()] = value.strip()
    return options


def wait_limits(backend: str, conf: Mapping[str, str]) -> tuple[float | None, float]:
    """How long ``--rdzv-conf`` has late hosts and the store of a rendezvous waited for, in seconds; None, 0: not said.

    As the handlers of torch read it: ``static`` and ``etcd`` have one time for all; the others have one for the hosts
    and one for the store, a minute where it is not given. Settings of handlers that are not torch's own may have the
    same names, and mean what they like: only what is a number of seconds counts.
    """
    if backend in {"static", "etcd"}:
        return _conf_seconds(conf, "timeout"), 0.0
    if backend not in _BACKENDS:
        conf = {key: text for key, text in conf.items() if _is_seconds(text)}
    join_s, connect_s = _conf_seconds(conf, "join_timeout"), _conf_seconds(conf, "read_timeout")
    if connect_s is None:
        connect_s = 0.0 if join_s is None else _READ_TIMEOUT_S
    return join_s, connect_s


def _conf_seconds(conf: Mapping[str, str], key: str) -> float | None:
    text = conf.get(key)
    if text is None:
        return None
    if not _is_seconds(text):
        raise UsageError(f"--rdzv-conf {key}={text} is not a number of seconds", "use a whole number above 0")
    # Nines without end are how people write forever.
    return float(text) if len(text.lstrip("0")) <= _MOST_DIGITS else _FOR_EVER_S


def _is_seconds(text: str) -> bool:
    return text.isascii() and text.isdigit() and bool(text.strip("0"))


def store_type(options: Mapping[str, str]) -> str:
    """Where c10d keeps its things: ``tcp`` or ``file``."""
    kind = options.get("store_type", "tcp").strip().lower()
    if kind not in {"tcp", "file"}:
        raise UsageError(f"--rdzv-conf store_type={kind}: there is no such store", "use tcp or file")
    is_host = options.get("is_host", "0").lower()
    if is_host not in {"1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"}:
        raise UsageError(f"--rdzv-conf is_host={is_host} is neither true nor false", "use 1 or 0")
    return kind
