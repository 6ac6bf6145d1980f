"""Writes the failure record of a rank: the exception, and what the locals of its frames are. ``saferun.record``.

The hook loads it; a script's ``saferun.record`` uses it, too. It runs where a program fails, and may do no harm there:

* No code of the script is run: no ``__repr__``, ``__str__``, property, or ``__class__``. Only what is of a type of
  Python's, numpy's or torch's itself is described, by the functions in C of that type.
* No value is written but of numbers, truth values, and tuples of a few whole numbers; of text only its length. Numbers
  whose name looks like a secret's are left out.
* No GPU is asked. A tensor is checked for values that are not finite where its memory is this process's own: not on a
  device, not in a file. It is read through the kernel, which refuses what is no longer there.
* Size, depth and time are bounded; whatever fails is left out. Nothing is imported but modules in C.

``saferun_written.py`` has the names of secrets, makes the record JSON and writes it.

As ``saferun_hook.py`` this uses ``os`` and ``sys`` only. ``saferun/text/failure_record.py`` reads the record, as JSON.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType
    from typing import Any

_VERSION = 1
_LONGEST_RECORD = 128 << 10
_LONGEST_MESSAGE = 2000
_LONGEST_NAME = 200
_MOST_EXCEPTIONS = 12
_MOST_MEMBERS = 4  # of an exception group
_FIRST_FRAMES, _LAST_FRAMES = 4, 20
_MOST_WALKED = 100_000
_HAS_FAST_LOCALS = 1  # CO_OPTIMIZED: of a function, not of a module or a class
_MOST_LOCALS, _MOST_LOCALS_OF_ALL, _MOST_EXAMINED = 32, 240, 400
_MOST_ITEMS = 8
_MOST_BITS = 64  # also letters of a key
_LONGEST_S = 0.5
"""How long describing may take; what is not described by then is left out."""
_MOST_ELEMENTS, _MOST_ELEMENTS_OF_ALL = 1 << 16, 1 << 18
_MOST_MAPS, _MOST_STATUS = 2 << 20, 1 << 14
_NOT_SHOWN = frozenset(
    {"module", "function", "type", "builtin_function_or_method", "method", "classmethod", "staticmethod", "property"}
    | {"_GenericAlias", "_SpecialForm", "TypeVar", "_Feature"}
)
_FLOATS: "dict[str, tuple[Any, int, int]]" = {
    # Bytes of an element, the mask of its exponent: all ones is infinite or no number.
    "torch.float64": ("Q", 8, 0x7FF0000000000000),
    "torch.float32": ("I", 4, 0x7F800000),
    "torch.float16": ("H", 2, 0x7C00),
    "torch.bfloat16": ("H", 2, 0x7F80),
}


def _tried(otherwise: "Any", call: "Callable[..., Any]", *arguments: object) -> "Any":  # noqa: ANN401 - what it returns
    try:
        return call(*arguments)
    except Exception:
        return otherwise


_is_known = "time" in sys.modules  # where it is not, it shall not be now
_clock = __import__("time")
if not _is_known:
    del sys.modules["time"]

# -------------------------------------------------------------------------------------------- without the script's code

_MRO: "Any" = type.__dict__["__mro__"]
_DICT: "Any" = type.__dict__["__dict__"]
_MODULE: "Any" = type.__dict__["__module__"]
_NAME: "Any" = type.__dict__["__name__"]
_QUALNAME: "Any" = type.__dict__["__qualname__"]


def _of_error(name: str) -> "Callable[[BaseException], Any]":
    found: Any = BaseException.__dict__[name]
    get: Callable[[BaseException], Any] = found.__get__
    return get


_args, _cause, _context = _of_error("args"), _of_error("__cause__"), _of_error("__context__")
_is_suppressed, _traceback = _of_error("__suppress_context__"), _of_error("__traceback__")
_members: "Any" = BaseExceptionGroup.__dict__["exceptions"]
_PLAIN_TEXTS = tuple(
    kind.__dict__["__str__"]
    for kind in (BaseException, KeyError, ImportError, UnicodeDecodeError, UnicodeEncodeError, BaseExceptionGroup)
)
_PLAIN = (str, int, float, bool, bytes, type(None))


def _is_one(kind: type, kinds: "tuple[Any, ...]") -> bool:
    """Whether it is one of them: to compare or to hash a class may run code of its metaclass."""
    return any(kind is one for one in kinds)


def _type_name(kind: type) -> str:
    """As a traceback has it: ``torch.OutOfMemoryError``, ``ValueError``."""
    module, name = _MODULE.__get__(kind), _QUALNAME.__get__(kind)
    name = name[:_LONGEST_NAME] if type(name) is str else "?"
    return name if type(module) is not str or module == "builtins" else f"{module[:_LONGEST_NAME]}.{name}"


def _message(error: BaseException) -> str:
    """Its text where that runs no code of the script's; else its first argument that is a text."""
    kind = type(error)
    args = _args(error)
    plain = [item for item in args if _is_one(type(item), _PLAIN)][:_MOST_ITEMS] if type(args) is tuple else []
    found: Any = next(
        (_DICT.__get__(one)["__str__"] for one in _MRO.__get__(kind) if "__str__" in _DICT.__get__(one)), None
    )
    is_whole = type(args) is tuple and len(plain) == len(args)
    if found is OSError.__dict__["__str__"] and is_whole:
        path: Any = OSError.__dict__["filename"].__get__(error)
        if len(plain) == 2:  # noqa: PLR2004 - number and text
            return f"[Errno {plain[0]}] {plain[1]}{f': {path!r}' if type(path) is str else ''}"[:_LONGEST_MESSAGE]
        found = BaseException.__dict__["__str__"]
    if is_whole and any(found is one for one in _PLAIN_TEXTS) and not any(_is_huge(item) for item in plain):
        return str.__getitem__(found(error), slice(_LONGEST_MESSAGE))
    return next((item[:_LONGEST_MESSAGE] for item in plain if type(item) is str), "")


