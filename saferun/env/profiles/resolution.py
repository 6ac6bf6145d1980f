"""From the names of profiles to the variables of this host's ranks. Pure, except for checks whether files exist.

Profiles are layered from left to right, each after the ones it extends, and the later one wins. What the user's
environment sets wins over a profile, unless the profile forces its value. ``--env`` wins over all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from saferun.env.profiles import templates
from saferun.env.profiles.profile_values import (
    EnvVariable,
    Kept,
    Location,
    Profile,
    RankValue,
    Removal,
    Removed,
    Resolution,
    Skipped,
    Variable,
    Vendor,
)
from saferun.env.profiles.search import ProfileSet
from saferun.env.profiles.version_ranges import what_breaks, why_not
from saferun.errors import UsageError

_NEED_RUN_DIR = ("run_dir", "rank_dir")
# NCCL and RCCL expand %h, %p and %% in it (ncclDebugInit in their debug.cc).
_WITH_PERCENT = "NCCL_DEBUG_FILE"


def resolve(
    profiles: ProfileSet,
    names: Sequence[str],
    *,
    vendor: Vendor,
    versions: Mapping[str, str],
    user_environ: Mapping[str, str],
    env: Sequence[tuple[str, str]] = (),
    unset: Sequence[str] = (),
    nccl_files: Collection[str] = (),
    exists: Callable[[str], bool] = os.path.exists,
) -> Resolution:
    """Resolve the layered profiles, ``--env`` and ``--unset``.

    Args:
        profiles: the available profiles.
        names: the profiles to layer, from left to right.
        vendor: the vendor of the host's GPUs; ``any``: unknown or none, so that variables for one vendor are left out.
        versions: the installed versions of ``torch``, ``nccl`` and ``rocm``, as far as known.
        user_environ: the environment that the ranks would inherit.
        env: the name and value of each ``--env``; values may hold placeholders.
        unset: the name of each ``--unset``.
        nccl_files: the variables that NCCL reads from its own files, where the environment does not set them.
        exists: whether a file exists.

    Raises:
        UsageError: an unknown profile, a malformed profile or one that extends itself, a malformed ``--env``.
    """
    layers = layered(profiles, names)
    state = _Layering(vendor, versions, nccl_files, exists)
    for profile in layers:
        state.add(profile)
    for name, value in env:
        _check_name("--env", name, value)
        state.drop_aliases_of(name, "--env")
    for name in unset:
        _check_name("--unset", name, "")
    flagged = dict.fromkeys(name for name, _ in env)
    settings: dict[str, EnvVariable] = {}
    kept: list[Kept] = []
    for name, (variable, owner) in state.chosen.items():
        if name in unset:
            continue
        found = next((other for other in (name, *variable.same_as) if other in user_environ and other not in unset), "")
        if found and not variable.force:
            # One of two that belong together gives way without a line: the user's has its own way to be seen.
            differs = not variable.together_with and (found != name or user_environ[found] != variable.value)
            kept.append(Kept(variable, owner.name, found, differs))
            continue
        replaced = user_environ.get(name)
        if replaced == variable.value:
            replaced = None
        settings[name] = EnvVariable(variable, owner.name, f"profile {owner.name} ({variable.location})", replaced)
    _drop_lone(settings, flagged)
    for name, value in env:
        replaced = user_environ.get(name)
        variable = Variable(name, value, Location("--env", 1))
        settings[name] = EnvVariable(
            variable, None, "--env", replaced if replaced != templates.fill(value, {}) else None
        )
    return Resolution(
        profiles=tuple(profile.name for profile in layers),
        settings=tuple(sorted(settings.values(), key=lambda setting: setting.variable.name)),
        kept=tuple(sorted((k for k in kept if k.variable.name not in flagged), key=lambda k: k.variable.name)),
        skipped=tuple(sorted(state.skipped, key=lambda skipped: skipped.variable.name)),
        removed=_removed(state, unset, user_environ, settings),
    )


def _drop_lone(settings: dict[str, EnvVariable], flagged: Mapping[str, None]) -> None:
    """Remove variables whose companion is not set by the same profile."""
    for name, setting in list(settings.items()):
        other = setting.variable.together_with
        if other and (other in flagged or other not in settings or settings[other].profile != setting.profile):
            del settings[name]


def layered(profiles: ProfileSet, names: Sequence[str]) -> list[Profile]:
    """The named profiles and all that they extend, each once, base profiles before those that extend them.

    Raises:
        UsageError: an unknown profile, or one that extends itself through others.
    """
    done: list[Profile] = []
    # Depth first without recursion: (profile, how many of the ones it extends are done).
    for name in names:
        stack: list[tuple[Profile, int]] = [(profiles.get(name), 0)]
        while stack:
            profile, at = stack.pop()
            if profile in done:
                continue
            if at == len(profile.extends):
                done.append(profile)
                continue
            stack.append((profile, at + 1))
            parent = _parent(profiles, profile, profile.extends[at])
            if any(parent == waiting for waiting, _ in stack):
                path = " -> ".join([*(waiting.name for waiting, _ in stack), parent.name])
                raise UsageError(f"{profile.location}: env profiles extend each other: {path}", "break the circle")
            stack.append((parent, 0))
    return done


def _parent(profiles: ProfileSet, profile: Profile, name: str) -> Profile:
    if name == profile.name:
        return profiles.get(name, beyond=profile)
    names = profiles.names()
    if name not in names:
        from saferun.env.profiles.quoting import advice, quoted

        what = f"{profile.location}: profile {profile.name} extends {quoted(name)}, which does not exist"
        raise UsageError(what, advice(name, names))
    return profiles.get(name)


class _Layering:
    """The variables chosen so far, as one profile after another is applied."""

    def __init__(
        self,
        vendor: Vendor,
        versions: Mapping[str, str],
        nccl_files: Collection[str],
        exists: Callable[[str], bool],
    ) -> None:
        self._vendor = vendor
        self._versions = versions
        self._nccl_files = nccl_files
        self._exists = exists
        self.chosen: dict[str, tuple[Variable, Profile]] = {}
        self.skipped: list[Skipped] = []
        self.removals: dict[str, tuple[Removal, Profile]] = {}

    def add(self, profile: Profile) -> None:
        for removal in profile.unset:
            self.chosen.pop(removal.name, None)
            self.removals[removal.name] = (removal, profile)
        fitting: set[str] = set()
        for variable in profile.variables:
            if variable.name in fitting:
                continue  # an earlier alternative fits
            reason = self._misfit(variable)
            if reason is not None:
                self.skipped.append(Skipped(variable, profile.name, reason))
                continue
            fitting.add(variable.name)
            self.drop_aliases_of(variable.name, f"profile {profile.name}")
            self.chosen[variable.name] = (variable, profile)
            self.removals.pop(variable.name, None)

    def drop_aliases_of(self, name: str, by: str) -> None:
        """Remove variables of the same setting by another name: the library would read only one of the two."""
        for other, (variable, owner) in list(self.chosen.items()):
            if name in variable.same_as:
                del self.chosen[other]
                self.skipped.append(Skipped(variable, owner.name, f"{by} sets {name}, which is the same setting"))

    def _misfit(self, variable: Variable) -> str | None:
        if variable.vendor not in ("any", self._vendor):
            return f"it is for {_VENDOR_TEXTS[variable.vendor]}"
        reason = why_not(variable.versions, self._versions)
        if reason is None:
            reason = what_breaks(variable.breaks_with, self._versions)
        if reason is None and variable.needs_file and not self._exists(variable.needs_file):
            reason = f"{variable.needs_file} is not here"
        yields = variable.together_with or variable.yields_to_nccl_conf
        if reason is None and yields and variable.name in self._nccl_files:
            reason = f"{'rccl' if self._vendor == 'amd' else 'nccl'}.conf sets it"
        return reason


_VENDOR_TEXTS = {"nvidia": "NVIDIA's GPUs", "amd": "AMD's GPUs"}


def _check_name(option: str, name: str, value: str) -> None:
    from saferun.env.profiles.quoting import advice, quoted
    from saferun.env.profiles.validation import OWN_NAMES, VARIABLE_NAME, check_value

    if not VARIABLE_NAME.fullmatch(name):
        hint = f"write {option} NAME=VALUE" if option == "--env" else f"write {option} NAME"
        raise UsageError(f"{option}: {quoted(name)} cannot be the name of an environment variable", hint)
    if name in OWN_NAMES:
        hint = "leave it out; the options of saferun decide its value"
        raise UsageError(f"{option}: {name} is set by saferun itself", hint)
    wrong = check_value(value)
    if wrong is not None:
        raise UsageError(f"{option}: the value of {name} holds {wrong}", "environment variables hold short texts")
    for field in templates.fields(value):
        if field not in templates.PLACEHOLDERS:
            hint = advice(field, templates.PLACEHOLDERS, f"The text itself is written {{{{{field}}}}}")
            raise UsageError(f"{option}: unknown placeholder {{{field}}} in the value of {name}", hint)


def _removed(
    state: _Layering, unset: Sequence[str], user_environ: Mapping[str, str], settings: Mapping[str, EnvVariable]
) -> tuple[Removed, ...]:
    """The variables that are really removed from the environment that the ranks would inherit."""
    origins: dict[str, str] = {}
    for name, (removal, profile) in state.removals.items():
        if removal.force:
            origins[name] = f"profile {profile.name} ({removal.location})"
    origins.update(dict.fromkeys(unset, "--unset"))
    return tuple(
        Removed(name, origin)
        for name, origin in sorted(origins.items())
        if name in user_environ and name not in settings
    )


def render(
    resolution: Resolution,
    *,
    host: str,
    rank: int,
    local_rank: int,
    world_size: int,
    run_dir: str | None,
    rank_dir: str | None,
) -> dict[str, str]:
    """The variables that one rank gets, in addition to what it inherits (without ``resolution.removed``).

    Args:
        resolution: the result of ``resolve``.
        host: name of this host.
        rank: global rank.
        local_rank: rank among those of this host.
        world_size: number of ranks of the job.
        run_dir: the run directory, or None: variables that need it are left out.
        rank_dir: the rank's own directory of this attempt, or None.
    """
    values = {"host": host, "rank": str(rank), "local_rank": str(local_rank), "world_size": str(world_size)}
    values.update({k: v for k, v in (("run_dir", run_dir), ("rank_dir", rank_dir)) if v is not None})
    escaped = {field: value.replace("%", "%%") for field, value in values.items()}
    rendered: dict[str, str] = {}
    for setting in resolution.settings:
        template = _value_for(setting.variable, rank, local_rank)
        if template is None:
            continue
        if any(field in _NEED_RUN_DIR and field not in values for field in templates.fields(template)):
            continue
        name = setting.variable.name
        rendered[name] = templates.fill(template, escaped if name == _WITH_PERCENT else values)
    for setting in resolution.settings:
        if setting.variable.together_with and setting.variable.together_with not in rendered:
            rendered.pop(setting.variable.name, None)
    return rendered


def needs_run_dir(variable: Variable) -> bool:
    """Whether a variable needs a run directory, for some ranks at least."""
    return any(map(_is_below_run_dir, _templates(variable)))


def without_run_dir(resolution: Resolution) -> dict[str, str]:
    """The variables that no rank gets where there is no run directory, and why."""
    left = {
        setting.variable.name: "there is no run directory"
        for setting in resolution.settings
        if needs_run_dir(setting.variable) and all(map(_is_below_run_dir, _templates(setting.variable)))
    }
    for setting in resolution.settings:
        other = setting.variable.together_with
        if other in left:
            left.setdefault(setting.variable.name, f"it is set only together with {other}")
    return left


def _templates(variable: Variable) -> list[str]:
    """All values of a variable."""
    values = [part.value for part in (*variable.ranks, *variable.local_ranks)]
    return values if variable.value is None else [*values, variable.value]


def _is_below_run_dir(template: str) -> bool:
    return any(field in _NEED_RUN_DIR for field in templates.fields(template))


def _value_for(variable: Variable, rank: int, local_rank: int) -> str | None:
    for number, parts in ((rank, variable.ranks), (local_rank, variable.local_ranks)):
        found = _among(parts, number)
        if found is not None:
            return found
    return variable.value


def _among(parts: Sequence[RankValue], number: int) -> str | None:
    return next((part.value for part in parts if part.first <= number <= part.last), None)
