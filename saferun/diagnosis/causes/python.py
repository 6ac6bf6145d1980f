"""Ranks that Python ended: exceptions, imports, syntax, options, exit codes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes.failure import Failure, cause, own_lines, shortened
from saferun.diagnosis.causes.hints import CIRCULAR, COMPILING, OF_TORCH_COMPILE, VERSIONS, hint_for
from saferun.diagnosis.causes.texts import first_line
from saferun.diagnosis.causes.wrapped_errors import headline_of
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.progress_bars import is_bar
from saferun.diagnosis.tracebacks import SYNTAX_ERRORS, PythonError
from saferun.evidence.diagnosis_values import Cause

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "zipimport.ZipImportError"})
_MISSING = frozenset({"FileNotFoundError", "NotADirectoryError"})
_CONNECTION_ERRORS = frozenset({"BrokenPipeError", "ConnectionResetError", "ConnectionAbortedError"})
# Of the standard library, for a process that the program has started, and its stdout and stderr.
_PIPE_MODULES = ("/subprocess.py", "/asyncio/subprocess.py", "/logging/__init__.py")
_PIPE_CALL = LazyPattern(
    r"\bstd(?:in|out|err)\.(?:buffer\.)?(?:write|writelines|flush|close)\(|^print\(|\bcommunicate\("
)
# The line of the source, and the marks below it.
_LINES_OF_A_CALL = 2
# An EOFError with a message is about a file or the keyboard; multiprocessing's, of a connection, has none.
_CONNECTION_MESSAGE = LazyPattern(
    r"RuntimeError: (?:Broken pipe|Connection reset by peer|Connection refused)$|EOFError(?:: ?)?$"
)
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
    (_BINARY, _REBUILD),
)
_NO_MODULE = LazyPattern(r": No module named (\S{1,200})$|: Error while finding module specification for '(\S{1,200})'")
_OPTION_ERROR = LazyPattern(
    r"^(\S{1,200}): error: (.{1,300})|^(?:Error|ERROR): (?:No such option|Invalid value|Missing).{0,300}"
)
# What argparse says; a usage of many lines is no longer known.
_OF_ARGUMENTS = LazyPattern(
    r": error: (?:unrecognized arguments: |the following arguments are required: |ambiguous option: "
    r"|one of the arguments |argument .{1,120}: (?:expected |invalid |not allowed with ))"
)
_NO_SCRIPT = LazyPattern(r"can't open file '(.{1,300}?)': \[Errno \d{1,3}\] (.{1,100})")
_USAGE = LazyPattern(r"^[Uu]sage: .{1,300}")
_USAGE_STATUS = 2
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_HYDRA = "HYDRA_FULL_ERROR=1"
_HYDRA_RUNS = "Error executing job with overrides"
_HYDRA_BEGINS = LazyPattern(
    r"(?:Could not |Cannot |Error |In '|Key '|Missing |Missing\w{1,20} |Primary config |Ambiguous |Multiple |Unable to "
    r"|You must specify |mismatched input |extraneous input |no viable |token recognition |missing |Interpolation"
    r"|Invalid |Value '|Config|Defaults |Unrecognized |Unknown )"
)
_HYDRA_ADVICE = (
    "look at the configuration and at the overrides on the command line; HYDRA_FULL_ERROR=1 shows the traceback"
)
_LINES_OF_HYDRA, _LINES_AFTER_HYDRA = 12, 3
_LETTERS = LazyPattern(r"[^\W_]")
# What gives no reason: a warning of torch's, a line of a source.
_OF_TORCH = LazyPattern(r"\s|\[W\d{0,4} ?\d\d:\d\d")
_NO_TEXT = LazyPattern(r"null bytes|Non-UTF-8 code|invalid non-printable character")
_PYTHON = (".py", ".pyw", ".pyc", ">")
_NO_LIBRARY_LOADED = LazyPattern(
    r"\b(?:[Cc]ould not|[Ff]ailed to|[Cc]annot|[Uu]nable to) (?:load|open"
    r"|dlopen) (?:the )?(?:\w{1,20} ){0,3}['\"]?lib[a-z]\w{0,60}"
    r"|\bCUDA Setup failed despite\b|\b(?:[Cc]ould not|[Ff]ailed to|[Uu]nable to) load (?:the )?(?:native|shared"
    r"|dynamic) library"
)
# strerror(3), as exceptions of other types quote it; of a compiler's headers it is about the compiler.
_ERRNO_TEXTS = (
    (
        LazyPattern(
            r"(?<!\.h)(?<!\.hpp): No such file or directory\b|\bENOENT\b|\(os error 2\)"
            r"|\bParent directory \S{1,300} does not exist\b"
        ),
        "file_missing",
    ),
    (
        LazyPattern(r": Permission denied$|: Operation not permitted$|\bE(?:ACCES|PERM)\b|\(os error (?:1|13)\)"),
        "permission_denied",
    ),
)
# What a package raises that calls another one, or another part of itself, which has changed since.
_CALL_ERRORS = frozenset({"AttributeError", "TypeError", "NameError", "ImportError"})
_PACKAGES = ("/site-packages/", "/dist-packages/")
_LONGEST_MESSAGE = 200
# Options that are written behind the script by mistake, with dashes.
LAUNCHER_OPTIONS = frozenset(
    """--nproc-per-node --nnodes --node-rank --master-addr --master-port --standalone --max-restarts --rdzv-backend
    --rdzv-endpoint --rdzv-id --rdzv-conf --hang-timeout --on-hang --env-profile --run-dir --prefix --preflight --nic
    --monitor-interval --start-method --no-python --run-path --redirects --tee --log-dir""".split()
)


def syntax_error(failure: Failure) -> Cause | None:
    """A source that Python cannot read."""
    error = failure.error
    if error is None or error.innermost.exception not in SYNTAX_ERRORS:
        return None
    # The location of the fault is the last frame, also in a library.
    frames = error.innermost.frames
    if frames and frames[-1].file.startswith("<"):
        # No source, but text that the program has evaluated, maybe of its data.
        return None
    name = frames[-1].file.rpartition("/")[2] if frames else ""
    location = f"{name}:{frames[-1].line}" if frames else ""
    line = error.innermost.message[0]
    if len(frames) == 1 and not name.endswith(_PYTHON):
        if "." not in name and _NO_TEXT.search(line) is None:
            # Programs have no suffix, in Python or not.
            advice = f"fix the source at that line; programs of another kind are started with --no-python ./{name}"
            return cause(failure, "syntax_error", line, advice, proof=line, location=location)
        advice = f"is it a program of another kind? Those are started with saferun --no-python ./{name}"
        return cause(
            failure, "syntax_error", f"{name} is not a Python file: {line}", advice, proof=line, location=location
        )
    return cause(failure, "syntax_error", line, "fix the source at that line", proof=line, location=location)


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
        advice = _REBUILD if _OF_ANOTHER_BUILD.search(line) else _NO_LIBRARY_ADVICE
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


def usage_error(failure: Failure) -> Cause | None:
    """The script did not understand its arguments, or is not there."""
    if failure.end.status.code != _USAGE_STATUS or not failure.died_silently:
        return None
    found = first_line(_NO_SCRIPT, reversed(failure.last_lines[-5:]))
    if found is not None:
        message = f"Python cannot open {found[1][1]}: {found[1][2]}"
        return cause(failure, "usage_error", message, "look at the path of the script", proof=found[0])
    found = first_line(_OPTION_ERROR, reversed(failure.last_lines))
    if found is not None:
        message = f"the script does not understand its arguments: {found[1][2] or found[1][0]}"
        return cause(failure, "usage_error", message, _arguments_hint(found[0]), proof=found[0])
    found = first_line(_USAGE, reversed(failure.last_lines))
    if found is not None:
        message = "the script does not understand its arguments"
        return cause(failure, "usage_error", message, "check the arguments after the script's name", proof=found[0])
    return None


def arguments_error(failure: Failure) -> Cause | None:
    """The last words are those of the script's parser of arguments: what stands before them has not ended it.

    A script may report any error by its parser, and other programs have parsers too.
    """
    if failure.end.status.code != _USAGE_STATUS or not failure.died_silently:
        return None
    own = own_lines(failure.last_lines)
    error = _OPTION_ERROR.match(own[-1]) if own else None
    if error is None:
        return None
    if error[1]:
        is_it = _OF_ARGUMENTS.search(error[0]) is not None and error[1] == failure.user.script.rpartition("/")[2]
    else:
        # click's.
        is_it = any(_USAGE.match(line) for line in failure.last_lines)
    return usage_error(failure) if is_it else None


def _arguments_hint(line: str) -> str:
    """What to do about an argument that the script does not know: it may be an option of the launcher."""
    for word in line.replace(",", " ").replace(":", " ").split():
        flag = word.strip("'\"").partition("=")[0]
        if flag.replace("_", "-") in LAUNCHER_OPTIONS:
            return f"{flag} is an option of saferun: write it before the script's name"
    return "check the arguments after the script's name"


def connection_lost(failure: Failure) -> Cause | None:
    """An exception that another process's end may well have caused."""
    error = failure.error
    if error is None:
        return None
    if _is_own_pipe(failure):
        return _exception(failure, "python_exception", "check how its own child process (other end of the pipe) ended")
    is_connection = error.last.exception.rpartition(".")[2] in _CONNECTION_ERRORS
    if not is_connection and _CONNECTION_MESSAGE.match(error.last.message[0] if error.last.message else "") is None:
        return None
    return _exception(failure, "connection_lost", "look at what it was connected to")


