"""The pictures of README.md and docs/: made of real runs, by ``make pictures``.

    python -m tests.pictures             # writes docs/pictures/

The terminal is a pseudo-terminal of 110 columns whose content is drawn as SVG; the page is a picture by a headless
Chromium. What differs from run to run (most process ids and times, names of runs and hosts) and from machine to machine
(paths) is replaced. The order of the ranks' lines and the lengths of the timeline are the run's.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.process.browser import browsing, why_not

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 110, 60
_HOST = "node1"
# The first time of a picture; the others are as much later as they were.
_FIRST_TIME = datetime(2026, 1, 31, 13, 28, 48, tzinfo=UTC)
_TIME = r"\b\d\d:\d\d:\d\d\b"
_THEME = TerminalTheme(
    (24, 26, 31),
    (220, 223, 228),
    [
        *((70, 75, 86), (224, 108, 117), (152, 195, 121), (229, 192, 123)),
        *((97, 175, 239), (198, 120, 221), (86, 182, 194), (220, 223, 228)),
    ],
)
# No font from elsewhere: a picture asks for nothing.
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>TITLE</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#181a1f"/>
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def shown_on_a_terminal(folder: Path, *command: str) -> bytes:
    """What a command writes on a terminal of its own."""
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environ |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    pid, fd = pty.fork()
    if not pid:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(folder)
        os.execvpe(command[0], command, environ)
    written = bytearray()
    while chunk := _read(fd):
        written += chunk
    os.waitpid(pid, 0)
    os.close(fd)
    return bytes(written)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def always_alike(content: str, folder: Path) -> str:
    """Without what differs from run to run and from machine to machine."""
    for directory in (str(folder), str(ROOT / ".venv"), sys.prefix, str(ROOT)):
        content = content.replace(f"{directory}/", "" if directory == str(folder) else "…/")
    content = re.sub(rf"\b{re.escape(os.uname().nodename)}\b", _HOST, content)
    content = re.sub(r"\b20\d\d-\d\d-\d\d(?=[ T])", "2026-01-31", content)
    content = re.sub(r"peer \[127\.0\.0\.1\]:\d+", "peer [127.0.0.1]:40123", content)
    content = re.sub(r"\bpid \d+", "pid 4711", content)
    content = re.sub(r"\b20\d{6}-\d{6}-[0-9a-f]{6}", "20260131-132848-5d4faa", content)
    content = re.sub(r"\[W\d{4} ([0-9:]+)[.0-9]* ", r"[W0131 \1 ", content)
    times = {text: datetime.strptime(text, "%H:%M:%S") for text in re.findall(_TIME, content)}  # noqa: DTZ007
    return re.sub(_TIME, lambda match: f"{_FIRST_TIME + (times[match[0]] - min(times.values())):%H:%M:%S}", content)


def draw(written: bytes, folder: Path, title: str, command: str) -> str:
    """A terminal as SVG."""
    text = always_alike(written.decode(errors="replace").replace("\r\n", "\n"), folder).strip("\n")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(text))
    svg = console.export_svg(theme=_THEME, code_format=_SVG.replace("TITLE", title), unique_id="saferun")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def show_a_failure(folder: Path) -> None:
    """A failure on a terminal, and its page."""
    words = ("--nproc-per-node", "4", "examples/crash.py", "--how", "raise")
    written = shown_on_a_terminal(folder, sys.executable, "-m", "saferun", *words)
    command = f"saferun {' '.join(words)}"
    (DIRECTORY / "failure.svg").write_text(draw(written, folder, "one of four ranks raises an exception", command))
    show_the_page(folder, "page.png")


def show_a_hang(folder: Path) -> None:
    """A hang on a terminal, its page, and what saferunctl says meanwhile."""
    words = ("--nproc-per-node", "4", "--hang-timeout", "15", "examples/hang.py", "--how", "loader")
    ctl = (sys.executable, "-m", "saferun.ctl")
    written: list[bytes] = []
    saferun = (sys.executable, "-m", "saferun", *words)
    thread = threading.Thread(target=lambda: written.append(shown_on_a_terminal(folder, *saferun)))
    thread.start()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        time.sleep(0.5)
        listed = subprocess.run([*ctl, "list", "--here"], cwd=folder, env=environ, capture_output=True, check=False)
        if listed.stdout.startswith(b"hung"):
            break
    title = "saferunctl status of a job that hangs"
    status = shown_on_a_terminal(folder, *ctl, "status")
    (DIRECTORY / "status.svg").write_text(draw(status, folder, title, "saferunctl status"))
    show_the_page(folder, "hang.png")
    subprocess.run([*ctl, "kill", "latest"], cwd=folder, env=environ, capture_output=True, check=True)
    thread.join()
    hang, _, _ = written[0].partition(b"saferunctl kill")
    lines = hang.rpartition(b"\n")[0]
    command = f"saferun {' '.join(words)}"
    (DIRECTORY / "hang.svg").write_text(draw(lines, folder, "one of four ranks hangs", command))


def show_the_page(folder: Path, name: str) -> None:
    """The newest run's report.html."""
    page = folder / "report.html"
    page.write_text(always_alike((folder / "saferun-runs" / "latest" / "report.html").read_text(), folder))
    with browsing() as browser:
        shown = browser.open(page, 1000)
        (DIRECTORY / name).write_bytes(shown.picture())
        shown.close()


def main() -> int:
    """Make them all."""
    if why_not():
        print(f"pictures: {why_not()}", file=sys.stderr)
        return 1
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for make in (show_a_failure, show_a_hang):
        with tempfile.TemporaryDirectory(prefix="pictures-") as name:
            folder = Path(name)
            (folder / "examples").mkdir()
            for example in ("crash.py", "hang.py"):
                shutil.copy(ROOT / "examples" / example, folder / "examples")
            make(folder)
    for path in sorted(DIRECTORY.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
