"""A headless Chromium that shows pages to tests: what they hold, what they ask for, and what goes wrong in them.

It is controlled over a pipe (the Chrome DevTools Protocol, with ``--remote-debugging-pipe``): no port is opened. Its
profile is its own, and removed with it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = "chromium"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--no-default-browser-check", "--remote-debugging-pipe"),
)
_DEADLINE_S = 60.0
_END_S = 5.0


def why_not() -> str:
    """Why there is no browser here, in one line; empty where there is one."""
    if shutil.which(PROGRAM) is None:
        return f"needs {PROGRAM}, which `make test` installs as root"
    return ""


class Browser:
    """A running browser.

    Args:
        folder: an empty folder for its profile.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which(PROGRAM)
        assert program is not None
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        # What it reads is its descriptor 3, what it writes is 4: others must not be in the way.
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (its_in, its_out))
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((null, null, null, high_in, high_out))]
        self._pid = os.posix_spawn(
            program,
            [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            {**os.environ, "HOME": str(folder), "DBUS_SESSION_BUS_ADDRESS": "unix:path=/nonexistent"},
            file_actions=actions,
            setpgroup=0,
        )
        for fd in (its_in, its_out, high_in, high_out, null):
            os.close(fd)
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def await_event(self, method: str, session: str) -> None:
        """Wait for an event that comes, or has come since the last call of ``forget``."""
        while not self.events(method, session):
            self._events.append(self._receive())

    def events(self, method: str, session: str) -> list[dict[str, Any]]:
        """The events of a kind that have come."""
        return [
            event["params"] for event in self._events if event.get("method") == method and event["sessionId"] == session
        ]

    def forget(self) -> None:
        """Drop the events that have come."""
        self._events.clear()

    def _receive(self) -> dict[str, Any]:
        give_up_at = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._rest:
            ready = select.select([self._in], [], [], max(give_up_at - time.monotonic(), 0))[0]
            assert ready, "the browser does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End it, and wait for the end of all of its processes."""
        theirs = self._processes()
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        give_up_at = time.monotonic() + _END_S
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > give_up_at:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)
        while left := theirs & self._processes():
            for pid in left if time.monotonic() > give_up_at else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        os.close(self._in)
        os.close(self._out)

    def _processes(self) -> set[int]:
        """All of its processes: they name its folder, or have another one of them as parent."""
        found = {self._pid}
        before = 0
        parents = {}
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(f"/proc/{name}/stat").read_text() if name.isdigit() else ""
                fields = stat.rpartition(")")[2].split()
                if fields and fields[0] not in "ZX":
                    parents[int(name)] = int(fields[1])
        while len(found) > before:
            before = len(found)
            found |= {pid for pid, parent in parents.items() if parent in found}
        return {pid for pid in found if pid in parents}

    def open(self, path: Path, width: int = 1280, *, dark: bool = False, scripts: bool = True) -> Page:
        """Show a file."""
        return Page(self, path, width, dark=dark, scripts=scripts)


class Page:
    """A page that is shown.

    Args:
        browser: where.
        path: the file.
        width: of the window, in CSS pixels.
        dark: whether the user prefers dark colours.
        scripts: whether scripts may run.
    """

    def __init__(self, browser: Browser, path: Path, width: int, *, dark: bool, scripts: bool) -> None:
        self._browser = browser
        browser.forget()
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width)
        self._features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=self._features)
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._call("Page.navigate", url=path.as_uri())
        browser.await_event("Page.loadEventFired", self._session)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another width."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to on the page; works without the page's own scripts."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """The text that is visible there, with single spaces."""
        return " ".join(str(self.value(f"document.querySelector({json.dumps(selector)}).innerText")).split())

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.value(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def type(self, selector: str, text: str) -> None:
        """Type into a field, in place of what is there."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key: Tab, Enter, Space."""
        codes = {"Tab": 9, "Enter": 13, "Space": 32}
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        name = " " if key == "Space" else key
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=key,
                windowsVirtualKeyCode=codes[key],
                text=text,
            )

    def problems(self) -> list[str]:
        """Errors, warnings and anything else that the page has written to the console."""
        lines = [json.dumps(event) for event in self._browser.events("Runtime.exceptionThrown", self._session)]
        lines += [json.dumps(event) for event in self._browser.events("Runtime.consoleAPICalled", self._session)]
        return lines + [json.dumps(event) for event in self._browser.events("Log.entryAdded", self._session)]

    def requests(self) -> list[str]:
        """What has been asked for, the page itself and pictures within it apart."""
        urls = [event["request"]["url"] for event in self._browser.events("Network.requestWillBeSent", self._session)]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def picture(self, *, whole: bool = False) -> bytes:
        """What is seen, as PNG."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def lay_out_for_print(self) -> None:
        """Show it as it is printed."""
        self._call("Emulation.setEmulatedMedia", media="print", features=self._features)

    def pdf(self) -> bytes:
        """What is printed."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        """Close it."""
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser; afterwards nothing of it is left."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            yield browser
        finally:
            browser.close()
