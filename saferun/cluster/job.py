"""This host's part in a job of several hosts, or of several saferuns on one host: what is told, heard and collected."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saferun.cluster.control import Control
from saferun.cluster.coordinator_client import JobLine
from saferun.cluster.messages import LONGEST_WORDS as _LONGEST_WORDS
from saferun.cluster.messages import (
    MOST_HOSTS,
    MOST_TASKS,
    Ignored,
    decision_from,
    is_leaders,
    piece_from,
    task_of,
    trouble_from,
)
from saferun.config import LaunchConfig
from saferun.errors import SaferunError, printable
from saferun.files.run_dir import RunDirectory
from saferun.linux.net import own_addresses, short_host_name
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject, Placement, RankAssignment, Value
from saferun.supervisor.events import (
    BroadcastDecision,
    Event,
    HostsDone,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    JobLost,
    JoinHosts,
    StartFailed,
)
from saferun.text.decoding import number, text, words

if TYPE_CHECKING:
    from saferun.cluster.progress import WatchedRank
    from saferun.cluster.secret import JobSecret
    from saferun.evidence import HangVerdict

_LONGEST_LEFTOVERS = 300
_LONGEST_NAME = 255
_LONGEST_PATH = 4096
_MOST_LINES = 20
# Of a piece of evidence: what is told along with it.
_WRAPPING_BYTES = 256
_MOST_LABELS = 8
# Of a task, which is asked for one at a time: older ones are dropped. A peer can fill no more of the leader's memory.
_MOST_PIECES = 4
_MOST_HANGS = 1 << 31
# How to do without what a scheduler told.
_OFF = "--scheduler none: as under torchrun"
_MOST_RANKS = 100_000
# A host that has handed in nothing by then is knocked at; again at longer intervals.
_KNOCK_AFTER_S = 1.5
_KNOCK_AGAIN_S = 5.0
# Hosts' clocks are compared by when a message was sent and came, which may take a second.
_SKEW_S = 1.5
# After the loss of a store, how long hosts that think the start not to be over wait for those that may think otherwise.
_AGAIN_S = 60.0
_GONE = ("gone", "unreachable")
# What a task's state says of its ranks where some run, and what it says of other things.
_RUNS = ("run", "quiet")
_ENDED = ("done", "leftovers")
_REGROUPS = ("membership", "leave")
_APART = ("way", "progress")
# So many hosts are asked how their ranks do, where another one is silent.
_MOST_ASKED = 8
# Of other hosts' addresses: to so many the interfaces are looked up that lead there.
_MOST_WAYS = 8
_LOOK_THERE = "look at that host: what saferun said there last, and dmesg"
# Of --host-timeout, how long a host is silent before it is knocked at; that takes the rest, at most six seconds.
_SILENT_SHARE = 0.8


class Peer(Value):
    """A host of the job, as the host that decides knows it."""

    host: int
    label: str
    addresses: tuple[str, ...]
    base_rank: int
    ranks: int


class Piece(Value):
    """A piece of evidence that a task handed in. ``offset_s``: to be added to its times."""

    host: int
    task: int
    label: str
    offset_s: float
    moved: bool
    stopped: bool
    evidence: str


class Lost(Value):
    """A host that is not heard of any more. ``why``: ``gone``, ``unreachable``, ``cut``, ``frozen``, ``unknown``."""

    host: int
    label: str
    why: str
    words: str
    ranks: tuple[int, ...]


class Place(Value):
    """This process's place, as the hosts agreed on it.

    ``checked``: whether the hosts look at each other first. ``doors``: whom this one is to probe: number, label, door.
    ``cards``: what all hosts found out about themselves, with their doors, for the one that leads.
    """

    placement: Placement
    number: int
    leads: bool
    may_leave: bool
    files: str
    checked: bool = False
    doors: tuple[tuple[int, str, str], ...] = ()
    cards: tuple[tuple[str, str], ...] = ()


class Trouble(Value):
    """What one host told all others, in the terms of evidence.AbortReason."""

    reason: str
    label: str
    words: str
    rank: int | None
    why: str


class _Collection:
    """Pieces of one kind that are waited for."""

    def __init__(
        self, name: str, expected: set[tuple[int, int]], deadline: float, on_done: Callable[[list[Piece]], None]
    ) -> None:
        self.name = name
        self.expected = expected
        self.deadline = deadline
        self.knock_at = time.monotonic() + _KNOCK_AFTER_S
        self.on_done = on_done


class Job:
    """The other hosts, seen from here.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        run_dir: says where this launch's files are going to be.
        post: takes events.
        attempt: tells the attempt that is current.
        on_place: told this process's place when the hosts have met.
        on_prepared: told what only torch can answer.
        on_hang: told of a hang of the whole job, which every host is to capture: its verdict and its number.
        on_states: told how the ranks of all tasks do, on the host that decides.
        on_preflight: told what the host that leads says of the checks.
        say: takes a line for the user.
        on_words: gets whole lines that torch's event handlers write to stderr.
        ranks: tells the ranks of this process that run.
        secret: signs what the hosts tell each other; None: nothing does.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        run_dir: RunDirectory,
        post: Callable[[Event], None],
        attempt: Callable[[], int],
        on_place: Callable[[Place], None],
        on_prepared: Callable[[JsonObject], None],
        on_hang: Callable[[HangVerdict, int], None],
        on_states: Callable[[Mapping[str, JsonObject]], None],
        on_preflight: Callable[[JsonObject], None],
        say: Callable[[str], None],
        on_words: Callable[[bytes], None],
        ranks: Callable[[], Sequence[WatchedRank]] = lambda: (),
        secret: JobSecret | None = None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._post = post
        self._attempt = attempt
        self._on_place = on_place
        self._on_prepared = on_prepared
        self._on_hang = on_hang
        self._on_states = on_states
        self._on_preflight = on_preflight
        self._say = say
        self._secret = secret
        task = config.hosts.task
        self._task = task.local_rank if task is not None else 0
        self.line = JobLine(
            config, environ, poller, on_message=self._on_message, on_lost=self._on_line_lost, on_words=on_words
        )
        self.control = Control(
            poller,
            host_timeout_s=config.hosts.host_timeout_s * _SILENT_SHARE,
            hang_timeout_s=config.watch.hang_timeout_s,
            ranks=ranks,
            say=say,
            on_lost=self._on_silent,
            on_notice=self._tell_way,
            on_unheard=self._on_unheard,
            ask_others=self._ask_others,
            on_progress=self._tell_progress,
            has_ended=lambda: self._own_state.get("s") in _ENDED,
            is_done=self._is_done,
        )
        self._progress: tuple[int, int] | None = None  # what the host that leads has asked for
        self._way = ""  # what became of this host's way to the one that leads
        self._is_waiting_for_unheard = False
        self.hands_on_events = config.event_log_handler != "null"
        self._needs_preparing = (
            config.numa_binding is not None
            or config.logs.logs_specs is not None
            or self.hands_on_events
            or environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        )
        self._serves_timers = environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        self._preparing = False
        self._joining = False
        self._number = -1  # of the attempt that this host takes part in
        self._after_loss = False  # the store of the host that leads was lost
        self.host = 0
        self.leads = False
        self.leaves = False  # this host goes, and the job goes on without it
        self.leader = ""
        self.peers: dict[int, Peer] = {}
        self.part_limit_bytes = 1 << 16
        self._places: dict[int, int] = {}  # rank -> local rank
        self.ignored = Ignored(self._warn)
        self.unsigned = Ignored(self._warn)
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.lost: dict[int, Lost] = {}
        self._left: set[int] = set()  # hosts that are gone, and whose ranks had ended well
        self._pieces: dict[tuple[str, int, int], Piece] = {}
        self._collection: _Collection | None = None
        self._states: dict[str, JsonObject] = {}
        self._own_state: JsonObject = {"s": "run"}
        self._way = ""
        self._ways: dict[str, str] = {}  # what became of other hosts' ways to this one
        self._progress = None
        self._told_progress: dict[str, tuple[int, int]] = {}
        self._told_leftovers: dict[str, str] = {}
        self._lines_for: dict[str, int] = {}  # how many lines have been said for others
        self._is_waiting_for_unheard = False
        self.control.forget()
        self._is_told = False
        self.start_stage: JsonObject | None = None  # how far the ranks have come, as their store showed it
        self._lost_tasks: set[tuple[int, int]] = set()
        self.trouble: Trouble | None = None  # what made all hosts stop
        self.blamed: tuple[int, ...] = ()  # ranks of the job that the hang is blamed on that was captured last

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        collection = self._collection
        moments = [self.line.deadline, self.control.deadline]
        if collection is not None:
            moments += [collection.deadline, collection.knock_at]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.line.deadline is not None and self.line.deadline <= now:
            self.line.tick(now)
        if self.control.deadline is not None and self.control.deadline <= now:
            self._guarded(self.control.tick, now)
            if self.leads:
                self._look_at_missing()
        collection = self._collection
        if collection is None:
            return
        if collection.deadline <= now:
            self._end_collection()
        elif collection.knock_at <= now:
            collection.knock_at = now + _KNOCK_AGAIN_S
            silent = sorted({host for host, _ in self._missing(collection)})
            # Before the ranks are started nothing is known to be amiss.
            patient = collection.name.startswith("probes-")
            self.line.send({"op": "probe", "hosts": silent, "attempt": self._attempt(), "patient": patient})

    @property
    def pids(self) -> set[int]:
        """This host's coordinator, where this process has started it, and what the line has beside it."""
        return self.line.helpers | ({self.line.pid} if self.line.pid is not None else set())

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the coordinator, or belongs to the line to it."""
        if pid != self.line.pid:
            return self.line.on_helper_exit(pid, status)
        self.line.on_exit(status.description)
        return True

    def close(self) -> None:
        """The launch is over on this host. ``leaves``: the job goes on without it."""
        if not self._joining:
            if self.leads:
                self.acknowledge()  # its own decision, which it does not wait to hear
            hosts = self._config.hosts
            # An elastic job is not over where one host could not join it.
            outside = self._number < 0 and hosts.least != hosts.most
            self.line.send({"op": "leave" if self.leaves or outside else "close"})
        self.line.close()

    # ----------------------------------------------------------------------------------------------------------------
    # Meeting

    def bind(self) -> None:
        """Bind every port, before anything else starts.

        Raises:
            SaferunError: one cannot be had.
        """
        self.line.bind()

    def join(self, action: JoinHosts, card: str = "", door: str = "") -> None:
        """Meet the others; ``on_place`` or StartFailed follows.

        Args:
            action: says which attempt it is.
            card: what this host found out about itself.
            door: how others can probe it.
        """
        self._begin_attempt()
        self._joining = True
        self._number = -1
        hosts, rendezvous = self._config.hosts, self._config.rendezvous
        static = rendezvous.backend == "static"
        master = rendezvous.master_addr or (hosts.names[0] if hosts.names else "127.0.0.1")
        ports = (
            [self.line.port] if static and self.line.port else list(rendezvous.ports or (rendezvous.master_port or 0,))
        )
        self.line.send(
            {
                "op": "join",
                "attempt": action.attempt,
                "restarts": action.restarts,
                "task": self._task,
                "tasks": hosts.task.local_world_size if hosts.task is not None else 1,
                "backend": rendezvous.backend,
                "node_rank": hosts.node_rank,
                "least": hosts.least,
                "most": hosts.most,
                "elastic": hosts.least != hosts.most,
                "master": [master, ports],
                "endpoint": rendezvous.endpoint,
                "conf": dict(rendezvous.conf),
                "run_id": rendezvous.run_id,
                "local_addr": rendezvous.local_addr,
                "timeout_s": self._join_timeout_s(),
                "connect_s": hosts.connect_timeout_s,
                "one_port": rendezvous.control == "same",
                "host_timeout_s": hosts.host_timeout_s * _SILENT_SHARE,
                "expected": list(hosts.names),
                "name": short_host_name(),
                "record": {
                    **self._record(),
                    "card": card,
                    "door": door,
                    "full": self._config.checks.full,
                },
                "sharing": {
                    "base": self._run_dir.shared_base if self._config.shares_secret else "",
                    "required": self._config.sign_messages == "required",
                },
                # To this host's coordinator alone, over a pair of sockets.
                **({"secret": self._secret.raw.hex()} if self._secret is not None and self.line.is_head else {}),
            }
        )
        self.line.open()

    def _tell_signed(self, message: JsonObject) -> None:
        """Note by which secret the hosts sign their messages, or why by none."""
        by, why = (words(message.get(name) or "", _LONGEST_WORDS) for name in ("signed", "unsigned_why"))
        at = {"time": time.time(), "at": time.monotonic(), "attempt": self._number}
        self._run_dir.write_event({"event": "MessagesSigned", **at, "by": by, "why_not": why})
        if self.leads and not by and message.get("offered") == "munge":
            # Hosts of one cluster have munge, all or none of them. Another file system on each is nothing unusual.
            self._warn(f"messages between the hosts are not signed: {why}")

    def _join_timeout_s(self) -> float:
        """How long the others are waited for: less where each host decided for itself that they meet again."""
        after_loss, self._after_loss = self._after_loss, False
        timeout_s = self._config.hosts.start_timeout_s
        return min(timeout_s, _AGAIN_S) if after_loss else timeout_s

    def _record(self) -> JsonObject:
        """What the others are to know of this process."""
        return {
            "nproc": self._config.nproc_per_node,
            "role": self._config.role,
            "pid": os.getpid(),
            "addresses": own_addresses(),
            "port": self.line.control_port,
            "store_port": self.line.port,
            "files": self._run_dir.name,
            "max_restarts": self._config.max_restarts,
        }

    def _on_joined(self, message: JsonObject) -> None:
        self._joining = False
        self._number = number(message["attempt"])
        task = self._config.hosts.task
        nproc = self._config.nproc_per_node
        self.host = number(message["host"])
        self.leads = bool(message["leader"])
        self.leader = words(message["leader_name"], _LONGEST_WORDS)
        self.part_limit_bytes = max(number(message.get("part_limit_bytes", 1 << 16)), 1 << 10) - _WRAPPING_BYTES
        self.peers = {peer.host: peer for peer in map(_peer, message.get("peers") or ()) if peer is not None}
        local_base = number(message.get("local_base", 0)) if task is not None else 0
        base, role_base = number(message["base_rank"]), number(message["role_base"])
        rendezvous = self._config.rendezvous
        hosts = number(message["hosts"])
        placement = Placement(
            group_rank=self.host,
            group_world_size=hosts,
            world_size=number(message["world_size"]),
            role_world_size=number(message["role_world_size"]),
            ranks=tuple(RankAssignment(local_base + i, base + i, role_base + i) for i in range(nproc)),
            master_addr=text(message["master_addr"], _LONGEST_NAME),
            master_port=number(message["master_port"]),
            run_id=rendezvous.run_id,
            local_world_size=number(message.get("local_world_size", nproc)),
            host=words(message["label"], _LONGEST_WORDS),
            leader=self.leader,
            restarts=number(message["restarts"]),
        )
        self._tell_signed(message)
        self._places = {place.rank: place.local_rank for place in placement.ranks}
        place = Place(
            placement,
            self._number,
            self.leads,
            may_leave=hosts > self._config.hosts.least,
            files=text(message.get("files") or "", _LONGEST_PATH),
            checked=bool(message.get("checked")),
            doors=tuple(
                (number(host), words(label, _LONGEST_WORDS), str(door))
                for host, label, door in message.get("doors") or ()
            ),
            cards=tuple((str(card), str(door)) for card, door in message.get("cards") or ()),
        )
        if self.leads and self._config.hosts.detected and place.number == 0:
            met = f"{self._meeting_words(placement)}, from {self._config.hosts.detected}"
            self._say(f"saferun: {printable(met)} ({_OFF})")
        if self.host == 0:
            addresses = [address for peer in list(self.peers.values())[1:] for address in peer.addresses]
        else:
            addresses = [str(address) for address in message.get("leader_addresses") or ()]
        self.control.begin(
            placement.host,
            self.leader,
            addresses[:_MOST_WAYS],
            leads=self.host == 0,
            speaks=self.line.is_head,
        )
        self._on_place(place)

    def _meeting_words(self, placement: Placement) -> str:
        """Who has met, in a line."""
        labels = [peer.label for peer in self.peers.values()]
        shown = ", ".join(labels[:_MOST_LABELS]) + (
            f" and {len(labels) - _MOST_LABELS} more" if labels[_MOST_LABELS:] else ""
        )
        counts = {peer.ranks for peer in self.peers.values()}
        each = f"{counts.pop()} on each" if len(counts) == 1 and len(labels) > 1 else ""
        hosts = "1 host" if len(labels) == 1 else f"{len(labels)} hosts"
        return f"{hosts} ({shown}), {placement.world_size} ranks{f', {each}' if each else ''}"

    def prepare(self, preparation: JsonObject) -> None:
        """Ask what only torch can answer, if anything; ``on_prepared`` follows."""
        if not self._needs_preparing:
            self._on_prepared({})
            return
        self._preparing = True
        asked = {"handler": self._config.event_log_handler, "file_timer": self._serves_timers}
        self.line.send({"op": "prepare", **asked, **preparation})

    def hand_on(self, event: JsonObject) -> None:
        """Give an event to torch's event handlers, where the user named one."""
        if self.hands_on_events:
            self.line.send({"op": "event", "handler": self._config.event_log_handler, **event})

    # ----------------------------------------------------------------------------------------------------------------
    # Telling

    def tell_trouble(
        self, reason: str, words: str, *, ranks: Sequence[int] = (), signum: int = 0, lost_task: int | None = None
    ) -> None:
        """This attempt is to end on all hosts."""
        self._tell(
            {
                "kind": "trouble",
                "reason": reason,
                "words": _for_others(words),
                "ranks": list(ranks)[:_MOST_LINES],
                "signum": signum,
                "lost_task": lost_task,
                "time": time.time(),
            }
        )

    def tell_decision(self, action: BroadcastDecision, words: Sequence[str]) -> None:
        """What follows, on all hosts."""
        self._tell(
            {
                "kind": "decision",
                "next": action.next_step,
                "exit_code": action.exit_code,
                "wait_s": action.wait_s,
                "restarts": action.restarts,
                "words": [_for_others(line) for line in list(words)[:_MOST_LINES]],
                "excluded": action.excluded,
            }
        )

    def tell_hang(self, verdict: HangVerdict, number: int) -> None:
        """Every host is to capture."""
        from saferun.watchdog.job import packed

        self._tell({"kind": "hang", "verdict": packed(verdict), "n": number})

    def tell_preflight(self, message: JsonObject) -> None:
        """What the checks came to, or whom to try once more."""
        self._tell({"kind": "preflight", **message})

    def _tell(self, message: JsonObject) -> None:
        told = {**message, "attempt": self._attempt(), "host": self.host, "task": self._task, "label": self._label}
        self.line.send({"op": "tell", "attempt": self._attempt(), "message": told})

    @property
    def _label(self) -> str:
        peer = self.peers.get(self.host)
        return peer.label if peer is not None else short_host_name()

    def set_state(self, state: JsonObject) -> None:
        """How the ranks of this process do, for the host that decides."""
        if state != self._own_state:
            self._own_state = state
            self._send_state()

    def _send_state(self) -> None:
        more: JsonObject = {"way": self._way} if self._way else {}
        if self._progress is not None:
            more["progress"] = list(self._progress)
        self.line.send({"op": "state", "attempt": self._attempt(), "state": {**self._own_state, **more}})

    def _tell_way(self, words: str) -> None:
        """Have the user of the host that leads told what became of this host's way to it."""
        self._way = words
        self._send_state()

    def _ask_others(self) -> bool:
        """Have some other hosts whose ranks run tell whether these make progress. Returns whether there are any."""
        hosts = {task_of(key)[0] for key, state in self._states.items() if state.get("s") in _RUNS}
        asked = sorted(hosts - {self.host} - self.control.unheard)[:_MOST_ASKED]
        if asked:
            self._tell({"kind": "watch", "hosts": asked})
        return bool(asked)

    def _tell_progress(self, moved: int, active: int) -> None:
        self._progress = (moved, active)
        self._send_state()

    def _hear_progress(self, key: str, told: object) -> None:
        try:
            moved, active = map(number, told)  # type: ignore[call-overload]
            before, now = self._told_progress.get(key, (0, 0)), (moved, active)
        except (TypeError, ValueError):
            return
        self._told_progress[key] = now
        if now[0] > before[0] or now[1] > before[1]:
            self.control.hear_progress(moved=now[0] > before[0])

    def acknowledge(self) -> None:
        """The decision has been taken in."""
        self.line.send({"op": "ack", "attempt": self._attempt()})

    def share(self, name: str, evidence: str, *, moved: bool = False, stopped: bool = False) -> None:
        """Hand a piece of evidence to the host that decides."""
        piece = {"t": time.time(), "moved": moved, "stopped": stopped, "evidence": evidence}
        self.line.send({"op": "part", "attempt": self._attempt(), "name": name, "text": json.dumps(piece)})

    # ----------------------------------------------------------------------------------------------------------------
    # Collecting

    def collect(
        self,
        name: str,
        timeout_s: float,
        on_done: Callable[[list[Piece]], None],
        *,
        hosts: Collection[int] | None = None,
    ) -> None:
        """Wait for the pieces of this name of all other tasks, and hand over what has come by then.

        Args:
            name: of the pieces.
            timeout_s: how long they are waited for.
            on_done: takes them.
            hosts: only the heads of these hosts have any.
        """
        own = (self.host, self._task)
        if hosts is not None:
            wanted = {(host, 0) for host in hosts if (host, 0) != own}
            self._collection = _Collection(name, wanted, time.monotonic() + timeout_s, on_done)
            self._look_at_collection()
            return
        tasks = self._config.hosts.task is not None
        expected = {
            (peer.host, task)
            for peer in self.peers.values()
            for task in (range(peer.ranks) if tasks else (0,))
            if (peer.host, task) != own
        }
        self._collection = _Collection(name, expected, time.monotonic() + timeout_s, on_done)
        self._look_at_collection()

    def forget(self) -> None:
        """Wait for no pieces any more."""
        self._collection = None

    def _missing(self, collection: _Collection) -> set[tuple[int, int]]:
        return {
            (host, task)
            for host, task in collection.expected
            if (collection.name, host, task) not in self._pieces
            and host not in self.lost
            and host not in self._left
            and host not in self.control.missing
            and (host, task) not in self._lost_tasks
        }

    def _look_at_collection(self) -> None:
        if self._collection is not None and not self._missing(self._collection):
            self._end_collection()

    def _end_collection(self) -> None:
        collection, self._collection = self._collection, None
        if collection is not None:
            found = [piece for (name, _, _), piece in sorted(self._pieces.items()) if name == collection.name]
            collection.on_done(found)

    # ----------------------------------------------------------------------------------------------------------------
    # Hearing

    def _on_message(self, message: JsonObject) -> None:
        """What another host has said, and what fails because of it, ends nothing: it is ignored, and counted."""
        joins = self._joining and message.get("op") == "joined"
        try:
            self._take(message)
        except SaferunError:
            raise  # not because of what was said, and the user can do something about it
        except Exception as error:
            if joins:
                what = f"the hosts' agreement cannot be read: {type(error).__name__}: {error}"
                self._fail(what, "run the same version of saferun on all hosts")
                return
            told = message.get("message")
            self.ignored.add(told.get("kind") if isinstance(told, dict) else message.get("op"), error)

    def _take(self, message: JsonObject) -> None:  # noqa: C901, PLR0915 - one flat table of what is heard
        match message.get("op"):
            case "joined" if self._joining:
                self._on_joined(message)
            case "join_failed" if self._joining:
                self._joining = False
                self._fail(str(message["what"]), str(message["hint"]), 2 if message.get("usage") is True else 1)
            case "waiting":
                self._say(f"saferun: {words(message['words'], _LONGEST_WORDS)}")
            case "warn" if message["attempt"] == self._number:
                self._warn(message["words"])
            case "prepared" if self._preparing:
                self._preparing = False
                self._on_prepared(message)
            case "failed" if self._preparing:
                self._preparing = False
                hint = "look at --logs-specs, --event-log-handler and --numa-binding in saferun --help"
                code = 2 if message.get("usage") else 1
                self._post(StartFailed(time.monotonic(), self._attempt(), str(message.get("what")), hint, code))
            case "told":
                self._on_told(message["attempt"], message["message"])
            case "states" if self.leads and message["attempt"] == self._attempt():
                self._on_changed(message["changed"])
            case "parts" if self.leads and message["attempt"] == self._number:
                self._on_piece(message)
            case "probed" if self.leads and message["attempt"] == self._number and message.get("why") in _GONE:
                self._on_lost(message)
            case "lost" if self.leads and message["attempt"] == self._number:
                self._on_lost(message)
            # That of the attempt before ends when the hosts meet anew, and one of them is always the first.
            case "store_lost" if message["attempt"] == self._number:
                said = words(message["words"], _LONGEST_WORDS)
                self.trouble = Trouble("store_lost", self.leader, said, None, _why(message))
                # Somebody there holds the port: its saferun, which can serve another store.
                class_name = "store_lost" if message.get("again") is True else ""
                self._on_line_lost(said, _LOOK_THERE, class_name)
            case "doubt" | "unheard" | "heard" if message["attempt"] == self._number and not self._is_told:
                self._guarded(self.control.hear, message)
                if self.leads:
                    self._look_at_end()
            case "malformed" if message["attempt"] == self._number:
                raise ValueError(f"an entry of the job's log: {message.get('words') or 'it cannot be read'}")
            case "made":
                # Removed with the run's own directories if the coordinator cannot, whoever is killed.
                self._run_dir.scratch.note(
                    text(message["path"], _LONGEST_PATH), (number(message["device"]), number(message["inode"]))
                )
            case "unsigned":
                self.unsigned.add_unsigned(words(message["key"], _LONGEST_NAME), number(message["count"], 1))
            case "start_stage" if message["attempt"] == self._number:
                self.start_stage = message
            case "task_lost":
                task = number(message["task"], 0, MOST_TASKS)
                self._lost_tasks.add((self.host, task))
                self.tell_trouble("task_lost", f"saferun of local rank {task} is gone", lost_task=task)
                self._look_at_collection()
            case "membership" if self.leads and not self._is_told:
                self.tell_trouble("membership", words(message.get("words") or "a host wants to join", _LONGEST_WORDS))

    def _guarded(self, call: Callable[[Any], None], argument: object) -> None:
        """Where nothing can be made of silence, the job goes on."""
        try:
            call(argument)
        except Exception as error:
            self.control.end()
            self._warn(f"cannot judge whether other hosts are there: {type(error).__name__}: {error}")

    def _warn(self, what: object) -> None:
        if self.line.is_head:
            self._say(f"saferun: warning: {words(str(what), _LONGEST_WORDS)}")

    def _fail(self, what: str, hint: str, exit_code: int = 1) -> None:
        hosts = self._config.hosts
        if hosts.detected:
            here = "of unknown node rank" if hosts.node_rank is None else f"node rank {hosts.node_rank}"
            self._say(f"saferun: {printable(f'this is {short_host_name()}, {here}, from {hosts.detected}')}")
        self._post(StartFailed(time.monotonic(), self._attempt(), what, hint, exit_code))

    def _on_line_lost(self, what: str, hint: str, class_name: str = "") -> None:
        if self._joining or self._preparing:
            self._joining = self._preparing = False
            self._fail(what, hint)
            return
        if self.leads and self.line.is_head:
            class_name = "store_lost"  # this host's own coordinator, which served it
        self._after_loss = bool(class_name)
        self._post(JobLost(time.monotonic(), self._attempt(), what, hint, class_name))

    def _on_told(self, attempt: int, message: JsonObject) -> None:
        now = time.monotonic()
        attempt, kind = number(attempt), message["kind"]
        if is_leaders(kind) and message["host"] != 0:
            raise ValueError("another host than the one that leads says so")
        match kind:
            case "trouble":
                self._on_trouble(attempt, message)
            case "watch" if attempt == self._attempt() and self.host in message["hosts"]:
                self.control.watch()
            case "hang":
                from saferun.watchdog.job import verdict_from

                verdict = verdict_from(message["verdict"])
                if verdict is not None and attempt == self._attempt():
                    self._on_hang(verdict, number(message["n"], 0, _MOST_HANGS))
            case "preflight" if attempt == self._number:
                self._on_preflight(message)
            case "notice" if attempt == self._number and self.host == 1 and self._may_say("notice"):
                # The leader cannot say it itself, and one of the others is enough.
                self._warn(message["words"])
            case "decision":
                found = decision_from(message)
                self._post(
                    JobDecided(
                        now,
                        attempt,
                        "restart" if found.restarts_job else "finish",
                        found.exit_code,
                        found.wait_s,
                        found.restarts,
                        found.words,
                        excluded=found.excluded,
                    )
                )
                self.acknowledge()

    def _on_trouble(self, attempt: int, message: JsonObject) -> None:
        heard = trouble_from(message)
        if heard.reason in _REGROUPS and self._config.hosts.least == self._config.hosts.most:
            # Nobody comes or goes in this job, whoever says so: it ends as one that has failed.
            heard = heard._replace(reason="failure")
        if heard.lost_task is not None and heard.host in self.peers:
            self._lost_tasks.add((heard.host, heard.lost_task))
        if attempt == self._attempt():
            self._is_told = True
            self.control.end()
            rank = heard.ranks[0] if heard.ranks else None
            self.trouble = Trouble(heard.reason, heard.about, heard.words, rank, "")
            if self.leads and self.start_stage is None:
                self.start_stage = {}
                self.line.send({"op": "start_stage", "attempt": attempt})
        trouble = JobAborted(
            time.monotonic(),
            attempt,
            heard.reason,
            heard.words,
            heard.label,
            ours=(heard.host, heard.task) == (self.host, self._task),
            signum=heard.signum,
            culprits=tuple(sorted(local for rank, local in self._places.items() if rank in heard.ranks)),
        )
        self._post(trouble)

    def _on_changed(self, changed: Mapping[str, object]) -> None:
        for key, state in changed.items():
            host, task = task_of(key)
            peer = self.peers.get(host)
            if peer is None or not self._has_task(peer, task) or not isinstance(state, dict):
                continue
            self._states[key] = {name: value for name, value in state.items() if name not in _APART}
            self._hear_progress(key, state.get("progress"))
            if isinstance(way := state.get("way"), str) and way != self._ways.get(key) and self._may_say(key):
                self._ways[key] = way[:_LONGEST_WORDS]
                self.control.note(peer.label, way)
            self._tell_leftovers(key, peer, state)
            if state.get("s") == "gone":
                self._lost_tasks.add((host, task))
        self._look_at_collection()
        missing = self.control.missing
        # Whether the job hangs is for those to say that can be heard.
        heard = {key: {"s": "done"} if task_of(key)[0] in missing else s for key, s in self._states.items()}
        self._on_states(heard)
        self._look_at_end()

    def _may_say(self, who: str) -> bool:
        """Whether there may be another line in somebody's name: no host fills the console of another one."""
        self._lines_for[who] = self._lines_for.get(who, 0) + 1
        return self._lines_for[who] <= _MOST_LINES

    def _has_task(self, peer: Peer, task: int) -> bool:
        """Whether a host may have a saferun of this number."""
        return task < (1 if self._config.hosts.task is None else min(peer.ranks, MOST_TASKS))

    def _tell_leftovers(self, key: str, peer: Peer, state: Mapping[str, object]) -> None:
        """Another host waits for what its ranks left behind, and so does the job."""
        if state.get("s") != "leftovers" or peer.host == self.host or not isinstance(state.get("words"), str):
            return
        said = words(state["words"], _LONGEST_LEFTOVERS)
        if self._told_leftovers.get(key) != said and self._may_say(key):
            self._told_leftovers[key] = said
            self._say(f"saferun: {printable(peer.label)}: {printable(said)}")

    def _tasks(self) -> int:
        if self._config.hosts.task is None:
            return len(self.peers)
        return sum(peer.ranks for peer in self.peers.values())

    def _on_piece(self, message: JsonObject) -> None:
        host, task = number(message["host"], 0, MOST_HOSTS), number(message["task"], 0, MOST_TASKS)
        name = text(message["name"], _LONGEST_NAME)
        peer = self.peers.get(host)
        if peer is None or not self._has_task(peer, task):
            raise ValueError("there is no such host or task")
        piece = piece_from(message["text"])
        skew_s = time.time() - piece.time
        older = [key for key in self._pieces if key[1:] == (host, task) and key[0] != name]
        for key in older[: max(0, len(older) + 1 - _MOST_PIECES)]:
            del self._pieces[key]
        self._pieces[name, host, task] = Piece(
            host,
            task,
            peer.label,
            skew_s if abs(skew_s) > _SKEW_S else 0.0,
            moved=piece.moved,
            stopped=piece.stopped,
            evidence=piece.evidence,
        )
        self._look_at_collection()

    def _on_silent(self, host: int, why: str, words: str) -> None:
        """A host of which nothing is heard is given up: the ranks stand still, or it is certain that it is gone."""
        if self.leads:
            self._on_lost({"host": host, "why": why, "words": words})
        elif not self._is_told:
            self.trouble = Trouble("store_lost", self.leader, words, None, why)
            self._on_line_lost(words, _LOOK_THERE)

    def _on_unheard(self, words: str) -> None:
        """The host that leads is not heard of, and the job goes on; empty: it is heard again."""
        now = time.monotonic()
        self._post(HostsUnreachable(now, self._attempt(), words) if words else HostsReachable(now, self._attempt()))

    def _look_at_end(self) -> None:
        """Whether every rank of the job has ended well, or every one that is heard of."""
        if len(self._states) >= self._tasks() and not self._living():
            self._post(HostsDone(time.monotonic(), self._attempt()))
            return
        self._look_at_missing()

    def _living(self) -> set[int]:
        """Hosts with ranks that have not ended well, as far as is known."""
        unknown = set(self.peers) - {task_of(key)[0] for key in self._states}
        return unknown | {task_of(key)[0] for key, state in self._states.items() if state.get("s") != "done"}

    def _is_done(self, host: int) -> bool:
        """Whether all ranks of a host have ended well, by what it has said."""
        peer = self.peers.get(host)
        tasks = 0 if peer is None else 1 if self._config.hosts.task is None else min(peer.ranks, MOST_TASKS)
        states = (self._states.get(f"{host}/{task}", {}) for task in range(tasks))
        return tasks > 0 and all(state.get("s") == "done" for state in states)

    def _look_at_missing(self) -> None:
        living = self._living()
        waits = bool(living) and living <= self.control.missing
        if waits != self._is_waiting_for_unheard:
            self._is_waiting_for_unheard = waits
            self._on_unheard(self.control.missing_words() if waits else "")

    def _on_lost(self, message: JsonObject) -> None:
        host = number(message["host"], 0, MOST_HOSTS)
        peer = self.peers.get(host)
        if peer is None or host in self.lost or host in self._left or host == self.host:
            return
        said = words(message.get("words") or "it does not answer", _LONGEST_WORDS)
        if self._is_done(host) and not self._is_told:
            # Nobody waits for it. Were it to be waited for at another meeting, that would find out.
            self._left.add(host)
            self._warn(f"{said}; the ranks of {peer.label} have ended well, so the job goes on")
            self._look_at_collection()
            return
        why = _why(message)
        ranks = tuple(range(peer.base_rank, peer.base_rank + min(peer.ranks, _MOST_RANKS)))
        self.lost[host] = Lost(host, peer.label, why, said, ranks)
        if not self._is_told:
            self.tell_trouble("lost", f"{peer.label}: {said}")
        self._look_at_collection()


def _for_others(said: str) -> str:
    """Words as they leave this host: without secrets, for whoever reaches the store can read them."""
    try:
        from saferun.text.redaction import redacted_text
    except ImportError:  # from a file system that does not answer: what follows from the message matters more
        return ""
    return redacted_text(said[: 4 * _LONGEST_WORDS])[:_LONGEST_WORDS]


def _why(message: JsonObject) -> str:
    return words(message.get("why") or "unknown", _LONGEST_NAME)


def _peer(value: object) -> Peer | None:
    try:
        host, label, _name, _pid, addresses, base_rank, nproc = value  # type: ignore[misc]
        return Peer(
            number(host, 0, MOST_HOSTS),  # type: ignore[has-type]
            words(label, _LONGEST_WORDS),  # type: ignore[has-type]
            tuple(words(address, _LONGEST_NAME) for address in addresses),  # type: ignore[has-type]
            number(base_rank),  # type: ignore[has-type]
            number(nproc),  # type: ignore[has-type]
        )
    except (TypeError, ValueError):
        return None
