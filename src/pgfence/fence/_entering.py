"""How a transaction enters a gate: on a sync Session or Connection; async callers come here through `run_sync`."""

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
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session
    from typing_extensions import TypeIs

    from pgfence._api.inputs import AsyncWork, SyncWork
    from pgfence._sql.gates import EnteredGates
    from pgfence._sql.storage import TableNames

# What a routing Session is asked with. It is never sent; whatever sends reads elsewhere must send this to the primary.
_WRITE = update(table("pgfence_gate"))


def is_async(work: object) -> TypeIs[AsyncWork]:
    """Return whether a transaction belongs to an AsyncSession or AsyncConnection.

    Raises:
        TypeError: it has no transaction.
    """
    if is_async_session(work) or is_async_connection(work):
        return True
    if isinstance(work, Connection) or is_session(work):
        return False
    opens = isinstance(work, Engine) or is_sessionmaker(work) or is_async_engine(work) or is_async_sessionmaker(work)
    way = "; open a transaction first, or use lease.begin(...)" if opens else ""
    raise TypeError(f"a fence stands in a transaction: a Session or a Connection, not {type(work).__name__}{way}")


def tokens_of(resource: object, token: object) -> dict[str, int]:
    """Return the token of each resource, by the names that the caller uses.

    Raises:
        TypeError: a resource is not a str, or a token is not an int.
        ValueError: there is no resource, or a token is below 1.
    """
    if isinstance(resource, Mapping):
        if token is not None:
            raise TypeError("a mapping has its tokens already: fence(session, {resource: token})")
        found: list[tuple[object, object]] = list(resource.items())
    elif isinstance(resource, (tuple, list, set, frozenset)):
        raise TypeError("several resources are a mapping, each with its token: fence(session, {resource: token})")
    else:
        found = [(resource, token)]
    if not found:
        raise ValueError("there is no resource to enter")
    tokens: dict[str, int] = {}
    for name, number in found:
        text = qualify_name(name, "", "a resource")
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"the token for {name!r} must be an int, not {type(number).__name__}")
        if not 0 < number < 2**63:
            raise ValueError(f"a fencing token is a bigint of 1 or more, not {number}: take the one of the lease")
        tokens[text] = number
    return tokens


def enter_named(work: SyncWork, tokens: Mapping[str, int], *, after_reads: bool = False) -> None:
    """As `enter`, by the names that callers use."""
    enter(work, tokens, after_reads=after_reads, named=True)


def enter(
    work: SyncWork,
    tokens: Mapping[str, int],
    *,
    after_reads: bool = False,
    named: bool = False,
    issued: TableNames | None = None,
) -> None:
    """Enter the gates of resources, which stay locked until the transaction ends. Entering one again costs nothing.

    Args:
        work: the transaction; it begins here if it has not yet.
        tokens: by resource, as it stands in the tables.
        after_reads: allow statements of this transaction before it.
        named: the resources are as callers name them; the configured namespace is added.
        issued: the tables that the tokens come from, if that is known.

    Raises:
        ValueError: the tokens come from another installation (schema or prefix) than that of this transaction.
        StaleFencingTokenError: a token is not the newest. The transaction cannot commit any more.
        LockTimeoutError: a transaction of an older holder was still inside after the configured `default_timeout`.
        TransactionStateError: autocommit; or something was sent in this transaction already.
        SchemaError: the tables or functions are missing, or this role may not use them.
    """
    connection, fresh, known = _open_transaction(work)
    if named:
        namespace = config_of(connection).namespace
        tokens = {qualify_name(name, namespace, "a resource"): token for name, token in tokens.items()}
    _enter(connection, tokens, issued, fresh=fresh, unseen=after_reads or not known)


def enter_for_block(work: Session | Connection, tokens: Mapping[str, int], *, after_reads: bool = False) -> sql.Stay:
    """As `enter_named`, and return the transaction that must outlive the block."""
    enter(work, tokens, after_reads=after_reads, named=True)
    return sql.Stay.of(work if isinstance(work, Connection) else work.connection(bind_arguments={"clause": _WRITE}))


def check_still_open(stay: sql.Stay, tokens: Mapping[str, int]) -> None:
    """Raise if the transaction of a block has ended inside it.

    Raises:
        TransactionStateError: the transaction has ended.
    """
    if stay.has_ended():
        raise TransactionStateError(
            f"the transaction that had entered the gate of {_quote_names(tokens)} ended inside the block of fenced(): what the block"
            " did after that was not fenced. Commit or roll back after the block, or use lease.begin(...), which commits at"
            " its end"
        )


def _enter_new(work: Session | Connection, tokens: Mapping[str, int], issued: TableNames | None) -> None:
    """Enter gates in a transaction that pgfence has just opened, in which only hooks at its begin may have sent anything."""
    if isinstance(work, Connection):
        _enter(work, tokens, issued, fresh=False, unseen=True)
    else:
        _enter(open_connection(work, {"clause": _WRITE}), tokens, issued, fresh=True, unseen=True)


