"""Work under idempotency keys, on every driver: sessions of a world, and a table in which each effect is a row."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, MetaData, String, Table, create_engine, event, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgfence.idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import psycopg
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session as SyncSession

    from support.worlds import Contender, World


@dataclass(frozen=True)
class Receipt:
    """A result with a type that JSON does not have."""

    key: str
    amount: Decimal = Decimal("1.10")


_WAITERS = """
    SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
    WHERE l.locktype = 'advisory' AND NOT l.granted AND d.datname = current_database()
"""


_BLOCKED = """
    SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
    WHERE NOT l.granted AND a.datname = current_database()
"""


class Desk:
    """Sessions of a world on one engine, what is sent through it, and the effects."""

    def __init__(self, world: World, admin: psycopg.Connection[Any], **options: Any) -> None:
        self.world = world
        self.admin = admin
        self.engine = world.engine(**options)
        self.scope = f"user:{secrets.token_hex(6)}"
        self.table = Table(f"effect_{secrets.token_hex(6)}", MetaData(), Column("key", String))
        admin.execute(f"CREATE TABLE {self.table.name} (key text)".encode())

    @cached_property
    def sent(self) -> list[str]:
        """What is sent, from the first look on: nobody listens before, because a listener makes statements go another way."""
        sent: list[str] = []
        engine = self.engine.sync_engine if self.world.is_async else self.engine
        event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
        return sent

    def close(self) -> None:
        self.admin.execute("SET lock_timeout = '5s'")  # a contender of a test that failed may be at work still
        self.admin.execute(f"DROP TABLE IF EXISTS {self.table.name}".encode())

    def session(self, **options: Any) -> Any:
        return self.world.pick(Session, AsyncSession)(self.engine, **options)

    def key(self, session: Any, key: str, **options: Any) -> Any:
        return idempotent(session, key, **({"scope": self.scope, "result": Receipt} | options))

    def effects(self, key: str | None = None) -> int:
        """Return how many effects are committed."""
        query = select(func.count()).select_from(self.table)
        if key is not None:
            query = query.where(self.table.c.key == key)
        text = str(query.compile(compile_kwargs={"literal_binds": True}))
        row = self.admin.execute(text.encode()).fetchone()
        return int(row[0]) if row else 0

    def charge(self, key: str) -> Callable[[SyncSession], Receipt]:
        """Return work with one effect."""

        def work(session: SyncSession) -> Receipt:
            session.execute(insert(self.table).values(key=key))
            return Receipt(key)

        return work

    async def on(self, session: Any, work: Callable[[SyncSession], Any], who: Contender | None = None) -> Any:
        """Do some work with a session of this world."""
        who = who or self.world
        return await (who.call(session.run_sync, work) if self.world.is_async else who.call(work, session))

    def body(self, session: Any, work: Callable[[SyncSession], Any]) -> Callable[[], Any]:
        """Return what `run()` of this world takes."""
        if not self.world.is_async:
            return lambda: work(session)

        async def body() -> Any:
            return await session.run_sync(work)

        return body

    async def pay(
        self,
        key: str,
        *,
        work: Callable[[SyncSession], Any] | None = None,
        who: Contender | None = None,
        **options: Any,
    ) -> Any:
        """Do the work under a key in a separate session, and commit."""
        who = who or self.world
        async with who.enter(self.session()) as session:
            answer = await who.call(self.key(session, key, **options).run, self.body(session, work or self.charge(key)))
            await who.call(session.commit)
            return answer

    @asynccontextmanager
    async def at_work(self, key: str, who: Contender | None = None, **options: Any) -> AsyncIterator[Any]:
        """Run inside a key: it is claimed, the effect is written; the end of the block commits."""
        who = who or self.world
        async with who.enter(self.session()) as session:
            async with who.enter(self.key(session, key, **options)) as op:
                await self.on(session, self.charge(key), who)
                yield session
                op.complete(Receipt(key))
            await who.call(session.commit)

    def plain(self) -> Engine:
        """Return a sync engine on the same database, for the test itself."""
        url = f"postgresql+psycopg://{self.world.dsn.split('://', 1)[1]}"
        return create_engine(url, connect_args={"options": "-c lock_timeout=5s"})

    def blocked(self) -> int:
        """Return how many statements wait for any lock."""
        row = self.admin.execute(_BLOCKED).fetchone()
        return int(row[0]) if row else 0

    def waiters(self) -> int:
        """Return how many wait for a key."""
        row = self.admin.execute(_WAITERS).fetchone()
        return int(row[0]) if row else 0
