"""What Python and C++ print when a process dies, found in its last lines. Pure.

A rank may print what it likes, tracebacks of errors that it has got over among it. So only the last one counts, and how
far from the end it stands is kept for those who judge it. Lines are cut before anything is matched against them,
and no pattern looks back over what it has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.diagnosis.asides import ASIDE, CHILD, ENDS_NOTHING, WHOSE, without_asides, without_tracker
from saferun.diagnosis.exception_groups import of_its_group, prefix_of, stripped, without_prefix
from saferun.diagnosis.frames import UserCode, location_text, writes_error_file
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.log_levels import is_of_logger, is_of_module, reports_error, tries_on, warns
from saferun.diagnosis.message_end import LOG_LINE, announces_lines, has_one_line, is_after_message, is_logged
from saferun.diagnosis.progress_bars import without_bars
from saferun.diagnosis.recorded_exception import RecordedException
from saferun.evidence.job_evidence import Frame
from saferun.model import Value
from saferun.text.wording import CONTEXT, DIRECT

LONGEST_LINE = 1000
_MARKER = "Traceback (most recent call last):"
_ANSI = LazyPattern(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])")
# What torch's exception hook and its logs put before each line once there is a process group. What torch prints of a
# signal in a data-loader worker ends with a NUL, after the end of the line.
_RANK = LazyPattern(r"[\s\0]{0,8}\[(?:default)?\d{0,6}:?rank(\d{1,6})\]:? ?")
# Loguru marks the frame in which it was asked to print the exception.
_FRAME = LazyPattern(r'\s*(?:> )?File "([^"]{1,600})", line (\d{1,9})(?:,? in (.{0,300}))?$')
_BINARY = LazyPattern(r'\s*Binary file "([^"]{1,600})"(?:, at ([^ \[]{1,300}))?')
# TensorFlow's graphs put a remark behind the name, Ray the name of the exception in the other process. Python names the
# functions that a class is defined in.
EXCEPTION = LazyPattern(
    r"(?s)([A-Za-z_][\w.]{0,200}(?:\.<locals>\.[\w.]{1,200}){0,4})"
    r"(?: \(see above for traceback\)|\([\w.]{1,100}\))?(?::(?: (.*))?)?$"
)
_LINKS = {DIRECT: "direct", CONTEXT: "context"}
_NESTED = ("-- Process ",)
# The C++ stack that torch adds to its messages on request, in both its forms.
_CPP_STACK = LazyPattern(r"#\d{1,3} |frame #\d|Exception raised from |C\+\+ CapturedTraceback:|<omitting python frames")
SYNTAX_ERRORS = frozenset({"SyntaxError", "IndentationError", "TabError"})
# Where a source cannot be read: the file, the line of it, and the mark below that.
_LINES_OF_A_LOCATION = 3
_MOST_FRAMES = 400
_MOST_MESSAGE_LINES = 60
_TOO_LATE = "<no Python frame>"
# What may be printed between the last traceback and the end of the process.
_LINES_AFTER_THE_LAST = 3
_NOTHING_RECORDED = RecordedException()
_OF_CHILDREN = "/multiprocessing/process.py"
_LOST_PIPES = frozenset({"EOFError", "BrokenPipeError", "ConnectionResetError"})


class Block(Value):
    """One traceback, from its first line to the last of its message.

    ``link``: how it follows from the previous one: ``direct`` (raised from it), ``context`` (while it was handled),
    ``nested`` (it is quoted by the previous one), empty for the first. ``frames``: outermost first.
    """

    exception: str
    message: tuple[str, ...]
    frames: tuple[Frame, ...]
    link: str
    start: int
    end: int

    @property
    def message_start(self) -> int:
        """Where the line stands that names the exception."""
        return self.end - len(self.message)


def _last_of(blocks: Sequence[Block]) -> Block:
    return next(block for block in reversed(blocks) if block.link != "nested" or block is blocks[0])


class PythonError(Value):
    """The last traceback of a process, with those that it follows from.

    Attributes:
        blocks: in the order of the text; what ended the process is ``last``.
        lines: the text, cleaned.
        lines_after: how many lines follow it, less torch's C++ stack. Where the end of its message is not known,
            all but the first line of that counts too.
        is_uncaught: whether torch's hook for uncaught exceptions has printed it.
        before: the line before it; empty: none is known.
        is_aside: whether it has ended something else than the main thread.
        ends_nothing: whether it is of a destructor, a function at exit and the like: no exit code comes of it.
        of_group: where it is one of several errors of an ExceptionGroup, which one: ``1 of 3``.
        last_message: where the line stands that names the last exception, also of that group, or of a warning below.
    """

    blocks: tuple[Block, ...]
    lines: tuple[str, ...]
    lines_after: int
    is_uncaught: bool = False
    before: str = ""
    is_aside: bool = False
    ends_nothing: bool = False
    of_group: str = ""
    last_message: int = 0

    @property
    def last(self) -> Block:
        """What ended the process; not what it quotes."""
        return _last_of(self.blocks)

    @property
    def innermost(self) -> Block:
        """Where it began: what the last one quotes from another process, else the last."""
        return self.blocks[-1]

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages of the last exception, of what it quotes and of what it was raised from, nearest first."""
        texts: list[str] = []
        blocks = list(self.blocks)
        while blocks:
            block = blocks.pop()
            texts[:0] = block.message if block.link == "nested" else ()
            if block.link != "nested":
                texts.extend(block.message)
                if block.link != "direct":
                    break
        return tuple(texts)

    @property
    def context(self) -> tuple[str, ...]:
        """The messages of exceptions during whose handling the last one was raised."""
        nearer = set(self.messages)
        return tuple(line for block in reversed(self.blocks) for line in block.message if line not in nearer)

    def location(self, user: UserCode) -> str:
        """The last frame in the user's code: ``train.py:52 in step``; empty where there is none."""
        for block in (self.innermost, self.last, *reversed(self.blocks)):
            frame = next((frame for frame in reversed(block.frames) if user.owns(frame)), None)
            if frame is not None:
                return location_text(frame)
        frames = self.innermost.frames
        return location_text(frames[-1]) if frames else ""


