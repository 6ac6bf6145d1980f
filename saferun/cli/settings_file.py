"""The YAML file of settings: ``OPTION: value``, with the file, line and column in every complaint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saferun.cli.options import OPTIONS, Option, comma_separated_list
from saferun.env.profiles.quoting import nearest, quoted
from saferun.env.profiles.yaml_nodes import bad, read_yaml
from saferun.model import Value

if TYPE_CHECKING:
    from saferun.env.profiles.yaml_nodes import Node

# Belongs to the env profiles, which read it themselves.
PROFILES = "profiles"


class FileValue(Value):
    """What stands in a settings file (several texts, for options that take several), and where (``saferun.yaml:3``)."""

    texts: tuple[str, ...]
    location: str


def read_settings_file(path: str, fd: int | None = None) -> dict[str, FileValue]:
    """The settings of a file, by the destination of their options; ``PROFILES`` where it holds env profiles as well.

    Args:
        path: the file.
        fd: the same, where it is open already; it is closed.

    Raises:
        UsageError: it cannot be read, is no YAML, or holds something that is no setting.
    """
    root = read_yaml(path, fd=fd)
    if root is None:
        return {}
    if root.kind != "mapping":
        raise bad(
            root, f"settings are written OPTION: value, and here is {root.description}", "begin with an option's name"
        )
    in_file = [option for option in OPTIONS if not option.asks and option.dest != "config"]
    options = {name: option for option in in_file for name in _names(option)}
    found: dict[str, FileValue] = {}
    seen: dict[str, int] = {}
    for key, value in root.pairs:
        if key.kind == "scalar" and key.text == PROFILES:
            found[PROFILES] = FileValue((), f"{path}:{key.line}")
            continue
        option = options.get(key.text) if key.kind == "scalar" else None
        if option is None:
            raise bad(key, *_no_setting(key.text, [name for name in options if "_" not in name]))
        if option.dest in seen:
            raise bad(key, f"{key.text} was set in line {seen[option.dest]} already", "keep one of the two")
        seen[option.dest] = key.line
        found[option.dest] = FileValue(_texts(option, value), f"{path}:{key.line}")
    return found


def _no_setting(name: str, names: list[str]) -> tuple[str, str]:
    """What is wrong with a name that is no setting of a file, and a hint."""
    what = f"there is no setting {quoted(name)}"
    option = next((option for option in OPTIONS if name in _names(option)), None)
    if option is not None and option.asks:
        return f"{what}: {option.name} is only an option of the command line", "pass it on the command line"
    if option is not None:
        return f"{what}: a file of settings does not name another", f"pass {option.name}, or set {option.variable}"
    option = next((option for option in OPTIONS if name.replace("-", "_").lower() == option.dest), None)
    near = _names(option)[0] if option is not None else nearest(name, [*names, PROFILES])
    return what, "see saferun --help-all" if near is None else f"did you mean {near}?"


def _names(option: Option) -> list[str]:
    return [flag.removeprefix("--") for flag in option.flags if flag.startswith("--")]


def _texts(option: Option, node: Node) -> tuple[str, ...]:
    if option.kind in {"list", "append"}:
        if node.kind == "sequence":
            return tuple(_scalar(item) for item in node.items)
        if node.kind == "mapping" and option.dest == "env":
            return tuple(f"{_scalar(name)}={_scalar(value)}" for name, value in node.pairs)
        if node.is_null:
            return ()
        text = _scalar(node)
        return tuple(comma_separated_list(text)) if option.kind == "list" else (text,)
    return (_scalar(node),)


def _scalar(node: Node) -> str:
    if node.kind != "scalar" or node.is_null:
        raise bad(node, f"a single value is expected, and here is {node.description}", "write one value")
    return node.text
