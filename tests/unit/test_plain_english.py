"""What users read is in the words of the field, and names only options that there are."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from saferun.cli.options import OPTIONS
from tests.syntax import no_collector, parsed

_ROOT = Path(__file__).parents[2]
_PAGES = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
_MORE_PAGES = tuple(_ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))
_MODULES = tuple(sorted((_ROOT / "saferun").rglob("*.py")))
_SCHEMAS = tuple(sorted((_ROOT / "saferun").rglob("*.schema.json")))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Those of all sources are looked through."""
    with no_collector():
        yield


# ---------------------------------------------------------------------------------------------------------- the words

STANDARD = {
    r"doors?": "probe endpoint",
    r"cards?": "host info",
    r"knock(?:s|ed|ing)?": "liveness probe",
    r"on the spot": "in a busy loop",
    r"burn(?:s|ing)?": "uses CPU, busy-loops",
    r"bereft": "collateral",
    r"laid (?:together|over)": "merged, applied",
    r"(?:is|are|was|were|being) looked at": "is captured, is checked",
    r"nobody looks": "checks are skipped",
    r"nobody|somebody|anybody": "no user, no process, another process",
    r"(?:what|which) (?:had |has )?started": "parent process",
    r"looked into": "captured, inspected",
    r"look whether": "check whether",
    r"look who": "see what, find what",
    r"is heard of": "no heartbeat is received from",
    r"(?:goes|went) away": "exits, exited",
    r"told": "reported, sent",
    r"anew": "again",
    r"by chance": "random",
    r"time-outs?": "timeout",
    r"the (?:attempt|one) before": "the previous attempt",
    r"processor time": "CPU time",
    r"sign of life": "heartbeat",
    r"passing reason": "transient reason",
    r"(?<!-)leftovers": "orphaned processes",
    r"a suspicion": "suspected",
    r"nothing is said|says nothing": "does not respond, no data is received",
    r"not to be woken": "uninterruptible sleep",
    r"what the hosts tell each other": "messages between hosts",
    r"for \w+'s sake": "for compatibility",
}
"""Words of our own, and what the field says."""

ALLOWED = {
    "saferun/captures/gpu_amd.py": {"card"},  # as rocm-smi calls it
}
"""What is to go as well, by file; an entry that nothing needs any more has to go with it."""

_WORDS = re.compile(rf"\b({'|'.join(STANDARD)})\b", re.IGNORECASE)


def words_of_our_own(text: str) -> set[str]:
    """Those of a text that have a standard term."""
    return {found.lower() for found in _WORDS.findall(text)}


@cache
def strings(module: Path) -> tuple[tuple[int, str], ...]:
    """The texts in a module that may reach a user, with their lines: no docstrings, and none of a single word."""
    tree = parsed(module)
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return tuple(
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in comments
        and len(node.value.split()) > 1
    )


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


def test_messages_and_help_are_in_the_words_of_the_field() -> None:
    """What a reader has to translate back is not understood at first sight."""
    found = [
        f"{_name(module)}:{line}: {word!r} (say {_standard(word)!r}): {text!r}"
        for module in _MODULES
        for line, text in strings(module)
        for word in words_of_our_own(text) - ALLOWED.get(_name(module), set())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [*_PAGES, *_MORE_PAGES, *_SCHEMAS], ids=_name)
def test_documents_are_in_the_words_of_the_field(page: Path) -> None:
    """Likewise."""
    # Names of tests are no prose.
    prose = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    found = words_of_our_own(prose) - ALLOWED.get(_name(page), set())
    assert not found, {word: _standard(word) for word in found}


def test_no_exception_is_left_that_nothing_needs() -> None:
    """The list only gets shorter."""
    for name, allowed in ALLOWED.items():
        path = _ROOT / name
        assert path.exists(), name
        if path.suffix == ".py":
            text = "\n".join(text for _, text in strings(path))
        else:
            text = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))
        assert allowed <= words_of_our_own(text), f"{name}: {allowed - words_of_our_own(text)} can go from the list"


def _standard(word: str) -> str:
    return next(term for pattern, term in STANDARD.items() if re.fullmatch(pattern, word, re.IGNORECASE))


# --------------------------------------------------------------------------------------------------- comments and names

ROOMS = (
    "api",
    "launch",
    "supervisor",
    "watchdog",
    "captures",
    "cli",
    "cluster",
    "console",
    "coordinator",
    "diagnosis",
    "env",
    "files",
    "preflight",
    "report",
    "ctl",
    "inject",
    "linux",
    "text",
    "evidence",
    "model.py",
    "config.py",
    "errors.py",
)
"""Whose comments, docstrings and names are read, too."""
_IN_NAMES = re.compile(
    r"(?:^|_)(?:anew|anybody|bereft|everybody|knock|look|looks|looked|nobody|said|say|says|sight|somebody|standing|tell"
    r"|told|trouble|troubles|whoever|words)(?:_|$)"
)


def test_every_room_is_read() -> None:
    """A new one would escape the rules below."""
    package = _ROOT / "saferun"
    folders = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert set(ROOMS) == folders | files


def _sources() -> Iterator[Path]:
    for room in ROOMS:
        path = _ROOT / "saferun" / room
        yield from sorted(path.rglob("*.py")) if path.is_dir() else (path,)


class Tokens(NamedTuple):
    """What is read of a module's tokens."""

    comments: tuple[tuple[int, str], ...]
    names: frozenset[str]


