"""One failed rank as the rules see it: its end, its output, its core, and the kernel log. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from saferun.diagnosis.asides import ENDS_NOTHING, WHOSE, without_asides
from saferun.diagnosis.boxed_tracebacks import BOX_END, find_boxed_error
from saferun.diagnosis.causes.aborts_at_exit import LINES_AT_EXIT, NOISE, OF_SHUTDOWN, aborts_below
from saferun.diagnosis.causes.going_on import is_progress, went_on
from saferun.diagnosis.causes.native_calls import native_call
from saferun.diagnosis.causes.reasons import is_of_its_own
from saferun.diagnosis.frames import UserCode, file_name, is_native, location_text
from saferun.diagnosis.gpu_errors import GpuOwners
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.lazy_patterns import LazyPattern, first_match, is_found
from saferun.diagnosis.log_levels import warns
from saferun.diagnosis.progress_bars import is_bar
from saferun.diagnosis.recorded_exception import RecordedException, recorded_exception
from saferun.diagnosis.tracebacks import (
    LONGEST_LINE,
    CppError,
    FatalReport,
    PythonError,
    clean_lines,
    find_cpp_error,
    find_fatal_report,
    find_python_error,
    recorded_error,
)
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import CoreDump, Evidence, Frame, OomKill, RankOutput
from saferun.model import KEPT_BYTES, KEPT_LINES, RankEnd, Value

CRASH_SIGNALS = frozenset(
    {signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS}
)
"""Signals that a program brings upon itself."""

LAST_LINES = 40
"""What stands before them is not believed to have to do with the end."""
# What a script prints before it exits.
_LINES_BEFORE_EXIT = 10
LINES_AFTER_CAUGHT = 3
"""What a program prints when it has caught an exception and ends because of it."""
# Python ends so where it could not write its last output: an error that it prints then is the reason.
_NOT_FLUSHED = 120
_SHELL_SIGNAL = 128
_SHELL_SIGNALS = CRASH_SIGNALS | {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}
_LONGEST_PROOF = 400
# Of what is kept of a stream, blank lines and colors are left out.
_MANY_CHARS = KEPT_BYTES * 3 // 4
# Its summary at exit has a line or two for each metric.
_WANDB = "wandb:"
# How much of what rich prints below a traceback is read.
_LINES_BELOW_A_BOX = 20
# The rules search at most so many characters of the messages of all failures together, 2 to 4 µs each, whatever was
# written; of one failure more than any real message has, but fewer where there are many.
_CHARS_IN_ALL = 1_000_000
_LEAST_CHARS, _MOST_CHARS = 2_000, 16_000
_NCCL_ERROR = LazyPattern(r"\b(?:NCCL|RCCL) error\b|\b(?:nccl|rccl)\w{1,20}Error\b")
_NCCL_WARNING = LazyPattern(r"\bNCCL WARN (.{1,500})")
# A log's words for what is no failure, or none any more; the last of them is how Python shows a warning.
_GOT_OVER = LazyPattern(
    r"(?<!=)\b(?:INFO|DEBUG)\b(?!: \(Fatal\))"
    r"|\bis not a failure\b|[Rr]etrying\b|\b[Rr]etry \d{1,4}/\d|\bautomatically retried\b"
    r"|\battempt \d{1,4} (?:out )?of \d"
    r"|\b(?:entering retry loop|[Ss]kipping|[Ii]gnoring|[Rr]econnecting|[Rr]espawning|trying (?:the next|again|\d{1,9})"
    r"|was (?:caught|replaced|restarted|ignored|skipped)|[Ff]alling back|going on without"
    r"|will (?:re-?try|try (?:again|another|\d)))\b"
    r"|\(ignored\)|\.py:\d{1,6}: \w{1,40}Warning: "
)
# An error's advice has the same words, in another place of the sentence. As its last words they are a plan.
_MEANT_TO_GO_ON = LazyPattern(
    r"(?:^|[^\w\s] {1,2})(?:[Hh]alving|[Rr]educing|[Ll]owering) (?:the )?(?:\w{1,12}[ -])?batch[- _]?sizes?"
    r"(?: (?:to|from) \d| and |\.{3}|$)"
)
# An error that says all by its name: what stands before it is not what ended the program, unless it fails to clean up.
_NAMED_ERROR = LazyPattern(
    r"^(?!.{0,200}(?:\b[Cc]lean(?:ing)?[- ]?up|[Ss]hut(?:ting)?[- ]?down|[Ff]inali[sz]|\b[Cc]los(?:e|ing)\b"
    r"|'NoneType' object))"
    r"(?:\w{1,40}: )?(?:Assertion|Attribute|FileExists|FileNotFound|Import|Index|Key|ModuleNotFound|Name"
    r"|NotImplemented|Permission|Recursion|Type|Unicode\w{1,20}|Value|ZeroDivision)Error: \S"
)
# Faults that errors of other kinds follow from.
_FAULT = LazyPattern(
    r"OutOfMemoryError\b|Error: (?:CUDA|HIP) out of memory"
    r"|\b(?:CUDA|HIP|NCCL|RCCL|cuDNN|CUDNN|CUBLAS)\b.{0,80}\b[Ee]rror\b"
    r"|\b(?:nccl|rccl)\w{1,20}Error\b|NCCL WARN |\bNVRM: Xid\b|\bDist(?:Backend|Network|Store)Error\b|\bgloo\b"
    r"|\b[Cc]onnection (?:was )?(?:closed|reset|aborted|lost)\b|\b(?:Broken pipe|Socket closed)\b"
    r"|\bstopped sending heartbeats\b"
)
# What gives no reason why a program exits: warnings, logs of libraries, bars, lines of a source.
_NO_REASON = LazyPattern(
    r"\s|\[[DIW]\d{0,4} ?\d\d:\d\d|[DIW]\d{4} \d\d:\d\d|wandb:(?: |$)|.{0,200}(?:Warning|WARN|WARNING|NOTICE|TRACE)\b"
    r"|huggingface/tokenizers: |To disable this warning\b|\S{1,2} View (?:run|experiment)\b"
    r"|.{0,120}Unable to register cu\w{1,10} factory\b"
)
_LETTERS = LazyPattern(r"[^\W_]")
_INFORMS = LazyPattern(r"\d{4}-\d\d-\d\d [\d:.]{8,15}: I |I\d{4} \d\d:\d\d:\d\d")


class Failure(Value):
    """One rank that ended badly, or was ended.

    Attributes:
        end: how and when.
        signum: the signal that ended it, or the process that it is a shell around; 0 where none did.
        error: the Python exception that it ended with, where it is one that can be believed.
        cpp_error: the C++ exception that it ended with, likewise.
        fatal: what faulthandler wrote, likewise.
        lines: what is known of its stderr, cleaned.
        cut_to: how many lines of its stderr are known where it has most likely written more; 0: all are known.
        stdout_lines: of its stdout, cleaned.
        nccl_warnings: what NCCL has logged in either of them.
        earlier: a traceback that stands before lines of the program's own: it need not be what ended it.
        line_after: the last of those lines, also where the traceback is ``error`` all the same; empty: there are none.
        core: its core.
        oom: what the OOM killer did on this host.
        kernel_lines: lines of the kernel log since the start.
        others: pids of the ranks of its host, with their numbers.
        supervisor_pids: saferun's own.
        gpu_owners: which GPU of its host is whose.
        tools: the command lines of those that it ran under.
        user: distinguishes the user's own code.
    """

    end: RankEnd
    user: UserCode
    signum: int = 0
    error: PythonError | None = None
    cpp_error: CppError | None = None
    fatal: FatalReport | None = None
    lines: tuple[str, ...] = ()
    cut_to: int = 0
    stdout_lines: tuple[str, ...] = ()
    nccl_warnings: tuple[str, ...] = ()
    earlier: PythonError | None = None
    line_after: str = ""
    core: CoreDump | None = None
    oom: OomKill | None = None
    kernel_lines: tuple[str, ...] = ()
    others: Sequence[tuple[int, int]] = ()
    supervisor_pids: tuple[int, ...] = ()
    gpu_owners: GpuOwners = GpuOwners((), ())
    most_chars: int = _MOST_CHARS
    tools: tuple[str, ...] = ()

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages of the exception that ended it, Python's or C++'s; nearest first."""
        messages = self.error.messages if self.error is not None else ()
        messages = (*messages, *(self.cpp_error.message if self.cpp_error is not None else ()))
        # The exception quotes the last warning alone, which is often no more than a consequence.
        messages = _bounded(messages, self.most_chars)
        return (*messages, *self.nccl_warnings) if self.nccl_warnings and _is_of_nccl(messages) else messages

    @property
    def context(self) -> tuple[str, ...]:
        """The messages of exceptions during whose handling that one was raised."""
        return _bounded(self.error.context, self.most_chars) if self.error is not None else ()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of stderr: all that is relevant where no exception explains the end."""
        return self.lines[-LAST_LINES:]

    @property
    def closing_lines(self) -> tuple[str, ...]:
        """Its very last lines, last line first, where no exception explains the end; less what it got over.

        What stands below a traceback of rich's follows once more as one line: rich breaks it at the terminal's width.
        A library that gives up prints why and aborts; a script prints why and exits. Other ends leave no message.
        """
        if not self.died_silently or self.signum not in {0, signal.SIGABRT}:
            return ()
        return _closing_lines(self.last_lines, self.most_chars, has_exited=not self.signum)

    @property
    def died_silently(self) -> bool:
        """Whether no exception explains the end."""
        return not self.messages

    @property
    def own_last_lines(self) -> list[str]:
        """The lines of the program's own at the end of its stderr."""
        return own_lines(self.lines[-_LINES_BEFORE_EXIT:])

    @property
    def location(self) -> str:
        """The last call in the user's code: ``train.py:52 in step``; empty where unknown."""
        return self.location_and_manner[0]

    @property
    def location_and_manner(self) -> tuple[str, str]:
        """The last call in the user's code, and how it stands to the end: ``at``, ``called from``."""
        if self.error is not None:
            return shortened(self.error.location(self.user)), "at"
        own = self._crashed_frames()
        frame = next((frame for frame in own if self.user.owns(frame)), None)
        if frame is not None:
            # The line of the signal itself is where it happened, not where it was called from.
            return shortened(location_text(frame)), "at" if frame is own[0] else "called from"
        frame = next((frame for frame in self._main_frames() if self.user.owns(frame)), None)
        if frame is not None:
            return shortened(location_text(frame)), "with the main thread at"
        return "", ""

    @property
    def native_location(self) -> str:
        """The native call that it crashed in: ``at::native::add_kernel (libtorch_cpu.so)``; empty where unknown."""
        caller, name, file = native_call(self._crashed_frames())
        where = f" ({shortened(file_name(file), 60)})" if file else ""
        return f"{caller}{shortened(name, 120)}{where}"

    @property
    def python_was_over(self) -> bool:
        """Whether the crash came while the interpreter ended: the script was through."""
        fatal = self.fatal
        return fatal is not None and not fatal.is_python and not fatal.main_frames

    def _crashed_frames(self) -> tuple[Frame, ...]:
        """The calls of the thread that it happened in, innermost first: of the core, else of faulthandler."""
        threads = self.core.threads if self.core is not None else ()
        core = threads[0].frames if threads else ()
        fatal = self.fatal.frames if self.fatal is not None else ()
        if any(not is_native(frame) for frame in core) or not fatal:
            return core
        # The core was read by a tool that does not know Python.
        return (*core, *(frame for frame in fatal if not is_native(frame)))

    def _main_frames(self) -> tuple[Frame, ...]:
        threads = self.core.threads if self.core is not None else ()
        main = next((thread.frames for thread in threads if thread.is_main), ())
        return main or (self.fatal.main_frames if self.fatal is not None else ())


