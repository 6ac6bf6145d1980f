"""Where a launch finds itself, for tests."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

import pytest

from saferun.cli.main import read_config
from saferun.config import LaunchConfig
from saferun.errors import UsageError

ENVIRON = {"PATH": "/usr/bin:/bin"}
HERE = socket.gethostname()


def config_of(*arguments: str, environ: Mapping[str, str] | None = None) -> LaunchConfig:
    return read_config([*arguments, "train.py"], {**ENVIRON, **(environ or {})})


def refusal(*arguments: str, environ: Mapping[str, str] | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        config_of(*arguments, environ=environ)
    assert caught.value.exit_code == 2
    assert re.fullmatch(r"saferun: [^\n]+\nhint: [^\n]+", str(caught.value))
    return caught.value


def place(config: LaunchConfig) -> tuple[int, int, int | None]:
    return config.hosts.least, config.hosts.most, config.hosts.node_rank
