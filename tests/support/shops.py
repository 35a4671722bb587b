"""A shop behind the middleware under a real server, uvicorn or gunicorn, in processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sqlalchemy import make_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GATE = 4711
"""The advisory lock that a slow payment waits for. It waits with the only connection of its pool."""

_COMMON = """
import os
from sqlalchemy import text

PAID = text("INSERT INTO payment (note, pid) VALUES (:note, :pid)")
GATE = text("SELECT pg_advisory_xact_lock_shared(4711)")
RULES = {"routes": ["/pay"], "principal": lambda _: "me", "max_body": 1000, "ttl": 1}
POOL = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5}

def paid(body):
    return {"note": body.decode(), "pid": os.getpid()}
"""

_ASGI = """
from fastapi import FastAPI, Request
from sqlalchemy.ext.asyncio import create_async_engine
from pgfence.asgi import IdempotencyMiddleware

engine = create_async_engine(os.environ["SHOP"].replace("://", "+asyncpg://"), **POOL)
app = FastAPI()

@app.post("/pay", status_code=201)
async def pay(request: Request):
    answer = paid(await request.body())
    async with engine.begin() as connection:
        await connection.execute(PAID, answer)
    if answer["note"].startswith("slow"):
        async with engine.begin() as connection:
            await connection.execute(GATE)
    return answer

app.add_middleware(IdempotencyMiddleware, engine=engine, **RULES)
"""

_WSGI = """
from flask import Flask, request
from sqlalchemy import create_engine
from pgfence.wsgi import IdempotencyMiddleware

engine = create_engine(os.environ["SHOP"].replace("://", "+psycopg://"), **POOL)
app = Flask("shop")

@app.post("/pay")
def pay():
    answer = paid(request.get_data())
    with engine.begin() as connection:
        connection.execute(PAID, answer)
    if answer["note"].startswith("slow"):
        with engine.begin() as connection:
            connection.execute(GATE)
    return answer, 201

app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, engine, **RULES)
"""

_WORKERS = ["--preload", "--workers", "2", "--threads", "4", "--keep-alive", "60"]
_SERVERS = {
    "uvicorn": (_ASGI, ["uvicorn", "shop:app", "--fd", "{fd}", "--log-level", "critical"]),
    # The workers are forked from a process that has imported everything.
    "gunicorn": (_WSGI, ["gunicorn", "shop:app", "--bind", "fd://{fd}", "--log-level", "critical", *_WORKERS]),
}


class Shop:
    """A server with its processes.

    Attributes:
        port: on 127.0.0.1.
    """

    def __init__(self, server: str, dsn: str, folder: Path) -> None:
        code, self._command = _SERVERS[server]
        (folder / "shop.py").write_text(_COMMON + code)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._folder = folder
        self._environment = os.environ | {"SHOP": make_url(dsn).set(drivername="postgresql").render_as_string(False)}
        self.port: int = self._socket.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start it, or start it again on the same port."""
        number = self._socket.fileno()
        command = [sys.executable, "-m", *(part.format(fd=number) for part in self._command)]
        self._process = subprocess.Popen(command, cwd=self._folder, env=self._environment, pass_fds=[number])

    def kill(self, pid: int) -> None:
        """Kill the process that was running the request; another one takes its place."""
        os.kill(pid, signal.SIGKILL)
        if pid == self._process.pid:
            self._process.wait(10)
            self.start()

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait(10)
        self._socket.close()

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A connection on which a client says what it likes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=15) as connection:
            yield connection
