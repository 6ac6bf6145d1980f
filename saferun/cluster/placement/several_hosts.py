"""Where several hosts of a job meet: options and the scheduler's environment -> RendezvousConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saferun.cluster.placement.rendezvous_options import (
    DEFAULT_C10D_PORT,
    check_service,
    checked_port,
    is_registered,
    join_endpoint,
    random_number,
    read_conf,
    split_endpoint,
    static_address,
    store_type,
    without_brackets,
)
from saferun.cluster.schedulers.allocation import named_master
from saferun.config import DEFAULT_PORT, RendezvousConfig, Setting
from saferun.errors import UsageError, suppress
from saferun.model import Value
from saferun.text.master_port import CHOSEN, DEFAULT, ENDPOINT, GIVEN, NEEDLESS, SCHEDULER

if TYPE_CHECKING:
    from saferun.cluster.schedulers import Allocation

# Below 32768, where Linux begins to hand out ports to outgoing connections.
_LOWEST_PORT, _PORTS = 20000, 12768
_CANDIDATES = 8


class Known(Value):
    """What is known of the hosts of a job before they meet.

    ``allocation`` is what a scheduler provides, if anything that counts; ``least`` is the number of hosts that suffice.
    """

    most: int
    names: tuple[str, ...] = ()
    allocation: Allocation | None = None
    least: int = 0

    @property
    def on_one_host(self) -> bool:
        """Whether there is only one host, with several processes."""
        return self.most == 1


def several(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    known: Known,
) -> RendezvousConfig:
    """The rendezvous of a job that has several hosts, or several saferuns on one.

    Args:
        values: the options.
        settings: where they come from.
        environ: the environment of this process.
        known: what is known of the hosts.

    Raises:
        UsageError: it is not clear where they should meet.
    """
    backend = values.rdzv_backend
    run_id = values.rdzv_id
    if known.allocation is not None and settings["rdzv_id"].origin == "default":
        run_id = known.allocation.key
    if not run_id and backend != "static" and known.least == 1:
        run_id = random_number()  # as under torchrun: a job of its own on each host, which may be the only one
    if not run_id:
        raise UsageError("--rdzv-id is empty", "give the job a name, or leave --rdzv-id out")
    conf = read_conf(values.rdzv_conf)
    if backend == "c10d" and "store_type" in conf:
        conf = {**conf, "store_type": store_type(conf)}  # torch takes capitals as well
    if known.on_one_host and not is_registered(values):
        ports = _ports(values, known)
        port = ports[0] if len(ports) == 1 else None
        source = _port_source(values, known)
        return RendezvousConfig("static", run_id, None, port, values.local_addr, ports=ports, port_source=source)
    if backend == "static":
        return _static(values, settings, environ, known, run_id)
    endpoint = values.rdzv_endpoint.strip()
    address = None
    if backend != "c10d":
        check_service(backend, endpoint)
        with suppress(UsageError):  # whatever it is, the backend knows what to make of it
            host, port = split_endpoint(endpoint)
            address = host, port or 0
    elif store_type(conf) != "file":
        address = _c10d_address(values, settings, environ, known)
        endpoint = join_endpoint(*address)
    elif not endpoint:
        raise UsageError("--rdzv-conf store_type=file has no file", "name one as --rdzv-endpoint, for all hosts")
    # The ranks' store is saferun's, also with TORCH_DISABLE_SHARE_RDZV_TCP_STORE: a new one for each attempt.
    config = RendezvousConfig(backend, run_id, None, None, values.local_addr, port_source=ENDPOINT)
    return config._replace(endpoint=endpoint, address=address, conf=tuple(conf.items()))


def _static(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    known: Known,
    run_id: str,
) -> RendezvousConfig:
    if values.rdzv_endpoint:
        host, port = static_address(values)
        ports: tuple[int, ...] = (port,)
        source = ENDPOINT
    else:
        host, ports = _master(values, settings, environ, known), _ports(values, known)
        source = _port_source(values, known)
    is_given = bool(
        values.rdzv_endpoint
        or settings["master_addr"].origin != "default"
        or known.allocation is not None
        or known.names
    )
    if 0 in ports:
        raise UsageError(
            "--master-port 0 lets the kernel choose, and the other hosts could not know its choice",
            "pass a number above 1023, or leave --master-port out",
        )
    only = ports[0] if len(ports) == 1 else None
    config = RendezvousConfig("static", run_id, host, only, values.local_addr, ports=ports, port_source=source)
    return config if is_given else config._replace(is_master_given=False)


def _master(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    known: Known,
) -> str:
    """The address of host 0: as the user says, else as the list of hosts or the scheduler says."""
    allocation = known.allocation
    if settings["master_addr"].origin != "default" or (allocation is None and not known.names):
        return without_brackets(values.master_addr)
    known_addr = allocation.master_addr if allocation is not None else None
    if known.names:
        return known.names[0]
    if known_addr is not None and not (allocation is not None and allocation.guessed_master):
        return known_addr
    # MPI does not provide the host of rank 0; users have long set this variable for it.
    hosts = allocation.hosts if allocation is not None else None
    address = named_master(environ, hosts or 0) or known_addr
    if not address:
        source = allocation.source if allocation is not None else "the scheduler"
        raise UsageError(
            f"{source} does not tell this process which host has rank 0",
            "export MASTER_ADDR to all hosts, or pass --nnodes, --node-rank and --master-addr",
        )
    return without_brackets(address)


def _ports(values: Any, known: Known) -> tuple[int, ...]:  # noqa: ANN401 - argparse's namespace
    if values.master_port is not None:
        return (checked_port(values.master_port),)
    allocation = known.allocation
    if allocation is None:
        return (DEFAULT_PORT,)
    if allocation.master_port is not None:
        return (allocation.master_port,)
    return candidate_ports(allocation.key)


def _port_source(values: Any, known: Known) -> str:  # noqa: ANN401 - argparse's namespace
    """Where the ports of ``_ports`` come from."""
    allocation = known.allocation
    if values.master_port is not None:
        return GIVEN if allocation is None or allocation.master_port is not None else NEEDLESS
    if allocation is None:
        return DEFAULT
    return CHOSEN if allocation.master_port is None else SCHEDULER


def candidate_ports(key: str) -> tuple[int, ...]:
    """Ports for a launch, the same on all its hosts: several, as the first may be in use."""
    from zlib import crc32

    ports: dict[int, None] = {}
    count = 0
    while len(ports) < _CANDIDATES:
        ports[_LOWEST_PORT + crc32(f"{key}/{count}".encode(errors="surrogateescape")) % _PORTS] = None
        count += 1
    return tuple(ports)


def _c10d_address(
    values: Any,  # noqa: ANN401 - argparse's namespace
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    known: Known,
) -> tuple[str, int]:
    if values.rdzv_endpoint.strip():
        host, port = split_endpoint(values.rdzv_endpoint)
        return without_brackets(host), DEFAULT_C10D_PORT if port is None else port
    if known.names or known.allocation is not None:
        ports = _ports(values, known) if known.allocation is not None else (DEFAULT_C10D_PORT,)
        return _master(values, settings, environ, known), ports[0]
    return "localhost", DEFAULT_C10D_PORT
