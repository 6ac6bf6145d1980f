"""Files of other users, for tests."""

from __future__ import annotations

import os
from pathlib import Path

from tests.process.somebody import SOMEBODY, as_user


def planted(path: Path, content: str = "", mode: int = 0o644) -> None:
    """A file of somebody else's."""

    def plant() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        os.write(fd, content.encode())
        os.close(fd)
        os.chmod(path, mode)

    as_user(plant)
    assert path.stat().st_uid == SOMEBODY
