"""Modules and libraries that are not there, or do not load. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes.failure import Failure, cause, shortened
from saferun.diagnosis.causes.hints import CIRCULAR, VERSIONS
from saferun.diagnosis.causes.texts import first_line
from saferun.diagnosis.causes.wrapped_errors import exception_cause, headline_of
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "zipimport.ZipImportError"})
_BINARY = LazyPattern(
    r"undefined symbol|cannot open shared object file|GLIBC(?:XX)?_[\d.]{1,12}. not found|\bABI\b|wrong ELF class"
    r"|invalid ELF header|file too short"
)
# Packages that load their parts late raise an error of another type.
_IMPORT_QUOTED = LazyPattern(
    r"\b[Ff]ailed to import \S{1,200} because of\b|^cannot import name '\S{1,200}' from |^No module named '\S{1,200}'$"
)
_LINES_OF_QUOTED = 20
# Of ctypes, which raises OSError, and of ld.so.
_NO_LIBRARY = LazyPattern(
    r"^(?:OSError: )?/?\S{1,300}\.so\S{0,40}: (?:cannot open shared object file|undefined symbol"
    r"|invalid ELF header|file too short"
    r"|wrong ELF class|version `.{1,60}' not found)"
)
# Names of C++ and of Python: a symbol of a C library is missing where another version of that is found first.
_OF_ANOTHER_BUILD = LazyPattern(r"\.so\S{0,40}: undefined symbol: (?:_Z|_?Py)")
_OWN_LIBRARY = LazyPattern(
    r"No module named 'encodings'|Fatal Python error: (?:init|_Py|Py_)\w{2,40}: .{0,40}\b(?:codec|path|import|site)"
)
_GIVEN_UP = LazyPattern(
    r"\bFATAL\b.{0,60}\b(?:[Cc]annot|[Cc]ould not|[Ff]ailed to|[Uu]nable to) load (?:\w{1,20} ){0,3}"
    r"\S{0,80}\blib\w.{0,120}"
)
# Of a library that aborts when it does not find another one; one that goes on may warn in the same words.
_ABORTED = LazyPattern(
    r"^(?:[Cc]annot|[Cc]ould not|[Ff]ailed to|[Uu]nable to) load (?:the )?(?:library |any of )?['\"{]?lib\w.{0,120}"
)
_OTHER_VERSION = LazyPattern(
    r"\bnumpy\.\S{1,40} (?:size changed|failed to import)|\bbinary incompatibility\b|\b_ARRAY_API not found\b"
    r"|\boperator torch(?:vision|audio)::\w{1,40} does not exist\b|\bwere compiled with different CUDA\b"
    r"|\bcompiled (?:against|using|with|for) .{1,80}(?:\bbut\b.{1,80}\b(?:is|has|with|against)\b|\bcannot be run in\b)"
)
_LOADER = LazyPattern(
    r": error while loading shared libraries: (.{1,200})|: (symbol lookup error: .{1,200})"
    r"|: (version `.{1,60}' not found \(required by .{1,200})"
)
_NO_LIBRARY_ADVICE = "look at LD_LIBRARY_PATH and the modules loaded, and whether every host has this library"
_REBUILD = "a compiled extension does not fit this torch or this host's libraries: rebuild or reinstall it"
_INSTALL = "install it, on every host, in the Python that the ranks run in"
# Of the distribution: no package of Python brings them.
_OF_THE_SYSTEM = LazyPattern(
    r"\blib(?:GL|EGL|OpenGL|GLX|GLU|gthread-2\.0|glib-2\.0|SM|X11|Xext|Xrender|xcb|sndfile|gomp|ibverbs|rdmacm|numa)"
    r"\.so\.\d{1,3}: cannot open shared object file"
)
_INSTALL_IN_SYSTEM = (
    "install this library of the system on every host, in the image (of Debian: libgl1 has libGL.so.1, libglib2.0-0 "
    "libgthread-2.0.so.0); for OpenCV opencv-python-headless does without libGL"
)
_LIBRARY_ADVICE = ((_OF_ANOTHER_BUILD, _REBUILD), (_OF_THE_SYSTEM, _INSTALL_IN_SYSTEM))
# What is installed, and is not to be installed again; the special ones first.
_IMPORT_ADVICE = (
    (
        LazyPattern(r"cannot import name '_C\b"),
        "its compiled extension is not there: build or reinstall the package, on every host",
    ),
    (LazyPattern(r"\bcircular import\b|\bpartially initialized module\b"), CIRCULAR),
    (
        LazyPattern(r"cannot import name '.{1,200}\(unknown location\)"),
        (
            "a folder of that name is found, and no module with this name in it: look for one in the working directory "
            "and PYTHONPATH, and whether the package is whole"
        ),
    ),
    (LazyPattern(r"cannot import name '.{1,300}/(?:site|dist)-packages/"), VERSIONS),
    (
        LazyPattern(r"cannot import name '"),
        "the module has no such name: check whether its file is the one that is meant, and of the right version",
    ),
    (
        LazyPattern(r"; '.{1,200}' is not a package$"),
        "another module of that name is found first, usually a file of your own: rename it, or look at PYTHONPATH",
    ),
    (
        LazyPattern(r"\battempted relative import\b"),
        "start it as a module of its package, from the directory above that: saferun -m PACKAGE.MODULE",
    ),
    (
        LazyPattern(r"^ModuleNotFoundError: No module named 'saferun\."),
        "saferun has no module of this name for scripts; write `import saferun`, or `from saferun import debug`",
    ),
    (
        # Of some names several packages each install a part: those that are there do not show that this one is.
        LazyPattern(
            r"^ModuleNotFoundError: No module named '(?!(?:google|ruamel|mpl_toolkits|azure|zope|nvidia|jaraco)\.)"
            r"[^'.]{1,100}\.[^']{1,200}'$"
        ),
        (
            "the package is found, but a part of it is not: install the version of it that has this part, on every "
            "host; your own folder may have its name"
        ),
    ),
    (
        LazyPattern(r"\bstatic TLS\b"),
        "too many libraries were loaded before it: import it first, or name its file in LD_PRELOAD",
    ),
    # As packages check the versions of others that are installed.
    (LazyPattern(r"^ImportError: [\w.-]{1,60}(?:[<>=!~]=|[<>])[\w.]{1,40}\S{0,80} is required\b"), VERSIONS),
    (_OF_THE_SYSTEM, _INSTALL_IN_SYSTEM),
    (_BINARY, _REBUILD),
)
_NO_MODULE = LazyPattern(r": No module named (\S{1,200})$|: Error while finding module specification for '(\S{1,200})'")
_NO_LIBRARY_LOADED = LazyPattern(
    r"\b(?:[Cc]ould not|[Ff]ailed to|[Cc]annot|[Uu]nable to) (?:load|open"
    r"|dlopen) (?:the )?(?:\w{1,20} ){0,3}['\"]?lib[a-z]\w{0,60}"
    r"|\bCUDA Setup failed despite\b|\b(?:[Cc]ould not|[Ff]ailed to|[Uu]nable to) load (?:the )?(?:native|shared"
    r"|dynamic) library"
)
_LONGEST_MESSAGE = 200


def import_error(failure: Failure) -> Cause | None:
    """A module that is not there, or does not load."""
    error = failure.error
    if error is not None and error.last.exception in _IMPORT_ERRORS:
        line = error.last.message[0]
        advice = next((advice for pattern, advice in _IMPORT_ADVICE if pattern.search(line)), _INSTALL)
        return cause(failure, "import_error", shortened(line, _LONGEST_MESSAGE), advice, proof=line)
    quoted = first_line(_NO_LIBRARY, failure.messages) if error is not None else None
    if quoted is None and error is not None:
        quoted = first_line(_IMPORT_QUOTED, error.innermost.message[:_LINES_OF_QUOTED])
        if quoted is not None and _BINARY.search(quoted[0]) is None:
            return _late_import(failure, error.innermost.message, quoted[0])
    if quoted is not None:
        line = quoted[0]
        advice = next((advice for pattern, advice in _LIBRARY_ADVICE if pattern.search(line)), _NO_LIBRARY_ADVICE)
        return cause(failure, "import_error", shortened(line, _LONGEST_MESSAGE), advice, proof=line)
    lines = failure.last_lines[-3:] if failure.died_silently and not failure.signum else ()
    unloaded = first_line(_LOADER, (line for line in lines if "arning" not in line))
    if unloaded is not None:
        message = f"a program does not start: {next(filter(None, unloaded[1].groups()))}"
        return cause(failure, "import_error", message, _NO_LIBRARY_ADVICE, proof=unloaded[0])
    found = first_line(_NO_MODULE, lines)
    if found is None:
        return None
    name = found[1][1] or found[1][2]
    advice = "look at the module's name, and at PYTHONPATH"
    if name.endswith(".py") and len(name) > len(".py"):
        advice = f"-m takes a module's name: -m {name.removesuffix('.py').removeprefix('./').replace('/', '.')}"
    return cause(failure, "import_error", f"no module named {name}", advice, proof=found[0])


def _late_import(failure: Failure, message: Sequence[str], line: str) -> Cause:
    """A part of a package that could not be imported when it was used; the reason may stand below."""
    headline = headline_of(message) if line == message[0] else None
    if headline is None or headline.text == shortened(line, _LONGEST_MESSAGE):
        return cause(failure, "import_error", shortened(line, _LONGEST_MESSAGE), VERSIONS, proof=line)
    reason = message[1].strip()
    kind = "ModuleNotFoundError" if reason.startswith("No module named ") else "ImportError"
    default = _INSTALL if kind == "ModuleNotFoundError" else VERSIONS
    advice = next((advice for pattern, advice in _IMPORT_ADVICE if pattern.search(f"{kind}: {reason}")), default)
    return cause(failure, "import_error", headline.text, advice, proof=line)


def library_unusable(failure: Failure) -> Cause | None:
    """A library that the rank cannot do without, and that is not there or of another version."""
    lines = (*failure.messages, *failure.closing_lines)
    found = first_line(_OWN_LIBRARY, lines)
    if found is not None:
        message = "Python does not start: it does not find its own library"
        advice = "look at PYTHONHOME and PYTHONPATH, and whether every host has this Python at the same path"
        return cause(failure, "import_error", message, advice, proof=found[0])
    found = first_line(_OTHER_VERSION, failure.messages)
    if found is not None:
        return cause(failure, "import_error", shortened(found[0], _LONGEST_MESSAGE), _REBUILD, proof=found[0])
    found = first_line(_GIVEN_UP, failure.closing_lines)
    if found is None and failure.signum:
        found = first_line(_ABORTED, failure.closing_lines)
    if found is None:
        return None
    message = f"a library cannot be loaded: {found[1][0]}"
    return cause(failure, "import_error", message, _NO_LIBRARY_ADVICE, proof=found[0])


def library_missing(failure: Failure) -> Cause | None:
    """A library that a package loads by itself, which says so in its own way."""
    if failure.error is None or first_line(_NO_LIBRARY_LOADED, failure.messages[:20]) is None:
        return None
    return exception_cause(failure, "import_error", _NO_LIBRARY_ADVICE)
