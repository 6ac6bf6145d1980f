"""Which backend of torch.distributed the ranks are certain to use, as far as their script says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saferun.linux.small_files import read_at_once
from saferun.preflight.checks.context import CheckContext

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable

GLOO, NCCL, UNKNOWN = "gloo", "nccl", ""

_CALL = "init_process_group"
_MOST_BYTES = 1 << 20
_MOST_FUNCTIONS = 8  # within each other
# A script that names one of these may choose its interface itself.
_CHOOSES = "SOCKET_IFNAME"
# Below /dev: Trainium, newer TPUs (which are handed through), and others that torch has a backend of its own for.
_MORE_DEVICES = ("neuron", "vfio", "cambricon", "mtgpu", "rbln", "tenstorrent", "xpu", "npu")
# Arguments with which all ranks of the launch still meet: whatever they are, and with what is written here.
_OF_ALL_RANKS = frozenset({"backend", "timeout", "device_id"})
_WRITTEN = {
    "init_method": frozenset({"None", "'env://'"}),
    "pg_options": frozenset({"None"}),
    "rank": frozenset({"int(os.environ['RANK'])", "int(environ['RANK'])"}),
    "world_size": frozenset({"int(os.environ['WORLD_SIZE'])", "int(environ['WORLD_SIZE'])"}),
}
# Variables that a script may not set: they decide who meets where, by which interface, or which devices are seen.
_DECIDING = (
    *("NCCL", "RCCL", "GLOO", "TORCH", "MASTER_", "PET_", "SAFERUN_", "UCX_", "FI_", "LD_"),
    *("CUDA_", "HIP_", "ROCR_", "HSA_", "GPU_DEVICE_ORDINAL"),
    *("HOSTALIASES", "LOCALDOMAIN", "RES_OPTIONS", "USE_LIBUV"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "NODE_RANK"),
)
_ENDS = frozenset({"exit", "_exit", "quit", "abort", "kill", "execv", "execve", "execvp", "execvpe"})
_RUNS_MORE = frozenset({"import_module", "__import__", "exec", "eval", "run_path", "run_module", "load_dotenv"})
# These and the standard library set no variable of an interface. Any other module may, a file beside the script most of
# all.
_QUIET_MODULES = frozenset({"saferun", "torch", "torchvision", "torchaudio", "numpy"})
_PRINT_AND_EXIT = frozenset({"-h", "--help", "--version"})


def known_backend(context: CheckContext) -> str:
    """``gloo`` or ``nccl`` where the ranks are certain to connect to each other with it, else ``UNKNOWN``.

    It is certain where several ranks run a Python script whose way leads straight to
    ``init_process_group("gloo")``: no condition, loop, handler or module of its own before it, no word of an interface
    of its own, no other rank, size, store or meeting point than those of the launch. Nor may a tool or a wrapper stand
    between saferun and Python, which could set variables or enter a container.
    Gloo is only believed where the host shows no accelerator of any vendor, NCCL only where it shows NVIDIA's or AMD's.
    Everything else (``python -m``, another framework, MPI, TPUs, a backend from an argument) is unknown: nothing may be
    refused because of it.
    """
    if not context.script or (context.nproc < 2 and not context.spans_hosts):  # noqa: PLR2004 - several
        return UNKNOWN
    if _PRINT_AND_EXIT.intersection(context.script_args) or context.is_wrapped or "PYTHON_EXEC" in context.environ:
        return UNKNOWN
    text = _read(context.script)
    if _CALL not in text or _CHOOSES in text:
        return UNKNOWN
    backend = backend_of(text)
    if backend == NCCL:
        return NCCL if context.vendor != "none" else UNKNOWN
    if backend != GLOO or context.vendor != "none":
        return UNKNOWN
    return UNKNOWN if _shows_accelerators(context) else GLOO


def _shows_accelerators(context: CheckContext) -> bool:
    import os

    from saferun.linux.gpus import shows_accelerators

    dev = context.path("dev")
    try:
        if any(name.startswith(_MORE_DEVICES) for name in os.listdir(dev)):
            return True
    except OSError:
        return True
    return shows_accelerators(context.path("sys"), dev_root=dev)


def backend_of(text: str) -> str:
    """The backend that a script starts on its straight way; ``UNKNOWN`` where that is not certain. Pure."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return UNKNOWN
    if _changes_environment(module):
        return UNKNOWN
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    return _follow(module.body, functions, _MOST_FUNCTIONS) or UNKNOWN


