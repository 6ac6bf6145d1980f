"""From the tree of a YAML file to profiles, or to an error with position and reason."""

from __future__ import annotations

import re
from typing import TypeVar

from saferun.env.profiles import templates, version_ranges
from saferun.env.profiles.profile_values import (
    COMPONENTS,
    COSTS,
    VENDORS,
    Location,
    Profile,
    RankValue,
    Removal,
    Variable,
)
from saferun.env.profiles.quoting import advice, quoted
from saferun.env.profiles.yaml_nodes import Node, bad

_Word = TypeVar("_Word", bound=str)

PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
MAX_VALUE_BYTES = 64 * 1024  # Linux allows 128 KiB per variable, and placeholders may still be replaced by paths
MAX_RANK = 1_000_000

_PROFILE_KEYS = ("description", "extends", "variables", "unset")
_VARIABLE_KEYS = (
    *("value", "ranks", "local_ranks", "why", "cost", "vendor", "versions", "breaks_with", "source"),
    *("reader", "same_as", "needs_file", "force", "together_with", "yields_to_nccl_conf"),
)
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_RANKS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")

# Variables that saferun itself sets for each rank: other values would break the job in obscure ways.
OWN_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"),
        *("SAFERUN_RUN_ID",),
    }
)


def profile_from_node(name: str, node: Node) -> Profile:
    """Convert a mapping to a profile.

    Raises:
        UsageError: an unknown or missing key, or a value of the wrong kind; the message has file, line and column, the
            hint the most similar valid word.
    """
    fields = _fields(node, _PROFILE_KEYS, f"profile {name}")
    variables = fields.get("variables")
    return Profile(
        name=name,
        location=_location(node),
        description=_prose(fields["description"]) if "description" in fields else "",
        extends=tuple(_profile_name(item) for item in _items(fields.get("extends"))),
        variables=_variables(variables) if variables is not None else (),
        unset=tuple(_removal(item) for item in _items(fields.get("unset"))),
    )


def profiles_from_collection(node: Node) -> dict[str, Profile]:
    """Convert a mapping from names to profiles, as below ``profiles:`` in a settings file."""
    if node.kind != "mapping":
        raise bad(
            node, f"profiles: is {node.description}, and must be a mapping", "write profiles:, then NAME: below it"
        )
    return {_profile_name(key): profile_from_node(key.text, value) for key, value in node.pairs}


