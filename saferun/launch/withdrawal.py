"""A host that cannot start withdraws from the job: the others would wait for it until ``--start-timeout``.

Its coordinator publishes the reason in the store at which the hosts meet, and every host that is there, or comes within
seconds, ends with it. Nothing is published where the job has begun, or where this host's place in it is taken.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping

from saferun.cluster.coordinator_process import CoordinatorLink
from saferun.cluster.join_messages import TaskInfo, Withdrawal
from saferun.cluster.rendezvous_messages import join_request
from saferun.config import JobMembership
from saferun.errors import EXIT_USAGE, SaferunError, suppress
from saferun.linux.bare_socket import short_host_name
from saferun.linux.listen_port import hold_first, hold_port
from saferun.linux.netlink import own_addresses
from saferun.supervisor.actions import JoinHosts

__all__ = ["with_host", "withdraw"]

# How long the others are looked for, once the coordinator runs; and with its start, and while the leader imports torch.
_MEETING_S = 5.0
_ALL_S = 20.0
_ENDED = ("join_failed", "joined", "job_ended")


def with_host(error: SaferunError) -> SaferunError:
    """The error with this host's name, since consoles of several hosts are often one."""
    return SaferunError(f"{error.what} (on {short_host_name()})", error.hint, error.exit_code)


def withdraw(membership: JobMembership, error: SaferunError, environ: Mapping[str, str]) -> None:
    """Tell the other hosts of the job why this one cannot start. Never raises, and takes some seconds at most."""
    if membership.rendezvous.backend != "static" or membership.hosts.node_rank is None:
        return  # a rendezvous of torch's goes on without this host, where the job may have fewer
    try:
        with suppress(Exception):
            _meet_and_withdraw(membership, error, environ)
    except KeyboardInterrupt:
        pass  # the user does not want to wait for it


def _meet_and_withdraw(membership: JobMembership, error: SaferunError, environ: Mapping[str, str]) -> None:
    task, rendezvous = membership.hosts.task, membership.rendezvous
    leads = membership.hosts.node_rank == 0 and (task is None or task.local_rank == 0)
    # They are closed at the end of the process, which is near.
    store = hold_first(rendezvous.ports or (rendezvous.master_port or 0,), rendezvous.port_source) if leads else None
    control = hold_port(int(rendezvous.control) if leads and rendezvous.control.isdigit() else None)
    port = store.getsockname()[1] if store is not None else 0
    record = TaskInfo(0, "", os.getpid(), addresses=tuple(own_addresses()), port=control.getsockname()[1])
    withdrawal = Withdrawal(error.what, error.hint, is_usage=error.exit_code == EXIT_USAGE, leads=leads)
    request = join_request(membership.hosts, rendezvous, JoinHosts(0), task=0, port=port, record=record)._replace(
        tasks=1, timeout_s=_MEETING_S, connect_s=0.0, withdrawal=withdrawal
    )
    message = {"op": "join", **request._asdict()}
    if membership.secret_file:
        from saferun.cluster.secret import read_secret

        message["secret"] = read_secret(membership.secret_file, "--secret-file").raw.hex()
    link = CoordinatorLink(
        store.fileno() if store is not None else -1,
        {**environ, "SAFERUN_SIGN_MESSAGES": "off", "OMP_NUM_THREADS": "1"},
        torch_parts="store",
        more_fds={"control": control.fileno()},
    )
    try:
        link.send(message)
        _await_end(link)
    finally:
        os.kill(link.child.pid, signal.SIGKILL)


def _await_end(link: CoordinatorLink) -> None:
    """Until the coordinator has published it, or gives up."""
    give_up_at = time.monotonic() + _ALL_S
    poll = select.poll()  # `select` takes no descriptor beyond 1023
    poll.register(link.fd, select.POLLIN)
    poll.register(link.stderr_fd, select.POLLIN)
    while (remaining_s := give_up_at - time.monotonic()) > 0:
        ready = dict(poll.poll(remaining_s * 1000))
        if link.stderr_fd in ready and link.read_stderr() is None:
            return
        if link.fd in ready:
            messages = link.receive()
            if messages is None or any(message.get("op") in _ENDED for message in messages):
                return