def _follow(body: list[ast.stmt], functions: dict[str, ast.FunctionDef], depth: int) -> str | None:
    """The backend; empty: it is left open; None: these statements come to their end without any."""
    import ast

    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Pass)):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if not _is_quiet(node):
                return UNKNOWN
            continue
        if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)):
            found = _called(node, functions, depth)
        elif isinstance(node, ast.With) or (isinstance(node, ast.If) and _is_main(node.test)):
            found = _follow(node.body, functions, depth)
        else:
            # A condition, a loop, a return: whether the way goes on behind it is not certain.
            found = UNKNOWN
        if found is not None:
            return found
    return None


def _called(node: ast.stmt, functions: dict[str, ast.FunctionDef], depth: int) -> str | None:
    import ast

    unsure = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for call in ast.walk(node):
        if isinstance(call, unsure):
            return UNKNOWN
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name == _CALL and name not in functions:
            if not _is_of_all_ranks(call):
                return UNKNOWN
            given = call.args[0] if call.args else None
            given = next((one.value for one in call.keywords if one.arg == "backend"), given)
            value = given.value if isinstance(given, ast.Constant) else None
            return value.lower() if isinstance(value, str) and value.lower() in {GLOO, NCCL} else UNKNOWN
        if name in _ENDS or name in _RUNS_MORE:
            return UNKNOWN
        if name in functions and isinstance(call.func, ast.Name):
            found = _follow(functions[name].body, functions, depth - 1) if depth else UNKNOWN
            if found is not None:
                return found
    return None


def _is_of_all_ranks(call: ast.Call) -> bool:
    """Whether the ranks of the launch meet by this call, and no fewer.

    With a rank, a size, a store or a file of its own it may make a group that never leaves the host. The rank and the
    size that the launch sets are none of its own.
    """
    import ast

    def is_known(name: str | None, value: ast.expr) -> bool:
        # torch ignores the name of the group.
        is_ignored = name == "group_name" and isinstance(value, ast.Constant)
        return name in _OF_ALL_RANKS or is_ignored or ast.unparse(value) in _WRITTEN.get(name or "", ())

    return (
        len(call.args) <= 2  # noqa: PLR2004 - the backend and the method
        and all(is_known("init_method", value) for value in call.args[1:])
        and all(is_known(one.arg, one.value) for one in call.keywords)
    )


def _changes_environment(module: ast.Module) -> bool:
    """Whether a script may set a variable that counts.

    It does if it calls ``putenv``, or uses ``os.environ`` for anything but to read single ones, to check whether they
    are there, to print all, or to set one that stands there by its name and is none of ``_DECIDING``.
    Where it does so is not asked: a method or a base class may do it before the ranks connect.
    """
    import ast

    def is_environ(node: ast.AST) -> bool:
        return _last_name(node) in {"environ", "environb"}

    harmless = {id(used) for node in ast.walk(module) for used in _used_harmlessly(node)}
    return any(
        (is_environ(node) and id(node) not in harmless) or _last_name(node) in {"putenv", "unsetenv"}
        for node in ast.walk(module)
    )


def _used_harmlessly(node: ast.AST) -> Iterable[ast.expr]:
    """Those parts of an expression that it leaves as they are if they are the environment."""
    import ast

    if isinstance(node, ast.Subscript):
        if isinstance(node.ctx, ast.Load) or (isinstance(node.ctx, ast.Store) and _is_quiet_name(node.slice)):
            yield node.value
    elif isinstance(node, ast.Attribute) and node.attr == "get":
        yield node.value
    elif isinstance(node, ast.Compare):
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, (ast.In, ast.NotIn)):
                yield right
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        yield from node.args


def _is_quiet_name(key: ast.expr) -> bool:
    import ast

    name = key.value if isinstance(key, ast.Constant) else None
    return isinstance(name, str) and not name.startswith(_DECIDING)


def _last_name(node: ast.AST) -> str:
    """``environ`` of ``os.environ`` and of ``environ``; empty: it is neither."""
    import ast

    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_quiet(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether only modules are imported that leave the environment as it is."""
    import ast
    import sys

    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif node.level or node.module is None:
        return False
    else:
        modules = [node.module]
    return all(name.partition(".")[0] in _QUIET_MODULES | sys.stdlib_module_names for name in modules)


def _is_main(test: ast.expr) -> bool:
    import ast

    return ast.unparse(test) in {"__name__ == '__main__'", "'__main__' == __name__"}


def _read(path: str) -> str:
    content = read_at_once(path, _MOST_BYTES + 1, follow=True)
    return content.decode(errors="replace") if len(content) <= _MOST_BYTES else ""
