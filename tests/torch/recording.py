"""What torchrun did, kept in the repository, so that most runs of the tests need not launch it.

A recording holds of each rank only what torchrun makes other than it is without any launcher: ``Scene.of`` runs the
probe alone, and what it sees there (limits, paths, processors, niceness) is this machine's and goes into no recording.
Names stand for the rest that differs from machine to machine: the job's folder, the interpreter, the checkout, the port
and the host.

A recording is for one release of torch and one minor release of Python, and holds while the case, the probe and the
code that observes are the same. ``python -m tests.torch.record`` makes them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.torch.differential import ALLOWED, REPOSITORY, Case, launch_alone, of_whom
from tests.torch.observation import Observation

HERE = Path(__file__).parent
FOLDER = HERE / "recorded_torchrun"

# Comments and docstrings of these may change; of the probe nothing may, since its line numbers are seen.
_OBSERVING = ("differential.py", "observation.py", "recording.py")
_PROBE = "probe.py"


class Scene(NamedTuple):
    """Where a case is played: what belongs to this machine and this run.

    Args:
        alone: what the probe sees without a launcher, by field.
        names: what names stand for in a recording, the longest first.
        whole: the same for what is a whole value only, such as this host's full name, which torchrun passes to ranks.
    """

    alone: Observation
    names: tuple[tuple[str, str], ...]
    whole: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, case: Case, folder: Path, port: int) -> Scene:
        """The scene of ``case`` in ``folder`` with this port."""
        named = {
            str(folder / "job"): "<job>",
            sys.executable: "<python>",
            str(REPOSITORY): "<repository>",
            str(port): "<port>",
        }
        names = tuple(sorted(named.items(), key=lambda item: -len(item[0])))
        whole = ((socket.getfqdn(), "<host>"), (os.path.basename(sys.executable), "<name of python>"))
        return cls(launch_alone(case, folder, port), names, whole)


def kept(case: Case, observation: Observation, scene: Scene) -> dict[str, Any]:
    """What a recording keeps of an observation."""
    rest: dict[str, Any] = {}
    ranks: dict[str, dict[str, Any]] = {}
    for path, value in observation.items():
        who = of_whom(path)
        if any(re.fullmatch(allowed.path, path) for allowed in (*ALLOWED, *case.allowed)):
            continue
        if not who.startswith("rank "):
            rest[path] = _named(value, scene)
        else:
            field = path.removeprefix(f"{who}: ")
            fields = ranks.setdefault(who, {})
            if field not in scene.alone or scene.alone[field] != value:
                fields[field] = _named(_without_rest(field, value, scene), scene)
    for who in ranks:
        # Null: a launcher takes it away.
        ranks[who] |= dict.fromkeys(field for field in scene.alone if f"{who}: {field}" not in observation)
    return {"ranks": ranks, "rest": rest}


def restored(recording: dict[str, Any], scene: Scene) -> Observation:
    """The observation that a recording is of, as it would be in this scene."""
    seen: Observation = {path: _filled(value, scene) for path, value in recording["rest"].items()}
    for who, fields in recording["ranks"].items():
        full = scene.alone | {field: _with_rest(field, _filled(value, scene), scene) for field, value in fields.items()}
        seen |= {f"{who}: {field}": value for field, value in full.items() if value is not None}
    return seen


# Stands for the rest of ``sys.path``: a launcher may change its first entry, the others are the interpreter's.
_REST = "<the rest>"


def _without_rest(field: str, value: Any, scene: Scene) -> Any:
    if field == "path" and value[1:] == scene.alone[field][1:]:
        return [value[0], _REST]
    return value


def _with_rest(field: str, value: Any, scene: Scene) -> Any:
    if field == "path" and value[1:] == [_REST]:
        return [value[0], *scene.alone[field][1:]]
    return value


def _named(value: Any, scene: Scene) -> Any:
    """A value with names in the place of what belongs to this machine."""
    if isinstance(value, dict):
        return {_named(key, scene): _named(item, scene) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item, scene) for item in value]
    if not isinstance(value, str):
        return value
    if value in (whole := dict(scene.whole)):
        return whole[value]
    for text, name in scene.names:
        value = re.sub(rf"(?<!\d){text}(?!\d)" if text.isdecimal() else re.escape(text), name, value)
    return value


def _filled(value: Any, scene: Scene) -> Any:
    """A value of a recording with this machine's in the place of the names."""
    if isinstance(value, dict):
        return {_filled(key, scene): _filled(item, scene) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, scene) for item in value]
    if not isinstance(value, str):
        return value
    if value in (whole := {name: text for text, name in scene.whole}):
        return whole[value]
    for text, name in scene.names:
        value = value.replace(name, text)
    return value


def case_digest(case: Case) -> str:
    """What stands for a case: any change of it makes its recording void."""
    return hashlib.sha256(repr(case).encode()).hexdigest()[:16]


def code_digest() -> str:
    """What stands for the probe and for the code that observes."""
    digest = hashlib.sha256((HERE / _PROBE).read_bytes())
    for name in _OBSERVING:
        digest.update(_without_words((HERE / name).read_text()).encode())
    return digest.hexdigest()[:16]


def _without_words(source: str) -> str:
    """Code without its comments, its docstrings and its layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


class Recordings:
    """The recordings for one release of torch and Python. False where there are none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._is_current = self._found.get("code") == code_digest()

    @classmethod
    def of_installed_torch(cls) -> Recordings:
        """Those that are for this interpreter and its torch, whatever hardware that is built for."""
        torch = importlib.metadata.version("torch").partition("+")[0]
        return cls(FOLDER / f"torch-{torch}-python-{sys.version_info.major}.{sys.version_info.minor}.json")

    def __bool__(self) -> bool:
        return bool(self._found)

    def find(self, case: Case) -> dict[str, Any] | None:
        """The recording of ``case``, if there is one that holds."""
        found: dict[str, Any] | None = self._found.get("cases", {}).get(case.name)
        return found if found is not None and self._is_current and found["case"] == case_digest(case) else None

    def write(self, recordings: dict[str, dict[str, Any]]) -> Path:
        """Keep these recordings, by the case's name, and no others; one line a case. Returns the file."""
        lines = [f"{json.dumps(name)}: {_compact(recording)}" for name, recording in sorted(recordings.items())]
        FOLDER.mkdir(exist_ok=True)
        self._path.write_text(f'{{"code": "{code_digest()}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n")
        return self._path


def _compact(recording: dict[str, Any]) -> str:
    return json.dumps(recording, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
