"""One member of a trial group: joins, runs a barrier and some all_reduces, and says where it stands.

It runs in a process forked for it. Its report is JSON lines: ``{"step": …}`` before each step, and ``{"kind": "ok"}``
or ``{"kind": …, "message": …}`` at the end. Then it ends; so the connections of peers break where it has failed, and
they need not wait.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from saferun.coordinator.torch_store import open_store
from saferun.errors import printable
from saferun.linux.descriptors import close_all_but, open_null
from saferun.model import Value
from saferun.text.wording import size_text

# Bound before any fork: looking a symbol up in the child would take the loader's lock.
_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_FLOAT_BYTES = 4
_LONGEST_MESSAGE = 400
# Torch gives up before the server does, since it knows why.
_TORCH_SHARE = 0.8
# How long a member that is done waits for the others' word that they are.
_GOODBYE_S = 5.0
# "[/build/gloo/transport/tcp/device.cc:84] " and "[enforce fail at /build/device.cc:84] ": of no use here.
_SOURCE_LOCATION = re.compile(
    r"\[[^\]\s]*?(?:enforce fail at )?[^\]\s]*\.(?:cc|cpp|cu|h|hpp):\d+\]\s*|\[enforce fail at [^\]]*\]\s*"
)
_TIMED_OUT = re.compile(r"tim(?:ed?[ -]?|e )out", re.IGNORECASE)


class MemberOrder(Value):
    """What a member does.

    Attributes:
        local_rank: on its host: its GPU.
        rank, world_size: in its group.
        backend: ``gloo`` or ``nccl``.
        interface: that the backend has to use; empty: its own choice.
        store_address, store_port: where the store is.
        prefix: of all keys of this group.
        sizes_bytes: of the all_reduces.
        give_up_at: monotonic seconds.
        pretend: what a test wants it to do wrong: ``never_joins``, ``hangs`` (in the barrier), ``stops`` (by SIGSTOP),
            ``crashes``, ``adds_wrongly``, ``computes_wrongly``; empty: nothing.
        compute_s: for how long it multiplies matrices before it joins; 0: not at all.
    """

    local_rank: int
    rank: int
    world_size: int
    backend: str
    interface: str
    store_address: str
    store_port: int
    prefix: str
    sizes_bytes: tuple[int, ...]
    give_up_at: float
    pretend: str
    compute_s: float = 0.0


def run(order: MemberOrder, parent_pid: int, report_fd: int, output_fd: int) -> NoReturn:
    """Do it, in the forked child.

    Args:
        order: what.
        parent_pid: the server's, with which this process dies.
        report_fd: a pipe for the report.
        output_fd: a pipe that becomes stdout and stderr.
    """
    # Whatever happens, nothing of the server's code may go on in this process.
    try:
        _detach(f"sr-trial-{order.local_rank}", parent_pid, report_fd, output_fd)
        _take_part(order, report_fd)
    except BaseException as error:
        message = _message_of(error)
        _report(report_fd, kind="timeout" if _TIMED_OUT.search(message) else "error", message=message)
    finally:
        os._exit(0)


def keep_store(listen_fd: int, parent_pid: int) -> NoReturn:
    """Serve a store for groups of this host, in the forked child, until it is killed.

    It is no member's: one that is stopped or gone would take it along.

    Args:
        listen_fd: a listening socket.
        parent_pid: the server's, with which this process dies.
    """
    try:
        null = open_null()
        _detach("sr-trial-store", parent_pid, listen_fd, null)
        store = open_store(dist.TCPStore, listen_fd)  # type: ignore[attr-defined]
        while store is not None:
            signal.pause()
    finally:
        os._exit(1)


def _detach(name: str, parent_pid: int, keep_fd: int, output_fd: int) -> None:
    """Die with the server, and keep none of its descriptors but one."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)
    with suppress(OSError):  # a sandbox refuses prlimit(2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    null = open_null()
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    close_all_but(keep_fd)


def _report(report_fd: int, **fields: str) -> None:
    # A pipe takes a line this short in one piece, or the server is gone.
    os.write(report_fd, json.dumps(fields).encode() + b"\n")


