"""A proxy in front of a server, in a process of its own: it counts round trips and can add the delay of a network.

A *round trip* begins when the client sends something after the server has sent something. What a client sends in one go, as
a pipeline does, is one round trip however many messages it has. The delay is half on the way there and half on the way back,
without loss or jitter; each direction of a connection is a thread. Redis can stand behind it as well as PostgreSQL.
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
"""A delay that makes a round trip of about a millisecond: the rest is the time of the proxy itself."""
TERMINATE = b"X\x00\x00\x00\x04"
"""What a client of PostgreSQL sends before it closes the connection: nothing answers it."""


class Counter:
    """What a proxy has counted so far, over all connections through it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def trips(self) -> int:
        """Round trips until now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def counted(url: URL, delay: float = 0.0) -> Iterator[tuple[URL, Counter]]:
    """Yield the URL of a proxy in front of a server, and its counter.

    Args:
        url: of the server.
        delay: seconds that a round trip takes longer through the proxy.
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
        process.stdin.close()  # which ends it
        process.wait(10)
        process.stdout.close()


class _Link:
    """One connection of a client, and ours to the server for it."""

    total = 0
    lock = threading.Lock()

    def __init__(self, client: socket.socket, server: socket.socket, delay: float) -> None:
        self.delay = delay
        self.answered = True
        """The server has sent something since the client did."""
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
    """Say which port it listens on, then answer each line with the number of round trips so far, until there are no more."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    threading.Thread(target=_accept, args=(listener, (host, int(port)), float(delay)), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    for _ in sys.stdin:
        print(_Link.total, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
