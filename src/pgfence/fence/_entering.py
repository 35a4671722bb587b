"""Enter gates in a transaction of a sync Session or Connection; async callers call this through `run_sync`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, event, table, update
from sqlalchemy.exc import DBAPIError

from pgfence._api.inputs import (
    is_async_connection,
    is_async_engine,
    is_async_session,
    is_async_sessionmaker,
    is_session,
    is_sessionmaker,
    unwrap_session,
)
from pgfence._api.transactions import AsyncBegun, Begun, open_connection
from pgfence._sql import gates
from pgfence._sql import transaction as sql
from pgfence._sql.errors import FENCE, raise_translated
from pgfence._sql.storage import table_names_of
from pgfence.config import config_of
from pgfence.errors import StaleFencingTokenError, TransactionStateError
from pgfence.keys import qualify_name, unqualify_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session
    from typing_extensions import TypeIs

    from pgfence._api.inputs import AsyncWork, SyncWork
    from pgfence._sql.gates import EnteredGates
    from pgfence._sql.storage import TableNames

# This statement only selects the engine of a routing Session, and is never executed. A Session that routes reads must route it to
# the primary.
_WRITE = update(table("pgfence_gate"))


def is_async(work: object) -> TypeIs[AsyncWork]:
    """Return whether the caller's transaction belongs to an AsyncSession or AsyncConnection."""
    if is_async_session(work) or is_async_connection(work):
        return True
    if isinstance(work, Connection) or is_session(work):
        return False
    opens = isinstance(work, Engine) or is_sessionmaker(work) or is_async_engine(work) or is_async_sessionmaker(work)
    way = "; open a transaction first, or use lease.begin(...)" if opens else ""
    raise TypeError(
        "a fence needs a transaction: pass a Session or a Connection, or the async counterpart of one, not"
        f" {type(work).__name__}{way}"
    )


def unwrap_sync(work: SyncWork | AsyncWork) -> Session | Connection:
    """Return the Session or Connection that the caller passed to a sync handle."""
    if is_async(work):
        raise TypeError(
            f"a sync lock or lease cannot use {type(work).__name__}: pass a Session or a Connection, or use the async class"
        )
    return unwrap_session(work)


def unwrap_async(work: SyncWork | AsyncWork) -> AsyncSession | AsyncConnection:
    """Return the AsyncSession or AsyncConnection that the caller passed to an async handle."""
    if not is_async(work):
        raise TypeError(
            f"an async lock or lease cannot use {type(work).__name__}: pass an AsyncSession or an AsyncConnection, or use the sync class"
        )
    return unwrap_session(work)


def tokens_of(resource: object, token: object) -> dict[str, int]:
    """Return the token of each resource, under the names that the caller uses."""
    if isinstance(resource, Mapping):
        if token is not None:
            raise TypeError(
                "a token was passed besides a mapping, which already contains the tokens: pass only the mapping, as in"
                " fence(session, {resource: token})"
            )
        found: list[tuple[object, object]] = list(resource.items())
    elif isinstance(resource, (tuple, list, set, frozenset)):
        raise TypeError(
            f"several resources were passed as a {type(resource).__name__}: pass a mapping with the token of each, as in"
            " fence(session, {resource: token})"
        )
    else:
        found = [(resource, token)]
    if not found:
        raise ValueError("no resource was given: pass at least one resource and its token")
    tokens: dict[str, int] = {}
    for name, number in found:
        text = qualify_name(name, "", "a resource")
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"the token for {name!r} must be an int, not {type(number).__name__}")
        if not 0 < number < 2**63:
            raise ValueError(
                f"the token for {name!r} must be a bigint of 1 or more, not {number}: pass the token of the lease or lock"
            )
        tokens[text] = number
    return tokens


def enter_named(work: SyncWork, tokens: Mapping[str, int], *, after_reads: bool = False) -> None:
    """Enter gates as `enter` does, under the names that callers use."""
    enter(work, tokens, after_reads=after_reads, named=True)


def enter(
    work: SyncWork,
    tokens: Mapping[str, int],
    *,
    after_reads: bool = False,
    named: bool = False,
    issued: TableNames | None = None,
) -> None:
    """Enter the gates of resources, which stay locked until the transaction ends.

    `tokens` contains the token for each resource, as stored in the tables; with `named`, the configured namespace is added to
    each name. With `after_reads`, statements of this transaction may precede the entry. `issued` are the tables that issued the
    tokens, if known. Entering a gate again with the same token costs nothing.
    """
    connection, fresh, known = _open_transaction(work)
    if named:
        namespace = config_of(connection).namespace
        tokens = {qualify_name(name, namespace, "a resource"): token for name, token in tokens.items()}
    _enter(connection, tokens, issued, fresh=fresh, unseen=after_reads or not known)


