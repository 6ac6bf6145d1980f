"""Env profiles from hands that mean no good, or slipped: a clear error, in bounded time and memory."""

from __future__ import annotations

import os
import random
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from saferun.env.profiles import load_profiles, resolve
from saferun.env.profiles.profile_values import Profile
from saferun.env.profiles.validation import profile_from_node
from saferun.env.profiles.yaml_nodes import MAX_DEPTH, MAX_FILE_BYTES, MAX_NODES, parse_yaml, read_yaml
from saferun.errors import UsageError
from tests.unit.operations import operations

ROOM = MAX_FILE_BYTES - 100
# For each letter; twice what the slowest takes, with the parser in Python.
OPERATIONS = 25
MEMORY_LIMIT_BYTES = 200 * 1024 * 1024


@pytest.fixture(params=["parser in C", pytest.param("parser in Python", marks=pytest.mark.slow)])
def parser(request: pytest.FixtureRequest) -> Iterator[str]:
    """PyYAML's two parsers: wheels have both, builds from source often only the slow one."""
    name: str = request.param
    if name == "parser in Python":
        with mock.patch.object(yaml, "CSafeLoader", None):
            yield name
    else:
        assert yaml.__with_libyaml__
        yield name


def parsed(text: str) -> Profile | None:
    node = parse_yaml(text, "x.yaml")
    return None if node is None else profile_from_node("x", node)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.exit_code == 2
    shown = str(caught.value)
    assert shown.count("\n") == 1
    assert all(char.isprintable() for line in shown.split("\n") for char in line)
    assert len(shown) < 1000
    return caught.value.what


BOMB = """
a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]
b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]
c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]
d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]
e: &e [*d, *d, *d, *d, *d, *d, *d, *d, *d]
f: &f [*e, *e, *e, *e, *e, *e, *e, *e, *e]
g: &g [*f, *f, *f, *f, *f, *f, *f, *f, *f]
variables: {X: *g}
"""

