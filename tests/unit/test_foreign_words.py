"""Words from outside reach a terminal through one function, which takes control characters out: ``errors.printable``.

Escape sequences in the name of a function, in the last words of a rank, in a path or in what another host says could
change the title of a terminal, overwrite what stands there, or forge lines of saferun's own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console import stderr
from saferun.console.screen import Screen
from saferun.ctl.answer import answer
from saferun.errors import SaferunError, printable, printable_lines
from saferun.text.bounded_json import shown
from tests.syntax import no_collector, parsed

PACKAGE = Path(__file__).resolve().parents[2] / "saferun"
# Calls of these names put lines on a terminal, sooner or later.
SAYING = {"say", "_say", "_print_message", "tell", "print", "print_error", "print_message"}
# What these are told is one line, which they clean themselves; see the tests below.
CLEANERS = {"warn", "_warn"}
# These are messages between processes of saferun's, or something else altogether.
NO_TERMINAL = {
    *(
        "captures/examiner.py",
        "captures/examiner_process.py",
        "captures/pystack_live.py",
        "preflight/check_process.py",
        "preflight/probe/listener.py",
    ),
    *("preflight/checks/server.py", "watchdog/job_detector.py", "watchdog/__init__.py"),
}
# What these say is one line, which whoever made them cleans: LaunchContext, and the launcher.
CLEANED_BEHIND = {"files/writer_client.py", "launch/orphans.py"}
# The last step before a terminal, with tests of its own.
LAST_STEPS = {"console/screen.py", "console/stderr.py", "ctl/answer.py"}
# What they return holds no control character.
CLEANING = {
    "printable",
    "printable_lines",
    "shown",
    "redacted_line",
    "quoted",
    "SaferunError",
    "UsageError",
    "told",
    "display_text",
}
# What they return is a number, or words of saferun's own about numbers.
NUMBERS = {"len", "round", "int", "min", "max", "recovery_text"}
# Where bytes are written to a descriptor or a stream of this process.
WRITES = {"sys.stdout.write", "sys.stderr.write", "os.write"}
# Written by whoever it is for, which is another process, or with nothing in it from outside.
OTHER_WRITES = {
    "cli/argument_parser.py": "a script for a shell, made of our own options",
    "cli/help.py": "made of our own options",
    "ctl/attach.py": "what a rank writes to the user's own terminal, cleaned by console/harmless.py",
    "captures/pystack_core.py": "an answer to the process that started it",
    "launch/wrapped_ranks.py": "likewise",
    "linux/nvidia_gpus.py": "an answer to the process that started it",
    "linux/reaper.py": "a number, and words of its own",
    "env/lint/__main__.py": "an answer to the process that started it",
    "env/lint/scanner.py": "a file",
    "api/script/rank_prints.py": "a script's own print, in the process of the script",
}
# Known, each the line of a list that may only become shorter: what is mended is taken out here.
KNOWN = {
    # Several lines of report/console_text.py, which cleans each of them; those of another host job.py has cleaned.
    "launch/attempt_record.py: '\\n'.join(lines)",
    # What was warned about before there was a console: cleaned when it was noted.
    "launch/entry.py: text",
}


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Those of all sources are looked through."""
    with no_collector():
        yield


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name not in LAST_STEPS | NO_TERMINAL | CLEANED_BEHIND and not name.startswith(
            ("coordinator/", "inject/")
        ):  # the one has no terminal, the other is the ranks'
            yield name, parsed(path)