def _is_huge(value: object) -> bool:
    return (type(value) is int and value.bit_length() > _MOST_BITS) or (
        _is_one(type(value), (str, bytes)) and len(value) > _LONGEST_RECORD  # type: ignore[arg-type]
    )


# ------------------------------------------------------------------------------------------------------------- tensors


class _Memory:
    """Reads memory of this process that belongs to no file and no device; nothing where that is not certain."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] | None = None
        self._left = _MOST_ELEMENTS_OF_ALL
        self._fd = -1

    def _own(self, begin: int, end: int) -> bool:
        if self._ranges is None:
            self._ranges = []
            for line in _content("/proc/self/maps", _MOST_MAPS).split(b"\n"):
                parts = line.split(None, 5)
                if len(parts) < 5 or parts[4] != b"0" or not parts[1].startswith(b"rw"):  # noqa: PLR2004 - proc(5)
                    continue
                if len(parts) == 5 or parts[5].startswith((b"[heap]", b"[anon")):  # noqa: PLR2004 - as above
                    first, _, last = parts[0].partition(b"-")
                    self._ranges.append((int(first, 16), int(last, 16)))
        return any(first <= begin and end <= last for first, last in self._ranges)

    def is_finite(self, address: int, count: int, kind: str) -> "bool | None":
        """Whether all of so many numbers are finite; None: they may not be read."""
        code, size, mask = _FLOATS[kind]
        if not 0 < count <= min(_MOST_ELEMENTS, self._left) or not self._own(address, address + count * size):
            return None
        self._left -= count
        if self._fd < 0:
            self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        content = os.pread(self._fd, count * size, address)
        if len(content) != count * size:
            return None
        return not any(number & mask == mask for number in memoryview(content).cast(code))

    def close(self) -> None:
        """Nothing more is read."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Torch:
    """torch, where the script has imported it: what of a tensor can be asked without code of the script's."""

    def __init__(self, memory: _Memory) -> None:
        module: Any = sys.modules.get("torch")
        names = vars(module) if type(module) is type(sys) else {}
        core: Any = names["_C"]
        self._base: Any = getattr(core, "TensorBase", None) or core._TensorBase  # noqa: SLF001 - before torch 2.1
        self._without_functions: Any = core.DisableTorchFunction
        nn = vars(sys.modules["torch.nn.parameter"]) if "torch.nn.parameter" in sys.modules else {}
        self._kinds = (names["Tensor"], nn.get("Parameter"), nn.get("Buffer"))
        self.size_kind: type = names["Size"]
        self._plain = (names["dtype"], names["device"], self.size_kind)
        self._strided = names["strided"]
        self._memory = memory

    def described(self, value: object) -> "dict[str, Any] | None":
        """A tensor; None: it is none that is known."""
        kind = type(value)
        if not _is_one(kind, self._kinds):
            return self._distributed(value)
        with self._without_functions():
            found = self._shape(value)
            finite = _tried(None, self._is_finite, value, found) if found["device"] == "cpu" else None
        if finite is not None:
            found["finite"] = finite
        return found

    def _shape(self, value: object) -> "dict[str, Any]":
        base = self._base
        shape = [size if type(size) is int else -1 for size in base.shape.__get__(value)[: 2 * _MOST_ITEMS]]
        return {
            "type": _type_name(type(value)),
            "shape": shape,
            "dtype": repr(base.dtype.__get__(value)).removeprefix("torch."),
            "device": str(base.device.__get__(value)),
        }

    def _is_finite(self, value: object, found: "dict[str, Any]") -> "bool | None":
        base, kind = self._base, f"torch.{found['dtype']}"
        if kind not in _FLOATS or base.layout.__get__(value) is not self._strided or not base.is_contiguous(value):
            return None
        count, size = base.numel(value), _FLOATS[kind][1]
        if not 0 < count <= _MOST_ELEMENTS:
            return None
        # What FSDP has freed has a shape, and no storage.
        offset, storage = base.storage_offset(value), base.untyped_storage(value)
        if storage.nbytes() < (offset + count) * size:
            return None
        return self._memory.is_finite(base.data_ptr(value), count, kind)

    def _distributed(self, value: object) -> "dict[str, Any] | None":
        kind = type(value)
        if _QUALNAME.__get__(kind) != "DTensor" or not str(_MODULE.__get__(kind)).startswith("torch.distributed."):
            return None
        with self._without_functions():
            found = self._shape(value)
            local = _DICT.__get__(kind).get("_local_tensor")
            if _NAME.__get__(type(local)) == "member_descriptor":
                part = local.__get__(value)
                if _is_one(type(part), self._kinds):
                    found["local_shape"] = self._shape(part)["shape"]
        return found

    def is_plain(self, value: object) -> bool:
        """Whether its text runs code in C only, and holds no secret: a dtype, a device."""
        return _is_one(type(value), self._plain[:2])

    def memory(self) -> "dict[str, Any]":
        """What torch's allocator says about the current GPU; nothing where torch has not begun to use one.

        It has a lock, which a thread may hold that waits for a GPU that hangs: it is asked only where the main thread
        is Python's only one.
        """
        names = vars(sys.modules["torch.cuda"])
        core = vars(sys.modules["torch"])["_C"]
        if names.get("_initialized") is not True:
            return {}
        if len(sys._current_frames()) > 1:  # noqa: SLF001 - documented so
            return {"gpus_note": "not read, since Python has other threads; the report has what the driver says"}
        device = core._cuda_getDevice()  # noqa: SLF001 - torch's own way to it
        stats = core._cuda_memoryStats(device)  # noqa: SLF001 - as above
        found = {"device": device}
        for name, kind in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved")):
            of_all = stats[name]["all"]
            found |= {f"{kind}_bytes": of_all["current"], f"peak_{kind}_bytes": of_all["peak"]}
        return {"gpus": [found]}