def enter_for_block(work: Session | Connection, tokens: Mapping[str, int], *, after_reads: bool = False) -> sql.Stay:
    """Enter gates as `enter_named` does, and return the transaction that must not end before the block ends."""
    enter(work, tokens, after_reads=after_reads, named=True)
    return sql.Stay.of(work if isinstance(work, Connection) else work.connection(bind_arguments={"clause": _WRITE}))


def check_still_open(stay: sql.Stay, tokens: Mapping[str, int]) -> None:
    """Raise an error if the transaction of a block has ended inside it."""
    if stay.has_ended():
        raise TransactionStateError(
            f"the transaction that had entered {_name_gates(tokens)} ended inside the block of fenced(): what the block"
            " did after that was not fenced. Commit or roll back after the block, or use lease.begin(...), which commits at"
            " its end"
        )


def _enter_new(work: Session | Connection, tokens: Mapping[str, int], issued: TableNames | None) -> None:
    """Enter gates in a transaction that pgfence has just opened, in which only hooks at BEGIN may have sent statements."""
    if isinstance(work, Connection):
        _enter(work, tokens, issued, fresh=False, unseen=True)
    else:
        _enter(open_connection(work, {"clause": _WRITE}), tokens, issued, fresh=True, unseen=True)


def _enter(
    connection: Connection, tokens: Mapping[str, int], issued: TableNames | None, *, fresh: bool, unseen: bool
) -> None:
    """Enter the gates that were not entered yet.

    `fresh` is whether nothing was sent in this transaction, except by hooks at its BEGIN. `unseen` is whether entering late is
    allowed, because the caller permits it or because earlier statements are unknown.
    """
    place = table_names_of(connection)
    if issued is not None:
        _check_same_tables(place, issued, tokens)
    record, first = _get_record(connection, tokens, fresh=fresh)
    # A gate that was entered under another token is entered again, because the server decides which of the two tokens is valid.
    missing = {name: token for name, token in tokens.items() if record.token_of(place, name) != token}
    if not missing:
        return
    # The entry must be the first statement, because a snapshot that is older than the lock on the gate would not contain what the
    # last holder wrote.
    if not (first or unseen or record.first):
        raise TransactionStateError(
            f"{_name_gates(missing)} must be entered by the first statement of the transaction, because anything read"
            " earlier may predate the last holder's commit. Enter all resources at once, right after BEGIN; or use"
            " lease.begin(...); or, if no write depends on what was read, call fence(session, resource, token, after_reads=True)"
        )
    try:
        gates.enter(connection, place, record, missing, config_of(connection).default_timeout)
    except DBAPIError as error:
        raise_translated(error, place, FENCE, connection.engine)
        raise
    record.first = record.first or first


def _check_same_tables(place: TableNames, issued: TableNames, names: Iterable[str]) -> None:
    if place.contradicts(issued):
        raise ValueError(
            f"the token for {_quote_names(names)} was issued by {issued.name('lease')}, but this transaction enters gates in"
            f" {place.name('gate')}, and each installation numbers its own tokens. Use a sessionmaker or an engine with the same"
            f" schema and prefix; or, if you mean the gate in {place.name('gate')}, call fenced(session, resource, token)"
        )


def save_checkpoint(
    work: SyncWork,
    name: str,
    token: int,
    data: str | None,
    issued: TableNames | None = None,
) -> None:
    """Save a checkpoint for the next holder in the caller's transaction, and enter the gate, even late, if necessary."""
    connection, fresh, _ = _open_transaction(work)
    # The gate is entered separately, because the function that saves the checkpoint would wait for a fixed time.
    _enter(connection, {name: token}, issued, fresh=fresh, unseen=True)
    place = table_names_of(connection)
    record = gates.EnteredGates.of(connection)
    try:
        gates.save_checkpoint(connection, place, record, name, token, data)
    except DBAPIError as error:
        raise_translated(error, place, FENCE, connection.engine)
        raise