@lru_cache(maxsize=8)
def _bounded(lines: tuple[str, ...], most: int) -> tuple[str, ...]:
    """The first of these lines, of so many characters together."""
    kept: list[str] = []
    for line in lines:
        if most <= 0:
            break
        kept.append(line[:most])
        most -= len(line)
    return tuple(kept)


@lru_cache(maxsize=8)
def _closing_lines(last: tuple[str, ...], most: int, *, has_exited: bool) -> tuple[str, ...]:
    """Those of these lines, the last one first. Each rule asks for them."""
    lines = last[: -1 - (_LINES_BEFORE_EXIT if has_exited else LAST_LINES) : -1]
    failures = _of_failures((*lines, *_below_box(last)), _last_own_line(lines))
    if has_exited and failures[:1] == lines[:1] and failures and _NAMED_ERROR.match(failures[0]):
        failures = (failures[0], *(line for line in failures[1:] if is_found(_FAULT, line)))
    return _bounded(failures, most)


def _below_box(lines: Sequence[str]) -> tuple[str, ...]:
    """The message below the last traceback that rich has printed, as one line; empty where it is not near the end."""
    last = lines[-1 - _LINES_BELOW_A_BOX :]
    ends = (index for index, line in enumerate(last) if line.lstrip().startswith(BOX_END))
    end = max(ends, default=len(last))
    message = " ".join(line.strip() for line in last[end + 1 :])
    return (message[:LONGEST_LINE],) if message else ()


