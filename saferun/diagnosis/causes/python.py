"""Ranks that Python ended: exceptions, imports, syntax, options, exit codes. Pure."""

from __future__ import annotations

from saferun.diagnosis.causes.failure import Failure, cause, own_lines, shortened
from saferun.diagnosis.causes.hints import COMPILING, OF_TORCH_COMPILE, VERSIONS, hint_for
from saferun.diagnosis.causes.texts import first_line
from saferun.diagnosis.causes.wrapped_errors import exception_cause, headline_of, only_wraps, origin_of
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.message_end import announces_lines
from saferun.diagnosis.progress_bars import is_bar
from saferun.diagnosis.tracebacks import SYNTAX_ERRORS, PythonError
from saferun.evidence.diagnosis_values import Cause

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
# The call, or the raise statement, above the location that a SyntaxError has.
_READS_TEXT = LazyPattern(r"raise\b|.{0,300}\b(?:compile|exec|eval)\(")
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
_LINES_OF_HINTS = 20
_OF_HYDRA = LazyPattern(r"\bError in call to target '")
_OF_ARGUMENTS_OF_A_CALL = LazyPattern(r"TypeError: .{0,300}\bargument")
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
    if not frames or frames[-1].function:
        # The compiler names no function: this one was raised, as Pillow does for a file that is no image.
        return None
    if frames[-1].file.startswith("<") or (len(frames) > 1 and _was_read_as_data(error, frames[-1].file)):
        # No source, but text that the program has evaluated or parsed, maybe of its data.
        return None
    name = frames[-1].file.rpartition("/")[2]
    location = f"{name}:{frames[-1].line}"
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


def _was_read_as_data(error: PythonError, file: str) -> bool:
    """Whether the program itself has read the file that the error names: no import statement has."""
    if not file.endswith(_PYTHON):
        return True
    block = error.innermost
    printed = [line.strip() for line in error.lines[: block.message_start - error.blocks[0].start]]
    places = [index for index, line in enumerate(printed) if line.startswith('File "')]
    # All lines of the call, which newer Pythons print.
    quoted = printed[places[-2] : places[-1]] if len(places) > 1 else ()
    return any(_READS_TEXT.match(line) is not None for line in quoted)


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
        return exception_cause(
            failure, "python_exception", "check how its own child process (other end of the pipe) ended"
        )
    is_connection = error.last.exception.rpartition(".")[2] in _CONNECTION_ERRORS
    if not is_connection and _CONNECTION_MESSAGE.match(error.last.message[0] if error.last.message else "") is None:
        return None
    return exception_cause(failure, "connection_lost", "look at what it was connected to")


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
    message = error.innermost.message
    # What follows the first line may be the program's own output.
    is_whole = error.is_uncaught or any(map(announces_lines, message[:1]))
    advice = hint_for(message[: _LINES_OF_HINTS if is_whole else 1]) or "look at what the assertion at that line checks"
    return exception_cause(failure, "assertion_error", advice)


_MISSING_ADVICE = "look at the path, relative ones from the ranks' working directory, and whether every host has it"


def file_missing(failure: Failure) -> Cause | None:
    """A file or a directory that is not there."""
    error = failure.error
    if error is None or error.innermost.exception not in _MISSING:
        return None
    return exception_cause(failure, "file_missing", _MISSING_ADVICE)


def permission_denied(failure: Failure) -> Cause | None:
    """A file or a device that this user may not use."""
    error = failure.error
    if error is None or error.innermost.exception != "PermissionError":
        return None
    return exception_cause(failure, "permission_denied", _PERMISSION_ADVICE)


_PERMISSION_ADVICE = (
    "look at the owner and mode of the path on every host; in containers HOME and the caches may belong to another "
    "user (HF_HOME, TORCH_HOME, TRITON_CACHE_DIR, XDG_CACHE_HOME set them)"
)


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
            return exception_cause(failure, class_name, advice)
    return None


def python_exception(failure: Failure) -> Cause | None:
    """An uncaught exception. The message names the line; most need no other advice."""
    if failure.error is None:
        return None
    message = failure.error.innermost.message
    origin = origin_of(failure.error)
    if origin is not None and only_wraps(message):
        hint = hint_for(origin.message[:_LINES_OF_HINTS])
        if not hint and _OF_HYDRA.search(message[0]) and _OF_ARGUMENTS_OF_A_CALL.match(origin.message[0]):
            hint = hint_for(message[:1])
        return exception_cause(failure, "python_exception", hint)
    quoted = headline_of(message).line if message else ""
    # What an exception quotes as its reason says more than its other lines.
    hint = hint_for((quoted,)) if message and quoted != message[0] else ""
    hint = hint or hint_for(failure.messages[:_LINES_OF_HINTS])
    if not hint and failure.error.innermost.exception in _CALL_ERRORS and _is_in_package(failure.error):
        hint = VERSIONS
    return exception_cause(failure, "python_exception", hint)


def _is_in_package(error: PythonError) -> bool:
    """Whether the call that failed is one of an installed package."""
    frames = error.innermost.frames
    return bool(frames) and any(part in frames[-1].file for part in _PACKAGES)


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
    # What is not known may have the beginning of one with a long message.
    known = f" in the last {failure.cut_to} lines of its stderr" if failure.cut_to else ""
    how = f"exit code {code}{'' if has_traceback else f' and no traceback{known}'}"
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