def _content(path: str, most: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while most > 0 and (piece := os.read(fd, min(most, 1 << 16))):
            pieces.append(piece)
            most -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------------------- a record


def _running_functions() -> "set[int]":
    """Functions whose frames have not ended: a script may print an exception that it handles, by ``sys.excepthook``."""
    found: set[int] = set()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented so
    while frame is not None and len(found) < _MOST_WALKED:
        if frame.f_code.co_flags & _HAS_FAST_LOCALS:
            found.add(id(frame))
        frame = frame.f_back
    return found


class _Description:
    """One exception with what belongs to it, within the bounds."""

    def __init__(self, is_secret: "Callable[[str], bool]") -> None:
        self._is_secret = is_secret
        self._until = _clock.monotonic() + _LONGEST_S
        self._memory = _Memory()
        self._left = _MOST_LOCALS_OF_ALL
        self._torch: _Torch | None = _tried(None, _Torch, self._memory)
        self._running = _running_functions() if sys.version_info < (3, 13) else set()

    def of(self, error: BaseException, thread: str, outer: "TracebackType | None") -> "dict[str, Any]":
        """The record, as JSON has it."""
        try:
            record: dict[str, Any] = {
                "version": _VERSION,
                "pid": os.getpid(),
                "rank": os.environ.get("RANK", "")[:20],
                "time": _clock.time(),
                "thread": thread[:_LONGEST_NAME],
            }
            for part in (_progress, _host_memory, self._gpus):
                record |= _tried({}, part)
            record["exceptions"] = self._exceptions(error, outer)
            return record
        finally:
            self._memory.close()

    def _gpus(self) -> "dict[str, Any]":
        return self._torch.memory() if self._torch is not None else {}

    def _exceptions(self, error: BaseException, outer: "TracebackType | None") -> "list[dict[str, Any]]":
        """The exception, then what it comes from: causes, contexts, and members of groups."""
        found: list[dict[str, Any]] = []
        waiting: list[tuple[BaseException, str, int]] = [(error, "", -1)]
        seen: set[int] = set()
        while waiting and len(found) < _MOST_EXCEPTIONS:
            one, link, of = waiting.pop(0)
            if id(one) in seen:
                continue
            seen.add(id(one))
            number = len(found)
            row: dict[str, Any] = {"type": _type_name(type(one)), "message": _tried("", _message, one)}
            found.append(row)
            if link:
                row |= {"link": link, "of": of}
            trace = _traceback(one)
            row |= _tried({}, self._frames, trace if trace is not None or number else outer)
            cause, context = _cause(one), _context(one)
            if cause is not None:
                waiting.append((cause, "cause", number))
            elif context is not None and not _is_suppressed(one):
                waiting.append((context, "context", number))
            if any(kind is BaseExceptionGroup for kind in _MRO.__get__(type(one))):
                members = _members.__get__(one)
                if type(members) is tuple:
                    waiting += [(member, "member", number) for member in members[:_MOST_MEMBERS]]
                    row["members"] = len(members)
        return found

    def _frames(self, trace: "TracebackType | None") -> "dict[str, Any]":
        first: list[tuple[FrameType, int]] = []
        last: list[tuple[FrameType, int]] = []
        count = 0
        while trace is not None and count < _MOST_WALKED:
            count += 1
            if len(first) < _FIRST_FRAMES:
                first.append((trace.tb_frame, trace.tb_lineno))
            else:
                last.append((trace.tb_frame, trace.tb_lineno))
                if len(last) > 2 * _LAST_FRAMES:
                    del last[:-_LAST_FRAMES]
            trace = trace.tb_next
        kept = first + last[-_LAST_FRAMES:]
        if kept[-1:] and kept[-1][0].f_code.co_filename == "<saferun>":
            del kept[-1]  # of the hook, around what has failed
        # The innermost first: there the locals matter most.
        rows = [self._frame(frame, line) for frame, line in reversed(kept)]
        rows.reverse()
        return {"frames": rows, "frames_left_out": count - len(kept)} if count > len(kept) else {"frames": rows}

    def _frame(self, frame: "FrameType", line: int) -> "dict[str, Any]":
        code = frame.f_code
        row: dict[str, Any] = {
            "function": getattr(code, "co_qualname", code.co_name)[:_LONGEST_NAME],
            "file": code.co_filename[-2 * _LONGEST_NAME :],
            "line": line if type(line) is int else 0,
        }
        found = _tried([], lambda: list(self._locals(frame)))
        return {**row, "locals": found} if found else row

    def _locals(self, frame: "FrameType") -> "Iterator[dict[str, Any]]":
        if id(frame) in self._running:
            return  # the dictionary would keep its locals alive until it ends, and changes what its locals() gave
        names = frame.f_locals
        if type(names) is not dict and _NAME.__get__(type(names)) != "FrameLocalsProxy":
            return  # of the body of a class that makes its own
        examined = count = 0
        for name, value in names.items():
            examined += 1
            if count >= _MOST_LOCALS or self._left <= 0 or examined > _MOST_EXAMINED:
                return
            if _clock.monotonic() > self._until:
                return
            if type(name) is not str or name.startswith("__") or _NAME.__get__(type(value)) in _NOT_SHOWN:
                continue
            count += 1
            self._left -= 1
            yield {"name": name[:_LONGEST_NAME], **_tried({"type": "?"}, self._value, name, value)}

    def _value(self, name: str, value: object) -> "dict[str, Any]":
        kind = type(value)
        found = self._tensor(value)
        if found is not None:
            return found
        found = {"type": _type_name(kind)}
        if _is_one(kind, (int, float, bool, type(None))) or (self._torch is not None and self._torch.is_plain(value)):
            if not self._is_secret(name) and not _is_huge(value):
                found["value"] = repr(value)
        elif _is_one(kind, (list, tuple, dict, set, frozenset, str, bytes, bytearray)):
            found["length"] = len(value)  # type: ignore[arg-type]
            found |= self._items(name, value)
        elif self._torch is not None and kind is self._torch.size_kind:
            found |= self._items(name, tuple(value))  # type: ignore[arg-type]
        return found

    def _items(self, name: str, value: object) -> "dict[str, Any]":
        """Of a few whole numbers their values, of tensors what they are, with their names in a dictionary."""
        kind = type(value)
        if (kind is list or kind is tuple) and 0 < len(value) <= _MOST_ITEMS:  # type: ignore[arg-type]
            items: list[Any] = list(value)  # type: ignore[call-overload]
            if all(type(item) is int and not _is_huge(item) for item in items):
                return {} if self._is_secret(name) else {"value": repr(value)}
            tensors = [self._tensor(item) for item in items]
            return {"items": tensors} if all(tensor is not None for tensor in tensors) else {}
        if kind is dict and value:
            named = []
            for key, item in list(value.items())[:_MOST_ITEMS]:  # type: ignore[attr-defined]
                tensor = self._tensor(item)
                if tensor is not None and type(key) is str and key.isidentifier() and len(key) <= _MOST_BITS:
                    named.append({"name": key, **tensor})
            return {"items": named} if named else {}
        return {}

    def _tensor(self, value: object) -> "dict[str, Any] | None":
        found = self._torch.described(value) if self._torch is not None else None
        kind: Any = type(value)
        if found is None and _type_name(kind) == "numpy.ndarray":
            array: Any = vars(sys.modules["numpy"])["ndarray"] if "numpy" in sys.modules else None
            if kind is array:
                shape = [int(size) for size in array.shape.__get__(value)]
                return {"type": "numpy.ndarray", "shape": shape, "dtype": array.dtype.__get__(value).str}
        return found


def _progress() -> "dict[str, Any]":
    """The last step that the script has reported (``saferun.step``)."""
    module: Any = sys.modules.get("saferun.api.script.reported_progress")
    reported = vars(module)["_reported"] if module is not None else None
    if reported is None or reported.step < 0:
        return {}
    return {"step": reported.step, "metrics": {name: repr(value) for name, value in reported.metrics.items()}}


def _host_memory() -> "dict[str, Any]":
    lines = (line.partition(b":") for line in _content("/proc/self/status", _MOST_STATUS).split(b"\n"))
    sizes = {name: int(value.split()[0]) << 10 for name, _, value in lines if name in {b"VmRSS", b"VmHWM"}}
    return {"memory": {"rss_bytes": sizes[b"VmRSS"], "peak_rss_bytes": sizes[b"VmHWM"]}}


def described(
    error: BaseException,
    thread: str = "",
    outer: "TracebackType | None" = None,
    *,
    is_secret: "Callable[[str], bool]",
    as_json: "Callable[[object], str]",
    uncaught: "bool | None" = None,
    calls: "Callable[[], list[dict[str, Any]]] | None" = None,
) -> bytes:
    """The record as JSON. What is too long loses frames of all but the first exception, calls, then locals.

    Args:
        error: the exception.
        thread: the name of the thread that it has ended; empty: the main thread.
        outer: its traceback where it has none itself.
        is_secret: whether the number of a name is left out (``saferun_written.py``).
        as_json: likewise.
        uncaught: whether it ends the program; None: that is not known.
        calls: the last calls of this thread (``saferun_rings.py``); None: none are recorded.
    """
    last: list[dict[str, Any]] = _tried([], calls) if calls is not None else []
    record = _Description(is_secret).of(error, thread, outer)
    if uncaught is not None:
        record["uncaught"] = uncaught
    if last:
        record["last_calls"] = last
    content = as_json(record)
    rows = record["exceptions"]
    frames = [frame for row in rows for frame in row.get("frames", ())]
    leaves = ((rows[1:], "frames"), ([record], "last_calls"), (frames[:-_MOST_ITEMS], "locals"), (rows, "frames"))
    for parts, name in leaves:
        if len(content) > _LONGEST_RECORD:
            for part in parts:
                part.pop(name, None)
            content = as_json(record)
    return content.encode("ascii") + b"\n"