def _is_own_pipe(failure: Failure) -> bool:
    """Whether what broke is a pipe to a process of the rank's own, and no connection to another rank.

    Calls of the standard library show it, and so does the line of the source that the traceback quotes. A pipe can be
    written to only by ``BrokenPipeError``; a socket of another rank's fails in the same way, so all else is left alone.
    """
    error = failure.error
    if error is None or error.last.exception.rpartition(".")[2] != "BrokenPipeError" or error.last.message[1:]:
        return False
    frames = error.last.frames
    if not frames or any("/torch/distributed/" in frame.file for frame in frames):
        return False
    if frames[-1].file.endswith(_PIPE_MODULES):
        return True
    quoted = [
        line.strip() for line in error.lines[: error.last.message_start - error.blocks[0].start][-_LINES_OF_A_CALL:]
    ]
    return any(_PIPE_CALL.search(line) for line in quoted if not line.startswith("File "))


def assertion_error(failure: Failure) -> Cause | None:
    """A check of the program's own."""
    error = failure.error
    if error is None or error.innermost.exception != "AssertionError":
        return None
    return _exception(failure, "assertion_error", "look at what the assertion at that line checks")


_MISSING_ADVICE = "look at the path, relative ones from the ranks' working directory, and whether every host has it"


def file_missing(failure: Failure) -> Cause | None:
    """A file or a directory that is not there."""
    error = failure.error
    if error is None or error.innermost.exception not in _MISSING:
        return None
    return _exception(failure, "file_missing", _MISSING_ADVICE)


