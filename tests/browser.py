"""A headless Chromium, driven by its own protocol over a pipe: https://chromedevtools.github.io/devtools-protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
"""The path of Chromium; None where there is none."""
MOST_S = 60.0
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Page:
    """The one page of a browser.

    Attributes:
        problems: errors and warnings of its console, and exceptions that nothing caught.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._number, self._unread, self._session = 0, b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, file: Path) -> None:
        """Show a file, and wait until it is there."""
        self._call("Page.navigate", url=file.as_uri())
        self.wait_for("document.readyState == 'complete'")

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """Set the window's width in pixels, and light or dark."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        return self._call("Runtime.evaluate", **options)["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a condition holds."""
        until_s = time.monotonic() + MOST_S
        while not self.evaluate(condition):
            assert time.monotonic() < until_s, f"{condition} did not come to hold; the console: {self.problems}"
            time.sleep(0.05)

    def screenshot(self, file: Path, height: float | None = None) -> None:
        """Write a picture of the page, or only of its top ``height`` pixels."""
        options = {"format": "png", "captureBeyondViewport": True}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {**size, "height": min(size["height"], height or size["height"]), "scale": 1}
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", clip=clip, **options)["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": params}
        os.write(self._to, json.dumps(call | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._take_down(answer.get("method", ""), answer.get("params", {}))

    def _take_down(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([argument.get("value") for argument in params["args"]]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty page; its files lie in ``folder``."""
    assert PROGRAM is not None, "there is one"
    their_in, to_browser = os.pipe()
    from_browser, their_out = os.pipe()
    command = [PROGRAM, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    start = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    process = subprocess.Popen(
        ["bash", "-c", start, *command], pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)  # the browser ends when this end of its pipe is closed
        os.close(from_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
