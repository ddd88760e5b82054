"""A headless Chromium, driven over pipes by its DevTools protocol: nothing to install, and no port."""

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
SECONDS = 60.0
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
    """Where Chromium is, if it is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_tab(program: str, profile: Path) -> "Iterator[Tab]":
    """A tab of a fresh Chromium, which ends with the block."""
    to_child, to_us = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes to 4; a shell puts the pipes there.
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
    """One tab; everything that its page asks of the network or complains of is kept."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._received = b""
        self._last_id = 0
        self._session = ""
        self.requests: list[str] = []
        self.complaints: list[Any] = []
        self._events: list[str] = []
        target = next(info for info in self.send("Target.getTargets")["targetInfos"] if info["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result."""
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
        """Shows a page, and returns once it is drawn."""
        self._events.clear()
        narrow = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def run(self, script: str) -> Any:
        """What an expression of JavaScript evaluates to."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key, as a user would, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move_mouse(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        """The next message, noted if it is an event."""
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            if not select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {SECONDS:g} seconds.")
            chunk = os.read(self._reader, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium ended.")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params")
        if method is not None:
            self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(parameters)
        return message