def permission_denied(failure: Failure) -> Cause | None:
    """A file or a device that this user may not use."""
    error = failure.error
    if error is None or error.innermost.exception != "PermissionError":
        return None
    return _exception(failure, "permission_denied", _PERMISSION_ADVICE)


_PERMISSION_ADVICE = (
    "look at the owner and mode of the path on every host; in containers HOME and the caches may belong to another "
    "user (HF_HOME, TORCH_HOME, TRITON_CACHE_DIR, XDG_CACHE_HOME set them)"
)


def library_missing(failure: Failure) -> Cause | None:
    """A library that a package loads by itself, which says so in its own way."""
    if failure.error is None or first_line(_NO_LIBRARY_LOADED, failure.messages[:20]) is None:
        return None
    return _exception(failure, "import_error", _NO_LIBRARY_ADVICE)


def by_errno_text(failure: Failure) -> Cause | None:
    """An exception of any type that quotes what the system said of a file."""
    if failure.error is None:
        return None
    line = (failure.error.innermost.message or ("",))[0]
    if COMPILING.search(line) or OF_TORCH_COMPILE.search(line):
        return None
    for pattern, class_name in _ERRNO_TEXTS:
        if pattern.search(line):
            advice = _MISSING_ADVICE if class_name == "file_missing" else _PERMISSION_ADVICE
            return _exception(failure, class_name, advice)
    return None