def _enter(
    connection: Connection, tokens: Mapping[str, int], issued: TableNames | None, *, fresh: bool, unseen: bool
) -> None:
    """Enter gates that were not entered yet.

    Args:
        connection: of the transaction.
        tokens: by resource, as it stands in the tables.
        issued: the tables that the tokens come from, if that is known.
        fresh: nothing was sent in this transaction, except by hooks at its begin.
        unseen: it may also be entered late, because the caller allows it or because what was sent cannot be known.
    """
    place = table_names_of(connection)
    if issued is not None:
        _check_same_tables(place, issued, tokens)
    record, first = _get_record(connection, tokens, fresh=fresh)
    # A gate that was entered under another token is entered again: the server decides which of the two counts.
    missing = {name: token for name, token in tokens.items() if record.token_of(place, name) != token}
    if not missing:
        return
    # Before the first statement: a snapshot that is older than the lock on the gate would not see what the last holder wrote.
    if not (first or unseen or record.first):
        raise TransactionStateError(
            f"the gate of {_quote_names(missing)} must be entered by the first statement of the transaction: what was read before may"
            " have been read before the last holder's commit. Enter all resources at once, right after the begin; or use"
            " lease.begin(...); or pass after_reads=True if nothing was read yet that a write will rest on"
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
            f"the token for {_quote_names(names)} was issued by {issued.name('lease')}, and this transaction enters gates in"
            f" {place.name('gate')}: another installation counts its own tokens. Use a sessionmaker or an engine with the same"
            " schema and prefix; or, if that gate is meant, fenced(session, resource, token)"
        )


def save_checkpoint(
    work: SyncWork,
    name: str,
    token: int,
    data: str | None,
    issued: TableNames | None = None,
) -> None:
    """Save what the next holder can resume from, in the caller's transaction, and enter the gate if that was not done.

    Args:
        work: the transaction; it begins here if it has not yet.
        name: of the lease, as it stands in the tables.
        token: of the lease.
        data: JSON.
        issued: the tables of the lease, if that is known.

    Raises:
        ValueError: this transaction writes under another installation.
        StaleFencingTokenError: a newer holder has taken over. The transaction cannot commit any more.
        TransactionStateError: autocommit.
    """
    connection, fresh, _ = _open_transaction(work)
    place = table_names_of(connection)
    if issued is not None:
        _check_same_tables(place, issued, (name,))
    record, _ = _get_record(connection, {name: token}, fresh=fresh)
    try:
        gates.save_checkpoint(connection, place, record, name, token, data)
    except DBAPIError as error:
        raise_translated(error, place, FENCE, connection.engine)
        raise


def get_entered_token(connection: Connection, resource: str) -> int | None:
    """Return the token with which the present transaction has entered the gate of a resource; None: it has not.

    A ROLLBACK TO SAVEPOINT takes back what was entered since.

    Args:
        connection: of the transaction.
        resource: its name as it is stored in the tables.
    """
    return gates.EnteredGates.of(connection).token_of(table_names_of(connection), resource)


def block_commit(work: SyncWork, error: StaleFencingTokenError) -> None:
    """Make the present transaction fail at COMMIT. Only its outermost rollback ends that."""
    session = unwrap_session(work)
    connection = session if isinstance(session, Connection) else session.connection(bind_arguments={"clause": _WRITE})
    gates.block_commit(connection, error)


def _open_transaction(work: SyncWork) -> tuple[Connection, bool, bool]:
    """Return the connection, whether its transaction begins only now, and whether what ran in it before is known."""
    session = unwrap_session(work)
    if isinstance(session, Connection):
        # The caller of a Connection in a savepoint may own nothing but this savepoint.
        return session, False, not session.in_nested_transaction()
    # On a Connection of the caller's, others may have sent statements before the Session began on it.
    known = not isinstance(session.get_bind(clause=_WRITE), Connection)
    begun: list[object] = []

    def begin(*_: object) -> None:
        begun.append(True)

    # "after_begin" tells a new transaction from an open one, whatever hooks have sent at its begin: settings are no reads.
    event.listen(session, "after_begin", begin)
    try:
        connection = open_connection(session, {"clause": _WRITE})
    finally:
        event.remove(session, "after_begin", begin)
    return connection, bool(begun), known


def _get_record(connection: Connection, tokens: Mapping[str, int], *, fresh: bool) -> tuple[EnteredGates, bool]:
    """Return what the transaction has entered, and whether the next statement counts as its first."""
    gates.translate(connection)
    state = sql.read_driver_state(connection)
    if state.autocommit:
        raise TransactionStateError(
            f"the connection is in autocommit: the gate of {_quote_names(tokens)} would be left with the statement that entered it."
            " Use a connection without AUTOCOMMIT"
        )
    if state.pipeline:
        raise TransactionStateError(
            "the connection is in psycopg's pipeline mode, where a refusal may come with another statement: leave the"
            " pipeline before entering a gate"
        )
    if not connection.in_transaction():
        # Not left to our statement: what hooks send at the begin must come before the gate.
        connection.begin()
        fresh = True
    record = gates.EnteredGates.of(connection)
    if state.idle:
        # The server is in no transaction: one that was entered here was ended in plain SQL.
        record.forget()
    return record, fresh or state.idle


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(repr(unqualify_name(name)) for name in names)


def begin_fenced(
    factory: object, tokens: Mapping[str, int], issued: TableNames | None = None
) -> AbstractContextManager[object, None]:
    """Open a transaction, enter the gates, yield the Session or Connection, and commit.

    Args:
        factory: a sessionmaker or an Engine.
        tokens: by resource, as it stands in the tables.
        issued: the tables that the tokens come from, if that is known.

    Raises:
        TypeError: it is neither.
        ValueError: it writes under another installation.
        StaleFencingTokenError: a token is not the newest; from the block, or at its end.
    """
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
    way = ": for a transaction of your own use held.fence(session)" if has else ""
    return TypeError(f"begin() opens its own transaction and takes {wanted}, not {type(factory).__name__}{way}")
