"""Secrets do not reach a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.config import Setting
from saferun.report.run_json import run_description
from saferun.text.redaction import REDACTED, is_secret, redacted_arguments, redacted_environ
from tests.unit.samples import CONFIG


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "db_password",
        "PGPASSFILE_PASSWD",
        "--api-key",
        "SENTRY_DSN",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "HTTP_AUTHORIZATION",
        "Session-Cookie",
    ],
)
def test_names_of_secrets(name: str) -> None:
    """In any case of letters, as variable or option."""
    assert is_secret(name)
    assert redacted_environ({name: "s3cret"}) == {name: REDACTED}


@pytest.mark.parametrize("name", ["PATH", "RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "--lr"])
def test_names_of_other_things(name: str) -> None:
    """What helps to find a fault stays readable."""
    assert not is_secret(name)
    assert redacted_environ({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key=s3cret", "x"], ["--api-key=<redacted>", "x"]),
        (["--token", "s3cret", "x"], ["--token", "<redacted>", "x"]),
        (["--token", "--lr", "0.1"], ["--token", "--lr", "0.1"]),
        (["WANDB_API_KEY=s3cret"], ["WANDB_API_KEY=<redacted>"]),
        (["+logger.api_key=s3cret"], ["+logger.api_key=<redacted>"]),
        (["--set", "password=s3cret"], ["--set", "password=<redacted>"]),
        (["--token"], ["--token"]),
        (["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.1"]),
        (["--api-key=a=b"], ["--api-key=<redacted>"]),
        ([], []),
    ],
)
def test_a_command_line_without_its_secrets(arguments: list[str], shown: list[str]) -> None:
    """The value goes, the option stays."""
    assert redacted_arguments(arguments) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set=api_key=s3cret"],
        ["--rdzv-conf=token=s3cret,timeout=3"],
        ["-api_key", "s3cret"],
        ["--api_key", "-s3cret"],
        ["--url", "https://me:s3cret@example.com/x"],
    ],
)
def test_secrets_in_less_usual_places(arguments: list[str]) -> None:
    """Settings within a setting, options with one dash, values that begin with one, and URLs."""
    assert "s3cret" not in " ".join(redacted_arguments(arguments))


def test_run_json_holds_no_secret_of_the_command_line() -> None:
    """Neither in the command, nor in the ranks' command, nor among the settings."""
    arguments = ("--rdzv-conf", "token=s3cret", "train.py", "--api-key", "s3cret")
    config = CONFIG._replace(
        argv=arguments,
        command=CONFIG.command._replace(argv=("python", "-u", "train.py", "--api-key", "s3cret")),
        settings={"rdzv_conf": Setting("token=s3cret", "flag"), "nnodes": Setting("1:1", "default")},
    )
    described = run_description(config, cwd="/x", run_id="ab", python_version="3.11.7", torch_version=None)
    assert "s3cret" not in str(described)
    assert described["settings"]["nnodes"] == {"value": "1:1", "origin": "default"}


@given(st.lists(st.text(max_size=12), max_size=8))
def test_a_redacted_command_line_has_as_many_arguments_as_before(arguments: list[str]) -> None:
    """Nothing moves; what is no secret is as it was."""
    shown = redacted_arguments(arguments)
    assert len(shown) == len(arguments)
    for before, after in zip(arguments, shown, strict=True):
        assert after == before or after.endswith(REDACTED)
