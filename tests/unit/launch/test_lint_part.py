"""What the lint beside a job is given to judge."""

from __future__ import annotations

from saferun.env.lint.known_names import HostFacts
from saferun.env.lint.rules import lint
from saferun.launch.lint_part import without_launchers_own
from tests.unit.env.lint_samples import with_gpus


def test_a_default_of_torchrun_s_contradicts_no_setting_of_the_user_s() -> None:
    """The launcher sets it for each rank, as torchrun does: who sets the other variable alone has nothing to change."""
    users = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    ranks = {**users, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "none", "SAFERUN_HOOK": "1"}
    alone, both = without_launchers_own(ranks, users), without_launchers_own(ranks, ranks)
    assert alone == users
    assert not any(found.at_launch for found in lint(alone, with_gpus(*ranks), HostFacts()))
    assert any(found.at_launch for found in lint(both, with_gpus(*ranks), HostFacts()))
