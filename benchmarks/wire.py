"""A proxy that counts what a client sends: its requests, each of which is a round trip."""

from __future__ import annotations

import asyncio
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

# Requests for encryption come before the start-up message, and are as long as it is short.
_ENCRYPTION = {80877103, 80877104}


class Counter:
    """Counts the requests of all connections through one proxy."""

    def __init__(self, url: URL) -> None:
        self.requests = 0
        self.target = (url.host, url.port)
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, down = await asyncio.open_connection(*self.target)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await asyncio.gather(self._count(reader, down), self._copy(upstream, writer))
        finally:
            for side in (writer, down):
                side.transport.abort()

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(8)
            length, code = struct.unpack("!II", head)
            writer.write(head + await reader.readexactly(length - 8))
            if code not in _ENCRYPTION:
                break
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
            # Query, and Sync at the end of a prepared statement: the client waits for the answer.
            self.requests += head[:1] in b"QS"
            writer.write(head + body)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


@contextmanager
def counted(url: URL) -> Iterator[tuple[URL, Counter]]:
    """Yield the URL of a proxy in front of a server, and its counter."""
    counter = Counter(url)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(counter.accept, "127.0.0.1", 0), loop).result(10)

    async def stop() -> None:
        listener.close()
        for task in counter.tasks:
            task.cancel()
        await asyncio.gather(*counter.tasks, return_exceptions=True)

    try:
        yield url.set(port=listener.sockets[0].getsockname()[1]), counter
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