class FatalReport(Value):
    """What faulthandler prints when a signal ends a Python process.

    Attributes:
        message: ``Segmentation fault``.
        frames: the Python calls of the thread that it happened in, innermost first.
        main_frames: those of the main thread.
        is_python: whether the thread that it happened in runs Python at all, and has not come to its end.
        lines: the text, cleaned.
        start: where it stands.
    """

    message: str
    frames: tuple[Frame, ...]
    main_frames: tuple[Frame, ...]
    is_python: bool
    lines: tuple[str, ...]
    start: int


class CppError(Value):
    """An uncaught C++ exception: ``terminate called after throwing an instance of 'X'``.

    ``message`` is empty where there is none. ``type_name`` is empty for ``terminate called without an active
    exception``.
    """

    type_name: str
    message: tuple[str, ...]
    line: str
    start: int


# ---------------------------------------------------------------------------------------------------------------- lines


def clean_lines(lines: Iterable[str]) -> list[str]:
    """Lines without terminal codes and without the ``[rank3]: `` that torch puts before them, and of bounded length.

    An error that stands behind a progress bar has a line of its own; what the resource tracker prints is left out.
    """
    return [_clean(line) for line in without_tracker(without_bars(lines))]


def _clean(line: str) -> str:
    line = line[: 4 * LONGEST_LINE]
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    if "rank" in line[:24]:
        line = line[match.end() :] if (match := _RANK.match(line)) else line
    return line[:LONGEST_LINE].rstrip()


def _has_rank(line: str) -> bool:
    return _RANK.match(line[:64]) is not None


# ----------------------------------------------------------------------------------------------------------- tracebacks


