"""Files for speedscope: stacks with weights. Pure.

Format: https://www.speedscope.app/file-format-schema.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.model import JsonObject

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class SpeedscopeFile:
    """Profiles of the same calls.

    Args:
        name: what the file is of.
        version: saferun's.
    """

    def __init__(self, name: str, version: str) -> None:
        self._name = name
        self._version = version
        self._frames: list[JsonObject] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._profiles: list[JsonObject] = []

    def number(self, name: str, file: str = "", line: int = 0) -> int:
        """The number of a call. ``line`` 0: not known."""
        key = (name, file, line)
        if key not in self._numbers:
            self._numbers[key] = len(self._frames)
            row: JsonObject = {"name": name}
            if file:
                row["file"] = file
            if line > 0:
                row["line"] = line
            self._frames.append(row)
        return self._numbers[key]

    def add_profile(
        self, name: str, samples: Sequence[Sequence[int]], weights: Sequence[float], unit: str = "none"
    ) -> None:
        """Add a profile.

        Args:
            name: what it is of.
            samples: stacks as numbers of calls, from the outermost inwards.
            weights: of each.
            unit: of the weights: ``none`` or ``seconds``.
        """
        self._profiles.append(
            {
                "type": "sampled",
                "name": name,
                "unit": unit,
                "startValue": 0,
                "endValue": round(sum(weights), 6),
                "samples": [list(stack) for stack in samples],
                "weights": list(weights),
            }
        )

    def as_json(self) -> JsonObject:
        """The content of the file."""
        return {
            "$schema": _SCHEMA,
            "name": self._name,
            "exporter": f"saferun@{self._version}",
            "activeProfileIndex": 0,
            "shared": {"frames": self._frames},
            "profiles": self._profiles,
        }
