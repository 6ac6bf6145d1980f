"""Single calls: whose code they are, and what they are called in a report. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.job_evidence import Frame

# Where the interpreter's own modules and installed packages lie, on every distribution that is known to us.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = LazyPattern(r"/lib(?:32|64)?/(?:python|pypy)\d|/python3\d+\.zip/|/Modules/\w+\.c$")
# A torch that runs from its source tree lies in no site-packages.
_TORCH = LazyPattern(
    r"/torch/(?:_\w+|autograd|backends|cuda|distributed|fx|jit|multiprocessing|nn|optim|serialization|storage|utils)"
    r"(?:/|\.py$)"
)
_GENERATED = LazyPattern(r"/torchinductor_\w+/|/\.triton/")
# A native call of which the line is known looks like one of Python's but for its file.
_NATIVE_SOURCE = (".c", ".h", ".cc", ".hh", ".cpp", ".hpp", ".cxx", ".cu", ".cuh", ".inl", ".so", ".rs", ".S")
_OUR_HOOK = "/saferun/inject/"
_ERROR_HANDLER, _RECORD = "/elastic/multiprocessing/errors/error_handler.py", "record_exception"
_PATH_PARTS_OF_PACKAGES = ("__init__.py", "__main__.py")

_ADDRESS = LazyPattern(r"(?:0x[0-9a-fA-F]+|\?*)$")
_LAMBDA = LazyPattern(r"\{lambda[^{}]*\}(?:#\d+)?")
_CLONE = LazyPattern(r"\[clone [^\]]*\]|\.(?:constprop|part|isra|cold|lto_priv)[.\d]*")
_QUALIFIERS = LazyPattern(r"\b(?:const|volatile|noexcept|static|virtual)\b|&+$")
_ANONYMOUS = "(anonymous namespace)"
_LONGEST_NATIVE = 200
_OPERATOR_CALL = "operator()"


class UserCode:
    """Distinguishes the user's own code from torch, other packages and the interpreter.

    What lies below ``site-packages`` is a library, but for the package that the job itself was started from.

    Args:
        script: the path of the script, or the name of the module with ``-m``; empty where unknown.
        cwd: the ranks' working directory; empty where unknown.
    """

    def __init__(self, script: str = "", cwd: str = "") -> None:
        self.script = script
        self._own = _own_paths(script, cwd)
        self._owned: dict[str, bool] = {}

    def owns(self, frame: Frame) -> bool:
        """Whether a call is the user's own."""
        if is_native(frame):
            return False
        file = frame.file
        owned = self._owned.get(file)
        if owned is None:
            owned = self._owned[file] = self._owns_file(file)
        return owned

    def _owns_file(self, file: str) -> bool:
        if not file or file.startswith("<"):
            return False
        if any(directory in file for directory in self._own):
            return True
        if any(directory in file for directory in _INSTALLED) or _OUR_HOOK in file:
            return False
        return not (_STANDARD_LIBRARY.search(file) or _TORCH.search(file) or _GENERATED.search(file))


def _own_paths(script: str, cwd: str) -> tuple[str, ...]:
    """Parts of paths that are the user's wherever they lie."""
    if not script:
        return ()
    if "/" not in script and not script.endswith(".py"):
        # A module: its package, unless it is a launcher of torch's.
        package = script.partition(".")[0]
        return () if package == "torch" else tuple(f"{directory}{package}/" for directory in _INSTALLED)
    path = script if script.startswith("/") else f"{cwd.rstrip('/')}/{script}"
    for directory in _INSTALLED:
        before, found, below = path.partition(directory)
        package, slash, _ = below.partition("/")
        if found and slash and package != "torch":
            return (f"{before}{directory}{package}{slash}",)
    return (path,)


def is_native(frame: Frame) -> bool:
    """Whether a call is not one of Python's."""
    return frame.native or frame.file.endswith(_NATIVE_SOURCE)


