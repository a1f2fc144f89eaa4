"""A headless Chromium over its debugging pipe (Chrome DevTools Protocol): no driver, no socket, no library."""

import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# No GPU, no sandbox (tests may run as root in a container), no requests of the browser's own.
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
DEADLINE_S = 60.0


def find_chromium() -> str | None:
    """The program, or None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser. It reads commands from its file descriptor 3 and writes answers and events to 4, with a NUL after each."""

    def __init__(self, program: str, profile: Path) -> None:
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        # The browser finds its ends at 3 and 4: a shell puts them there.
        script = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
        words = ["bash", "-c", script, program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            words, pass_fds=(command_read, answer_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(command_read)
        os.close(answer_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept. Raises AssertionError with the browser's message."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser is silent for {DEADLINE_S:g} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def close(self) -> None:
        """End the browser."""
        try:
            self.call("Browser.close")
            self._process.wait(DEADLINE_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._commands)
            os.close(self._answers)


class Tab:
    """A file shown in a browser of `width` pixels. What it asks of the network and says on its console is kept."""

    def __init__(self, browser: Chromium, file: Path, scheme: str = "light", width: int = 1200) -> None:
        self._browser = browser
        browser.events.clear()
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        # What left would fail, and be seen.
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.emulate(scheme, width)
        self.call("Page.navigate", url=file.absolute().as_uri())
        self.wait_until("document.documentElement?.dataset.ready === 'yes'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to the tab."""
        return self._browser.call(method, self._session, **params)

    def emulate(self, scheme: str, width: int) -> None:
        """What the system prefers, and how wide the screen is."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript; of a promise what it brings."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Until the expression is true. Raises AssertionError with what the console says."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.ask(condition):
            assert time.monotonic() < deadline, f"{condition} is still false; console: {self.complaints()}"
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        """Exceptions, and errors and warnings of the console and of the browser's own log."""
        found = []
        for event in self._own_events():
            method, params = event.get("method", ""), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for, but for what is in the page itself (data: and blob:)."""
        sent = (
            each["params"]["request"]["url"]
            for each in self._own_events()
            if each.get("method") == "Network.requestWillBeSent"
        )
        return [url for url in sent if not url.startswith(("data:", "blob:"))]

    def _own_events(self) -> list[dict[str, Any]]:
        self.ask("0")  # what has happened until now has been said
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def picture(self, file: Path, selector: str = "html") -> None:
        """An element of the page as a PNG; without one the whole page."""
        box = self.ask(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        scroll_x, scroll_y = self.ask("[scrollX, scrollY]")
        clip = {
            "x": box["x"] + scroll_x,
            "y": box["y"] + scroll_y,
            "width": box["width"],
            "height": box["height"],
            "scale": 1,
        }
        file.write_bytes(b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