@cache
def _tokens(module: Path) -> Tokens:
    """The comments of a module, with their lines, and all names in it."""
    found: list[tuple[int, str]] = []
    names: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string))
        elif token.type == tokenize.NAME:
            names.add(token.string)
    return Tokens(tuple(found), frozenset(names))


def comments(module: Path) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a module, with their lines; without what they quote."""
    yield from _tokens(module).comments
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.sub(r"``[^`]*``", "", node.value.value)


def test_comments_are_in_the_words_of_the_field() -> None:
    """Who reads the code is a reader as well."""
    found = [
        f"{_name(module)}:{line}: {words_of_our_own(text)}"
        for module in _sources()
        for line, text in comments(module)
        if words_of_our_own(text)
    ]
    assert not found, "\n".join(found)


def test_names_are_in_the_words_of_the_field() -> None:
    """A name is read more often than any comment."""
    found = {
        f"{_name(module)}: {name}"
        for module in _sources()
        for name in _tokens(module).names
        if _IN_NAMES.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the port is in use by the attempt before", {"the attempt before"}),
        ("Nobody answers; the time-out is 3 s", {"nobody", "time-out"}),
        ("a network card and a door", {"card", "door"}),
        ("no discards, no doorstep, --leftovers wait, timeout", set()),
    ],
)
def test_words_of_our_own_are_found(text: str, found: set[str]) -> None:
    """A test of words that overlooks them would be worth nothing."""
    assert words_of_our_own(text) == found


# ---------------------------------------------------------------------------------------------------------- the options

_FLAG = re.compile(r"(?<![\w/.-])--([a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)(\*?)(?![\w-])")
OTHER_TOOLS = {
    "cap-add": "docker run",
    "bind-to": "mpirun",
    "bind_cores_to_rank": "deepspeed",
    "cpus": "docker run",
    "cpus-per-task": "srun",
    "cpuset-cpus": "docker run",
    "gpu-reset": "nvidia-smi",
    "gpureset": "rocm-smi",
    "gpus-per-node": "srun",
    "gpus-per-task": "srun",
    "how": "examples/crash.py, examples/hang.py",
    "exclude": "srun",
    "include": "deepspeed",
    "ipc": "docker run",
    "kill-on-bad-exit": "srun",
    "launcher": "deepspeed",
    "local_rank": "scripts for deepspeed",
    "lr": "any training script",
    "map-by": "mpirun",
    "mca": "mpirun",
    "mem": "srun",
    "memory": "docker run",
    "missing": "python -m tests.torch.record",
    "mount-proc": "unshare",
    "mpi": "srun",
    "no_local_rank": "deepspeed",
    "no-kill": "sbatch",
    "nodes": "srun",
    "ntasks-per-node": "srun",
    "num_gpus": "deepspeed",
    "num_nodes": "deepspeed",
    "pid": "unshare",
    "pids-limit": "docker run",
    "proc": "bwrap",
    "shm-size": "docker run",
    "slurm": "python -m tests.cluster up",
    "sort": "ps",
    "ulimit": "docker run",
    "args": "gdb",
    "interleave": "numactl",
    "log-file": "valgrind",
    "sys-trace": "rocprofv3",
    "target-processes": "ncu",
    "unshare-pid": "bwrap",
}
"""Options of other programs that hints and documents name, with whose they are."""


@cache
def _own_flags() -> frozenset[str]:
    """Those of saferun and saferunctl; saferun has all of torchrun."""
    flags = {flag[2:] for option in OPTIONS for flag in option.flags if flag.startswith("--")}
    flags |= {"help", "help-all", "version"}
    for module in (_ROOT / "saferun" / "ctl").glob("*.py"):
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
                flags |= {name[2:] for name in names if name.startswith("--")}
    return frozenset(flags)


def unknown_flags(text: str) -> Iterator[str]:
    """Options in a text that nobody has; ``--rdzv-*`` stands for all that begin so."""
    known = _own_flags()
    for name, star in _FLAG.findall(text):
        is_known = any(flag.startswith(name) for flag in known) if star else name in known
        if not is_known and name not in OTHER_TOOLS:
            yield f"--{name}"


def test_every_option_in_a_message_exists() -> None:
    """A hint that cannot be followed is worse than none."""
    found = [
        f"{_name(module)}:{line}: {flag}"
        for module in _MODULES
        for line, text in strings(module)
        for flag in unknown_flags(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [*_PAGES, *_MORE_PAGES], ids=_name)
def test_every_option_in_a_document_exists(page: Path) -> None:
    """Likewise."""
    assert set(unknown_flags(page.read_text(encoding="utf-8"))) == set()


def test_options_that_do_not_exist_are_found() -> None:
    """With the option that a hint once named."""
    text = "pass --no-stop-with-parent, --stop-with-parent off, --rdzv-* or --rdzv_id; see /usr/--x and ----"
    assert list(unknown_flags(text)) == ["--no-stop-with-parent"]


def test_the_list_of_other_tools_holds_nothing_else() -> None:
    """What is ours by now, or named nowhere, does not belong there."""
    everything = "\n".join(
        [text for module in _MODULES for _, text in strings(module)]
        + [page.read_text(encoding="utf-8") for page in (*_PAGES, _ROOT / "CONTRIBUTING.md", _ROOT / "ARCHITECTURE.md")]
    )
    named = {name for name, _ in _FLAG.findall(everything)}
    assert not set(OTHER_TOOLS) & _own_flags()
    assert set(OTHER_TOOLS) <= named
