"""run.json: what a launch was asked to do, and with which versions. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from saferun import __version__
from saferun.config import LaunchConfig
from saferun.model import JsonObject
from saferun.text.redaction import REDACTED, redacted_arguments, redacted_text
from saferun.text.secret_names import is_secret


def run_description(
    config: LaunchConfig,
    *,
    cwd: str,
    run_id: str,
    python_version: str,
    torch_version: str | None,
    slow: Sequence[JsonObject] = (),
) -> JsonObject:
    """The content of run.json.

    ``torch_version`` is known once the coordinator has loaded it. ``slow``: ranks that the others waited for.
    """
    return {
        "command": redacted_arguments(config.argv),
        "rank_command": redacted_arguments(config.command.argv),
        "cwd": cwd,
        "run_id": run_id,
        "rendezvous_id": config.rendezvous.run_id,
        "nproc_per_node": config.nproc_per_node,
        "settings": {
            # A default is in the table of options.
            name: {
                "value": setting.value if setting.origin == "default" else _shown(name, setting.value),
                "origin": setting.origin,
            }
            for name, setting in config.settings.items()
        },
        "versions": {"saferun": __version__, "python": python_version, "torch": torch_version},
        "slow_ranks": [*slow],
    }


def run_text(content: JsonObject) -> str:
    """The description as JSON, with a line for each setting: a tenth of the time of ``json.dumps(…, indent=1)``."""
    lines = (
        f" {json.dumps(name)}: {_object_text(value) if name == 'settings' else json.dumps(value, default=str)}"
        for name, value in content.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _object_text(content: JsonObject) -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(value, default=str)}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n }"


def _shown(name: str, value: object) -> object:
    if is_secret(name):
        return REDACTED
    if isinstance(value, list | tuple):
        return redacted_arguments(map(str, value))
    return redacted_text(value) if isinstance(value, str) else value
