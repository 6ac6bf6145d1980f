"""Env profiles as text: the lines of a launch, and those of ``saferunctl env``. Pure.

Values that the user's own environment sets are never shown: they may be secrets. Those of a profile are shown where
``saferunctl env`` is asked for them; a launch hides the secrets among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from saferun.env.profiles.profile_values import COSTS, Profile, RankValue, Resolution, Variable, Vendor
from saferun.env.profiles.resolution import layered, needs_run_dir, resolve, without_run_dir
from saferun.text.redaction import REDACTED, redacted_text
from saferun.text.secret_names import is_secret as names_a_secret

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.env.profiles.search import ProfileSet

_INDENT = "    "
_DEFAULT_PROFILE = "production"


def launch_lines(resolution: Resolution, *, has_run_dir: bool) -> list[str]:
    """The lines of a launch about its env profiles, without ``saferun:``: only what users may want to change.

    That is: variables of the user's environment that stay or are replaced, profiles of high cost, variables that were
    left out because there is no run directory.
    """
    lines = [
        f"{kept.found} stays as your environment sets it; profile {kept.profile} would set {_redacted(kept.variable)}"
        for kept in resolution.kept
        if kept.differs
    ]
    lines += [
        f"{setting.origin} replaces {setting.variable.name} of your environment: {_redacted(setting.variable)}"
        for setting in resolution.settings
        if setting.replaces is not None and setting.profile is not None
    ]
    lines += [f"{removed.origin} removes {removed.name}" for removed in resolution.removed if removed.origin[0] != "-"]
    for profile in resolution.profiles:
        heavy = [s.variable for s in resolution.settings if s.profile == profile and s.variable.cost == "heavy"]
        if heavy:
            names = ", ".join(_redacted(variable) for variable in heavy)
            lines.append(f"env profile {profile} makes the job much slower ({names}); not for production")
    # The default profile, production, is no loss without a run directory: torch has a default path for it.
    asked = [setting for setting in resolution.settings if setting.profile != _DEFAULT_PROFILE]
    homeless = [s.variable.name for s in asked if not has_run_dir and needs_run_dir(s.variable)]
    if homeless:
        lines.append(f"without a run directory these are left out: {', '.join(homeless)}")
    return lines


def change_lines(resolution: Resolution, *, is_secret: Callable[[str], bool], has_run_dir: bool = True) -> list[str]:
    """Every change to the environment with its origin, one per line, and what was left out: for ``--dry-run``.

    Args:
        resolution: the result of env profiles, ``--env`` and ``--unset``.
        is_secret: whether a variable of this name holds a secret; its value is then not shown.
        has_run_dir: whether there is a run directory.
    """
    lines: list[str] = []
    homeless = {} if has_run_dir else without_run_dir(resolution)
    for setting in resolution.settings:
        if setting.variable.name in homeless:
            continue
        value = REDACTED if is_secret(setting.variable.name) else _values(setting.variable)
        note = ", replaces the value of your environment" if setting.replaces is not None else ""
        if not has_run_dir and needs_run_dir(setting.variable):
            note += ", left out where the value needs a run directory"
        lines.append(f"{setting.variable.name}={value}  [{setting.origin}{_cost(setting.variable)}{note}]")
    lines += [
        f"{setting.variable.name} is left out  [{setting.origin}: {homeless[setting.variable.name]}]"
        for setting in resolution.settings
        if setting.variable.name in homeless
    ]
    lines += [f"{removed.name} is removed  [{removed.origin}]" for removed in resolution.removed]
    lines += [
        f"{kept.found} stays as your environment sets it  [profile {kept.profile} would set "
        f"{_redacted(kept.variable, is_secret)}]"
        for kept in resolution.kept
    ]
    # Another version's name of a variable that is set anyway is omitted.
    covered = {setting.variable.name for setting in resolution.settings}
    covered.update(name for kept in resolution.kept for name in (kept.found, kept.variable.name))
    lines += [
        f"{skipped.variable.name} is left out  [profile {skipped.profile}: {skipped.reason}]"
        for skipped in resolution.skipped
        if not covered.intersection((skipped.variable.name, *skipped.variable.same_as))
    ]
    return lines


def list_lines(profiles: ProfileSet) -> list[str]:
    """``saferunctl env list``: each profile with its highest cost and its description."""
    found = [profiles.get(name) for name in profiles.names()]
    width = max((len(profile.name) for profile in found), default=0)
    return [
        f"{profile.name:<{width}}  {_highest_cost(layered(profiles, [profile.name])):<8}  "
        f"{profile.description or f'(no description; {profile.location})'}"
        for profile in found
    ]


def show_lines(profiles: ProfileSet, name: str, *, vendor: Vendor, versions: Mapping[str, str]) -> list[str]:
    """``saferunctl env show PROFILE``: each variable with value, reason, cost, source; what does not apply here."""
    layers = layered(profiles, [name])
    profile = layers[-1]
    resolution = resolve(profiles, [name], vendor=vendor, versions=versions, user_environ={})
    lines = [f"{profile.name}  ({profile.location})"]
    if profile.description:
        lines.append(f"{_INDENT}{profile.description}")
    if len(layers) > 1:
        lines.append(f"{_INDENT}on top of {', '.join(layer.name for layer in layers[:-1])}")
    for setting in resolution.settings:
        lines += ["", *_details(setting.variable, setting.origin)]
    if profile.unset:
        lines += ["", f"removes: {', '.join(removal.name for removal in profile.unset)}"]
    if resolution.skipped:
        lines += ["", "not on this host:"]
        lines += [
            f"{_INDENT}{_assignment(skipped.variable)}  ({skipped.variable.location}): {skipped.reason}"
            for skipped in resolution.skipped
        ]
    return lines


def explain_lines(profiles: ProfileSet, name: str) -> list[str]:
    """``saferunctl env explain VAR``: every profile that sets the variable, to what and why; none: no profile does."""
    lines: list[str] = []
    for profile_name in profiles.names():
        profile = profiles.get(profile_name)
        for variable in profile.variables:
            if name in (variable.name, *variable.same_as):
                lines += ["", *_details(variable, f"profile {profile.name} ({variable.location})")]
                lines += [f"{_INDENT}{text}" for text in _conditions(variable)]
        lines += [
            line
            for removal in profile.unset
            if removal.name == name
            for line in ("", f"profile {profile.name} ({removal.location}) removes {name}")
        ]
    return lines[1:]


def variable_names(profiles: ProfileSet) -> set[str]:
    """The names of all variables that a profile sets."""
    every = (variable for name in profiles.names() for variable in profiles.get(name).variables)
    return {name for variable in every for name in (variable.name, *variable.same_as)}


def diff_lines(profiles: ProfileSet, a: str, b: str, *, vendor: Vendor, versions: Mapping[str, str]) -> list[str]:
    """``saferunctl env diff A B``: what the ranks get under B and not under A (+), under A and not under B (-)."""
    first, second = (
        {
            setting.variable.name: setting.variable
            for setting in resolve(profiles, [name], vendor=vendor, versions=versions, user_environ={}).settings
        }
        for name in (a, b)
    )
    lines: list[str] = []
    for name in sorted(first.keys() | second.keys()):
        before = _assignment(first[name]) if name in first else None
        after = _assignment(second[name]) if name in second else None
        if before != after:
            lines += [f"- {before}"] if before is not None else []
            lines += [f"+ {after}{_bracketed_cost(second[name])}"] if after is not None else []
    return lines or [f"{a} and {b} set the same variables to the same values on this host"]


def _details(variable: Variable, origin: str) -> list[str]:
    lines = [_assignment(variable), f"{_INDENT}set by {origin}"]
    if variable.why:
        lines.append(f"{_INDENT}{variable.why}")
    lines.append(f"{_INDENT}cost: {variable.cost}")
    if variable.force:
        lines.append(f"{_INDENT}replaces what your environment sets")
    if variable.same_as:
        lines.append(f"{_INDENT}not set if {' or '.join(variable.same_as)} is set")
    if variable.yields_to_nccl_conf:
        lines.append(f"{_INDENT}not where NCCL's own file (/etc/nccl.conf) sets it")
    if variable.together_with:
        lines.append(f"{_INDENT}only together with {variable.together_with} of the same profile")
    if variable.reader:
        lines.append(f"{_INDENT}read by: {', '.join(variable.reader)}")
    if variable.source:
        lines.append(f"{_INDENT}source: {variable.source}")
    return lines


def _conditions(variable: Variable) -> list[str]:
    texts = [] if variable.vendor == "any" else [f"only for: {variable.vendor} GPUs"]
    texts += [f"only for: {component} {wanted}" for component, wanted in variable.versions]
    texts += [f"not for: {component} {wanted}, with which it breaks" for component, wanted in variable.breaks_with]
    texts += [f"only for: hosts with {variable.needs_file}"] if variable.needs_file else []
    return texts


def _assignment(variable: Variable) -> str:
    """``NCCL_DEBUG=INFO on rank 0, WARN on the others``; placeholders stay as they are."""
    return f"{variable.name}={_values(variable)}"


def _redacted(variable: Variable, is_secret: Callable[[str], bool] = names_a_secret) -> str:
    """The same without secrets."""
    return f"{variable.name}={REDACTED}" if is_secret(variable.name) else redacted_text(_assignment(variable))


def _values(variable: Variable) -> str:
    parts = [f"{_shell(part.value)} on {_ranks(part)}" for part in variable.ranks]
    parts += [f"{_shell(part.value)} on local {_ranks(part)}" for part in variable.local_ranks]
    if variable.value is None:
        return f"{', '.join(parts)} only"
    return ", ".join([*parts, f"{_shell(variable.value)} on the others"]) if parts else _shell(variable.value)


def _shell(value: str) -> str:
    """A value quoted for a shell, without control characters."""
    from shlex import quote

    return quote("".join(char if char.isprintable() else repr(char)[1:-1] for char in value))


def _ranks(part: RankValue) -> str:
    return f"rank {part.first}" if part.first == part.last else f"ranks {part.first}-{part.last}"


def _cost(variable: Variable) -> str:
    return "" if variable.cost == "none" else f", cost: {variable.cost}"


def _bracketed_cost(variable: Variable) -> str:
    return "" if variable.cost == "none" else f"  [cost: {variable.cost}]"


def _highest_cost(layers: Sequence[Profile]) -> str:
    return max((variable.cost for layer in layers for variable in layer.variables), key=COSTS.index, default="none")
