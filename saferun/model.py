"""Values passed between layers. Immutable, without behaviour beyond reading themselves."""

from __future__ import annotations

import signal

__all__ = [
    "ABORT_FAILURES",
    "ABORT_NO_FAILURES",
    "ABORT_ORDERS",
    "ABORT_REGROUPS",
    "ABORT_RESTARTS",
    "ASKED_CHUNK",
    "RANKS_DONE",
    "RANKS_HELD",
    "RANKS_LEFT_OVER",
    "RANKS_QUIET",
    "RANKS_RUN",
    "Defaults",
    "ExitStatus",
    "JsonObject",
    "LogDestinations",
    "Placement",
    "RankAssignment",
    "RankEnd",
    "TorchParts",
    "Value",
    "signal_name",
]

TYPE_CHECKING = False  # importing typing would cost every launch some 5 % of its start
if TYPE_CHECKING:
    # To a type checker a value is a named tuple, and it behaves like one in every way.
    from collections.abc import Iterable
    from typing import Any, Final, Literal, Self
    from typing import NamedTuple as Value

    AbortKind = Literal[
        "failure",
        "victim",  # the failure of a rank that has only lost its connection to another one
        "hang",
        "signal",
        "parent",  # the parent process of a saferun is gone
        "request",  # by saferunctl stop or kill
        "restart",  # by saferunctl restart
        "lost",  # a host
        "store_lost",  # with its host, the leader
        "task_lost",  # one of several saferuns of a host
        "start",  # ranks cannot be started
        "membership",
        "leave",
    ]
