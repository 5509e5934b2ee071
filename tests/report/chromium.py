"""A headless Chromium that a test talks to through a pipe, in DevTools' own protocol."""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Chromium:
    """One page; `events` is all that the browser said of it."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._count = to, back, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.05)

    def open(self, page: Path, width: int, theme: str, height: int = 900) -> None:
        """A page in a window of this width, on a system with this theme, when all is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        wanted = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=wanted)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for(f"document.documentElement?.dataset.drawn === '{theme}'")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            bad = event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
            if event["method"] == "Network.requestWillBeSent":
                bad = not params["request"]["url"].startswith(("file:", "data:"))
            if bad:
                found.append(json.dumps(params)[:500])
        return found

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], seconds)
            assert ready, "the browser did not answer"
            part = os.read(self._back, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))


@contextmanager
def chromium(binary: str, profile: Path) -> Iterator[Chromium]:
    """Start a browser with a fresh profile, and end it."""
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    # The protocol wants file descriptors 3 and 4, which the shell sets without touching this process.
    command = f'exec "$@" 3<&{read_in} 4>&{write_out}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(read_in, write_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_in)
    os.close(write_out)
    try:
        yield Chromium(write_in, read_out)
    finally:
        os.close(write_in)  # the browser ends when its pipe does
        os.close(read_out)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
