"""A TCP proxy in front of a server that breaks connections on demand."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

Pair: TypeAlias = tuple[asyncio.StreamWriter, asyncio.StreamWriter]

_RESET = struct.pack("ii", 1, 0)
_HOST = "127.0.0.1"


class Proxy:
    """A TCP proxy that forwards every connection to one server. It runs on a separate thread.

    Limitations: after `black_hole`, the kernel still acknowledges packets, as a middlebox does, so TCP keepalives are answered.
    Therefore, the proxy does not simulate a cut cable.
    """

    def __init__(self, dsn: str) -> None:
        target = urlsplit(dsn)
        self._target = (target.hostname, target.port or 5432)
        self._pairs: list[Pair] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="pgfence-fault-proxy")
        self._thread.start()
        self._run(self._open())
        user, at, _ = target.netloc.rpartition("@")
        self.dsn = urlunsplit(target._replace(netloc=f"{user}{at}{_HOST}:{self.port}"))

    def cut(self) -> None:
        """Reset every connection, in both directions. New connections are forwarded."""
        self._run(self._cut())

    def half_close(self, towards: Literal["client", "server"]) -> None:
        """Close one direction of every connection, so that the given side reads the end of the stream."""
        self._run(self._half_close(0 if towards == "client" else 1))

    def black_hole(self) -> None:
        """Stop forwarding, on old connections and new ones, and keep them open."""
        self._call(self._flowing.clear)

    def delay(self, seconds: float) -> None:
        """Wait before each piece of data is forwarded."""
        self._pause = seconds

    def refuse(self) -> None:
        """Accept no new connections. Existing connections are still forwarded."""
        self._run(self._refuse())

    def heal(self) -> None:
        """Forward again, beginning with the data that was held back, and accept new connections."""
        self._pause = 0.0
        self._call(self._flowing.set)
        self._run(self._listen(self.port))

    def connections(self) -> int:
        return len(self._pairs)

    def close(self) -> None:
        """Reset every connection and end the thread."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _call(self, function: Callable[[], None]) -> None:
        async def work() -> None:
            function()

        self._run(work())

    async def _open(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener: socket.socket | None = None
        await self._listen(0)

    async def _listen(self, port: int) -> None:
        # asyncio's own server is not used, because it loses a connection that it accepts in the iteration of the event loop in
        # which the server is closed.
        if self._listener is None:
            self._listener = socket.create_server((_HOST, port))
            self._listener.setblocking(False)
            self.port: int = self._listener.getsockname()[1]
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _close(self) -> None:
        await self._refuse()
        await self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cut(self) -> None:
        for pair in self._pairs:
            for side in pair:
                with suppress(OSError):
                    side.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                side.transport.abort()

    async def _half_close(self, side: int) -> None:
        for pair in self._pairs:
            pair[side].write_eof()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # The client has already closed the connection.
            return
        client.setblocking(False)
        task = self._loop.create_task(self._serve(client))
        self._tasks.add(task)

        def forget(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            client.close()  # This runs also if the task was cancelled before its first step.

        task.add_done_callback(forget)

    async def _serve(self, client: socket.socket) -> None:
        await self._flowing.wait()
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        pair = (writer, server_writer)
        self._pairs.append(pair)
        try:
            await asyncio.gather(self._copy(reader, server_writer), self._copy(server_reader, writer))
        finally:
            self._pairs.remove(pair)
            for side in pair:
                side.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError, RuntimeError):
            while data := await source.read(65536):
                await self.forward(sink, data)
            await self._flowing.wait()
            sink.write_eof()

    async def forward(self, sink: asyncio.StreamWriter, data: bytes) -> None:
        await self._flowing.wait()
        if self._pause:
            await asyncio.sleep(self._pause)
        sink.write(data)
        await sink.drain()
