"""Loads saferun's hook (``saferun_hook.py``) into a rank's Python, and gives way.

Python imports a module of this name at start-up, before the script; this directory is the first on PYTHONPATH of the
ranks. When the hook has been loaded, where ``SAFERUN_HOOK`` asks for it, the module takes itself away, from
``sys.path`` and the environment too, and lets the ``sitecustomize`` follow that Python would have found without it.
Whatever goes wrong here stays silent: it may not disturb the program.

The syntax is that of Python 2.7 as well: a rank may be a shell script that starts any Python, which would complain of
what it cannot read, and leave the site's own ``sitecustomize`` out. For what else may be used see the hook.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

_OWN = []  # type: list[object]  # Python 2 would clear this module's names when it is gone


def _load():  # type: () -> None  # noqa: ANN202 - as Python 2 has it
    if os.environ.get("SAFERUN_HOOK", "").startswith("/") and sys.version_info >= (3, 6):
        try:
            __import__("saferun_hook")
        finally:
            sys.modules.pop("saferun_hook", None)


def _leave():  # type: () -> None  # noqa: ANN202 - likewise
    entry = os.path.dirname(__file__)
    before_path = list(sys.path)
    sys.path[:] = [path for path in sys.path if path != entry]
    sys.path_importer_cache.pop(entry, None)
    _OWN.append(sys.modules.pop(__name__))
    # Interpreters within this process run this file once more, and shall find nothing to do.
    os.environ.pop("SAFERUN_HOOK", None)
    os.environ.pop("SAFERUN_TRACE", None)
    os.environ.pop("SAFERUN_PDB", None)
    os.environ.pop("SAFERUN_FAULTHANDLER", None)
    before = os.environ.pop("SAFERUN_PYTHONPATH", None)
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(":")
        kept = [path for path in entries if path != entry]
        if kept and before is not None:
            # A shell script has put others beside it (``export PYTHONPATH=/x:$PYTHONPATH``). Without ours it would have
            # put an empty entry there, which is the current directory.
            kept = ["" if path == entry else path for path in entries]
            try:
                current = os.getcwd()
            except OSError:
                current = ""
            if current and current not in sys.path and entry in before_path:
                sys.path.insert(before_path.index(entry), current)
        if kept or before == "empty":
            os.environ["PYTHONPATH"] = ":".join(kept)
        else:
            del os.environ["PYTHONPATH"]


if __name__ == "sitecustomize":
    try:
        _load()
    except Exception:  # noqa: S110 - silent
        pass
    _leave()
    # The next one on the path takes our place. Where there is none, the ImportError is what Python expects then.
    __import__("sitecustomize")
