"""Jobs that commit transactions and remember what was acknowledged."""

from __future__ import annotations

import random
import time
import uuid
from typing import TYPE_CHECKING, Any

from cluster import tables
from cluster.records import Answer, Refusal, Step, Write, describe_error
from pgfence import claim, idempotent, run_transaction

AFTER_FAILURE = 0.7
"""Seconds until the next attempt."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clients.halves import Half
    from cluster.records import Recorder


class Writers:
    """The jobs of one client that hold nothing."""

    def __init__(self, half: Half, recorder: Recorder, client: str) -> None:
        self._half = half
        self._recorder = recorder
        self._client = client

    async def count(self) -> None:
        """Increment a counter and insert a row in one transaction, again and again."""
        who = f"{self._client}/counter"
        while not self._half.is_stopping:
            values = {"id": str(uuid.uuid4()), "who": who}

            async def work(session: Any, values: dict[str, str] = values) -> None:
                await self._half.call(session.execute, tables.COUNT, {"who": who})
                await self._half.call(session.execute, tables.TRANSACTION, values)

            await self._commit("transaction", "", work, values["id"], who)
            await self._half.sleep(random.uniform(0.05, 0.3))

    async def change_pages(self) -> None:
        """Change versioned rows that other clients change too, and insert a row for each version."""
        who = f"{self._client}/page"
        while not self._half.is_stopping:
            row, name = str(uuid.uuid4()), f"page-{random.randrange(4)}"

            async def work(session: Any, row: str = row, name: str = name) -> None:
                page = await self._half.call(session.get_one, tables.Page, name)
                page.body = row
                await self._half.call(session.flush)
                values = {"id": row, "name": name, "version": page.version}
                await self._half.call(session.execute, tables.VERSION, values)

            await self._commit("version", name, work, row, who)
            await self._half.sleep(random.uniform(0.1, 0.5))

    async def claim_jobs(self) -> None:
        """Claim rows and do them in one transaction, again and again."""
        who = f"{self._client}/claim"
        while not self._half.is_stopping:
            row = str(uuid.uuid4())
            ran: list[bool] = []

            async def work(session: Any, row: str = row, ran: list[bool] = ran) -> None:
                new = tables.Job.state == "new"
                jobs = await self._half.call(claim, session, tables.Job, new, order_by=tables.Job.id, limit=2)
                for job in jobs:
                    job.state = "done"
                    ran.append(True)
                values = {"id": row, "jobs": [job.id for job in jobs]}
                await self._half.call(session.execute, tables.DONE, values)

            await self._commit("claim", "", work, row, who, ran)
            await self._half.sleep(random.uniform(0.2, 0.6))

    async def send_keys(self) -> None:
        """Send requests with idempotency keys, each until it has an answer, and half of them once more."""
        while not self._half.is_stopping:
            key, answers = str(uuid.uuid4()), 0
            wanted = random.choice((1, 2))
            while answers < wanted and not self._half.is_stopping:
                answers += await self._send(key)
                await self._half.sleep(random.uniform(0.05, 0.3))

    async def _send(self, key: str) -> bool:
        value = random.randrange(10**9)
        values: dict[str, Any] = {"key": key, "id": str(uuid.uuid4()), "value": value}
        ran: list[bool] = []

        async def work(session: Any) -> int:
            async def insert() -> int:
                ran.append(True)
                await self._half.call(session.execute, tables.KEY, values)
                return value

            call = idempotent(session, key, scope="cluster", payload={"key": key}, result=int)
            got: int = await self._half.call(call.run, self._half.adapt(insert))
            return got

        got = await self._commit("key", key, work, values["id"], f"{self._client}/key", ran)
        if got is not None:
            self._recorder.write(Answer, table="key", key=key, value=got)
        return got is not None

    async def _commit(
        self,
        table: str,
        name: str,
        work: Callable[..., Any],
        row: str,
        who: str,
        ran: list[bool] | None = None,
    ) -> Any:
        """Run a transaction, record its end, and return its result, or None if it failed."""
        started, got, failure = time.monotonic(), None, None
        try:
            got = await self._half.call(run_transaction, self._half.sessions, self._half.adapt(work))
        except Exception as error:
            failure = describe_error(error)
        inserted = True if ran is None else bool(ran)
        self._recorder.write(
            Write, table=table, id=row, name=name, who=who, started=started, failure=failure, ran=inserted
        )
        if failure is not None:
            await self._half.sleep(AFTER_FAILURE)
        return got

    async def run_effects(self) -> None:
        """Do effects with one step, each until it has an answer, and half of them once more."""
        effect = self._half.pick("IdempotentEffect")
        while not self._half.is_stopping:
            key, answers = str(uuid.uuid4()), 0
            wanted = random.choice((1, 2))

            async def work(attempt: Any, key: str = key) -> int:
                async def step(_: str) -> int:
                    self._recorder.write(Step, key=key)
                    return random.randrange(10**9)

                value: int = await self._half.call(attempt.step, "charge", self._half.adapt(step))
                await self._half.sleep(random.uniform(0, 0.8))
                return value

            while answers < wanted and not self._half.is_stopping:
                asked = time.monotonic()
                try:
                    run = effect(self._half.engine, key, scope="effects", result=int, ttl=6).run
                    got = await self._half.call(run, self._half.adapt(work))
                except Exception as error:
                    self._recorder.write(Refusal, kind="effect", name=key, asked=asked, failure=describe_error(error))
                    await self._half.sleep(AFTER_FAILURE)
                else:
                    answers += 1
                    self._recorder.write(Answer, table="effect", key=key, value=got)
                await self._half.sleep(random.uniform(0.1, 0.4))
