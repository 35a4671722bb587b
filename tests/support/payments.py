"""The payments API of the docs with its provider, in separate processes that are told when to die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from support import pages

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "payments"

# One process imports everything; each server is a fork of it. A line of its input is an order: "provider", or the number of
# the moment of the first request at which a server shall die, 0 never, with a provider of its own. A moment is the time before,
# or after, a statement, a commit or a call of the provider.
_SERVERS = """
import os, signal, socket, sys

import psycopg, uvicorn
import api, provider

api.TTL = 1.0
moments, die_at, counted = -1, 0, []

def moment(called):
    global moments
    if moments >= 0:
        moments += 1
        if moments == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

def watched(function):
    def call(*args, **kwargs):
        moment(function)
        outcome = function(*args, **kwargs)
        moment(function)
        return outcome
    return call

class Watched(api.IdempotentEffect):
    def run(self, work):
        global moments
        moments = 0
        answer = super().run(work)
        moment("the answer")
        counted.append(moments)
        moments = -1
        return answer

def serve(app, listening):
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])

for line in sys.stdin:
    what, _, elsewhere = line.strip().partition(" ")
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    if what == "provider":
        api.PROVIDER = f"http://127.0.0.1:{port}"
    if os.fork() == 0:
        if what != "provider":
            die_at = int(what)
            api.PROVIDER = elsewhere or api.PROVIDER
            api.app.get("/moments")(lambda: counted)
            api.IdempotentEffect = Watched
            api.urlopen = watched(api.urlopen)
            psycopg.Cursor.execute = watched(psycopg.Cursor.execute)
            psycopg.Connection.commit = watched(psycopg.Connection.commit)
        serve(provider.app if what == "provider" else api.app, listening)
        os._exit(0)
    listening.close()
    print(port, flush=True)
"""


class Answer(NamedTuple):
    """What a server said; status 0: nothing."""

    status: int
    body: Any
    headers: dict[str, str]


def ask(url: str, body: Any = None, **headers: str) -> Answer:
    """Send a request once; bytes as they are, anything else as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, data, {"Content-Type": "application/json"} | named), timeout=20) as answer:
            return Answer(answer.status, json.load(answer), dict(answer.headers))
    except HTTPError as error:
        return Answer(error.code, json.load(error), dict(error.headers))
    except (URLError, HTTPException, OSError):
        return Answer(0, None, {})


@contextmanager
def provider_that_says(answers: list[bytes]) -> Iterator[str]:
    """Serve a provider whose answers, one for each connection, are these bytes; yield its URL."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(20)
    finally:
        listening.close()


class Servers:
    """Starts servers of the example, each in a separate process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._turn = threading.Lock()
        self.provider = self._start("provider")

    def api(self, die_at: int = 0, *, provider: str = "") -> str:
        """Start a server that dies at that moment of its first order, and has this provider; return its URL."""
        return self._start(f"{die_at} {provider}")

    def _start(self, what: str) -> str:
        assert self._popen.stdin and self._popen.stdout
        with self._turn:
            self._popen.stdin.write(f"{what}\n".encode())
            self._popen.stdin.flush()
            return f"http://127.0.0.1:{int(self._popen.stdout.readline())}"

    def charges(self) -> list[dict[str, Any]]:
        """Return what the provider has charged."""
        found: list[dict[str, Any]] = ask(f"{self.provider}/charges").body
        return found


@contextmanager
def servers(dsn: str) -> Iterator[Servers]:
    """Start the process that servers are forks of; at the end of the block all of them die."""
    environment = pages.environment(dsn)
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLE), environment["PYTHONPATH"]])
    popen = subprocess.Popen(
        [sys.executable, "-c", _SERVERS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Servers(popen)
    finally:
        os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            assert pipe
            pipe.close()