def get_entered_token(connection: Connection, resource: str) -> int | None:
    """Return the token with which the current transaction has entered the gate of a resource, or None if it has not.

    A ROLLBACK TO SAVEPOINT undoes what was entered since that savepoint.
    """
    return gates.EnteredGates.of(connection).token_of(table_names_of(connection), resource)


def block_commit(work: SyncWork, error: StaleFencingTokenError) -> None:
    """Make the current transaction fail at COMMIT, until it is rolled back as a whole."""
    session = unwrap_session(work)
    connection = session if isinstance(session, Connection) else session.connection(bind_arguments={"clause": _WRITE})
    gates.block_commit(connection, error)


def _open_transaction(work: SyncWork) -> tuple[Connection, bool, bool]:
    """Return the connection, whether its transaction begins only now, and whether its earlier statements are known."""
    session = unwrap_session(work)
    if isinstance(session, Connection):
        # Code that gets a Connection inside a savepoint may own only that savepoint.
        return session, False, not session.in_nested_transaction()
    # On the caller's own Connection, other code may have sent statements before the Session began on it.
    known = not isinstance(session.get_bind(clause=_WRITE), Connection)
    begun: list[object] = []

    def begin(*_: object) -> None:
        begun.append(True)

    # "after_begin" distinguishes a new transaction from an open one, whatever hooks sent at BEGIN, because hooks set options and
    # read nothing.
    event.listen(session, "after_begin", begin)
    try:
        connection = open_connection(session, {"clause": _WRITE})
    finally:
        event.remove(session, "after_begin", begin)
    return connection, bool(begun), known


def _get_record(connection: Connection, tokens: Mapping[str, int], *, fresh: bool) -> tuple[EnteredGates, bool]:
    """Return the gates that the transaction has entered, and whether the next statement counts as its first."""
    gates.translate(connection)
    state = sql.read_driver_state(connection)
    if state.autocommit:
        raise TransactionStateError(
            f"cannot enter {_name_gates(tokens)}, because the connection is in autocommit, where a gate would be left at the end"
            " of the statement that enters it. Use a connection without AUTOCOMMIT"
        )
    if state.pipeline:
        raise TransactionStateError(
            "the connection is in psycopg's pipeline mode, in which a rejection may be reported for another statement: leave the"
            " pipeline before you enter a gate"
        )
    if not connection.in_transaction():
        # The transaction is begun explicitly, because statements that hooks send at BEGIN must come before the gate.
        connection.begin()
        fresh = True
    record = gates.EnteredGates.of(connection)
    if state.idle:
        # The server has no open transaction, because an earlier one on this connection was ended in plain SQL.
        record.forget()
    return record, fresh or state.idle


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(repr(unqualify_name(name)) for name in names)


def _name_gates(names: Collection[str]) -> str:
    return f"the {'gate' if len(names) == 1 else 'gates'} of {_quote_names(names)}"


def begin_fenced(
    factory: object, tokens: Mapping[str, int], issued: TableNames | None = None
) -> AbstractContextManager[object, None]:
    """Open a transaction, enter the gates, yield the Session or Connection, and commit."""
    if not isinstance(factory, Engine) and not is_sessionmaker(factory):
        raise _factory_error(factory, "a sessionmaker or an Engine")

    def enter_gates(work: Session | Connection) -> None:
        _enter_new(work, tokens, issued)

    return Begun(factory, enter_gates, f"the transaction under {_quote_names(tokens)}")


def begin_fenced_async(
    factory: object, tokens: Mapping[str, int], issued: TableNames | None = None
) -> AbstractAsyncContextManager[object, None]:
    """Open a transaction, enter the gates, yield the AsyncSession or AsyncConnection, and commit; see `begin_fenced`."""
    if not is_async_sessionmaker(factory) and not is_async_engine(factory):
        raise _factory_error(factory, "an async_sessionmaker or an AsyncEngine")

    async def enter_gates(work: AsyncSession | AsyncConnection) -> None:
        await work.run_sync(_enter_new, tokens, issued)

    return AsyncBegun(factory, enter_gates, f"the transaction under {_quote_names(tokens)}")


def _factory_error(factory: object, wanted: str) -> TypeError:
    has = (
        isinstance(factory, Connection)
        or is_session(factory)
        or is_async_session(factory)
        or is_async_connection(factory)
    )
    way = ": in a transaction that you began, call held.fence(session) instead" if has else ""
    return TypeError(f"begin() opens its own transaction and takes {wanted}, not {type(factory).__name__}{way}")
