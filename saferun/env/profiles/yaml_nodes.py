"""Untrusted YAML, parsed in bounded time and memory into a plain tree with line numbers.

The tree is built from the parser's events, and nothing is ever constructed from a tag. Aliases and anchors are refused
(a few of them expand to gigabytes), as are deep nesting, large files, and everything that is not a regular file.

Source: YAML 1.2.2 specification, https://yaml.org/spec/1.2.2/; PyYAML's events.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Literal

from saferun.env.profiles.quoting import quoted
from saferun.errors import UsageError
from saferun.model import Value

if TYPE_CHECKING:
    from typing import Any

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 12
MAX_NODES = 20_000
_TOO_DEEP = (f"nested more than {MAX_DEPTH} deep", "no setting is nested that deep")

Kind = Literal["scalar", "mapping", "sequence"]

_NULLS = ("", "~", "null", "Null", "NULL")
_PLAIN_TAGS = {"!": "", "tag:yaml.org,2002:str": "", "tag:yaml.org,2002:map": "", "tag:yaml.org,2002:seq": ""}
_STARTS: dict[str, Kind] = {"MappingStartEvent": "mapping", "SequenceStartEvent": "sequence"}
_KIND_TEXTS = {"scalar": "a single value", "mapping": "a mapping (name: value)", "sequence": "a list"}


class Node(Value):
    """A piece of a YAML file.

    ``text`` is a scalar as written: ``2000``, ``on`` and ``010`` stay what they are. ``pairs`` are a mapping's,
    ``items`` a sequence's. ``tag`` is an explicit tag that means something to the reader (``!force``), else empty.
    Lines and columns count from 1.
    """

    kind: Kind
    path: str
    line: int
    column: int
    tag: str = ""
    text: str = ""
    is_null: bool = False
    pairs: tuple[tuple[Node, Node], ...] = ()
    items: tuple[Node, ...] = ()

    @property
    def description(self) -> str:
        """The kind of node, for messages."""
        return "nothing" if self.is_null else _KIND_TEXTS[self.kind]


def bad(node: Node, what: str, hint: str) -> UsageError:
    """An error at the position of a node."""
    return UsageError(f"{node.path}:{node.line}:{node.column}: {what}", hint)


def read_yaml(path: str, *, shown: str | None = None, fd: int | None = None) -> Node | None:
    """Parse a YAML file; None if it is empty.

    Args:
        path: the file.
        shown: the name of the file in messages, by default ``path``.
        fd: the file, if it is already open; it is closed.

    Raises:
        UsageError: the file cannot be read, is not YAML, or exceeds a limit.
    """
    return parse_yaml(_read_text(path, shown or path, fd), shown or path)


def parse_yaml(text: str, path: str) -> Node | None:
    """Parse YAML text; ``path`` is for messages. See ``read_yaml``."""
    import yaml

    # The parser in C is many times faster, if PyYAML was built with it.
    loader: Any = getattr(yaml, "CSafeLoader", None) or yaml.SafeLoader
    try:
        tree = _Tree(path)
        for event in yaml.parse(text, Loader=loader):
            tree.grow(event)
    except UsageError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else path
        problem = error.problem or error.context or "malformed"
        if "nesting depth" in problem:  # libyaml has a bound of its own, and reads ahead of _Tree
            raise UsageError(f"{where}: {_TOO_DEEP[0]}", _TOO_DEEP[1]) from None
        raise UsageError(f"{where}: not YAML: {problem}", "correct the file at that position") from None
    except Exception as error:  # the parser's own bugs on malformed input: ValueError, OverflowError, …
        raise UsageError(f"{path}: not YAML: {quoted(str(error), 200)}", "correct the file") from None
    return None if tree.root is None or tree.root.is_null else tree.root


def _read_text(path: str, shown: str, fd: int | None) -> str:
    try:
        if fd is None:
            # Without O_NONBLOCK opening a FIFO would wait for a writer forever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UsageError(f"{shown} is not a regular file", "give a YAML file")
            content = _read_at_most(fd, MAX_FILE_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror or error}", "give a YAML file that can be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(
            f"{shown} is larger than {MAX_FILE_BYTES // 1024} KiB", "is it the right file? Split it if it really is"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{shown}:{line}: not text in UTF-8", "save the file as UTF-8 text") from None


def _read_at_most(fd: int, size_bytes: int) -> bytes:
    parts: list[bytes] = []
    while size_bytes > 0 and (part := os.read(fd, size_bytes)):
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


class _Open(Value):
    """A mapping or sequence that has not ended yet; a mapping's ``children`` are key, value, key and so on."""

    start: Node
    children: list[Node]


