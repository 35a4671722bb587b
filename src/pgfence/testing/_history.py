"""Record which holders were inside a critical section, and check afterwards that no two of them were inside at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

from pgfence._api.inputs import is_async_connection, is_async_session
from pgfence._sql import testing as statements

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from sqlalchemy import Engine

    from pgfence._api.inputs import AsyncWork, SyncWork


class Entry(NamedTuple):
    """One recorded step."""

    resource: str
    holder: str
    what: str
    token: int | None


class PgfenceHistory:
    """The history of critical sections, in a table of the test database, in the order in which the server inserted the rows.

    `enter` and `leave` are static methods, so worker processes can call them without a fixture::

        with AdvisoryLock(engine, "report").connect() as connection:
            PgfenceHistory.enter(connection, "worker-1")
            connection.commit()
            ...
            PgfenceHistory.leave(connection, "worker-1")
            connection.commit()

    The fixture `pgfence_history` creates the table for one test and drops it afterwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._drop()
        with engine.begin() as connection:
            connection.execute(statements.CREATE_HISTORY)

    @overload
    @staticmethod
    def enter(
        session: AsyncWork, holder: str, *, resource: str = "", token: int | None = None
    ) -> Coroutine[Any, Any, None]: ...
    @overload
    @staticmethod
    def enter(session: SyncWork, holder: str, *, resource: str = "", token: int | None = None) -> None: ...
    @staticmethod
    def enter(session: Any, holder: str, *, resource: str = "", token: int | None = None) -> object:
        """Record that a holder has entered the critical section.

        Call this method as soon as the lock is held, on the connection that does the work, and commit.

        Args:
            session: a Session or Connection, or the async counterpart of either, in which case the result must be awaited.
            holder: a name that no other holder has, such as a process id.
            resource: what the lock protects, if a test has several locks.
            token: the fencing token, if the lock has one.
        """
        return _record(session, Entry(resource, holder, "enter", token))

    @overload
    @staticmethod
    def leave(session: AsyncWork, holder: str, *, resource: str = "") -> Coroutine[Any, Any, None]: ...
    @overload
    @staticmethod
    def leave(session: SyncWork, holder: str, *, resource: str = "") -> None: ...
    @staticmethod
    def leave(session: Any, holder: str, *, resource: str = "") -> object:
        """Record that a holder leaves the critical section. Call this method while the lock is still held, and commit.

        Args:
            session: the same as for `enter`.
            holder: the same as for `enter`.
            resource: the same as for `enter`.
        """
        return _record(session, Entry(resource, holder, "leave", None))

    def __len__(self) -> int:
        """The number of steps that are recorded and committed."""
        with self._engine.connect() as connection:
            count: int = connection.execute(statements.COUNT_HISTORY).scalar_one()
            return count

    def check(self) -> set[str]:
        """Raise an error if two holders were inside together, and return the holders that had not left when another one entered.

        Only a holder that was killed, or whose lock was lost, may have failed to leave. Assert that each holder in the
        returned set was one of these.

        Raises:
            AssertionError: a holder left while another one, or none, was inside; a token was smaller than an earlier one; or two
                holders had the same token. The message lists all of these violations.
        """
        wrong, unfinished = judge_history(self._read())
        if wrong:
            raise AssertionError("the history is not that of an exclusive lock:\n" + "\n".join(wrong))
        return unfinished

    def _drop(self) -> None:
        with self._engine.begin() as connection:
            connection.execute(statements.LIMIT_WAIT)
            connection.execute(statements.DROP_HISTORY)

    def _read(self) -> list[Entry]:
        with self._engine.connect() as connection:
            return [Entry(*row) for row in connection.execute(statements.READ_HISTORY)]


def _record(session: Any, entry: Entry) -> object:
    if is_async_connection(session) or is_async_session(session):
        return _record_async(session, entry)
    session.execute(statements.RECORD, entry._asdict())
    return None


async def _record_async(session: Any, entry: Entry) -> None:
    await session.execute(statements.RECORD, entry._asdict())


def judge_history(entries: Iterable[Entry]) -> tuple[list[str], set[str]]:
    """Return the violations of exclusion, and the holders that had not left when another one entered."""
    wrong: list[str] = []
    unfinished: set[str] = set()
    inside: dict[str, str | None] = {}
    newest: dict[str, tuple[int, str]] = {}
    for number, entry in enumerate(entries, 1):
        at = f"step {number}" + (f" of {entry.resource!r}" if entry.resource else "")
        present = inside.get(entry.resource)
        if entry.what == "leave":
            if present != entry.holder:
                whose = "no holder was inside" if present is None else f"{present!r} was inside"
                wrong.append(f"{at}: {entry.holder!r} left, but {whose}")
            inside[entry.resource] = None
            continue
        if present is not None:
            unfinished.add(present)
        inside[entry.resource] = entry.holder
        if entry.token is not None:
            token, holder = newest.get(entry.resource, (0, ""))
            if entry.token < token:
                wrong.append(f"{at}: {entry.holder!r} entered with token {entry.token} after {holder!r} had {token}")
            elif entry.token == token and entry.holder != holder:
                wrong.append(f"{at}: {entry.holder!r} and {holder!r} have the same token {token}")
            newest[entry.resource] = max((entry.token, entry.holder), (token, holder))
    return wrong, unfinished
