"""The documentation as a reader gets it: built once for all workers, and served under the path of the published site."""

from __future__ import annotations

import fcntl
import html
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"
PREFIX = "/en/stable/"
"""The path of `html_baseurl`, under which the links of the 404 page work."""


def build(folder: Path) -> Path:
    """Build the site in a folder that all workers of a run have in common, once, and return where its pages are."""
    pages = folder / "html"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(folder / "doctrees"), str(DOCS)]
            subprocess.run([*command, str(pages)], check=True, stdin=subprocess.DEVNULL, capture_output=True)
            (folder / "built").touch()
    return pages


@contextmanager
def serve(pages: Path) -> Iterator[str]:
    """Serve the pages while the block runs, with the site's own page for what is not there. Yields the address."""

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            found = pages / unquote(urlsplit(path).path).removeprefix(PREFIX)
            return str(found / "index.html" if found.is_dir() else found)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            content = (pages / "404.html").read_bytes()
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
        finally:
            server.shutdown()
            thread.join()


def page_names(pages: Path) -> list[str]:
    """Return the pages of the site by their path."""
    return sorted(page.relative_to(pages).as_posix() for page in pages.rglob("*.html"))


def dead_links(pages: Path) -> list[str]:
    """Return the links inside the site that lead to no page, file or anchor."""
    texts = {name: (pages / name).read_text(encoding="utf-8") for name in page_names(pages)}
    anchors = {name: set(re.findall(r'\sid="([^"]*)"', text)) for name, text in texts.items()}
    dead = []
    for name, text in texts.items():
        for written in set(re.findall(r'\s(?:href|src)="([^"]*)"', text)):
            link = html.unescape(written)
            target = urlsplit(urljoin(f"http://site/{PREFIX}{name}".replace("//en", "/en"), link))
            if target.netloc != "site":
                continue
            path = unquote(target.path).removeprefix(PREFIX) or "index.html"
            anchor = unquote(target.fragment)
            if not (pages / path).exists() or (anchor and path in anchors and anchor not in anchors[path]):
                dead.append(f"{name}: {link}")
    return sorted(dead)
