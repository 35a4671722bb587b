"""What the clients of a cluster write down: one JSON object in a line, for everything that a judge needs to know.

All moments are of CLOCK_MONOTONIC, which the processes of one machine share.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy.exc import DBAPIError

from pgfence import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, as far as a judge needs it.

    Attributes:
        error: module and class.
        sqlstate: of the server, if it has sent an error.
        retryable: what an error of pgfence says about itself.
        message: the beginning of it.
    """

    error: str
    sqlstate: str | None = None
    retryable: bool | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The common part of all records.

    Attributes:
        way: the way in which the client connects.
        at: when the record was written.
    """

    way: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant(Record):
    """A lock of any kind was acquired.

    Attributes:
        kind: "lease", "slot", "term", "permit", "partition", "lock" or "token lock".
        name: what excludes others; for a permit the semaphore.
        who: client, kind and name.
        resource: what the token belongs to.
        asked: when it was requested.
        slot: which slot, if it is one.
    """

    kind: str
    name: str
    who: str
    resource: str | None = None
    token: int | None = None
    asked: float
    slot: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief(Record):
    """A lock of any kind has ended. Between `start` and `end` the handle said at each sample that it is held.

    Attributes:
        limit: how many may believe at once.
        how: "released", "lost", "error", or "unfinished" where the client ended first.
        told: when the callback of a loss was called.
        reason: the reason for the loss.
    """

    kind: str
    name: str
    who: str
    start: float
    end: float
    how: str
    limit: int = 1
    token: int | None = None
    slot: str | None = None
    told: float | None = None
    reason: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Write(Record):
    """A transaction that inserts one row with a unique id.

    Attributes:
        table: "fenced", "transaction", "key", "version" or "claim".
        id: of the row.
        name: the resource, the idempotency key, or the versioned row.
        started: when it was begun.
        failure: the error, or None if the commit was acknowledged.
        ran: whether the row was inserted by this call; a call with a known key inserts none.
        after_loss: whether the writer knew that its lock was lost.
    """

    table: str
    id: str
    name: str
    who: str
    started: float
    token: int | None = None
    failure: Failure | None = None
    ran: bool = True
    after_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Record):
    """A result for a key, of the table "key" or "effect"."""

    table: str
    key: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """A step of an effect was called."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Record):
    """One use of a primitive, to see when it works again."""

    primitive: str
    started: float
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Record):
    """An attempt to acquire a lock that failed with an error other than a timeout."""

    kind: str
    name: str
    asked: float
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Record):
    """The client has ended, and this many of its jobs had not."""

    alive: int


_TYPES: dict[str, type[Record]] = {
    one.__name__: one for one in (Grant, Belief, Write, Answer, Step, Probe, Refusal, Stop)
}


def describe_error(error: BaseException) -> Failure:
    """Return what a judge needs of an error."""
    original = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = getattr(original, "sqlstate", None) or getattr(error, "sqlstate", None)
    return Failure(
        error=f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}",
        sqlstate=sqlstate,
        retryable=error.retryable if isinstance(error, PgfenceError) else None,
        message=" ".join(str(error).split())[:300],
    )


class Recorder:
    """Appends records of one client to a file, from any thread."""

    _encoder: ClassVar[json.JSONEncoder] = json.JSONEncoder(separators=(",", ":"))

    def __init__(self, path: Path, way: str) -> None:
        self.way = way
        self._lock = threading.Lock()
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: type[Record], **values: Any) -> None:
        """Write a record, and flush it."""
        found = asdict(record(way=self.way, at=time.monotonic(), **values))
        line = self._encoder.encode({"type": record.__name__, **{key: v for key, v in found.items() if v is not None}})
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Return the records of all clients, in the order of time. A line that its client did not complete is left out."""
    found: list[Record] = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            found.append(_build(values))
    return sorted(found, key=lambda record: record.at)


def _build(values: dict[str, Any]) -> Record:
    kind = _TYPES[values.pop("type")]
    known = {field.name for field in fields(kind)}
    if values.get("failure") is not None:
        values["failure"] = Failure(**values["failure"])
    return kind(**{key: value for key, value in values.items() if key in known})
