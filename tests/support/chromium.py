"""A real Chromium without a window, driven through its debugging protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One page. Methods wait for the browser's answer."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._asked = connection, 0

    def call(self, method: str, **parameters: Any) -> Any:
        self._asked += 1
        self._connection.send(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        while (answer := json.loads(self._connection.recv(60))).get("id") != self._asked:
            pass
        return answer.get("result", {})

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """The value of an expression of the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return found.get("result", {}).get("value")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        text = "\r" if key == "Enter" else ""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, self.value("document.body.innerText")
            time.sleep(0.1)
        return value

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def page(width: int = 1000, height: int = 640) -> Iterator[Page]:
    """A page of a browser of its own; PROGRAM must be there."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "about:blank"]
        process = subprocess.Popen([PROGRAM, *options], stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            found = next((m for line in process.stderr if (m := re.search(r"ws://127\.0\.0\.1:(\d+)/", line))), None)
            assert found
            targets = httpx.get(f"http://127.0.0.1:{found[1]}/json", timeout=30).json()
            at = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
            with connect(at, max_size=None) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            process.wait(30)
