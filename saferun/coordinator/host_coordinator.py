"""This host's part in a job of several hosts: what its tasks ask for, and what comes of it.

The messages are JSON objects, one a line; ``op`` names them. From a task: ``join``, ``append``, ``state``, ``chunk``,
``ack``, ``probe``, ``start_stage``, ``leave``, ``close``, ``counts``, ``resume``, ``rejoin``, ``goodbye``. To a task:
``waiting``, ``joined``, ``join_failed``, ``job_ended``, ``not_here``, ``resumable``, ``resumed``, ``resume_failed``,
``entry``, ``task_lost``, ``store_lost``, ``late``, ``silent``, ``returned``, ``clock``, ``start_stage``, and to the
leader ``hosts``, ``states``, ``chunk``, ``warn``, ``probed``, ``membership``, ``lost``, and to the head ``malformed``
and ``unsigned``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from saferun.cluster.join_messages import EndNote, JoinRequest, SecretSharing
from saferun.cluster.messages import MOST_TASKS
from saferun.cluster.signed import CannotSealError
from saferun.coordinator.assignments import HostRecord
from saferun.coordinator.attempt import CoordinatorAttempt
from saferun.coordinator.ended_attempts import EndedAttempts
from saferun.coordinator.join_answers import join_answers
from saferun.coordinator.rendezvous_round import (
    CancelledError,
    JobEndedError,
    JoinFailedError,
    RendezvousResult,
    RendezvousRound,
)
from saferun.coordinator.resumption import Resumption, decode_resumption, encode_resumption
from saferun.coordinator.secrecy import NO_SECRET, Secrecy, secrecy_of
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.secret_process import SecretProcess
from saferun.coordinator.served_stores import ServedStores
from saferun.coordinator.store_client import TRAFFIC, StoreClient
from saferun.coordinator.tasks import NOT_HERE, Message, TaskConnection, Tasks
from saferun.text.decoding import number
from saferun.text.typed_json import fit
from saferun.text.wording import first_line

_LEAVE_S = 3.0
_CLOSE_S = 5.0
_REJOIN_S = 30.0


class Rendezvous(Protocol):
    """How hosts meet, over all attempts."""

    def meet(self, rdzv: RendezvousRound) -> RendezvousResult:
        """Meet the others."""

    def move(self, client: StoreClient) -> None:
        """The control store is reached by this connection from now on."""

    def resumption(self, result: RendezvousResult, own: HostRecord) -> Resumption | None:
        """What a replacement of this process goes on from; None: there can be none."""

    def watch_membership(self, on_waiting: Callable[[str], None] | None) -> None:
        """Report, once, the hosts that wait to join; None: stop watching."""

    def leave(self) -> None:
        """This host will not join again."""

    def miss_next(self, rdzv: RendezvousRound) -> None:
        """Tell the others that this host does not come to the next rendezvous either. ``rdzv``: its last one."""

    def close(self, note: EndNote | None) -> None:
        """The job is over, for all hosts. ``note``: who has ended it, for those who wait to join."""


class HostCoordinator:
    """What the coordinator of a host does for its tasks.

    Args:
        tasks: the connections to them.
        stores: what this host may serve.
        endpoint_fd: the listening socket of the rendezvous' own store, where that is on this host; -1: it is not.
        sharing: how a job secret that no file holds gets to the other hosts; None: there is to be none.
    """

    def __init__(
        self,
        tasks: Tasks,
        stores: ServedStores,
        endpoint_fd: int,
        sharing: SecretProcess | None = None,
    ) -> None:
        self._sharing = sharing
        self._tasks = tasks
        self._stores = stores
        self._endpoint_fd = endpoint_fd
        self._lock = threading.RLock()
        self._rdzv: RendezvousRound | None = None
        self._attempt: CoordinatorAttempt | None = None
        self._last: CoordinatorAttempt | None = None
        self._rendezvous: Rendezvous | None = None
        self._closing: threading.Thread | None = None
        self._secrecy: Secrecy | None = None
        self._rejoin_s: float | None = None  # for how long tasks are still waited for that are to rejoin
        self._ended = EndedAttempts()
        self._rejoined: list[tuple[TaskConnection, int]] = []  # before the attempt goes on
        self._sends_away = False

    def handle(self, connection: TaskConnection, message: Message) -> bool:
        """Do what a task asks for. False where the message is none of those that are known here."""
        with suppress(KeyError, TypeError, ValueError, RuntimeError):
            # A malformed message is ignored; where no thread can be started, the job goes on.
            return self._handle(connection, message)
        return True

    def _handle(self, connection: TaskConnection, message: Message) -> bool:
        match message["op"]:
            case "join":
                self._join(connection, message)
            case "resume":
                self._resume(connection, message)
            case "rejoin":
                self._rejoin(connection, number(message["task"], 0, MOST_TASKS))
            case "leave" if connection.is_head:  # the other tasks of this host go on without one
                self._closing = self._in_background(self._leave)
            case "close":
                note = message.get("note")
                end = fit(EndNote, note) if note is not None else None
                if self._rdzv is not None:
                    self._rdzv.end = end
                self._closing = self._in_background(lambda: self._close(end))
            case "counts":
                connection.send({"op": "counts", "operations": TRAFFIC.operations, "size_bytes": TRAFFIC.size_bytes})
            case "append" | "state" | "chunk" | "ack" | "probe" | "start_stage":
                with self._lock:  # a task may answer its new attempt before this thread has left the lock
                    attempt = self._attempt
                # What is meant for an attempt that is over, or that this host does not take part in, is moot.
                if attempt is not None and message.get("attempt") == attempt.number and connection.task is not None:
                    self._in_attempt(attempt, connection.task, message)
            case _:
                return False
        return True

    def _in_attempt(self, attempt: CoordinatorAttempt, task: int, message: Message) -> None:
        match message["op"]:
            case "append":
                attempt.append(message["message"], is_repeated=message.get("repeated") is True)
            case "state":
                attempt.set_state(task, message["state"])
            case "chunk":
                attempt.add_chunk(task, message["name"], message["text"])
            case "ack":
                attempt.ack(task)
            case "probe" if attempt.is_leader:
                hosts = [int(host) for host in message["hosts"]]
                attempt.probe(hosts, awaits_heartbeat=message.get("patient") is True)
            case "start_stage":
                self._in_background(lambda: self._send_start_stage(attempt, task))

    def _send_start_stage(self, attempt: CoordinatorAttempt, task: int) -> None:
        """How far the ranks have come, as their store shows it; an empty stage where that is on another host."""
        from saferun.coordinator.init_progress import Stage, start_stage

        world_size = attempt.assignment.world_size
        ranks, connection = self._stores.ranks, self._tasks.of_task(task)
        found = Stage("", -1, world_size)
        if ranks is not None and attempt is self._attempt:
            found = start_stage(ranks.store, ranks.address, world_size)
        if connection is not None:
            connection.send({"op": "start_stage", "attempt": attempt.number, **found._asdict()})

    # ---------------------------------------------------------------------------------------------------------- joining

    def _join(self, connection: TaskConnection, message: Message) -> None:
        secret = message.pop("secret", None)
        request: JoinRequest = fit(JoinRequest, message)
        task = request.task
        if self._sends_away:
            connection.send(NOT_HERE)
            return
        with self._lock:
            if secret is not None and self._secrecy is None and connection.is_head:
                try:
                    self._secrecy = secrecy_of(str(secret))
                except CannotSealError as error:
                    what = f"evidence cannot be encrypted on this host, which the job secret requires: {error}"
                    hint = "install the Python package cryptography, or pass no --secret-file on any host"
                    connection.send({"op": "join_failed", "what": what, "hint": hint, "usage": True})
                    return
            if connection.task is None:
                connection.task = task
            rdzv = self._rdzv
            if rdzv is None or rdzv.is_over or not rdzv.add(task, request):
                others = {} if rdzv is None or rdzv.is_over else rdzv.joins
                if rdzv is not None:
                    rdzv.is_over = True
                rdzv = self._rdzv = RendezvousRound(request)
                rdzv.on_all_here = self._close_attempt
                if self._secrecy is None and self._sharing is not None:
                    self._secrecy = Secrecy()  # counts what is not signed with a secret that is shared
                rdzv.secrecy = self._secrecy or NO_SECRET
                rdzv.make_agreement = self._agreement_maker(rdzv, request.sharing)
                for other, join in {**others, task: request}.items():
                    rdzv.add(other, join)
                try:
                    threading.Thread(target=self._meet, args=(rdzv,), daemon=True).start()
                except RuntimeError as error:
                    what = f"the coordinator of this host cannot work: {error}"
                    self._fail(rdzv, JoinFailedError(what, "look at the limits of processes and threads: ulimit -u"))

    def _resume(self, connection: TaskConnection, message: Message) -> None:
        """Take the place of a process that has been killed, while an attempt is under way."""
        request: JoinRequest = fit(JoinRequest, message["request"])
        found = decode_resumption(str(message["text"]))
        if found is None or not connection.is_head or self._rdzv is not None:
            raise ValueError("there is nothing to resume")
        secret = message.get("secret")
        rdzv = RendezvousRound(request)
        rdzv.is_over = True
        rdzv.on_all_here = self._close_attempt

        def resume() -> None:
            try:
                self._take_over(rdzv, found, None if secret is None else str(secret))
            except Exception as error:
                text = f"{type(error).__name__}: {first_line(error)}"
                connection.send({"op": "resume_failed", "attempt": found.assignment.attempt, "text": text})

        self._in_background(resume)

    def _take_over(self, rdzv: RendezvousRound, found: Resumption, secret: str | None) -> None:
        with self._lock:
            if secret is not None:
                self._secrecy = secrecy_of(secret)
            elif self._sharing is not None:
                self._secrecy = Secrecy()
            rdzv.secrecy = self._secrecy or NO_SECRET
        rdzv.make_agreement = self._agreement_maker(rdzv, rdzv.request.sharing)
        from saferun.coordinator.static_rendezvous import StaticRendezvous

        rendezvous = StaticRendezvous(self._stores)
        result = rendezvous.resume(rdzv, found)
        attempt = CoordinatorAttempt(result, rdzv, found.record, self._tasks, rendezvous.move, is_resumed=True)
        with self._lock:
            self._rendezvous, self._attempt = rendezvous, attempt
            self._rdzv = self._rdzv or rdzv  # by which this host says later that it does not come again
            self._rejoin_s = _REJOIN_S
            for connection, task in [(self._tasks.head, 0), *self._rejoined]:
                attempt.welcome(connection, task)
        attempt.open()

    def _rejoin(self, connection: TaskConnection, task: int) -> None:
        """A task of this host has lost the previous coordinator."""
        with self._lock:
            if self._rejoin_s is not None and self._attempt is not None:
                self._attempt.welcome(connection, task)
            else:
                self._rejoined.append((connection, task))

    def _note_missing(self, attempt: CoordinatorAttempt, elapsed_s: float) -> None:
        """Tasks that do not rejoin have ended, which no other process notices."""
        if self._rejoin_s is not None and self._rejoin_s > 0:
            self._rejoin_s -= elapsed_s
            if self._rejoin_s <= 0:
                self._lose_missing(attempt)

    def _lose_missing(self, attempt: CoordinatorAttempt) -> None:
        for task in attempt.missing():
            if not attempt.lose_task(task):
                self._tasks.send_all({"op": "task_lost", "task": task})

    def _agreement_maker(
        self, rdzv: RendezvousRound, settings: SecretSharing | None
    ) -> Callable[[str], SecretAgreement | None]:
        """What creates the signer of a job for which no secret was named."""
        sharing = self._sharing
        if sharing is None or settings is None:
            return lambda _: None

        def send_made(made: list[object]) -> None:
            self._tasks.head.send({"op": "made", "path": made[0], "device": made[1], "inode": made[2]})

        return lambda job: SecretAgreement(
            sharing,
            rdzv.run_id,
            job,
            name=rdzv.name,
            base=settings.base,
            is_required=settings.required,
            secrecy=rdzv.secrecy,
            on_made=send_made,
        )

    def _meet(self, rdzv: RendezvousRound) -> None:
        try:
            rendezvous = self._rendezvous_of(rdzv)
            rendezvous.watch_membership(None)
            result = rendezvous.meet(rdzv)
            self._begin(rdzv, result, rendezvous)
        except JoinFailedError as error:
            if error.end is not None:
                self._answer_end(rdzv, error.end)
            else:
                self._fail(rdzv, error)
        except JobEndedError as error:
            self._answer_end(rdzv, error.note)
        except CancelledError:
            pass
        except Exception as error:
            what = f"the hosts cannot meet: {type(error).__name__}: {first_line(error)}"
            hint = "check that torch works on this host, and look at the output of the other hosts"
            self._fail(rdzv, JoinFailedError(what, hint))

    def _rendezvous_of(self, rdzv: RendezvousRound) -> Rendezvous:
        # One for the whole job: it remembers the store, and which rendezvous was the last.
        if self._rendezvous is None:
            if rdzv.request.backend == "static":
                from saferun.coordinator.static_rendezvous import StaticRendezvous

                self._rendezvous = StaticRendezvous(self._stores)
            else:
                from saferun.coordinator.handler_rendezvous import HandlerRendezvous

                self._rendezvous = HandlerRendezvous(self._stores, self._endpoint_fd)
        return self._rendezvous

    def _begin(self, rdzv: RendezvousRound, result: RendezvousResult, rendezvous: Rendezvous) -> None:
        own = rdzv.wait_for_tasks()
        attempt = CoordinatorAttempt(result, rdzv, own, self._tasks, rendezvous.move)
        self._close_attempt()
        with self._lock:
            if rdzv.is_over:
                return
            rdzv.is_over = True
            before, oldest = self._attempt, self._last
            self._ended.add(before)
            self._attempt, self._last = attempt, before
            for task, share in enumerate(result.assignment.tasks[: rdzv.task_count]):
                connection = self._tasks.of_task(task)
                if connection is not None:
                    for answer in join_answers(result, task, share):
                        connection.send(answer)
            attempt.announce()
            self._send_resumption(attempt, rendezvous.resumption(result, own))
            self._lose_missing(attempt)  # they joined, and ended while the hosts met
        attempt.open()
        if attempt.is_leader:
            if rdzv.request.elastic:
                rendezvous.watch_membership(lambda text: self._on_membership(attempt, text))
            if oldest is not None and oldest.is_leader:
                self._in_background(oldest.forget)

    def _send_resumption(self, attempt: CoordinatorAttempt, resumption: Resumption | None) -> None:
        """Let the tasks know that the attempt can go on without this process; the head keeps what that takes."""
        if resumption is not None:
            text = encode_resumption(resumption)
            for one in self._tasks.connected():
                one.send({"op": "resumable", "attempt": attempt.number, "text": text if one.is_head else ""})

    def _on_membership(self, attempt: CoordinatorAttempt, text: str) -> None:
        if attempt is self._attempt:
            self._tasks.head.send({"op": "membership", "attempt": attempt.number, "text": text})

    def _close_attempt(self) -> None:
        attempt = self._attempt
        if attempt is not None:
            attempt.close()

    def _fail(self, rdzv: RendezvousRound, error: JoinFailedError) -> None:
        message: Message = {"op": "join_failed", "what": error.what, "hint": error.hint}
        if error.kind:
            message["usage" if error.is_usage else error.kind] = True
        if error.is_published:
            message["published"] = True
        self._answer(rdzv, message)

    def _answer_end(self, rdzv: RendezvousRound, note: EndNote) -> None:
        self._answer(rdzv, {"op": "job_ended", **note._asdict()})

    def _answer(self, rdzv: RendezvousRound, message: Message) -> None:
        """What tasks that wait for a rendezvous hear instead of its result."""
        with self._lock:
            if rdzv.is_over:
                return
            rdzv.is_over = True
        self._send_to_joining(rdzv, message)

    def _send_to_joining(self, rdzv: RendezvousRound, message: Message) -> None:
        for task in rdzv.joins:
            connection = self._tasks.of_task(task)
            if connection is not None:
                connection.send(message)

    # --------------------------------------------------------------------------------------------------- time, and ends

    def tick(self, elapsed_s: float) -> None:
        """Time has passed."""
        rdzv, attempt = self._rdzv, self._attempt
        if rdzv is not None:
            message = rdzv.due_message()
            if message is not None:
                self._send_to_joining(rdzv, message)
            overdue = rdzv.overdue()
            if overdue is not None:
                self._fail(rdzv, overdue)
        if attempt is not None:
            attempt.tick(elapsed_s)
            self._note_missing(attempt, elapsed_s)
        self._ended.tick(elapsed_s)
        if self._secrecy is not None:
            count, key = self._secrecy.take_ignored()
            if count:
                self._tasks.head.send({"op": "unsigned", "count": count, "key": key})

    def lose_task(self, connection: TaskConnection) -> None:
        """The connection to a task has ended."""
        task = connection.task
        if task is None:
            return
        with self._lock:  # of two attempts it is missed in one
            attempt, is_leaving, rdzv = self._attempt, connection.is_leaving, self._rdzv
            # The attempt of which it is lost is the one that the hosts meet for, which misses it when it begins.
            joins_next = rdzv is not None and not rdzv.is_over and task in rdzv.joins
            is_needless = is_leaving or joins_next
            if attempt is not None:
                is_needless = attempt.lose_task(task, is_leaving=is_leaving, joins_next=joins_next)
        if not is_needless:
            self._tasks.send_all({"op": "task_lost", "task": task})

    def farewell(self, done: Callable[[], None]) -> None:
        """The head goes: end in good order, in the background, and then call ``done``. Bounded."""
        rdzv = self._rdzv
        joins = rdzv.joins if rdzv is not None and not rdzv.is_over else {}
        # Who has yet to join belongs to the next launch: in this one all tasks had joined when an attempt began.
        self._sends_away = self._attempt is not None and 0 not in joins  # else it leaves while they meet
        if self._sends_away:
            self._tasks.send_away(joins)

        def end() -> None:
            attempt = self._attempt
            if attempt is not None:
                attempt.wait_acked()
            if self._closing is not None:
                self._closing.join(_CLOSE_S)
            self._leave()
            done()

        try:
            self._in_background(end)
        except RuntimeError:
            end()

    def _leave(self) -> None:
        with self._lock:
            rdzv, self._rdzv = self._rdzv, None
            under_way = rdzv is not None and not rdzv.is_over
            if rdzv is not None:
                rdzv.is_over = True
        rendezvous, attempt = self._rendezvous, self._attempt
        if rdzv is not None and under_way and rdzv.on_leave is not None:
            _bounded(rdzv.on_leave, _LEAVE_S)
        elif rdzv is not None and rendezvous is not None and attempt is not None and attempt.is_followed:
            _bounded(lambda: rendezvous.miss_next(rdzv), _LEAVE_S)
        if rendezvous is not None:
            _bounded(rendezvous.leave, _LEAVE_S)

    def _close(self, note: EndNote | None) -> None:
        rendezvous = self._rendezvous
        if rendezvous is not None:
            _bounded(lambda: rendezvous.close(note), _CLOSE_S)

    def _in_background(self, do: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=do, daemon=True)
        thread.start()
        return thread


def _bounded(do: Callable[[], None], timeout_s: float) -> None:
    """Do something that may fail, or block forever."""

    def attempt() -> None:
        with suppress(Exception):
            do()

    with suppress(RuntimeError):
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(timeout_s)


def exit_now(sharing: SecretProcess | None = None) -> None:
    """End the process. Without the interpreter's shutdown: torch's threads still run."""
    if sharing is not None:
        sharing.close()
    os._exit(0)
