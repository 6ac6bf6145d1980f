"""JSON, paths and evidence leave a process without their secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from saferun.cluster.evidence.packing import decode_part, encode_part
from saferun.evidence import diagnosis_values, job_evidence
from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    Evidence,
    Frame,
    GroupProgress,
    RankCollectives,
    RankOutput,
    StackDump,
    ThreadStack,
)
from saferun.preflight import results
from saferun.supervisor import events
from saferun.text.evidence_redaction import evidence_without_secrets
from saferun.text.redaction import (
    REDACTED,
    redacted_json,
    redacted_path,
)
from saferun.text.secret_names import is_secret

S = "S3CR3TVALUE"


def test_json_is_redacted_by_keys_and_texts() -> None:
    """Events hold values within values."""
    found = redacted_json({"a": [f"HF_TOKEN={S}", 1, None], "password": S, "keys": ["x"], "b": {"token": 5}, S: 1})
    assert found == {
        "a": [f"HF_TOKEN={REDACTED}", 1, None],
        "password": REDACTED,
        "keys": ["x"],
        "b": {"token": 5},
        S: 1,
    }
    nested: Any = S
    for _ in range(100_000):
        nested = [nested]
    assert redacted_json(nested) == REDACTED


def test_all_that_stands_under_the_name_of_a_secret_goes() -> None:
    """Lists and objects too. Numbers stay: they count."""
    found = redacted_json({"api_keys": [S, {"a": S, "b": 1}], "credentials": {"user": S}, "tokens": [S]})
    assert found == {
        "api_keys": [REDACTED, {"a": REDACTED, "b": 1}],
        "credentials": {"user": REDACTED},
        "tokens": [S],
    }


def test_of_a_path_only_the_part_with_the_secret_goes() -> None:
    """A stack without files is worth nothing."""
    assert redacted_path(f"/home/me/token={S}/src/train.py") == "/home/me/token=<redacted>/src/train.py"
    assert redacted_path(f"https://me:{S}@host/train.py") == "https://me:<redacted>@host/train.py"
    assert redacted_path("/usr/lib/python3/site-packages/tokenizers/key.py") == (
        "/usr/lib/python3/site-packages/tokenizers/key.py"
    )


def test_a_part_leaves_a_host_without_secrets_in_names_of_stacks() -> None:
    """Functions, files and threads have the names that somebody has given them; lines stay."""
    frame = Frame(f"load(token={S})", f"/data/key={S}/train.py", 12)
    thread = ThreadStack(f"pw={S}", 9, True, True, False, (frame,))
    dump = StackDump(0, 9, is_rank=True, name=f"secret={S}", tool="py-spy", threads=(thread,))
    call = CollectiveCall(1, "all_reduce", "[[1]]", False, False, 0, (frame,))
    group = GroupProgress("nccl:0", f"token={S}", (0, 1), 1, 1, 0, (call,))
    evidence = Evidence(
        host="a",
        started_at=0.0,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        kernel_lines=(),
        capture=Capture(stacks=(dump,), collectives=(RankCollectives(0, (group,)),)),
    )
    part = decode_part(encode_part(evidence, 1 << 20))
    assert part is not None
    assert S not in str(part)
    [shown] = part.capture.stacks[0].threads[0].frames
    assert shown == Frame("load(token=<redacted>)", "/data/key=<redacted>/train.py", 12)
    [own] = evidence_without_secrets(evidence).capture.collectives
    assert own.groups[0].calls[0].frames == (shown,)


def test_a_part_leaves_a_host_without_secrets() -> None:
    """Whoever reaches the store can read it. What tells of the cause stays."""
    output = RankOutput(0, (f"wandb: login failed for key {S}", "RuntimeError: no"), "", f"token={S}", 0.0)
    dump = StackDump(0, 9, is_rank=True, name="python", tool="py-spy", threads=(), failure=f"denied: token={S}")
    evidence = Evidence(
        host="a",
        started_at=0.0,
        ends=(),
        outputs=(output,),
        abandoned=(),
        stop_signum=None,
        kernel_lines=(f"audit: password={S}",),
        capture=Capture(stacks=(dump,), host_lines=(f"a: https://me:{S}@h",)),
    )
    part = decode_part(encode_part(evidence, 1 << 20))
    assert part is not None
    assert S not in str(part)
    assert "login failed for key <redacted>" in str(part)
    assert "RuntimeError: no" in str(part)


def _fields(module: Any) -> Iterable[str]:
    for value in vars(module).values():
        yield from getattr(value, "_fields", ())


@pytest.mark.parametrize(
    "module",
    [events, job_evidence, diagnosis_values, results],
    ids=lambda module: module.__name__,
)
def test_no_field_of_our_own_is_taken_for_a_secret(module: Any) -> None:
    """Else its value would be missing in events.jsonl."""
    assert [name for name in _fields(module) if is_secret(name) and name != "token"] == []
