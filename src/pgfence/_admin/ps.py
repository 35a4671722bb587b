"""Build the list of everything that is held, with the sessions that wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, overload

from pgfence._admin.known_keys import MIGRATION, list_known_keys, recognize_key
from pgfence._admin.requests import perform
from pgfence._api.inputs import check_choice, check_int, check_text
from pgfence._sql import ps as statements
from pgfence._sql.params import from_microseconds
from pgfence._sql.storage import TableNames, table_names_of
from pgfence._sql.ticket_queue import find_queue, find_queue_of
from pgfence.config import config_of
from pgfence.keys import LockKey
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._sql.ps import Access, HoldQuery, HoldRow, WaitRow

KINDS = (
    "session",
    "transaction",
    "lease",
    "slot",
    "permit",
    "term",
    "partition",
    "migration",
    "idempotency",
    "gate",
)
STATES = (
    "held",
    "active",
    "idle",
    "idle in transaction",
    "in transaction",
    "waiting",
    "prepared",
    "running",
    "lost",
    "min_hold",
    "lock_delay",
)
ABORTED = "idle in transaction (aborted)"
LARGEST_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Waiter:
    """A session that waits for a lock.

    Attributes:
        who: the session; its `backend_pid` identifies it.
        waiting: how long the session has been waiting.
        blocked_by: the process ids of the server processes that it waits for: the holders, or the waiter before it.
    """

    who: Holder
    waiting: timedelta
    blocked_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the list: what is held, who holds it, and who waits for it.

    Attributes:
        holder: the name or key, its kind, who holds it, since when, and until when.
        state: what the holder is doing; see the table of states in the documentation of `pgfence ps`.
        waiters: the sessions that wait for it, the longest wait first.
        blocked_by: if the holder itself waits for a lock of any kind, the process ids of the server processes that it waits
            for, followed by those that these processes wait for. 0 means a prepared transaction.
        scope: the scope of an idempotency key, whose `holder.name` is the key.
    """

    holder: Holder
    state: str
    waiters: tuple[Waiter, ...]
    blocked_by: tuple[int, ...] = ()
    scope: str | None = None

    @property
    def label(self) -> str:
        """The name, or `key 42`, `key (4, 2)` or `(not visible)` if it is not known; for an idempotency key, its scope and key."""
        if self.holder.name is not None:
            return self.holder.name if self.scope is None else f"{self.scope}:{self.holder.name}"
        return "(not visible)" if self.holder.key is None else self.holder.key.label


