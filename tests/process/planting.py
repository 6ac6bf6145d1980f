"""What a directory holds, for tests in which another user plants files there."""

from __future__ import annotations

from pathlib import Path


def content_of(path: Path) -> dict[str, str]:
    return {str(found.relative_to(path)): found.read_text() if found.is_file() else "" for found in path.rglob("*")}
