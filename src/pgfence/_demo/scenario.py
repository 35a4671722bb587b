"""A scene: a short play with separate processes, and its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from sqlalchemy import create_engine

from pgfence._demo.bank import NAMESPACE, SCHEMA
from pgfence._demo.errors import DemoError
from pgfence._process.clock import clock
from pgfence.config import configure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import URL, Engine

    from pgfence._demo.context import Message
    from pgfence._demo.workload import Verdict

_PATIENCE = 60.0
_LOOK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """The result of a scene.

    `lines` say what happened, and `figures` are the numbers in them.
    """

    scene: str
    title: str
    verdict: Verdict
    lines: tuple[str, ...]
    figures: dict[str, int]

    def as_data(self) -> dict[str, object]:
        """Return the result for JSON."""
        return {"scene": self.scene, "title": self.title, "verdict": self.verdict.name.lower(), **self.figures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scene that can be played, with an engine that finds pgfence's tables in the demo's schema."""

    name: str
    title: str
    play: Callable[[Engine], ScenarioResult]


def create_engine_for(url: str | URL) -> Engine:
    """Return an engine for a scene. pgfence's tables are in the demo's schema, which is dropped at the end."""
    engine = create_engine(url)
    configure(engine, schema=SCHEMA, namespace=NAMESPACE)
    return engine


class ScenarioProcess:
    """A process that plays a part. It reads its part from standard input and reports in lines of JSON."""

    def __init__(self, module: str, url: URL, errors: IO[bytes], **part: object) -> None:
        self._errors = errors
        self.popen = subprocess.Popen(
            (sys.executable, "-P", "-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self._stdin, self._stdout = self.popen.stdin, self.popen.stdout
        self.send(url=url.render_as_string(hide_password=False), **part)

    def send(self, **words: object) -> None:
        """Send a line to the process."""
        # A process that has ended does not read. The next read from it raises an error with the reason.
        with suppress(OSError):
            self._stdin.write(f"{json.dumps(words)}\n")
            self._stdin.flush()

    def read_message(self) -> Message:
        """Wait for the next message of the process, and return it.

        Raises:
            DemoError: the process has ended without sending a message.
        """
        line = self._stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise DemoError(": ".join(["a process of the demo ended unexpectedly", *last]))
        words: Message = json.loads(line)
        return words

    def wait_for(self, what: str) -> Any:
        """Wait for a message with the key `what`, and return its value."""
        deadline = clock() + _PATIENCE
        while what not in (words := self.read_message()):
            if clock() > deadline:
                raise DemoError(f"a process of the demo did not report {what!r} within {_PATIENCE:.0f} s")
        return words[what]

    def close(self) -> None:
        """Kill the process."""
        self.popen.kill()
        self._stdin.close()
        self._stdout.close()
        self.popen.wait()


@contextmanager
def start_processes() -> Iterator[Callable[..., ScenarioProcess]]:
    """Yield a function that starts a process. All processes that it has started end with the block."""
    started: list[ScenarioProcess] = []
    with tempfile.TemporaryFile() as errors:

        def start(module: str, url: URL, **part: object) -> ScenarioProcess:
            started.append(ScenarioProcess(module, url, errors, **part))
            return started[-1]

        try:
            yield start
        finally:
            for process in started:
                process.close()


def fork_process(work: Callable[[], object]) -> int:
    """Fork a process that calls `work` and then waits until this process ends. Return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        while os.getppid() == parent:
            time.sleep(_LOOK)
    finally:
        os._exit(0)


def say(**words: object) -> None:
    """Send one line to the process that plays the scene."""
    sys.stdout.write(f"{json.dumps(words)}\n")
    sys.stdout.flush()


def read_part() -> Message:
    """Read the part of this process, a line from the process that plays the scene."""
    words: Message = json.loads(sys.stdin.readline() or "{}")
    return words
