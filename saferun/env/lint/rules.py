"""The rules of the lint: the environment and facts of host and installation in, findings out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from saferun.env.lint.conflicts import LintedJob, find_conflicts
from saferun.env.lint.documented import DOCUMENTED
from saferun.env.lint.families import NCCL_PLUGINS, Family, family_of, is_ambient, is_for_accelerators
from saferun.env.lint.findings import Finding, Verdict, by_severity, shown
from saferun.env.lint.knowledge import ADVICE, MISSPELT_PREFIXES, Advice
from saferun.env.lint.known_names import HostFacts, KnownNames
from saferun.env.lint.near_miss import closest, under_a_mended_prefix, under_another_prefix
from saferun.env.lint.settings import SETTINGS
from saferun.env.lint.value_checks import (
    checkable_path,
    directory_to_read,
    path_of_file,
    path_to_make,
    prefix_of_files,
)

MAX_FINDINGS = 200
_MAX_NEAR_MISSES = 64  # each search compares with hundreds of names
_MAX_NAME_CHARS = 128
_MAX_VALUE_CHARS = 4096
_MAX_PATHS = 64
_MAX_PATH_CHARS = 1024
_LISTED = 3

_MISSPELT = tuple(MISSPELT_PREFIXES)


def lint(environ: Mapping[str, str], known: KnownNames, host: HostFacts) -> tuple[Finding, ...]:
    """The findings about a job's environment, worst first; at most ``MAX_FINDINGS``.

    Bounded for every environment: long names are skipped, and only the beginning of long values is read.

    Args:
        environ: the environment of the ranks.
        known: the names in the ranks' installation.
        host: facts of the host.
    """
    versions = {**known.versions, **host.versions}
    job = LintedJob(environ, known, host, versions)
    near_misses = _NearMisses(known)
    findings: list[Finding] = []
    for name in sorted(knobs(environ)):
        on_name = _name_finding(name, environ, known, near_misses)
        if on_name is not None:
            findings.append(on_name)
        if on_name is None or on_name.verdict in {"renamed", "uncertain"}:
            findings.extend(_value_findings(name, environ[name], host))
    findings.extend(find_conflicts(job))
    return tuple(sorted(findings, key=by_severity)[:MAX_FINDINGS])


def knobs(environ: Mapping[str, str]) -> list[str]:
    """The names in an environment that seem to be settings of known software."""
    return [
        name
        for name in environ
        if len(name) <= _MAX_NAME_CHARS and (family_of(name) or name in SETTINGS or name.startswith(_MISSPELT))
    ]


def names_to_search(environ: Mapping[str, str], known: KnownNames) -> frozenset[str]:
    """The names that no library or module seems to read so far, to be searched in the other packages."""
    return frozenset(
        name
        for name in knobs(environ)
        if family_of(name) is not None and not known.is_read(name) and name not in known.mentions
    )


def paths_to_examine(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The paths in values of an environment that the rules need in ``HostFacts.paths``."""
    paths: list[str] = []
    for name, setting in SETTINGS.items():
        value = environ.get(name, "")
        if not 0 < len(value) <= _MAX_PATH_CHARS or "\0" in value:
            continue
        if setting.check is path_of_file:
            paths.append(value)
        elif setting.check in (path_to_make, directory_to_read):
            paths.append(checkable_path(value))
        elif setting.check is prefix_of_files:
            paths.append(value.rpartition("/")[0] or ("/" if value.startswith("/") else "."))
    return tuple(dict.fromkeys(paths))[:_MAX_PATHS]


class _NearMisses:
    """Finds the name that was probably meant, a bounded number of times."""

    def __init__(self, known: KnownNames) -> None:
        self._known = known
        self._left = _MAX_NEAR_MISSES
        self._by_family: dict[str, tuple[list[str], list[str]]] | None = None

    def meant(self, name: str, family: Family) -> str:
        """The name that was most likely meant, or ""."""
        return under_another_prefix(name, self._is_real) or self.similar(name, family)

    def similar(self, name: str, family: Family) -> str:
        """The same under the prefix that the name has."""
        if self._left == 0:
            return ""
        self._left -= 1
        if self._by_family is None:
            self._by_family = _grouped(self._known)
        documented, mentioned = self._by_family.get(family.name, ([], []))
        return closest(name, documented, mentioned)

    def _is_real(self, name: str) -> bool:
        return name in DOCUMENTED or self._known.is_read(name)


def _grouped(known: KnownNames) -> dict[str, tuple[list[str], list[str]]]:
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for at, names in ((0, DOCUMENTED), (1, known.readers)):
        for name in names:
            family = family_of(name)
            if family is not None:
                groups.setdefault(family.name, ([], []))[at].append(name)
    return groups