else:
    from collections import _tuplegetter  # what named tuples are made of, whatever the interpreter

    class _ValueType(type):
        """Makes named tuples without generating code.

        Every launch pays for its value classes: ``typing.NamedTuple`` compiles a constructor for each, which costs
        some six times of what this does, and a dataclass costs six times as much again.
        """

        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, (tuple,), namespace)
            if bases != (Value,):
                raise TypeError(f"{name}: a value does not inherit the fields of another one")
            fields = tuple(namespace.get("__annotations__", ()))
            defaults = {field: namespace[field] for field in fields if field in namespace}
            for index, field in enumerate(fields):
                namespace[field] = _tuplegetter(index, "")
            namespace.update(__slots__=(), __match_args__=fields, _fields=fields, _field_defaults=defaults)
            return super().__new__(cls, name, bases, namespace)

        @property
        def __signature__(cls) -> object:
            """What ``help`` shows, and what makes values for tests."""
            import inspect

            kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
            types, defaults = cls.__annotations__, cls._field_defaults
            return inspect.Signature(
                [
                    inspect.Parameter(name, kind, default=defaults.get(name, empty), annotation=types[name])
                    for name in cls._fields
                ]
            )

    class Value(metaclass=_ValueType):
        """Base of all values: a tuple whose items have names, types and perhaps defaults (see ``NamedTuple``)."""

        __slots__ = ()
        _fields = ()
        _field_defaults = {}  # noqa: RUF012 - each class has its own

        def __new__(cls, *args: object, **kwargs: object) -> Self:  # noqa: D102 - as in the class
            fields = cls._fields
            if len(args) != len(fields) or kwargs:
                args = _filled(cls, args, kwargs)
            return tuple.__new__(cls, args)

        @classmethod
        def _make(cls, iterable: Iterable[Any]) -> Self:
            return cls(*iterable)

        def _replace(self, **changes: object) -> Self:
            result = tuple.__new__(type(self), map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"{type(self).__name__} has no field {', '.join(changes)}")
            return result

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            fields = ", ".join(f"{name}={item!r}" for name, item in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({fields})"

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

    def _filled(cls: type[Value], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All fields of a new value in their order, where some were given by name or not at all."""
        items = list(args)
        for name in cls._fields[len(args) :]:
            if name in kwargs:
                items.append(kwargs.pop(name))
            elif name in cls._field_defaults:
                items.append(cls._field_defaults[name])
            else:
                raise TypeError(f"{cls.__name__}: the field {name!r} is missing")
        if kwargs or len(items) != len(cls._fields):
            wrong = ", ".join(kwargs) or f"{len(args)} values for {len(cls._fields)} fields"
            raise TypeError(f"{cls.__name__}: {wrong}: there is no such field, or it is given twice")
        return items


class Defaults:
    """Defaults that the table of options (``cli/options.py``) and the settings of a launch (``config.py``) share.

    They are here because ``--help`` imports the table, and nothing of a launch.
    """

    start_timeout_s = 900.0  # as long as torchrun waits with its static rendezvous
    host_timeout_s = 30.0
    start_retries = 3
    retry_wait_s = 1.0
    start_window_s = 120.0
    leftovers: Final = "wait"
    leftovers_timeout_s = 600.0
    preflight: Final = "on"
    health: Final = "quick"
    sign_messages: Final = "auto"
    bar_interval_s = 30.0
    report_html: Final = "failure"


class ExitStatus(Value):
    """How a process ended, from its wait status.

    Exactly one of ``code`` and ``signum`` is not None.
    """

    code: int | None
    signum: int | None
    core_dumped: bool = False

    @property
    def ok(self) -> bool:
        """Whether the process ended with exit code 0."""
        return self.code == 0

    @property
    def returncode(self) -> int:
        """The convention of ``subprocess``: the exit code, or minus the signal's number."""
        return self.code if self.code is not None else -(self.signum or 0)

    @property
    def description(self) -> str:
        """``exit code 3``, ``killed by SIGSEGV (core dumped)``."""
        if self.code is not None:
            return f"exit code {self.code}"
        dumped = " (core dumped)" if self.core_dumped else ""
        return f"killed by {signal_name(self.signum or 0)}{dumped}"


def signal_name(signum: int) -> str:
    """``SIGSEGV`` for 11, ``signal 64`` where there is no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


# Why all hosts end an attempt, by the kinds that ``AbortKind`` lists.
ABORT_ORDERS = frozenset({"signal", "parent", "request"})  # the user or the scheduler ends the job
ABORT_FAILURES = frozenset({"failure", "victim", "hang"})  # of ranks
ABORT_REGROUPS = frozenset({"membership", "leave"})  # a host comes or goes
ABORT_RESTARTS = ABORT_REGROUPS | {"restart"}  # nothing has failed: another attempt follows
ABORT_NO_FAILURES = ABORT_ORDERS | ABORT_RESTARTS

# Of each stream of a rank, for the diagnosis: a traceback through torch's layers is long, and where it begins matters.
KEPT_LINES = 200
KEPT_BYTES = 64 << 10  # C++ stacks alone can take half of it

# How the ranks of one saferun are doing, as it reports that to the leader: the field ``s`` of its state.
RANKS_RUN = "run"
RANKS_QUIET = "quiet"  # no rank makes progress
RANKS_HELD = "held"  # a user holds one up, in a debugger or at a prompt
RANKS_DONE = "done"  # all have ended with exit code 0
RANKS_LEFT_OVER = "leftovers"  # as done, but processes that they left behind still run

# How the names of chunks begin that a user has asked for: they are no evidence of a failure.
ASKED_CHUNK = "asked-"


class RankAssignment(Value):
    """The numbers of one rank in the job."""

    local_rank: int
    rank: int
    role_rank: int


class Placement(Value):
    """What a host knows once the hosts of a job have met.

    ``ranks`` holds the ranks of this process in order of local rank. ``group_rank`` is this host's number in this
    attempt; with spares it may not be the ``--node-rank`` that it was started with.
    ``local_world_size`` is the number of ranks on this host; 0: those in ``ranks`` are all.
    ``host`` is the name under which the job knows this host, ``leader`` the one of the host that decides.
    ``restarts`` counts the failures that the job has got over so far.
    """

    group_rank: int
    group_world_size: int
    world_size: int
    role_world_size: int
    ranks: tuple[RankAssignment, ...]
    master_addr: str
    master_port: int
    run_id: str
    local_world_size: int = 0
    host: str = ""
    leader: str = ""
    restarts: int = 0


class LogDestinations(Value):
    """Where the streams of an attempt's ranks go besides the run directory, by local rank.

    The meaning is that of torch's ``LogsDest``: an empty path means the console, ``os.devnull`` nowhere; a stream
    that stands in ``tee_*`` goes to the console as well as to its file.
    """

    stdouts: tuple[str, ...]
    stderrs: tuple[str, ...]
    tee_stdouts: frozenset[int]
    tee_stderrs: frozenset[int]
    error_files: tuple[str, ...]
    filtered_stdout: str
    filtered_stderr: str


class RankEnd(Value):
    """The end of one rank.

    ``at`` is in monotonic seconds, ``time`` in seconds since the epoch, ``clock`` the same on the wall (``03:15:33``).
    """

    local_rank: int
    rank: int
    pid: int
    status: ExitStatus
    at: float
    time: float
    stopped_by_us: bool
    clock: str = ""


if TYPE_CHECKING:
    JsonObject = dict[str, Any]
    # What a coordinator imports of torch: its store, its c10d rendezvous as well, or all of it.
    TorchParts = Literal["store", "c10d", "all"]
else:
    JsonObject = dict
    TorchParts = str