def find_python_error(lines: Sequence[str], recorded: RecordedException = _NOTHING_RECORDED) -> PythonError | None:
    """The last traceback of the process itself; one of a thread, or of a child, only where there is no other.

    Args:
        lines: the last lines of stderr as they were written, oldest first.
        recorded: what is known of the exception that ended it.
    """
    lines = without_tracker(without_bars(lines))
    clean = [_clean(line) for line in lines]
    chains = _chains(lines, clean)
    unread = _unread_script(clean, chains[-1][-1].end if chains else 0)
    if unread is not None:
        # It ends the process, whatever was printed before.
        text = tuple(clean[unread.start : unread.end])
        return PythonError((unread,), text, len(clean) - unread.end, last_message=unread.message_start)
    if not chains:
        return None
    own = [blocks for blocks in chains if not _is_aside(clean, blocks)]
    # What torch's hook has printed ends the process; what follows is printed at exit, or by a child.
    uncaught = [blocks for blocks in own if _is_of_hook(lines, clean, blocks)]
    of_threads = [blocks for blocks in chains if not _is_aside(clean, blocks, ENDS_NOTHING)]
    last = chain = uncaught[-1] if uncaught else _last_own(clean, own or of_threads or chains, recorded)
    if not (uncaught or recorded.is_known):
        chain = _before_warnings(clean, own or [chain], chain)
    end = max(block.end for block in last)
    of_group = of_its_group(clean, chains, chains.index(chain))
    chain = chains[of_group.position]
    if chain[-1].link == "context" and writes_error_file(chain[-1].frames):
        chain = chain[:-1]
    start = chain[0].start
    after = sum(not _CPP_STACK.match(line) for line in clean[end:])
    is_uncaught = _has_rank(lines[chain[-1].start])
    return PythonError(
        tuple(chain),
        lines=tuple(without_prefix(clean[start : max(block.end for block in chain)])),
        lines_after=after + (0 if is_uncaught else max(len(last[-1].message) - 1, 0)),
        is_uncaught=is_uncaught,
        before=clean[start - 1] if start else "",
        is_aside=_is_aside(clean, chain),
        ends_nothing=_is_aside(clean, chain, ENDS_NOTHING),
        of_group=of_group.text,
        last_message=last[-1].message_start,
    )


def _unread_script(clean: Sequence[str], after: int) -> Block | None:
    """What Python prints of a script that it cannot read: the end of a traceback, without its header."""
    for index in range(len(clean) - 1, max(after, 1) - 1, -1):
        exception = EXCEPTION.match(clean[index])
        if exception is None or exception[1] not in SYNTAX_ERRORS:
            continue
        for start in range(index - 1, max(index - _LINES_OF_A_LOCATION, after) - 1, -1):
            match = _FRAME.match(clean[start])
            if match is not None and not match[3]:
                return Block(exception[1], (clean[index],), (Frame("", match[1], int(match[2])),), "", start, index + 1)
        return None
    return None


def ends_with_traceback(lines: Sequence[str]) -> bool:
    """Whether a traceback is the last thing that was printed, but for what Python and torch print at exit."""
    error = find_python_error(lines)
    return error is not None and (error.is_uncaught or error.lines_after <= _LINES_AFTER_THE_LAST)


def recorded_error(message: str) -> PythonError | None:
    """An exception of which only the message is known: ``KeyError: 'labels'``."""
    lines = clean_lines(message.splitlines()[:_MOST_MESSAGE_LINES])
    match = EXCEPTION.match(lines[0]) if lines else None
    if match is None:
        return None
    return PythonError((Block(match[1], tuple(lines), (), "", 0, len(lines)),), tuple(lines), 0)


def _chains(lines: Sequence[str], clean: Sequence[str]) -> list[list[Block]]:
    markers = [index for index, line in enumerate(clean) if line.endswith(_MARKER)]
    chains: list[list[Block]] = []
    for index, start in enumerate(markers):
        limit = markers[index + 1] if index + 1 < len(markers) else len(clean)
        # What it follows from may have been cut off.
        link = _link(clean, start) if chains else ""
        block = _block(lines, clean, start, limit, link)
        if block is None:
            continue
        if link:
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def _link(clean: Sequence[str], start: int) -> str:
    """How a traceback follows from the previous one. Blank lines may have been left out."""
    if clean[start].lstrip().startswith("Original "):
        return "nested"
    for index in range(start - 1, max(start - 3, -1), -1):
        line = clean[index].strip(" |+")
        if line in _LINKS:
            return _LINKS[line]
        if line.startswith(_NESTED):
            return "nested"
        if line:
            return ""
    return ""