class _Tree:
    """A tree that is built from the parser's events, without recursion."""

    def __init__(self, path: str) -> None:
        self.root: Node | None = None
        self._path = path
        self._open: list[_Open] = []
        self._documents = 0
        self._nodes = 0

    def grow(self, event: Any) -> None:  # noqa: ANN401 - PyYAML's events have no common typed base
        """Process the next event; raise UsageError if it is not allowed."""
        kind = type(event).__name__
        if kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            raise bad(_at(event, self._path, "scalar"), "anchors and aliases are not allowed", "write the value out")
        if kind == "DocumentStartEvent":
            self._documents += 1
            if self._documents > 1:
                raise bad(_at(event, self._path, "scalar"), "a second document begins here", "keep one in a file")
        elif kind in _STARTS:
            start = _at(event, self._path, _STARTS[kind])
            if len(self._open) >= MAX_DEPTH:
                raise bad(start, *_TOO_DEEP)
            self._open.append(_Open(start, []))
        elif kind == "ScalarEvent":
            self._add(_scalar(event, self._path))
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._add(_closed(self._open.pop()))

    def _add(self, node: Node) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise bad(node, f"more than {MAX_NODES} values", "is it the right file?")
        if self._open:
            self._open[-1].children.append(node)
        else:
            self.root = node


def _at(event: Any, path: str, kind: Kind) -> Node:  # noqa: ANN401 - as _Tree.grow
    mark = event.start_mark
    node = Node(kind, path, mark.line + 1, mark.column + 1)
    tag = getattr(event, "tag", None)
    if not isinstance(tag, str):
        return node
    if tag in _PLAIN_TAGS:
        return node
    if tag != "!force":
        hint = "the only tag is !force, which lets a value replace the user's own"
        raise bad(node, f"unknown tag {quoted(tag.replace('tag:yaml.org,2002:', '!!'))}", hint)
    return node._replace(tag=tag)


def _scalar(event: Any, path: str) -> Node:  # noqa: ANN401 - as _Tree.grow
    # Plain scalars have the style None in Python's parser and "" in C's.
    is_null = not event.style and event.value in _NULLS and event.tag in (None, "!force")
    return _at(event, path, "scalar")._replace(text=event.value, is_null=is_null)


def _closed(opened: _Open) -> Node:
    if opened.start.kind == "sequence":
        return opened.start._replace(items=tuple(opened.children))
    return opened.start._replace(pairs=_pairs(opened.children))


def _pairs(children: list[Node]) -> tuple[tuple[Node, Node], ...]:
    pairs = tuple(zip(children[::2], children[1::2], strict=True))
    first: dict[str, Node] = {}
    for key, _ in pairs:
        if key.kind != "scalar" or key.is_null:
            raise bad(key, f"{key.description} cannot be a name", "names stand before a colon, in one piece")
        if key.tag:
            raise bad(key, f"the tag {key.tag} belongs before a value", f"write {key.text}: {key.tag} VALUE")
        if key.text in first:
            earlier = first[key.text].line
            raise bad(key, f"{quoted(key.text)} is here a second time", f"it stands in line {earlier} already")
        first[key.text] = key
    return pairs
