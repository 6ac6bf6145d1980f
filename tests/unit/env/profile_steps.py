"""Steps that tests of the env profiles share: writing some, resolving them, rendering the result for a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from saferun.env.profiles import ProfileSet, load_profiles, render, resolve
from saferun.env.profiles.profile_values import Resolution, Vendor
from saferun.errors import UsageError


def profiles_of(folder: Path, **files: str) -> ProfileSet:
    """A profile for each keyword, with that body; underscores in the name become dashes."""
    for name, body in files.items():
        (folder / f"{name.replace('_', '-')}.yaml").write_text(body, encoding="utf-8")
    return load_profiles([str(folder)])


def resolved(
    profiles: ProfileSet,
    *names: str,
    vendor: Vendor = "any",
    versions: Mapping[str, str] | None = None,
    user: Mapping[str, str] | None = None,
    env: Sequence[tuple[str, str]] = (),
    unset: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Resolution:
    return resolve(
        profiles,
        names,
        vendor=vendor,
        versions=versions or {},
        user_environ=user or {},
        env=env,
        unset=unset,
        exists=lambda path: path in files,
    )


def rendered(
    resolution: Resolution, rank: int = 0, local_rank: int = 0, run_dir: str | None = "/run"
) -> dict[str, str]:
    return render(
        resolution,
        host="node0",
        rank=rank,
        local_rank=local_rank,
        world_size=8,
        run_dir=run_dir,
        rank_dir=None if run_dir is None else f"{run_dir}/node0/attempt_0/rank_{rank}",
    )


def usage_error(profiles: ProfileSet, *names: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolved(profiles, *names)
    assert caught.value.exit_code == 2
    return caught.value
