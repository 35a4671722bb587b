"""Chromium without a window, driven by chromedriver over its HTTP interface (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

SWITCHES = [
    *("--headless", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_WAIT = """
    const [condition, done] = [new Function("return " + arguments[0]), arguments[1]];
    const look = () => { const found = condition(); found ? done(found) : requestAnimationFrame(look); };
    look();
"""


def missing_programs() -> str:
    """Return what is not installed, or an empty string."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    wanted = {"chromium": chromium, "chromedriver": shutil.which("chromedriver")}
    return " and ".join(name for name, found in wanted.items() if not found)


class Browser:
    """One window. Leave the block to end the browser and its driver."""

    def __init__(self, profile: Path) -> None:
        binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"HOME": str(profile)},
        )
        assert self._driver.stdout is not None
        port = next(
            found[1] for line in self._driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"binary": binary, "args": [*SWITCHES, f"--user-data-dir={profile}"]}
        timeouts = {"script": 60_000, "pageLoad": 60_000}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": timeouts}}
        try:
            self._url += "/" + self._ask("POST", "", capabilities=wanted)["sessionId"]
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.communicate()

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from None

    def open(self, url: str) -> None:
        """Load a page, its styles and scripts included."""
        self._ask("POST", "/url", url=url)

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a script returns; it finds its arguments in `arguments`."""
        return self._ask("POST", "/execute/sync", script=script, args=arguments)

    def wait(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        return self._ask("POST", "/execute/async", script=_WAIT, args=[condition])

    def show(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Have a window of this width in CSS pixels, under a light or a dark color scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        for command, parameters in (
            ("Emulation.setDeviceMetricsOverride", metrics),
            ("Emulation.setEmulatedMedia", media),
        ):
            self._ask("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def picture(self, *, whole: bool = False) -> str:
        """Return a PNG of the window, or of the whole page, in base64."""
        parameters = {"captureBeyondViewport": whole}
        if whole:
            size = self.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            parameters |= {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}}
        data: str = self._ask("POST", "/goog/cdp/execute", cmd="Page.captureScreenshot", params=parameters)["data"]
        return data