@lru_cache(maxsize=4)
def _is_of_nccl(messages: tuple[str, ...]) -> bool:
    """Whether an exception reports an error of NCCL's. Each rule asks for it."""
    return first_match(_NCCL_ERROR, messages) is not None


def _of_failures(lines: tuple[str, ...], last: str = "") -> tuple[str, ...]:
    """Lines without those that the program got over, by their own words."""
    return tuple(
        line
        for line in lines
        if _INFORMS.match(line) is None
        and not is_found(_GOT_OVER, line)
        and (line == last or not is_found(_MEANT_TO_GO_ON, line))
    )


def own_lines(lines: Sequence[str]) -> list[str]:
    """Lines of the program's own that may say why it ends; less what it got over, by their own words."""
    return [line for line in _of_failures(tuple(lines)) if _may_be_reason(line)]


def _may_be_reason(line: str) -> bool:
    if _LETTERS.search(line) is None or _NO_REASON.match(line) is not None:
        return False
    return not (is_bar(line) or line.startswith(ENDS_NOTHING))


def _last_own_line(lines: Iterable[str]) -> str:
    """The last line that the program itself has written, of lines with the last one first."""
    return next(filter(_may_be_reason, lines), "")


Rule = Callable[[Failure], Cause | None]


def read_failure(evidence: Evidence, end: RankEnd, output: RankOutput | None, hosts: Hosts | None = None) -> Failure:
    """Gather what there is of one rank, and leave out what cannot have to do with its end.

    Args:
        evidence: what is known of all.
        end: how this rank ended.
        output: what it wrote.
        hosts: the hosts of the evidence.
    """
    hosts = hosts or Hosts(evidence)
    lines = output.last_lines if output is not None else ()
    signum = end.status.signum or _signal_of_shell(end.status.code)
    fatal = find_fatal_report(lines) if signum in CRASH_SIGNALS else None
    cpp_error = find_cpp_error(lines[-2 * LAST_LINES :]) if signum == signal.SIGABRT else None
    recorded = recorded_exception(output)
    error = find_python_error(lines, recorded)
    if error is None and end.status.code == 1 and output is not None and not output.traceback:
        # Other ends are no uncaught exception's: rich had drawn one that was caught.
        error = find_boxed_error(lines)
    clean = clean_lines(lines)
    earlier, line_after = None, ""
    is_it = error is not None and end.status.code == 1 and recorded.is_of(error.last.frames, error.last.message)
    if error is not None and error.ends_nothing and not (is_it or signum or end.status.code == _NOT_FLUSHED):
        earlier, clean = error, _less_asides(error, clean, is_alone=output is None or not output.last_stdout_lines)
        error = None
    elif error is not None and not is_it and not _is_believed(error, end, signum, fatal, clean, recorded):
        error = find_python_error(lines, recorded._replace(is_known=True)) or error
        if not signum and end.status.code != 1 and error.innermost.exception:
            # It need not be the reason, nor is it none.
            earlier = error
            line_after = (own_lines(clean[error.last.message_start + 1 :]) or [""])[-1]
        clean = without_error(error, clean)
        error = None
    elif error is not None and not (signum or error.is_uncaught or _is_recorded(output)):
        # Nothing shows that it has ended the program.
        goes_on = error.is_aside or is_of_warning(error)
        is_far = error.lines_after > LINES_AFTER_CAUGHT
        after = list(without_asides(clean[error.last.message_start + 1 :] if is_far or goes_on else []))
        own = own_lines(after)
        line_after = own[-1] if own else ""
        has_own_reason = error.is_aside and is_of_its_own(line_after) and not is_progress(line_after)
        if own and (has_own_reason or (is_far and (goes_on or went_on(error, after, line_after)))):
            earlier, clean = error, without_error(error, clean)
            error = None
    if error is None and output is not None and output.traceback and end.status.code == 1:
        # Its output lacks it: stderr was closed or redirected, or Python was interrupted while it printed.
        error = find_python_error(output.traceback, recorded)
        earlier, line_after = (earlier, line_after) if error is None else (None, "")
    if error is None and output is not None and output.error_message and not end.status.signum:
        error = recorded_error(output.error_message)
    if error is not None and cpp_error is not None and first_match(OF_SHUTDOWN, cpp_error.message) is not None:
        # It had ended by that exception when its objects were destroyed.
        cpp_error = None
    clean = [line for line in clean if not NOISE.match(line)]
    stdout_lines = clean_lines(output.last_stdout_lines[-LAST_LINES:]) if output is not None else []
    return Failure(
        end=end,
        user=UserCode(evidence.script, evidence.cwd),
        signum=signum,
        error=error,
        cpp_error=cpp_error,
        fatal=fatal,
        lines=tuple(clean),
        cut_to=len(lines) if len(lines) >= KEPT_LINES or sum(map(len, lines)) >= _MANY_CHARS else 0,
        stdout_lines=tuple(stdout_lines),
        nccl_warnings=tuple(_nccl_warnings([*clean[-2 * LAST_LINES :], *stdout_lines])),
        earlier=earlier,
        line_after=line_after,
        core=next((core for core in evidence.cores if (core.rank, core.pid) == (end.rank, end.pid)), None),
        oom=hosts.oom(end.rank),
        kernel_lines=hosts.kernel_lines(end.rank),
        others=hosts.neighbours(end.rank),
        supervisor_pids=hosts.supervisor_pids(end.rank),
        gpu_owners=hosts.gpu_owners(end.rank),
        most_chars=min(max(_CHARS_IN_ALL // max(len(evidence.ends), 1), _LEAST_CHARS), _MOST_CHARS),
        tools=output.tools if output is not None else (),
    )


def is_of_warning(error: PythonError) -> bool:
    """Whether a logger has printed a traceback with a warning: the program had got over that error."""
    return warns(error.before)


def without_error(error: PythonError, clean: Sequence[str]) -> list[str]:
    """Lines without those of a traceback that is not believed, up to the line that names the exception."""
    return [*clean[: error.blocks[0].start], *clean[error.blocks[-1].message_start + 1 :]]


def _less_asides(error: PythonError, clean: Sequence[str], *, is_alone: bool) -> list[str]:
    """Lines without errors that end no program; where nothing else is printed, with the line that says what failed."""
    kept = list(without_asides(clean))
    start = error.blocks[0].start
    start -= start > 1 and clean[start - 1].startswith(WHOSE)
    return kept if not is_alone or any(map(_LETTERS.search, kept)) else [*kept, *clean[max(start - 1, 0) : start]]


def _nccl_warnings(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        match = _NCCL_WARNING.search(line) if "NCCL WARN " in line else None
        if match is not None:
            yield match[1]


def _signal_of_shell(code: int | None) -> int:
    """A shell whose last command was ended by signal N ends with 128 + N."""
    number = (code or 0) - _SHELL_SIGNAL
    return number if number in _SHELL_SIGNALS else 0


def _is_recorded(output: RankOutput | None) -> bool:
    """Whether saferun's hook, or torch's ``@record``, has seen an exception end the program."""
    return output is not None and bool(output.failure or output.error_message)


def _is_believed(
    error: PythonError,
    end: RankEnd,
    signum: int,
    fatal: FatalReport | None,
    clean: Sequence[str],
    recorded: RecordedException,
) -> bool:
    """Whether a traceback is what ended the process, or at least its last message before.

    Args:
        error: the traceback.
        end: of the rank.
        signum: the signal that ended it.
        fatal: what faulthandler has printed of that.
        clean: the lines of stderr, cleaned.
        recorded: what is known of the exception that ended the program.
    """
    if not error.innermost.exception:
        return False
    if end.status.code == 1:
        of_wandb = sum(line.startswith(_WANDB) for line in clean[error.last_message + 1 :])
        return error.lines_after - of_wandb <= LINES_AT_EXIT
    if signum == signal.SIGINT:
        # Python ends itself by SIGINT where KeyboardInterrupt is not caught.
        return error.last.exception == "KeyboardInterrupt"
    if error.is_uncaught:
        return signum == 0 or signum in CRASH_SIGNALS
    if signum in CRASH_SIGNALS:
        # Where Python was over when the crash came, what had ended it counts. Else the exception had been got over.
        is_last = aborts_below(error, clean, recorded)
        if fatal is None:
            return error.lines_after == 0 or is_last
        gap = fatal.start - error.last_message - 1
        is_over = not fatal.is_python and not fatal.main_frames
        return is_over and gap >= 0 and (gap <= LINES_AFTER_CAUGHT or is_last)
    return not signum and error.lines_after <= LINES_AFTER_CAUGHT


def cause(
    failure: Failure, class_name: str, message: str, advice: str, *, proof: str = "", location: str = ""
) -> Cause:
    """A cause that is this one rank's."""
    return Cause(
        class_name,
        shortened(message),
        (failure.end.rank,),
        shortened(proof.strip()),
        advice,
        location or failure.location,
    )


def shortened(text: str, most: int = _LONGEST_PROOF) -> str:
    """A text without control characters, and of bounded length."""
    text = "".join(char if char.isprintable() else " " for char in text[: 2 * most])
    return text if len(text) <= most else text[: most - 1] + "…"
