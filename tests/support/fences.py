"""What the tests of fences have in common: a guarded table, and others who have overtaken its writers."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psycopg import sql
from sqlalchemy import Connection, create_engine

from pgfence import schema
from pgfence.fence._entering import get_entered_token as entered_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg


@contextmanager
def guarded(admin: psycopg.Connection[Any], dsn: str, resource: str) -> Iterator[str]:
    """Make a table (id, amount) with the rows (1, 100), (2, 100) that belongs to one resource; dropped at the end."""
    table = f"guarded_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, amount int NOT NULL)".encode())
    admin.execute(f"INSERT INTO {table} VALUES (1, 100), (2, 100)".encode())
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    try:
        schema.add_fence(engine, table, resource=resource)
        yield table
    finally:
        engine.dispose()
        admin.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(table)))


def overtake(admin: psycopg.Connection[Any], resource: str, token: int) -> None:
    """Enter a gate as another process would, past all of our code, and commit."""
    admin.execute("SELECT pgfence_enter_gates_v1(ARRAY[%s], ARRAY[%s::bigint])", [resource, token])


def get_entered_token(work: Any, resource: str) -> int | None:
    """Return the token with which the transaction of a Session or Connection has entered a gate."""
    return entered_in(work if isinstance(work, Connection) else work.connection(), resource)


def rows(admin: psycopg.Connection[Any], table: str) -> list[Any]:
    """Return what is committed in a table, in the order of its first column."""
    return admin.execute(f"SELECT * FROM {table} ORDER BY 1".encode()).fetchall()


def forged(resource: str, token: object, *, stays: bool = False) -> str:
    """Return SQL that claims a token as a transaction inside the gate does, without entering it."""
    mark = f"md5('public.pgfence_gate'::regclass::oid::text || ' {resource}')"
    return f"set_config('pgfence.f' || left({mark}, 2), {mark} || ' {token},', {'false' if stays else 'true'})"
