"""What the check process does: this host's own checks, then whatever other hosts are to be tried for.

It says, in JSON lines: ``result`` for each check, ``ready`` with the host's info and endpoint when all are done, and
``probes`` as an answer to ``probe``. It ends when the supervisor closes its end.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from saferun.preflight.checks.all_checks import checks_for
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.run import run_checks
from saferun.preflight.results import CheckResult, HostInfo, ProbeTarget

if TYPE_CHECKING:
    from saferun.model import JsonObject
    from saferun.preflight.probe.listener import Listener

_LONGEST_LINE_BYTES = 64 << 20
_INFO_S = 3.0


def serve(connection: socket.socket, context: CheckContext, *, is_probed: bool) -> None:
    """Check this host, send what was found, and probe other hosts on request, until the other end is closed.

    Args:
        connection: to the supervisor.
        context: the launch.
        is_probed: whether there are other hosts, which are to probe this one.
    """
    lock = threading.Lock()

    def send(message: JsonObject) -> None:
        data = json.dumps(message).encode() + b"\n"
        with lock:
            connection.sendall(data)

    found: list[CheckResult] = []

    def report(result: CheckResult) -> None:
        found.append(result)
        send({"op": "result", "result": list(result)})

    host = _HostSide(context)
    if is_probed:
        host.begin()
    checks = checks_for(context)
    run_checks([check for check in checks if not check.is_last], context, report)
    if last := [check for check in checks if check.is_last]:
        run_checks(last, context, report)
    info, endpoint = host.finish(found) if is_probed else ("", "")
    send({"op": "ready", "info": info, "endpoint": endpoint})
    with connection.makefile("rb") as lines:
        while line := lines.readline(_LONGEST_LINE_BYTES):
            order = json.loads(line)
            if order.get("op") == "probe":
                send({"op": "probes", "round": order["round"], "text": host.probe(order)})
    host.close()


def answer(connection: socket.socket) -> None:
    """Wait for the request, and ``serve``."""
    with connection.makefile("rb", buffering=0) as lines:
        line = lines.readline(_LONGEST_LINE_BYTES)
    if line:
        order = json.loads(line)
        given: dict[str, Any] = order["context"]
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        serve(connection, _completed(CheckContext(**fields)), is_probed=order["is_probed"])


def _completed(context: CheckContext) -> CheckContext:
    """The launch with what the supervisor, which opens no file while ranks run, has left to this process."""
    if not os.path.isfile(context.script):
        context = context._replace(script="")
    if context.vendor == "auto":
        from saferun.linux.gpus import gpu_vendor

        context = context._replace(vendor=gpu_vendor() or "none")
    if not context.earlier and not context.is_of_host and context.root == "/":
        from saferun.preflight.health_record import read_health_record

        context = context._replace(earlier=read_health_record()[0])
    return context


class _HostSide:
    """What other hosts hear of this one, and what this one hears of them."""

    def __init__(self, context: CheckContext) -> None:
        self._context = context
        self._card = HostInfo()
        self._listener: Listener | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)

    def begin(self) -> None:
        """Find out, beside the checks, what the info says."""
        with suppress(RuntimeError):  # no other thread can be started: it takes no part in the probes
            self._thread.start()

    def _write(self) -> None:
        from saferun.preflight.checks.host_info import gather_host_info, probe_routes
        from saferun.preflight.probe.listener import Listener

        info = gather_host_info(self._context)
        with suppress(OSError, RuntimeError):  # no address, or no other thread
            self._listener = Listener(probe_routes(self._context, info))
        self._card = info

    def finish(self, found: list[CheckResult]) -> tuple[str, str]:
        """The info and the endpoint, encoded. Good results do not travel."""
        from saferun.preflight.host_messages import encode_endpoint, encode_host_info

        if self._thread.ident is not None:
            self._thread.join(_INFO_S)
        bad = tuple(result for result in found if result.verdict in {"warn", "fail"})
        info = self._card._replace(time=time.time(), results=bad)
        return encode_host_info(info), encode_endpoint(self._listener.endpoint) if self._listener is not None else ""

    def probe(self, order: JsonObject) -> str:
        """Try the hosts that are named, and say what came of it, encoded."""
        from saferun.preflight.host_messages import decode_endpoint, encode_probes
        from saferun.preflight.probe.prober import probe_all

        targets = []
        for number, label, text in order["endpoints"]:
            endpoint = decode_endpoint(text)
            if endpoint is not None:
                targets.append(ProbeTarget(number, label, endpoint))
        deadline = time.monotonic() + float(order["within_s"])
        return encode_probes(probe_all(order["host"], targets, self._card.nics, deadline), order["limit_bytes"])

    def close(self) -> None:
        """Answer no more."""
        if self._listener is not None:
            self._listener.close()