def _is_aside(clean: Sequence[str], chain: Sequence[Block], heads: tuple[str, ...] = ASIDE) -> bool:
    start = chain[0].start
    if start > 1 and clean[start - 1].startswith(WHOSE):
        start -= 1
    return start > 0 and clean[start - 1].startswith(heads)


def _last_own(clean: Sequence[str], chains: Sequence[list[Block]], recorded: RecordedException) -> list[Block]:
    """The traceback that was recorded, but for a later one of its own; else the last one, less children's below it.

    A child whose pipe to this process has gone fails because of it. One that fails otherwise may be the reason.
    """
    for blocks in reversed(chains):
        if recorded.is_of(_last_of(blocks).frames, _last_of(blocks).message):
            return blocks
        if not (_is_of_child(blocks) or _is_logged(clean, blocks)):
            break
    index = len(chains) - 1
    while (
        index and _has_lost_its_pipe(clean, chains[index]) and _is_just_before(clean, chains[index - 1], chains[index])
    ):
        index -= 1
    is_its_own = not (_is_logged(clean, chains[index]) or _is_of_child(chains[index]))
    return chains[index if is_its_own else -1]


def _is_of_child(chain: Sequence[Block]) -> bool:
    """Whether a process of multiprocessing has printed it; a program's own line may look like the one above it."""
    return any(frame.file.endswith(_OF_CHILDREN) and frame.function == "_bootstrap" for frame in _frames_of(chain))


def _has_lost_its_pipe(clean: Sequence[str], chain: Sequence[Block]) -> bool:
    start = chain[0].start
    is_named = start > 0 and CHILD.match(clean[start - 1]) is not None
    return is_named and _is_of_child(chain) and _last_of(chain).exception in _LOST_PIPES


def _is_logged(clean: Sequence[str], chain: Sequence[Block]) -> bool:
    """Whether the line before it is of a logger, as of an error that was caught."""
    return chain[0].start > 0 and is_of_logger(clean[chain[0].start - 1])


def _before_warnings(clean: Sequence[str], chains: Sequence[list[Block]], last: list[Block]) -> list[Block]:
    """The traceback that was logged as an error, where those just below it, of the clean-up, are warnings.

    One that reaches up to the module was most likely not caught, and the line above it is any.
    """
    for index in range(chains.index(last), 0, -1):
        above, below = chains[index - 1], chains[index]
        if not (warns(clean[below[0].start - 1]) and above[0].start and _is_just_before(clean, above, below)):
            break
        if is_of_module(below[-1].frames) or any(tries_on(clean[blocks[0].start - 1]) for blocks in (above, below)):
            break
        if reports_error(clean[above[0].start - 1]):
            return above
    return last


def _frames_of(chain: Sequence[Block]) -> Iterable[Frame]:
    return (frame for block in chain for frame in block.frames)


def _is_just_before(clean: Sequence[str], chain: Sequence[Block], child: Sequence[Block]) -> bool:
    """Whether hardly more than a message stands between a traceback and the next one, of a child or in a log."""
    between = clean[max(block.message_start for block in chain) + 1 : child[0].start - 1]
    return sum(bool(line) and not line[0].isspace() for line in without_asides(between)) <= _LINES_AFTER_THE_LAST


def _is_of_hook(lines: Sequence[str], clean: Sequence[str], chain: Sequence[Block]) -> bool:
    """Whether torch's hook for uncaught exceptions has printed it, and not one of torch's loggers."""
    return _has_rank(lines[chain[-1].start]) and LOG_LINE.match(clean[chain[-1].start]) is None


