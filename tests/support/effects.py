"""Effects on every driver: attempts of a world, a provider that counts, and the row of a key as the server has it."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from psycopg.rows import namedtuple_row
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgfence.effects import AsyncIdempotentEffect, IdempotentEffect
from pgfence.idempotency import idempotent
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    import psycopg

    from support.worlds import Contender, World

    Work = Callable[[Any], Coroutine[Any, Any, Any]]

_ROW = """
    SELECT status, attempt, step, result, claim_id, owner, host, pid, fingerprint, locked_until,
        extract(epoch FROM locked_until - clock_timestamp())::float8 AS claim_left,
        extract(epoch FROM expires_at - clock_timestamp())::float8 AS record_left
    FROM pgfence_idempotency_key WHERE scope = %s AND key = %s
"""


class Provider:
    """The world outside: it counts what it is asked for, and does each key once."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def charge(self, key: str) -> str:
        with self._lock:
            self.asked[key] += 1
        return f"receipt of {key}"

    @property
    def done(self) -> int:
        """How many effects there are."""
        return len(self.asked)


class Gate:
    """Where work of either half waits until the test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        """Return when a caller waits here."""
        await eventually(self._reached.is_set, 30)

    async def wait(self) -> None:
        """Wait here, in work of a world."""
        self._reached.set()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            assert self._open.wait(30), "nobody opened the gate"
        else:
            await eventually(self._open.is_set, 30)


class Shop:
    """Effects of a world on one engine, in a separate scope."""

    def __init__(self, world: World, admin: psycopg.Connection[Any], **options: Any) -> None:
        self.world = world
        self.admin = admin
        self.engine = world.engine(**options)
        self.scope = f"orders:{secrets.token_hex(6)}"
        self.provider = Provider()

    def effect(self, key: str, **options: Any) -> Any:
        kind: Any = self.world.pick(IdempotentEffect, AsyncIdempotentEffect)
        return kind(options.pop("engine", self.engine), key, **({"scope": self.scope, "result": str} | options))

    async def run(self, key: str, work: Work | None = None, *, who: Contender | None = None, **options: Any) -> Any:
        """Run work, by default one charge in one step, under a key."""
        who = who or self.world
        return await who.call(self.effect(key, **options).run, self.body(work or self.charge))

    def body(self, work: Work) -> Callable[[Any], Any]:
        """Return what `run` of this world takes: the coroutine function itself, or one that runs it to its end at once."""
        return work if self.world.is_async else lambda attempt: _at_once(work(attempt))

    async def charge(self, attempt: Any) -> str:
        receipt: str = await self.step(attempt, "charge", self.provider.charge)
        return receipt

    async def step(self, attempt: Any, name: str, fn: Callable[[str], Any]) -> Any:
        """Do a step of an attempt of either half."""
        if not self.world.is_async:
            return attempt.step(name, fn)

        async def asynchronous(key: str) -> Any:
            return fn(key)

        return await attempt.step(name, asynchronous)

    @asynccontextmanager
    async def at_work(self, key: str, **options: Any) -> AsyncIterator[None]:
        """Run inside a key of `idempotent`; the end of the block commits its result."""
        async with self.world.enter(self.session()) as session:
            async with self.world.enter(idempotent(session, key, scope=self.scope, result=str, **options)) as op:
                assert not op.replayed
                yield
                op.complete("of the transaction")
            await self.world.call(session.commit)

    async def in_transaction(self, key: str, **options: Any) -> Any:
        """Return what `idempotent` finds under a key."""
        async with self.world.enter(self.session()) as session:
            async with self.world.enter(
                idempotent(session, key, scope=self.scope, result=str, timeout=0, **options)
            ) as op:
                assert op.replayed
                return op.result

    def session(self) -> Any:
        return self.world.pick(Session, AsyncSession)(self.engine)

    async def soon(self, result: Any) -> Any:
        """Return what a call of this world came to, in work of this world."""
        return await result if self.world.is_async else result

    def row(self, key: str) -> Any:
        """Return the row of a key as a named tuple; None without one."""
        cursor = self.admin.cursor(row_factory=namedtuple_row)
        return cursor.execute(_ROW.encode(), [self.scope, key]).fetchone()

    def lapse(self, key: str) -> None:
        """Let the claim of a key be over, as if its process had died and its time had passed."""
        self.set(key, "locked_until = clock_timestamp() - interval '1 s'")

    def expire(self, key: str) -> None:
        """Let the record of a key be over."""
        self.set(key, "expires_at = clock_timestamp() - interval '1 s'")

    def set(self, key: str, what: str) -> None:
        """Change the row of a key directly."""
        query = f"UPDATE pgfence_idempotency_key SET {what} WHERE scope = %s AND key = %s"
        assert self.admin.execute(query.encode(), [self.scope, key]).rowcount == 1


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("work of a sync world waited for a loop")