def _name_finding(name: str, environ: Mapping[str, str], known: KnownNames, near_misses: _NearMisses) -> Finding | None:
    value = environ[name]
    mended = under_a_mended_prefix(name)
    if mended and not known.is_read(name):
        if mended in DOCUMENTED or known.is_read(mended):
            return _found(name, value, "unknown name", "nothing reads this name", f"did you mean {mended}?", "")
        return None
    advice = ADVICE.get(name)
    if advice is not None:
        return _advised(name, value, advice, known)
    family = family_of(name)
    if family is None or known.is_read(name) or _is_documented_and_held(name, known):
        return None
    if is_ambient(name):
        return None if name in DOCUMENTED else _misspelt_path(name, value, near_misses, family)
    meant = near_misses.meant(name, family) if name not in DOCUMENTED else ""
    hint = f"did you mean {meant}?" if meant else ""
    unsure = _why_not_sure(name, family, known) or _plugin_not_seen(family, environ, known)
    if unsure:
        return _found(name, value, "uncertain", unsure, hint, _searched(family, known), at_launch=False)
    if name in DOCUMENTED:
        sentence = f"the {family.name} that is installed here does not read it; others do"
        return _found(name, value, "unknown name", sentence, "unset it", _searched(family, known))
    sentence = f"no library that is installed here reads it{_searched_text(family, known)}"
    return _found(
        name, value, "unknown name", sentence, hint or "unset it, or look up its name", _searched(family, known)
    )


def _is_documented_and_held(name: str, known: KnownNames) -> bool:
    return name in DOCUMENTED and name in known.mentions


def _misspelt_path(name: str, value: str, near_misses: _NearMisses, family: Family) -> Finding | None:
    # TORCH_EXTENSION_DIR seems to be one of the many names of paths, but lacks one letter. Under another prefix it may
    # be a path of its own: NVIDIA's images set PYTORCH_HOME, and torch reads TORCH_HOME.
    meant = near_misses.similar(name, family)
    if not meant or meant not in DOCUMENTED or len(name) < 12:  # noqa: PLR2004 - short names are similar to many
        return None
    return _found(name, value, "unknown name", "nothing reads this name", f"did you mean {meant}?", "")


def _why_not_sure(name: str, family: Family, known: KnownNames) -> str:
    """Why it is uncertain that nothing reads a name, or "" if it is certain."""
    titles = known.mentions.get(name)
    if titles:
        return f"it is only mentioned, in {', '.join(titles[:_LISTED])}"
    if not known.has_owner(family):
        return f"no {family.name} library was found here, so it is not known whether it reads this name"
    if family.composed:
        return f"{family.name} builds its names at run time"
    if any(name.startswith(prefix) for prefix in known.open_prefixes):
        return "something installed here builds names with this prefix at run time"
    if family.name == "CUDA" and not _shows_its_names("CUDA_VISIBLE_DEVICES", "libcuda.so", known):
        return "the driver's file does not show which names it reads"
    if family.name == "torch" and is_for_accelerators(name) and not known.owners.get("torch for accelerators"):
        return "only a torch built for GPUs would read this name, and the one here is not"
    if known.unsearched:
        return f"not all of the installation could be read ({', '.join(known.unsearched[:_LISTED])})"
    return ""


def _plugin_not_seen(family: Family, environ: Mapping[str, str], known: KnownNames) -> str:
    if family.name != "NCCL":
        return ""
    for name in NCCL_PLUGINS:
        value = environ.get(name, "")[:_MAX_PATH_CHARS]
        plugin = value.rpartition("/")[2]
        if value and plugin.lower() != "none" and not any(plugin in library for library in known.libraries):
            return f"the plug-in that {name} names was not found, and may read this name"
    return ""


def _shows_its_names(name: str, library: str, known: KnownNames) -> bool:
    return any(reader.startswith(library) for reader in known.readers_of(name))


def _is_read_by_its_family(name: str, known: KnownNames) -> bool:
    if not name.startswith(("TORCH_", "PYTORCH_")):
        return known.is_read(name)
    return any(reader.startswith(("libtorch", "libc10", "torch ")) for reader in known.readers_of(name))


def _advised(name: str, value: str, advice: Advice, known: KnownNames) -> Finding | None:
    if advice.still_read:
        # In older releases the old name is right, also if a script sets both.
        if advice.instead and known.owners.get("torch") and not _is_read_by_its_family(advice.instead, known):
            return None
    else:
        readers = known.readers_of(name)
        if readers:
            sentence = f"{advice.sentence}, but {', '.join(readers[:_LISTED])} does"
            return _found(name, value, "uncertain", sentence, advice.hint, advice.source, at_launch=False)
    return _found(name, value, advice.kind, advice.sentence, advice.hint, advice.source, at_launch=advice.at_launch)


def _value_findings(name: str, value: str, host: HostFacts) -> Iterator[Finding]:
    setting = SETTINGS.get(name)
    if setting is None or not value:
        return
    complaint = setting.check(value[:_MAX_VALUE_CHARS], host)
    if complaint:
        yield _found(name, value, "bad value", f"{complaint}; {setting.consequence}", "", setting.source)


def _searched(family: Family, known: KnownNames) -> str:
    owners = known.owners.get(family.name, ())
    modules = [module for module in known.modules if module.startswith("torch ")]
    names = [*owners, *modules, f"{len(known.libraries)} libraries in all"]
    return "searched: " + ", ".join(names[:8])


def _searched_text(family: Family, known: KnownNames) -> str:
    owners = known.owners.get(family.name, ())
    return f" (searched {', '.join(owners[:_LISTED])} and Python's modules)" if owners else ""


def _found(
    name: str, value: str, verdict: Verdict, sentence: str, hint: str, source: str, *, at_launch: bool = True
) -> Finding:
    return Finding(name, shown(name, value), verdict, sentence, hint, source, at_launch)
