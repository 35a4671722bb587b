"""The statements of the fence in the caller's transaction, and the record of the gates that it has entered."""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import event

from pgfence._process.events import emit_event
from pgfence._sql.errors import translate_error
from pgfence._sql.params import call, style_of
from pgfence._sql.savepoints import TransactionRecord
from pgfence._sql.transaction import begin_anew, send_quick
from pgfence.config import events_of
from pgfence.errors import FenceRequiredError, LockTimeoutError, StaleFencingTokenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection
    from sqlalchemy.engine import ExceptionContext

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames

_STALE = "_pgfence_stale"
_TRANSLATING = "_pgfence_translating"
_REASONS = {StaleFencingTokenError: "stale", FenceRequiredError: "missing", LockTimeoutError: "timeout"}


class EnteredGates(TransactionRecord):
    """The gates that a transaction has entered, each with its token."""

    __slots__ = ()

    def token_of(self, place: TableNames, resource: str) -> int | None:
        """Return the token with which the gate of a stored resource name was entered, or None if it was not entered."""
        token: int | None = self._keys.get((place, resource))
        return token

    def send(
        self,
        connection: Connection,
        place: TableNames,
        text: str,
        values: tuple[object, ...],
        tokens: Mapping[str, int],
    ) -> None:
        """Send a statement that enters gates, and record them."""
        first = self.first
        send_quick(connection, text, values)
        self.first = first
        for resource, token in tokens.items():
            self._keys[place, resource] = token


def enter(
    connection: Connection, place: TableNames, gates: EnteredGates, tokens: Mapping[str, int], wait: float
) -> None:
    """Enter all gates or none, in one round trip.

    At each gate, a newer holder waits for older holders that are inside, for up to the session's own `lock_timeout` or, if none
    is set, `wait` seconds.
    """
    style = style_of(connection.dialect)
    if len(tokens) == 1:
        (one,) = tokens.items()
        gates.send(connection, place, _enter_one(place, style), (*one, wait), tokens)
    else:
        gates.send(connection, place, _enter(place, style), (list(tokens), list(tokens.values()), wait), tokens)


def save_checkpoint(
    connection: Connection, place: TableNames, gates: EnteredGates, resource: str, token: int, data: str | None
) -> None:
    """Write a checkpoint of a resource, after entering the resource's gate if necessary."""
    text = _save(place, style_of(connection.dialect))
    gates.send(connection, place, text, (resource, token, data), {resource: token})


@cache
def _enter_one(place: TableNames, style: ParamStyle) -> str:
    return f"SELECT {call(place, style, 'enter_gate_v1', 'text, bigint, double precision')}"


@cache
def _enter(place: TableNames, style: ParamStyle) -> str:
    return f"SELECT {call(place, style, 'enter_gates_v1', 'text[], bigint[], double precision')}"


@cache
def _save(place: TableNames, style: ParamStyle) -> str:
    return f"SELECT {call(place, style, 'save_checkpoint_v1', 'text, bigint, text')}"


def translate(connection: Connection) -> None:
    """Translate the fence's rejections into pgfence's exceptions, for all statements on the engine.

    Raises:
        UnsupportedServerError: the dialect is not PostgreSQL, or its driver is not supported.
    """
    dialect = vars(connection.dialect)
    if _TRANSLATING not in dialect:
        style_of(connection.dialect)
        event.listen(connection.engine, "handle_error", _translate_rejection)
        dialect[_TRANSLATING] = True


def _translate_rejection(context: ExceptionContext) -> BaseException | None:
    error = translate_error(context.original_exception, None)
    if isinstance(error, StaleFencingTokenError) and context.connection is not None:
        block_commit(context.connection, error)
    if error is not None:
        token = error.token if isinstance(error, StaleFencingTokenError) else None
        name = error.names[0] if isinstance(error, LockTimeoutError) else getattr(error, "resource", None)
        emit_event(events_of(context), "fence_rejected", name or "", "fence", token=token, reason=_REASONS[type(error)])
    return error


def block_commit(connection: Connection, error: StaleFencingTokenError) -> None:
    """Keep the connection's current transaction from committing, even if the error was swallowed in a savepoint."""
    root = connection.get_transaction()
    if root is None:
        return
    if not hasattr(connection, _STALE):
        event.listen(connection, "commit", _refuse)
        event.listen(connection, "prepare_twophase", _refuse)
    setattr(connection, _STALE, (weakref.ref(root), error))


def _refuse(connection: Connection, *_: object) -> None:
    root, error = getattr(connection, _STALE)
    if connection.get_transaction() is root():
        # When this listener raises, SQLAlchemy discards its transaction, and its rollback() then sends nothing. The server's
        # transaction would stay open, and the next commit would also commit the rejected writes.
        begin_anew(connection)
        raise StaleFencingTokenError(
            f"this transaction was rejected before and cannot commit: {error}",
            resource=error.resource,
            token=error.token,
            newest=error.newest,
            sqlstate=error.sqlstate,
        )
