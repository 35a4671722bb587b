"""Decide whether a migration needs the lock, and hold the lock around it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Connection

from pgfence._api.contexts import SafeContext
from pgfence._process.clock import seconds
from pgfence._sql.params import style_of
from pgfence.config import config_of
from pgfence.errors import TransactionStateError
from pgfence.keys import LockKey
from pgfence.migrations import _command
from pgfence.migrations._session import MigrationLock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pgfence._process.clock import Seconds

log = logging.getLogger("pgfence.migrations")

NAMESPACE = "pgfence migrations"


def migration_lock(
    connection: Connection,
    *,
    timeout: Seconds | None = None,
    key: LockKey | None = None,
    unsupported: Literal["skip", "raise"] = "skip",
) -> AbstractContextManager[None, None]:
    """Let one process migrate at a time. The other processes wait, and then find nothing to apply.

    ::

        with connectable.connect() as connection:
            with migration_lock(connection, timeout=600):
                context.configure(connection=connection, target_metadata=metadata)
                with context.begin_transaction():
                    context.run_migrations()

    Guarantees: the session that migrates holds the lock from before the version is read until the block ends, whatever commits in
    between, so the lock is safe with `transaction_per_migration`, `autocommit_block()` and CREATE INDEX CONCURRENTLY. During the
    wait, the connection is in autocommit and holds no snapshot. The block gets the connection without an open transaction. No
    revision is recorded after the lock is lost. If the process dies, even in the middle of a statement, a server on Linux releases
    the lock after at most a second. `alembic current`, `check` and other commands that only read take no lock. An upgrade for
    which Alembic finds nothing to apply takes no lock either.

    Limitations: waiters are not ordered. Processes that migrate without this lock, or migrate another version table with
    another key, are not excluded.

    Args:
        connection: the connection that migrates, outside a transaction. In Alembic's async template, use the lock in the function
            that `run_sync` calls.
        timeout: seconds to wait. None means the configured default (30 s), and `math.inf` waits indefinitely.
        key: replaces the key that is computed from the version table's schema and name, which are read from the ini file
            (`version_table`, `version_table_schema`). Pass the key that older releases of the project use, or one key for several
            version tables. With a key, an upgrade takes the lock even if the default version table shows nothing to apply.
        unsupported: what to do on a database other than PostgreSQL. "skip" logs a line and takes no lock, and "raise" raises an
            error.

    Raises:
        LockTimeoutError: another session held the lock until the timeout. The message says what that session is doing.
        LockLostError: before a revision is recorded, or at the end of the block, if the session that held the lock has ended or
            released it. If the session has ended, it is also raised in place of a driver error that ends the block.
        TransactionStateError: the connection is in a transaction on entering; the block ends in a transaction that has written
            something, which is rolled back; a revision is about to be recorded without the lock, because no revision was left to
            apply on entering; or the returned block is entered a second time.
        alembic.util.CommandError: the command is an upgrade, and two revisions have the same id or the revisions form a cycle; or
            it upgrades to `head`, and there are several heads.
        PoolerError, StandbyError: session locks are not safe on this server.
        UnsupportedServerError: the database is not PostgreSQL, and `unsupported="raise"` was passed; or pgfence does not support
            the driver or the version of the server.
        UnreachableError: the connection was lost, which ends the wait because pgfence cannot replace your connection; or the
            server does not respond. Without a response, a wait ends a few seconds after its timeout, and a release after 30 s.
        TypeError, ValueError: an argument cannot be used.
    """
    if not isinstance(connection, Connection):
        raise TypeError(
            f"migration_lock() takes the Connection that migrates, not {type(connection).__name__}: use the engine's connect(), or"
            " call migration_lock() in the function that run_sync() calls"
        )
    if key is not None and not isinstance(key, LockKey):
        raise TypeError(f"key must be a LockKey, such as LockKey.raw(1346918401), not {type(key).__name__}")
    if unsupported not in ("skip", "raise"):
        raise ValueError(f"unsupported must be 'skip' or 'raise', not {unsupported!r}")
    limit = None if timeout is None else seconds(timeout)
    return _Once(_hold_lock(connection, limit, key, unsupported))


class _Once(SafeContext[None]):
    """A block that can be entered only once."""

    _entered = False

    def __enter__(self) -> None:
        if self._entered:
            raise TransactionStateError(
                "this migration_lock() was already entered: call migration_lock() again for each block"
            )
        self._entered = True
        super().__enter__()


@contextmanager
def _hold_lock(connection: Connection, limit: float | None, key: LockKey | None, unsupported: str) -> Iterator[None]:
    # The env.py of `alembic init` calls fileConfig(), which disables every logger that alembic.ini does not list.
    log.disabled = False
    if connection.dialect.name != "postgresql" and unsupported == "skip":
        log.info(
            "no migration lock was acquired: %s has no session locks that pgfence supports", connection.dialect.name
        )
        yield
        return
    style_of(connection.dialect)
    if _command.is_read_only():
        yield
        return
    if connection.in_transaction():
        raise TransactionStateError(
            "this connection is already in a transaction, in which Alembic could not commit its revisions. Enter"
            " migration_lock() right after connect(), before any other statement"
        )
    _command.expect_one_head()
    lock = MigrationLock(
        connection, key or _default_key(), config_of(connection).default_timeout if limit is None else limit
    )
    if key is None and lock.ask(_command.is_at_head):
        with lock.watch(_refuse_to_write):
            yield
        return
    lock.acquire()
    try:
        with lock.watch(lock.expect_held):
            yield
    except BaseException as error:
        _command.explain(error)
        lock.abandon(error)
        raise
    lock.release()


def _default_key() -> LockKey:
    table = _command.find_version_table()
    return LockKey.of(f"{table.schema}.{table.name}" if table.schema else table.name, namespace=NAMESPACE)


def _refuse_to_write() -> None:
    raise TransactionStateError(
        "no revision was left to apply when migration_lock() was entered, so the lock was not taken, but now a revision is about"
        " to be recorded. Run the command again; if there are several version tables, or only env.py determines the name of the"
        " table, pass migration_lock(connection, key=LockKey.of(...))"
    )