@dataclass(frozen=True, slots=True)
class Listing(Sequence[Row]):
    """The rows that `ps` returns, as a sequence.

    Attributes:
        limited: whether there are more rows than `limit`.
        hidden: sentences that say what the list does not contain, and why.
    """

    rows: tuple[Row, ...] = ()
    limited: bool = False
    hidden: tuple[str, ...] = field(default=())
    _at: datetime | None = field(default=None, init=False, repr=False, compare=False)
    """The time by the server's clock at which the list was read."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


@overload
def ps(
    engine: AsyncEngine,
    prefix: str = "",
    *,
    kind: str | Sequence[str] | None = None,
    state: str | Sequence[str] | None = None,
    limit: int | None = None,
) -> Coroutine[Any, Any, Listing]: ...
@overload
def ps(
    engine: Engine,
    prefix: str = "",
    *,
    kind: str | Sequence[str] | None = None,
    state: str | Sequence[str] | None = None,
    limit: int | None = None,
) -> Listing: ...
def ps(
    engine: Engine | AsyncEngine,
    prefix: str = "",
    *,
    kind: str | Sequence[str] | None = None,
    state: str | Sequence[str] | None = None,
    limit: int | None = None,
) -> object:
    """Return what is held in the database, who holds it, and who waits for it.

    Rows with waiters come first. Otherwise older rows come before newer ones.

    The list contains advisory locks of sessions and transactions, including those of other programs; leases, slots, permits,
    terms and partitions; migration locks; the gates that transactions are inside; and idempotency keys whose attempt is running
    or was lost.

    Guarantees: no lock is taken, nothing is written, and no value that is stored under a key is sent to the client. The list
    takes two queries in one transaction.

    Limitations: the server knows its sessions, but not the threads and tasks that use them. Of the tasks and threads of one
        process that wait for the same name, only the first is listed. Waiters for a lease, a slot, a permit, a term or a
        migration lock poll the server without holding anything, so they are not listed. Neither are transactions that locked a
        gate's row, such as the first one of each holder. An advisory lock of a session that is in a transaction is listed as
        "transaction", because the server does not show which kind of lock it is. An idempotency key that is claimed in an open
        transaction has no name, because other sessions cannot see the claim before it is committed.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited. A standby shows everything except the
            locks of the primary.
        prefix: the beginning of the names as the list shows them, that is, without the configured namespace but with any other
            namespace.
        kind: one or more kinds, of "session", "transaction", "lease", "slot", "permit", "term", "partition", "migration",
            "idempotency" and "gate".
        state: one or more states, as the list shows them.
        limit: the largest number of rows, from 1 to 1,000,000; None means all rows.

    Returns:
        The rows, as a sequence. Its `hidden` says what could not be listed, and `limited` whether there are more rows.

    Raises:
        ValueError: an argument has a value that is not allowed.
        TypeError: an argument has the wrong type.
        UnreachableError: the server did not respond.
    """
    return perform(engine, look, build_query(engine, prefix, kind=kind, state=state, limit=limit))


def build_query(
    engine: Engine | AsyncEngine,
    prefix: str,
    *,
    kind: str | Sequence[str] | None = None,
    state: str | Sequence[str] | None = None,
    limit: int | None = None,
) -> HoldQuery:
    """Check the arguments of `ps`, and return the query."""
    check_text(prefix, "prefix")
    states = _check_choices(state, "state", STATES)
    if limit is not None:
        check_int(limit, "limit", LARGEST_LIMIT)
    return statements.HoldQuery(
        place=table_names_of(engine),
        namespace=config_of(engine).namespace,
        prefix=prefix,
        kinds=_check_choices(kind, "kind", KINDS),
        states=(*states, ABORTED) if states and "idle in transaction" in states else states,
        # One row more than `limit` shows whether there are more rows.
        limit=None if limit is None else limit + 1,
    )


def _check_choices(given: str | Sequence[str] | None, what: str, choices: tuple[str, ...]) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (str, Sequence)):
        raise TypeError(f"{what} must be a str or a sequence of str, not {type(given).__name__}")
    chosen = (given,) if isinstance(given, str) else tuple(given)
    for each in chosen:
        check_choice(what, each, choices)
    return chosen


def look(connection: Connection, query: HoldQuery) -> Listing:
    """Return the list, in two round trips of one transaction. The first round trip finds out what the role may read."""
    # The transaction is committed, because psycopg drops its prepared statements at a rollback, and planning takes as long as
    # executing.
    with connection.begin():
        access = statements.probe(connection, query.place)
        known = replace(query, known=list_known_keys(access.database))
        holds, waits = statements.look(connection, known, access)
    return build_listing(query, access, holds, waits)


def build_listing(query: HoldQuery, access: Access, holds: list[HoldRow], waits: list[WaitRow]) -> Listing:
    """Return the list, in which each hold contains its waiters."""
    limited = query.limit is not None and len(holds) >= query.limit
    shown = holds[: query.limit - 1] if limited and query.limit is not None else holds
    waiters = _Waiters(shown, waits)
    rows = tuple([_build_row(row, waiters, access.database) for row in shown])
    listing = Listing(rows, limited, tuple(_list_hidden(query, access)))
    object.__setattr__(listing, "_at", from_microseconds(access.now))
    return listing


def _list_hidden(query: HoldQuery, access: Access) -> Iterable[str]:
    if not access.all_stats:
        yield (
            "This role is not a member of pg_read_all_stats, so it cannot see the address, the state or the time of other"
            " roles' sessions. To allow it, run GRANT pg_read_all_stats TO <role>"
        )
    lacking = [
        query.place.name(table)
        for table in ("lease", "gate", "idempotency_key", "lock_name")
        if access.is_denied(table)
    ]
    if lacking:
        yield f"This role may not read {', '.join(lacking)}. To allow it, run GRANT SELECT ON {', '.join(lacking)} TO <role>"
    if access.is_readable("idempotency_key") and not statements.should_list_attempts(query, access):
        yield (
            f"{query.place.name('idempotency_key')} has about {access.tables['idempotency_key']:,.0f} rows, so it was not read."
            ' To read it, pass kind="idempotency" or, on the command line, --kind idempotency'
        )
    # By default, missing tables are normal, because advisory locks need none.
    if query.place != TableNames() and all(rows == statements.MISSING for rows in access.tables.values()):
        prefix = "" if query.place.prefix == TableNames().prefix else f" with the prefix {query.place.prefix!r}"
        yield f"There are no pgfence tables{prefix} {query.place.describe(access.database)}, so leases and keys are not listed"


class _Waiters:
    """The waiters, grouped by the key that they wait for."""

    def __init__(self, holds: Sequence[HoldRow], waits: Sequence[WaitRow]) -> None:
        self._found: dict[tuple[int, int], list[Waiter]] = defaultdict(list)
        self._holders: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._owners = {wait.ticket: wait.pid for wait in waits if wait.ticket is not None}
        self._queues: dict[int, tuple[int, int]] = {}
        self._read_queues(holds, waits)
        # The waiters are also sorted by ticket, because several may have taken their tickets in the same second.
        for wait in sorted(waits, key=lambda each: each.ticket or 0):
            if (place := self._find_place(wait)) is not None:
                self._found[place].append(self._build_waiter(wait, place))

    def list_for(self, row: HoldRow) -> tuple[Waiter, ...]:
        """Return the waiters for a hold, the longest wait first."""
        found = [each for place in _list_places(row) for each in self._found.get(place, ())]
        return tuple(sorted(found, key=lambda each: each.waiting, reverse=True))

    def _read_queues(self, holds: Sequence[HoldRow], waits: Sequence[WaitRow]) -> None:
        """Record the key to which each queue of tickets belongs."""
        for row in holds:
            for place in _list_places(row):
                self._holders[place].append(row.backend_pid or 0)
                if waits:
                    self._queues.setdefault(find_queue((_to_key(*place),)), place)
        # The first waiter of a queue waits for the key itself. A lock with several names has a separate queue, and only its first
        # waiter's wait shows to which key the queue belongs.
        for wait in waits:
            if wait.ticket is not None and wait.value is not None and wait.value not in self._owners:
                self._queues.setdefault(find_queue_of(wait.ticket), (wait.space or 1, wait.value))

    def _find_place(self, wait: WaitRow) -> tuple[int, int] | None:
        if wait.ticket is not None:
            return self._queues.get(find_queue_of(wait.ticket))
        if wait.value is None or wait.space is None:
            return None
        # A wait for a number in a queue counts as a wait for the key of that queue.
        queue = self._queues.get(find_queue_of(wait.value)) if wait.space == 1 else None
        return queue or (wait.space, wait.value)

    def _build_waiter(self, wait: WaitRow, place: tuple[int, int]) -> Waiter:
        ahead = self._owners.get(wait.value) if wait.value is not None else None
        blockers = self._holders.get(place, []) if ahead is None else [ahead]
        return Waiter(
            who=Holder(
                name=None,
                key=_to_key(*place),
                kind="waiter",
                mode="shared" if wait.mode == "ShareLock" and wait.ticket is None else "exclusive",
                host=wait.host,
                backend_pid=wait.pid,
                application_name=wait.application_name or None,
                user=wait.user,
            ),
            waiting=timedelta(microseconds=max(0.0, wait.waited or 0.0)),
            blocked_by=tuple(dict.fromkeys(pid for pid in blockers if pid != wait.pid)),
        )


def _list_places(row: HoldRow) -> list[tuple[int, int]]:
    """Return the keys that a hold locks, as pairs of space and number."""
    places = [] if row.value is None or row.space is None else [(row.space, row.value)]
    return places if row.pair is None else [*places, (2, row.pair)]


def _to_key(space: int, value: int) -> LockKey:
    if space == 1:
        return LockKey.raw(value)
    return LockKey.pair(*LockKey.raw(value).halves)


def _build_row(row: HoldRow, waiters: _Waiters, database: str) -> Row:
    key = None if row.value is None or row.space is None else _to_key(row.space, row.value)
    program = recognize_key(key, database) if key is not None and row.name is None else None
    return Row(
        holder=Holder(
            name=row.name or program,
            key=key,
            kind=MIGRATION if program else row.kind,
            mode="shared" if row.mode == "shared" else "exclusive",
            owner=row.owner,
            host=row.host,
            pid=row.pid,
            backend_pid=row.backend_pid,
            application_name=row.application_name or None,
            purpose=row.purpose or "",
            token=row.token,
            since=None if row.since is None else from_microseconds(row.since),
            expires_at=None if row.expires_at is None else from_microseconds(row.expires_at),
            user=row.user,
        ),
        state=row.state,
        waiters=waiters.list_for(row),
        blocked_by=tuple(row.blocked_by or ()),
        scope=row.scope,
    )