LARGE = {
    "aliases": (BOMB, "x.yaml:2:4: anchors and aliases are not allowed"),
    "a cycle of aliases": ("variables: &v {X: *v}", "anchors and aliases are not allowed"),
    "merged keys": ("variables:\n  <<: {X: 1}", "'<<' cannot be the name"),
    "lists in lists": ("[" * ROOM, f"nested more than {MAX_DEPTH} deep"),
    "mappings in mappings": ("{a: " * (ROOM // 4), f"nested more than {MAX_DEPTH} deep"),
    "block lists in block lists": ("- " * (ROOM // 2), f"nested more than {MAX_DEPTH} deep"),
    "keys in keys": ("? " * (ROOM // 2), f"nested more than {MAX_DEPTH} deep"),
    "many variables": (
        "variables:\n" + "".join(f"  K{i}: v\n" for i in range(ROOM // 12)),
        f"more than {MAX_NODES} values",
    ),
    "a long list": ("extends: [" + "a," * (ROOM // 2 - 20) + "a]", f"more than {MAX_NODES} values"),
    "many documents": ("---\n" * (ROOM // 4), "a second document begins here"),
    "many anchors": ("&a " * (ROOM // 3), "x.yaml:"),
    "many tags": ("!a " * (ROOM // 3), "x.yaml:"),
    "many directives": ("%YAML 1.1\n" * (ROOM // 10), "not YAML"),
    "many colons": ("a: " * (ROOM // 3), "not YAML"),
    "quotes": ("'" * (ROOM - 1), "x.yaml:"),
    "a long key": ("a" * ROOM + ": 1", "x.yaml"),
    "a long value": ("variables: {X: " + "a" * (ROOM - 40) + "}", "the value holds more than 64 KiB"),
    "a long name": ("variables: {" + "A" * 1000 + ": 1}", "cannot be the name of an environment variable"),
    "an open flow": ("variables: {" + "[a," * 5 + "a" * 2000, "not YAML"),
    "escapes": ('variables: {X: "' + "\\U0010FFFF" * (ROOM // 10 - 10) + '"}', "more than 64 KiB"),
    "endless ranks": (
        "variables:\n  X:\n    ranks:\n      ? '" + "0," * (ROOM // 2 - 40) + "'\n      : 1",
        "names no ranks",
    ),
    "braces": ("variables: {X: '" + "{a" * 30_000 + "}'}", "unknown placeholder"),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("parser")
def test_what_is_built_to_hurt_is_refused_with_bounded_work(name: str) -> None:
    body, said = LARGE[name]
    assert len(body) <= MAX_FILE_BYTES
    said_of: list[str] = []
    assert operations(lambda: said_of.append(error_of(lambda: parsed(body)))) < 5000 + OPERATIONS * len(body)
    assert said in said_of[0]


HARMLESS = {
    "comments": "#\n" * (ROOM // 2),
    "blank lines": "\n" * ROOM,
    "spaces": " " * ROOM,
    "a long description": "description: " + "a " * (ROOM // 2 - 20),
    "a long block text": "description: |\n" + " a\n" * (ROOM // 3 - 10),
    "a text over many lines": "description:\n" + " a\n" * (ROOM // 3 - 10),
    "long escapes": 'description: "' + "\\u0061" * (ROOM // 6 - 10) + '"',
    "wide letters": "description: " + "\U0001f600" * (ROOM // 4 - 10),
    "many ranks": "variables:\n  X:\n    ranks:\n      ? '" + "0," * (ROOM // 2 - 40) + "0'\n      : 1",
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.usefixtures("parser")
def test_what_is_only_large_is_read_with_bounded_work(name: str) -> None:
    assert operations(lambda: parsed(HARMLESS[name])) < 5000 + OPERATIONS * len(HARMLESS[name])


@pytest.mark.parametrize("name", ["aliases", "lists in lists", "many variables", "a long list", "escapes"])
@pytest.mark.usefixtures("parser")
def test_what_is_built_to_hurt_takes_bounded_memory(name: str) -> None:
    tracemalloc.start()
    try:
        error_of(lambda: parsed(LARGE[name][0]))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MEMORY_LIMIT_BYTES


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte costs nothing on disk, and everything if it is read."""
    path = tmp_path / "a.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert f"larger than {MAX_FILE_BYTES // 1024} KiB" in error_of(lambda: read_yaml(str(path)))


def test_the_largest_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    body = "variables: {LAST: 1}"
    path.write_text("#" * (MAX_FILE_BYTES - len(body) - 1) + "\n" + body, encoding="utf-8")
    node = read_yaml(str(path))
    assert node is not None
    path.write_text("#" * (MAX_FILE_BYTES - len(body)) + "\n" + body, encoding="utf-8")
    assert "larger than" in error_of(lambda: read_yaml(str(path)))


def test_a_fifo_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    assert "is not a regular file" in error_of(lambda: read_yaml(str(tmp_path / "a.yaml")))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    assert "is not a regular file" in error_of(lambda: read_yaml(device))


def test_a_socket_and_a_directory_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.yaml"))
        assert "s.yaml: " in error_of(lambda: read_yaml(str(tmp_path / "s.yaml")))
    assert "is not a regular file" in error_of(lambda: read_yaml(str(tmp_path)))


def test_a_dangling_link_and_a_loop_of_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert "No such file" in error_of(lambda: read_yaml(str(tmp_path / "gone.yaml")))
    assert "symbolic links" in error_of(lambda: read_yaml(str(tmp_path / "loop.yaml")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 4, "not text in UTF-8"),
        ("variables: {X: 1}".encode("utf-16"), "not text in UTF-8"),
        (b"variables:\n  X: \xff\n", "a.yaml:2: not text in UTF-8"),
        (b"variables: {X: \0}", "not YAML"),
        (b"variables: {X: \x1b[2J}", "not YAML"),
        (b"\xed\xa0\x80", "not text in UTF-8"),
        (b"\x80\x03}q\x00.", "not text in UTF-8"),
    ],
)
@pytest.mark.usefixtures("parser")
def test_binary_content_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    assert said in error_of(lambda: read_yaml(str(path)))


@pytest.mark.usefixtures("parser")
def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfvariables: {X: 1}\r\n")
    node = read_yaml(str(path))
    assert node is not None
    assert profile_from_node("a", node).variables[0].value == "1"


def test_a_file_name_cannot_move_the_cursor(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2J\n"
    folder.mkdir()
    (folder / "a.yaml").write_text("variables: {X: ", encoding="utf-8")
    profiles = load_profiles([str(folder)])
    error_of(lambda: resolve(profiles, ["a"], vendor="any", versions={}, user_environ={}))


# ------------------------------------------------------------------------------------------------------ tags and values


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system",
        "!!python/object/new:os.system",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!binary",
        "!!timestamp",
        "!<tag:yaml.org,2002:python/object/apply:os.system>",
        "!include",
        "!env",
    ],
)
@pytest.mark.usefixtures("parser")
def test_a_tag_does_nothing_but_fail(tmp_path: Path, tag: str) -> None:
    witness = tmp_path / "ran"
    assert "unknown tag" in error_of(lambda: parsed(f"variables: {{X: {tag} ['touch {witness}']}}"))
    assert "unknown tag" in error_of(lambda: parsed(f"variables: {{X: {tag} 'touch {witness}'}}"))
    assert not witness.exists()


@pytest.mark.parametrize("tag", ["!!str", "!"])
@pytest.mark.usefixtures("parser")
def test_the_tags_of_plain_texts_are_harmless(tag: str) -> None:
    profile = parsed(f"variables: {{X: {tag} 1}}")
    assert profile is not None
    assert profile.variables[0].value == "1"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (r'"a\0b"', "a NUL character"),
        (r'"\ud800"', ""),  # one parser refuses the escape, the other makes a character that is no text
        (r'"\UFFFFFFFF"', ""),
        (r'"\xZZ"', "not YAML"),
    ],
)
@pytest.mark.usefixtures("parser")
def test_a_value_no_environment_can_hold_is_refused(value: str, said: str) -> None:
    assert said in error_of(lambda: parsed(f"variables: {{X: {value}}}"))


@pytest.mark.parametrize("name", ["A=B", "", "A B", "A\\tB", "A\\0B", "Ä", "A-B", "9A", "A.B", "${A}", "A\\nB"])
@pytest.mark.usefixtures("parser")
def test_a_name_no_environment_should_hold_is_refused(name: str) -> None:
    assert "cannot be the name of an environment variable" in error_of(lambda: parsed(f'variables: {{"{name}": 1}}'))


# ------------------------------------------------------------------------------------------------------------- anything

KEYS = st.sampled_from(
    [
        "description",
        "extends",
        "variables",
        "unset",
        "value",
        "ranks",
        "cost",
        "versions",
        "X",
        "torch",
        "0",
        "profiles",
    ]
)
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["heavy", ">=2.8"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), children, max_size=4),
    max_leaves=20,
)


def refused(call: Callable[[], object]) -> UsageError | None:
    """The error that a call is refused with, or None if it is not; anything else that it raises fails the test."""
    try:
        call()
    except UsageError as error:
        return error
    return None


def refused_or_understood(text: str) -> None:
    error = refused(lambda: parsed(text))
    assert error is None or (error.what.startswith("x.yaml") and error.hint)


@given(TREES)
@settings(deadline=None)
def test_any_tree_is_refused_or_understood(tree: object) -> None:
    refused_or_understood(yaml.safe_dump(tree))


@given(st.dictionaries(KEYS, TREES, max_size=4))
@settings(deadline=None)
def test_any_profile_is_refused_or_understood(tree: object) -> None:
    refused_or_understood(yaml.safe_dump(tree))


@given(st.text(alphabet="{}[]:,-?&*!|>'\"%@`# \n\tabX01\\", max_size=60))
@settings(deadline=None)
def test_any_text_is_refused_or_understood(text: str) -> None:
    refused_or_understood(text)
    with mock.patch.object(yaml, "CSafeLoader", None):
        refused_or_understood(text)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_refused_or_understood(content: bytes) -> None:
    with mock.patch("saferun.env.profiles.yaml_nodes._read_at_most", return_value=content):
        error = refused(lambda: read_yaml(__file__))
    assert error is None or error.hint


@pytest.mark.parametrize("seed", range(20))
def test_a_spoilt_profile_is_refused_or_understood(seed: int) -> None:
    """One character changed at random: what a slip of the hand does to a real file."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    path = Path(__file__).resolve().parents[3] / "configs" / "production.yaml"
    whole = path.read_text(encoding="utf-8")
    for _ in range(5):
        at = chance.randrange(len(whole))
        refused_or_understood(whole[:at] + chance.choice("{}[]:&*!'\"\t\n x") + whole[at + 1 :])
