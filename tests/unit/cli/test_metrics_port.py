"""The address of --metrics-port."""

from __future__ import annotations

import pytest

from saferun.cli.main import read_config
from saferun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0", ("127.0.0.1", 0)),
        (":9400", ("0.0.0.0", 9400)),  # noqa: S104 - asked for
        ("localhost:9400", ("127.0.0.1", 9400)),
        ("10.0.0.5:9400", ("10.0.0.5", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("[::]:9400", ("::", 9400)),
    ],
)
def test_a_port_is_of_the_loopback_interface_unless_an_address_is_given(text: str, address: tuple[str, int]) -> None:
    config = read_config(["--metrics-port", text, "--no-python", "true"], {})
    assert config.output.metrics_port == address


@pytest.mark.parametrize(
    "text", ["x", "65536", "-1", "9400:", "node1:9400", "::1:9400", "[::1]", "1.2.3:80", "9" * 30, "٣", "a\0:1"]
)
def test_anything_else_is_refused_and_no_name_is_looked_up(text: str) -> None:
    """A name server that does not answer would hold up the launch."""
    with pytest.raises(UsageError, match="is not a port of an address"):
        read_config(["--metrics-port", text, "--no-python", "true"], {})


def test_without_the_option_there_is_none() -> None:
    assert read_config(["--no-python", "true"], {}).output.metrics_port is None