class Calls:
    """A set of Python calls.

    Args:
        rows: the end of the file's name with its last part whole, and the functions; no functions: all of the file.
    """

    def __init__(self, *rows: tuple[str, tuple[str, ...]]) -> None:
        self._rows: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for end, functions in rows:
            self._rows.setdefault(end.rpartition("/")[2], []).append((end, functions))

    def __contains__(self, frame: Frame) -> bool:
        rows = self._rows.get(frame.file.rpartition("/")[2])
        return rows is not None and any(
            frame.file.endswith(end) and (not functions or last_name(frame.function) in functions)
            for end, functions in rows
        )


def last_name(function: str) -> str:
    """``wait`` of ``Condition.wait``; ``wrapper`` of ``outer.<locals>.wrapper``.

    Some tools write qualified names and some do not.
    """
    return function.rpartition(".")[2]


def file_name(file: str) -> str:
    """``train.py`` of a path; ``models/__init__.py`` where the name alone is not enough."""
    head, _, name = file.rpartition("/")
    if name in _PATH_PARTS_OF_PACKAGES and head:
        return f"{head.rpartition('/')[2]}/{name}"
    return name


def line_text(frame: Frame) -> str:
    """``train.py:52``."""
    name = file_name(frame.file)
    return f"{name}:{frame.line}" if frame.line > 0 else name


def writes_error_file(frames: Iterable[Frame]) -> bool:
    """Whether these calls are in torch's ``@record``, which writes what has ended the process before."""
    return any(frame.function == _RECORD and frame.file.endswith(_ERROR_HANDLER) for frame in frames)


def location_text(frame: Frame | None) -> str:
    """``train.py:52 in step``; empty for None."""
    if frame is None:
        return ""
    function = last_name(frame.function)
    where = line_text(frame)
    # At the top level of a script there is no function to be named.
    return where if function in {"", "<module>"} else f"{where} in {function}"


def is_nameless(frame: Frame) -> bool:
    """Whether a native frame is an address without a name."""
    return is_native(frame) and _ADDRESS.match(frame.function.strip()) is not None


@lru_cache(maxsize=8192)
def native_name(function: str) -> str:
    """A demangled name without template arguments, parameters and result.

    ``std::vector<int, std::allocator<int> >::push_back(int&&)`` becomes ``std::vector::push_back``.
    """
    function = function.partition("@")[0] or function
    if not any(sign in function for sign in "<({["):
        return _CLONE.sub("", function)[:_LONGEST_NATIVE]
    text = _CLONE.sub("", function.replace(_ANONYMOUS + "::", "").replace(_ANONYMOUS, ""))
    text = _LAMBDA.sub("{lambda}", text)
    is_call_operator = _OPERATOR_CALL in text
    text = text.replace(_OPERATOR_CALL, "operator\0")
    text = _without_arguments(text)
    if is_call_operator:
        text = text.replace("operator\0", _OPERATOR_CALL)
    text = _QUALIFIERS.sub("", text).strip()
    # What stands before the last blank is the result.
    name = text.rpartition(" ")[2] if not text.startswith("operator") else text
    name = name.replace("::{lambda}", "").strip(":*& ")
    return (name or function)[:_LONGEST_NATIVE]


def _without_arguments(text: str) -> str:
    """A name without what stands in angle brackets and, after it, in parentheses."""
    kept: list[str] = []
    depth = 0
    before = ""
    for index, char in enumerate(text):
        if char in "<>" and (before == "-" or _is_of_operator(text, index)):
            if depth == 0:
                kept.append(char)
        elif char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(depth - 1, 0)
        elif depth == 0:
            kept.append(char)
        before = char
    return "".join(kept)


def _is_of_operator(text: str, index: int) -> bool:
    """Whether a sign is the name of an operator: ``operator<``, ``operator->``."""
    start = index
    while start > 0 and text[start - 1] in "<>-=":
        start -= 1
    return text[:start].endswith("operator")