def _take_part(order: MemberOrder, report_fd: int) -> None:
    def step(name: str) -> None:
        _report(report_fd, step=name)

    patience = timedelta(seconds=max(1.0, (order.give_up_at - time.monotonic()) * _TORCH_SHARE))
    on_gpu = order.backend == "nccl"
    if order.interface:
        # "=" is NCCL's own sign for a whole name; without it eth1 would also mean eth10.
        os.environ["GLOO_SOCKET_IFNAME"] = order.interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={order.interface}"
    if on_gpu:
        os.environ.setdefault("NCCL_DEBUG", "WARN")
        step("setting its GPU")
        torch.cuda.set_device(order.local_rank)
    torch.set_num_threads(1)
    if order.compute_s:
        step("multiplying matrices")
    rate = f"{_multiply(order, on_gpu=on_gpu):.1f}" if order.compute_s else ""
    step("before joining")
    if order.pretend == "never_joins":
        signal.pause()
    step("connecting to the store")
    store = _connect(order, patience)
    step("in init_process_group")
    # NCCL's watchdog would abort the process; here the server's deadline is what ends a hang.
    timeout = patience * 4 if on_gpu else patience
    dist.init_process_group(order.backend, store=store, rank=order.rank, world_size=order.world_size, timeout=timeout)
    step("in barrier")
    _barrier(order, on_gpu=on_gpu)
    for size_bytes in order.sizes_bytes:
        step(f"in all_reduce of {size_text(size_bytes)}")
        _all_reduce(order, size_bytes, on_gpu=on_gpu)
    step("waiting for the others to be done")
    _wait_for_all(order, store)
    _report(report_fd, kind="ok", message=rate)


def _barrier(order: MemberOrder, *, on_gpu: bool) -> None:
    match order.pretend:
        case "hangs":
            signal.pause()
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
    if on_gpu:
        dist.barrier(device_ids=[order.local_rank])
        torch.cuda.synchronize()
    else:
        dist.barrier()


def _multiply(order: MemberOrder, *, on_gpu: bool) -> float:
    """Multiply matrices for a while, and compare with what is known. Returns GFLOP/s.

    All numbers are small integers, so that every sum is exact in any precision, TF32 and the order of adding included.

    Raises:
        ValueError: a product is wrong.
    """
    device, size = (f"cuda:{order.local_rank}", 4096) if on_gpu else ("cpu", 256)
    rows = torch.arange(size, dtype=torch.float32, device=device) % 8
    left = rows.reshape(size, 1).expand(size, size).contiguous()
    right = ((rows + order.local_rank) % 8).reshape(1, size).expand(size, size).contiguous()
    # Each row of the one has equal numbers, and so has each column of the other.
    wanted = rows.reshape(size, 1) * ((rows + order.local_rank) % 8).reshape(1, size) * size
    count, began_at = 0, time.monotonic()
    while True:
        product = left @ right
        if order.pretend == "computes_wrongly":
            product[3, 5] += 1
        if not torch.equal(product, wanted):
            raise ValueError("a matrix product is wrong")
        count += 1
        elapsed_s = time.monotonic() - began_at
        if elapsed_s >= order.compute_s:
            return count * 2.0 * size**3 / elapsed_s / 1e9


def _connect(order: MemberOrder, patience: timedelta) -> Any:  # noqa: ANN401 - torch's stores have no types
    stores: Any = dist
    store = stores.TCPStore(
        order.store_address, order.store_port, None, is_master=False, timeout=patience, wait_for_workers=False
    )
    return stores.PrefixStore(order.prefix, store)


def _all_reduce(order: MemberOrder, size_bytes: int, *, on_gpu: bool) -> None:
    device = f"cuda:{order.local_rank}" if on_gpu else "cpu"
    ours = order.rank + 1 + (order.pretend == "adds_wrongly")
    tensor = torch.full((max(1, size_bytes // _FLOAT_BYTES),), float(ours), device=device)
    dist.all_reduce(tensor)
    if on_gpu:
        torch.cuda.synchronize()
    wanted = order.world_size * (order.world_size + 1) / 2
    low, high = float(tensor.min()), float(tensor.max())
    if (low, high) != (wanted, wanted):
        raise ValueError(f"a wrong sum: {low:g} to {high:g} instead of {wanted:g}")


def _wait_for_all(order: MemberOrder, store: Any) -> None:  # noqa: ANN401 - as above
    """A member that ends while others still receive what it sent could make these fail."""
    patience_s = min(_GOODBYE_S, order.give_up_at - time.monotonic())
    try:
        if store.add("done", 1) == order.world_size:
            store.set("all_done", "1")
        store.wait(["all_done"], timedelta(seconds=max(0.1, patience_s)))
    except Exception as error:  # its own part is done, and the store is not what is tried
        sys.stderr.write(f"{printable(str(error))}\n")


def _message_of(error: BaseException) -> str:
    """An exception in one line, without the places in torch's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    # NCCL's reason stands on the line after its heading.
    for heading, line in pairwise(lines):
        if heading.startswith("Last error"):
            message = f"{message} {line}"
    return _SOURCE_LOCATION.sub("", message)[:_LONGEST_MESSAGE]
