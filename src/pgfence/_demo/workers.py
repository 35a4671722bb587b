"""Start, instruct, monitor and end the worker processes of a demo."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from pgfence._demo.errors import DemoError
from pgfence._process.clock import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

    from pgfence._demo.context import Message

_PROGRAM = (sys.executable, "-P", "-m", "pgfence._demo.worker")
_START = 120.0
_END = 5.0


class Worker:
    """One worker process, as the demo sees it."""

    def __init__(self, name: str, stderr: int) -> None:
        self.name = name
        self.ready = False
        self.expected_to_die = False
        """Whether the end of the process is part of the demo."""
        self._unread = b""
        # The process is started in a separate session, so that Ctrl-C does not reach it. It ends with its input, so it does not
        # outlive this process.
        self.popen = subprocess.Popen(
            _PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0, start_new_session=True
        )
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout

    def send(self, order: dict[str, object]) -> None:
        """Send the process an order."""
        # A process that has just died does not read. The next read from it detects that it has died.
        with suppress(OSError):
            self.stdin.write(f"{json.dumps(order)}\n".encode())

    def read_messages(self) -> list[Message] | None:
        """Return the messages of the process since the last call, or None if it has ended."""
        piece = os.read(self.stdout.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + piece).split(b"\n")
        return [json.loads(line) for line in lines] if piece else None

    def close(self) -> None:
        """Close the pipes, which ends the process."""
        self.stdin.close()
        self.stdout.close()


class WorkerPool:
    """Several processes that do the same work. They end with the `with` block of the pool."""

    def __init__(self, url: URL, size: int) -> None:
        self._url = url.render_as_string(hide_password=False)
        self._size = size
        self._started = 0
        self._members: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._errors = tempfile.TemporaryFile()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def members(self) -> list[Worker]:
        """The processes that are running."""
        return list(self._members)

    def start(self) -> None:
        """Start the missing processes, without waiting until they are ready."""
        while len(self._members) < self._size:
            self._started += 1
            member = Worker(f"pgfence demo, process {self._started}", self._errors.fileno())
            self._members.append(member)
            self._selector.register(member.stdout, selectors.EVENT_READ, member)
            # The URL is sent to standard input, because arguments are visible in the process list.
            member.send({"url": self._url, "name": member.name})

    def fill(self) -> None:
        """Start the missing processes and wait until all of them are connected.

        Raises:
            DemoError: one of the processes cannot connect.
        """
        self.start()
        deadline = clock() + _START
        while not all(member.ready for member in self._members):
            for member, words in self.listen(0.1):
                member.ready = member.ready or "ready" in words
            if clock() > deadline:
                raise DemoError(f"the processes of the demo were not ready after {_START:.0f} s")

    def send(self, order: dict[str, object]) -> None:
        """Send all processes an order."""
        for member in self._members:
            member.send(order)

    def listen(self, timeout: float) -> Iterator[tuple[Worker, Message]]:
        """Yield the messages and their senders, after waiting for at most `timeout` seconds.

        Raises:
            DemoError: one of the processes failed, or has ended unexpectedly.
        """
        for key, _ in self._selector.select(timeout):
            member: Worker = key.data
            said = member.read_messages()
            if said is None:
                self._remove_dead(member)
            for words in said or ():
                if "failed" in words:
                    raise DemoError(f"{member.name}: {words['failed']}")
                yield member, words

    def kill(self, member: Worker) -> None:
        """Kill a process without warning, as the kernel does if the host runs out of memory."""
        member.expected_to_die = True
        member.popen.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End all processes, and wait until they have ended."""
        for member in self._members:
            member.close()
        deadline = clock() + _END
        for member in self._members:
            try:
                member.popen.wait(max(0.0, deadline - clock()))
            except subprocess.TimeoutExpired:
                member.popen.kill()
                member.popen.wait()
        self._members.clear()
        self._selector.close()
        self._errors.close()

    def _remove_dead(self, member: Worker) -> None:
        self._selector.unregister(member.stdout)
        self._members.remove(member)
        member.close()
        code = member.popen.wait()
        if not member.expected_to_die:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise DemoError(": ".join([f"{member.name} ended unexpectedly with return code {code}", *last]))
