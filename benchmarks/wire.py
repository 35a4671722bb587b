"""A proxy in front of a server, in a separate process, that counts round trips and can add the delay of a network.

A *round trip* begins when the client sends something after the server has sent something. Messages that a client sends at once, as
a pipeline does, are one round trip. Half of the delay is added on the way there and half on the way back, without loss or jitter.
Each direction of a connection has a thread. The proxy works for Redis as well as for PostgreSQL.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

MILLISECOND = 0.0007
"""A delay that makes a round trip of about a millisecond, of which the proxy itself takes the rest."""
TERMINATE = b"X\x00\x00\x00\x04"
"""The message that a PostgreSQL client sends before it closes the connection. The server sends no response."""


class Counter:
    """The number of round trips that a proxy has counted over all connections through it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def trips(self) -> int:
        """The number of round trips so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def counted(url: URL, delay: float = 0.0) -> Iterator[tuple[URL, Counter]]:
    """Yield the URL of a proxy in front of a server, and its counter.

    Args:
        url: the URL of the server.
        delay: the seconds that the proxy adds to each round trip.
    """
    command = [sys.executable, "-m", "benchmarks.wire", str(url.host), str(url.port), str(delay)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield url.set(host="127.0.0.1", port=int(process.stdout.readline())), Counter(process)
    finally:
        process.stdin.close()  # ends the process
        process.wait(10)
        process.stdout.close()


class _Link:
    """One connection of a client, and the connection to the server for it."""

    total = 0
    lock = threading.Lock()

    def __init__(self, client: socket.socket, server: socket.socket, delay: float) -> None:
        self.delay = delay
        self.answered = True
        """Whether the server has sent something since the client did."""
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for way in ((client, server, True), (server, client, False)):
            threading.Thread(target=self._copy, args=way, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, asking: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if asking and self.answered and data != TERMINATE:
                    self.answered = False
                    with self.lock:
                        _Link.total += 1
                if self.delay:
                    time.sleep(self.delay / 2)
                if not asking:
                    self.answered = True
                sink.sendall(data)
        for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with suppress(OSError):
                end.shutdown(how)


def _accept(listener: socket.socket, target: tuple[str, int], delay: float) -> None:
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection(target)
        except OSError:
            client.close()
        else:
            _Link(client, server, delay)


def main(host: str, port: str, delay: str) -> None:
    """Print the port, then answer each input line with the number of round trips so far, until the input ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    threading.Thread(target=_accept, args=(listener, (host, int(port)), float(delay)), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    for _ in sys.stdin:
        print(_Link.total, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
