"""Controls headless Chromium with the DevTools protocol over pipes, without dependencies and network ports."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 300.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
)


def find() -> str | None:
    """Returns the path of Chromium, or None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_tab(program: str, profile: Path) -> "Iterator[Tab]":
    """Starts Chromium with a new profile and yields a tab. Terminates Chromium at the end of the `with` block."""
    to_child, to_us = os.pipe(), os.pipe()
    # Chromium reads commands from file descriptor 3 and writes responses to 4. A shell redirects the pipes.
    launch = f'exec "$0" "$@" 3<&{to_child[0]} 4>&{to_us[1]}'
    arguments = ["bash", "-c", launch, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(
        arguments, pass_fds=(to_child[0], to_us[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(to_child[0])
        os.close(to_us[1])
        try:
            yield Tab(to_us[0], to_child[1])
        finally:
            process.terminate()
            os.close(to_child[1])
            os.close(to_us[0])


class Tab:
    """A browser tab. Records network requests and errors of its page."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._received = b""
        self._last_id = 0
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[Any] = []
        self._events: list[str] = []
        target = next(info for info in self.send("Target.getTargets")["targetInfos"] if info["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, page: Path, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        """Opens a page and waits until it is loaded."""
        self._events.clear()
        narrow = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def run(self, script: str) -> Any:
        """Evaluates a JavaScript expression and returns its value."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key on the focused element."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move_mouse(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        """Reads the next message, and records it if it is an event."""
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            if not select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not respond for {SECONDS:g} seconds.")
            chunk = os.read(self._reader, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium exited.")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params")
        if method is not None:
            self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.errors.append(parameters)
        return message