def check_value(text: str) -> str | None:
    """What is wrong with a value for an environment variable; None if nothing."""
    if "\0" in text:
        return "a NUL character, which no environment can hold"
    try:
        size_bytes = len(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "a character that is no text"
    if size_bytes > MAX_VALUE_BYTES:
        return f"more than {MAX_VALUE_BYTES // 1024} KiB"
    return None


def _location(node: Node) -> Location:
    return Location(node.path, node.line)


def _fields(node: Node, known: tuple[str, ...], what: str) -> dict[str, Node]:
    if node.kind != "mapping":
        raise bad(node, f"{what} is {node.description}, and must be a mapping", f"its keys are {', '.join(known)}")
    if node.tag:
        raise bad(node, f"the tag {node.tag} cannot stand before {what}", "it belongs before a value")
    for key, _ in node.pairs:
        if key.text not in known:
            raise bad(key, f"unknown key {quoted(key.text)} in {what}", advice(key.text, known))
    return {key.text: value for key, value in node.pairs}


def _text(node: Node) -> str:
    if node.kind != "scalar" or node.is_null:
        raise bad(node, f"{node.description} where a string is needed", "quote it; an empty one is ''")
    if node.tag:
        raise bad(node, f"the tag {node.tag} belongs before the value of a variable", "leave it out here")
    if not node.text.isprintable():
        raise bad(node, f"a text with control characters: {quoted(node.text)}", "these texts are shown to people")
    return node.text


def _prose(node: Node) -> str:
    """A text that may have several lines, as one line."""
    return _text(node._replace(text=" ".join(node.text.split())))


def _items(node: Node | None) -> tuple[Node, ...]:
    """The items of a list, or a single item instead of one."""
    if node is None or (node.kind == "sequence" and not node.items):
        return ()
    return node.items if node.kind == "sequence" else (node,)


def _profile_name(node: Node) -> str:
    name = _text(node)
    if not PROFILE_NAME.fullmatch(name):
        raise bad(
            node, f"{quoted(name)} cannot be the name of a profile", "use letters, digits, '-', '_' and '.', at most 64"
        )
    return name


def _variable_name(node: Node) -> str:
    name = node.text
    if node.kind != "scalar" or node.is_null:
        raise bad(node, f"{node.description} where the name of a variable is needed", "write its name")
    if not VARIABLE_NAME.fullmatch(name):
        hint = "write NAME: VALUE" if "=" in name else "use letters, digits and '_', and no digit first"
        raise bad(node, f"{quoted(name)} cannot be the name of an environment variable", hint)
    if name in OWN_NAMES:
        raise bad(node, f"{name} is set by saferun itself", "leave it out; the options of saferun decide its value")
    return name


def _removal(node: Node) -> Removal:
    return Removal(_variable_name(node), _location(node), force=node.tag == "!force")


def _variables(node: Node) -> tuple[Variable, ...]:
    if node.kind != "mapping":
        raise bad(node, f"variables: is {node.description}, and must be a mapping", "write NAME: VALUE, one a line")
    found: list[Variable] = []
    for key, value in node.pairs:
        name = _variable_name(key)
        alternatives = value.items if value.kind == "sequence" else (value,)
        if not alternatives:
            raise bad(value, f"{name} has an empty list", "give a value, or leave the variable out")
        found.extend(_variable(name, key, alternative) for alternative in alternatives)
    return tuple(found)


def _variable(name: str, key: Node, node: Node) -> Variable:
    # One line for all alternatives would not say which one is meant.
    location = Location(node.path, node.line if node.kind == "mapping" and node.line > key.line + 1 else key.line)
    if node.kind == "scalar":
        return Variable(name, _value(node), location, force=node.tag == "!force")
    fields = _fields(node, _VARIABLE_KEYS, name)
    value, ranks, local_ranks = fields.get("value"), fields.get("ranks"), fields.get("local_ranks")
    if value is None and ranks is None and local_ranks is None:
        raise bad(node, f"{name} has no value", "write value: VALUE")
    return Variable(
        name=name,
        value=None if value is None else _value(value),
        location=location,
        ranks=_rank_values(ranks),
        local_ranks=_rank_values(local_ranks),
        why=_prose(fields["why"]) if "why" in fields else "",
        cost=_one_of(fields.get("cost"), "cost", COSTS, "none"),
        vendor=_one_of(fields.get("vendor"), "vendor", VENDORS, "any"),
        versions=_ranges(fields.get("versions")),
        breaks_with=_ranges(fields.get("breaks_with")),
        source=_source(fields.get("source")),
        reader=tuple(_text(item) for item in _items(fields.get("reader"))),
        same_as=tuple(_variable_name(item) for item in _items(fields.get("same_as"))),
        needs_file=_text(fields["needs_file"]) if "needs_file" in fields else "",
        force=_truth(fields.get("force")) or (value is not None and value.tag == "!force"),
        together_with=_variable_name(fields["together_with"]) if "together_with" in fields else "",
        yields_to_nccl_conf=_truth(fields.get("yields_to_nccl_conf")),
    )


def _value(node: Node) -> str:
    if node.is_null:
        raise bad(node, "no value", "write a value; the empty text is ''")
    if node.kind != "scalar":
        raise bad(node, f"{node.description} where a value is needed", "an environment variable holds a text: quote it")
    wrong = check_value(node.text)
    if wrong is not None:
        raise bad(node, f"the value holds {wrong}", "environment variables hold short texts")
    for field in templates.fields(node.text):
        if field not in templates.PLACEHOLDERS:
            hint = advice(field, templates.PLACEHOLDERS, f"The text itself is written {{{{{field}}}}}")
            raise bad(node, f"unknown placeholder {{{field}}}", hint)
    return node.text


def _rank_values(node: Node | None) -> tuple[RankValue, ...]:
    if node is None:
        return ()
    if node.kind != "mapping":
        raise bad(node, f"{node.description} where ranks and their values are needed", "write 0: VALUE, or 1-7: VALUE")
    found: list[RankValue] = []
    for key, value in node.pairs:
        for part in key.text.split(","):
            match = _RANKS.fullmatch(part.strip())
            if match is None:
                raise bad(key, f"{quoted(key.text)} names no ranks", "write 0, or 1-7, or 0,4")
            first = int(match[1])
            last = int(match[2]) if match[2] else first
            if not first <= last <= MAX_RANK:
                raise bad(key, f"{quoted(key.text)} names no ranks", "write the smaller rank first")
            found.append(RankValue(first, last, _value(value)))
    return tuple(found)


def _one_of(node: Node | None, what: str, known: tuple[_Word, ...], default: _Word) -> _Word:
    if node is None:
        return default
    word = _text(node)
    for one in known:
        if word == one:
            return one
    raise bad(node, f"unknown {what} {quoted(word)}", advice(word, known))


def _ranges(node: Node | None) -> tuple[tuple[str, str], ...]:
    if node is None:
        return ()
    if node.kind != "mapping":
        raise bad(node, f"{node.description} where versions are needed", "write torch: '>=2.8,<2.11'")
    found: list[tuple[str, str]] = []
    for key, value in node.pairs:
        if key.text not in COMPONENTS:
            raise bad(key, f"no version of {quoted(key.text)} is known", advice(key.text, COMPONENTS))
        wanted = _text(value)
        if not version_ranges.is_range(wanted):
            raise bad(value, f"{quoted(wanted)} is no range of versions", "write it like '>=2.8,<2.11', in quotes")
        found.append((key.text, wanted))
    return tuple(found)


def _source(node: Node | None) -> str:
    if node is None:
        return ""
    url = _text(node)
    if not re.fullmatch(r"https?://[^\s]+", url):
        raise bad(node, f"{quoted(url)} is no URL", "write the address of the documentation, https://…")
    return url


def _truth(node: Node | None) -> bool:
    if node is None:
        return False
    word = _text(node)
    if word.lower() not in _TRUTHS:
        raise bad(node, f"{quoted(word)} is neither true nor false", "write true or false")
    return _TRUTHS[word.lower()]