def _block(lines: Sequence[str], clean: Sequence[str], start: int, limit: int, link: str) -> Block | None:
    prefix = prefix_of(clean[start])
    has_rank = _has_rank(lines[start])
    frames: list[Frame] = []
    index = start + 1
    text = ""
    while index < limit:
        line = clean[index]
        text = line[len(prefix) :] if prefix and line.startswith(prefix) else line
        match = _FRAME.match(text)
        if match is not None:
            frames.append(Frame(match[3] or "", match[1], int(match[2])))
        elif text and not text[0].isspace():
            break
        index += 1
    exception = EXCEPTION.match(text) if index < limit else None
    if exception is None:
        # Cut short, or no traceback at all.
        return Block("", (), tuple(frames[-_MOST_FRAMES:]), link, start, index) if frames else None
    end = _end_of_message(lines, clean, index + 1, limit, has_rank=has_rank, prefix=prefix)
    message = (text, *(stripped(line, prefix) for line in clean[index + 1 : end]))
    return Block(exception[1], message, tuple(frames[-_MOST_FRAMES:]), link, start, end)


def _end_of_message(
    lines: Sequence[str], clean: Sequence[str], start: int, limit: int, *, has_rank: bool, prefix: str
) -> int:
    """Where the lines end that belong to an exception's message."""
    # What stands before each of its lines tells which are its own.
    is_quoting = has_rank or bool(prefix)
    if not is_quoting and has_one_line(clean[start - 1]):
        return start
    for index in range(start, min(limit, start + _MOST_MESSAGE_LINES)):
        line = clean[index]
        if has_rank and line and not _has_rank(lines[index]):
            return index
        if prefix and not line.startswith(prefix.rstrip()):
            return index
        if line.startswith(ASIDE) or is_after_message(line) or CHILD.match(line):
            return index
        if not is_quoting and is_logged(line):
            if not announces_lines(clean[index - 1]):
                return index
            is_quoting = True
        if line.lstrip().startswith(_NESTED):
            return index
    return min(limit, start + _MOST_MESSAGE_LINES)


# --------------------------------------------------------------------------------------------------------------- deaths


def find_fatal_report(lines: Sequence[str]) -> FatalReport | None:
    """The last report of faulthandler."""
    clean = clean_lines(lines)
    start = next(
        (index for index in range(len(clean) - 1, -1, -1) if clean[index].startswith("Fatal Python error:")), -1
    )
    if start < 0:
        return None
    threads: list[tuple[str, list[Frame]]] = []
    natives: list[Frame] = []
    end = len(clean)
    for index in range(start + 1, len(clean)):
        line = clean[index].strip()
        if line.startswith("Extension modules:"):
            end = index
            break
        if "(most recent call first):" in line:
            threads.append((line, []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append(Frame(match[3] or "", match[1], int(match[2])))
        elif threads and (match := _BINARY.match(line)):
            natives.append(Frame((match[2] or "").partition("+")[0], match[1], 0, native=True))
        elif line and line != _TOO_LATE and not line.startswith(("...", "Python runtime state", "<", "Thread 0x")):
            end = index
            break
    pythons = [(head, frames) for head, frames in threads if "C stack trace" not in head]
    current = next((frames for head, frames in pythons if head.startswith("Current thread")), None)
    main = pythons[-1][1] if pythons else []
    return FatalReport(
        message=clean[start].partition(":")[2].strip()[:200],
        frames=tuple([*natives, *(current or [])][:_MOST_FRAMES]),
        main_frames=tuple(main[:_MOST_FRAMES]),
        is_python=bool(current),
        lines=tuple(clean[start:end]),
        start=start,
    )


def find_cpp_error(lines: Sequence[str]) -> CppError | None:
    """The last C++ exception that ended a process; one with a message where there are several."""
    clean = clean_lines(lines)
    found: CppError | None = None
    for index, line in enumerate(clean):
        start = line.find("terminate called ")
        if start < 0:
            continue
        type_name = line[start:].partition("instance of '")[2].rstrip("'")
        message = _what(clean, index + 1)
        if found is None or message or not found.message:
            found = CppError(type_name, message, line[start:], index)
    return found


def _what(clean: Sequence[str], start: int) -> tuple[str, ...]:
    if start >= len(clean) or "what():" not in clean[start]:
        return ()
    message = [clean[start].partition("what():")[2].strip()]
    for line in clean[start + 1 : start + _MOST_MESSAGE_LINES]:
        if is_after_message(line):
            break
        message.append(line)
    return tuple(message)