def python_exception(failure: Failure) -> Cause | None:
    """An uncaught exception. The message names the line; most need no other advice."""
    if failure.error is None:
        return None
    message = failure.error.innermost.message
    quoted = headline_of(message).line if message else ""
    # What an exception quotes as its reason says more than its other lines.
    hint = hint_for((quoted,)) if message and quoted != message[0] else ""
    hint = hint or hint_for(failure.messages[:20])
    if not hint and failure.error.innermost.exception in _CALL_ERRORS and _is_in_package(failure.error):
        hint = VERSIONS
    return _exception(failure, "python_exception", hint)


def _is_in_package(error: PythonError) -> bool:
    """Whether the call that failed is one of an installed package."""
    frames = error.innermost.frames
    return bool(frames) and any(part in frames[-1].file for part in _PACKAGES)


def _exception(failure: Failure, class_name: str, advice: str) -> Cause:
    assert failure.error is not None  # noqa: S101 - both callers have asked
    innermost = failure.error.innermost
    message, line = headline_of(innermost.message or (innermost.exception,))
    if innermost.link == "nested" and "in DataLoader worker process" in "".join(failure.error.last.message[:1]):
        message += " (in a data-loader worker)"
    return cause(failure, class_name, message, advice, proof=line)


def python_exit(failure: Failure) -> Cause | None:
    """It ended by itself with an exit code, and no exception."""
    code = failure.end.status.code
    if code is None or failure.signum:
        return None
    # Not a ruler, or the end of a frame.
    worded = [line for line in failure.lines if _LETTERS.search(line)]
    if any(_HYDRA in line for line in worded):
        why = _hydra_error(worded)
        if why:
            message = f"ended with exit code {code}; Hydra reports: {shortened(why, 160)}"
            return cause(failure, "python_exit", message, _HYDRA_ADVICE, proof=why)
        worded = [line for line in worded if _HYDRA not in line]
    own = own_lines(worded)
    last = (own or [line for line in worded if not line[0].isspace()] or worded or [""])[-1]
    if code in {_NOT_EXECUTABLE, _NOT_FOUND} and last:
        message = f"exit code {code}: {shortened(last, 160)}"
        return cause(failure, "python_exit", message, "the shell cannot find or cannot run the command", proof=last)
    beside = ""
    if not own and (own_beside := own_lines(failure.stdout_lines)):
        # Warnings, and logs of libraries, are no last words, but may say why all the same.
        beside = next((line for line in reversed(worded) if not (_OF_TORCH.match(line) or is_bar(line))), "")
        last = own_beside[-1]
    last = last or next((line for line in reversed(failure.stdout_lines) if line.strip()), "")
    if not last:
        return cause(failure, "python_exit", f"ended with exit code {code} and no message", "")
    # Rich draws its tracebacks into boxes.
    printed = (*failure.lines, *failure.stdout_lines)
    has_traceback = failure.earlier is not None or any("Traceback (most recent call last)" in line for line in printed)
    how = f"exit code {code}{'' if has_traceback else ' and no traceback'}"
    message = f"ended with {how}; its last line of output: {shortened(last.strip(), 160)}"
    message += f"; of stderr: {shortened(beside.strip(), 120)}" if beside else ""
    # It has said why, and nothing more is known.
    return cause(failure, "python_exit", message, _earlier_error(failure), proof=last)


def _earlier_error(failure: Failure) -> str:
    """What is said of an error that the program had printed before, and probably got over."""
    error = failure.earlier
    if error is None or not error.last.message:
        return ""
    location = error.location(failure.user)
    line = shortened(error.last.message[0], _LONGEST_MESSAGE)
    at = f", at {shortened(location)}" if location else ""
    return f"an error that it printed before need not be the reason: {line}{at}"


def _hydra_error(lines: list[str]) -> str:
    """What Hydra says is wrong: the first line of a few, before the one that names its variable."""
    end = max(index for index, line in enumerate(lines) if _HYDRA in line)
    if end < len(lines) - 1 - _LINES_AFTER_HYDRA:
        return ""
    block = [line for line in lines[max(end - _LINES_OF_HYDRA, 0) : end] if not line.startswith(_HYDRA_RUNS)]
    start = next((index for index, line in enumerate(block) if _HYDRA_BEGINS.match(line)), len(block) - 1)
    text = " ".join(line.strip() for line in block[start : start + 1])
    # Of a call that failed the exception stands in the next line.
    return f"{text} {block[start + 1].strip()}" if text.endswith(":") and block[start + 1 :] else text
