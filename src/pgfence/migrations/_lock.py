"""Whether a migration needs the lock, and the lock around it."""

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
    """Let one process migrate at a time; the others wait, and find nothing to do.

    ::

        with connectable.connect() as connection:
            with migration_lock(connection, timeout=600):
                context.configure(connection=connection, target_metadata=metadata)
                with context.begin_transaction():
                    context.run_migrations()

    Promised: the lock is held by the session that migrates, from before the version is read until the block ends, whatever
    commits in between; so it is safe with `transaction_per_migration`, `autocommit_block()` and CREATE INDEX CONCURRENTLY.
    While it waits the connection is in autocommit and holds no snapshot, and it is handed over without a transaction. No
    revision is recorded once the lock is gone. If the process dies the server frees the lock, at the latest a second after
    (on Linux), also in the middle of a statement. `alembic current`, `check` and others that only look take no lock; nor does
    an upgrade for which Alembic finds nothing to apply.

    Not promised: order among those who wait. Processes that migrate without it, and other version tables under other keys.

    Args:
        connection: the one that migrates, outside a transaction. In Alembic's async template the lock belongs into the
            function that `run_sync` calls.
        timeout: seconds to wait; None is the configured default (30), `math.inf` for ever.
        key: instead of one made of the version table's schema and name, which are read from the ini file (`version_table`,
            `version_table_schema`): the key that older releases of the project use, or one for several version tables. With
            a key the lock is always taken, even if there is nothing to apply according to the default version table.
        unsupported: on another database than PostgreSQL: log it and do nothing, or raise.

    Raises:
        LockTimeoutError: somebody else migrates; it says who, and what they are doing.
        LockLostError: in the block, before a revision is recorded: the session that held the lock is gone, or gave it away;
            and for an error of the driver's that ends the block, if the session is gone.
        TransactionStateError: the connection is in a transaction, on entering or on leaving; or what is returned is entered
            for the second time.
        alembic.util.CommandError: an upgrade to `head` where there are several, two revisions with one id, or a cycle of revisions.
        PoolerError, StandbyError: session locks are not safe on this server.
        UnsupportedServerError: it is no PostgreSQL that pgfence knows, and `unsupported="raise"`.
        UnreachableError: the server cannot be reached. That ends the wait, because the connection is yours. Or it does not
            respond: a wait then ends a few seconds after its timeout, and a release after 30 s.
        TypeError, ValueError: an argument cannot be used.
    """
    if not isinstance(connection, Connection):
        raise TypeError(
            f"migration_lock() takes the Connection that migrates, not {type(connection).__name__}: an engine's connect(), or"
            " inside the function that run_sync calls"
        )
    if key is not None and not isinstance(key, LockKey):
        raise TypeError(f"key must be a LockKey, e.g. LockKey.raw(1346918401), not {type(key).__name__}")
    if unsupported not in ("skip", "raise"):
        raise ValueError(f"unsupported must be 'skip' or 'raise', not {unsupported!r}")
    limit = None if timeout is None else seconds(timeout)
    return _Once(_hold_lock(connection, limit, key, unsupported))


class _Once(SafeContext[None]):
    """The block, which is entered once."""

    _entered = False

    def __enter__(self) -> None:
        if self._entered:
            raise TransactionStateError("this migration_lock() was entered before: call it again for another block")
        self._entered = True
        super().__enter__()


@contextmanager
def _hold_lock(connection: Connection, limit: float | None, key: LockKey | None, unsupported: str) -> Iterator[None]:
    if connection.dialect.name != "postgresql" and unsupported == "skip":
        log.info("no migration lock: %s has no session locks that pgfence knows", connection.dialect.name)
        yield
        return
    style_of(connection.dialect)
    if _command.is_read_only():
        yield
        return
    if connection.in_transaction():
        raise TransactionStateError(
            "the migration lock must be taken before anything else on this connection, which is in a transaction: it would"
            " keep a snapshot, and what Alembic commits would not be committed. Enter migration_lock() right after connect()"
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
        "no revision was left to apply when migration_lock() was entered, so the lock was not taken, and now a revision is to"
        " be recorded. Run the command again; where there are several version tables, or env.py alone knows"
        " the name of it, pass migration_lock(connection, key=LockKey.of(...))"
    )
