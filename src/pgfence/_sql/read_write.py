"""The statements of a reader's session-level advisory lock. A writer uses those of every exclusive lock."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from pgfence._sql.advisory import LockSql
from pgfence._sql.params import mark
from pgfence._sql.ticket_queue import HAS_TICKETS

if TYPE_CHECKING:
    from pgfence._sql.params import ParamStyle
    from pgfence.keys import LockKey


class WriteSql(LockSql):
    """The statements for a writer, who takes the exclusive lock on one key.

    The first writer that has to wait also holds the key's turnstile, exclusively and for the session, until it has the lock or
    gives up. Readers pass the turnstile before they try, so no reader gets the lock between two slices of the writer's wait.
    Writers that arrive while the first one waits for readers wait for the key at the same time; see `ServerWait`.
    """

    __slots__ = ()
    kind = "write"
    once_only = (
        "a reader cannot become a writer, because two readers that tried would wait for each other. Release the read lock"
        " first, or begin with the write lock and downgrade() it"
    )
    hands_over = False


class ReadSql(LockSql):
    """The statements for a reader, who takes the shared lock on one key.

    A reader that has to wait takes a ticket if another waiter has one, so that it comes after the writers that wait. Without the
    turnstile and tickets, readers that overlap would let a writer wait indefinitely, because after each slice of its wait the
    writer leaves the server's queue for a moment.
    """

    __slots__ = ("_arguments", "_own_texts", "_turnstile")
    kind = "read"
    once_only = (
        "a second read lock would wait indefinitely behind a writer that waits for the first. Pass the handle on, or downgrade()"
        " the write lock"
    )
    hands_over = False
    shared = True

    def __init__(self, keys: tuple[LockKey, ...], style: ParamStyle) -> None:
        super().__init__(keys, style)
        (key,) = keys
        self._turnstile = key._turnstile.value
        self._arguments: tuple[object, ...] = (key.value,) if key.space == "bigint" else key.halves
        self._own_texts = _build_texts(style, len(self._arguments))
        self.try_text, _, self.unlock_text = self._own_texts
        self.unlock_args = self._arguments

    @property
    def try_args(self) -> tuple[object, ...]:
        return (self._turnstile, *self._arguments)

    @property
    def wait_text(self) -> str:
        return self._own_texts[1]

    def wait_args(self, milliseconds: int) -> tuple[object, ...]:
        return (str(milliseconds), *self._arguments, *self._arguments, self.base)


@cache
def _build_texts(style: ParamStyle, width: int) -> tuple[str, str, str]:
    """Return the texts to try, wait and unlock, for a key that is one bigint or two integers."""

    def cast_arguments(first: int) -> str:
        kind = "bigint" if width == 1 else "integer"
        return ", ".join(f"CAST({mark(style, first + n)} AS {kind})" for n in range(width))

    # The statement locks nothing if another server process executes it, see `advisory`. PostgreSQL evaluates the conditions in
    # the order of the CASE.
    attempt = (
        f"SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.<>) {mark(style, 1)}::integer THEN NULL"
        f" WHEN NOT pg_catalog.pg_try_advisory_xact_lock_shared(CAST({mark(style, 2)} AS bigint)) THEN false"
        f" ELSE pg_catalog.pg_try_advisory_lock_shared({cast_arguments(3)}) END"
    )
    wait = (
        f"SELECT pg_catalog.set_config('lock_timeout', {mark(style, 1)}, true),"
        f" pg_catalog.pg_advisory_xact_lock_shared({cast_arguments(2)}), pg_catalog.pg_sleep(0),"
        f" pg_catalog.pg_advisory_lock_shared({cast_arguments(2 + width)})"
        f" WHERE NOT {HAS_TICKETS.format(mark(style, 2 + 2 * width))}"
    )
    return attempt, wait, f"SELECT pg_catalog.pg_advisory_unlock_shared({cast_arguments(1)})"


def build_downgrade(keys: tuple[LockKey, ...], style: ParamStyle) -> tuple[str, tuple[object, ...]]:
    """Return the statement that turns a session's exclusive lock into a shared one, and its parameters.

    The shared lock comes first. The session's own lock does not conflict with it, so it cannot wait.
    """
    (key,) = keys
    values: tuple[object, ...] = (key.value,) if key.space == "bigint" else key.halves
    kind = "bigint" if len(values) == 1 else "integer"

    def cast_arguments(first: int) -> str:
        return ", ".join(f"CAST({mark(style, first + n)} AS {kind})" for n in range(len(values)))

    text = (
        f"SELECT pg_catalog.pg_advisory_unlock({cast_arguments(1)}) FROM (SELECT pg_catalog.pg_advisory_lock_shared("
        f"{cast_arguments(1 + len(values))}) OFFSET 0) AS s"
    )
    return text, (*values, *values)


def build_turnstile(keys: tuple[LockKey, ...], style: ParamStyle, *, on: bool) -> tuple[str, tuple[object, ...]]:
    """Return the statement with which a writer's session tries to hold the turnstile, or releases it, and its parameter."""
    (key,) = keys
    function = "pg_try_advisory_lock" if on else "pg_advisory_unlock"
    return f"SELECT pg_catalog.{function}(CAST({mark(style, 1)} AS bigint))", (key._turnstile.value,)