def is_clean(node: ast.expr) -> bool:
    """Whether an expression can hold no control character, as far as can be seen."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(id=name) if name.isupper():
            return True  # a constant of the module's
        case ast.JoinedStr(values=values):
            return all(map(is_clean, values))
        case ast.FormattedValue(conversion=conversion, format_spec=spec, value=value):
            is_number = spec is not None and re.search(r"[dfgxn%,]'?$", ast.unparse(spec)) is not None
            return conversion in {ord("r"), ord("a")} or is_number or is_clean(value)
        case ast.Call(func=function):
            name = _last_name(function)
            if name == "join":
                return bool(node.args) and is_clean(node.args[0])
            if name in {"encode", "decode"} and isinstance(function, ast.Attribute):
                return is_clean(function.value)
            return name in CLEANING | NUMBERS
        case ast.GeneratorExp(elt=item) | ast.ListComp(elt=item):
            return is_clean(item)
        case ast.IfExp(body=first, orelse=second) | ast.BinOp(left=first, right=second):
            return is_clean(first) and is_clean(second)
        case _:
            return False


def _last_name(function: ast.expr) -> str:
    """What is called, without whose it is."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def said(name: str, tree: ast.Module) -> Iterator[str]:
    """The texts that a source says on a terminal and that may hold anything."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args or _last_name(node.func) not in SAYING | {"write"}:
            continue
        called = ast.unparse(node.func)
        if called in WRITES:
            is_fd = called == "os.write"
            if is_fd and ast.unparse(node.args[0]) not in {"1", "2", "sys.stdout.fileno()", "sys.stderr.fileno()"}:
                continue
            if name not in OTHER_WRITES and not is_clean(node.args[-1]):
                yield f"{name}: {ast.unparse(node.args[-1])}"
        elif called.rpartition(".")[2] in SAYING and not is_clean(node.args[0]):
            if called.endswith("print_error") and ast.unparse(node.args[0]) == "error":
                continue  # two lines, each of which it cleans itself
            yield f"{name}: {ast.unparse(node.args[0])}"


def test_every_word_from_outside_is_cleaned_before_it_is_said() -> None:
    """What is new passes through ``printable``; the list of what does not yet may only become shorter."""
    found = {text for name, tree in sources() for text in said(name, tree)}
    assert sorted(found - KNOWN) == []
    assert sorted(KNOWN - found) == []


def test_whoever_is_warned_cleans_the_line() -> None:
    """All others hand their words on to one of these."""
    found = [
        (name, "printable(text)" in ast.unparse(node))
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in CLEANERS
    ]
    # The first by ``display_text``.
    assert found == [("cluster/job.py", False), ("launch/entry.py", True), ("launch/launch_context.py", True)]


def test_the_rule_sees_what_it_forbids() -> None:
    """Each way to say something foreign is found, and each way to clean it is known."""
    tree = ast.parse(
        "self._say(f'saferun: {words}')\n"
        "self._say(f'saferun: {printable(words)} {seconds:.0f} {name!r} {len(words)}')\n"
        "screen.print_message(text)\n"
        "screen.print_message('plain')\n"
        "print('a' + words)\n"
        "sys.stderr.write(f'{error}\\n')\n"
        "os.write(2, line.encode())\n"
        "os.write(fd, line.encode())\n"
        "tell('; '.join(printable(word) for word in words))\n"
        "tell(', '.join(words))\n"
    )
    assert list(said("x.py", tree)) == [
        "x.py: f'saferun: {words}'",
        "x.py: text",
        "x.py: 'a' + words",
        "x.py: f'{error}\\n'",
        "x.py: line.encode()",
        "x.py: ', '.join(words)",
    ]


HOSTILE = st.text(
    st.sampled_from("a\x1b\x07\x00\x7f\x9b\u202e\u2028\u2066\r\t\udcff ]0;é\N{NO-BREAK SPACE}"), max_size=30
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@given(HOSTILE)
def test_the_one_function_leaves_nothing_that_a_terminal_obeys(text: str) -> None:
    assert printable(text).isprintable()
    assert shown(text).isprintable()
    lines = printable_lines(f"{text}\nb{text}")
    assert lines == f"{printable(text)}\n{printable('b' + text)}"
    error = str(SaferunError(text, text + "\n" + text))
    assert len(error.splitlines()) == 2
    assert CONTROL.search(error) is None


@pytest.mark.parametrize(
    "text", ["\x1b]0;owned\x07\x1b[2J\x1b[31m", "a\x9b2Jb", "right\u202eleft", "a\rb", "tab\there"]
)
def test_the_last_step_before_a_terminal_cleans_too(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whoever forgets it is mended where all words of saferun's own go out."""
    stderr.print_error(text)
    answer(f"{text}\n")
    captured = capsys.readouterr()
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        screen = Screen(out.fileno(), err.fileno(), skipping=False, where=lambda: "")
        screen.print_message(f"saferun: {text}")
        screen.print_output(f"{text}\n")
        screen.flush()
        screen.close()
    written = [(tmp_path / name).read_text() for name in ("out", "err")]
    for said_text in (captured.out, captured.err, *written):
        assert said_text.endswith("\n")
        assert said_text[:-1].isprintable()
